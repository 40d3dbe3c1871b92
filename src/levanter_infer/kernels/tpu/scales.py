"""The scales of int8 pages in the `tpu` implementation.

The codes of the scales (`kernels.int8`) are stored with one row per key, and scores have their keys in lanes. So the
codes' slab is multiplied with rows that select one lane each, as queries are with the slabs of keys: the matrix unit
transposes it.
"""

import os

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


def load_numbers(pipeline: Pipeline, slot: Array, first_page: Array | int, pages: int, slab: int) -> Array:
    """A slab of some pages of a work item in the operands' dtype, [keys, 128]; in the order of `key_order`."""
    sizes = pipeline.sizes
    stored = pipeline.kv[slot, pl.ds(first_page, pages), slab].reshape(pages * sizes.page_size, LANES)
    return _widen_words(stored) if sizes.in_words else stored.astype(sizes.operand)


def key_order(sizes: Sizes, place: Array, keys: int) -> Array:
    """The key at each place of `load_numbers` of so many keys, i32."""
    if not sizes.in_words:
        return place
    in_half = jnp.where(place < keys // 2, place, place - keys // 2)
    return 4 * (in_half >> 1) + (in_half & 1) + jnp.where(place < keys // 2, 0, 2)


def _widen_words(stored: Array) -> Array:
    """i8[n, 128] -> bf16[n, 128], with the rows in another order.

    A register holds four rows of 8-bit numbers in its words, or two of 16-bit ones. Where the chip has no instruction
    that moves them apart, words are shifted: of rows 4 i to 4 i + 3 the first two become rows 2 i and 2 i + 1 of the
    first half, and the others those of the second.
    """
    words = pltpu.bitcast(stored, jnp.int32)
    rows = [((words << (24 - 8 * i)) if i < 3 else words) >> 24 for i in range(4)]
    if os.environ.get("PK") == "1":
        f = [r.astype(jnp.float32) for r in rows]
        halves = [pltpu.pack_elementwise(f[i:i+2], packed_dtype=jnp.bfloat16) for i in (0,2)]
        return jnp.concatenate([pltpu.bitcast(h, jnp.bfloat16) for h in halves], axis=0)
    # Integers below 2^8 use the upper half of a 32-bit float alone.
    bits = [jax.lax.bitcast_convert_type(row.astype(jnp.float32), jnp.int32) for row in rows]
    halves = [bits[i + 1] | jax.lax.shift_right_logical(bits[i], jnp.int32(16)) for i in (0, 2)]
    return jnp.concatenate([pltpu.bitcast(half, jnp.bfloat16) for half in halves], axis=0)


def load_scales(pipeline: Pipeline, slot: Array, first_page: Array | int, pages: int) -> Array | None:
    """The scales of some pages of a work item: f32[rows, keys], row 2 h for the keys and row 2 h + 1 for the values of
    the part's kv head h; None if the pool has no scales."""
    sizes = pipeline.sizes
    if not sizes.pool.scaled:
        return None
    heads, width, narrow = sizes.groups * sizes.pool.heads_per_group, pages * sizes.page_size, jnp.bfloat16
    shape = -(-2 * heads // 16) * 16, LANES
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    pick = jnp.where(lane - row == pipeline.part * (2 * heads), jnp.float32(1), jnp.float32(0)).astype(narrow)
    codes = load_numbers(pipeline, slot, first_page, pages, sizes.number_slabs).astype(narrow)
    # Exact: the operands are integers up to 128, and ones.
    return int8.scale_of(jax.lax.dot_general(pick, codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32))


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


def scales_of_columns(pipeline: Pipeline, codes: Array, group: int, side: int, head: Array) -> Array:
    """The scales that apply to keys in sublanes and pairs of query and head in lanes: f32[keys, columns].

    The matrix unit copies the code of a key into all lanes.

    Args:
        codes: of the pool's last slab, [keys, 128], in the operands' dtype.
        side: `KEYS` or `VALUES`.
        head: query head of each column, i32[1, columns].
    """
    sizes = pipeline.sizes
    columns, first = head.shape[1], (pipeline.part * sizes.groups + group) * sizes.pool.heads_per_group

    def of(kv_head: Array) -> Array:
        row = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
        pick = jnp.where(row == 2 * kv_head + side, jnp.float32(1), jnp.float32(0)).astype(codes.dtype)
        # Exact: the operands are integers up to 128, and ones.
        copied = jax.lax.dot_general(codes, pick, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return jnp.concatenate([int8.scale_of(copied)] * (columns // LANES), axis=1)

    found = of(first)
    for i in range(1, sizes.pool.heads_per_group):
        found = jnp.where(head >= (first + i) * sizes.q_per_kv, of(first + i), found)
    return found
