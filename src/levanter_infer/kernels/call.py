"""One attention call: what every implementation receives, and its tokens cut into blocks."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.rules import ScoreRules


@dataclass(frozen=True)
class AttentionCall:
    """The checked arguments of `ragged_paged_attention`, where each is described."""

    q: Array
    kv_pages: Array
    layer: Array
    page_indices: Array
    seq_lens: Array
    cu_q_lens: Array
    num_seqs: Array
    kv_dtype: jnp.dtype
    rules: ScoreRules
    sinks: Array | None = None

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_rows(self) -> int:
        return self.page_indices.shape[0]

    @property
    def page_size(self) -> int:
        return self.kv_pages.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.kv_pages.shape[3] // 2

    @property
    def heads_per_kv_head(self) -> int:
        return self.q.shape[1] // self.kv_heads

    @property
    def q_lens(self) -> Array:
        """i32[R], tokens of each row; 0 for rows that are not in use."""
        used = jnp.arange(self.num_rows, dtype=jnp.int32) < self.num_seqs
        return jnp.where(used, self.cu_q_lens[1:] - self.cu_q_lens[:-1], 0)


@dataclass(frozen=True)
class Blocks:
    """Queries of one row that are computed together, i32[max_blocks] each."""

    row: Array
    first_token: Array
    num_tokens: Array
    first_pos: Array
    """Position of the first query in its sequence."""
    count: Array
    """i32[]: blocks that exist; the others have no tokens."""


def cut(q_lens: Array, seq_lens: Array, cu_q_lens: Array, block_q: int, max_blocks: int) -> Blocks:
    """Cut every row's tokens into blocks, in order."""
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
