"""Helium: Llama with a rope of neighbours."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, common_to_hf, one_rope, read_sizes
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    ropes = functools.partial(one_rope, theta=1e5, interleaved=True)
    sizes = read_sizes(hf, kv_heads=20, head_dim=128, max_positions=4096, norm_eps=1e-8, ropes=ropes)
    qkv_bias, mlp_bias = hf.flag("attention_bias", False), hf.flag("mlp_bias", False)
    hf.finish()
    block = Block(sizes.attention(qkv_bias=qkv_bias), sizes.dense(bias=mlp_bias), sizes.norm())
    return sizes.decoder("helium", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    biases = {"attention_bias": config.kv_attention[0].qkv_bias, "mlp_bias": config.feed_forward.bias}
    return {**common_to_hf(config), **biases}


HELIUM = Family("helium", "HeliumForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
