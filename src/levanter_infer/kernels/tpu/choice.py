"""Sparse attention on TPUs: keys that an indexer has not chosen are masked by the matmul of queries and keys.

Attention computes all keys, because those that one token has chosen are scattered over the pool, and a TPU copies
thousands of single keys more slowly than it multiplies tens of thousands that are contiguous. A page in VMEM has one
slab more, whose lanes are tokens: 0 for a key that the token has chosen, -1 for others. A query has one tile of lanes
more, `_FAR` in the lane of its token and 0 elsewhere. So the matmul of both adds 0 or -`_FAR` to a score. Only rules
that may bound a score, as a soft cap does, and `mask_mod` need a comparison of their own (`masked`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels import int8
from levanter_infer.kernels.call import AttentionCall, IndexQueries
from levanter_infer.kernels.loops import run_if
from levanter_infer.kernels.rules import MASKED, ScoreRules
from levanter_infer.kernels.tpu.pool import LANES, TpuPool
from levanter_infer.kernels.xla.blocks import Tile
from levanter_infer.kernels.xla.index import ACCELERATOR, Chooser

_FAR = 1e30
"""What a key that is not chosen lacks in its score, before the scale: in float32 every finite score vanishes beside
it. It stands on the side of queries, whose numbers have 16 or 32 bits; 8-bit pages hold 0 and -1 alone."""
MAX_QUERIES = LANES // 2
"""Most queries of a query block: those of one block have lanes in the same group of tokens."""


def group_of(token):
    """The group of tokens of a query block that begins with `token`: group g has the lanes of `LANES` tokens, from
    g · `MAX_QUERIES` on, so that neighbours overlap by half."""
    return token >> (MAX_QUERIES.bit_length() - 1)


def choice_type(num_tokens: int, max_pages: int, page_size: int, kv_dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the choice, [groups of tokens, column of the page table, page_size, lanes]."""
    return jax.ShapeDtypeStruct((-(-num_tokens // MAX_QUERIES), max_pages, page_size, LANES), kv_dtype)


def choose_keys(call: AttentionCall, queries: IndexQueries) -> Array:
    """`Backend.choose_keys`, of the type that `choice_type` gives: 0 for a key that is chosen, -1 for others. Keys
    beyond a query, which causality hides, may have either."""
    size, kv_dtype = call.page_indices.shape[1] * call.page_size, call.kv_dtype
    dtype = jnp.bfloat16  # that all devices add up, whatever that of the pool is
    none = jnp.zeros((call.num_tokens, size), dtype)

    def all_seen(at: Tile) -> Array:
        return jnp.zeros((*at.token.shape, size), dtype)

    def largest(scores: Array) -> Array:
        return is_largest(scores, queries.num_chosen).astype(dtype) - dtype(1)

    by_token = Chooser(call, queries, ACCELERATOR, _index_keys, all_seen, largest).run(none)
    groups = -(-call.num_tokens // MAX_QUERIES)
    halves = jnp.pad(by_token, ((0, (groups + 1) * MAX_QUERIES - call.num_tokens), (0, 0)))
    halves = halves.reshape(groups + 1, MAX_QUERIES, size)
    lanes = jnp.concatenate([halves[:-1], halves[1:]], axis=1).astype(kv_dtype)
    return lanes.swapaxes(1, 2).reshape(groups, -1, call.page_size, LANES)


def is_largest(scores: Array, count: int) -> Array:
    """bool[..., n]: whether a score is one of the `count` largest of its row, of equal ones the first; false for -inf.

    The threshold is found bit by bit, without a sort.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # in the order of the scores

    def reaching(threshold: Array) -> Array:
        return jnp.sum(keys >= threshold, axis=-1, keepdims=True, dtype=jnp.int32)

    def one_bit(number: Array, threshold: Array) -> Array:
        higher = threshold + (jnp.int32(1) << (31 - number))  # the first addition goes from the least number to 0
        return jnp.where(reaching(higher) >= count, higher, threshold)

    least = jnp.full((*keys.shape[:-1], 1), jnp.iinfo(jnp.int32).min)
    threshold = jax.lax.fori_loop(0, 32, one_bit, least)
    above, equal = keys > threshold, keys == threshold
    missing = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)

    def first_equal(_: Array) -> Array:
        return above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= missing))

    some_are_left_out = jnp.any(reaching(threshold) > count)
    return run_if(some_are_left_out, first_equal, above | equal) & (scores > -jnp.inf)


def masked(scores: Array, matmul: Array, rules: ScoreRules) -> Array:
    """Scores with those of keys that are not chosen masked, where the rules may have brought them near the others, or
    may hide all chosen keys, so that the others would be the best.

    Args: matmul: q · k, before the rules.
    """
    if rules.is_linear and rules.mask_mod is None:
        return scores
    return jnp.where(matmul < jnp.float32(-_FAR / 2), jnp.float32(MASKED), scores)


def with_own_lane(q: Array, call: AttentionCall, queries: int) -> Array:
    """Packed queries with the tile of the choice of keys, [T, groups, rows, query_tiles, 128]; the same where queries
    see all keys.

    Args:
        q: as `TpuPool.pack_queries` gives them.
        queries: of a query block.
    """
    if call.chosen is None:
        return q
    token = jnp.arange(call.num_tokens, dtype=jnp.int32)
    is_before = (call.cu_q_lens[None, :-1] <= token[:, None]) & (call.q_lens[None] > 0)
    start = jnp.max(jnp.where(is_before, call.cu_q_lens[None, :-1], 0), axis=1)
    first = start + (token - start) // queries * queries
    lane = token - group_of(first) * MAX_QUERIES
    own = jnp.where(jnp.arange(LANES, dtype=jnp.int32)[None] == lane[:, None], _FAR, 0.0).astype(q.dtype)
    own = jnp.broadcast_to(own[:, None, None, None], (*q.shape[:3], 1, LANES))
    return jnp.concatenate([q, own], axis=3)


def _index_keys(call: AttentionCall, pages: Array) -> Array:
    """As in `Chooser`."""
    pool = TpuPool.of(call)
    first = pool.number_slabs - pool.index_slabs
    slabs = jnp.arange(first, pool.number_slabs, dtype=jnp.int32)[None, None]
    read = functools.partial(call.kv_pages.at[call.layer, pages[..., None], slabs].get, mode="clip")
    keys = jnp.moveaxis(read(), 2, 3).reshape(pages.shape[0], -1, pool.index_slabs * LANES)[..., : call.index_dim]
    if not pool.scaled:
        return keys.astype(jnp.float32)
    codes = call.kv_pages.at[call.layer, pages, pool.number_slabs, :, 0].get(mode="clip")
    return int8.decode(keys, codes.reshape(pages.shape[0], -1, 1))
