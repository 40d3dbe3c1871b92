"""Multi-head latent attention: keys and values of all heads are maps of one latent per token, which alone is stored.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C. A token's latent is `c = norm(W_DKV x)`, and its
rotated key `k_pe = rope(W_KR x)` is shared by all heads. Head h has the key `[W_UK[h] c, k_pe]`, the value `W_UV[h] c`
and a query `[q_nope, q_pe]`. Two forms give the same numbers:

- expanded (`dense`): keys and values of every head are computed from the latents. This is the definition.
- absorbed (`paged`): `q_nope · W_UK c = (W_UKᵀ q_nope) · c`, so that a head's query `[W_UKᵀ q_nope, q_pe]` attends to
  the stored `[c, k_pe]`, whose first numbers are the values too; W_UV is applied to the result. To the kernels this is
  attention with one head of keys for all query heads.

Sparse attention (DeepSeek-V3.2) stores an index key behind these, by which an indexer chooses the keys of each token
(`layers.indexer`). Sequences that have no more tokens than are chosen need no choice.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import HEAD_SIZE, KV_HEADS, LATENT, Q_HEADS_PER_GROUP, Q_LATENT
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.cache.memory import Latents
from levanter_infer.kernels import MIN_ROWS, scopes
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.call import AttentionCall, IndexQueries, Share
from levanter_infer.kernels.rules import ScoreRules
from levanter_infer.kernels.xla.backend import XLA, XlaBackend
from levanter_infer.kernels.xla.linear import as_floats
from levanter_infer.layers.attention import AttentionInputs, attend_to_all
from levanter_infer.layers.indexer import Indexer, IndexerBlock, IndexPart, chosen_of_all
from levanter_infer.layers.linear import Fusion, Linear, apply, fold_key, split_key
from levanter_infer.layers.norm import NormConfig, RMSNorm
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.layers.stack import pick_layer


@dataclass(frozen=True)
class LatentAttentionBlock:
    """Multi-head latent attention, without its parameters."""

    num_heads: int
    latent_dim: int
    """Numbers of a latent (`kv_lora_rank`)."""
    nope_dim: int
    """Numbers of a query or key that carry no position (`qk_nope_head_dim`)."""
    rope_dim: int
    """Numbers of a query or key that are rotated (`qk_rope_head_dim`)."""
    value_dim: int
    """Numbers of a head's value (`v_head_dim`)."""
    rope: RopeConfig | None
    """None: queries and keys carry no positions (NoPE)."""
    norm: NormConfig
    """Norm of latents."""
    q_latent_dim: int | None = None
    """Numbers of the latent from which queries are computed (`q_lora_rank`); None: they are maps of the input."""
    scale: float | None = None
    """Factor of q · k; None: (nope_dim + rope_dim) ** -0.5."""
    bias: bool = False
    """Whether the maps to latents and the output projection have biases."""
    indexer: IndexerBlock | None = None
    """The indexer that chooses the keys of each token; None: tokens attend to all, unless they share a choice."""
    shares_choice: bool = False
    """Whether tokens attend to the keys that the last earlier layer with an indexer has chosen for them."""

    def __post_init__(self):
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim={self.rope_dim} is odd; rotary embedding needs an even one")
        if self.indexer is None:
            return
        if self.shares_choice:
            raise ValueError("a layer with an indexer shares no choice")
        if self.q_latent_dim is None:
            raise ValueError("an indexer computes its queries from the latent of queries, and there is none")
        if self.indexer.head_dim < self.rope_dim:
            raise ValueError(
                f"heads of an indexer have {self.indexer.head_dim} numbers, of which {self.rope_dim} rotate"
            )

    @property
    def num_kv_heads(self) -> int:
        """One: all heads read the same latents."""
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers of a token's key: its latent and its rotated key."""
        return self.latent_dim + self.rope_dim

    @property
    def is_sparse(self) -> bool:
        """Whether tokens attend to chosen keys."""
        return self.indexer is not None or self.shares_choice

    @property
    def index_dim(self) -> int:
        """Numbers of a token's index key; 0: there is none."""
        return 0 if self.indexer is None else self.indexer.head_dim

    @property
    def memory(self) -> Latents:
        """Latents of every token, and its index key."""
        return Latents(self.head_dim + self.index_dim, self.index_dim)

    @property
    def window(self) -> None:
        """None: queries see all keys."""
        return None

    @property
    def stored(self) -> "LatentAttentionBlock":
        """The block with neutral options that no parameter depends on: blocks that are equal here share a stack."""
        indexer = self.indexer and dataclasses.replace(self.indexer, num_chosen=1, interleaved=False)
        return dataclasses.replace(self, rope=None, scale=None, indexer=indexer, shares_choice=False)

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        q = self.num_heads * (self.nope_dim + self.rope_dim)
        kv_a, o = self.latent_dim + self.rope_dim, self.num_heads * self.value_dim
        down, up = hidden * kv_a, self.num_heads * (self.nope_dim + self.value_dim) * self.latent_dim
        rank = self.q_latent_dim
        queries = hidden * q if rank is None else hidden * rank + rank * q + rank
        biases = (kv_a + (rank or 0) + hidden) * self.bias
        indexer = 0 if self.indexer is None or rank is None else self.indexer.num_parameters(hidden, rank)
        return queries + down + up + self.latent_dim + o * hidden + biases + indexer


class PerHeadLinear(Linear):
    """A map from latents to each head, [layers, kv_head, q_heads_per_group, head_size, latent], that is also applied
    backwards, from each head to a latent of its own."""

    float_dtype: jnp.dtype | None = eqx.field(static=True, default=None)
    """Dtype of the weight before `prepare` stored its bits."""
    row_backend: Backend = eqx.field(static=True, default=XLA)
    """The backend whose `by_rows` goes around XLA's matmuls."""

    def quantized(self, *, donate: bool = False) -> "PerHeadLinear":
        """The same map, of floats: backwards, its outputs are inputs, which have no scales."""
        return self

    def prepare(self, backend: Backend, *, donate: bool = False, quantizes: bool = False) -> "PerHeadLinear":
        """As `Linear.prepare`, but never packed: XLA computes one matmul per head."""
        stored = super().prepare(XlaBackend(backend.platform), donate=donate)
        assert isinstance(stored, PerHeadLinear)
        return dataclasses.replace(stored, float_dtype=self.weight.dtype, row_backend=backend)

    def absorbed(self, x: Array) -> Array:
        """`W[h]ᵀ x[:, h]` for every head: [token, head, head_size] -> [token, head, latent]."""
        return self._per_head(x, "thd,hdl->thl")

    def expanded(self, x: Array) -> Array:
        """`W[h] x[:, h]` for every head: [token, head, latent] -> [token, head, head_size]."""
        return self._per_head(x, "thl,hdl->thd")

    def _per_head(self, x: Array, matmul: str) -> Array:
        return self.row_backend.by_rows(lambda x: [self._matmul(x, matmul)], self.num_rows, x)[0]

    def _matmul(self, x: Array, matmul: str) -> Array:
        weight = self.weight if self.layer is None else pick_layer(self.weight, self.layer)
        array = as_floats(weight.array, self.float_dtype)
        array = array.reshape(-1, *array.shape[-2:])
        count = x.shape[0]
        if count < MIN_ROWS:
            x = jnp.pad(x, [(0, MIN_ROWS - count), (0, 0), (0, 0)])

        def compute(x: Array, array: Array, dtype) -> Array:
            parts = x.astype(dtype), array.astype(dtype)
            return jnp.einsum(matmul, *parts, preferred_element_type=jnp.float32)

        # XLA's CPU backend has no matmul of 16-bit floats for several heads.
        wide, own = (functools.partial(compute, dtype=dtype) for dtype in (jnp.float32, x.dtype))
        return jax.lax.platform_dependent(x, array, cpu=wide, default=own)[:count].astype(x.dtype)


class LatentAttention(eqx.Module):
    """Projections, norms, the rotation, and attention itself.

    All query heads are one group of a single head of keys, so that a mesh shards them and replicates latents.
    """

    kv_a_proj: Linear
    """[layers, latent, embed]: the latent before its norm, and the key that is to be rotated."""
    kv_a_norm: RMSNorm
    """[layers, latent]"""
    k_proj: PerHeadLinear
    v_proj: PerHeadLinear
    """[layers, kv_head, q_heads_per_group, head_size, latent]"""
    o_proj: Linear
    """[layers, embed, kv_head, q_heads_per_group, head_size]"""
    q_proj: Linear | None = None
    """[layers, kv_head, q_heads_per_group, head_size, embed], where queries have no latent. The first `nope_dim`
    numbers of a head are those without positions."""
    q_a_proj: Linear | None = None
    """[layers, q_latent, embed]"""
    q_a_norm: RMSNorm | None = None
    """[layers, q_latent]"""
    q_b_proj: Linear | None = None
    """[layers, kv_head, q_heads_per_group, head_size, q_latent]"""
    indexer: Indexer | None = None

    @staticmethod
    def init(
        batch: Sequence[Axis], embed: Axis, block: LatentAttentionBlock, *, key: Array | None, dtype
    ) -> "LatentAttention":
        """Random projections as in `Linear.init`; `batch`: axes of independent layers."""
        keys = iter(split_key(key, 6))
        latent = Axis(LATENT, block.latent_dim)
        q_latent = None if block.q_latent_dim is None else Axis(Q_LATENT, block.q_latent_dim)

        def heads(size: int) -> tuple[Axis, ...]:
            return Axis(KV_HEADS, 1), Axis(Q_HEADS_PER_GROUP, block.num_heads), Axis(HEAD_SIZE, size)

        def linear(outs: Sequence[Axis], ins: Sequence[Axis], bias: bool = False) -> Linear:
            return Linear.init(batch, outs, ins, key=next(keys), dtype=dtype, bias=bias)

        def per_head(size: int) -> PerHeadLinear:
            plain = linear(heads(size), (latent,))
            return PerHeadLinear(weight=plain.weight, bias=None, num_in=plain.num_in, num_out=plain.num_out)

        def norm(axis: Axis) -> RMSNorm:
            return RMSNorm.init(batch, axis, config=block.norm, dtype=dtype)

        indexer = None
        if block.indexer is not None and q_latent is not None:
            indexer = Indexer.init(batch, embed, q_latent, block.indexer, key=fold_key(key, 1), dtype=dtype)
        query = heads(block.nope_dim + block.rope_dim)
        return LatentAttention(
            kv_a_proj=linear((latent.resize(block.head_dim),), (embed,), block.bias),
            kv_a_norm=norm(latent),
            k_proj=per_head(block.nope_dim),
            v_proj=per_head(block.value_dim),
            o_proj=linear((embed,), heads(block.value_dim), block.bias),
            q_proj=linear(query, (embed,)) if q_latent is None else None,
            q_a_proj=None if q_latent is None else linear((q_latent,), (embed,), block.bias),
            q_a_norm=None if q_latent is None else norm(q_latent),
            q_b_proj=None if q_latent is None else linear(query, (q_latent,)),
            indexer=indexer,
        )

    def paged(
        self, x: NamedArray, around: Fusion, inputs: AttentionInputs, kv: KvPages, layer: Array, batch: PageBatchInfo
    ) -> tuple[NamedArray, KvPages]:
        """Write the step's latents, then attend over the pages of each row, in the absorbed form.

        Args:
            x: [token, embed]
            layer: i32[], which layer of the pool.
        Returns: [token, embed] and the pool.
        """
        q_nope, q_pe, c, k_pe, index = self._projected(x, around, inputs)
        num_tokens = c.shape[0]
        q_nope, q_pe = (part.reshape(num_tokens, -1, part.shape[-1]) for part in (q_nope, q_pe))
        stored = [c, k_pe] if index is None else [c, k_pe, index.keys]
        kv = kv.write_latents(layer, batch, jnp.concatenate(stored, axis=-1)[:, None])
        call = AttentionCall(
            q=jnp.concatenate([self.k_proj.absorbed(q_nope), q_pe], axis=-1),
            kv_pages=kv.pages.array,
            layer=layer,
            page_indices=batch.page_indices.array,
            seq_lens=batch.seq_lens.array,
            cu_q_lens=batch.cu_q_lens.array,
            num_seqs=batch.num_seqs.array,
            rules=self._rules(inputs),
            kv_dtype=kv.dtype,
            kv_heads=1,
            page_size=batch.page_size,
            value_dim=c.shape[-1],
            index_dim=inputs.block.index_dim,
        )
        with jax.named_scope(scopes.ATTENTION):
            if inputs.block.is_sparse:
                choose = None if index is None else functools.partial(self._chosen, kv, call, index.queries)
                call = dataclasses.replace(call, chosen=inputs.choice.of_layer(choose))
            attended = kv.backend.attend(call)
        attended = self.v_proj.expanded(attended).astype(x.dtype)
        heads = self.o_proj.ins
        attended = NamedArray(attended.reshape(num_tokens, *(axis.size for axis in heads)), (*x.axes[:-1], *heads))
        return apply(attended, self.o_proj, residual=around.residual)[0], kv

    def _chosen(self, kv: KvPages, call: AttentionCall, queries: IndexQueries) -> Array:
        """The choice of keys, of whose tokens each device that has some of the heads computes a share."""
        axis = self.o_proj.shard_axis
        if axis.parts > 1:
            queries = dataclasses.replace(queries, share=Share(axis.index, axis.parts, axis.sum))
        return kv.backend.choose_keys(call, queries)

    def dense(self, x: NamedArray, around: Fusion, inputs: AttentionInputs) -> tuple[NamedArray, None]:
        """Attention that is causal within each sequence, without a cache, in the expanded form.

        Args: x: [..., position, embed], position 0 first.
        Returns: [..., position, embed], and no state.
        """
        q_nope, q_pe, c, k_pe, index = self._projected(x, around, inputs)
        latents = NamedArray(c, (*x.axes[:-1], *self.k_proj.ins))
        k_nope, v = (part.array for part in apply(latents, self.k_proj, self.v_proj))
        k_nope, v = (part.reshape(*c.shape[:-1], -1, part.shape[-1]) for part in (k_nope, v))  # [..., key, head, size]
        k_pe = jnp.broadcast_to(k_pe[..., None, :], (*k_nope.shape[:-1], k_pe.shape[-1]))
        q = jnp.concatenate([q_nope, q_pe], axis=-1).reshape(*c.shape[:-1], k_nope.shape[-2], 1, -1)
        choose = None if index is None else lambda: chosen_of_all(index)
        chosen = inputs.choice.of_layer(choose) if inputs.block.is_sparse else None
        attended = attend_to_all(q, jnp.concatenate([k_nope, k_pe], axis=-1), v, self._rules(inputs), chosen=chosen)
        axes = (*x.axes[:-1], *self.o_proj.ins)
        attended = NamedArray(attended.reshape([axis.size for axis in axes]).astype(x.dtype), axes)
        return apply(attended, self.o_proj, residual=around.residual)[0], None

    def _projected(
        self, x: NamedArray, around: Fusion, inputs: AttentionInputs
    ) -> tuple[Array, Array, Array, Array, IndexPart | None]:
        """Queries without positions [..., kv_head, q_heads_per_group, nope_dim] and rotated ones [..., rope_dim]; the
        latents [..., latent], and the rotated keys [..., rope_dim]; and the part of the indexer, if there is one."""
        first, indexer = self.q_a_proj if self.q_proj is None else self.q_proj, self.indexer
        assert first is not None
        of_input, of_latent = ([], []) if indexer is None else ([indexer.k_proj], [indexer.q_proj])
        q, down, *index = apply(x, first, self.kv_a_proj, *of_input, norm=around.norm)
        if self.q_b_proj is not None:
            q, *index_q = apply(q, self.q_b_proj, *of_latent, norm=self.q_a_norm)
            index = [*index_q, *index]
        block, angles = inputs.block, () if inputs.rope is None else inputs.rope.angles
        assert isinstance(block, LatentAttentionBlock)
        norm = self.kv_a_norm.picked()
        if inputs.rope is not None and inputs.rope.query_scale is not None:
            rope = inputs.rope
            (q,) = self.kv_a_proj.by_rows(lambda q, *angles: (rope.of(angles).scale_queries(q),), q, *angles)

        def rotated(c: NamedArray, q_pe: NamedArray, k_pe: NamedArray, *angles: NamedArray) -> tuple[NamedArray, ...]:
            if inputs.rope is not None:
                rope = inputs.rope.of(angles)
                q_pe, k_pe = rope.rotate(q_pe), rope.rotate(k_pe)
            return norm(c), q_pe, k_pe

        c, q_pe = down[LATENT, : block.latent_dim], q[HEAD_SIZE, block.nope_dim :]
        k_pe = down[LATENT, block.latent_dim :].rename({LATENT: HEAD_SIZE})
        c, q_pe, k_pe = self.kv_a_proj.by_rows(rotated, c, q_pe, k_pe, *angles)
        part = None
        if indexer is not None and block.indexer is not None:
            (weights,) = apply(x, indexer.weight_proj, norm=around.norm, dtype=jnp.float32)
            index_q, index_k = index
            part = indexer.part(index_q, index_k, weights, block.indexer, inputs.rope)
        return q.array[..., : block.nope_dim], q_pe.array, c.array, k_pe.array, part

    def _rules(self, inputs: AttentionInputs) -> ScoreRules:
        block = inputs.block
        assert isinstance(block, LatentAttentionBlock)
        return ScoreRules(
            scale=(block.nope_dim + block.rope_dim) ** -0.5 if block.scale is None else block.scale,
            score_mod=inputs.spec.score_mod,
            mask_mod=inputs.spec.mask_mod,
        )
