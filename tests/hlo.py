"""Reads compiled programs: is there an operation that writes a second KV pool, or a whole layer of one?"""

import math
import re

import jax.numpy as jnp

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"([a-z]+[0-9a-z]*)\[([0-9,]*)\]")
_MOVES = {"copy", "copy-start", "transpose", "slice", "dynamic-slice", "gather", "concatenate", "pad", "reverse"}
_CONVERTS = {"convert", "reduce-precision"}
_NAMES = {"bool": "pred", "bfloat16": "bf16", "uint": "u", "int": "s", "float": "f"}


def pool_copies(compiled_text: str, pool_shape: tuple[int, ...], dtype) -> list[str]:
    """Instructions of a compiled program that write an array as large as the pool, or as one layer of it.

    Args:
        compiled_text: `compiled.as_text()`; the bodies of fusions and loops are part of it.
        pool_shape: [layers, ...]. Choose sizes that nothing else in the program has: arrays are recognised by their
            number of elements, so that a reshaped pool is found too.
        dtype: as stored. Copies and slices of this dtype count, and conversions to any.

    Returns: the offending lines, stripped; writes in place are not among them.
    """
    name = hlo_dtype(dtype)
    sizes = {math.prod(pool_shape), math.prod(pool_shape[1:])}
    return [line.strip() for line in compiled_text.splitlines() if _offends(line, sizes, name)]


def hlo_dtype(dtype) -> str:
    """XLA's name of a dtype."""
    name = jnp.dtype(dtype).name
    for ours, theirs in _NAMES.items():
        if name.startswith(ours):
            return theirs + name[len(ours) :].replace("_", "")
    raise ValueError(f"no XLA name known for dtype {name}")


def _offends(line: str, sizes: set[int], dtype: str) -> bool:
    match = _INSTRUCTION.match(line)
    if match is None or match[2] not in _MOVES | _CONVERTS:
        return False
    return any(
        math.prod(int(n) for n in dims.split(",") if n) in sizes and (found == dtype or match[2] in _CONVERTS)
        for found, dims in _ARRAY.findall(match[1])
    )
