"""`Input`: the files of a job; `InputShards`: their rows, split into shards.

The split is made once, by reading the whole input, and stored in `job.json`. It depends on the input alone, so all
workers and all later runs have the same shards. The SHA-256 of each shard shows whether its file has changed since.
"""

import array
import dataclasses
import hashlib
import io
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from levanter_infer.batch import tables
from levanter_infer.batch.openai import as_row, is_batch_line, line_id
from levanter_infer.batch.store import file_system
from levanter_infer.batch.streams import DECOMPRESSORS, StreamReader
from levanter_infer.engine.params import brief
from levanter_infer.io.prompts import (
    IDS_DIFFER,
    MAX_LINE_BYTES,
    chat_of,
    given_id,
    has_unknown_id,
    no_columns,
    parse_line,
    row_id,
    unknown_id,
    without_mark,
)
from levanter_infer.runtime.progress import stage

_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".txt": "text"}
_COMPRESSED = (".gz", ".bz2", ".xz")
_MAX_SHOWN = 3
_UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Exceptions for a file that cannot be read, or is compressed and damaged."""
ROW_FAULTS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Exceptions that the content of a row may cause: an error of that row, never of the job."""


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file of the input."""

    name: str
    """File name without directories."""
    kind: str
    """jsonl, text or parquet."""
    rows: int
    sha256: str
    """SHA-256 of the uncompressed content; of a Parquet file, of its footer."""
    bytes: int | None
    """Size of the stored file; None if the file system does not tell."""


@dataclasses.dataclass(frozen=True)
class InputShard:
    """Consecutive rows of one file."""

    index: int
    """Number of the shard in the job."""
    file: int
    first_row: int
    """Number of its first row in the whole input: the default id of that row."""
    rows: int
    start: int
    """Offset of its first row in its file: bytes, or rows of a Parquet file."""
    line: int
    """Number of lines before it in its file; 0 for Parquet."""
    sha256: str
    """SHA-256 of its bytes; of a Parquet file, of the stored row groups that hold its rows."""


@dataclasses.dataclass(frozen=True)
class InputShards:
    """The files of the input and its shards, in order."""

    files: tuple[InputFile, ...]
    shards: tuple[InputShard, ...]
    carried: str = ""
    """Types of the carried columns (`tables.carried_types`); empty unless all files are Parquet and agree."""
    named: bool = False
    """Whether rows give themselves ids."""

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def as_dict(self) -> dict[str, Any]:
        shards = [list(dataclasses.astuple(shard)) for shard in self.shards]
        return {
            "rows": self.rows,
            "files": [dataclasses.asdict(f) for f in self.files],
            "shard_columns": [f.name for f in dataclasses.fields(InputShard)],
            "shards": shards,
            "carried": self.carried,
            "named": self.named,
        }

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "InputShards":
        """Raises: KeyError, TypeError or ValueError for invalid content."""
        inputs = InputShards(
            tuple(InputFile(**file) for file in content["files"]),
            tuple(InputShard(*shard) for shard in content["shards"]),
            content["carried"],
            content.get("named", False),
        )
        row = 0
        for i, shard in enumerate(inputs.shards):
            numbers = (shard.index, shard.file, shard.first_row, shard.rows, shard.start, shard.line)
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError(f"shard {i} is not made of numbers")
            if (shard.index, shard.first_row) != (i, row) or shard.file >= len(inputs.files) or shard.rows < 1:
                raise ValueError(f"shard {i} does not follow the one before it")
            row += shard.rows
        if row != inputs.rows:
            raise ValueError(f"shards of {row} rows, and files of {inputs.rows}")
        return inputs


class Input:
    """The files of a job.

    Args:
        pattern: a path or URL for fsspec, of a file; or with `*`, `?` or `[`, of all that match, sorted by name.
        as_chat: text prompts are user messages of a chat.
        model_names: as in `BatchConfig`.
        carry: further columns of rows, which are copied to the output.
    Raises: ValueError if there is no such file, or one has an unknown suffix.
    """

    def __init__(self, pattern: str, *, as_chat: bool, model_names: Sequence[str], carry: Sequence[str] = ()):
        self._as_chat, self._carry = as_chat, tuple(carry)
        self.model_names: Sequence[str] = tuple(model_names)
        """Names that a request may give the model."""
        self._fs, path = file_system(pattern)
        try:
            self.paths = [path] if self._fs.isfile(path) else []
            if not self.paths and any(c in path for c in "*?["):
                self.paths = sorted(p for p in self._fs.glob(path) if self._fs.isfile(p))
        except OSError as e:
            raise ValueError(f"cannot read prompts_file {pattern}: {e.strerror or e}") from e
        if not self.paths:
            raise ValueError(f"prompts_file {pattern}: no such file; give a file, or a pattern such as in/*.jsonl")
        self._kinds = [_kind(path) for path in self.paths]
        if self._carry and "text" in self._kinds:
            raise ValueError(no_columns(self.paths[self._kinds.index("text")]))
        self._schemas: list[Any] = []
        self._last: tuple[int, IO[bytes]] | None = None
        self._table: tuple[IO[bytes], tables.TableReader] | None = None

    @stage("reading the input")
    def split(self, rows_per_shard: int) -> InputShards:
        """Read the whole input and split it into shards.

        Raises: ValueError for an unreadable file, no rows, or repeated ids.
        """
        ids, sizes = _Ids(), self.sizes()
        self._schemas.clear()
        files: list[InputFile] = []
        shards: list[InputShard] = []
        for number, path in enumerate(self.paths):
            rows = sum(file.rows for file in files)
            scan = self._scan_table if self._kinds[number] == "parquet" else self._scan_lines
            try:
                file, found = scan(number, rows, rows_per_shard, ids)
            except _UNREADABLE as e:
                raise _unreadable(path, e) from e
            files.append(dataclasses.replace(file, bytes=sizes[number]))
            before = len(shards)
            shards += [dataclasses.replace(shard, index=before + i) for i, shard in enumerate(found)]
        for path, before, now in zip(self.paths, sizes, self.sizes(), strict=True):
            if before != now:
                raise ValueError(
                    f"{path} had {before} bytes and has {now} after it was read; wait until it is complete"
                )
        if not shards:
            raise ValueError(f"{', '.join(self.paths[:_MAX_SHOWN])}: no rows; expected at least one prompt")
        repeated = ids.repeated()
        if repeated:
            raise ValueError(self._repeated_text(InputShards(tuple(files), tuple(shards)), repeated))
        carried = ""
        if self._carry and self._schemas:
            carried = tables.carried_types(self._schemas, self._carry, others=len(self._schemas) < len(files))
        return InputShards(tuple(files), tuple(shards), carried, ids.any_given)

    def sizes(self) -> list[int | None]:
        """Bytes of each file. Raises: ValueError if one is missing."""
        self._fs.invalidate_cache()
        try:
            return self._fs.sizes(self.paths)
        except OSError as e:
            raise ValueError(f"cannot read prompts_file {e.filename or ', '.join(self.paths[:_MAX_SHOWN])}: {e}") from e

    def check_unchanged(self, inputs: InputShards) -> None:
        """Compare the sizes of the files with those in `job.json`: rows may have been added.

        Raises: ValueError naming the first file that differs.
        """
        for path, now, file in zip(self.paths, self.sizes(), inputs.files, strict=True):
            if now != file.bytes:
                raise ValueError(
                    f"{path} has {now} bytes and had {file.bytes} with {file.rows} rows when the job began; rows that "
                    "were added since would not be sampled. Restore the file, or give another output"
                )

    def rows(self, inputs: InputShards, shard: InputShard) -> Iterator[tuple[str, Any]]:
        """(file and line, content) of each row of a shard; a ValueError as content is the error of that row.

        Raises: ValueError if the file has changed since it was split.
        """
        path, name = self.paths[shard.file], inputs.files[shard.file].name
        changed = ValueError(f"{path} has changed since the job began; put it back, or give another output")
        try:
            if self._kinds[shard.file] == "parquet":
                table = self._table_of(shard.file, inputs.files[shard.file].sha256, changed)
                if table.sha256(shard.start, shard.rows) != shard.sha256:
                    raise changed
                for i, content in enumerate(table.rows(shard.start, shard.rows)):
                    yield f"{name}:{shard.start + i + 1}", self._content(content)
                return
            digest, count = hashlib.sha256(), 0
            file = self._reader(shard.file)
            file.seek(shard.start)
            for line, raw in _lines(file, shard.line, shard.rows, digest.update):
                count += 1
                if count == shard.rows and digest.hexdigest() != shard.sha256:
                    raise changed  # before the last row is given, so that the shard cannot be finished
                yield f"{name}:{line}", self._content(self._parse(raw, shard.file))
            if count != shard.rows:
                raise changed
        except _UNREADABLE as e:
            raise _unreadable(path, e) from e

    def _reader(self, number: int) -> IO[bytes]:
        """An open file, kept while its shards are read in order: seeking forward in a compressed one is cheap."""
        if self._last is None or self._last[0] != number:
            if self._last is not None:
                self._last[1].close()
            self._last = number, self._open(number)
        return self._last[1]

    def _table_of(self, number: int, sha256: str, changed: ValueError) -> tables.TableReader:
        """A reader of a Parquet file, kept as `_reader` is. Raises: changed if its footer has another SHA-256."""
        file = self._reader(number)
        if tables.footer_sha256(file) != sha256:
            raise changed
        if self._table is None or self._table[0] is not file:
            self._table = file, tables.TableReader(file)
        return self._table[1]

    def _open(self, number: int) -> IO[bytes]:
        path = self.paths[number]
        decompressor = DECOMPRESSORS.get(os.path.splitext(path)[1].lower())
        if decompressor is None:
            return self._fs.open(path, "rb", compression="infer")
        return io.BufferedReader(StreamReader(self._fs.open(path, "rb"), decompressor))

    def _parse(self, raw: bytes, number: int) -> Any:
        return parse_line(raw, jsonl=self._kinds[number] == "jsonl", as_chat=False)

    def _content(self, content: Any) -> Any:
        try:
            content = as_row(content, self.model_names)
        except ValueError as e:
            return e
        except ROW_FAULTS as e:
            return ValueError(f"{type(e).__name__}: {e}")
        return chat_of(content) if self._as_chat else content

    def _scan_lines(self, number: int, first_row: int, size: int, ids: "_Ids") -> tuple[InputFile, list[InputShard]]:
        whole, digest = hashlib.sha256(), hashlib.sha256()
        until_row = digest
        shards: list[InputShard] = []
        rows = offset = begin = begin_line = 0

        def take(data: bytes) -> None:
            nonlocal offset
            whole.update(data)
            digest.update(data)
            offset += len(data)

        def close(count: int) -> None:
            shards.append(
                InputShard(0, number, first_row + rows - count, count, begin, begin_line, until_row.hexdigest())
            )

        with self._open(number) as file:
            for line, raw in _lines(file, 0, None, take):
                content = self._parse(raw, number) if self._kinds[number] == "jsonl" else None
                ids.add(_id_of(content), first_row + rows, _has_unknown_id(content))
                rows += 1
                until_row = digest.copy()
                if rows % size == 0:
                    close(size)
                    digest, begin, begin_line = hashlib.sha256(), offset, line
        if rows % size:
            close(rows % size)
        name = self.paths[number].rsplit("/", 1)[-1]
        return InputFile(name, self._kinds[number], rows, whole.hexdigest(), None), shards

    def _scan_table(self, number: int, first_row: int, size: int, ids: "_Ids") -> tuple[InputFile, list[InputShard]]:
        with self._open(number) as file:
            rows, schema = tables.check_columns(file, self.paths[number], self._carry)
            self._schemas.append(schema)
            for i, content in enumerate(tables.read_ids(file, rows)):
                ids.add(given_id(content), first_row + i, has_unknown_id(content))
            sha256 = tables.footer_sha256(file)
            table = tables.TableReader(file)
            stretches = [(start, min(size, rows - start)) for start in range(0, rows, size)]
            shards = [
                InputShard(0, number, first_row + start, count, start, 0, table.sha256(start, count))
                for start, count in stretches
            ]
        name = self.paths[number].rsplit("/", 1)[-1]
        return InputFile(name, "parquet", rows, sha256, None), shards

    def _repeated_text(self, inputs: InputShards, rows: Sequence[int]) -> str:
        """The repeated ids of these rows; reads their shards again."""
        found: dict[str, list[str]] = {}
        wanted = set(rows)
        for shard in inputs.shards:
            if wanted & set(range(shard.first_row, shard.first_row + shard.rows)):
                for i, (where, content) in enumerate(self.rows(inputs, shard)):
                    if shard.first_row + i in wanted:
                        found.setdefault(row_id(content, shard.first_row + i, named=True), []).append(where)
        first = [f"{brief(name)} in {' and '.join(lines)}" for name, lines in found.items() if len(lines) > 1]
        return f"two rows have the id {'; '.join(first[:_MAX_SHOWN])}: {IDS_DIFFER}"


def _unreadable(path: str, error: Exception) -> ValueError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    remedy = (
        "; if it is truncated or damaged, compress it or copy it again" if path.lower().endswith(_COMPRESSED) else ""
    )
    return ValueError(f"cannot read {path}: {reason}{remedy}")


def _kind(path: str) -> str:
    plain = path.lower()
    for suffix in _COMPRESSED:
        plain = plain.removesuffix(suffix)
    for suffix, kind in _KINDS.items():
        if plain.endswith(suffix) and (kind != "parquet" or plain == path.lower()):
            return kind
    raise ValueError(
        f"{path}: expected a name that ends in {', '.join(_KINDS)}, and {', '.join(_COMPRESSED)} behind those of text"
    )


def _lines(file: IO[bytes], before: int, rows: int | None, on_bytes) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without a byte order mark) of up to `rows` lines that are not blank; a line that is too long
    is truncated.

    Args:
        before: number of lines before the first.
        on_bytes: called with all bytes of a line before the line is given.
    """
    number, found = before, 0
    while (rows is None or found < rows) and (line := file.readline(MAX_LINE_BYTES + 1)):
        on_bytes(line)
        number += 1
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
            on_bytes(rest)
        if number == 1:
            line = without_mark(line)
        if line.strip() or len(line) > MAX_LINE_BYTES:  # of which more than the spaces may be left
            found += 1
            yield number, line


def _id_of(content: Any) -> str | None:
    """The id of a row, if it has one."""
    return line_id(content) if is_batch_line(content) else given_id(content)


def _has_unknown_id(content: Any) -> bool:
    """As `has_unknown_id`, of a line; None is one of text."""
    if is_batch_line(content):
        return line_id(content) is None
    return content is not None and has_unknown_id(content)


class _Ids:
    """Finds repeated ids, with 8 bytes of memory per row."""

    def __init__(self):
        self._hashes = array.array("Q")
        self.any_given = False

    def add(self, given: str | None, row: int, is_unknown: bool) -> None:
        """Args: is_unknown: `has_unknown_id`; the row's own name differs from all others."""
        self.any_given = self.any_given or given is not None
        name = unknown_id(row) if is_unknown else str(row) if given is None else given
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self._hashes.append(int.from_bytes(digest, "little"))

    def repeated(self) -> list[int]:
        """Rows with a repeated id, of the first few such ids."""
        if not self.any_given:
            return []
        hashes = np.frombuffer(self._hashes, np.uint64)
        ordered = np.sort(hashes)
        twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])[:_MAX_SHOWN]
        return np.flatnonzero(np.isin(hashes, twice)).tolist()
