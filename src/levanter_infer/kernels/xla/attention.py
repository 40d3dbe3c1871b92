"""The `xla` implementation: paged attention with an online softmax over page groups, a few query blocks at a time.

Within a tile of query blocks (`kernels.xla.blocks`) one loop over groups of pages keeps m, l and acc (running maximum,
denominator and output) of every query. Only the groups that a tile's queries see are visited, so the work follows the
live contexts; groups that a query does not see change none of its bits. Where an indexer has chosen the keys of each
token, every token is a query block, and its groups are of chosen keys.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import NO_KEY, AttentionCall
from levanter_infer.kernels.rules import MASKED, NOTHING_SEEN, decode_bits
from levanter_infer.kernels.xla.blocks import GROUP_TOKENS, Tile, cut, lanes, passes, run_lane


def xla_attention(call: AttentionCall) -> Array:
    """`ragged_paged_attention` in jnp. Returns: [T, Hq, D] (of latents [T, Hq, value_dim]), 0 for padding tokens."""
    tiles = _Tiles(call, min(-(-GROUP_TOKENS // call.page_size), call.page_indices.shape[1]))
    heads = call.kv_heads, call.heads_per_kv_head
    if call.chosen is None:
        parts = passes(call, *heads, tiles.group)
    else:
        lane, _ = lanes(call.num_tokens, call.num_tokens, *heads, tiles.group)
        parts = [(lane, cut(call.q_lens, call.seq_lens, call.cu_q_lens, 1, call.num_tokens))]
    out = jnp.zeros(call.out_shape, call.q.dtype)
    for lane, blocks in parts:
        out = run_lane(call, lane, blocks, out, tiles.run)
    return out


def keys_in_pages(call: AttentionCall, row: Array, index: Array, group_pages: int) -> tuple[Array, Array]:
    """Pages of the page group `index` of each row, i32[tile, group_pages], and which of their keys are on a page that
    is not none, bool[tile, tokens]."""
    num_pages = call.kv_pages.shape[1]
    column = index * group_pages + jnp.arange(group_pages, dtype=jnp.int32)
    pages = call.page_indices.at[row[:, None], column[None, :]].get(mode="fill", fill_value=num_pages)
    return pages, jnp.repeat(pages < num_pages, call.page_size, axis=1)


@dataclass(frozen=True)
class _Tiles:
    """The call and the sizes that all tiles share."""

    call: AttentionCall
    group_pages: int
    """Pages per turn of the online softmax; of chosen keys, a turn has as many keys."""

    @property
    def group(self) -> int:
        """Keys per turn."""
        return self.group_pages * self.call.page_size

    def run(self, at: Tile) -> Array:
        """Attention of one tile.

        Returns: [tile, block_q, Hq, size of values].
        """
        call, group, f32 = self.call, self.group, jnp.float32
        queries, q_pos, live = at.of_tokens(call.q), at.q_pos, at.live
        tile, block_q, num_heads, head_dim = queries.shape
        kv_heads, per_kv_head = call.kv_heads, call.heads_per_kv_head
        # [tile, kv_head, (head, query), D]: one matmul per kv head, so that keys and values are never repeated.
        query = queries.astype(f32).reshape(tile, block_q, kv_heads, per_kv_head, head_dim).transpose(0, 2, 3, 1, 4)
        query = query.reshape(tile, kv_heads, per_kv_head * block_q, head_dim)
        head = jnp.arange(num_heads, dtype=jnp.int32).reshape(1, kv_heads, per_kv_head, 1, 1)
        if call.chosen is None:
            chosen = None
            end = jnp.max(jnp.where(live, q_pos + 1, 0))
            start = jnp.min(jnp.where(live, call.rules.first_seen(q_pos), end))
        else:  # the first query of a block, which is its only one
            chosen = call.chosen.at[at.token[:, 0]].get(mode="fill", fill_value=NO_KEY)
            start, end = jnp.int32(0), jnp.max(jnp.sum(chosen != NO_KEY, axis=1, dtype=jnp.int32))
        q_pos, live = q_pos[:, None, None, :, None], live[:, None, None, :, None]
        by_row, by_head = query.shape[:3], (tile, kv_heads, per_kv_head, block_q)

        def body(carry):
            # by_row = [tile, Hkv, heads per kv head * block_q]: m and l are [*by_row, 1], acc is [*by_row, value_dim].
            index, m_prev, l_prev, acc = carry
            place = index * group + jnp.arange(group, dtype=jnp.int32)
            if chosen is None:
                kv_pos = place.reshape(1, 1, 1, 1, group)
                keys, values, mapped = self.load(at.row, index)
            else:
                positions = chosen.at[:, place].get(mode="fill", fill_value=NO_KEY)
                kv_pos = positions[:, None, None, None, :]
                keys, values, mapped = self.load_chosen(at.row, positions)
            seen = call.rules.seen(q_pos, kv_pos, head) & mapped[:, None, None, None, :] & live
            # A value that no query of the block sees is set to 0; a weight of 0 would not suffice: 0 * NaN is NaN.
            used = jnp.any(seen, axis=(2, 3))[..., None]
            values = jnp.where(jnp.broadcast_to(used, values.shape), values, f32(0))
            matmul = jnp.einsum("bhqd,bhkd->bhqk", query, keys, precision="highest")
            scores = call.rules.scores(matmul.reshape(*by_head, group), q_pos, kv_pos, head)
            scores = jnp.where(seen, scores, f32(MASKED)).reshape(*by_row, group)
            m_new = jnp.maximum(m_prev, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.exp(scores - m_new)
            alpha = jnp.exp(m_prev - m_new)
            l_new = l_prev * alpha + jnp.sum(weights, axis=-1, keepdims=True)
            acc = acc * alpha + jnp.einsum("bhqk,bhkd->bhqd", weights, values, precision="highest")
            return index + 1, m_new, l_new, acc

        if call.sinks is None:
            m_init, l_init = jnp.full((*by_row, 1), NOTHING_SEEN, f32), jnp.zeros((*by_row, 1), f32)
        else:
            m_init = jnp.broadcast_to(call.sinks.reshape(head.shape)[..., 0], by_head).reshape(*by_row, 1)
            l_init = jnp.ones((*by_row, 1), f32)
        value_dim = call.out_shape[2]
        init = (start // group, m_init, l_init, jnp.zeros((*by_row, value_dim), f32))
        _, _, l_last, acc = jax.lax.while_loop(lambda carry: carry[0] * group < end, body, init)
        result = (acc / jnp.where(l_last == 0, f32(1), l_last)).reshape(*by_head, value_dim)
        result = result.transpose(0, 3, 1, 2, 4).reshape(tile, block_q, num_heads, value_dim)
        return result.astype(queries.dtype)

    def load(self, row: Array, index: Array) -> tuple[Array, Array, Array]:
        """Keys and values of page group `index` of each row, f32[tile, Hkv, tokens, D] each (values of latents are the
        first numbers of their keys), and which of them are on a page that is not none, bool[tile, tokens]."""
        call = self.call
        pairs, width = call.kv_pages.shape[3:]
        pages, mapped = keys_in_pages(call, row, index, self.group_pages)
        sides = 2 if call.value_dim is None else 1

        def by_head(pool, layer, pages):
            def gather(first):
                pair = jnp.arange(first, pairs, sides, dtype=jnp.int32)[None, :, None]
                stored = pool.at[layer, pages[:, None, :], :, pair].get(mode="clip")
                return stored.reshape(row.shape[0], pairs // sides, -1, width)

            return tuple(gather(side) for side in range(sides))

        def by_page(pool, layer, pages):
            stored = pool.at[layer, pages].get(mode="clip")
            stored = stored.reshape(row.shape[0], -1, pairs, width).transpose(0, 2, 1, 3)
            return tuple(stored[:, side::sides] for side in range(sides))

        # Both gather from the full pool, because a slice of the layer would be a copy. `by_head` costs a third less on
        # a CPU; on a TPU it would make the compiler transpose the full pool.
        stored = jax.lax.platform_dependent(call.kv_pages, call.layer, pages, cpu=by_head, default=by_page)
        keys, *values = (decode_bits(side, call.kv_dtype) for side in stored)
        return (keys, values[0], mapped) if values else (*self._of_latents(keys), mapped)

    def load_chosen(self, row: Array, positions: Array) -> tuple[Array, Array, Array]:
        """As `load`, the latents at positions i32[tile, tokens] of each row."""
        call, num_pages = self.call, self.call.kv_pages.shape[1]
        pages = call.page_indices.at[row[:, None], positions // call.page_size].get(mode="fill", fill_value=num_pages)
        stored = call.kv_pages.at[call.layer, pages, positions % call.page_size].get(mode="clip")
        latents = decode_bits(stored, call.kv_dtype).transpose(0, 2, 1, 3)
        return *self._of_latents(latents), pages < num_pages

    def _of_latents(self, latents: Array) -> tuple[Array, Array]:
        """Keys and values of what is stored; an index key is neither."""
        return latents[..., : self.call.q.shape[2]], latents[..., : self.call.value_dim]
