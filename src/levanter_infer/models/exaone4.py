"""Exaone 4: norms of the outputs only, norms of each head; where some layers have a window, only they have a rope."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family, common_to_hf, read_sizes, windows_to_hf
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.olmo2 import OLMO2_TENSORS


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=32, head_dim=None, max_positions=2048, norm_eps=1e-5)
    size = hf.optional_count("sliding_window", 4096)
    hf.ignore("sliding_window_pattern")  # HF goes by `layer_types` where it is there
    by_pattern = raw.get("layer_types") is None and size is not None
    pattern = hf.count("sliding_window_pattern", 4) if by_pattern else 4
    windows = hf.windows(sizes.num_layers, size, lambda layer: size is not None and (layer + 1) % pattern != 0)
    hf.finish()
    norm = sizes.norm()
    blocks = []
    for window in windows:
        rope = {} if size is None or window is not None else {"rope": None}
        attention = sizes.attention(qk_norm=norm, window=window, **rope)
        blocks.append(Block(attention, sizes.dense(), norm, Placement.AFTER))
    return sizes.decoder("exaone4", blocks)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = {**common_to_hf(config), **windows_to_hf(config)}
    if not config.ropes:  # a window that no layer has still takes their ropes
        keys["sliding_window"] = config.max_position_embeddings
    return keys


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", config_from_hf, config_to_hf, OLMO2_TENSORS)
