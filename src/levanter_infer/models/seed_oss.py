"""Seed-OSS: Llama whose queries, keys and values have biases of their own flag."""

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
    sizes = read_sizes(hf, kv_heads=8, head_dim=128, max_positions=524288)
    qkv_bias, out_bias = hf.flag("attention_bias", True), hf.flag("attention_out_bias", False)
    mlp = sizes.dense(bias=hf.flag("mlp_bias", False))
    hf.finish()
    block = Block(sizes.attention(qkv_bias=qkv_bias, out_bias=out_bias), mlp, sizes.norm())
    return sizes.decoder("seed_oss", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    block = config.blocks[0]
    assert isinstance(block.feed_forward, DenseBlock)
    return {
        **common_to_hf(config),
        "attention_bias": config.kv_attention[0].qkv_bias,
        "attention_out_bias": config.kv_attention[0].out_bias,
        "mlp_bias": block.feed_forward.bias,
    }


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
