"""GLM-4 (0414): norms before and after, a rope of neighbours in half of each head, gate and up in one tensor."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_to_hf, one_rope, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import Tensor, tensor_table

ropes = functools.partial(one_rope, partial=True, default_partial=0.5, interleaved=True)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=2, head_dim=128, max_positions=131072, norm_eps=1.5625e-7, ropes=ropes)
    bias = hf.flag("attention_bias", True)
    hf.finish()
    block = Block(sizes.attention(qkv_bias=bias), sizes.dense(), sizes.norm(), Placement.BOTH)
    return sizes.decoder("glm4", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = {"partial_rotary_factor": config.ropes[0].partial, "attention_bias": config.kv_attention[0].qkv_bias}
    return {**common_to_hf(config), **keys}


_LAYER = "model.layers.{layer}"
GLM4_TENSORS = tensor_table(
    {
        **TENSOR_NAMES,
        "layers.mixer_out_norm.weight": f"{_LAYER}.post_self_attn_layernorm.weight",
        "layers.mlp_out_norm.weight": f"{_LAYER}.post_mlp_layernorm.weight",
    },
    Tensor(f"{_LAYER}.mlp.gate_up_proj.weight", ("layers.mlp.gate_proj.weight", "layers.mlp.up_proj.weight")),
)
GLM4 = Family("glm4", "Glm4ForCausalLM", config_from_hf, config_to_hf, GLM4_TENSORS)
