"""GLM-4.5 with experts: DeepSeek-V3's router and shared expert, dense layers first, a rope in a part of each head."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import (
    DEEPSEEK_EXPERT_TENSORS,
    deepseek_experts_to_hf,
    feed_forwards,
    read_deepseek_experts,
)
from levanter_infer.models.family import Family, common_to_hf, one_rope, read_sizes
from levanter_infer.models.hf_config import HfConfig

ropes = functools.partial(one_rope, partial=True, default_partial=0.5)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=8, head_dim=None, max_positions=131072, norm_eps=1e-5, ropes=ropes)
    experts = read_deepseek_experts(hf, sizes, experts=128, chosen=8, width=1408, groups=(1, 1), scale=1.0)
    parts = feed_forwards(sizes.num_layers, experts, sizes.dense(), first=hf.size("first_k_dense_replace", 1))
    bias, has_norms = hf.flag("attention_bias", False), hf.flag("use_qk_norm", False)
    hf.size("num_nextn_predict_layers", 1)
    hf.finish()
    norm = sizes.norm()
    attention = sizes.attention(qkv_bias=bias, qk_norm=norm if has_norms else None)
    return sizes.decoder("glm4_moe", [Block(attention, part, norm) for part in parts])


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.kv_attention[0]
    return {
        **common_to_hf(config),
        **deepseek_experts_to_hf(config),
        "partial_rotary_factor": config.ropes[0].partial,
        "attention_bias": mixer.qkv_bias,
        "use_qk_norm": mixer.qk_norm is not None,
        "num_nextn_predict_layers": 0,
    }


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    config_from_hf,
    config_to_hf,
    DEEPSEEK_EXPERT_TENSORS,
    extra_layers_key="num_nextn_predict_layers",
)
