"""The scales of 8-bit integers within the `tpu` implementation.

Codes lie key by key, and scores have their keys in lanes. So the codes' slab is multiplied with rows that pick one lane
each, as queries are with the keys' slabs: the matrix unit turns it around.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from levanter_infer.kernels import int8
from levanter_infer.kernels.tpu.pipeline import Walk
from levanter_infer.kernels.tpu.pool import LANES

KEYS, VALUES = 0, 1


def load_scales(walk: Walk, slot: Array, first_page: Array | int, pages: int) -> Array | None:
    """The scales of some pages of an item: f32[row, key] with a row for the keys and one for the values of each kv head
    of the part, in turn; None if the pool has none."""
    sizes = walk.sizes
    if not sizes.pool.scaled:
        return None
    heads, width, narrow = sizes.groups * sizes.pool.heads_per_group, pages * sizes.page_size, jnp.bfloat16
    shape = -(-2 * heads // 16) * 16, LANES
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    pick = jnp.where(lane - row == walk.part * (2 * heads), jnp.float32(1), jnp.float32(0)).astype(narrow)
    codes = walk.kv[slot, pl.ds(first_page, pages), sizes.number_slabs].reshape(width, LANES).astype(narrow)
    # Integers up to 128 and ones: exact.
    return int8.scale_of(jax.lax.dot_general(pick, codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32))


def scales_of_rows(walk: Walk, scales: Array, group: int, side: int, head: Array) -> Array:
    """Those that concern rows of a group of heads: f32, broadcastable to [row, key].

    Args:
        side: `KEYS` or `VALUES`.
        head: query head of each row, i32[row, 1].
    """
    sizes, first = walk.sizes, group * walk.sizes.pool.heads_per_group
    found = scales[2 * first + side][None, :]
    for i in range(1, sizes.pool.heads_per_group):
        begins = (walk.part * sizes.groups + group) * sizes.heads_per_group + i * sizes.q_per_kv
        found = jnp.where(head >= begins, scales[2 * (first + i) + side][None, :], found)
    return found
