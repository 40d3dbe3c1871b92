"""Parquet: rows of the input, and of the output. Needs pyarrow, which the extra `parquet` installs."""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from typing import IO, Any

from levanter_infer.config import check_keys

_COLUMNS = ("prompt", "prompt_token_ids", "messages", "id", "sampling", "cache_salt", "priority", "timeout_s")
_ROWS_AT_ONCE = 256
_TAIL = 8
"""Bytes at the end of a file: length of the footer, and PAR1."""


def check_columns(file: IO[bytes], path: str) -> int:
    """Rows of a file. Raises: ValueError for a column that no row may have, or no Parquet file."""
    table = _open(file, path)
    check_keys(table.schema_arrow.names, _COLUMNS, path)
    return table.metadata.num_rows


def read_ids(file: IO[bytes], rows: int) -> Iterator[str | None]:
    """The id of each row, None where it has none."""
    table = _open(file, "")
    if "id" not in table.schema_arrow.names:
        yield from (None for _ in range(rows))
        return
    for batch in table.iter_batches(columns=["id"]):
        yield from (None if value is None else str(value) for value in batch.column(0).to_pylist())


def footer_sha256(file: IO[bytes]) -> str:
    """Of the part that says where and how large each column of each row group is, and what it lies between."""
    file.seek(-_TAIL, io.SEEK_END)
    length = int.from_bytes(file.read(4), "little")
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - _TAIL - length))
    return hashlib.sha256(b"%d " % end + file.read()).hexdigest()


def read_rows(file: IO[bytes], start: int, count: int) -> Iterator[dict[str, Any] | ValueError]:
    """Rows `start` and following, without the columns in which they have nothing; or what is wrong with one."""
    table = _open(file, "")
    first, groups = 0, []
    begin = None
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if first + rows > start and first < start + count:
            begin = first if begin is None else begin
            groups.append(group)
        first += rows
    number = begin or 0
    for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups):
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            if start <= number < start + count:
                yield _without_nulls(row)
            number += 1


def _without_nulls(row: dict[str, Any]) -> dict[str, Any] | ValueError:
    """Parquet knows a key that is not given as one that is null, within structures too."""
    row = {key: value for key, value in row.items() if value is not None}
    if isinstance(row.get("sampling"), dict):
        row["sampling"] = {key: value for key, value in row["sampling"].items() if value is not None}
    elif isinstance(row.get("sampling"), str):  # as JSON, for keys that not every row has
        try:
            row["sampling"] = json.loads(row["sampling"])
        except ValueError as e:
            return ValueError(f"sampling is text and not JSON: {e}")
    if isinstance(row.get("messages"), list):
        row["messages"] = [{k: v for k, v in m.items() if v is not None} for m in row["messages"]]
    return row


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


def encode(rows: Iterable[str]) -> bytes:
    """A Parquet file of output rows, which are given as JSON. The same rows give the same bytes."""
    pyarrow, parquet = _pyarrow()
    schema = _schema(pyarrow)
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for row in rows:
        content = json.loads(row)
        for name, values in columns.items():
            value = content.pop(name, None)
            values.append(_top(value) if name in ("top_logprobs", "prompt_top_logprobs") else _valid(value))
        assert not content, f"output rows have {', '.join(content)}, for which there is no column"
    arrays = [pyarrow.array(columns[field.name], field.type) for field in schema]
    table = pyarrow.Table.from_arrays(arrays, schema=schema)
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _schema(pyarrow):
    text, floats, tops = pyarrow.string(), pyarrow.list_(pyarrow.float32()), _tops_type(pyarrow)
    ids = pyarrow.list_(pyarrow.int32())
    return pyarrow.schema(
        {
            "id": text,
            "index": pyarrow.int32(),
            "prompt": text,
            "prompt_token_ids": ids,
            "text": text,
            "token_ids": ids,
            "logprobs": floats,
            "finish_reason": text,
            "seed": pyarrow.uint64(),
            "top_logprobs": tops,
            "score": pyarrow.float32(),
            "prompt_logprobs": floats,
            "prompt_top_logprobs": tops,
            "error": text,
        }
    )


def _tops_type(pyarrow):
    return pyarrow.list_(pyarrow.map_(pyarrow.int32(), pyarrow.float32()))


def _top(value: list[dict[str, float]] | None) -> list[list[tuple[int, float]]] | None:
    return None if value is None else [[(int(token), logprob) for token, logprob in place.items()] for place in value]


def _valid(value: Any) -> Any:
    """Halves of surrogate pairs, which UTF-8 cannot hold, as their escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
