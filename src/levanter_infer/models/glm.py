"""GLM-4-9B, GLM-Edge, and GLM-4 of 0414 with norms after each block too: a rope of neighbours in half of each head, and
gate and up in one tensor."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_to_hf, one_rope, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import Tensor, tensor_table

ropes = functools.partial(one_rope, partial=True, default_partial=0.5, interleaved=True)


def config_from_hf(raw: Mapping[str, Any], model_type: str, placement: Placement) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=2, head_dim=128, max_positions=131072, norm_eps=1.5625e-7, ropes=ropes)
    bias = hf.flag("attention_bias", True)
    hf.finish()
    block = Block(sizes.attention(qkv_bias=bias), sizes.dense(), sizes.norm(), placement)
    return sizes.decoder(model_type, [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = {"partial_rotary_factor": config.ropes[0].partial, "attention_bias": config.kv_attention[0].qkv_bias}
    return {**common_to_hf(config), **keys}


_LAYER = "model.layers.{layer}"
_GATE_UP = Tensor(f"{_LAYER}.mlp.gate_up_proj.weight", ("layers.mlp.gate_proj.weight", "layers.mlp.up_proj.weight"))
_NORMS_AFTER = {
    "layers.mixer_out_norm.weight": f"{_LAYER}.post_self_attn_layernorm.weight",
    "layers.mlp_out_norm.weight": f"{_LAYER}.post_mlp_layernorm.weight",
}
GLM = Family(
    "glm",
    "GlmForCausalLM",
    functools.partial(config_from_hf, model_type="glm", placement=Placement.BEFORE),
    config_to_hf,
    tensor_table(TENSOR_NAMES, _GATE_UP),
)
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    functools.partial(config_from_hf, model_type="glm4", placement=Placement.BOTH),
    config_to_hf,
    tensor_table({**TENSOR_NAMES, **_NORMS_AFTER}, _GATE_UP),
)
