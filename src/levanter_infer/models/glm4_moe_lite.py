"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, which any layer may have."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.deepseek_v3 import MTP_KEY
from levanter_infer.models.experts import DEEPSEEK_EXPERT_TENSORS, deepseek_experts_to_hf, read_deepseek_experts
from levanter_infer.models.family import Family
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.latent import latent_attention_to_hf, latent_tensors, read_latent_attention

DENSE, SPARSE = "dense", "sparse"
"""Entries of `mlp_layer_types`."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes, attention = read_latent_attention(hf, q_rank=768, nope=192, value=256, max_positions=202752, norm_eps=1e-5)
    experts = read_deepseek_experts(hf, sizes, experts=64, chosen=4, width=1536, groups=(1, 1), scale=1.8)
    first = hf.size("first_k_dense_replace", 1)  # of files before transformers 5
    kinds = hf.names("mlp_layer_types", (DENSE, SPARSE))
    kinds = kinds or (DENSE,) * min(first, sizes.num_layers) + (SPARSE,) * max(sizes.num_layers - first, 0)
    if len(kinds) != sizes.num_layers:
        raise hf.fail("mlp_layer_types", f"one entry for each of num_hidden_layers={sizes.num_layers}")
    hf.size(MTP_KEY, 1)
    hf.finish()
    parts = (experts if kind == SPARSE else sizes.dense() for kind in kinds)
    return sizes.decoder("glm4_moe_lite", [Block(attention, part, sizes.norm()) for part in parts])


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = {**latent_attention_to_hf(config), **deepseek_experts_to_hf(config), MTP_KEY: 0}
    del keys["first_k_dense_replace"]
    dense = (isinstance(block.feed_forward, DenseBlock) for block in config.blocks)
    kinds = [DENSE if is_dense else SPARSE for is_dense in dense]
    return {**keys, "mlp_layer_types": kinds, "rope_interleave": config.ropes[0].interleaved}


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    config_from_hf,
    config_to_hf,
    latent_tensors(DEEPSEEK_EXPERT_TENSORS),
    extra_layers_key=MTP_KEY,
)
