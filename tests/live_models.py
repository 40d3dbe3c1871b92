"""Models as Levanter trains them: the fields, axes and statics of its `LlamaLMHeadModel`, and nothing that computes.

Levanter itself is no dependency of the tests. Weights are HF's, or random.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from haliax.nn.scan import ScanCheckpointPolicy, Stacked


@dataclasses.dataclass(frozen=True)
class Rope:
    """`RotaryEmbeddingsConfig`"""

    theta: float = 10000.0
    scaling: dict | None = None

    def to_hf_config(self):
        return self.theta, self.scaling


@dataclasses.dataclass(frozen=True)
class LiveConfig:
    """`LlamaConfig`"""

    max_seq_len: int
    rope: Rope
    activation_function: str = "silu"
    hybrid_norm: bool = False
    sliding_window: int | None = None


class Mlp(eqx.Module):
    gate_proj: hnn.Linear
    up_proj: hnn.Linear
    down_proj: hnn.Linear


class Attention(eqx.Module):
    config: LiveConfig = eqx.field(static=True)
    q_proj: hnn.Linear
    k_proj: hnn.Linear
    v_proj: hnn.Linear
    o_proj: hnn.Linear
    q_norm: hnn.RmsNorm | None = None
    k_norm: hnn.RmsNorm | None = None


class Layer(eqx.Module):
    config: LiveConfig = eqx.field(static=True)
    self_attn: Attention
    mlp: Mlp
    input_layernorm: hnn.RmsNorm
    post_attention_layernorm: hnn.RmsNorm
    post_attn_layernorm: hnn.RmsNorm | None = None


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


def live_model(config: dict, weights: dict[str, np.ndarray], *, dtype=jnp.float32, kv_name: str = "kv_head"):
    """The model that a checkpoint's config.json and tensors describe, as Levanter would hold it.

    Args:
        kv_name: of the axis of key/value heads; older releases say kv_heads.
    """
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = Axis("layers", config["num_hidden_layers"])
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

    def norm(weight: hax.NamedArray | None, axis: Axis = embed) -> hnn.RmsNorm | None:
        return None if weight is None else hnn.RmsNorm(axis, weight, None, config["rms_norm_eps"], jnp.float32)  # type: ignore

    scaling = config.get("rope_scaling")
    live = LiveConfig(config["max_position_embeddings"], Rope(config["rope_theta"], scaling))
    q_heads = (kv_heads, group, size)
    attention = Attention(
        live,
        linear("self_attn.q_proj", q_heads, (embed,)),
        linear("self_attn.k_proj", (kv_heads, size), (embed,)),
        linear("self_attn.v_proj", (kv_heads, size), (embed,)),
        linear("self_attn.o_proj", (embed,), (Axis("heads", heads), size)),
        norm(stack("self_attn.q_norm.weight", size), size),
        norm(stack("self_attn.k_norm.weight", size), size),
    )
    block = Layer(
        live,
        attention,
        Mlp(
            linear("mlp.gate_proj", (mlp,), (embed,)),
            linear("mlp.up_proj", (mlp,), (embed,)),
            linear("mlp.down_proj", (embed,), (mlp,)),
        ),
        norm(stack("input_layernorm.weight", embed)),  # type: ignore
        norm(stack("post_attention_layernorm.weight", embed)),  # type: ignore
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
