"""Mistral: Llama with a sliding window in every layer, or in none."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.decoder import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_fields, common_to_hf
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    fields = common_fields(hf, kv_heads=8, head_dim=None, max_positions=4096 * 32)
    window = hf.optional_count("sliding_window", 4096)
    # HF's Mistral has no biases and one kind of layer, whatever these keys say.
    hf.only("attention_bias", False)
    hf.only("mlp_bias", False)
    hf.only("layer_types", None)
    hf.finish()
    windows = () if window is None else (window,) * fields["num_layers"]
    return DecoderConfig(model_type="mistral", sliding_windows=windows, **fields)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    window = config.sliding_windows[0] if config.sliding_windows else None
    return {**common_to_hf(config), "sliding_window": window}


MISTRAL = Family("mistral", "MistralForCausalLM", config_from_hf, config_to_hf, TENSOR_NAMES)
