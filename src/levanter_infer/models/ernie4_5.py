"""Ernie 4.5 without experts: Llama with a rope of neighbours, and biases of all maps or of none."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, common_to_hf, one_rope, read_sizes
from levanter_infer.models.hf_config import HfConfig

ropes = functools.partial(one_rope, theta=5e5, interleaved=True)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=2, head_dim=128, max_positions=131072, tied=True, norm_eps=1e-5, ropes=ropes)
    bias = hf.flag("use_bias", False)
    hf.finish()
    block = Block(sizes.attention(qkv_bias=bias, out_bias=bias), sizes.dense(bias=bias), sizes.norm())
    return sizes.decoder("ernie4_5", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), "use_bias": config.kv_attention[0].qkv_bias}


ERNIE4_5 = Family("ernie4_5", "Ernie4_5ForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
