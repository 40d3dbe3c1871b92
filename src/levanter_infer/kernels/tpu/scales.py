"""The scales of int8 pages in the `tpu` implementation.

The codes of the scales (`kernels.int8`) are stored with one row per key, and scores have their keys in lanes. So the
codes' slab is multiplied with rows that select one lane each, as queries are with the slabs of keys: the matrix unit
transposes it.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels import int8
from levanter_infer.kernels.tpu.pipeline import Pipeline
from levanter_infer.kernels.tpu.pool import LANES
from levanter_infer.kernels.tpu.sizes import Sizes

KEYS, VALUES = 0, 1


RAISED = 24
"""Powers of 2 by which the first quarter of the keys is larger than it should be after `load_numbers` by words."""


def load_numbers(
    pipeline: Pipeline, slot: Array, first_page: Array | int, pages: int, slab: int, *, raised: bool = True
) -> Array:
    """A slab of some pages of a work item in the operands' dtype, [keys, 128].

    With `Sizes.in_words` they are in the order of `key_order`, and the first quarter of them is 2^RAISED times as large
    if `raised`, for which the scales of `load_scales` make up.
    """
    sizes = pipeline.sizes
    stored = pipeline.kv[slot, pl.ds(first_page, pages), slab].reshape(pages * sizes.page_size, LANES)
    return (_widen_words(stored, raised) if sizes.in_words else stored).astype(sizes.operand)


def key_order(sizes: Sizes, place: Array, keys: int) -> Array:
    """The key at each place of `load_numbers` of so many keys, i32."""
    if not sizes.in_words:
        return place
    return 4 * jax.lax.rem(place, jnp.int32(keys // 4)) + jax.lax.div(place, jnp.int32(keys // 4))


def _widen_words(stored: Array, raised: bool) -> Array:
    """i8[n, 128] -> f32[n, 128]: first every fourth row from row 0 on, then from row 1, 2 and 3.

    The words of a register hold four rows of 8-bit numbers. Where the chip has no instruction that moves them apart,
    two shifts take out one of them with its sign. One spares the second if `raised`.
    """
    words = pltpu.bitcast(stored, jnp.int32)
    lowest = words << RAISED
    rows = [lowest if raised else lowest >> 24, (words << 16) >> 24, (words << 8) >> 24, words >> 24]
    return jnp.concatenate([row.astype(jnp.float32) for row in rows], axis=0)


def load_scales(pipeline: Pipeline, slot: Array, first_page: Array | int, pages: int) -> Array | None:
    """The scales of some pages of a work item: f32[rows, keys], row 2 h for the keys and row 2 h + 1 for the values of
    the part's kv head h; None if the pool has no scales."""
    sizes = pipeline.sizes
    if not sizes.pool.scaled:
        return None
    heads, narrow = sizes.groups * sizes.pool.heads_per_group, jnp.bfloat16
    shape = -(-2 * heads // 16) * 16, LANES
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    pick = jnp.where(lane - row == pipeline.part * (2 * heads), jnp.float32(1), jnp.float32(0)).astype(narrow)
    codes = load_numbers(pipeline, slot, first_page, pages, sizes.number_slabs, raised=False).astype(narrow)
    # Exact: the operands are integers up to 128, and ones.
    codes = jax.lax.dot_general(pick, codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    scales = int8.scale_of(codes)
    if not sizes.in_words:
        return scales
    place = jax.lax.broadcasted_iota(jnp.int32, scales.shape, 1)
    return scales * jnp.where(place < scales.shape[1] // 4, jnp.float32(2.0**-RAISED), jnp.float32(1))


def scales_of_rows(pipeline: Pipeline, scales: Array, group: int, side: int, head: Array) -> Array:
    """The scales that apply to the rows of a group of heads: f32, broadcastable to [rows, keys].

    Args:
        scales: of `load_scales`.
        side: `KEYS` or `VALUES`.
        head: query head of each row, i32[rows, 1].
    """
    sizes, first = pipeline.sizes, group * pipeline.sizes.pool.heads_per_group
    found = scales[2 * first + side][None, :]
    for i in range(1, sizes.pool.heads_per_group):
        begins = (pipeline.part * sizes.groups + group) * sizes.heads_per_group + i * sizes.q_per_kv
        found = jnp.where(head >= begins, scales[2 * (first + i) + side][None, :], found)
    return found


def scales_of_keys(codes: Array, kv_head: Array, side: int) -> Array:
    """The scales of a head's keys or values, f32[keys, 128], the same in all lanes.

    The matrix unit copies the code of a key into all lanes.

    Args:
        codes: of the pool's last slab, [keys, 128], in the operands' dtype.
        side: `KEYS` or `VALUES`.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    pick = jnp.where(row == 2 * kv_head + side, jnp.float32(1), jnp.float32(0)).astype(codes.dtype)
    # Exact: the operands are integers up to 128, and ones.
    return int8.scale_of(jax.lax.dot_general(codes, pick, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32))
