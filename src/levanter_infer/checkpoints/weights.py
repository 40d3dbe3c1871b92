"""The safetensors format, read and written one tensor at a time."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from levanter_infer.checkpoints.source import Source, parse_json

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""safetensors' names of the dtypes that weights may have."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file, from the file's header."""

    path: Path
    name: str
    dtype: str
    """safetensors' name of it, such as BF16."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    num_bytes: int

    def read_into(self, out: np.ndarray) -> None:
        """Fill `out`, contiguous and of this shape, converting to its dtype.

        Raises: ValueError if the file ends early.
        """
        assert out.shape == self.shape and out.flags.c_contiguous
        stored = DTYPES[self.dtype]
        target = out if out.dtype == stored else np.empty(self.shape, stored)
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            got = file.readinto(target.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        if got != self.num_bytes:
            raise ValueError(
                f"{self.path}: tensor {self.name!r} has {got} of {self.num_bytes} bytes; download it again"
            )
        if target is not out:
            out[...] = target.astype(out.dtype)


def stored_tensors(source: Source) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, from the headers alone: no tensor is read.

    Raises: ValueError naming the file if one is missing, truncated or corrupt, if the index lists a tensor that its
        file does not hold, or if two files hold the same tensor.
    """
    found: dict[str, StoredTensor] = {}
    for shard, listed in source.shards().items():
        path = source.file(shard)
        header = read_header(path)
        absent = sorted((listed or set()) - set(header))
        if absent:
            raise ValueError(f"{path} lacks tensors that the index places there: {enumerate_names(absent)}")
        for name, tensor in header.items():
            if name in found:
                raise ValueError(f"tensor {name!r} is in {found[name].path} and in {path}; remove one of them")
            found[name] = tensor
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises: ValueError if it is not a whole, well-formed safetensors file."""
    try:
        # Checks the header's size, dtypes, shapes against offsets, gaps, overlaps, and the length of the file.
        with safe_open(str(path), framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file: {error}; it is truncated or "
            "corrupt, download or write it again"
        ) from error
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size), f"the header of {path}")
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), 8 + size + begin, end - begin)
    return tensors


def write_safetensors(
    path: Path, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]], arrays: Iterator[np.ndarray]
) -> None:
    """Write a safetensors file, one tensor in memory at a time; an older file is replaced once the new one is whole.

    Args:
        tensors: name, shape and dtype of each; the dtypes are among `DTYPES`.
        arrays: the tensors themselves, in the same order.
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
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more
