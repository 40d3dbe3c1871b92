"""Arrays of a model <-> tensors of an HF checkpoint: names, layouts, and the safetensors format."""

import json
import os
from pathlib import Path
from typing import Iterable, Iterator

import equinox as eqx
import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""safetensors' names of the dtypes that weights may have."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(path: Path, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]], arrays: Iterator) -> None:
    """Write a safetensors file, one tensor in memory at a time; an older file is replaced once the new one is whole.

    Args:
        tensors: name, shape and dtype of each.
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
        written = 0
        for array in arrays:
            written += file.write(np.ascontiguousarray(array).tobytes())
        file.flush()
        os.fsync(file.fileno())
    assert written == end, f"wrote {written} bytes of tensors, the header says {end}"
    os.replace(partial, path)


def set_parameter(model: eqx.Module, path: str, value):
    """`model` with the array at the dotted attribute `path` replaced."""

    def at(tree):
        for name in path.split("."):
            tree = getattr(tree, name)
        return tree

    return eqx.tree_at(at, model, value, is_leaf=lambda leaf: leaf is None)


def get_parameter(model: eqx.Module, path: str):
    for name in path.split("."):
        model = getattr(model, name)
    return model
