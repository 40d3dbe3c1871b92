"""The choice of keys by an indexer in XLA's code (`Backend.choose_keys`).

A tile of query blocks (`kernels.xla.blocks`) scores all keys up to its last query, a group of pages at a time, and
keeps the largest scores of each query. Tiles whose queries see no more keys than they may choose score none.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import NO_KEY, AttentionCall, IndexQueries
from levanter_infer.kernels.loops import run_if
from levanter_infer.kernels.rules import decode_bits
from levanter_infer.kernels.xla.attention import keys_in_pages
from levanter_infer.kernels.xla.blocks import GROUP_TOKENS, Blocks, Lane, Tile, passes, run_lane, with_blocks


@dataclass(frozen=True)
class Turns:
    """Sizes of what is scored at once."""

    tokens: int
    """Keys, in whole pages."""
    decode_tile: int
    """Decoded tokens."""
    prefill_queries: int
    """Queries of a chunk."""


SCORES_TOGETHER = (
    "XLA scores the keys of several tokens together, and rounds by their number, where engine.max_seq_len is more than "
    "the model's index_topk"
)
"""Why a choice of keys depends on what else is computed."""
ACCELERATOR = Turns(1024, 16, 128)
"""By the estimates of the compiler for v5p, of 64 heads: 12 thousand cycles for a turn of decoded tokens, 38 thousand
for one of a chunk."""


def xla_choose_keys(call: AttentionCall, queries: IndexQueries, turns: Turns | None) -> Array:
    """Positions of the chosen keys, i32[T, n]. Args: turns: as in `Chooser`."""
    num_chosen = min(queries.num_chosen, call.page_indices.shape[1] * call.page_size)

    def largest(scores: Array) -> Array:
        values, positions = jax.lax.top_k(scores, num_chosen)
        return jnp.sort(jnp.where(values == -jnp.inf, NO_KEY, positions), axis=2)

    def all_seen(at: Tile) -> Array:
        positions = jnp.arange(num_chosen, dtype=jnp.int32)[None, None]
        return jnp.where((positions <= at.q_pos[..., None]) & at.live[..., None], positions, NO_KEY)

    choice = jnp.zeros((call.num_tokens, num_chosen), jnp.int32)
    return Chooser(call, queries, turns, _index_keys, all_seen, largest).run(choice)


@dataclass(frozen=True)
class Chooser:
    """The scores of an indexer, and what is made of them."""

    call: AttentionCall
    queries: IndexQueries
    turns: Turns | None
    """None: as attention on a CPU, in float32, so that a token has the same bits whatever is computed beside it."""
    index_keys: Callable[[AttentionCall, Array], Array]
    """`index_keys(call, pages)` gives the index keys on pages i32[tile, n], [tile, n * page_size, index_dim]."""
    all_seen: Callable[[Tile], Array]
    """The choice [tile, block_q, ...] of queries that see no more keys than they may choose."""
    largest: Callable[[Array], Array]
    """The choice by the scores f32[tile, block_q, positions], -inf for keys that are not seen."""

    def run(self, choice: Array) -> Array:
        """The choice of each token, [T, ...]. Args: choice: zeros."""
        share = self.queries.share
        for lane, blocks in self._lanes():
            choice = run_lane(self.call, lane, blocks, choice, self._of_tile, share)
        return choice if share is None else share.sum(choice)

    def _lanes(self) -> list[tuple[Lane, Blocks]]:
        call, turns = self.call, self.turns
        if turns is None:
            return passes(call, 1, self.queries.q.shape[1], self.group)
        decode = Lane(1, min(turns.decode_tile, call.num_rows))
        return with_blocks(call, decode, Lane(min(turns.prefill_queries, call.num_tokens), 1))

    @property
    def operand(self) -> jnp.dtype:
        """Dtype of the operands of the matmul: bfloat16 for floats that it holds. Integers and their scales have more
        bits together."""
        dtypes = jnp.dtype(self.queries.q.dtype), jnp.dtype(self.call.kv_dtype)
        narrow = all(dtype == jnp.bfloat16 or dtype == jnp.float8_e4m3fn for dtype in dtypes)
        return jnp.dtype(jnp.bfloat16 if narrow and self.turns is not None else jnp.float32)

    @property
    def group_pages(self) -> int:
        """Pages that are scored at once."""
        tokens = GROUP_TOKENS if self.turns is None else self.turns.tokens
        return min(-(-tokens // self.call.page_size), self.call.page_indices.shape[1])

    @property
    def group(self) -> int:
        """Keys that are scored at once."""
        return self.group_pages * self.call.page_size

    def _of_tile(self, at: Tile) -> Array:
        end = jnp.max(jnp.where(at.live, at.q_pos + 1, 0))
        return run_if(end > self.queries.num_chosen, lambda _: self.largest(self._scores(at, end)), self.all_seen(at))

    def _scores(self, at: Tile, end: Array) -> Array:
        """Scores of the keys from 0 to `end` for the queries of a tile."""
        queries, group, f32 = self.queries, self.group, jnp.float32
        (tile, block_q), num_heads, num_pages = at.token.shape, queries.q.shape[1], self.call.page_indices.shape[1]
        # [tile, (head, query), index_dim]: one matmul for all heads.
        q = at.of_tokens(queries.q).astype(self.operand).transpose(0, 2, 1, 3).reshape(tile, num_heads * block_q, -1)
        weights = at.of_tokens(queries.weights).astype(f32).transpose(0, 2, 1)[..., None]
        q_pos, live = at.q_pos[..., None], at.live[..., None]

        def turn(carry):
            index, scores = carry
            kv_pos = (index * group + jnp.arange(group, dtype=jnp.int32))[None, None]
            pages, mapped = keys_in_pages(self.call, at.row, index, self.group_pages)
            keys = self.index_keys(self.call, pages).astype(self.operand)
            precision = "highest" if self.operand == f32 else None
            matmul = jnp.einsum("bqd,bkd->bqk", q, keys, precision=precision, preferred_element_type=f32)
            by_head = jax.nn.relu(matmul).reshape(tile, num_heads, block_q, group)
            seen = (kv_pos <= q_pos) & mapped[:, None, :] & live
            of_group = jnp.where(seen, jnp.sum(by_head * weights, axis=1), -jnp.inf)
            return index + 1, jax.lax.dynamic_update_slice_in_dim(scores, of_group, index * group, axis=2)

        num_groups = -(-num_pages // self.group_pages)
        none = jnp.full((tile, block_q, num_groups * group), -jnp.inf, f32)
        _, scores = jax.lax.while_loop(lambda carry: carry[0] * group < end, turn, (jnp.int32(0), none))
        return scores[..., : num_pages * self.call.page_size]


def _index_keys(call: AttentionCall, pages: Array) -> Array:
    """As in `Chooser`; latents are not read."""
    stored = call.kv_pages.at[call.layer, pages, :, 0, call.q.shape[2] :].get(mode="clip")  # of int8 with the scale
    return decode_bits(stored, call.kv_dtype).reshape(pages.shape[0], -1, call.index_dim)
