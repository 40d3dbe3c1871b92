"""Prompts, files of prompts and files of rows: the requests of a run."""

import codecs
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from levanter_infer.checkpoints.chat import CHAT_KEYS, check_chat_settings
from levanter_infer.columns import TYPES, Columns, is_json
from levanter_infer.config import RunConfig, check_keys
from levanter_infer.engine.params import SamplingParams, brief, field_names
from levanter_infer.engine.request import MAX_ID_CHARS, Request
from levanter_infer.io.paths import local_path

MAX_LINE_BYTES = 2**24
MAX_ROWS = 1_000_000
MAX_N = 4096
"""Samples of one row, at most; the engine may allow fewer."""
_JSONL = (".jsonl", ".ndjson")
_OF_BATCHES = (".parquet", ".gz", ".bz2", ".xz", ".zst", ".zip")
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
ROW_POLICIES = ("cache_salt", "priority", "timeout_s")
"""Keys of a row that set fields of its request, by their names."""
ROW_KEYS = (*_PROMPT_KEYS, "id", "sampling", *ROW_POLICIES, *CHAT_KEYS)
_NOT_CARRIED = (*ROW_KEYS, "custom_id", "body")  # the last two make a row a line of OpenAI's batch format
CARRY_REMEDY = "; a column of your own goes to the output if output.carry names it: [NAME]"
_COMPLETIONS = {"prompt": "completion", "prompt_token_ids": "completion_token_ids", "messages": "completion"}
"""Key of the completion, by key of the prompt."""
_SCORED_CHAT_KEYS = ("tools", "chat_template_kwargs")
_SCORED_ROW_KEYS = (*_PROMPT_KEYS, "id", "cache_salt", "completion", "completion_token_ids", *_SCORED_CHAT_KEYS)
IDS_DIFFER = "ids must differ, and the default id of a row is its number, from 0: rename one, or leave all ids out"
_NONE: Mapping[str, Any] = MappingProxyType({})
_MAX_TOKEN = 2**31


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the input: a request, or an error."""

    id: str
    request: Request | None
    error: str | None = None
    completion: str | list[int] | None = None
    """Continuation of the prompt to be scored; token ids behind token ids. None: the row is sampled."""
    carried: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Columns that its output rows carry unchanged."""


def read_rows(config: RunConfig, *, completions: bool = False, columns: Columns | None = None) -> list[Row]:
    """The requests of a run, in order.

    A malformed row has an error and no request. The engine derives a seed for every request from `sampling.seed` of the
    configuration; the `seed` of a row is its request's.

    Args:
        completions: rows may hold a completion, and no sampling parameters.
        columns: columns of the output; a row that asks for others is refused. None: there is no output.
    Raises: ValueError if the file cannot be read at all, or has too many rows.
    """
    if columns is not None and columns.carry and not str(config.prompts_file).lower().endswith(_JSONL):
        raise ValueError(no_columns(config.prompts_file or "prompts"))
    chat = {key: value for key, value in chat_settings(config).items() if not completions or key in _SCORED_CHAT_KEYS}
    parser = RowParser(dataclasses.replace(config.sampling, seed=None), chat, columns, completions)
    if config.prompts_file is not None:
        contents = _read_file(local_path(config.prompts_file, "prompts_file"), as_chat=bool(config.chat))
    elif config.prompts is not None:
        prompts = enumerate(config.prompts)
        contents = ((f"prompts[{i}]", _as_chat(p) if config.chat else {"prompt": p}) for i, p in prompts)
    else:
        contents = ((f"chat[{i}]", {"messages": chat}) for i, chat in enumerate(config.chats))
    rows: list[Row] = []
    seen: dict[str, str] = {}
    unknown: list[tuple[int, str]] = []
    named = False
    for where, content in contents:
        number = len(rows)
        if number == MAX_ROWS:
            raise ValueError(f"{where}: more than {MAX_ROWS} rows; split the file")
        named = named or given_id(content) is not None
        row = parser.row(content, str(number), where)
        rows.append(row)
        if has_unknown_id(content):
            unknown.append((number, where))
            continue
        if row.id in seen and row.error is None:
            error = f"{where}: id {brief(row.id)} is that of {seen[row.id]} too; {IDS_DIFFER}"
            rows[-1] = dataclasses.replace(row, request=None, error=error)
        seen.setdefault(row.id, where)
    if not rows:
        raise ValueError(f"{config.prompts_file} has no rows; expected at least one prompt")
    for number, where in unknown if named else ():
        name = unknown_id(number)
        rows[number] = dataclasses.replace(rows[number], id=where if name in seen else name)
    return rows


def columns_of(config: RunConfig) -> Columns:
    """The columns of a run's output.

    Raises: ValueError for a name that is no optional column, or one that cannot be carried from the input.
    """
    if config.output is None:
        return Columns(config.sampling)
    for name in config.output.carry:
        what = "column of the output" if name in TYPES else "key of the request" if name in _NOT_CARRIED else None
        if what is not None:
            raise ValueError(f"output.carry names {name}, which is a {what}; give your column another name")
        if config.output.carry.count(name) > 1:
            raise ValueError(f"output.carry names {brief(name)} twice; expected each column once")
    return Columns(config.sampling, config.output.include, config.output.carry)


def no_columns(source: str) -> str:
    """Message for columns to carry from plain prompts."""
    return f"output.carry with {source}: plain prompts have no columns; give JSONL, or leave it out"


def chat_settings(config: RunConfig) -> dict[str, Any]:
    """Defaults of a run for rendering chats; rows may override them."""
    return {key: getattr(config, key) for key in CHAT_KEYS if getattr(config, key) is not None}


def _as_chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def without_mark(line: bytes) -> bytes:
    """The first line of a file without a byte order mark; one that is too long stays too long."""
    return line if len(line) > MAX_LINE_BYTES else line.removeprefix(codecs.BOM_UTF8)


def _read_file(path: Path, *, as_chat: bool) -> Iterator[tuple[str, Any]]:
    """(where, content) of each line that is not blank; an exception as content is the error of that row."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise ValueError(f"prompts_file {path}: expected .jsonl with one row a line, or text with one prompt a line")
    if suffix in _OF_BATCHES:
        raise ValueError(f"prompts_file {path}: levanter_infer.batch reads {suffix}; expected .jsonl, or text, here")
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                text = without_mark(line) if number == 1 else line
                if text.strip() or len(text) > MAX_LINE_BYTES:  # of which more than the spaces may be left
                    content = parse_line(text, jsonl=suffix in _JSONL, as_chat=as_chat)
                    yield f"{path}:{number}", content
                while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n") and line:
                    line = file.readline(MAX_LINE_BYTES + 1)
    except OSError as e:
        raise ValueError(f"cannot read prompts_file {path}: {e.strerror}") from e


class RefusedRow(ValueError):
    """Error of one row.

    Args:
        id: the id that the row gives itself, if it is known.
    """

    def __init__(self, message: str, id: str | None = None):
        super().__init__(message)
        self.id = id


def parse_line(line: bytes, *, jsonl: bool, as_chat: bool) -> Any:
    """Content of a line of a prompts file, or the ValueError that says what is wrong with it."""
    if len(line) > MAX_LINE_BYTES:
        return RefusedRow(f"the line is longer than {MAX_LINE_BYTES} bytes; shorten it")
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as e:
        return RefusedRow(f"the line is not UTF-8: {e}; save the file as UTF-8")
    try:
        content = parse_json(text, "the line") if jsonl else {"prompt": text}
    except ValueError as e:
        return e
    return chat_of(content) if as_chat else content


def parse_json(text: str, what: str) -> Any:
    """The value of JSON text. Raises: RefusedRow naming `what`, and what is wrong with it or a value in it."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RefusedRow as e:
        raise RefusedRow(f"{what} {e}") from None
    except json.JSONDecodeError as e:
        raise RefusedRow(f"{what} is not JSON: {e}; expected one JSON object") from None
    except RecursionError:
        raise RefusedRow(f"{what} is not JSON that can be read: it is nested too deeply; make it flatter") from None
    except ValueError:  # of `int`
        most = sys.get_int_max_str_digits()
        raise RefusedRow(
            f"{what} is not JSON that can be read: a number in it has more than {most} digits; expected numbers of at "
            "most 64 bits"
        ) from None


def _no_constant(name: str) -> Any:
    raise RefusedRow(f"is not JSON: it holds {name}, which JSON does not have; write a number or null, or leave it out")


def chat_of(content: Any) -> Any:
    """A row with its text prompt turned into a user message; other rows as they are."""
    if isinstance(content, dict) and isinstance(content.get("prompt"), str):
        if content.get("messages") is None:  # otherwise there are two prompts, which is refused as such
            content |= _as_chat(content.pop("prompt"))
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise RefusedRow(f"is not JSON: a key is written twice in an object: {brief(twice)}; write it once")
    return content


def given_id(content: Any) -> str | None:
    """The id that a row gives itself, also a malformed one; None without a valid id."""
    if isinstance(content, RefusedRow):
        return content.id
    given = content.get("id") if isinstance(content, dict) else None
    return str(given) if _is_id(given) else None


def _is_id(value: Any) -> bool:
    if type(value) is int:
        return value.bit_length() < 3 * MAX_ID_CHARS  # so that it has fewer decimal digits
    return isinstance(value, str) and len(value) <= MAX_ID_CHARS


def has_unknown_id(content: Any) -> bool:
    """Whether it is unknown which id a row gives itself: it cannot be read, or the id is malformed."""
    return given_id(content) is None and (not isinstance(content, dict) or content.get("id") is not None)


def unknown_id(number: int) -> str:
    """The id of a row of which `has_unknown_id` is true, where other rows give themselves ids, which may be numbers."""
    return f"row {number}"


def row_id(content: Any, number: int, *, named: bool) -> str:
    """The id of a row, also of a malformed one: the one that it gives itself, or its number.

    Args:
        number: of the row, from 0.
        named: whether rows give themselves ids: one whose id is unknown has `unknown_id` then.
    """
    given = given_id(content)
    if given is not None:
        return given
    return unknown_id(number) if named and has_unknown_id(content) else str(number)


@dataclasses.dataclass(frozen=True)
class RowParser:
    """Makes the rows of one input."""

    base: SamplingParams
    """Sampling parameters that a row may override."""
    chat: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Defaults for rendering chats (`chat_settings`); rows without a chat ignore them."""
    columns: Columns | None = None
    """Columns of the output, if there is one; a row that asks for others is refused."""
    completions: bool = False
    """Rows may hold a completion, and no sampling parameters."""

    def row(self, content: Any, default_id: str, where: str) -> Row:
        """The request of a row; a malformed row has an error instead.

        Args:
            content: as `parse_line` returns it.
            default_id: the id of a row that gives itself none.
            where: names the row in its error.
        """
        given = given_id(content)
        name = default_id if given is None else given
        carry = () if self.columns is None else self.columns.carry
        carried = {key: content[key] for key in carry if key in content} if isinstance(content, dict) else _NONE
        wrong = [key for key, value in carried.items() if not is_json(value)]
        carried = {key: value for key, value in carried.items() if key not in wrong}
        try:
            if isinstance(content, ValueError):
                raise content
            if wrong:
                raise ValueError(f"{', '.join(wrong)} holds a number beyond 64-bit floats; write null, or a text")
            request = self._request(content, name, carry)
            if self.columns is not None:
                self.columns.check(request.sampling or self.base)
            return Row(name, request, None, _completion(content) if self.completions else None, carried)
        except ValueError as e:
            return Row(name, None, f"{where}: {e}", carried=carried)

    def _request(self, content: Any, name: str, carry: Sequence[str]) -> Request:
        if not isinstance(content, dict):
            expected = "expected an object with prompt, prompt_token_ids or messages"
            raise ValueError(f"the row is {brief(content)}; {expected}")
        known = _SCORED_ROW_KEYS if self.completions else (*ROW_KEYS, *carry)
        check_keys(content, known, "", "" if self.completions else CARRY_REMEDY)
        given = [key for key in _PROMPT_KEYS if content.get(key) is not None]
        if len(given) != 1:
            raise ValueError(f"expected one of prompt, prompt_token_ids, messages; got {' and '.join(given) or 'none'}")
        kind, value = given[0], content[given[0]]
        if not isinstance(value, str if kind == "prompt" else list):
            raise ValueError(f"{kind} is {brief(value)}; expected a {'string' if kind == 'prompt' else 'list'}")
        if kind == "prompt_token_ids" and isinstance(value, list):
            _check_ids(value)
        if content.get("id") is not None and not _is_id(content["id"]):
            expected = f"a string of at most {MAX_ID_CHARS} characters or a whole number"
            raise ValueError(f"id is {brief(content['id'])}; expected {expected}")
        sampling = self.base if content.get("sampling") is None else merge_sampling(self.base, content["sampling"])
        for key in ("n", "best_of", "num_beams"):
            if (getattr(sampling, key) or 0) > MAX_N:
                raise ValueError(f"sampling.{key}={getattr(sampling, key)}; expected at most {MAX_N}")
        policies = {key: content[key] for key in ROW_POLICIES if key in known and content.get(key) is not None}
        prompt: dict[str, Any] = {kind: value}
        return Request(**prompt, sampling=sampling, id=name, **policies, **_chat_keys(content, kind, self.chat))


def _completion(content: dict[str, Any]) -> str | list[int] | None:
    """Requires: the row has one prompt."""
    kind = next(key for key in _PROMPT_KEYS if content.get(key) is not None)
    for key in set(_COMPLETIONS.values()) - {_COMPLETIONS[kind]}:
        if content.get(key) is not None:
            raise ValueError(f"{key} behind {kind}; expected {_COMPLETIONS[kind]}")
    key = _COMPLETIONS[kind]
    value, expected = content.get(key), list if key == "completion_token_ids" else str
    if value is not None and (not isinstance(value, expected) or not value):
        what = "a list of at least one token id" if expected is list else "a string of at least one character"
        raise ValueError(f"{key} is {brief(value)}; expected {what}")
    return value


def _check_ids(ids: list[Any]) -> None:
    """Raises: ValueError for ids that no vocabulary can hold."""
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < _MAX_TOKEN)):
        return
    i, wrong = next((i, v) for i, v in enumerate(ids) if type(v) is not int or not 0 <= v < _MAX_TOKEN)
    raise ValueError(f"prompt_token_ids[{i}] is {brief(wrong)}; expected a token id, a whole number from 0")


def _chat_keys(content: dict[str, Any], kind: str, chat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for rendering the chat of a row: its own override those of all chats."""
    own = {key: content[key] for key in CHAT_KEYS if content.get(key) is not None}
    if kind != "messages":
        if own:
            raise ValueError(f"{next(iter(own))} with {kind}; it is for chats: leave it out, or give messages")
        return {}
    check_chat_settings(own)
    settings = {**chat, **own}
    check_chat_settings(settings)
    if "chat_template_kwargs" in own and "chat_template_kwargs" in chat:
        settings["chat_template_kwargs"] = {**chat["chat_template_kwargs"], **own["chat_template_kwargs"]}
    return settings


def merge_sampling(base: SamplingParams, overrides: Any) -> SamplingParams:
    """`base` with a row's own parameters. Raises: ValueError naming an unknown or wrong one."""
    if not isinstance(overrides, dict):
        raise ValueError(f"sampling is {brief(overrides)}; expected an object of sampling parameters")
    values = {name: getattr(base, name) for name in field_names(SamplingParams)}
    return SamplingParams.from_dict(values | overrides)
