"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in some layers."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, common_to_hf, read_sizes, windows_to_hf
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=32, head_dim=None, max_positions=32768)
    windows = sliding_windows(hf, sizes.num_layers)
    # HF's Qwen2 has these biases and no others, whatever the keys say.
    hf.only("attention_bias", True)
    hf.only("mlp_bias", False)
    hf.finish()
    mlp, norm = sizes.dense(), sizes.norm()
    return sizes.decoder(
        "qwen2", [Block(sizes.attention(qkv_bias=True, window=window), mlp, norm) for window in windows]
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), **qwen_windows_to_hf(config)}


def sliding_windows(hf: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Per layer, as HF reads `use_sliding_window`, `sliding_window`, `max_window_layers` and `layer_types`.

    `layer_types` decides where it is given; otherwise the layers from `max_window_layers` on have the window.
    """
    used = hf.flag("use_sliding_window", False)
    window = hf.optional_count("sliding_window", 4096)
    window = window if used else None
    first = hf.size("max_window_layers", 28)
    needs = "use_sliding_window=true and a sliding_window"
    return hf.windows(num_layers, window, lambda layer: window is not None and layer >= first, needs)


def qwen_windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = windows_to_hf(config)
    return {**keys, "use_sliding_window": keys["sliding_window"] is not None, "max_window_layers": config.num_layers}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
