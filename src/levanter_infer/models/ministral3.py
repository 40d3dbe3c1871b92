"""Ministral 3: Mistral whose queries are scaled by their positions, beyond the original context of a YaRN rope."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, common_to_hf, one_rope, read_sizes, rope_to_hf
from levanter_infer.models.hf_config import HfConfig

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ropes(hf: HfConfig, head_dim: int, max_positions: int, **options) -> dict[str, RopeConfig]:
    """As `one_rope`, of a family that scales queries."""
    by_kind = one_rope(hf, head_dim, max_positions, query_beta=True, **options)
    for rope in by_kind.values():
        if rope.kind != "yarn":
            raise ValueError(f"config.json: rope type {rope.kind!r}, expected yarn: this family has no other")
    return by_kind


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        raw = {**raw, "rope_parameters": DEFAULT_ROPE}
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=8, head_dim=128, max_positions=262144, norm_eps=1e-5, ropes=ropes)
    window = hf.optional_count("sliding_window")
    hf.finish()
    block = Block(sizes.attention(window=window), sizes.dense(), sizes.norm())
    return sizes.decoder("ministral3", [block] * sizes.num_layers)


def rope_keys(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `ropes`."""
    keys = rope_to_hf(config.ropes[0], config.max_position_embeddings)
    return {"rope_parameters": {"llama_4_scaling_beta": 0.0, **keys.pop("rope_scaling"), **keys}}


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config, rope_keys(config)), "sliding_window": config.windows[0]}


MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
