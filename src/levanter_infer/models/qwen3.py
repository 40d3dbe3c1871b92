"""Qwen3, dense: Qwen2 without its biases, with norms of queries and keys."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.qwen2 import qwen_windows_to_hf, sliding_windows


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=32, head_dim=128, max_positions=32768)
    windows = sliding_windows(hf, sizes.num_layers)
    bias = hf.flag("attention_bias", False)
    hf.only("mlp_bias", False)
    hf.finish()
    mlp, norm = sizes.dense(), sizes.norm()
    kinds = {w: sizes.attention(qkv_bias=bias, out_bias=bias, qk_norm=norm, window=w) for w in set(windows)}
    return sizes.decoder("qwen3", [Block(kinds[window], mlp, norm) for window in windows])


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), "attention_bias": config.kv_attention[0].qkv_bias, **qwen_windows_to_hf(config)}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
