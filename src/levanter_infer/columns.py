"""`Columns`: the columns of output rows, and the values of a result in them.

All rows of an output have the same columns in the same order, and each column has one type, also in rows that failed.
Readers that infer types (pyarrow.json, datasets, polars) then find the same types in every file: text and lists are
never null but empty, missing numbers are null, and no object has keys that depend on the data.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import Completion, RequestOutput
from levanter_infer.policies import FinishReason

TYPES = {
    "id": "text",
    "index": "int32",
    "prompt": "text",
    "prompt_token_ids": "ints",
    "text": "text",
    "token_ids": "ints",
    "logprobs": "floats",
    "finish_reason": "text",
    "stop_reason": "text",
    "seed": "uint64",
    "seed_str": "text",
    "top_logprobs": "tops",
    "processed_logprobs": "floats",
    "cumulative_logprob": "float64",
    "token_versions": "ints",
    "score": "float32",
    "routed_experts": "experts",
    "prompt_logprobs": "floats",
    "prompt_top_logprobs": "tops",
    "num_cached_tokens": "int32",
    "error": "text",
}
"""All columns in their order, each with its type: text, a number (int32, uint64, float32, float64), a list (ints,
floats), tops, a list of {token_id, logprob} per position, or experts, a list [position][layer][chosen] of ints."""
OPTIONAL = (
    *("logprobs", "top_logprobs", "processed_logprobs", "cumulative_logprob", "token_versions", "score"),
    "routed_experts",
    *("prompt_logprobs", "prompt_top_logprobs", "num_cached_tokens"),
)
"""Columns that exist if `sampling` or `output.include` asks for them. All others always exist."""
_NONE: Mapping[str, Any] = MappingProxyType({})
_MAX_TOKEN = 2**31
_SURROGATES = {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
"""Halves of surrogate pairs, which UTF-8 cannot hold, as JSON writes them."""


def empty(name: str) -> Any:
    """Value of a column without content."""
    return {"text": "", "ints": [], "floats": [], "tops": [], "experts": []}.get(TYPES[name])


def asked_columns(sampling: SamplingParams) -> tuple[str, ...]:
    """Optional columns that parameters ask for."""
    asked = {
        "logprobs": sampling.logprobs is not None,
        "top_logprobs": bool(sampling.logprobs),
        "score": sampling.num_beams > 1,
        "routed_experts": sampling.return_routed_experts,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "prompt_top_logprobs": bool(sampling.prompt_logprobs),
    }
    return tuple(name for name, is_asked in asked.items() if is_asked)


def check_include(names: Iterable[Any]) -> None:
    """Raises: ValueError for a name that is no optional column."""
    for name in names:
        if name not in OPTIONAL:
            reason = "is always there; leave it out" if name in TYPES else f"expected some of {', '.join(OPTIONAL)}"
            raise ValueError(f"output.include names {brief(name)}: {reason}")


class Columns:
    """The columns of one output.

    Args:
        sampling: parameters of the whole run, some of which ask for columns.
        include: further optional columns.
        carry: columns of the input rows, appended unchanged.
    Raises: ValueError for a name that is no optional column.
    """

    def __init__(self, sampling: SamplingParams, include: Sequence[str] = (), carry: Sequence[str] = ()):
        check_include(include)
        self.carry = tuple(carry)
        wanted = {*asked_columns(sampling), *include}
        self.names = tuple(name for name in TYPES if name not in OPTIONAL or name in wanted)

    def check(self, sampling: SamplingParams) -> None:
        """Raises: ValueError if parameters of one row ask for a column that does not exist."""
        missing = [name for name in asked_columns(sampling) if name not in self.names]
        if missing:
            raise ValueError(
                f"it asks for {' and '.join(missing)}, and the rows of this output have no such column; add it to "
                f"all of them with output.include: [{', '.join(missing)}], or leave it out of the row"
            )

    def rows(self, output: RequestOutput, carried: Mapping[str, Any] = _NONE) -> Iterator[dict[str, Any]]:
        """Rows of one request's result, one per sample, or one with `error` if it failed. UTF-8 can hold their text.

        Args:
            carried: values of the carried columns of the input row; missing ones become null.
        """
        for row in self._rows(output, carried):
            yield {name: as_utf8(value) if TYPES.get(name, "text") == "text" else value for name, value in row.items()}

    def _rows(self, output: RequestOutput, carried: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        rest = {name: carried.get(name) for name in self.carry}
        common = {name: _OF_REQUEST[name](output) for name in self.names if name in _OF_REQUEST}
        if output.error is not None:
            common["prompt_token_ids"] = _valid_ids(output.prompt_token_ids)
            failed = common | {"finish_reason": FinishReason.ERROR, "error": output.error or "failed"}
            yield {name: failed.get(name, empty(name)) for name in self.names} | rest
            return
        for c in output.completions:
            yield {name: common[name] if name in common else _OF_SAMPLE[name](c) for name in self.names} | rest


def stop_reason_text(reason: str | int | Sequence[int] | None) -> str:
    """Stop reason of a sample as text: a stop string, a token id in decimal, or several as a JSON list; else ""."""
    if reason is None or isinstance(reason, str):
        return reason or ""
    return str(int(reason)) if isinstance(reason, (int, np.integer)) else json.dumps([int(t) for t in reason])


def numbers(values: Iterable[float]) -> list[float | None]:
    """Numbers as JSON writes them."""
    return [_number_or_null(value) for value in values]


def tops(positions: Iterable[Mapping[int, float]]) -> list[list[dict[str, Any]]]:
    """Likeliest tokens and their log probabilities, as JSON writes them; at each position the best first."""
    return [
        [{"token_id": int(token), "logprob": _number_or_null(value)} for token, value in position.items()]
        for position in positions
    ]


def _number_or_null(value: float) -> float | None:
    """The shortest decimal that reads back as the same f32; JSON has no infinities."""
    return float(str(np.float32(value))) if math.isfinite(value) else None


def _finite_or_null(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _valid_ids(ids: Iterable[Any]) -> list[int]:
    """The token ids of a prompt that was refused, perhaps because they are none."""
    ids = list(ids)
    return ids if all(type(token) is int and 0 <= token < _MAX_TOKEN for token in ids) else []


_OF_REQUEST: dict[str, Callable[[RequestOutput], Any]] = {
    "id": lambda output: output.id,
    "prompt": lambda output: output.prompt or "",
    "prompt_token_ids": lambda output: list(output.prompt_token_ids),
    "prompt_logprobs": lambda output: numbers(() if output.prompt_logprobs is None else output.prompt_logprobs),
    "prompt_top_logprobs": lambda output: tops(output.prompt_top_logprobs or ()),
    "num_cached_tokens": lambda output: output.num_cached_tokens or 0,
}
_OF_SAMPLE: dict[str, Callable[[Completion], Any]] = {
    "index": lambda c: c.index,
    "text": lambda c: c.text or "",
    "token_ids": lambda c: c.token_ids,
    "logprobs": lambda c: numbers(c.logprobs),
    "finish_reason": lambda c: c.finish_reason,
    "stop_reason": lambda c: stop_reason_text(c.stop_reason),
    "seed": lambda c: c.seed,
    "seed_str": lambda c: str(c.seed),
    "top_logprobs": lambda c: tops(c.top_logprobs or ()),
    "processed_logprobs": lambda c: numbers(c.processed_logprobs),
    "cumulative_logprob": lambda c: _finite_or_null(c.cumulative_logprob),
    "token_versions": lambda c: [int(version) for version in c.token_versions],
    "score": lambda c: None if c.score is None else _number_or_null(c.score),
    "routed_experts": lambda c: [] if c.routed_experts is None else c.routed_experts.tolist(),
    "error": lambda c: c.error or "",
}


def encode_row(row: Mapping[str, Any]) -> str:
    """A row as one line of JSON that UTF-8 can hold.

    A value that JSON does not have never stops the writer of many rows: it is left empty, and the row is an error.
    """
    try:
        return encode_json(row)
    except (ValueError, TypeError, RecursionError) as e:
        kept = {str(key): value if is_json(value) else _emptied(value) for key, value in row.items()}
        wrong = ", ".join(str(key) for key, value in row.items() if not is_json(value))
        return encode_json(kept | {"error": f"the row cannot be written as JSON: {wrong}: {e}; please report this"})


def encode_json(value: Any) -> str:
    """JSON in one line, which UTF-8 can hold. Raises: ValueError, TypeError or RecursionError for what is no JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_SURROGATES)


def as_utf8(value: Any) -> Any:
    """A value with half of a surrogate pair, in any of its texts, as the six characters of its escape. JSON can write
    it, but pyarrow.json reads no file that holds one."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {as_utf8(key): as_utf8(inner) for key, inner in value.items()}
    return [as_utf8(inner) for inner in value] if isinstance(value, list) else value


def is_json(value: Any) -> bool:
    """Whether `encode_json` can write a value."""
    try:
        encode_json(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _emptied(value: Any) -> Any:
    return [] if isinstance(value, (list, tuple)) else "" if isinstance(value, (str, bytes)) else None
