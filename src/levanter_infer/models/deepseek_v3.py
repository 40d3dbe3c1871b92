"""DeepSeek-V3 and R1: latent attention, a few dense layers, then experts in groups. Kimi-K2 has the same classes."""

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
from levanter_infer.models.family import Family
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.latent import latent_attention_to_hf, latent_tensors, read_latent_attention
from levanter_infer.models.multimodal import LLAVA_PREFIXES, Parent

MTP_KEY = "num_nextn_predict_layers"


def config_from_hf(raw: Mapping[str, Any], model_type: str = "deepseek_v3") -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes, attention = read_latent_attention(hf, max_positions=4096)
    experts = read_deepseek_experts(hf, sizes, experts=256, chosen=8, width=2048, groups=(8, 4), scale=2.5)
    parts = feed_forwards(sizes.num_layers, experts, sizes.dense(), first=hf.size("first_k_dense_replace", 3))
    hf.own_code("configuration_deepseek", "modeling_deepseek")
    hf.only("moe_layer_freq", 1)
    hf.only("ep_size", 1)
    hf.size(MTP_KEY, 1)
    hf.finish()
    return sizes.decoder(model_type, [Block(attention, part, sizes.norm()) for part in parts])


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = {**latent_attention_to_hf(config), **deepseek_experts_to_hf(config)}
    return {**keys, "rope_interleave": config.ropes[0].interleaved, MTP_KEY: 0}


def _family(model_type: str) -> Family:
    return Family(
        model_type,
        "DeepseekV3ForCausalLM",
        functools.partial(config_from_hf, model_type=model_type),
        config_to_hf,
        latent_tensors(DEEPSEEK_EXPERT_TENSORS),
        extra_layers_key=MTP_KEY,
    )


DEEPSEEK_V3 = _family("deepseek_v3")
KIMI_K2 = _family("kimi_k2")
KIMI_K25 = Parent(
    "kimi_k25",
    "KimiK25ForConditionalGeneration",
    texts=(DEEPSEEK_V3, KIMI_K2),
    others=(
        *("vision_config", "media_placeholder_token_id", "ignore_index", "use_unified_vision_chunk"),
        *("video_placeholder", "encoder_only", "language_only", "projection_hidden_size"),
        *("projection_layer_norm_eps", "image_token_id", "video_token_id"),
        *("vision_start_token_id", "vision_end_token_id"),
    ),
    prefixes=LLAVA_PREFIXES,
    unused=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
    modules=("configuration_kimi_k25", "modeling_kimi_k25"),
)
"""Kimi K2.5 and later, the text model."""
