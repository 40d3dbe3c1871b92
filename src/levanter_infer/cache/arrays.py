"""Reading and writing tables by index, where an absent index is one past the end of its axis.

Slots, rows, pages and columns that do not exist are named by the size of their axis. `gather` reads a fill value there,
and the scatters drop what would be written there, so that no caller needs a mask.
"""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from haliax import NamedArray
from jax import Array

Module = TypeVar("Module")


def full(shape, value, dtype=jnp.int32) -> Array:
    return jnp.full(shape, value, dtype)


def gather(array: Array, index, fill=None) -> Array:
    """`array[index]`, and `fill` where an index is absent; None: any value.

    Args:
        index: an array, or a tuple of one per leading axis.
    """
    return array.at[index].get(mode="fill", fill_value=fill)


def scatter(array: Array, index, values) -> Array:
    """`array` with `values` at `index`; values of absent indices are dropped."""
    return array.at[index].set(values, mode="drop")


def scatter_add(array: Array, index, values) -> Array:
    """`array` with `values` added at `index`; repeated indices count, absent ones are dropped."""
    return array.at[index].add(values, mode="drop")


def scatter_max(array: Array, index, values) -> Array:
    return array.at[index].max(values, mode="drop")


def scatter_min(array: Array, index, values) -> Array:
    return array.at[index].min(values, mode="drop")


def replace(module: Module, **fields) -> Module:
    """`module` with new fields. An array must have the shape and dtype of the one that it replaces; a named one may be
    given without its axes."""
    for name, new in fields.items():
        old = getattr(module, name)
        if isinstance(old, NamedArray) and not isinstance(new, NamedArray):
            new = fields[name] = NamedArray(jnp.asarray(new), old.axes)
        if isinstance(old, Array) or isinstance(new, NamedArray):
            assert (new.dtype, new.shape) == (old.dtype, old.shape), (
                f"{name}: {new.dtype}{new.shape} replaces {old.dtype}{old.shape}"
            )
    return dataclasses.replace(module, **fields)  # type: ignore[type-var]
