"""The choice of keys by an indexer in the `xla` implementation (`Backend.choose_keys`).

A tile of query blocks (`kernels.xla.blocks`) scores all keys up to its last query, a group of pages at a time, and
keeps the largest scores of each query. Tiles whose queries see no more keys than they may choose score none.
"""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import NO_KEY, AttentionCall, IndexQueries
from levanter_infer.kernels.loops import run_if
from levanter_infer.kernels.rules import decode_bits
from levanter_infer.kernels.xla.attention import keys_in_pages
from levanter_infer.kernels.xla.blocks import GROUP_TOKENS, Tile, passes, run_lane


def xla_choose_keys(call: AttentionCall, queries: IndexQueries) -> Array:
    """`Backend.choose_keys` in jnp."""
    num_pages = call.page_indices.shape[1]
    group_pages = min(-(-GROUP_TOKENS // call.page_size), num_pages)
    group = group_pages * call.page_size
    num_groups = -(-num_pages // group_pages)
    num_chosen = min(queries.num_chosen, num_pages * call.page_size)
    num_heads, f32 = queries.q.shape[1], jnp.float32

    def run(at: Tile) -> Array:
        tile, block_q = at.token.shape
        # [tile, (head, query), index_dim]: one matmul for all heads.
        q = at.of_tokens(queries.q).astype(f32).transpose(0, 2, 1, 3).reshape(tile, num_heads * block_q, -1)
        weights = at.of_tokens(queries.weights).astype(f32).transpose(0, 2, 1)[..., None]
        q_pos, live = at.q_pos[..., None], at.live[..., None]
        end = jnp.max(jnp.where(at.live, at.q_pos + 1, 0))

        def turn(carry):
            index, scores = carry
            kv_pos = (index * group + jnp.arange(group, dtype=jnp.int32))[None, None]
            keys, mapped = _index_keys(call, at.row, index, group_pages)
            matmul = jnp.einsum("bqd,bkd->bqk", q, keys, precision="highest")
            by_head = jax.nn.relu(matmul).reshape(tile, num_heads, block_q, group)
            seen = (kv_pos <= q_pos) & mapped[:, None, :] & live
            of_group = jnp.where(seen, jnp.sum(by_head * weights, axis=1), -jnp.inf)
            return index + 1, jax.lax.dynamic_update_slice_in_dim(scores, of_group, index * group, axis=2)

        def largest(_: Array) -> Array:
            scores = jnp.full((tile, block_q, num_groups * group), -jnp.inf, f32)
            _, scores = jax.lax.while_loop(lambda carry: carry[0] * group < end, turn, (jnp.int32(0), scores))
            values, positions = jax.lax.top_k(scores, num_chosen)
            return jnp.sort(jnp.where(values == -jnp.inf, NO_KEY, positions), axis=2)

        positions = jnp.arange(num_chosen, dtype=jnp.int32)[None, None]
        all_seen = jnp.where((positions <= q_pos) & live, positions, NO_KEY)
        return run_if(end > num_chosen, largest, all_seen)

    chosen = jnp.full((call.num_tokens, num_chosen), NO_KEY, jnp.int32)
    for lane, blocks in passes(call, 1, num_heads, group):
        chosen = run_lane(call, lane, blocks, chosen, run)
    return chosen


def _index_keys(call: AttentionCall, row: Array, index: Array, group_pages: int) -> tuple[Array, Array]:
    """The index keys of page group `index` of each row, f32[tile, tokens, index_dim], and which of them are on a page
    that is not none, bool[tile, tokens]. Latents are not read."""
    first = call.q.shape[2]
    pages, mapped = keys_in_pages(call, row, index, group_pages)
    stored = call.kv_pages.at[call.layer, pages, :, 0, first:].get(mode="clip")  # with the code of a scale, of int8
    keys = decode_bits(stored, call.kv_dtype)
    return keys.reshape(row.shape[0], -1, call.index_dim), mapped
