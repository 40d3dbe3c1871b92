"""Phi-3, Phi-3.5, Phi-4: Llama with fused projections, and a rope of a part of each head."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_to_hf, read_sizes
from levanter_infer.models.hf_config import FULL, SLIDING, HfConfig
from levanter_infer.models.tensors import Tensor, tensor_table


def ropes(hf: HfConfig, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    """HF reads the older names "su" and "yarn" as "longrope"."""
    aliases = {"su": "longrope", "yarn": "longrope"}
    rope = hf.rope(head_dim, max_positions, partial=True, original_len=4096, aliases=aliases)
    if rope.kind not in ("default", "longrope"):
        raise ValueError(f"config.json: rope type {rope.kind!r}, expected default or longrope: Phi-3 has no other")
    return dict.fromkeys((FULL, SLIDING), rope)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=4096, norm_eps=1e-5, ropes=ropes)
    window = hf.optional_count("sliding_window")
    # HF's Phi-3 has none of these, whatever the keys of Microsoft's own code say.
    for key, neutral in {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False}.items():
        hf.only(key, neutral)
    hf.only("full_attn_mod", 1)
    hf.only("interpolate_factor", 1)
    hf.own_code("configuration_phi3", "modeling_phi3")
    hf.finish()
    block = Block(sizes.attention(window=window), sizes.dense(), sizes.norm())
    return sizes.decoder("phi3", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    original = config.ropes[0].original_len or config.max_position_embeddings
    keys = {**common_to_hf(config), "sliding_window": config.windows[0]}
    return {**keys, "original_max_position_embeddings": original}


_LAYER = "model.layers.{layer}"
PHI3_TENSORS = tensor_table(
    TENSOR_NAMES,
    Tensor(f"{_LAYER}.self_attn.qkv_proj.weight", tuple(f"layers.attention.{name}_proj.weight" for name in "qkv")),
    Tensor(f"{_LAYER}.mlp.gate_up_proj.weight", ("layers.mlp.gate_proj.weight", "layers.mlp.up_proj.weight")),
)
PHI3 = Family("phi3", "Phi3ForCausalLM", config_from_hf, config_to_hf, PHI3_TENSORS)
