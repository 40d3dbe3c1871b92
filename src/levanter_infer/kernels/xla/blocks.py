"""Query blocks of the `xla` implementation: what is computed together, in lanes and tiles.

The packed tokens are cut into query blocks of at most `block_q` queries of one row. There are two lanes, so that decode
tokens do not pay for the width of prompt chunks: rows with one token, and rows with more. A lane runs a tile of query
blocks at a time, and only those that exist.

Every shape inside the loops is fixed. So the result of a row does not depend on batch composition.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import AttentionCall, Share


@dataclass(frozen=True)
class Lane:
    """Static sizes of one lane."""

    block_q: int
    """Queries per query block."""
    tile: int
    """Query blocks that are computed together."""


GROUP_TOKENS = 128
"""Keys of a turn."""
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
class Blocks:
    """The query blocks of a lane, i32[max_blocks] each."""

    row: Array
    first_token: Array
    num_tokens: Array
    first_pos: Array
    """Position of the first query in its sequence."""
    count: Array
    """i32[]: query blocks that exist; the others have no tokens."""


def cut(q_lens: Array, seq_lens: Array, cu_q_lens: Array, block_q: int, max_blocks: int) -> Blocks:
    """Cut every row's tokens into query blocks, in order."""
    per_row = (q_lens + (block_q - 1)) // block_q
    ends = jnp.cumsum(per_row, dtype=jnp.int32)
    block = jnp.arange(max_blocks, dtype=jnp.int32)
    row = jnp.searchsorted(ends, block, side="right").astype(jnp.int32)

    def of_row(values):
        return values.at[row].get(mode="fill", fill_value=0)

    skipped = (block - of_row(ends - per_row)) * block_q
    return Blocks(
        row=row,
        first_token=of_row(cu_q_lens[:-1]) + skipped,
        num_tokens=jnp.clip(of_row(q_lens) - skipped, 0, block_q),
        first_pos=of_row(seq_lens - q_lens) + skipped,
        count=ends[-1],
    )


def passes(call: AttentionCall, kv_heads: int, heads_per_kv_head: int, group: int) -> list[tuple[Lane, Blocks]]:
    """The lanes of a call, with their query blocks. Args: kv_heads, heads_per_kv_head, group: as in `lanes`."""
    return with_blocks(call, *lanes(call.num_tokens, call.num_rows, kv_heads, heads_per_kv_head, group))


def with_blocks(call: AttentionCall, decode: Lane, prefill: Lane) -> list[tuple[Lane, Blocks]]:
    """Lanes with their query blocks of a call."""
    num_tokens, num_rows, q_lens = call.num_tokens, call.num_rows, call.q_lens
    found = [(decode, q_lens == 1, num_rows)]
    if num_tokens > 1:
        prefills = min(num_rows, num_tokens // 2)
        found.append((prefill, q_lens > 1, prefills + (num_tokens - prefills) // prefill.block_q))
    return [
        (lane, cut(jnp.where(member, q_lens, 0), call.seq_lens, call.cu_q_lens, lane.block_q, max_blocks))
        for lane, member, max_blocks in found
    ]


@dataclass(frozen=True)
class Tile:
    """Query blocks that are computed together."""

    row: Array
    """i32[tile], row of each query block; that of none is the number of rows."""
    token: Array
    """i32[tile, block_q], packed token of each query; that of none is the number of tokens."""
    q_pos: Array
    """i32[tile, block_q], position of each query."""
    live: Array
    """bool[tile, block_q], which queries exist."""

    def of_tokens(self, values: Array) -> Array:
        """Entries of an array [T, ...] for the queries; zeros for those that do not exist."""
        return values.at[self.token].get(mode="fill", fill_value=0)


def run_lane(
    call: AttentionCall,
    lane: Lane,
    blocks: Blocks,
    out: Array,
    compute: Callable[[Tile], Array],
    share: Share | None = None,
) -> Array:
    """`out`, [T, ...], with `compute(tile)`, [tile, block_q, ...], for the tokens of the lane.

    Args: share: of the tiles; None: all.
    """
    first, step = (jnp.int32(0), 1) if share is None else (share.index, share.count)
    offset = jnp.arange(lane.block_q, dtype=jnp.int32)[None, :]

    def body(carry):
        index, out = carry
        block = index * lane.tile + jnp.arange(lane.tile, dtype=jnp.int32)
        row = blocks.row.at[block].get(mode="fill", fill_value=call.num_rows)
        first, length, first_pos = (
            values.at[block].get(mode="fill", fill_value=0)[:, None]
            for values in (blocks.first_token, blocks.num_tokens, blocks.first_pos)
        )
        live = offset < length
        tile = Tile(row, jnp.where(live, first + offset, call.num_tokens), first_pos + offset, live)
        return index + step, out.at[tile.token].set(compute(tile), mode="drop")

    def cond(carry):
        return carry[0] * lane.tile < blocks.count

    return jax.lax.while_loop(cond, body, (first, out))[1]
