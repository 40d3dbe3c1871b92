"""Prompts files in, output rows out, and completions made safe for a terminal."""

import codecs
import contextlib
import dataclasses
import json
import math
import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing keeps two runs apart there
    fcntl = None

from levanter_infer.config import RunConfig, check_keys
from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import Request, RequestOutput

MAX_LINE_BYTES = 2**24
MAX_ROWS = 1_000_000
MAX_N = 4096
"""Samples of one row, at most; the engine may allow fewer."""
NOT_FINITE = "the model's logits are not finite"
"""Why a sample ended in "error"."""
_JSONL = (".jsonl", ".ndjson")
_ROW_KEYS = ("prompt", "prompt_token_ids", "messages", "id", "sampling", "cache_salt", "priority", "timeout_s")
_PROMPT_KEYS, _POLICY_KEYS = _ROW_KEYS[:3], _ROW_KEYS[-3:]
_COMPLETIONS = {"prompt": "completion", "prompt_token_ids": "completion_token_ids", "messages": "completion"}
"""In which key a completion stands beside a prompt."""
_SCORED_ROW_KEYS = (*_PROMPT_KEYS, "id", "cache_salt", "completion", "completion_token_ids")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the input: a request, or why there is none."""

    id: str
    request: Request | None
    error: str | None = None
    completion: str | list[int] | None = None
    """What follows the prompt, where it is to be scored and not sampled; token ids behind token ids."""


def read_rows(config: RunConfig, *, completions: bool = False) -> list[Row]:
    """The requests of a run, in order.

    A row that is wrong becomes an error of that row. `sampling.seed` of the configuration is left to the engine, which
    derives a seed of its own for every request; the `seed` of a row is its request's.

    Args:
        completions: rows may hold a completion, and no parameters of sampling.
    Raises: ValueError if the file cannot be read at all, or has too many rows.
    """
    base = dataclasses.replace(config.sampling, seed=None)
    if config.prompts_file is not None:
        contents = _read_file(Path(config.prompts_file), as_chat=bool(config.chat))
    elif config.prompts is not None:
        prompts = enumerate(config.prompts)
        contents = ((f"prompts[{i}]", _as_chat(p) if config.chat else {"prompt": p}) for i, p in prompts)
    else:
        contents = ((f"chat[{i}]", {"messages": chat}) for i, chat in enumerate(config.chats))
    rows: list[Row] = []
    seen: dict[str, str] = {}
    for where, content in contents:
        if len(rows) == MAX_ROWS:
            raise ValueError(f"{where}: more than {MAX_ROWS} rows; split the file")
        row = make_row(content, str(len(rows)), where, base, completions=completions)
        if row.id in seen and row.error is None:
            row = Row(row.id, None, f"{where}: id {brief(row.id)} is that of {seen[row.id]} too; ids must differ")
        seen.setdefault(row.id, where)
        rows.append(row)
    if not rows:
        raise ValueError(f"{config.prompts_file} has no rows; expected at least one prompt")
    return rows


def _as_chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def _read_file(path: Path, *, as_chat: bool) -> Iterator[tuple[str, Any]]:
    """(where, content) of each line that is not blank; a content that is an exception is that row's error."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise ValueError(f"prompts_file {path}: expected .jsonl with one row a line, or text with one prompt a line")
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    content = parse_line(line, jsonl=suffix in _JSONL, as_chat=as_chat)
                    yield f"{path}:{number}", content
                while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n") and line:
                    line = file.readline(MAX_LINE_BYTES + 1)
    except OSError as e:
        raise ValueError(f"cannot read prompts_file {path}: {e.strerror}") from e


def parse_line(line: bytes, *, jsonl: bool, as_chat: bool) -> Any:
    """What a line of a prompts file holds, or the ValueError that says what is wrong with it."""
    if len(line) > MAX_LINE_BYTES:
        return ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        text = line.decode("utf-8").rstrip("\r\n")
        content = json.loads(text, object_pairs_hook=_unique) if jsonl else {"prompt": text}
    except UnicodeDecodeError as e:
        return ValueError(f"the line is not UTF-8: {e}")
    except (ValueError, RecursionError) as e:
        return ValueError(f"the line is not JSON: {e}")
    return chat_of(content) if as_chat else content


def chat_of(content: Any) -> Any:
    """A row whose text prompt is what a user says in a chat; any other as it is."""
    if isinstance(content, dict) and isinstance(content.get("prompt"), str):
        if content.get("messages") is None:  # otherwise there are two prompts, which is refused as such
            content |= _as_chat(content.pop("prompt"))
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is written twice in an object")
    return content


def row_id(content: Any, default_id: str) -> str:
    """What names a row, also one that is wrong."""
    given = content.get("id") if isinstance(content, dict) else None
    return str(given) if isinstance(given, (str, int)) else default_id


def make_row(content: Any, default_id: str, where: str, base: SamplingParams, *, completions: bool = False) -> Row:
    """The request that a row asks for; what is wrong with it becomes its error.

    Args:
        content: as `parse_line` gives it.
        where: says in the error which row it is.
        base: parameters that the row does not give.
        completions: it may hold a completion, and no parameters of sampling.
    """
    default_id = row_id(content, default_id)
    try:
        if isinstance(content, ValueError):
            raise content
        request = _make_request(content, default_id, base, _SCORED_ROW_KEYS if completions else _ROW_KEYS)
        return Row(default_id, request, completion=_completion(content) if completions else None)
    except ValueError as e:
        return Row(default_id, None, f"{where}: {e}")


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


def _make_request(content: Any, row_id: str, base: SamplingParams, known: Sequence[str]) -> Request:
    if not isinstance(content, dict):
        raise ValueError(f"the row is {brief(content)}; expected an object with prompt, prompt_token_ids or messages")
    check_keys(content, known, "")
    given = [key for key in _PROMPT_KEYS if content.get(key) is not None]
    if len(given) != 1:
        raise ValueError(f"expected one of prompt, prompt_token_ids, messages; got {' and '.join(given) or 'none'}")
    kind, value = given[0], content[given[0]]
    if kind == "prompt" and not isinstance(value, str):
        raise ValueError(f"prompt is {brief(value)}; expected a string")
    if kind != "prompt" and not isinstance(value, list):
        raise ValueError(f"{kind} is {brief(value)}; expected a list")
    if type(content.get("id", "")) not in (str, int):
        raise ValueError(f"id is {brief(content['id'])}; expected a string or a whole number")
    sampling = base
    if content.get("sampling") is not None:
        sampling = merge_sampling(base, content["sampling"])
    for name in ("n", "best_of", "num_beams"):
        if (getattr(sampling, name) or 0) > MAX_N:
            raise ValueError(f"sampling.{name}={getattr(sampling, name)}; expected at most {MAX_N}")
    prompt: dict[str, Any] = {kind: value}
    policies = {key: content[key] for key in _POLICY_KEYS if key in known and content.get(key) is not None}
    return Request(**prompt, sampling=sampling, id=row_id, **policies)


def merge_sampling(base: SamplingParams, overrides: Any) -> SamplingParams:
    """`base` with a row's own parameters. Raises: ValueError naming an unknown or wrong one."""
    if not isinstance(overrides, dict):
        raise ValueError(f"sampling is {brief(overrides)}; expected an object of sampling parameters")
    values = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    return SamplingParams.from_dict(values | overrides)


# Output


def output_rows(output: RequestOutput, sampling: SamplingParams | None) -> Iterator[dict[str, Any]]:
    """Rows of one request's result, one per sample, or one with `error` if it failed.

    Args:
        sampling: what it asked for; decides which log probabilities are in the rows.
    """
    common = {"id": output.id, "prompt": output.prompt, "prompt_token_ids": list(output.prompt_token_ids)}
    if output.error is not None:
        empty = {"index": None, "text": None, "token_ids": [], "logprobs": None, "finish_reason": "error", "seed": None}
        yield _ordered({**common, **empty}) | {"error": output.error}
        return
    wanted = None if sampling is None else sampling.logprobs
    for c in output.completions:
        row = _ordered(
            {
                **common,
                "index": c.index,
                "text": c.text,
                "token_ids": c.token_ids,
                "logprobs": None if wanted is None else numbers(c.logprobs),
                "finish_reason": c.finish_reason,
                "seed": c.seed,
            }
        )
        if wanted and c.top_logprobs is not None:
            row["top_logprobs"] = tops(c.top_logprobs)
        if c.finish_reason == "error":
            row["error"] = NOT_FINITE
        if c.score is not None:
            row["score"] = _number_or_null(c.score)
        if output.prompt_logprobs is not None:
            row["prompt_logprobs"] = numbers(output.prompt_logprobs)
        if output.prompt_top_logprobs is not None:
            row["prompt_top_logprobs"] = tops(output.prompt_top_logprobs)
        yield row


def _ordered(values: Mapping[str, Any]) -> dict[str, Any]:
    names = ("id", "index", "prompt", "prompt_token_ids", "text", "token_ids", "logprobs", "finish_reason", "seed")
    return {name: values[name] for name in names}


def numbers(values: Iterable[float]) -> list[float | None]:
    """As JSON writes them."""
    return [_number_or_null(value) for value in values]


def tops(places: Iterable[Mapping[int, float]]) -> list[dict[str, float | None]]:
    """Likeliest tokens and their log probabilities, as JSON writes them."""
    return [{str(token): _number_or_null(value) for token, value in place.items()} for place in places]


def _number_or_null(value: float) -> float | None:
    """The shortest decimal that reads back as the same f32; JSON has no infinities."""
    return float(str(np.float32(value))) if math.isfinite(value) else None


def encode_row(row: Mapping[str, Any]) -> str:
    """A row as JSON in one line, which UTF-8 can hold."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False).translate(_SURROGATES)


class RowWriter:
    """Writes rows, or other text, beside an output file, which appears complete or not at all.

    Rows go to FILE.partial, which takes FILE's name in `commit`. Used as a context manager: without a commit the
    partial file is removed. One left by a run that was killed is taken over.

    Args:
        path: the output file.
        overwrite: replace what is there.
    Raises: ValueError if the file exists, cannot be written, or another run is writing it.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False):
        self.path = Path(path)
        if not self.path.name:
            raise ValueError(f"output {str(path)!r} has no file name; expected a file")
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._overwrite = overwrite
        try:
            _check_replaceable(self.path, overwrite)
            self._file: IO[str] | None = _open_alone(self._partial)
        except BlockingIOError:
            raise ValueError(f"another run is writing {self._partial}; wait for it or give another name") from None
        except OSError as e:
            raise ValueError(f"cannot write output {self.path}: {e.strerror}") from e

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows. Raises: ValueError if the disk does not take them."""
        for row in rows:
            self.write_text(encode_row(row) + "\n")

    def write_text(self, text: str) -> None:
        """Append text of another kind. Raises: ValueError if the disk does not take it."""
        assert self._file is not None, "written after commit"
        try:
            self._file.write(text)
        except OSError as e:
            raise ValueError(f"cannot write output {self.path}: {e.strerror}") from e

    def commit(self) -> None:
        """Make the file durable under its name. Raises: ValueError if somebody else has made one meanwhile."""
        assert self._file is not None, "committed twice"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            if self._overwrite:
                os.replace(self._partial, self.path)
            else:
                rename_new(self._partial, self.path)
        except FileExistsError:
            self._close()
            raise ValueError(f"output {self.path} appeared meanwhile; the rows are in {self._partial}") from None
        except OSError as e:
            raise ValueError(f"cannot write output {self.path}: {e.strerror}") from e
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._partial)
            self._close()


def _check_replaceable(path: Path, overwrite: bool) -> None:
    """Raises: ValueError if rows may not take the place of what is there; OSError if nobody can tell."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode) or (stat.S_ISLNK(mode) and path.is_dir()):
        raise ValueError(f"output {path} is a directory; expected a file")
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise ValueError(f"output {path} is a device or a pipe; expected a file, which is replaced when all is done")
    if not overwrite:
        raise ValueError(f"output {path} exists; give another name, or --overwrite to replace it")


def rename_new(old: Path, new: Path) -> None:
    """Rename, but not over something else. Raises: FileExistsError; OSError."""
    try:
        os.link(old, new)  # unlike a rename, this fails if the name is taken
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: take the name first
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        os.replace(old, new)
    else:
        os.unlink(old)


def _open_alone(path: Path) -> IO[str]:
    """Open `path` empty, for this process alone. Raises: BlockingIOError if another has it; OSError."""
    descriptor = lock_file(path)
    os.ftruncate(descriptor, 0)
    return os.fdopen(descriptor, "w", encoding="utf-8", newline="\n")


def lock_file(path: Path) -> int:
    """Open `path`, made if need be, for this process alone. It is free again once closed, or this process has died.

    Returns: a file descriptor at its beginning.
    Raises: BlockingIOError if another process has it; OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and lock another run may have finished and renamed this very file to its output.
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise BlockingIOError
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_SURROGATES = {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
"""Halves of surrogate pairs, which UTF-8 cannot hold, as JSON writes them."""

_JOINERS = "\u200c\u200d"
"""Format characters that words and emoji of many scripts are written with; they change no order."""
_UNSAFE = re.compile("[^\\n\\t\\x20-\\x7e]")


def escape_for_terminal(text: str) -> str:
    """`text` with everything that a terminal might obey, or that changes the order of what is shown, made visible.

    Newlines and tabs stay; control and format characters, line separators, surrogates and unassigned codes become
    escapes such as \\x1b.
    """
    return _UNSAFE.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    c = match[0]
    if c in _JOINERS or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"):
        return c
    code = ord(c)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
