"""Grouped-query attention over pages, and over a plain sequence."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import HEAD_SIZE, KV_HEADS, POSITION, Q_HEADS_PER_GROUP, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.cache.memory import FullKv, WindowKv
from levanter_infer.kernels import scopes
from levanter_infer.kernels.backend import Fuse
from levanter_infer.kernels.call import AttentionCall, Rotation
from levanter_infer.kernels.rules import MASKED, ScoreRules
from levanter_infer.layers.indexer import Choice
from levanter_infer.layers.linear import Fusion, Linear, apply, fold_key, split_key
from levanter_infer.layers.norm import NormConfig, RMSNorm
from levanter_infer.layers.rotary import Rope, RopeConfig

_XSA_EPS = 1e-6
"""Added to the square of a value, by which exclusive self-attention divides."""


@dataclass(frozen=True)
class AttentionSpec:
    """Functions and limits that a caller adds to the model's attention; static under jit."""

    score_mod: Callable | None = None
    """score_mod(score, q_pos, kv_pos, head) -> score, elementwise; score is the scaled dot product, f32."""
    mask_mod: Callable | None = None
    """mask_mod(q_pos, kv_pos, head) -> bool, elementwise, true = seen, on top of causality and window."""
    max_seq_len: int | None = None
    """Tokens of the longest sequence, for ropes that depend on a sequence's length (layers/rotary.py)."""


@dataclass(frozen=True)
class AttentionBlock:
    """Attention with a cache of keys and values, without its parameters."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    """None: queries and keys carry no positions (NoPE)."""
    unused_kv_heads: int = 0
    """Heads of keys and values that are projected, behind the others, and then left out: a model whose layers use
    different numbers of them may store as many for all (GrugMoE 2)."""
    window: int | None = None
    """Keys with q_pos - k_pos < window are seen; None: all."""
    attention_chunk: int | None = None
    """Positions of a chunk: a query sees the keys of its own chunk (`ScoreRules.attention_chunk`); None: of all."""
    scale: float | None = None
    """Factor of q · k; None: head_dim ** -0.5."""
    soft_cap: float | None = None
    """Scores become soft_cap · tanh(score / soft_cap)."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Whether the output projection has a bias."""
    qk_norm: NormConfig | None = None
    """Norm of queries and keys, before the rotation; None: there is none."""
    qk_norm_whole: bool = False
    """Whether `qk_norm` is over all heads together (OLMo 2), and not over each."""
    qk_norm_by_head: bool = False
    """Whether `qk_norm`, over each head, has a weight of its own for each (Cohere)."""
    qk_norm_after_rope: bool = False
    """Whether `qk_norm` follows the rotation (Hunyuan, Llama 4)."""
    qkv_clip: float | None = None
    """Queries, keys and values are clipped to ±qkv_clip, after `qk_norm` and before the rotation."""
    v_norm: NormConfig | None = None
    """Norm of the values of each head, without a weight; None: there is none."""
    values_from_keys: bool = False
    """Whether values are the projections of keys, before norm and rotation (Gemma 4)."""
    shares_kv: bool = False
    """Whether keys and values are those of the last earlier layer with the same memory that has its own (Gemma 4):
    this layer projects, writes and stores none."""
    sinks: bool = False
    """Whether each query head has an attention sink (`AttentionCall.sinks`)."""
    exclusive: bool = False
    """Whether the part of a token's result along its own value is taken away (exclusive self-attention)."""
    head_gate: bool = False
    """Whether the result of each head is multiplied by 2 · sigmoid(gate(x)), one number (GrugMoE)."""
    output_gate: bool = False
    """Whether the result of each head is multiplied by sigmoid(gate(x)), as many numbers, before the output projection
    (Qwen3-Next)."""

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is no multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs an even one")
        if self.v_norm is not None and (self.v_norm.weight or self.v_norm.bias):
            raise ValueError("a norm of values with parameters is not implemented: no family has one")
        if self.shares_kv and self.exclusive:
            raise ValueError("exclusive self-attention with keys and values of another layer is not implemented")

    @property
    def rope_dim(self) -> int:
        """Numbers of a query or key that the rope is given: all."""
        return self.head_dim

    @property
    def stored(self) -> "AttentionBlock":
        """The block with neutral options that no parameter depends on: blocks that are equal here share a stack."""
        has_weights = self.qk_norm is not None and self.qk_norm.num_parameters(self.head_dim) > 0
        return dataclasses.replace(
            self,
            **dict.fromkeys(("rope", "window", "attention_chunk", "scale", "soft_cap", "qkv_clip", "v_norm")),
            qk_norm=self.qk_norm if has_weights else None,
            qk_norm_after_rope=False,
            exclusive=False,
            num_kv_heads=self.num_kv_heads + self.unused_kv_heads,
            unused_kv_heads=0,
        )

    @property
    def memory(self) -> FullKv:
        """Memory of the layer, for each sequence; where it `shares_kv`, of the layer that has it."""
        if self.window is not None:
            return WindowKv(self.num_kv_heads, self.head_dim, self.window)
        return FullKv(self.num_kv_heads, self.head_dim)

    @property
    def ends_in_rotation(self) -> bool:
        """Whether queries of whole heads are rotated, with no norm behind, so that the rotation can scale them."""
        is_last = self.qk_norm is None or not self.qk_norm_after_rope
        return self.rope is not None and self.rope.is_of_whole_head and is_last

    @property
    def unfused(self) -> str | None:
        """The part that no kernel fuses with the cache; None: there is none, as in Llama."""
        if self.rope is None:
            return "a layer without a rope"
        if self.qkv_clip is not None:
            return "queries and keys that are clipped"
        if self.qk_norm_whole or self.qk_norm_by_head:
            return "a norm over all heads, or a weight for each"
        if self.qk_norm is not None and self.qk_norm_after_rope:
            return "a norm after the rotation"
        if self.v_norm is not None:
            return "a norm of values"
        if self.shares_kv:
            return "keys and values of another layer"
        if self.exclusive or self.head_gate:
            return "exclusive self-attention" if self.exclusive else "a gate of each head"
        if self.output_gate:
            return "a gate of attention"
        return self.rope.unfused or (self.qk_norm and self.qk_norm.unfused)

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        q, kv = self.num_heads * self.head_dim, (self.num_kv_heads + self.unused_kv_heads) * self.head_dim
        all_heads = self.qk_norm_whole or self.qk_norm_by_head
        sides = 0 if self.shares_kv else 1 if self.values_from_keys else 2
        normed = [q, kv] if all_heads else [self.head_dim] * 2
        normed = normed[:1] if self.shares_kv else normed
        norms = 0 if self.qk_norm is None else self.qk_norm.num_parameters(sum(normed))
        biases = (q + sides * kv) * self.qkv_bias + hidden * self.out_bias
        of_heads = self.num_heads * (hidden * self.head_gate + self.sinks)
        gate = (hidden + self.qkv_bias) * q * self.output_gate
        return hidden * (2 * q + sides * kv) + biases + norms + of_heads + gate


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of attention beside hidden states, in one layer."""

    block: Any
    """The mixer without its parameters: an `AttentionBlock`, or another mixer's."""
    rope: Rope | None
    """Angles of the block's rope, of each token."""
    spec: AttentionSpec
    query_factor: float = 1.0
    """Factor of queries, which their rotation multiplies in; 1 unless `AttentionBlock.ends_in_rotation`."""
    choice: Choice = dataclasses.field(default_factory=Choice)
    """The keys that tokens of layers with sparse attention attend to."""
    convolve_keys: Callable[[NamedArray], NamedArray] | None = None
    """Short convolution of keys [..., kv_head, head_size], before their norm; None: there is none."""

    @property
    def angles(self) -> tuple[NamedArray, ...]:
        """The arrays of the rope, of each token."""
        return () if self.rope is None else self.rope.angles

    def at(self, angles: Sequence[NamedArray]) -> "AttentionInputs":
        """The inputs of other tokens. Args: angles: as `angles`."""
        return self if self.rope is None else dataclasses.replace(self, rope=self.rope.of(angles))


class Attention(eqx.Module):
    """Projections, the optional norms of queries and keys, the rotation, and attention itself.

    Query head h is (kv_head, q_heads_per_group) = divmod(h, q_heads_per_group).
    """

    q_proj: Linear
    """[layers, kv_head, q_heads_per_group, head_size, embed]"""
    k_proj: Linear | None
    v_proj: Linear | None
    """[layers, kv_head, head_size, embed]; None: values are those of `k_proj`, or both sides are another layer's."""
    o_proj: Linear
    """[layers, embed, kv_head, q_heads_per_group, head_size]"""
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    gate_proj: Linear | None = None
    """[layers, kv_head, q_heads_per_group, embed], of an `output_gate` with head_size before embed; None: there is no
    gate."""
    sinks: NamedArray | None = None
    """[layers, kv_head, q_heads_per_group], a logit of each query head (`AttentionCall.sinks`)."""

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, block: AttentionBlock, *, key: Array | None, dtype) -> "Attention":
        """Random projections as in `Linear.init`; `batch`: axes of independent layers."""
        q_key, k_key, v_key, o_key = split_key(key, 4)
        kv_heads, size = Axis(KV_HEADS, block.num_kv_heads), Axis(HEAD_SIZE, block.head_dim)
        q_heads = (kv_heads, Axis(Q_HEADS_PER_GROUP, block.num_heads // block.num_kv_heads), size)

        def norm(axes: Sequence[Axis]) -> RMSNorm | None:
            if block.qk_norm is None:
                return None
            if block.qk_norm_by_head:
                return RMSNorm.init(batch, axes, config=block.qk_norm, dtype=dtype, num_normed=1)
            axes = axes if block.qk_norm_whole else (size,)
            return RMSNorm.init(batch, axes, config=block.qk_norm, dtype=dtype)

        def side(key: Array | None) -> Linear:
            return Linear.init(batch, (kv_heads, size), (embed,), key=key, dtype=dtype, bias=block.qkv_bias)

        gate = None
        if block.head_gate or block.output_gate:
            gate_key, bias = fold_key(key, 1), block.qkv_bias and block.output_gate
            gated = q_heads if block.output_gate else q_heads[:2]
            gate = Linear.init(batch, gated, (embed,), key=gate_key, dtype=dtype, bias=bias)
        return Attention(
            q_proj=Linear.init(batch, q_heads, (embed,), key=q_key, dtype=dtype, bias=block.qkv_bias),
            k_proj=None if block.shares_kv else side(k_key),
            v_proj=None if block.shares_kv or block.values_from_keys else side(v_key),
            o_proj=Linear.init(batch, (embed,), q_heads, key=o_key, dtype=dtype, bias=block.out_bias),
            q_norm=norm(q_heads),
            k_norm=None if block.shares_kv else norm((kv_heads, size)),
            gate_proj=gate,
            sinks=hax.zeros((*batch, *q_heads[:2]), dtype=dtype) if block.sinks else None,
        )

    def paged(
        self, x: NamedArray, around: Fusion, inputs: AttentionInputs, kv: KvPages, layer: Array, batch: PageBatchInfo
    ) -> tuple[NamedArray, KvPages]:
        """Write the step's keys and values, unless they are another layer's, then attend over the pages of each row.

        Args:
            x: [token, embed]
            layer: i32[], which layer of the pool `kv`.
        Returns: [token, embed] and the pool.
        """
        rules = self._rules(inputs.block.head_dim, inputs)
        if inputs.block.ends_in_rotation:
            factor, rules = kv.backend.scale_in_queries(rules)
            inputs = dataclasses.replace(inputs, query_factor=factor)
        q, k, v, gate = self._projected(x, around, inputs)
        by_kernel = False
        if k is None or v is None:
            q = self._rotated_queries(q, inputs).rearrange((TOKEN, KV_HEADS, Q_HEADS_PER_GROUP, HEAD_SIZE))
        else:
            q, v, kv, by_kernel = self._rotate_and_write((q, k, v), inputs, kv, layer, batch)
        num_tokens, head_dim = q.array.shape[0], q.array.shape[3]
        call = AttentionCall(
            q=q.array.reshape(num_tokens, -1, head_dim),
            kv_pages=kv.pages.array,
            layer=layer,
            page_indices=batch.page_indices.array,
            seq_lens=batch.seq_lens.array,
            cu_q_lens=batch.cu_q_lens.array,
            num_seqs=batch.num_seqs.array,
            rules=rules,
            kv_dtype=kv.dtype,
            kv_heads=q.axis_size(KV_HEADS),
            page_size=batch.page_size,
            sinks=None if self.sinks is None else self.sinks.array.reshape(-1),
            is_q_ordered=by_kernel,
        )
        with jax.named_scope(scopes.ATTENTION):
            attended = kv.backend.attend(call)
        attended = self._finished(NamedArray(attended.reshape(q.array.shape), q.axes), v, gate, inputs.block)
        attended = _grouped(attended, self.o_proj.ins[0].size)
        return apply(attended.astype(x.dtype), self.o_proj, residual=around.residual)[0], kv

    def dense(
        self,
        x: NamedArray,
        around: Fusion,
        inputs: AttentionInputs,
        shared: tuple[NamedArray, NamedArray] | None = None,
    ) -> tuple[NamedArray, tuple[NamedArray, NamedArray]]:
        """Attention that is causal within each sequence, without a cache: the whole matrix of scores at once.

        Args:
            x: [..., position, embed], position 0 first.
            shared: keys and values of another layer, of a block that `shares_kv`.
        Returns: [..., position, embed], and keys and values [..., position, kv_head, head_size].
        """
        q, k, own, gate = self._projected(x, around, inputs)
        batch = tuple(axis.name for axis in x.axes[:-2])
        if k is None or own is None:
            assert shared is not None, "a block that shares keys and values needs those of another layer"
            q, (keys, values) = self._rotated_queries(q, inputs), shared
        else:
            q, k, own = self._rotated(q, k, own, inputs)
            keys, values = (a.rearrange((*batch, POSITION, KV_HEADS, HEAD_SIZE)) for a in (k, own))
        q = q.rearrange((*batch, POSITION, KV_HEADS, Q_HEADS_PER_GROUP, HEAD_SIZE))
        k, v = keys.array, values.array
        sinks = None if self.sinks is None else self.sinks.array.reshape(-1)
        attended = attend_to_all(q.array, k, v, self._rules(k.shape[-1], inputs), sinks)
        attended = self._finished(NamedArray(attended, q.axes), own, gate, inputs.block)
        attended = _grouped(attended, self.o_proj.ins[0].size)
        return apply(attended.astype(x.dtype), self.o_proj, residual=around.residual)[0], (keys, values)

    def _projected(
        self, x: NamedArray, around: Fusion, inputs: AttentionInputs
    ) -> tuple[NamedArray, NamedArray | None, NamedArray | None, list[NamedArray]]:
        """Queries, keys, values, and the gate if there is one, of the heads that the layer uses; no keys and values
        where they are another layer's."""
        maps = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj, "gate": self.gate_proj}
        maps = {name: part for name, part in maps.items() if part is not None}
        found = dict(zip(maps, apply(x, *maps.values(), norm=around.norm), strict=True))
        if inputs.convolve_keys is not None:
            found["k"] = inputs.convolve_keys(found["k"])
        if inputs.block.unused_kv_heads:
            heads = inputs.block.num_kv_heads
            for name, part in found.items():
                found[name] = part[KV_HEADS, :heads] if name in ("k", "v") else _grouped(part, heads)
        keys = found.get("k")
        return found["q"], keys, found.get("v", keys), [found["gate"]] if "gate" in found else []

    def _rotated(
        self, q: NamedArray, k: NamedArray, v: NamedArray, inputs: AttentionInputs
    ) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Queries, keys and values with the norms, the clipping and the rotation."""
        block, norms = inputs.block, (self._norm(self.q_norm, inputs.block), self._norm(self.k_norm, inputs.block))
        v_norm = None if block.v_norm is None else RMSNorm(weight=None, config=block.v_norm, over=(HEAD_SIZE,))

        def rotated(q: NamedArray, k: NamedArray, *angles: NamedArray) -> tuple[NamedArray, ...]:
            own = inputs.at(angles)
            return _scaled(_placed(q, norms[0], own, own.query_factor), own), _placed(k, norms[1], own)

        if norms != (None, None) or inputs.angles:
            q, k = self.q_proj.by_rows(rotated, q, k, *inputs.angles)
        else:
            q, k = rotated(q, k)
        v = v if v_norm is None else self.q_proj.by_rows(v_norm, v)
        return q, k, _clipped(v, block)

    def _rotated_queries(self, q: NamedArray, inputs: AttentionInputs) -> NamedArray:
        """Queries with the norm, the clipping, the rotation and the factor of their positions."""
        norm = self._norm(self.q_norm, inputs.block)

        def rotated(q: NamedArray, *angles: NamedArray) -> NamedArray:
            own = inputs.at(angles)
            return _scaled(_placed(q, norm, own, own.query_factor), own)

        return self.q_proj.by_rows(rotated, q, *inputs.angles)

    def _norm(self, own: RMSNorm | None, block: AttentionBlock) -> RMSNorm | None:
        """The norm of queries or keys; those without weights are not stored."""
        if own is not None or block.qk_norm is None:
            return own if own is None else own.picked()
        assert not block.qk_norm_whole, "a norm over all heads without a weight is not implemented: no family has one"
        return RMSNorm(weight=None, config=block.qk_norm, over=(HEAD_SIZE,))

    def _rotate_and_write(
        self,
        qkv: tuple[NamedArray, NamedArray, NamedArray],
        inputs: AttentionInputs,
        kv: KvPages,
        layer: Array,
        batch: PageBatchInfo,
    ) -> tuple[NamedArray, NamedArray, KvPages, bool]:
        """Norm and rotate queries and keys, and write keys and values to the pool.

        Returns: q [token, kv_head, q_heads_per_group, head_size], the values, the pool, and whether a kernel rotated.
        """
        q, k, v = qkv
        order = (TOKEN, KV_HEADS, Q_HEADS_PER_GROUP, HEAD_SIZE)
        rotation = self._rotation(inputs) if Fuse.ROTATION in kv.backend.fuses else None
        if rotation is not None:
            ordered = q.rearrange(order)
            heads = ordered.array.reshape(ordered.array.shape[0], -1, ordered.array.shape[3])
            if kv.rotates(rotation, heads, k):
                rotated, kv = kv.rotate_and_write(layer, batch, heads, k, v, rotation)
                return NamedArray(rotated.reshape(ordered.array.shape), ordered.axes), v, kv, True
        q, k, v = self._rotated(q, k, v, inputs)
        return q.rearrange(order), v, kv.write(layer, batch, k, v), False

    def _rotation(self, inputs: AttentionInputs) -> Rotation | None:
        """Norms and rotation as a kernel takes them; None where it cannot compute them."""
        rope = inputs.rope
        if rope is None or inputs.block.unfused is not None:
            return None
        cos, sin = (side.rearrange((TOKEN, HEAD_SIZE)).array for side in (rope.cos, rope.sin))
        if self.q_norm is None or self.k_norm is None:
            return Rotation(cos, sin, query_factor=inputs.query_factor)
        q_norm, k_norm = self.q_norm.fusable, self.k_norm.fusable
        assert q_norm is not None and k_norm is not None, f"kernels do not compute {inputs.block.qk_norm}"
        return Rotation(cos, sin, (q_norm, k_norm), self.q_norm.layer, inputs.query_factor)

    def _finished(
        self, attended: NamedArray, own: NamedArray | None, gate: Sequence[NamedArray], block: AttentionBlock
    ) -> NamedArray:
        """`_finished` of every token. Args: own: its values; None: they are another layer's."""
        assert own is not None or not block.exclusive
        others = [*([own] if block.exclusive else []), *gate]
        return self.o_proj.by_rows(functools.partial(_finished, block=block), attended, *others) if others else attended

    def _rules(self, head_dim: int, inputs: AttentionInputs) -> ScoreRules:
        block = inputs.block
        return ScoreRules(
            scale=head_dim**-0.5 if block.scale is None else block.scale,
            sliding_window=None if block.window is None else jnp.int32(block.window),
            attention_chunk=block.attention_chunk,
            soft_cap=block.soft_cap,
            score_mod=inputs.spec.score_mod,
            mask_mod=inputs.spec.mask_mod,
        )


def _placed(side: NamedArray, norm: RMSNorm | None, inputs: AttentionInputs, factor: float = 1.0) -> NamedArray:
    """Queries or keys with their norm, clipped and rotated, which multiplies them by a factor."""
    after = inputs.block.qk_norm_after_rope
    if norm is not None and not after:
        side = norm(side)
    side = _clipped(side, inputs.block)
    side = side if inputs.rope is None else inputs.rope.rotate(side, factor)
    return norm(side) if norm is not None and after else side


def _scaled(q: NamedArray, inputs: AttentionInputs) -> NamedArray:
    """Queries with the factor of their positions."""
    return q if inputs.rope is None else inputs.rope.scale_queries(q)


def _clipped(side: NamedArray, block: AttentionBlock) -> NamedArray:
    """Queries, keys or values within the block's limit."""
    clip = block.qkv_clip
    return side if clip is None else NamedArray(jnp.clip(side.array, -clip, clip), side.axes)


def attend_to_all(
    q: Array, k: Array, v: Array, rules: ScoreRules, sinks: Array | None = None, chosen: Array | None = None
) -> Array:
    """Attention over plain sequences, the whole matrix of scores at once.

    Args:
        q: [..., query, kv_head, group, D]
        k, v: [..., key, kv_head, D] and [..., key, kv_head, size of values]
        sinks: f32[Hq], as in `AttentionCall`.
        chosen: bool[..., query, key], the keys that each query may see; None: all.
    Returns: f32[..., query, kv_head, group, size of values]
    """
    f32 = jnp.float32
    matmul = jnp.einsum("...qhgd,...khd->...hgqk", q, k, preferred_element_type=f32)
    q_pos, kv_pos, head = _indices(matmul)
    seen = jnp.broadcast_to(rules.seen(q_pos, kv_pos, head), matmul.shape)
    if chosen is not None:
        seen = seen & chosen[..., None, None, :, :]
    scores = jnp.where(seen, rules.scores(matmul, q_pos, kv_pos, head), f32(MASKED))
    # A query that sees nothing gives zeros, as over pages.
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), f32(0))
    if sinks is not None:
        # With e^sink in the sum as well: softmax · Σ / (Σ + e^sink).
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        weights = weights * jax.nn.sigmoid(total - sinks.astype(f32)[head])
    return jnp.einsum("...hgqk,...khd->...qhgd", weights.astype(v.dtype), v, preferred_element_type=f32)


def _grouped(heads: NamedArray, num_kv_heads: int) -> NamedArray:
    """[..., kv_head, q_heads_per_group, ...], the same query heads in so many groups."""
    axes = list(heads.axes)
    place = next(i for i, axis in enumerate(axes) if axis.name == KV_HEADS)
    total = axes[place].size * axes[place + 1].size
    axes[place : place + 2] = axes[place].resize(num_kv_heads), axes[place + 1].resize(total // num_kv_heads)
    return NamedArray(heads.array.reshape([axis.size for axis in axes]), tuple(axes))


def _finished(attended: NamedArray, *others: NamedArray, block: AttentionBlock) -> NamedArray:
    """The results of the heads as the output projection takes them.

    Args:
        attended: [..., kv_head, q_heads_per_group, head_size]
        others: of `exclusive` the values of the same tokens [..., kv_head, head_size], then the gate, if there is one,
            [..., kv_head, q_heads_per_group] or as `attended`.
    """
    wide = attended.astype(jnp.float32)
    if block.exclusive:
        own, others = others[0], others[1:]
        value = own.astype(jnp.float32)
        share = hax.sum(wide * value, HEAD_SIZE) / (hax.sum(value * value, HEAD_SIZE) + jnp.float32(_XSA_EPS))
        wide = wide - hax.broadcast_axis(share, value.resolve_axis(HEAD_SIZE)) * value
    for each in others:
        wide = wide * (hax.nn.sigmoid(each.astype(jnp.float32)) * jnp.float32(2 if block.head_gate else 1))
    return wide.rearrange(attended.axes)


def _indices(scores: Array) -> tuple[Array, Array, Array]:
    """Query positions, key positions and query heads, broadcastable to scores [..., kv_head, group, query, key]."""
    num_heads, group, num_queries, num_keys = scores.shape[-4:]
    leading = (1,) * (scores.ndim - 4)
    q_pos = jnp.arange(num_queries, dtype=jnp.int32).reshape(*leading, 1, 1, num_queries, 1)
    kv_pos = jnp.arange(num_keys, dtype=jnp.int32).reshape(*leading, 1, 1, 1, num_keys)
    head = jnp.arange(num_heads * group, dtype=jnp.int32).reshape(*leading, num_heads, group, 1, 1)
    return q_pos, kv_pos, head
