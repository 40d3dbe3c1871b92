"""Arcee (AFM): Llama with a feed-forward block without a gate, of squared ReLUs."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, PLAIN_ACTIVATIONS, Family, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    keys: dict[str, Any] = dict(norm_eps=1e-5, activation=Activation.RELU2, activations=PLAIN_ACTIVATIONS)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=4096, **keys)
    bias, mlp_bias = hf.flag("attention_bias", False), hf.flag("mlp_bias", False)
    hf.finish()
    block = Block(sizes.attention(qkv_bias=bias, out_bias=bias), sizes.dense(gated=False, bias=mlp_bias), sizes.norm())
    return sizes.decoder("arcee", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    biases = {"attention_bias": config.kv_attention[0].qkv_bias, "mlp_bias": config.feed_forward.bias}
    return {**common_to_hf(config), **biases}


ARCEE = Family("arcee", "ArceeForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
