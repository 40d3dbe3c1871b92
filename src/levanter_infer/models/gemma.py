"""Gemma: norms whose factor is 1 + weight, scaled embeddings, and GELU."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, Sizes, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig


def read_gemma(hf: HfConfig, *, kv_heads: int, max_positions: int, **options) -> Sizes:
    """Read the keys that the three generations share: `hidden_act` "gelu" means its approximation with tanh."""
    sizes = read_sizes(
        hf,
        kv_heads=kv_heads,
        head_dim=256,
        max_positions=max_positions,
        tied=True,
        activation=Activation.GELU_TANH,
        activation_names=("gelu",),
        **options,
    )
    hf.only("hidden_activation", "gelu_pytorch_tanh", None)
    hf.only("use_bidirectional_attention", None, False)
    return sizes


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_gemma(hf, kv_heads=16, max_positions=8192)
    bias = hf.flag("attention_bias", False)
    hf.finish()
    norm = sizes.norm(plus_one=True)
    block = Block(sizes.attention(qkv_bias=bias, out_bias=bias), sizes.dense(), norm)
    return sizes.decoder("gemma", [block] * sizes.num_layers, embedding_multiplier=sizes.hidden_size**0.5)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), "attention_bias": config.kv_attention[0].qkv_bias}


GEMMA = Family("gemma", "GemmaForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
