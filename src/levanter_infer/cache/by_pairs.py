"""Gathers and scatters of tables as comparisons of all pairs of an index and an entry, for TPUs.

A TPU has no instruction that reads vectors at indices: XLA takes one number after the other, some 10 cycles each of a
vector and 14 of a table, and writes them in 80. All pairs of 512 indices and 512 entries are 256 registers, which are
compared, selected and summed up in 370 cycles (v5e). Of longer vectors and wider tables the 128 numbers around each
index are taken as a row, and compared. The results have the same bits, but for what is left open: what is read at an
absent index without a fill value, and which value of a repeated index is kept.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

_traced = contextvars.ContextVar("by_pairs", default=False)

_MOST_ENTRIES = 4096
"""Entries up to which all pairs take less than one number after the other."""
_MOST_SUMS = 512
"""Values up to which all pairs take less than XLA's cumulative sum."""
_MOST_COLUMNS = 1024
"""Columns of a table whose rows are read whole."""
_SUBLANES, _LANES = 8, 128
"""Rows and columns that a TPU stores side by side."""


@contextlib.contextmanager
def traced(value: bool) -> Iterator[None]:
    """Whether what is traced meanwhile may run on a TPU. Elsewhere tracing both forms of each table's access would take
    half of the time of tracing a step."""
    token = _traced.set(value)
    try:
        yield
    finally:
        _traced.reset(token)


def compares(array: Array, *indices: Array) -> bool:
    """Whether a vector is short enough to be compared with these indices, or the rows of a table to be read whole;
    whether its numbers have 32 bits or one; and whether the program that is traced may run on a TPU."""
    return _takes(array, *indices) and not _is_long(array)


def reads(array: Array, *indices: Array) -> bool:
    """Whether `gather` and `gather_at` take a vector or a table: as `compares`, and long ones of whole registers of 32
    bits."""
    whole = array.dtype != jnp.bool_ and array.shape[-1] % _LANES == 0
    whole = whole and (array.ndim == 1 or array.shape[0] % _SUBLANES == 0)
    return _takes(array, *indices) and (whole or not _is_long(array))


def sums(values: Array) -> bool:
    """Whether `cumsum` takes less than XLA's, and the program that is traced may run on a TPU."""
    return _traced.get() and values.ndim == 1 and values.shape[0] <= _MOST_SUMS


def _takes(array: Array, *indices: Array) -> bool:
    if not _traced.get() or array.dtype not in (jnp.int32, jnp.uint32, jnp.float32, jnp.bool_):
        return False
    if any(index.ndim != 1 or index.dtype != jnp.int32 for index in indices):
        return False
    return array.ndim == len(indices) <= 2 and indices[0].shape[0] <= _MOST_ENTRIES


def _is_long(array: Array) -> bool:
    return array.shape[-1] > (_MOST_ENTRIES if array.ndim == 1 else _MOST_COLUMNS)


def gather(array: Array, index: Array, fill) -> Array:
    """`array[index]`, [m], and `fill` where an index is absent; None: any value. Args: array: [n]; index: i32[m]."""
    index = _counted(index, array.shape[0])
    exists = (index >= 0) & (index < array.shape[0])
    if _is_long(array):
        # The bytes of the vector as they are.
        return _filled(_in_stretches(array.reshape(-1, _LANES), index // _LANES, index % _LANES), exists, fill)
    is_own = _iota((array.shape[0], index.shape[0]), 0) == index[None, :]
    found = jnp.sum(jnp.where(is_own, _as_ints(array)[:, None], 0), axis=0, dtype=jnp.int32)
    return _filled(_from_ints(found, array.dtype), exists, fill)


def gather_at(array: Array, row: Array, column: Array, fill) -> Array:
    """`array[row, column]`, [m], as `gather`. Args: array: [rows, columns]; row, column: i32[m]."""
    num_rows, num_columns = array.shape
    row, column = _counted(row, num_rows), _counted(column, num_columns)
    exists = (row >= 0) & (row < num_rows) & (column >= 0) & (column < num_columns)
    if not _is_long(array):
        return _filled(_in_stretches(array, row, column), exists, fill)
    # The bytes of the table as they are: registers of 8 rows of 128 numbers, one beside the other.
    tiles = num_rows // _SUBLANES, num_columns // _LANES
    stretches = array.reshape(tiles[0], _SUBLANES, tiles[1], _LANES).swapaxes(1, 2).reshape(-1, _LANES)
    place = (row // _SUBLANES * tiles[1] + column // _LANES) * _SUBLANES + row % _SUBLANES
    return _filled(_in_stretches(stretches, place, column % _LANES), exists, fill)


def _in_stretches(array: Array, row: Array, column: Array) -> Array:
    """`array[row, column]`, [m], any value where an index is absent."""
    return gather_along(array.at[row].get(mode="clip", wrap_negative_indices=False), column, None)


def gather_along(array: Array, column: Array, fill) -> Array:
    """`array[i, column[i]]` for each row i, as `gather`. Args: array: [rows, columns]; column: i32[rows]."""
    num_columns = array.shape[1]
    column = _counted(column, num_columns)
    is_own = _iota(array.shape, 1) == column[:, None]
    found = jnp.sum(jnp.where(is_own, _as_ints(array), 0), axis=1, dtype=jnp.int32)
    return _filled(_from_ints(found, array.dtype), (column >= 0) & (column < num_columns), fill)


def scatter(array: Array, index: Array, values: Array) -> Array:
    """`array` with `values` at `index`; those of absent indices are dropped, and of a repeated index one is kept.

    Args: array: [n]; index: i32[m]; values: [m], of the array's dtype.
    """
    is_own = _counted(index, array.shape[0])[:, None] == _iota((index.shape[0], array.shape[0]), 1)
    lowest = jnp.iinfo(jnp.int32).min
    found = jnp.max(jnp.where(is_own, _as_ints(values)[:, None], lowest), axis=0, initial=lowest)
    return jnp.where(jnp.any(is_own, axis=0), _from_ints(found, array.dtype), array)


def scatter_add(array: Array, index: Array, values: Array) -> Array:
    """`array` with `values` added at `index`; repeated indices count, absent ones are dropped.

    Args: as in `scatter`, of integers.
    """
    is_own = _counted(index, array.shape[0])[:, None] == _iota((index.shape[0], array.shape[0]), 1)
    return array + jnp.sum(jnp.where(is_own, values[:, None], 0), axis=0, dtype=array.dtype)


def cumsum(values: Array) -> Array:
    """i32[n]. Args: values: integers or bools [n]."""
    size = values.shape[0]
    is_added = _iota((size, size), 0) <= _iota((size, size), 1)
    return jnp.sum(jnp.where(is_added, values.astype(jnp.int32)[:, None], 0), axis=0, dtype=jnp.int32)


def _counted(index: Array, size: int) -> Array:
    """Negative indices counted from the end, as arrays take them."""
    return jnp.where(index < 0, index + size, index)


def _iota(shape: tuple[int, ...], axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _as_ints(array: Array) -> Array:
    return array.astype(jnp.int32) if array.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(array, jnp.int32)


def _from_ints(ints: Array, dtype) -> Array:
    return ints != 0 if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(ints, dtype)


def _filled(found: Array, exists: Array, fill) -> Array:
    return found if fill is None else jnp.where(exists, found, jnp.asarray(fill, found.dtype))
