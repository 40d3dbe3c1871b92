"""Mistral: Llama with a sliding window in every layer, or in none."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=8, head_dim=None, max_positions=4096 * 32)
    window = hf.optional_count("sliding_window", 4096)
    # HF's Mistral has no biases and one kind of layer, whatever these keys say.
    hf.only("attention_bias", False)
    hf.only("mlp_bias", False)
    hf.only("layer_types", None)
    hf.finish()
    block = Block(sizes.attention(window=window), sizes.dense(), sizes.norm())
    return sizes.decoder("mistral", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), "sliding_window": config.windows[0]}


MISTRAL = Family("mistral", "MistralForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
