"""Compaction of a vector on a TPU: entries whose flag is not set go, and the others close up.

XLA would read the flags and write the entries one by one, 10 and 7 cycles each. Flags are read by a matmul with one
bit a row here, and entries move by powers of two.
"""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache import by_pairs
from levanter_infer.cache.arrays import LANES, scatter
from levanter_infer.kernels.loops import in_blocks

_ROWS = 2048
"""Indices whose flags are read at once."""


def flags_at(flags: Array, index: Array) -> Array:
    """`flags[index]`, bool[m]. Args: flags: bool[n]; index: i32[m]. Requires: indices that exist."""

    def plain(flags: Array, index: Array) -> Array:
        return flags[index]

    if not by_pairs.is_traced():
        return plain(flags, index)
    return jax.lax.platform_dependent(flags, index, tpu=flags_by_matmul, default=plain)


def closed_up(values: Array, keep: Array) -> Array:
    """The `values` i32[n] with the flag `keep`, bool[n], in their order, and anything behind them."""

    def plain(values: Array, keep: Array) -> Array:
        place = jnp.where(keep, jnp.cumsum(keep, dtype=jnp.int32) - 1, values.shape[0])
        return scatter(values, place, values)

    if not by_pairs.is_traced():
        return plain(values, keep)
    return jax.lax.platform_dependent(values, keep, tpu=closed_up_by_shifts, default=plain)


def flags_by_matmul(flags: Array, index: Array) -> Array:
    """`flags_at`. The table has rows of 128 flags: a matmul picks the row of each index, and a comparison the lane."""
    table = jnp.pad(flags, (0, -flags.shape[0] % LANES)).reshape(-1, LANES).astype(jnp.bfloat16)

    def block(numbers: Array) -> list[Array]:
        own = jax.lax.dynamic_slice_in_dim(index, numbers[0], numbers.shape[0])[:, None]
        row = (own // LANES == jnp.arange(table.shape[0])[None, :]).astype(jnp.bfloat16)
        found = jnp.matmul(row, table, preferred_element_type=jnp.float32)
        return [jnp.any((found > 0) & (own % LANES == jnp.arange(LANES)[None, :]), axis=1)]

    count = index.shape[0]
    return in_blocks(block, jnp.int32(count), count, _ROWS)[0]


def closed_up_by_shifts(values: Array, keep: Array) -> Array:
    """`closed_up`. An entry moves by the number of those before it that go: by its lowest bit first, then by the next,
    and never to the place of another, because the number grows by one at most from an entry to the next.

    Source: compress, Hacker's Delight, section 7-4.
    """
    count = values.shape[0]
    distance = jnp.where(keep, jnp.cumsum(~keep, dtype=jnp.int32), -1)  # -1: goes
    for bit in range((count - 1).bit_length()):
        step = 1 << bit
        from_right, distance_there = (
            jnp.concatenate([array[step:], jnp.full(step, fill, jnp.int32)])
            for array, fill in ((values, 0), (distance, -1))
        )
        arrives = (distance_there >= 0) & ((distance_there & step) != 0)
        leaves = (distance & step) != 0
        values = jnp.where(arrives, from_right, values)
        distance = jnp.where(arrives, distance_there, jnp.where(leaves, -1, distance))
    return values
