"""The safetensors format: headers of local and remote files, tensors read into given arrays and written one by one.

The library checks local headers; docs/decisions/0037-libraries-and-what-stays-our-own.md says why the rest is here.
"""

import concurrent.futures
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from levanter_infer.checkpoints.remote import IN_FLIGHT, RemoteFile, read_ranges
from levanter_infer.checkpoints.source import Source, parse_json

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Supported dtypes of weights, by safetensors' names."""
RAW_DTYPES: dict[str, np.dtype] = DTYPES | {
    **{"U8": np.dtype(np.uint8), "I8": np.dtype(np.int8), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")},
    **{"F8_E4M3": np.dtype(np.uint8), "F8_E8M0": np.dtype(np.uint8)},
}
"""Dtypes of the parts of quantized weights too; floats of eight bits as their codes."""
_HEADER_GUESS = 2**18
"""Bytes of the first request for a remote header; most headers are shorter."""
_MAX_HEADER = 100_000_000
"""Largest header in bytes, as in the library."""
_MAX_NUMBER = 2**64 - 1
"""Largest number in a header, as in the library."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """The offset, shape and dtype of a tensor in a file, from the file's header."""

    path: Path | RemoteFile | str
    """Text: the place of an array that is in no file of its own."""
    name: str
    dtype: str
    """safetensors' name of the dtype, such as BF16."""
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""
    num_bytes: int

    def rows(self, start: int, stop: int) -> "StoredTensor":
        """The entries from `start` to `stop` of the first axis, as a tensor of their own: they are stored together."""
        if (start, stop) == (0, self.shape[0]):
            return self
        size, shape = self.num_bytes // self.shape[0], (stop - start, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + start * size, num_bytes=(stop - start) * size)

    def entry(self, index: int) -> "StoredTensor":
        """One entry of the first axis."""
        found = self.rows(index, index + 1)
        return replace(found, shape=found.shape[1:])

    def read_into(self, out: np.ndarray) -> None:
        """Read into `out`, which is contiguous and has this shape; converts to its dtype.

        Raises: ValueError if the file ends early.
        """
        read_tensors([(self, out)])

    @staticmethod
    def read_all(pieces: "Sequence[tuple[StoredTensor, np.ndarray]]") -> None:
        """`read_tensors` of tensors of this class."""
        _read_files(pieces)

    def _read(self, target: np.ndarray) -> None:
        assert isinstance(self.path, Path)
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            got = file.readinto(target.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        if got != self.num_bytes:
            raise ValueError(
                f"{self.path}: tensor {self.name!r} has {got} of {self.num_bytes} bytes; download it again"
            )


def read_tensors(pieces: Sequence[tuple[StoredTensor, np.ndarray]]) -> None:
    """Read tensors of one checkpoint into contiguous arrays of their shapes; converts dtypes, and reads remote tensors
    in parallel.

    Raises: ValueError if a file ends early.
    """
    for tensor, out in pieces:
        assert out.shape == tensor.shape and out.flags.c_contiguous
    by_class: dict[type[StoredTensor], list[tuple[StoredTensor, np.ndarray]]] = {}
    for piece in pieces:
        by_class.setdefault(type(piece[0]), []).append(piece)
    for kind, own in by_class.items():
        kind.read_all(own)


def _read_files(pieces: Sequence[tuple[StoredTensor, np.ndarray]]) -> None:
    ranges = []
    for tensor, out in pieces:
        assert not isinstance(tensor.path, str)
        stored = DTYPES[tensor.dtype]
        target = out if out.dtype == stored else np.empty(tensor.shape, stored)
        view = memoryview(target.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        if isinstance(tensor.path, Path):
            tensor._read(target)
        elif target is out:
            ranges.append((tensor.path, tensor.offset, view))
        else:  # one temporary copy at a time beside the arrays
            read_ranges([(tensor.path, tensor.offset, view)])
        if target is not out:
            out[...] = target.astype(out.dtype)
    if ranges:
        read_ranges(ranges)


def read_raw(tensors: Sequence[StoredTensor]) -> list[np.ndarray]:
    """Tensors as they are stored, of `RAW_DTYPES`; reads remote ones in parallel.

    Raises: ValueError if a file ends early.
    """
    arrays, ranges = [np.empty(tensor.shape, RAW_DTYPES[tensor.dtype]) for tensor in tensors], []
    for tensor, array in zip(tensors, arrays, strict=True):
        if isinstance(tensor.path, Path):
            tensor._read(array)
        else:
            view = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            ranges.append((tensor.path, tensor.offset, view))
    if ranges:
        read_ranges(ranges)
    return arrays


def stored_tensors(source: Source) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint, from the headers alone; reads no tensor.

    Raises: ValueError naming the file if one is missing, truncated or corrupt, if the index lists a tensor that its
        file does not hold, or if two files hold the same tensor.
    """
    found: dict[str, StoredTensor] = {}
    shards = source.shards()
    with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT) as pool:  # remote headers take a round trip each
        headers = pool.map(lambda shard: read_header(source.file(shard)), shards)
        for (shard, listed), header in zip(shards.items(), headers, strict=True):
            path = source.where(shard)
            absent = sorted((listed or set()) - set(header))
            if absent:
                raise ValueError(f"{path} lacks tensors that the index places there: {enumerate_names(absent)}")
            for name, tensor in header.items():
                if name in found:
                    raise ValueError(f"tensor {name!r} is in {found[name].path} and in {path}; remove one of them")
                found[name] = tensor
    return found


def read_header(path: Path | RemoteFile) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises: ValueError if it is not a whole, well-formed safetensors file."""
    try:
        if isinstance(path, Path):
            size = path.stat().st_size
            # Checks the header's size, dtypes, shapes against offsets, gaps, overlaps, and the length of the file.
            with safe_open(str(path), framework="numpy"):
                pass
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(length), f"the header of {path}")
        else:
            size = path.size
            length, header = _remote_header(path)
    except (SafetensorError, OSError, _Malformed) as error:
        raise ValueError(
            f"{path} ({size} bytes) is not a whole safetensors file: {error}; it is truncated or "
            "corrupt, download or write it again"
        ) from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return tensors


class _Malformed(Exception):
    """A header that is not one of a safetensors file."""


def _remote_header(file: RemoteFile) -> tuple[int, dict[str, Any]]:
    """Length and content of a header, with the checks that the library makes for a local file."""
    first = file.read(0, min(file.size, _HEADER_GUESS))
    length = int.from_bytes(first[:8], "little")
    if file.size < 8 or length > min(_MAX_HEADER, file.size - 8):
        raise _Malformed(f"its header would have {length} bytes")
    rest = b"" if 8 + length <= len(first) else file.read(len(first), 8 + length)
    try:
        header = parse_json((first + rest)[8 : 8 + length], "the header")
    except ValueError as e:
        raise _Malformed(str(e)) from e
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    spans = sorted(_span(name, entry) for name, entry in entries.items())
    end = 0
    for begin, next_end in spans:
        if begin != end:
            raise _Malformed(f"tensors overlap or leave a gap at byte {begin} of the data")
        end = next_end
    if 8 + length + end != file.size:
        raise _Malformed(f"its tensors end at byte {8 + length + end}")
    return length, header


def _span(name: str, entry: Any) -> tuple[int, int]:
    """First and one past the last byte of a tensor."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _Malformed(f"tensor {name!r} is described by {reprlib.repr(entry)}")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    numbers = lists and all(type(i) is int and 0 <= i <= _MAX_NUMBER for i in (*shape, *offsets))
    if not numbers or not isinstance(dtype, str):
        raise _Malformed(f"tensor {name!r} is described by {reprlib.repr(entry)}")
    begin, end = offsets
    volume = 1
    for size in shape:  # `math.prod` of a hostile shape takes hours
        volume *= size
        if volume > _MAX_NUMBER:
            raise _Malformed(f"tensor {name!r} has shape {reprlib.repr(shape)}")
    if end < begin or (dtype in RAW_DTYPES and end - begin != volume * RAW_DTYPES[dtype].itemsize):
        raise _Malformed(f"tensor {name!r} of {dtype} {reprlib.repr(shape)} has bytes {begin} to {end}")
    return begin, end


def write_safetensors(
    path: Path, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]], arrays: Iterator[np.ndarray]
) -> None:
    """Write a safetensors file with one tensor in memory at a time; replaces an older file once it is complete.

    Args:
        tensors: name, shape and dtype of each; the dtypes are among `DTYPES`.
        arrays: the values, in the same order.
    """
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in tensors:
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = sum(file.write(np.ascontiguousarray(array).tobytes()) for array in arrays)
        file.flush()
        os.fsync(file.fileno())
    assert written == end, f"wrote {written} bytes of tensors, the header says {end}"
    os.replace(partial, path)


def enumerate_names(names: list[str], most: int = 6) -> str:
    """The first few names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more
