"""OLMo 3: OLMo 2 with a sliding window in three of four layers; a scaled rope is that of the fourth only."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family, common_to_hf, read_sizes, ropes_by_kind_to_hf, windows_to_hf
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.olmo2 import OLMO2_TENSORS


def ropes(hf: HfConfig, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    return hf.ropes_by_kind(head_dim, max_positions, theta=5e5, local_theta=None)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=2048, norm_eps=1e-5, ropes=ropes)
    bias = hf.flag("attention_bias", False)
    window = hf.optional_count("sliding_window", 4096)
    windows = hf.windows(sizes.num_layers, window, lambda layer: (layer + 1) % 4 != 0)
    hf.finish()
    norm = sizes.norm()
    blocks = []
    for window in windows:
        attention = sizes.attention(qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_whole=True, window=window)
        blocks.append(Block(attention, sizes.dense(), norm, Placement.AFTER))
    return sizes.decoder("olmo3", blocks)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = {**common_to_hf(config, ropes_by_kind_to_hf(config)), **windows_to_hf(config)}
    return {**keys, "attention_bias": config.kv_attention[0].qkv_bias}


OLMO3 = Family("olmo3", "Olmo3ForCausalLM", config_from_hf, config_to_hf, OLMO2_TENSORS)
