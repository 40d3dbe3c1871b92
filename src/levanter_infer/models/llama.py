"""Llama 1 to 3.x, and what calls itself so (SmolLM2, TinyLlama, Yi, ...)."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=2048)
    bias = hf.flag("attention_bias", False)
    mlp = sizes.dense(bias=hf.flag("mlp_bias", False))
    hf.finish()
    block = Block(sizes.attention(qkv_bias=bias, out_bias=bias), mlp, sizes.norm())
    return sizes.decoder("llama", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    block = config.blocks[0]
    assert isinstance(block.feed_forward, DenseBlock)
    return {
        **common_to_hf(config),
        "attention_bias": config.kv_attention[0].qkv_bias,
        "mlp_bias": block.feed_forward.bias,
    }


LLAMA = Family("llama", "LlamaForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
