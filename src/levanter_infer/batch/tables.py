"""Parquet files: input rows and output rows. Needs pyarrow, which the extra `parquet` installs."""

import base64
import bisect
import hashlib
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from levanter_infer.columns import TYPES, encode_json
from levanter_infer.config import check_keys
from levanter_infer.engine.params import brief
from levanter_infer.io.prompts import CARRY_REMEDY, ROW_KEYS, RefusedRow, given_id, parse_json

_JSON_COLUMNS = ("sampling", "messages", "tools", "chat_template_kwargs")
"""Columns that may hold JSON as text, for keys that not every row has."""
_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 2**20
_UNREADABLE_VALUES = (ValueError, LookupError, RecursionError, OverflowError, NotImplementedError)
"""Exceptions of `to_pylist`: those of Python's conversions, and of pyarrow for damaged data."""
_TAIL = 8
"""Bytes at the end of a file: length of the footer, and PAR1."""


def check_columns(file: IO[bytes], path: str, carry: Sequence[str] = ()) -> tuple[int, Any]:
    """(rows, schema) of a file. Raises: ValueError for an unknown column, or a file that is no Parquet."""
    table = _open(file, path)
    names = table.schema_arrow.names
    check_keys(names, (*ROW_KEYS, *carry), path, CARRY_REMEDY)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{path} has {names.count(name)} columns {name}; expected one: rename or remove the others"
            )
    return table.metadata.num_rows, table.schema_arrow


def carried_types(schemas: Sequence[Any], carry: Sequence[str], *, others: bool = False) -> str:
    """The types of carried columns, for `encode`, from the schemas of the Parquet files; empty if they disagree.

    Args: others: whether there are files of JSON too, whose columns are not known and have no types.
    Raises: ValueError for a column that no file has, or of a type that JSON cannot hold.
    """
    pyarrow, _ = _pyarrow()
    kinds: dict[str, list[Any]] = {name: [] for name in carry}
    for name in carry:
        fields = [schema.field(name).type for schema in schemas if name in schema.names]
        if not fields and not others:
            have = dict.fromkeys(column for schema in schemas for column in schema.names)
            raise ValueError(f"output.carry names {brief(name)}; the files have the columns {', '.join(have)}")
        for kind in fields:
            plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not _is_plain(plain):
                raise ValueError(
                    f"column {name} of output.carry has type {kind}; expected text, numbers, booleans, or lists or "
                    "structures of them: cast it, for example to text"
                )
            if not pyarrow.types.is_null(plain) and plain not in kinds[name]:
                kinds[name].append(plain)
    if others or any(len(found) > 1 for found in kinds.values()):
        return ""
    one = {name: found[0] if found else pyarrow.null() for name, found in kinds.items()}
    return base64.b64encode(pyarrow.schema(one).serialize()).decode()


def _is_plain(kind) -> bool:
    """Whether JSON can hold the values of a type."""
    types = _pyarrow()[0].types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_struct(kind):
        return all(_is_plain(kind.field(i).type) for i in range(kind.num_fields))
    plain = (types.is_string, types.is_large_string, types.is_integer, types.is_float32, types.is_float64)
    return any(test(kind) for test in (*plain, types.is_boolean, types.is_null))


def _finite(value: Any) -> Any:
    """A value of a carried column, with null for a number that is not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_ids(file: IO[bytes], rows: int) -> Iterator[dict[str, Any] | ValueError]:
    """Each row with its id alone, or nothing."""
    table = _open(file, "")
    if "id" not in table.schema_arrow.names:
        yield from ({} for _ in range(rows))
        return
    for batch in _batches(table, columns=["id"]):
        yield from _rows_of(batch)


def footer_sha256(file: IO[bytes]) -> str:
    """SHA-256 of the file's size and footer: offsets, sizes and bounds of each column of each row group."""
    file.seek(-_TAIL, io.SEEK_END)
    length = int.from_bytes(file.read(4), "little")
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - _TAIL - length))
    return hashlib.sha256(b"%d " % end + file.read()).hexdigest()


def _first_rows(metadata) -> list[int]:
    """The number of the first row of each row group, and the number of rows."""
    counts = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return [*itertools.accumulate(counts, initial=0)]


def _groups_of(first_rows: list[int], start: int, count: int) -> range:
    """The row groups that hold `count` rows from `start` on. Args: first_rows: `_first_rows`."""
    number = len(first_rows) - 1  # a damaged footer may promise rows that no row group holds
    return range(bisect.bisect_right(first_rows, start) - 1, bisect.bisect_left(first_rows, start + count, hi=number))


def _group_sha256(file: IO[bytes], group) -> bytes:
    """SHA-256 of the stored bytes of a row group, column by column."""
    digest = hashlib.sha256()
    for i in range(group.num_columns):
        column = group.column(i)
        left = column.total_compressed_size
        file.seek(min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset))
        while left > 0:
            data = file.read(min(left, _BYTES_AT_ONCE))
            if not data:
                raise OSError("its Parquet data are damaged (a column ends behind the file); write the file again")
            digest.update(data)
            left -= len(data)
    return digest.digest()


class TableReader:
    """Reads stretches of rows of a file; those that follow one another cost no more than the rows themselves.

    Args: file: open as long as the reader is used.
    """

    def __init__(self, file: IO[bytes]):
        self._file, self._table = file, _open(file, "")
        self._firsts = _first_rows(self._table.metadata)
        self._hashes: dict[int, bytes] = {}
        self._next: tuple[int, list[Any], Iterator[Any]] | None = None
        """Number of the first row behind the last stretch, a batch that begins with it if one is there, and those that
        follow."""

    def sha256(self, start: int, count: int) -> str:
        """SHA-256 of the stored row groups that hold these rows. Raises: OSError for damaged data."""
        metadata = self._table.metadata
        groups = _groups_of(self._firsts, start, count)
        known = self._hashes
        self._hashes = {g: known.get(g) or _group_sha256(self._file, metadata.row_group(g)) for g in groups}
        return hashlib.sha256(b"".join(self._hashes.values())).hexdigest()

    def rows(self, start: int, count: int) -> Iterator[dict[str, Any] | ValueError]:
        """`count` rows from `start` on, without null columns; a ValueError for a row that cannot be read."""
        (number, rest, batches), self._next = self._from(start), None
        end = start + count
        while number < end:
            batch = rest.pop() if rest else next(batches, None)
            if batch is None:
                return  # a damaged footer may promise rows that no row group holds
            last = min(end - number, batch.num_rows)
            first = min(max(start - number, 0), last)
            for row in _rows_of(batch.slice(first, last - first)):
                yield row if isinstance(row, ValueError) else _without_nulls(row)
            if last < batch.num_rows:
                rest = [batch.slice(last)]
            number += last
        self._next = number, rest, batches

    def _from(self, start: int) -> tuple[int, list[Any], Iterator[Any]]:
        """As `_next`, of a row at or before `start`."""
        if self._next is not None and self._next[0] == start:
            return self._next
        first = max(bisect.bisect_right(self._firsts, start) - 1, 0)
        # One group after the other: pyarrow reads ahead, and holds, what it is asked for at once
        each = (
            _batches(self._table, batch_size=_ROWS_AT_ONCE, row_groups=[group])
            for group in range(first, self._table.metadata.num_row_groups)
        )
        return self._firsts[first], [], itertools.chain.from_iterable(each)


def _batches(table, **options) -> Iterator[Any]:
    """`iter_batches`. Raises: OSError for damaged data."""
    pyarrow, _ = _pyarrow()
    try:
        yield from table.iter_batches(**options)
    except pyarrow.ArrowException as e:
        raise OSError(f"its Parquet data are damaged ({brief(str(e))}); write the file again") from e


def _rows_of(batch) -> Iterator[dict[str, Any] | ValueError]:
    """The rows of a batch as Python values; a ValueError for a row that cannot be read."""
    try:
        yield from batch.to_pylist(maps_as_pydicts="strict")
        return
    except _UNREADABLE_VALUES:
        pass  # the loop below finds the row
    for i in range(batch.num_rows):
        yield _row_of(batch.slice(i, 1))


def _row_of(batch) -> dict[str, Any] | ValueError:
    """The only row of a batch, or its error."""
    row: dict[str, Any] = {}
    problem = None
    for name in batch.schema.names:
        try:
            row[name] = batch.column(name).to_pylist(maps_as_pydicts="strict")[0]
        except UnicodeDecodeError as e:
            problem = f"column {name} is not UTF-8: {e}; write text as UTF-8"
        except _UNREADABLE_VALUES as e:
            problem = f"column {name} cannot be read, perhaps because a map has a key twice ({brief(str(e))}); mend it"
    return row if problem is None else RefusedRow(problem, given_id(row))


def _without_nulls(row: dict[str, Any]) -> dict[str, Any] | ValueError:
    """A row without null values: Parquet stores an absent key as null, within structures too."""
    name = given_id(row)
    row = {key: value if key in ROW_KEYS else _finite(value) for key, value in row.items() if value is not None}
    try:
        for key in _JSON_COLUMNS:
            if isinstance(row.get(key), str):
                row[key] = parse_json(row[key], f"{key} is text and")
            elif key in row:
                row[key] = _dropped(row[key])
    except ValueError as e:
        return RefusedRow(str(e), name)
    return row


def _dropped(value: Any) -> Any:
    """A value without null entries of structures; null entries of lists stay."""
    if isinstance(value, dict):
        return {key: _dropped(inner) for key, inner in value.items() if inner is not None}
    return [_dropped(inner) for inner in value] if isinstance(value, list) else value


def _open(file: IO[bytes], path: str):
    pyarrow, parquet = _pyarrow()
    try:
        file.seek(0)
        return parquet.ParquetFile(file)
    except pyarrow.ArrowException as e:
        raise ValueError(f"{path} is no Parquet file that can be read: {e}") from e


def check_available() -> None:
    """Raises: ValueError if pyarrow is not installed."""
    _pyarrow()


def _pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise ValueError(
            "Parquet needs pyarrow: install this package with its extra, in a checkout pip install '.[parquet]'"
        ) from e
    return pyarrow, pyarrow.parquet


def encode(rows: Iterable[str], carried: str = "") -> bytes:
    """A Parquet file of output rows, given as JSON with equal keys. Equal rows give equal bytes.

    Args:
        carried: from `carried_types`; empty: carried columns become JSON as text.
    """
    pyarrow, parquet = _pyarrow()
    contents = [json.loads(row) for row in rows]
    names = [name for name in contents[0] if name not in TYPES]
    types = pyarrow.schema({name: pyarrow.string() for name in names})
    if carried:
        types = pyarrow.ipc.read_schema(pyarrow.py_buffer(base64.b64decode(carried)))
    else:
        for content in contents:
            content |= {name: encode_json(content[name]) for name in names if content[name] is not None}
    schema = pyarrow.schema([*arrow_schema(contents[0]), *types])
    arrays = [pyarrow.array([content[field.name] for content in contents], field.type) for field in schema]
    table = pyarrow.Table.from_arrays(arrays, schema=schema)
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def arrow_schema(names: Iterable[str]):
    """The `pyarrow.Schema` of output rows with these columns, without the columns carried from the input."""
    pyarrow, _ = _pyarrow()
    top = pyarrow.struct({"token_id": pyarrow.int32(), "logprob": pyarrow.float32()})
    types = {
        "text": pyarrow.string(),
        "ints": pyarrow.list_(pyarrow.int32()),
        "experts": pyarrow.list_(pyarrow.list_(pyarrow.list_(pyarrow.int16()))),
        "floats": pyarrow.list_(pyarrow.float32()),
        "tops": pyarrow.list_(pyarrow.list_(top)),
        "int32": pyarrow.int32(),
        "uint64": pyarrow.uint64(),
        "float32": pyarrow.float32(),
        "float64": pyarrow.float64(),
    }
    return pyarrow.schema({name: types[TYPES[name]] for name in names if name in TYPES})
