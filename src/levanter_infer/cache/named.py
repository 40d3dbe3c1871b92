"""Small helpers between named axes (at rest) and plain arrays (inside vectorised index arithmetic)."""

import dataclasses
from typing import TypeVar

import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray

Module = TypeVar("Module")


def full(axes: tuple[tuple[str, int], ...], value, dtype=jnp.int32) -> NamedArray:
    """An array of `value` over axes given as (name, size) pairs."""
    return hax.named(jnp.full([size for _, size in axes], value, dtype), [name for name, _ in axes])


def scalar(value, dtype=jnp.int32) -> NamedArray:
    return hax.named(jnp.asarray(value, dtype), ())


def replace(module: Module, **arrays) -> Module:
    """`module` with the named fields holding new plain arrays of the same axes."""
    fields = {}
    for name, array in arrays.items():
        old = getattr(module, name)
        if isinstance(old, NamedArray) and not isinstance(array, NamedArray):
            assert array.shape == old.array.shape, f"{name}: shape {array.shape} does not fit axes {old.axes}"
            assert array.dtype == old.array.dtype, f"{name}: dtype {array.dtype} replaces {old.array.dtype}"
            array = NamedArray(array, old.axes)
        fields[name] = array
    return dataclasses.replace(module, **fields)  # type: ignore[type-var]
