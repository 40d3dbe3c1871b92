"""Prompts files in, output rows out, and completions made safe for a terminal."""

import codecs
import contextlib
import dataclasses
import errno
import json
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing keeps two runs apart there
    fcntl = None

from levanter_infer.checkpoints.chat import CHAT_KEYS, check_chat_settings
from levanter_infer.columns import TYPES, Columns, encode_row
from levanter_infer.config import RunConfig, check_keys
from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import MAX_ID_CHARS, Request

MAX_LINE_BYTES = 2**24
MAX_ROWS = 1_000_000
MAX_N = 4096
"""Samples of one row, at most; the engine may allow fewer."""
_JSONL = (".jsonl", ".ndjson")
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
_POLICY_KEYS = ("cache_salt", "priority", "timeout_s")
ROW_KEYS = (*_PROMPT_KEYS, "id", "sampling", *_POLICY_KEYS, *CHAT_KEYS)
_NOT_CARRIED = (*ROW_KEYS, "custom_id", "body")  # the last two make a row a line of OpenAI's batch format
CARRY_REMEDY = "; a column of your own goes to the output if output.carry names it: [NAME]"
_COMPLETIONS = {"prompt": "completion", "prompt_token_ids": "completion_token_ids", "messages": "completion"}
"""In which key a completion stands beside a prompt."""
_SCORED_CHAT_KEYS = ("tools", "chat_template_kwargs")
_SCORED_ROW_KEYS = (*_PROMPT_KEYS, "id", "cache_salt", "completion", "completion_token_ids", *_SCORED_CHAT_KEYS)
_NONE: Mapping[str, Any] = MappingProxyType({})
_MAX_TOKEN = 2**31
_REMEDIES = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some of your quota, or write elsewhere",
    errno.ENOENT: "expected a directory {folder}; make it first (mkdir -p {folder}), or give another name",
    errno.ENOTDIR: "{folder} is no directory; give another name",
    errno.EFBIG: "the file system, or the limit of `ulimit -f`, allows no larger file; divide the input",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the input: a request, or why there is none."""

    id: str
    request: Request | None
    error: str | None = None
    completion: str | list[int] | None = None
    """What follows the prompt, where it is to be scored and not sampled; token ids behind token ids."""
    carried: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What goes unchanged to its rows of the output."""


def read_rows(config: RunConfig, *, completions: bool = False, columns: Columns | None = None) -> list[Row]:
    """The requests of a run, in order.

    A row that is wrong becomes an error of that row. `sampling.seed` of the configuration is left to the engine, which
    derives a seed of its own for every request; the `seed` of a row is its request's.

    Args:
        completions: rows may hold a completion, and no parameters of sampling.
        columns: of the output; a row that asks for others is refused. None: there is none.
    Raises: ValueError if the file cannot be read at all, or has too many rows.
    """
    if columns is not None and columns.carry and not str(config.prompts_file).lower().endswith(_JSONL):
        raise ValueError(no_columns(config.prompts_file or "prompts"))
    base = dataclasses.replace(config.sampling, seed=None)
    chat = {key: value for key, value in chat_settings(config).items() if not completions or key in _SCORED_CHAT_KEYS}
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
        row = make_row(content, str(len(rows)), where, base, completions=completions, columns=columns, chat=chat)
        if row.id in seen and row.error is None:
            error = f"{where}: id {brief(row.id)} is that of {seen[row.id]} too; ids must differ"
            row = dataclasses.replace(row, request=None, error=error)
        seen.setdefault(row.id, where)
        rows.append(row)
    if not rows:
        raise ValueError(f"{config.prompts_file} has no rows; expected at least one prompt")
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
    """What is wrong with carrying columns of plain prompts."""
    return f"output.carry with {source}: plain prompts have no columns; give JSONL, or leave it out"


def chat_settings(config: RunConfig) -> dict[str, Any]:
    """How all chats of a run are rendered, where a row does not say otherwise."""
    return {key: getattr(config, key) for key in CHAT_KEYS if getattr(config, key) is not None}


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


class RefusedRow(ValueError):
    """What is wrong with a row.

    Args:
        id: what the row calls itself, where it is known.
    """

    def __init__(self, message: str, id: str | None = None):
        super().__init__(message)
        self.id = id


def parse_line(line: bytes, *, jsonl: bool, as_chat: bool) -> Any:
    """What a line of a prompts file holds, or the ValueError that says what is wrong with it."""
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
    """The value that JSON text stands for. Raises: RefusedRow; `what` is wrong with it, or with a value in it."""
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
    """A row whose text prompt is what a user says in a chat; any other as it is."""
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
    """What a row calls itself, also one that is wrong; None if it does not, or with what is no id."""
    if isinstance(content, RefusedRow):
        return content.id
    given = content.get("id") if isinstance(content, dict) else None
    return str(given) if _is_id(given) else None


def _is_id(value: Any) -> bool:
    if type(value) is int:
        return value.bit_length() < 3 * MAX_ID_CHARS  # so that it has fewer decimal digits
    return isinstance(value, str) and len(value) <= MAX_ID_CHARS


def row_id(content: Any, default_id: str) -> str:
    """What names a row, also one that is wrong."""
    given = given_id(content)
    return default_id if given is None else given


def make_row(
    content: Any,
    default_id: str,
    where: str,
    base: SamplingParams,
    *,
    completions: bool = False,
    columns: Columns | None = None,
    chat: Mapping[str, Any] = _NONE,
) -> Row:
    """The request that a row asks for; what is wrong with it becomes its error.

    Args:
        content: as `parse_line` gives it.
        where: says in the error which row it is.
        base: parameters that the row does not give.
        completions: it may hold a completion, and no parameters of sampling.
        columns: of the output; a row that asks for others is refused.
        chat: as of `chat_settings`; rows that are no chats have no use for it.
    """
    default_id = row_id(content, default_id)
    carry = () if columns is None else columns.carry
    carried = {name: content[name] for name in carry if name in content} if isinstance(content, dict) else _NONE
    try:
        if isinstance(content, ValueError):
            raise content
        known = _SCORED_ROW_KEYS if completions else (*ROW_KEYS, *carry)
        request = _make_request(content, default_id, base, known, chat, "" if completions else CARRY_REMEDY)
        if columns is not None:
            columns.check(request.sampling or base)
        return Row(default_id, request, None, _completion(content) if completions else None, carried)
    except ValueError as e:
        return Row(default_id, None, f"{where}: {e}", carried=carried)


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


def _make_request(
    content: Any, row_id: str, base: SamplingParams, known: Sequence[str], chat: Mapping[str, Any], remedy: str
) -> Request:
    if not isinstance(content, dict):
        raise ValueError(f"the row is {brief(content)}; expected an object with prompt, prompt_token_ids or messages")
    check_keys(content, known, "", remedy)
    given = [key for key in _PROMPT_KEYS if content.get(key) is not None]
    if len(given) != 1:
        raise ValueError(f"expected one of prompt, prompt_token_ids, messages; got {' and '.join(given) or 'none'}")
    kind, value = given[0], content[given[0]]
    if kind == "prompt" and not isinstance(value, str):
        raise ValueError(f"prompt is {brief(value)}; expected a string")
    if kind != "prompt" and not isinstance(value, list):
        raise ValueError(f"{kind} is {brief(value)}; expected a list")
    if kind == "prompt_token_ids" and isinstance(value, list):
        _check_ids(value)
    if not _is_id(content.get("id", "")):
        expected = f"a string of at most {MAX_ID_CHARS} characters or a whole number"
        raise ValueError(f"id is {brief(content['id'])}; expected {expected}")
    sampling = base
    if content.get("sampling") is not None:
        sampling = merge_sampling(base, content["sampling"])
    for name in ("n", "best_of", "num_beams"):
        if (getattr(sampling, name) or 0) > MAX_N:
            raise ValueError(f"sampling.{name}={getattr(sampling, name)}; expected at most {MAX_N}")
    prompt: dict[str, Any] = {kind: value}
    policies = {key: content[key] for key in _POLICY_KEYS if key in known and content.get(key) is not None}
    return Request(**prompt, sampling=sampling, id=row_id, **policies, **_chat_keys(content, kind, chat))


def _check_ids(ids: list[Any]) -> None:
    """Raises: ValueError for what no vocabulary can hold."""
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < _MAX_TOKEN)):
        return
    i, wrong = next((i, v) for i, v in enumerate(ids) if type(v) is not int or not 0 <= v < _MAX_TOKEN)
    raise ValueError(f"prompt_token_ids[{i}] is {brief(wrong)}; expected a token id, a whole number from 0")


def _chat_keys(content: dict[str, Any], kind: str, chat: Mapping[str, Any]) -> dict[str, Any]:
    """What says how the chat of a row is rendered: the row's own settings before those of all chats."""
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
    if settings.get("continue_final_message"):
        settings["add_generation_prompt"] = False  # which begins another message, and is what is done by default
    return settings


def merge_sampling(base: SamplingParams, overrides: Any) -> SamplingParams:
    """`base` with a row's own parameters. Raises: ValueError naming an unknown or wrong one."""
    if not isinstance(overrides, dict):
        raise ValueError(f"sampling is {brief(overrides)}; expected an object of sampling parameters")
    values = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    return SamplingParams.from_dict(values | overrides)


# Output


def write_error(path: Path, e: OSError, what: str = "") -> str:
    """What to say of a file that could not be written, and what to do.

    Args:
        what: stands before the path, with a space behind it.
    """
    remedy = _REMEDIES.get(e.errno or 0, "").format(folder=path.parent)
    return f"cannot write {what}{path}: {e.strerror or e}" + (f"; {remedy}" if remedy else "")


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
            raise ValueError(write_error(self.path, e, "output ")) from e

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
            raise ValueError(write_error(self.path, e, "output ")) from e

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
            raise ValueError(write_error(self.path, e, "output ")) from e
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
