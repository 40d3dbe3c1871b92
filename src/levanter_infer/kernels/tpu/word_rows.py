"""Rows of 128 lanes that an async copy takes from any row on.

A copy begins and ends at whole tiles, of 8 or 16 rows, while the tokens of a prompt chunk begin anywhere. So queries
and outputs are arrays [..., word rows, packing, 128], whose tiles are word rows: rows of 32 bits, each one row of
32-bit numbers, two of 16 bits or four of 8. The bytes are those of [..., rows, 128], as which XLA and the kernel's
loads and stores take them.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.tpu.pool import LANES


def copied_dtype(dtype: jnp.dtype, rows: int) -> jnp.dtype:
    """The dtype in which tokens of `rows` rows each are copied: `dtype`, or float32 where a token has no whole number
    of word rows."""
    return jnp.dtype(dtype) if rows % packing(dtype) == 0 else jnp.dtype(jnp.float32)


def packing(dtype: jnp.dtype) -> int:
    """Rows per word row."""
    return 4 // jnp.dtype(dtype).itemsize


def word_rows(rows: Array) -> Array:
    """[..., rows, 128] -> [..., word rows, packing, 128]"""
    return rows.reshape(*rows.shape[:-2], -1, packing(rows.dtype), LANES)


def load_words(ref, at: tuple[int | Array, ...], *, interpreted: bool) -> Array:
    """The word rows of `ref[at]` as numbers, i32[word rows, 128], the first row of each in the lowest bits. Args: as of
    `load_rows`."""
    if not interpreted:
        words = _as_words(ref)[at]
        return words if words.dtype == jnp.int32 else pltpu.bitcast(words, jnp.int32)
    rows = ref[at]
    return jax.lax.bitcast_convert_type(rows[:, 0] if packing(rows.dtype) == 1 else rows.swapaxes(1, 2), jnp.int32)


def store_words(ref, at: tuple[int | Array, ...], words: Array, *, interpreted: bool) -> None:
    """Store what `load_words` gives."""
    if not interpreted:
        of_ref = _as_words(ref)
        of_ref[at] = words if of_ref.dtype == jnp.int32 else pltpu.bitcast(words, of_ref.dtype)
    elif packing(ref.dtype) == 1:
        ref[at] = jax.lax.bitcast_convert_type(words, ref.dtype)[:, None]
    else:
        ref[at] = jax.lax.bitcast_convert_type(words, ref.dtype).swapaxes(1, 2)


def load_rows(ref, at: tuple[int | Array, ...], first: int, count: int, *, interpreted: bool) -> Array:
    """`count` rows from `first` on of `ref[at]`, [count, 128]. Requires: whole tiles.

    Args:
        ref: [*axes, word rows, packing, 128] in VMEM.
        at: an index for each of `axes`.
        interpreted: whether Pallas interprets the kernel, which knows no other views of a reference.
    """
    pack = packing(ref.dtype)
    own = slice(first // pack, (first + count) // pack)
    if interpreted:
        return ref[(*at, own)].reshape(count, LANES)
    words = _as_words(ref)[(*at, own)]
    return words if pack == 1 else pltpu.bitcast(words, ref.dtype)


def store_rows(ref, at: tuple[int | Array, ...], rows: Array, *, interpreted: bool) -> None:
    """Store all rows [rows, 128] of `ref[at]`. Args: as in `load_rows`."""
    if interpreted:
        ref[at] = word_rows(rows)
    else:
        _as_words(ref)[at] = rows if packing(ref.dtype) == 1 else pltpu.bitcast(rows, jnp.int32)


def _as_words(ref):
    """[..., word rows, 128] of 32 bits"""
    words = ref if packing(ref.dtype) == 1 else ref.bitcast(jnp.int32)
    *axes, _, lanes = words.shape
    return words.reshape(*axes, lanes)
