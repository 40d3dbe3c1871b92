"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in some layers."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=32, head_dim=None, max_positions=32768)
    windows = sliding_windows(hf, sizes.num_layers)
    # HF's Qwen2 has these biases and no others, whatever the keys say.
    hf.only("attention_bias", True)
    hf.only("mlp_bias", False)
    hf.finish()
    mlp, norm = DenseBlock(sizes.intermediate_size), sizes.norm()
    return sizes.decoder(
        "qwen2", [Block(sizes.attention(qkv_bias=True, window=window), mlp, norm) for window in windows]
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), **windows_to_hf(config)}


def sliding_windows(hf: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Per layer, as HF reads `use_sliding_window`, `sliding_window`, `max_window_layers` and `layer_types`.

    `layer_types` decides where it is given; otherwise the layers from `max_window_layers` on have the window.
    """
    used = hf.flag("use_sliding_window", False)
    window = hf.optional_count("sliding_window", 4096)
    window = window if used else None
    first = hf.size("max_window_layers", 28)
    kinds = hf.names("layer_types", (FULL, SLIDING))
    if kinds is None:
        kinds = tuple(SLIDING if window is not None and i >= first else FULL for i in range(num_layers))
    if len(kinds) != num_layers:
        raise hf.fail("layer_types", f"one entry for each of num_hidden_layers={num_layers}")
    if window is None and SLIDING in kinds:
        raise hf.fail("layer_types", f"no {SLIDING!r} without use_sliding_window=true and a sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    size = next((window for window in config.windows if window is not None), None)
    return {
        "use_sliding_window": size is not None,
        "sliding_window": size,
        "max_window_layers": config.num_layers,
        "layer_types": [FULL if window is None else SLIDING for window in config.windows],
    }


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
