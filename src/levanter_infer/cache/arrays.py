"""Reading and writing tables by index, where an absent index is one past the end of its axis.

Slots, rows, pages and columns that do not exist are named by the size of their axis. `gather` reads a fill value there,
and the scatters drop what would be written there, so that no caller needs a mask.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import Array

from levanter_infer.cache import by_pairs

Module = TypeVar("Module")
_FILL: dict = {"mode": "fill", "wrap_negative_indices": False}
_DROP: dict = {"mode": "drop", "wrap_negative_indices": False}
"""Indices are never negative: JAX would wrap them, with a comparison, an addition and a selection for each."""


def full(shape, value, dtype=jnp.int32) -> Array:
    return jnp.full(shape, value, dtype)


def gather(array: Array, index, fill=None) -> Array:
    """`array[index]`, and `fill` where an index is absent; None: any value.

    Args:
        index: an array, or a tuple of one per leading axis.
    """

    def plain(array: Array, *indices: Array) -> Array:
        return array.at[indices].get(**_FILL, fill_value=fill)

    indices = tuple(map(jnp.asarray, index)) if isinstance(index, tuple) else (jnp.asarray(index),)
    if not by_pairs.reads(array, *indices):
        return plain(array, *indices)
    compared = functools.partial(by_pairs.gather if array.ndim == 1 else by_pairs.gather_at, fill=fill)
    return jax.lax.platform_dependent(array, *indices, tpu=compared, default=plain)


def gather_along(array: Array, column: Array, fill=None) -> Array:
    """`array[i, column[i]]` for each row i of a table, and `fill` where a column is absent, as `gather`."""

    def plain(array: Array, column: Array) -> Array:
        return array.at[jnp.arange(array.shape[0]), column].get(**_FILL, fill_value=fill)

    if not by_pairs.compares(array, column, column):
        return plain(array, column)
    compared = functools.partial(by_pairs.gather_along, fill=fill)
    return jax.lax.platform_dependent(array, column, tpu=compared, default=plain)


def cumsum(values: Array) -> Array:
    """Cumulative sums of integers or bools, i32[n]."""

    def plain(values: Array) -> Array:
        return jnp.cumsum(values, dtype=jnp.int32)

    if not by_pairs.sums(values):
        return plain(values)
    return jax.lax.platform_dependent(values, tpu=by_pairs.cumsum, default=plain)


def gather_together(columns: Mapping[str, Array], index: Array, fills: Mapping[str, float | int]) -> dict[str, Array]:
    """`gather` of each of some columns [n] of 32 bits. Side by side they are rows, and a TPU takes a row in a tenth of
    the time that it takes for a number."""
    rows = jnp.stack([_as_type(column, jnp.int32) for column in columns.values()], axis=1)
    found, exists = rows.at[index].get(mode="clip", wrap_negative_indices=False), index < rows.shape[0]
    of_column = {name: _as_type(found[:, i], column.dtype) for i, (name, column) in enumerate(columns.items())}
    return {name: jnp.where(exists, own, jnp.asarray(fills[name], own.dtype)) for name, own in of_column.items()}


def _as_type(array: Array, dtype) -> Array:
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


LANES = 128
"""Numbers up to a multiple of which a TPU fills the last axis of an array."""


@dataclasses.dataclass(frozen=True)
class ShortRows:
    """A table whose rows are short, with as many side by side as fit `LANES`: an array [stored row, numbers].

    Of 16,384 rows of 8 numbers, which are 0.5 MB, a TPU would fill up each by itself, and store 8. Numbers are written
    one by one: a stretch of lanes takes a TPU some 500 cycles, a whole row or one number a tenth of that.
    """

    num_rows: int
    width: int
    """Numbers of a row."""

    @property
    def side_by_side(self) -> int:
        return LANES // self.width if LANES % self.width == 0 else 1

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the array."""
        return -(-self.num_rows // self.side_by_side), self.side_by_side * self.width

    def gather(self, array: Array, index: Array) -> Array:
        """Rows `index` of any shape, [..., width]; zeros where one is absent."""
        count = self.side_by_side
        row, place = self._place(index)
        stored = gather(array, row, 0).reshape(*index.shape, count, self.width)
        is_own = jax.lax.broadcasted_iota(jnp.int32, (*index.shape, count), index.ndim) == place[..., None]
        return jnp.sum(jnp.where(is_own[..., None], stored, 0), axis=-2, dtype=array.dtype)

    def scatter(self, array: Array, index: Array, column: Array, values: Array) -> Array:
        """The array with `values` [n] at `column` i32[n] of the rows `index` i32[n]; absent ones are dropped."""
        row, place = self._place(index)
        return scatter(array, (row, place * self.width + column), values)

    def _place(self, index: Array) -> tuple[Array, Array]:
        """Stored rows, absent ones for absent `index`, and places in them."""
        row = jnp.where(index < self.num_rows, index // self.side_by_side, self.shape[0])
        return row, index % self.side_by_side


def scatter(array: Array, index, values) -> Array:
    """`array` with `values` at `index`; values of absent indices are dropped. Of a repeated index any value is kept, in
    other arrays perhaps another."""
    return _written(array, index, values, by_pairs.scatter, lambda at, values: at.set(values, **_DROP))


def scatter_add(array: Array, index, values) -> Array:
    """`array` with `values` added at `index`; repeated indices count, absent ones are dropped."""
    add = by_pairs.scatter_add if jnp.issubdtype(array.dtype, jnp.integer) else None
    return _written(array, index, values, add, lambda at, values: at.add(values, **_DROP))


def _written(array: Array, index, values, compared: Callable | None, plain: Callable) -> Array:
    """`plain(array.at[index], values)`, which is `compared(array, index, values)` on a TPU where that takes it."""
    is_vector = array.ndim == 1 and isinstance(index, Array) and by_pairs.compares(array, index)
    is_typed = not isinstance(values, Array) or values.dtype == array.dtype  # JAX refuses others
    if compared is None or not is_vector or not is_typed:
        return plain(array.at[index], values)
    values = jnp.broadcast_to(jnp.asarray(values, array.dtype), index.shape)
    return jax.lax.platform_dependent(
        array, index, values, tpu=compared, default=lambda array, index, values: plain(array.at[index], values)
    )


def scatter_max(array: Array, index, values) -> Array:
    return array.at[index].max(values, **_DROP)


def scatter_min(array: Array, index, values) -> Array:
    return array.at[index].min(values, **_DROP)


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
