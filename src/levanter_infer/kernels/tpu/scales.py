"""The scales of int8 pages in the `tpu` implementation.

The codes of the scales (`kernels.int8`) are stored with one row per key, and scores have their keys in lanes. So the
codes' slab is multiplied with rows that select one lane each, as queries are with the slabs of keys: the matrix unit
transposes it.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from levanter_infer.kernels import int8
from levanter_infer.kernels.tpu.pipeline import Pipeline
from levanter_infer.kernels.tpu.pool import LANES

KEYS, VALUES = 0, 1


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
    codes = pipeline.kv[slot, pl.ds(first_page, pages), sizes.number_slabs].reshape(width, LANES).astype(narrow)
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
