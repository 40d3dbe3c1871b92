"""Grouped-query attention over pages, and over a plain sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import HEAD_SIZE, KV_HEADS, POSITION, Q_HEADS_PER_GROUP, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.kernels.backend import Fuse
from levanter_infer.kernels.call import AttentionCall, Rotation
from levanter_infer.kernels.rules import MASKED, ScoreRules
from levanter_infer.layers.linear import Linear, apply
from levanter_infer.layers.norm import RMSNorm
from levanter_infer.layers.rotary import rotate


@dataclass(frozen=True)
class AttentionSpec:
    """What a caller adds to the model's attention; static under jit. The pool's backend computes it."""

    score_mod: Callable | None = None
    """score_mod(score, q_pos, kv_pos, head) -> score, elementwise; score is the scaled dot product, f32."""
    mask_mod: Callable | None = None
    """mask_mod(q_pos, kv_pos, head) -> bool, elementwise, true = seen, on top of causality and window."""
    max_seq_len: int | None = None
    """Tokens of the longest sequence, for ropes that depend on a sequence's length (layers/rotary.py)."""


@dataclass(frozen=True)
class AttentionSizes:
    """What `Attention.init` makes."""

    num_kv_heads: int
    q_heads_per_group: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    """Whether the output projection has a bias."""
    qk_norm_eps: float | None
    """Epsilon of the norms of queries and keys; None: there are none."""
    soft_cap: float | None


@dataclass(frozen=True)
class AttentionInputs:
    """What attention needs beside hidden states, in one layer."""

    rope: tuple[NamedArray, NamedArray]
    """cos and sin of each token."""
    window: Array | None
    """i32[], keys with q_pos - k_pos < window are seen; None: all."""
    spec: AttentionSpec
    sinks: Array | None = None
    """f32[Hq], attention sinks of the layer (`AttentionCall.sinks`); None: there are none."""
    attention_chunk: int | None = None
    """Positions of a chunk of chunked attention (`ScoreRules.attention_chunk`); None: a query sees all chunks."""


class Attention(eqx.Module):
    """Projections, the optional norms of queries and keys, the rotation, and attention itself.

    Query head h is (kv_head, q_heads_per_group) = divmod(h, q_heads_per_group).
    """

    q_proj: Linear
    """[layers, kv_head, q_heads_per_group, head_size, embed]"""
    k_proj: Linear
    v_proj: Linear
    """[layers, kv_head, head_size, embed]"""
    o_proj: Linear
    """[layers, embed, kv_head, q_heads_per_group, head_size]"""
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    soft_cap: float | None = eqx.field(static=True)
    """Scores become soft_cap · tanh(score / soft_cap)."""

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, sizes: AttentionSizes, *, key: Array, dtype) -> "Attention":
        """Random projections as in `Linear.init`; `batch`: axes of independent layers."""
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        kv_heads, size = Axis(KV_HEADS, sizes.num_kv_heads), Axis(HEAD_SIZE, sizes.head_dim)
        q_heads = (kv_heads, Axis(Q_HEADS_PER_GROUP, sizes.q_heads_per_group), size)
        eps = sizes.qk_norm_eps
        norms = [None if eps is None else RMSNorm.init(batch, size, eps=eps, dtype=dtype) for _ in "qk"]
        return Attention(
            q_proj=Linear.init(batch, q_heads, (embed,), key=q_key, dtype=dtype, bias=sizes.qkv_bias),
            k_proj=Linear.init(batch, (kv_heads, size), (embed,), key=k_key, dtype=dtype, bias=sizes.qkv_bias),
            v_proj=Linear.init(batch, (kv_heads, size), (embed,), key=v_key, dtype=dtype, bias=sizes.qkv_bias),
            o_proj=Linear.init(batch, (embed,), q_heads, key=o_key, dtype=dtype, bias=sizes.out_bias),
            q_norm=norms[0],
            k_norm=norms[1],
            soft_cap=sizes.soft_cap,
        )

    def paged(
        self, x: NamedArray, norm: RMSNorm, inputs: AttentionInputs, kv: KvPages, layer: Array, batch: PageBatchInfo
    ) -> tuple[NamedArray, KvPages]:
        """`x + attention(norm(x))`: write the step's keys and values, then attend over the pages of each row.

        Args:
            x: [token, embed]
            layer: i32[], which layer of the pool.
        Returns: [token, embed] and the pool.
        """
        q, k, v = apply(x, self.q_proj, self.k_proj, self.v_proj, norm=norm)
        q, kv = self._rotate_and_write((q, k, v), inputs.rope, kv, layer, batch)
        num_tokens, head_dim = q.array.shape[0], q.array.shape[3]
        call = AttentionCall(
            q=q.array.reshape(num_tokens, -1, head_dim),
            kv_pages=kv.pages.array,
            layer=layer,
            page_indices=batch.page_indices.array,
            seq_lens=batch.seq_lens.array,
            cu_q_lens=batch.cu_q_lens.array,
            num_seqs=batch.num_seqs.array,
            rules=self._rules(head_dim, inputs),
            kv_dtype=kv.dtype,
            kv_heads=k.axis_size(KV_HEADS),
            page_size=batch.page_size,
            sinks=inputs.sinks,
        )
        attended = kv.backend.attend(call)
        attended = NamedArray(attended.reshape(q.array.shape).astype(x.dtype), q.axes)
        return apply(attended, self.o_proj, residual=x)[0], kv

    def dense(self, x: NamedArray, norm: RMSNorm, inputs: AttentionInputs) -> NamedArray:
        """`x + attention(norm(x))`, causal within each sequence, no cache: the whole matrix of scores at once.

        Args:
            x: [..., position, embed], position 0 first.
            window: as in `paged`.
        Returns: [..., position, embed].
        """
        q, k, v = apply(x, self.q_proj, self.k_proj, self.v_proj, norm=norm)
        q, k = self._rotated(q, k, inputs.rope)
        batch = tuple(axis.name for axis in x.axes[:-2])
        q = q.rearrange((*batch, POSITION, KV_HEADS, Q_HEADS_PER_GROUP, HEAD_SIZE))
        k, v = (a.rearrange((*batch, POSITION, KV_HEADS, HEAD_SIZE)).array for a in (k, v))
        f32 = jnp.float32
        matmul = jnp.einsum("...qhgd,...khd->...hgqk", q.array, k, preferred_element_type=f32)
        rules = self._rules(k.shape[-1], inputs)
        q_pos, kv_pos, head = _indices(matmul)
        seen = jnp.broadcast_to(rules.seen(q_pos, kv_pos, head), matmul.shape)
        scores = jnp.where(seen, rules.scores(matmul, q_pos, kv_pos, head), f32(MASKED))
        # A query that sees nothing gives zeros, as over pages.
        weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), f32(0))
        if inputs.sinks is not None:
            # With e^sink in the sum as well: softmax · Σ / (Σ + e^sink).
            total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            weights = weights * jax.nn.sigmoid(total - inputs.sinks.astype(f32)[head])
        attended = jnp.einsum("...hgqk,...khd->...qhgd", weights.astype(v.dtype), v, preferred_element_type=f32)
        return apply(NamedArray(attended.astype(x.dtype), q.axes), self.o_proj, residual=x)[0]

    def _rotated(self, q: NamedArray, k: NamedArray, rope) -> tuple[NamedArray, NamedArray]:
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rope), rotate(k, *rope)

    def _rotate_and_write(
        self, qkv: tuple[NamedArray, NamedArray, NamedArray], rope, kv: KvPages, layer: Array, batch: PageBatchInfo
    ) -> tuple[NamedArray, KvPages]:
        """Norm and rotate queries and keys, and write keys and values to the pool.

        Returns: q [token, kv_head, q_heads_per_group, head_size], and the pool.
        """
        q, k, v = qkv
        order = (TOKEN, KV_HEADS, Q_HEADS_PER_GROUP, HEAD_SIZE)
        if Fuse.ROTATION not in kv.backend.fuses:
            q, k = self._rotated(q, k, rope)
            return q.rearrange(order), kv.write(layer, batch, k, v)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = ((self.q_norm.weight.array, self.q_norm.eps), (self.k_norm.weight.array, self.k_norm.eps))
        cos, sin = (side.rearrange((TOKEN, HEAD_SIZE)).array for side in rope)
        q = q.rearrange(order)
        heads = q.array.reshape(q.array.shape[0], -1, q.array.shape[3])
        rotated, kv = kv.rotate_and_write(layer, batch, heads, k, v, Rotation(cos, sin, norms))
        return NamedArray(rotated.reshape(q.array.shape), q.axes), kv

    def _rules(self, head_dim: int, inputs: AttentionInputs) -> ScoreRules:
        return ScoreRules(
            scale=head_dim**-0.5,
            sliding_window=inputs.window,
            attention_chunk=inputs.attention_chunk,
            soft_cap=self.soft_cap,
            score_mod=inputs.spec.score_mod,
            mask_mod=inputs.spec.mask_mod,
        )


def _indices(scores: Array) -> tuple[Array, Array, Array]:
    """Query positions, key positions and query heads, broadcastable to scores [..., kv_head, group, query, key]."""
    num_heads, group, num_queries, num_keys = scores.shape[-4:]
    leading = (1,) * (scores.ndim - 4)
    q_pos = jnp.arange(num_queries, dtype=jnp.int32).reshape(*leading, 1, 1, num_queries, 1)
    kv_pos = jnp.arange(num_keys, dtype=jnp.int32).reshape(*leading, 1, 1, 1, num_keys)
    head = jnp.arange(num_heads * group, dtype=jnp.int32).reshape(*leading, num_heads, group, 1, 1)
    return q_pos, kv_pos, head
