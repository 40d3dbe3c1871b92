"""One attention call: what every implementation receives."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.rules import ScoreRules
from levanter_infer.kernels.tpu.pool import TpuPool


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
    tpu_pool: TpuPool | None = None
    """How `kv_pages` lie, where they lie as a TPU reads them."""

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_rows(self) -> int:
        return self.page_indices.shape[0]

    @property
    def page_size(self) -> int:
        return self.kv_pages.shape[2 if self.tpu_pool is None else 3]

    @property
    def kv_heads(self) -> int:
        return self.kv_pages.shape[3] // 2 if self.tpu_pool is None else self.tpu_pool.kv_heads

    @property
    def heads_per_kv_head(self) -> int:
        return self.q.shape[1] // self.kv_heads

    @property
    def q_lens(self) -> Array:
        """i32[R], tokens of each row; 0 for rows that are not in use."""
        used = jnp.arange(self.num_rows, dtype=jnp.int32) < self.num_seqs
        return jnp.where(used, self.cu_q_lens[1:] - self.cu_q_lens[:-1], 0)
