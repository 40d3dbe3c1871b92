"""The arguments of the kernels, one object for each kind of call. All arrays are plain arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.rules import ScoreRules


@dataclass(frozen=True)
class AttentionCall:
    """Attention from the packed tokens of many sequences to the pages that hold their keys and values.

    Row `s` is one sequence. It owns the tokens `cu_q_lens[s] … cu_q_lens[s + 1] - 1`, which are the last `q_len`
    positions of its `seq_lens[s]` stored tokens: query `i` stands at position `seq_lens[s] - q_len + i` and sees the
    keys of its own sequence from 0 to there, itself included. So a decode token, a full prompt and a prompt chunk
    with history are one case. Position `p` is stored in page `page_indices[s, p // page_size]` at offset
    `p % page_size`. Query head `h` reads kv head `h // (Hq // Hkv)`. Attention reads the pool only; keys must be
    written (and rotated) before.

    The result of a row depends on its own queries, keys and values alone. NaN in other sequences' pages, beyond the
    end of a sequence, in padding tokens or on keys outside all windows and chunks does not reach it. Where a query
    sees no key it gives zeros.

    Source: PagedAttention, arXiv:2309.06180, section 4.1; the online softmax of FlashAttention, arXiv:2205.14135,
        section 3.1; the ragged batch of one call follows jax's TPU ragged paged attention.
    """

    q: Array
    """[T, Hq, D], already rotated; a floating dtype. Tokens from `cu_q_lens[num_seqs]` on are padding."""
    kv_pages: Array
    """The pool of all layers, as `Backend.init_pool` makes it; a layer is never sliced out of it."""
    layer: Array
    """i32[], which layer of the pool; may be traced."""
    page_indices: Array
    """i32[R, max_pages]; an absent page is P, and its keys are not seen."""
    seq_lens: Array
    """i32[R], stored tokens including this step's."""
    cu_q_lens: Array
    """i32[R + 1], first entry 0, ascending; padding repeats the last bound."""
    num_seqs: Array
    """i32[], rows in use."""
    rules: ScoreRules
    """Scale, window, chunk, soft cap and the other rules of a score."""
    kv_dtype: jnp.dtype
    """Dtype of the stored numbers: that of `kv_pages`, or of the bits that its unsigned integers hold."""
    kv_heads: int
    """Hkv."""
    page_size: int
    """Tokens per page."""
    sinks: Array | None = None
    """f32[Hq], attention sinks (gpt-oss): a logit of each query head that takes part in the maximum and the sum of the
    softmax and has no value; -inf for none. Under a mesh, those of the device's heads."""

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.q.shape[0]

    @property
    def num_rows(self) -> int:
        """R, rows that are not in use included."""
        return self.page_indices.shape[0]

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that read the same keys."""
        return self.q.shape[1] // self.kv_heads

    @property
    def q_lens(self) -> Array:
        """i32[R], tokens of each row; 0 for rows that are not in use."""
        used = jnp.arange(self.num_rows, dtype=jnp.int32) < self.num_seqs
        return jnp.where(used, self.cu_q_lens[1:] - self.cu_q_lens[:-1], 0)


@dataclass(frozen=True)
class PoolShape:
    """Sizes of a pool of keys and values."""

    num_layers: int
    num_pages: int
    page_size: int
    """Tokens per page."""
    kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    """Dtype of the stored numbers. Pages of int8 also hold the code of each head's scale (`kernels.int8`)."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of queries and keys, and the norms before it."""

    cos: Array
    """f32[T, D / 2]"""
    sin: Array
    """f32[T, D / 2]"""
    norms: tuple[tuple[Array, float], tuple[Array, float]] | None = None
    """Weight [layers, D] and eps of the norm of queries and of the norm of keys; None: no norms."""


@dataclass(frozen=True)
class KvWrite:
    """New keys and values of one layer, one token per row of `k` and `v`, and where they go."""

    k: Array
    """[T, Hkv, D]"""
    v: Array
    """[T, Hkv, D]"""
    layer: Array
    """i32[], may be traced."""
    dests: Array
    """i32[T], `page * page_size + page offset`; P * page_size or more for tokens that are not stored."""
    page: Array
    """i32[T], page of each token; P or more for tokens that are not stored."""
    offset: Array
    """i32[T], position of each token in its page."""
    kv_dtype: jnp.dtype
    """Dtype of the stored numbers."""
    q: Array | None = None
    """[T, Hq, D], queries that are yet to be rotated; None where queries and keys are rotated already."""
    rotation: Rotation | None = None
    """Rotation of `q` and `k`; only for backends that fuse it (`Backend.fuses`)."""


@dataclass(frozen=True)
class LinearCall:
    """`x · weight[layer]ᵀ` for each of several weights, with all sums in float32."""

    x: Array
    """[rows, in]"""
    weights: Sequence[Array]
    """As `Backend.store` returns them, each with a leading axis of layers if `layer` is given."""
    num_outs: Sequence[int]
    """Outputs of each weight."""
    layer: Array | None = None
    """i32[], which entry of each stack of weights; None: the weights are no stacks."""
    num_rows: Array | None = None
    """i32[], how many rows count; the others may give anything and cost nothing where the kernel can skip them.
    None: all."""
    norm: tuple[Array, float] | None = None
    """Weight [layers, in] (or [in] without layers) and eps; `x / sqrt(mean(x²) + eps) · norm[layer]` replaces x. Only
    for backends that fuse it, as the next two."""
    gate: Array | None = None
    """[rows, in]; `silu(gate) · x` replaces x. Not together with `norm`."""
    residual: Array | None = None
    """[rows, out], added to the result; with one weight only."""
