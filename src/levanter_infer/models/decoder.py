"""The decoder that all families share: one scanned stack of attention and feed-forward blocks."""

import dataclasses
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array
from jax.core import Tracer

from levanter_infer.axes import EMBED, EXPERT, LAYERS, MLP, POSITION, SEQ_PAGE, VOCAB
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.kernels.cpu.bindings import supports_dtype
from levanter_infer.layers.attention import Attention, AttentionSpec
from levanter_infer.layers.layout import Layout
from levanter_infer.layers.linear import GpuLinear, Linear, LinearMap, PanelLinear, apply, as_bits, contract, from_bits
from levanter_infer.layers.mlp import Mlp
from levanter_infer.layers.moe import Moe, merged
from levanter_infer.layers.norm import RMSNorm
from levanter_infer.layers.rotary import RopeConfig, rotary_tables
from levanter_infer.layers.shard_axis import ALONE, ShardAxis, Vocabulary

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

        attention = Attention.init(
            batch,
            embed,
            num_kv_heads=config.num_kv_heads,
            q_heads_per_group=config.num_heads // config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            soft_cap=config.attention_soft_cap,
            key=attention_key,
            dtype=dtype,
        )
        width = Axis(MLP, config.intermediate_size)
        if config.num_experts is None:
            mlp = Mlp.init(batch, embed, width, bias=config.mlp_bias, key=mlp_key, dtype=dtype)
        else:
            mlp = Moe.init(
                batch,
                embed,
                Axis(EXPERT, config.num_experts),
                width,
                num_chosen=config.num_experts_per_token,
                normalize=config.normalize_experts,
                key=mlp_key,
                dtype=dtype,
            )
        return DecoderLayer(input_norm=norm(), attention=attention, mlp_norm=norm(), mlp=mlp)

    def at(self, index: Array, num_rows: Array) -> "DecoderLayer":
        """One layer of a stack, for inputs whose first `num_rows` rows count."""
        return jax.tree.map(
            lambda part: part.at(index) if isinstance(part, RMSNorm) else part.at(index, num_rows),
            self,
            is_leaf=lambda part: isinstance(part, LinearMap | RMSNorm | Moe),
        )


class DecoderModel(eqx.Module):
    """Token ids in, logits out: over plain sequences (`__call__`) and over pages (`hidden`, then `logits`)."""

    embeddings: NamedArray | PanelLinear
    """[vocab, embed]"""
    layers: DecoderLayer
    """Every parameter with a leading `layers` axis."""
    norm: RMSNorm
    lm_head: NamedArray | PanelLinear | None
    """[vocab, embed]; None where the embeddings serve as head."""
    config: DecoderConfig = eqx.field(static=True)
    spread: ShardAxis = eqx.field(static=True, default=ALONE)
    """How the vocabulary is spread."""

    @staticmethod
    def init(config: DecoderConfig, *, key: Array, dtype=jnp.float32) -> "DecoderModel":
        """Random parameters: embeddings and head of standard deviation 0.02, the rest as in `Linear.init`."""
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        vocab, embed = Axis(VOCAB, config.vocab_size), Axis(EMBED, config.hidden_size)

        def table(key: Array) -> NamedArray:
            return (hax.random.normal(key, (vocab, embed), dtype=jnp.float32) * jnp.float32(0.02)).astype(dtype)

        return DecoderModel(
            embeddings=table(embed_key),
            layers=DecoderLayer.init((Axis(LAYERS, config.num_layers),), config, key=layers_key, dtype=dtype),
            norm=RMSNorm.init((), embed, eps=config.rms_norm_eps, dtype=dtype),
            lm_head=None if config.tie_word_embeddings else table(head_key),
            config=config,
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Of parameters, however they are stored."""
        return self.norm.weight.dtype

    @property
    def activation_dtype(self) -> jnp.dtype:
        """Of the residual stream. The C++ kernels compute in float32 and are spared the conversions."""
        return jnp.dtype(jnp.float32) if self.skips_rows else self.dtype

    @property
    def embed(self) -> Axis:
        """Axis of the hidden states."""
        return self.norm.weight.axes[0]

    @property
    def vocab(self) -> Vocabulary:
        """The part of the vocabulary whose embeddings and logits are here."""
        return Vocabulary(self.config.vocab_size, self.spread)

    @property
    def is_sharded(self) -> bool:
        """Whether its arrays are those of a mesh."""
        return self.spread != ALONE

    @property
    def skips_rows(self) -> bool:
        """Whether rows beyond those in use cost nothing in `logits`."""
        return isinstance(self._head, PanelLinear)

    @property
    def isa(self) -> str | None:
        """The instruction set of the C++ kernels, if a choice was made (`for_cpu`)."""
        return self._head.isa if isinstance(self._head, PanelLinear) else None

    @property
    def _head(self) -> NamedArray | PanelLinear:
        return self.embeddings if self.lm_head is None else self.lm_head

    def shard_as(self, layout: Layout) -> "DecoderModel":
        """The same model, knowing that its arrays are spread (`Layout.fit_model`)."""

        def told(part):
            if isinstance(part, Moe):
                return dataclasses.replace(part, experts=layout.experts, sums=layout.expert_sums)
            spread = isinstance(part, Linear) and layout.is_sharded(part.weight.axes[-part.num_in :])
            return dataclasses.replace(part, spread=layout.model) if spread else part

        layers = jax.tree.map(told, self.layers, is_leaf=lambda part: isinstance(part, Linear | Moe))
        return dataclasses.replace(self, layers=layers, spread=layout.model)

    def for_cpu(self, kernel: str, *, isa: str | None = None, donate: bool = False) -> "DecoderModel":
        """The same model as a CPU reads it fastest.

        Args:
            kernel: what computes the matmuls. cpu: `kernels.cpu`, with all weights in panels. xla: 16-bit weights
                become integers (`linear.as_bits`), and a tied head a copy of the embeddings, because rows are taken
                from bits and matmuls from floats.
            isa: of the cpu kernels, one of `kernels.cpu.isas`; None for the widest.
            donate: give up this model's weights one after the other, so that there are never two copies of all.
        Raises: ValueError if the cpu kernels cannot read weights of this dtype.
        """
        if kernel == "cpu" and not supports_dtype(self.dtype):
            raise ValueError(f'kernel="cpu" reads weights of float32 or bfloat16, not {self.dtype}; use "xla"')

        def bits(named: NamedArray) -> NamedArray:
            return _given_up(named, as_bits(named), donate)

        def panels(linear: Linear, stacked: bool = True) -> PanelLinear:
            return _given_up(linear.weight, PanelLinear.of(linear, stacked=stacked, isa=isa), donate)

        def convert(part):
            if isinstance(part, Moe) and kernel == "cpu":
                experts = {
                    name: _given_up(linear.weight, PanelLinear.of(merged(linear), isa=isa), donate)
                    for name, linear in part.expert_maps.items()
                    if isinstance(linear, Linear)
                }
                return dataclasses.replace(part, router=convert(part.router), **experts)
            if isinstance(part, Moe):
                return jax.tree.map(convert, part, is_leaf=lambda part: isinstance(part, Linear))
            if not isinstance(part, Linear):
                return part
            return panels(part) if kernel == "cpu" else dataclasses.replace(part, weight=bits(part.weight))

        embeddings, head = self.embeddings, self.lm_head
        if isinstance(embeddings, PanelLinear) or isinstance(head, PanelLinear):
            raise ValueError("the weights are in panels already; give the model as it was loaded")
        if kernel == "cpu":
            last = panels(Linear(weight=self._head, bias=None, num_in=1), stacked=False)  # type: ignore[arg-type]
            embeddings, head = (last, None) if head is None else (bits(embeddings), last)
        elif as_bits(embeddings) is not embeddings:
            head = embeddings if head is None else head
            embeddings = as_bits(embeddings) if head is embeddings else bits(embeddings)
        layers = jax.tree.map(convert, self.layers, is_leaf=lambda part: isinstance(part, Linear | Moe))
        return dataclasses.replace(self, embeddings=embeddings, layers=layers, lm_head=head)

    def for_gpu(self, kernel: str) -> "DecoderModel":
        """The same model with the layers' matmuls by `kernel`: xla, gpu or gpu_interpret."""
        if kernel == "xla":
            return self

        def convert(part):
            return GpuLinear.of(part, interpret=kernel == "gpu_interpret") if isinstance(part, Linear) else part

        layers = jax.tree.map(convert, self.layers, is_leaf=lambda part: isinstance(part, Linear))
        return dataclasses.replace(self, layers=layers)

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
            attention: `score_mod` and `mask_mod` act as in the paged forward, `impl` does not matter. `max_seq_len`
                None is the size of the position axis; only length-dependent ropes look at it (layers/rotary.py).
        Returns: [..., position, embed].
        """
        tokens = tokens.rearrange((..., POSITION))
        num_positions = tokens.axis_size(POSITION)
        positions = hax.arange(tokens.resolve_axis(POSITION), dtype=jnp.int32)
        rope = self._rope(positions, attention.max_seq_len or num_positions)

        def block(x: NamedArray, layer: DecoderLayer, window: Array | None) -> NamedArray:
            x = layer.attention.dense(x, layer.input_norm, rope, window, attention)
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
            x, kv = layer.attention.paged(x, layer.input_norm, rope, kv, index, batch, window, attention)
            return layer.mlp(x, layer.mlp_norm), kv

        return jax.lax.fori_loop(0, self.config.num_layers, block, (self._embed(batch.tokens), kv))

    def logits(self, hidden: NamedArray, num_rows: Array | None = None) -> NamedArray:
        """Final norm and head.

        Args:
            hidden: [..., embed]
            num_rows: i32[], how many rows count; the others may give anything. None: all.
        Returns: f32[..., vocab], of the part of the vocabulary that is here.
        """
        head = self._head
        if isinstance(head, PanelLinear):
            return apply(hidden, dataclasses.replace(head, num_rows=num_rows), norm=self.norm)[0]
        logits = contract(self.norm(hidden), head, 1)
        return NamedArray(self.vocab.without_padding(logits.array), logits.axes)

    def _embed(self, tokens: NamedArray) -> NamedArray:
        table, ids = self.embeddings, tokens.array
        if isinstance(table, PanelLinear):
            rows = table.rows(ids.reshape(-1), self.dtype).reshape(*ids.shape, self.embed.size)
        else:
            here = table.array.at[self.vocab.local(ids)].get(mode="fill", fill_value=0)
            rows = self.spread.sum(from_bits(here, self.dtype))
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


def _given_up(old: NamedArray, new, donate: bool):
    """`new`; the memory of `old`, from which it was made, is free again if `donate`."""
    if donate and new is not old and not isinstance(old.array, Tracer):
        jax.block_until_ready(new)
        old.array.delete()
    return new
