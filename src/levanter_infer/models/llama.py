"""Llama 1 to 3.x, and what calls itself so (SmolLM2, TinyLlama, Yi, ...)."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.decoder import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_fields, common_to_hf
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    fields = common_fields(hf, kv_heads=None, head_dim=None, max_positions=2048)
    bias = hf.flag("attention_bias", False)
    mlp_bias = hf.flag("mlp_bias", False)
    hf.finish()
    return DecoderConfig(model_type="llama", qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, **fields)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


LLAMA = Family("llama", "LlamaForCausalLM", config_from_hf, config_to_hf, TENSOR_NAMES)
