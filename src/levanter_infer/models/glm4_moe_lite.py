"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, which any layer may have."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.deepseek_v3 import MTP_KEY
from levanter_infer.models.experts import (
    DEEPSEEK_EXPERT_TENSORS,
    deepseek_experts_to_hf,
    read_deepseek_experts,
    read_sparse_layers,
    sparse_layers_to_hf,
)
from levanter_infer.models.family import Family
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.latent import latent_attention_to_hf, latent_tensors, read_latent_attention


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes, attention = read_latent_attention(hf, q_rank=768, nope=192, value=256, max_positions=202752, norm_eps=1e-5)
    experts = read_deepseek_experts(hf, sizes, experts=64, chosen=4, width=1536, groups=(1, 1), scale=1.8)
    parts = read_sparse_layers(hf, experts, sizes.dense(), sizes.num_layers)
    hf.size(MTP_KEY, 1)
    hf.finish()
    blocks = [Block(attention, part, sizes.norm()) for part in parts]
    return sizes.decoder("glm4_moe_lite", blocks)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = {**latent_attention_to_hf(config), **deepseek_experts_to_hf(config), MTP_KEY: 0}
    del keys["first_k_dense_replace"]
    return {**keys, **sparse_layers_to_hf(config), "rope_interleave": config.ropes[0].interleaved}


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    config_from_hf,
    config_to_hf,
    latent_tensors(DEEPSEEK_EXPERT_TENSORS),
    extra_layers_key=MTP_KEY,
)
