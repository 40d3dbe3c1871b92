"""SmolLM3: Llama without a rope in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, common_to_hf, read_sizes, windows_to_hf
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=4, head_dim=None, max_positions=32768, tied=True, theta=2e6)
    bias, mlp = hf.flag("attention_bias", False), sizes.dense(bias=hf.flag("mlp_bias", False))
    interval = hf.count("no_rope_layer_interval", 4)
    has_rope = hf.flags("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(sizes.num_layers)])
    used, window = hf.flag("use_sliding_window", False), hf.optional_count("sliding_window")
    window = window if used else None
    needs = "use_sliding_window=true and a sliding_window"
    windows = hf.windows(sizes.num_layers, window, lambda layer: window is not None and not has_rope[layer], needs)
    hf.size("max_window_layers", 28)  # HF's SmolLM3 reads neither
    hf.count("pretraining_tp", 1)
    hf.finish()
    blocks = []
    for has, window in zip(has_rope, windows, strict=False):
        rope = {} if has else {"rope": None}
        attention = sizes.attention(qkv_bias=bias, out_bias=bias, window=window, **rope)
        blocks.append(Block(attention, mlp, sizes.norm()))
    return sizes.decoder("smollm3", blocks)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    block, keys = config.blocks[0], windows_to_hf(config)
    assert isinstance(block.feed_forward, DenseBlock)
    return {
        **common_to_hf(config),
        **keys,
        "use_sliding_window": keys["sliding_window"] is not None,
        "no_rope_layers": [int(each.rope is not None) for each in config.kv_attention],
        "attention_bias": config.kv_attention[0].qkv_bias,
        "mlp_bias": block.feed_forward.bias,
    }


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
