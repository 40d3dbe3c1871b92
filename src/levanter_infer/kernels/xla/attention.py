"""The `xla` implementation: paged attention with an online softmax over page groups, a few query blocks at a time.

The packed tokens are cut into query blocks of at most `block_q` queries of one row. There are two lanes, so that decode
tokens do not pay for the width of prompt chunks: rows with one token, and rows with more. A lane runs a tile of query
blocks at a time; within the tile one loop over groups of pages keeps m, l and acc (running maximum, denominator and
output) of every query. Only the query blocks that exist and the groups that a tile's queries see are visited, so the
work follows the live contexts.

Every shape inside the loops is fixed, and groups that a query does not see change none of its bits. So the result of a
row does not depend on batch composition.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import MASKED, NOTHING_SEEN, decode_bits


@dataclass(frozen=True)
class Lane:
    """Static sizes of one lane."""

    block_q: int
    """Queries per query block."""
    tile: int
    """Query blocks that are computed together."""


_GROUP_TOKENS = 128
_PREFILL_QUERIES = 16
_MIN_DOT_ROWS = 4
_MIN_REDUCED = 4096
"""XLA's CPU compiler takes other paths, with other bits, for matmuls of fewer than 4 rows, for some of 96 (32 queries
of 3 heads of 32), and for reductions of fewer than 4096 elements. These sizes keep a token's bits the same in a decode
step, in a prompt chunk and in any number of rows: so measured for heads of 16 to 256 and 1 to 8 query heads per kv
head."""


def lanes(num_tokens: int, num_rows: int, kv_heads: int, heads_per_kv_head: int, group: int) -> tuple[Lane, Lane]:
    """The decode lane and the prefill lane, for page groups of `group` keys.

    Measured on two CPU cores at 9 query heads of 64: tiles of 2 are best for a lone decode token (0.07 ms at 256 keys;
    tiles of 8: 0.17 ms), of 8 for 32 of them and for a prompt chunk of 256 tokens (1.3 ms; tiles of 1: 2.1 ms).
    """
    decode_queries = -(-_MIN_DOT_ROWS // heads_per_kv_head)

    def lane(block_q: int, tile: int) -> Lane:
        reduced = kv_heads * heads_per_kv_head * block_q * group
        return Lane(block_q, max(min(tile, 8), -(-_MIN_REDUCED // reduced)))

    return lane(decode_queries, max(num_rows // 4, 2)), lane(_PREFILL_QUERIES, max(num_tokens // 32, 1))


@dataclass(frozen=True)
class _Blocks:
    """The query blocks of a lane, i32[max_blocks] each."""

    row: Array
    first_token: Array
    num_tokens: Array
    first_pos: Array
    """Position of the first query in its sequence."""
    count: Array
    """i32[]: query blocks that exist; the others have no tokens."""


def xla_attention(call: AttentionCall) -> Array:
    """`ragged_paged_attention` in jnp. Returns: [T, Hq, D] (of latents [T, Hq, value_dim]), 0 for padding tokens."""
    num_tokens, num_rows, q_lens = call.num_tokens, call.num_rows, call.q_lens
    group_pages = min(-(-_GROUP_TOKENS // call.page_size), call.page_indices.shape[1])
    tiles = _Tiles(call, group_pages)
    out = jnp.zeros(call.out_shape, call.q.dtype)
    decode, prefill = lanes(num_tokens, num_rows, call.kv_heads, call.heads_per_kv_head, group_pages * call.page_size)
    passes = [(decode, q_lens == 1, num_rows)]
    if num_tokens > 1:
        prefills = min(num_rows, num_tokens // 2)
        passes.append((prefill, q_lens > 1, prefills + (num_tokens - prefills) // prefill.block_q))
    for lane, member, max_blocks in passes:
        blocks = _cut(jnp.where(member, q_lens, 0), call.seq_lens, call.cu_q_lens, lane.block_q, max_blocks)
        out = tiles.run_lane(out, blocks, lane)
    return out


def _cut(q_lens: Array, seq_lens: Array, cu_q_lens: Array, block_q: int, max_blocks: int) -> _Blocks:
    """Cut every row's tokens into query blocks, in order."""
    per_row = (q_lens + (block_q - 1)) // block_q
    ends = jnp.cumsum(per_row, dtype=jnp.int32)
    block = jnp.arange(max_blocks, dtype=jnp.int32)
    row = jnp.searchsorted(ends, block, side="right").astype(jnp.int32)

    def of_row(values):
        return values.at[row].get(mode="fill", fill_value=0)

    skipped = (block - of_row(ends - per_row)) * block_q
    return _Blocks(
        row=row,
        first_token=of_row(cu_q_lens[:-1]) + skipped,
        num_tokens=jnp.clip(of_row(q_lens) - skipped, 0, block_q),
        first_pos=of_row(seq_lens - q_lens) + skipped,
        count=ends[-1],
    )


@dataclass(frozen=True)
class _Tiles:
    """The call and the sizes that all tiles share."""

    call: AttentionCall
    group_pages: int
    """Pages per turn of the online softmax."""

    def run_lane(self, out: Array, blocks: _Blocks, lane: Lane) -> Array:
        """Compute the tokens of one lane. Returns: `out` with their outputs."""
        call = self.call
        num_tokens = call.num_tokens
        offset = jnp.arange(lane.block_q, dtype=jnp.int32)[None, :]

        def body(carry):
            index, out = carry
            block = index * lane.tile + jnp.arange(lane.tile, dtype=jnp.int32)
            row = blocks.row.at[block].get(mode="fill", fill_value=call.page_indices.shape[0])
            first, length, first_pos = (
                values.at[block].get(mode="fill", fill_value=0)[:, None]
                for values in (blocks.first_token, blocks.num_tokens, blocks.first_pos)
            )
            live = offset < length
            token = jnp.where(live, first + offset, num_tokens)
            queries = call.q.at[token].get(mode="fill", fill_value=0)
            result = self.run_tile(queries, row, first_pos + offset, live)
            return index + 1, out.at[token].set(result, mode="drop")

        def cond(carry):
            return carry[0] * lane.tile < blocks.count

        return jax.lax.while_loop(cond, body, (jnp.int32(0), out))[1]

    def run_tile(self, queries: Array, row: Array, q_pos: Array, live: Array) -> Array:
        """Attention of one tile.

        Args:
            queries: [tile, block_q, Hq, D].
            row: i32[tile], row of each query block.
            q_pos: i32[tile, block_q], position of each query.
            live: bool[tile, block_q], which queries exist.
        Returns: [tile, block_q, Hq, size of values].
        """
        call, f32 = self.call, jnp.float32
        tile, block_q, num_heads, head_dim = queries.shape
        kv_heads, per_kv_head = call.kv_heads, call.heads_per_kv_head
        group = self.group_pages * call.kv_pages.shape[2]
        # [tile, kv_head, (head, query), D]: one matmul per kv head, so that keys and values are never repeated.
        query = queries.astype(f32).reshape(tile, block_q, kv_heads, per_kv_head, head_dim).transpose(0, 2, 3, 1, 4)
        query = query.reshape(tile, kv_heads, per_kv_head * block_q, head_dim)
        head = jnp.arange(num_heads, dtype=jnp.int32).reshape(1, kv_heads, per_kv_head, 1, 1)
        end = jnp.max(jnp.where(live, q_pos + 1, 0))
        start = jnp.min(jnp.where(live, call.rules.first_seen(q_pos), end))
        q_pos, live = q_pos[:, None, None, :, None], live[:, None, None, :, None]
        by_row, by_head = query.shape[:3], (tile, kv_heads, per_kv_head, block_q)

        def body(carry):
            # by_row = [tile, Hkv, heads per kv head * block_q]: m and l are [*by_row, 1], acc is [*by_row, value_dim].
            index, m_prev, l_prev, acc = carry
            kv_pos = (index * group + jnp.arange(group, dtype=jnp.int32)).reshape(1, 1, 1, 1, group)
            keys, values, mapped = self.load(row, index)
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
        num_pages, page_size, pairs, width = call.kv_pages.shape[1:]
        column = index * self.group_pages + jnp.arange(self.group_pages, dtype=jnp.int32)
        pages = call.page_indices.at[row[:, None], column[None, :]].get(mode="fill", fill_value=num_pages)

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
        values = values[0] if values else keys[..., : call.value_dim]
        return keys, values, jnp.repeat(pages < num_pages, page_size, axis=1)
