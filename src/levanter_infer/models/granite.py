"""Granite: Llama with multipliers of embeddings, scores, residuals and logits."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, Sizes, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=2048)
    return read_decoder(hf, sizes, sizes.dense(bias=hf.flag("mlp_bias", False)))


def read_decoder(hf: HfConfig, sizes: Sizes, feed_forward: DenseBlock | ExpertsBlock) -> DecoderConfig:
    """The decoder with the multipliers that Granite's families have; reads the last keys."""
    bias = hf.flag("attention_bias", False)
    attention = sizes.attention(qkv_bias=bias, out_bias=bias, scale=hf.number("attention_multiplier", 1.0))
    residual = hf.number("residual_multiplier", 1.0)
    embedding, divisor = hf.number("embedding_multiplier", 1.0), hf.number("logits_scaling", 1.0)
    hf.finish()
    block = Block(attention, feed_forward, sizes.norm(), residual_multiplier=residual)
    blocks, model_type = [block] * sizes.num_layers, hf.raw["model_type"]
    return sizes.decoder(model_type, blocks, embedding_multiplier=embedding, logits_divisor=divisor)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    dense = config.blocks[0].feed_forward
    assert isinstance(dense, DenseBlock)
    return {**common_to_hf(config), **multipliers_to_hf(config), "mlp_bias": dense.bias}


def multipliers_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The keys of `read_decoder`."""
    block = config.blocks[0]
    return {
        "attention_bias": config.kv_attention[0].qkv_bias,
        "attention_multiplier": config.kv_attention[0].scale,
        "residual_multiplier": block.residual_multiplier,
        "embedding_multiplier": config.embedding_multiplier,
        "logits_scaling": config.logits_divisor,
    }


GRANITE = Family("granite", "GraniteForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
