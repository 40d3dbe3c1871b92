"""Models as Levanter trains them: the fields, axes and statics of its `LlamaLMHeadModel`, and nothing that computes.

Levanter itself is no dependency of these tests; `scripts/compat.sh` tries the real one. Weights are HF's, or random.
"""

import dataclasses
import math

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from haliax.nn.scan import ScanCheckpointPolicy, Stacked

from levanter_infer.layers.rotary import frequencies
from levanter_infer.models.hf_config import HfConfig


class Rotary(eqx.Module):
    """`RotaryEmbeddings`: queries or keys and positions in, the same turned out."""

    inv_freq: tuple[float, ...] = eqx.field(static=True)
    scale: float = eqx.field(static=True, default=1.0)
    pairs_of_neighbours: bool = eqx.field(static=True, default=False)

    def __call__(self, q: hax.NamedArray, position_ids: hax.NamedArray) -> hax.NamedArray:
        half = len(self.inv_freq)
        freqs = np.asarray(self.inv_freq, np.float32)
        angles = position_ids.astype(jnp.float32).broadcast_axis(Axis("head_size", half))
        angles = angles.rearrange((..., "head_size")) * hax.named(freqs, "head_size")
        cos, sin = hax.cos(angles) * self.scale, hax.sin(angles) * self.scale
        if self.pairs_of_neighbours:
            first, second = q["head_size", 0::2], q["head_size", 1::2]
        else:
            first, second = q["head_size", :half], q["head_size", half:]
        return hax.concatenate("head_size", [first * cos - second * sin, second * cos + first * sin])


@dataclasses.dataclass(frozen=True)
class Rope:
    """`RotaryEmbeddingsConfig`"""

    theta: float = 10000.0
    scaling: dict | None = None
    yarn: str = "today"
    """Whose formula: `today`, or `1.2`, that of Levanter 1.2."""

    def to_hf_config(self):
        return self.theta, self.scaling

    def build(self, HeadSize: Axis) -> Rotary | None:
        """None for kinds that Levanter does not have."""
        kind = (self.scaling or {}).get("rope_type", "default")
        if kind == "yarn":
            return Rotary(*levanter_yarn(self.theta, self.scaling or {}, HeadSize.size, self.yarn))
        if kind not in ("default", "linear", "llama3"):
            return None
        rope = HfConfig(dict(rope_theta=self.theta, rope_scaling=self.scaling)).rope(HeadSize.size, 2048)
        return Rotary(tuple(frequencies(rope, HeadSize.size, 0)[0].tolist()))


def levanter_yarn(theta: float, scaling: dict, head_dim: int, release: str) -> tuple[tuple[float, ...], float]:
    """Radians per position and the factor on cos and sin, as Levanter's `YarnRotaryEmbeddings` has them."""
    factor, half = scaling["factor"], head_dim // 2
    width = half if release == "1.2" else head_dim
    inv_freq = theta ** -(np.arange(0, head_dim, 2) / head_dim)

    def dimension(rotations: float) -> float:
        original = scaling["original_max_position_embeddings"]
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.get("beta_fast", 32.0))), 0)
    high = min(math.ceil(dimension(scaling.get("beta_slow", 1.0))), half - 1)
    ramp = np.clip((np.arange(half) - low) / max(high - low, 1), 0, 1)
    inv_freq = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    scale = 0.1 * scaling.get("mscale", 1.0) * math.log(factor) + 1
    if release == "1.2":
        inv_freq, scale = inv_freq / factor, math.sqrt(scale)
    return tuple(inv_freq.tolist()), scale


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """`AttentionConfig`"""

    sliding_window: int | None = None


@dataclasses.dataclass(frozen=True)
class LiveConfig:
    """`LlamaConfig`; Mistral's has a window too, which its layers do not apply."""

    max_seq_len: int
    rope: Rope
    activation_function: str = "silu"
    hybrid_norm: bool = False
    sliding_window: int | None = None
    num_experts_per_tok: int | None = None
    norm_topk_prob: bool | None = None
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1


class Mlp(eqx.Module):
    gate_proj: hnn.Linear
    up_proj: hnn.Linear
    down_proj: hnn.Linear


class Experts(eqx.Module):
    """`Qwen3MoeExperts`: weights of `MoELinear`, [layer, experts, in, out]."""

    gate_proj: hnn.MoELinear
    up_proj: hnn.MoELinear
    down_proj: hnn.MoELinear


class SparseMlp(eqx.Module):
    """`Qwen3MoeSparseMoeBlock`"""

    gate: hnn.Linear
    experts: Experts
    inference: bool = False


class MixtralExperts(eqx.Module):
    """`MixtralMoEMlp`"""

    w1: hnn.MoELinear
    w2: hnn.MoELinear
    w3: hnn.MoELinear


class MixtralMlp(eqx.Module):
    """`MixtralSparseMoeBlock`"""

    gate: hnn.Linear
    experts: MixtralExperts


class Attention(eqx.Module):
    config: AttentionConfig = eqx.field(static=True)
    q_proj: hnn.Linear
    k_proj: hnn.Linear
    v_proj: hnn.Linear
    o_proj: hnn.Linear
    q_norm: hnn.RmsNorm | None = None
    k_norm: hnn.RmsNorm | None = None
    rot_embs: Rotary | None = None


class Layer(eqx.Module):
    config: LiveConfig = eqx.field(static=True)
    self_attn: Attention
    mlp: Mlp | SparseMlp | None
    input_layernorm: hnn.RmsNorm
    post_attention_layernorm: hnn.RmsNorm
    post_attn_layernorm: hnn.RmsNorm | None = None
    block_sparse_moe: MixtralMlp | None = None
    """Experts of Mixtral, which has no `mlp`."""


class Transformer(eqx.Module):
    config: LiveConfig = eqx.field(static=True)
    layers: Stacked
    norm: hnn.RmsNorm


class Embeddings(eqx.Module):
    Vocab: Axis = eqx.field(static=True)
    token_embeddings: hnn.Embedding


class LiveModel(eqx.Module):
    transformer: Transformer
    embeddings: Embeddings
    lm_head: hnn.Linear | None

    @property
    def config(self):
        return self.transformer.config


def live_model(
    config: dict,
    weights: dict[str, np.ndarray],
    *,
    dtype=jnp.float32,
    kv_name: str = "kv_head",
    layer_name: str = "layer",
    rope: Rope | None = None,
    window: int | None = None,
):
    """The model that a checkpoint's config.json and tensors describe, as Levanter would hold it.

    Args:
        kv_name: of the axis of key/value heads; older releases say kv_heads.
        layer_name: of the axis of layers; older releases and Mistral say layers.
        rope: by default config.json's.
        window: what the attention layers apply.
    """
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = Axis(layer_name, config["num_hidden_layers"])
    vocab, embed = Axis("vocab", config["vocab_size"]), Axis("embed", config["hidden_size"])
    mlp, size = Axis("mlp", config["intermediate_size"]), Axis("head_size", head_dim)
    kv_heads, group = Axis(kv_name, kv), Axis("q_heads_per_group", heads // kv)

    def array(names: list[str], axes) -> hax.NamedArray:
        stacked = np.stack([weights[name] for name in names]).reshape([axis.size for axis in axes])
        return hax.named(jnp.asarray(stacked, dtype), axes)

    def stack(name: str, *axes: Axis) -> hax.NamedArray | None:
        names = [f"model.layers.{layer}.{name}" for layer in range(layers.size)]
        return array(names, (layers, *axes)) if names[0] in weights else None

    def linear(name: str, outs: tuple, ins: tuple) -> hnn.Linear:
        return hnn.Linear(stack(f"{name}.weight", *outs, *ins), stack(f"{name}.bias", *outs), ins, outs)  # type: ignore

    def experts(name: str, outs: Axis, ins: Axis) -> hnn.MoELinear:
        """`name` with `{expert}`."""
        places = [(layer, i) for layer in range(layers.size) for i in range(expert.size)]
        names = [f"model.layers.{layer}.{name.format(expert=i)}.weight" for layer, i in places]
        weight = array(names, (layers, expert, outs, ins)).rearrange((layers, expert, ins, outs))
        return hnn.MoELinear(weight, None, expert, ins, outs, use_gmm=False)

    def norm(weight: hax.NamedArray | None, axis: Axis = embed) -> hnn.RmsNorm | None:
        return None if weight is None else hnn.RmsNorm(axis, weight, None, config["rms_norm_eps"], jnp.float32)  # type: ignore

    rope = rope or Rope(config["rope_theta"], config.get("rope_scaling"))
    live = LiveConfig(
        config["max_position_embeddings"],
        rope,
        num_experts_per_tok=config.get("num_experts_per_tok"),
        norm_topk_prob=config.get("norm_topk_prob"),
    )
    is_mixtral = config["model_type"] == "mixtral"
    expert = Axis("experts", config.get("num_experts", config.get("num_local_experts", 0)))
    width = mlp if is_mixtral else Axis("mlp", config.get("moe_intermediate_size", 0))
    q_heads = (kv_heads, group, size)
    attention = Attention(
        AttentionConfig(window),
        linear("self_attn.q_proj", q_heads, (embed,)),
        linear("self_attn.k_proj", (kv_heads, size), (embed,)),
        linear("self_attn.v_proj", (kv_heads, size), (embed,)),
        linear("self_attn.o_proj", (embed,), (Axis("heads", heads), size)),
        norm(stack("self_attn.q_norm.weight", size), size),
        norm(stack("self_attn.k_norm.weight", size), size),
        rope.build(size),
    )
    dense, sparse, mixtral = None, None, None
    if is_mixtral:
        own = [f"block_sparse_moe.experts.{{expert}}.w{i}" for i in (1, 2, 3)]
        maps = experts(own[0], width, embed), experts(own[1], embed, width), experts(own[2], width, embed)
        mixtral = MixtralMlp(linear("block_sparse_moe.gate", (expert,), (embed,)), MixtralExperts(*maps))
    elif expert.size:
        own = [f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")]
        maps = experts(own[0], width, embed), experts(own[1], width, embed), experts(own[2], embed, width)
        sparse = SparseMlp(linear("mlp.gate", (expert,), (embed,)), Experts(*maps))
    else:
        dense = Mlp(
            linear("mlp.gate_proj", (mlp,), (embed,)),
            linear("mlp.up_proj", (mlp,), (embed,)),
            linear("mlp.down_proj", (embed,), (mlp,)),
        )
    block = Layer(
        live,
        attention,
        dense or sparse,
        norm(stack("input_layernorm.weight", embed)),  # type: ignore
        norm(stack("post_attention_layernorm.weight", embed)),  # type: ignore
        block_sparse_moe=mixtral,
    )
    table = array(["model.embed_tokens.weight"], (vocab, embed))
    head = None
    if not config["tie_word_embeddings"]:
        head = hnn.Linear(array(["lm_head.weight"], (vocab, embed)), None, embed, vocab)
    last = norm(array(["model.norm.weight"], (embed,)))
    assert last is not None
    return LiveModel(
        Transformer(live, Stacked(block, layers, ScanCheckpointPolicy(disable=True)), last),
        Embeddings(vocab, hnn.Embedding(table, vocab, embed)),
        head,
    )
