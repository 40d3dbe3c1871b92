"""The decoder that all families share: one scanned stack of attention and feed-forward blocks."""

import dataclasses
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import EMBED, EXPERT, LAYERS, MLP, POSITION, SEQ_PAGE, VOCAB
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.kernels.backend import Backend
from levanter_infer.layers.attention import Attention, AttentionInputs, AttentionSizes, AttentionSpec
from levanter_infer.layers.layout import Layout
from levanter_infer.layers.linear import Linear, apply, prepare_tables
from levanter_infer.layers.mlp import Mlp
from levanter_infer.layers.moe import Moe, MoeSizes
from levanter_infer.layers.norm import RMSNorm
from levanter_infer.layers.rotary import RopeConfig, rotary_tables
from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis, Vocabulary

PLAIN = AttentionSpec()
"""Attention as the model alone defines it."""
NO_WINDOW = 2**30
"""Window of a layer that sees everything, where other layers have one: larger than any position."""


@dataclass(frozen=True)
class DecoderConfig:
    """What a checkpoint's `config.json` says about the mathematics, in one form for all families."""

    model_type: str
    """HF's name of the family."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest sequence that the checkpoint was made for, in tokens."""
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer; None sees everything. Empty where no layer has a window."""
    attention_soft_cap: float | None = None
    num_experts: int | None = None
    """None: one feed-forward block, for all tokens. Else `intermediate_size` is that of one expert."""
    num_experts_per_token: int = 0
    normalize_experts: bool = False
    """Whether the weights of a token's experts add up to one."""

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is no multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs an even one")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"{len(self.sliding_windows)} sliding windows for {self.num_layers} layers")

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, from the sizes alone."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (q + kv)
        attention += (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.out_bias + 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        if self.num_experts is not None:
            mlp = self.num_experts * (mlp + self.hidden_size)  # and the router's weights
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return tables + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size


class DecoderLayer(eqx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    input_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: Mlp | Moe

    @staticmethod
    def init(batch: tuple[Axis, ...], config: DecoderConfig, *, key: Array, dtype) -> "DecoderLayer":
        """`batch`: axes of independent layers."""
        attention_key, mlp_key = jax.random.split(key)
        embed = Axis(EMBED, config.hidden_size)

        def norm() -> RMSNorm:  # each an array of its own, so that a training step can donate them
            return RMSNorm.init(batch, embed, eps=config.rms_norm_eps, dtype=dtype)

        sizes = AttentionSizes(
            num_kv_heads=config.num_kv_heads,
            q_heads_per_group=config.num_heads // config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            soft_cap=config.attention_soft_cap,
        )
        attention = Attention.init(batch, embed, sizes, key=attention_key, dtype=dtype)
        width = Axis(MLP, config.intermediate_size)
        if config.num_experts is None:
            mlp = Mlp.init(batch, embed, width, bias=config.mlp_bias, key=mlp_key, dtype=dtype)
        else:
            experts = MoeSizes(
                expert=Axis(EXPERT, config.num_experts),
                mlp=width,
                num_chosen=config.num_experts_per_token,
                normalize=config.normalize_experts,
            )
            mlp = Moe.init(batch, embed, experts, key=mlp_key, dtype=dtype)
        return DecoderLayer(input_norm=norm(), attention=attention, mlp_norm=norm(), mlp=mlp)

    def at(self, index: Array, num_rows: Array) -> "DecoderLayer":
        """One layer of a stack, for inputs whose first `num_rows` rows count."""
        return jax.tree.map(
            lambda part: part.at(index) if isinstance(part, RMSNorm) else part.at(index, num_rows),
            self,
            is_leaf=lambda part: isinstance(part, Linear | RMSNorm | Moe),
        )


class DecoderModel(eqx.Module):
    """Token ids in, logits out: over plain sequences (`__call__`) and over pages (`hidden`, then `logits`)."""

    embeddings: Linear
    """[vocab, embed]: its rows are the embeddings; as head it maps hidden states to logits."""
    layers: DecoderLayer
    """Every parameter with a leading `layers` axis."""
    norm: RMSNorm
    lm_head: Linear | None
    """[vocab, embed]; None where the embeddings serve as head."""
    config: DecoderConfig = eqx.field(static=True)
    shard_axis: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """How the vocabulary is sharded."""

    @staticmethod
    def init(config: DecoderConfig, *, key: Array, dtype=jnp.float32) -> "DecoderModel":
        """Random parameters: embeddings and head of standard deviation 0.02, the rest as in `Linear.init`."""
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        vocab, embed = Axis(VOCAB, config.vocab_size), Axis(EMBED, config.hidden_size)

        def table(key: Array) -> Linear:
            weight = hax.random.normal(key, (vocab, embed), dtype=jnp.float32) * jnp.float32(0.02)
            return Linear(weight=weight.astype(dtype), bias=None, num_in=1)

        return DecoderModel(
            embeddings=table(embed_key),
            layers=DecoderLayer.init((Axis(LAYERS, config.num_layers),), config, key=layers_key, dtype=dtype),
            norm=RMSNorm.init((), embed, eps=config.rms_norm_eps, dtype=dtype),
            lm_head=None if config.tie_word_embeddings else table(head_key),
            config=config,
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the parameters, in whatever form they are stored."""
        return self.norm.weight.dtype

    @property
    def activation_dtype(self) -> jnp.dtype:
        """Dtype of the residual stream."""
        return self.backend.activation_dtype(self.dtype)

    @property
    def embed(self) -> Axis:
        """Axis of the hidden states."""
        return self.norm.weight.axes[0]

    @property
    def vocab(self) -> Vocabulary:
        """The part of the vocabulary whose embeddings and logits this device has."""
        return Vocabulary(self.config.vocab_size, self.shard_axis)

    @property
    def is_sharded(self) -> bool:
        """Whether the arrays are those of a mesh."""
        return self.shard_axis != REPLICATED

    @property
    def is_packed(self) -> bool:
        """Whether `prepare` has packed the weights, in an order that only their backend knows."""
        return self._head.packed_axes is not None

    @property
    def backend(self) -> Backend:
        """What computes the matmuls."""
        return self._head.backend

    @property
    def _head(self) -> Linear:
        return self.embeddings if self.lm_head is None else self.lm_head

    def shard_as(self, layout: Layout) -> "DecoderModel":
        """The same model with sharded arrays, as `Layout.fit_model` shards them."""

        def sharded(part):
            if isinstance(part, Moe):
                return dataclasses.replace(part, experts=layout.experts, sums=layout.expert_sums)
            is_sharded = isinstance(part, Linear) and layout.is_sharded(part.ins)
            return dataclasses.replace(part, shard_axis=layout.model) if is_sharded else part

        layers = jax.tree.map(sharded, self.layers, is_leaf=lambda part: isinstance(part, Linear | Moe))
        return dataclasses.replace(self, layers=layers, shard_axis=layout.model)

    def prepare(self, backend: Backend, *, donate: bool = False) -> "DecoderModel":
        """The same model with its weights stored as `backend` reads them.

        Args:
            donate: free this model's weights one after the other, so that there are never two copies of all.
        Raises: ValueError if the backend cannot read weights of this dtype, or the model is prepared already.
        """
        if self.is_packed:
            raise ValueError("the weights are packed already; give the model as it was loaded")
        embeddings, head = prepare_tables(self.embeddings, self.lm_head, backend, donate=donate)
        layers = jax.tree.map(
            lambda part: part.prepare(backend, donate=donate) if isinstance(part, Linear) else part,
            self.layers,
            is_leaf=lambda part: isinstance(part, Linear),
        )
        return dataclasses.replace(self, embeddings=embeddings, layers=layers, lm_head=head)

    def __call__(self, tokens: NamedArray, attention: AttentionSpec = PLAIN) -> NamedArray:
        """The plain causal forward, without a cache: for training, and as the oracle.

        Args: as of `plain_hidden`.
        Returns: f32[..., position, vocab].
        """
        return self.logits(self.plain_hidden(tokens, attention))

    def plain_hidden(self, tokens: NamedArray, attention: AttentionSpec = PLAIN) -> NamedArray:
        """The plain causal forward up to the last hidden states, for `logits`.

        Args:
            tokens: i32[..., position], position 0 first.
            attention: `score_mod` and `mask_mod` act as in the paged forward. `max_seq_len` None is the size of the
                position axis; only length-dependent ropes look at it (layers/rotary.py).
        Returns: [..., position, embed].
        """
        tokens = tokens.rearrange((..., POSITION))
        num_positions = tokens.axis_size(POSITION)
        positions = hax.arange(tokens.resolve_axis(POSITION), dtype=jnp.int32)
        rope = self._rope(positions, attention.max_seq_len or num_positions)

        def block(x: NamedArray, layer: DecoderLayer, window: Array | None) -> NamedArray:
            x = layer.attention.dense(x, layer.input_norm, AttentionInputs(rope, window, attention))
            return layer.mlp(x, layer.mlp_norm)

        return hax.fold(block, LAYERS)(self._embed(tokens), self.layers, self._windows())

    def hidden(self, batch: PageBatchInfo, kv: KvPages, attention: AttentionSpec = PLAIN) -> tuple[NamedArray, KvPages]:
        """The paged forward: write the K/V of the step's tokens and compute their last hidden states.

        Args:
            batch: the step's packed tokens.
            kv: the pool; it is carried through the scan over layers whole, never sliced.
        Returns: [token, embed] for `logits`, meaningless for padding; and the pool.
        Raises: ValueError where the rope depends on the length of sequences that may outgrow the original context
            and `attention.max_seq_len` does not say how long they get.
        """
        rope = self._rope(batch.positions, self._max_seq_len(batch, attention))

        windows = self._windows()
        num_tokens = batch.cu_q_lens.array[-1]

        def block(index: Array, carry: tuple[NamedArray, KvPages]):
            x, kv = carry
            layer, window = self.layers.at(index, num_tokens), None if windows is None else windows[index]
            inputs = AttentionInputs(rope, window, attention)
            x, kv = layer.attention.paged(x, layer.input_norm, inputs, kv, index, batch)
            return layer.mlp(x, layer.mlp_norm), kv

        return jax.lax.fori_loop(0, self.config.num_layers, block, (self._embed(batch.tokens), kv))

    def logits(self, hidden: NamedArray, num_rows: Array | None = None) -> NamedArray:
        """Final norm and head.

        Args:
            hidden: [..., embed]
            num_rows: i32[], how many rows count; the others may give anything. None: all.
        Returns: f32[..., vocab], of this device's part of the vocabulary.
        """
        (logits,) = apply(hidden, self._head.at(None, num_rows), norm=self.norm, dtype=jnp.float32)
        return NamedArray(self.vocab.without_padding(logits.array), logits.axes)

    def _embed(self, tokens: NamedArray) -> NamedArray:
        rows = self.shard_axis.sum(self.embeddings.take_rows(self.vocab.local(tokens.array), self.dtype))
        return NamedArray(rows.astype(self.activation_dtype), (*tokens.axes, self.embed))

    def _rope(self, positions: NamedArray, rope_len: int) -> tuple[NamedArray, NamedArray]:
        return rotary_tables(self.config.rope, self.config.head_dim, positions, rope_len)

    def _windows(self) -> Array | None:
        """i32[layers], or None where no layer has a window."""
        windows = self.config.sliding_windows
        if all(window is None for window in windows):
            return None
        return jnp.asarray([NO_WINDOW if window is None else window for window in windows], jnp.int32)

    def _max_seq_len(self, batch: PageBatchInfo, attention: AttentionSpec) -> int:
        capacity = batch.page_indices.axis_size(SEQ_PAGE) * batch.page_size
        rope = self.config.rope
        if attention.max_seq_len is not None or not rope.depends_on_length:
            return attention.max_seq_len or capacity
        if rope.original_len is not None and capacity > rope.original_len:
            raise ValueError(
                f"rope_scaling {rope.kind!r} depends on how long sequences get: up to {capacity} tokens here, beyond "
                f"the original {rope.original_len}; give AttentionSpec(max_seq_len=...)"
            )
        return capacity
