"""GLM-4-9B and GLM-Edge: a rope of neighbours in half of each head, and gate and up in one tensor."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
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
    block = Block(sizes.attention(qkv_bias=bias), sizes.dense(), sizes.norm())
    return sizes.decoder("glm", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = {"partial_rotary_factor": config.ropes[0].partial, "attention_bias": config.kv_attention[0].qkv_bias}
    return {**common_to_hf(config), **keys}


GLM_TENSORS = tensor_table(
    TENSOR_NAMES,
    Tensor(
        "model.layers.{layer}.mlp.gate_up_proj.weight", ("layers.mlp.gate_proj.weight", "layers.mlp.up_proj.weight")
    ),
)
GLM = Family("glm", "GlmForCausalLM", config_from_hf, config_to_hf, GLM_TENSORS)
