"""Qwen3, dense: Qwen2 without its biases, with norms of queries and keys."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.decoder import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_fields, common_to_hf
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.qwen2 import sliding_windows, windows_to_hf


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    fields = common_fields(hf, kv_heads=32, head_dim=128, max_positions=32768)
    windows = sliding_windows(hf, fields["num_layers"])
    bias = hf.flag("attention_bias", False)
    hf.only("mlp_bias", False)
    hf.finish()
    return DecoderConfig(
        model_type="qwen3", qkv_bias=bias, out_bias=bias, qk_norm=True, sliding_windows=windows, **fields
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), "attention_bias": config.qkv_bias, **windows_to_hf(config)}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", config_from_hf, config_to_hf, TENSOR_NAMES)
