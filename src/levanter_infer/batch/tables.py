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


def carried_types(schemas: Sequence[Any], carry: Sequence[str]) -> str:
    """The types of carried columns, for `encode`, from the schemas of the input files.

    Raises: ValueError for a column that no file has, that has several types, or one that JSON cannot hold.
    """
    pyarrow, _ = _pyarrow()
    try:
        schema = pyarrow.unify_schemas([schema.remove_metadata() for schema in schemas])
    except pyarrow.ArrowTypeError as e:
        raise ValueError(f"a column differs in type between the files of prompts_file ({e}); cast it to one") from e
    kinds = {}
    for name in carry:
        if name not in schema.names:
            raise ValueError(f"output.carry names {brief(name)}; the files have the columns {', '.join(schema.names)}")
        kind = schema.field(name).type
        kinds[name] = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not _is_plain(kinds[name]):
            raise ValueError(
                f"column {name} of output.carry has type {kind}; expected text, numbers, booleans, or lists or "
                "structures of them: cast it, for example to text"
            )
    return base64.b64encode(pyarrow.schema(kinds).serialize()).decode()


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


def read_ids(file: IO[bytes], rows: int) -> Iterator[str | None]:
    """The id of each row; None for a row without one."""
    table = _open(file, "")
    if "id" not in table.schema_arrow.names:
        yield from (None for _ in range(rows))
        return
    for batch in _batches(table, columns=["id"]):
        yield from (given_id(row) for row in _rows_of(batch))


def footer_sha256(file: IO[bytes]) -> str:
    """SHA-256 of the file's size and footer: offsets, sizes and bounds of each column of each row group."""
    file.seek(-_TAIL, io.SEEK_END)
    length = int.from_bytes(file.read(4), "little")
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - _TAIL - length))
    return hashlib.sha256(b"%d " % end + file.read()).hexdigest()


def rows_sha256(file: IO[bytes], stretches: Iterable[tuple[int, int]]) -> Iterator[str]:
    """SHA-256 of the stored row groups that hold each stretch of rows.

    Args: stretches: (first row, rows) of each, in order; a row group that several share is read once.
    Raises: OSError for damaged data.
    """
    metadata = _open(file, "").metadata
    firsts = _first_rows(metadata)
    known: dict[int, bytes] = {}
    for start, count in stretches:
        groups = _groups_of(firsts, start, count)
        known = {group: known.get(group) or _group_sha256(file, metadata.row_group(group)) for group in groups}
        yield hashlib.sha256(b"".join(known.values())).hexdigest()


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


def read_rows(file: IO[bytes], start: int, count: int) -> Iterator[dict[str, Any] | ValueError]:
    """`count` rows from `start` on, without null columns; a ValueError for a row that cannot be read."""
    table = _open(file, "")
    firsts = _first_rows(table.metadata)
    groups = _groups_of(firsts, start, count)
    number = firsts[groups.start]
    for batch in _batches(table, batch_size=_ROWS_AT_ONCE, row_groups=list(groups)):
        for row in _rows_of(batch):
            if start <= number < start + count:
                yield row if isinstance(row, ValueError) else _without_nulls(row)
            number += 1


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
    except (ValueError, KeyError, RecursionError, OverflowError):
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
        except (KeyError, ValueError, RecursionError, OverflowError) as e:
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
    except pyarrow.ArrowInvalid as e:
        raise ValueError(f"{path} is no Parquet file: {e}") from e


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
    arrays = [pyarrow.array([_valid(content[field.name]) for content in contents], field.type) for field in schema]
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


def _valid(value: Any) -> Any:
    """Text with lone surrogates, which UTF-8 cannot encode, as escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
