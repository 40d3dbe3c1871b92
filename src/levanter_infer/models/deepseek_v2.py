"""DeepSeek-V2 and V2-Lite: latent attention, and experts whose softmax weights are not normalized."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Groups, GroupScore, Router
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import (
    DEEPSEEK_EXPERT_TENSORS,
    check_chosen,
    deepseek_experts_to_hf,
    feed_forwards,
    read_groups,
)
from levanter_infer.models.family import Family, Sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.latent import latent_attention_to_hf, latent_tensors, read_latent_attention

GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"
"""Values of `topk_method`."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes, attention = read_latent_attention(hf, interleaved=True, max_positions=2048)
    parts = feed_forwards(
        sizes.num_layers, _experts(hf, sizes), sizes.dense(), first=hf.size("first_k_dense_replace", 0)
    )
    hf.own_code("configuration_deepseek", "modeling_deepseek")
    hf.only("moe_layer_freq", 1)
    hf.only("ep_size", 1)
    hf.only("mlp_bias", False)
    hf.finish()
    return sizes.decoder("deepseek_v2", [Block(attention, part, sizes.norm()) for part in parts])


def _experts(hf: HfConfig, sizes: Sizes) -> ExpertsBlock:
    number = hf.count("n_routed_experts", 64)
    chosen = check_chosen(hf, "num_experts_per_tok", hf.count("num_experts_per_tok"), number)
    width, num_shared = hf.count("moe_intermediate_size", 1407), hf.size("n_shared_experts", 2)
    hf.only("scoring_func", "softmax")
    hf.only("norm_topk_prob", False)  # HF ignores it, DeepSeek's own code does not
    method = hf.one_of("topk_method", GREEDY, (GREEDY, GROUP_LIMITED))
    groups = read_groups(hf, number, chosen, (1, 1))
    limited = Groups(groups.number, groups.chosen, GroupScore.MAX, left_out=0.0) if groups is not None else None
    scale = hf.number("routed_scaling_factor", 1.0)
    router = Router(scale=scale, groups=limited if method == GROUP_LIMITED else None, exact_logits=True)
    return ExpertsBlock(number, chosen, width, router, sizes.activation, shared_width=num_shared * width or None)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    has_groups = experts is not None and experts.router.groups is not None
    keys = {**latent_attention_to_hf(config), **deepseek_experts_to_hf(config)}
    return {**keys, "topk_method": GROUP_LIMITED if has_groups else GREEDY}


DEEPSEEK_V2 = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM", config_from_hf, config_to_hf, latent_tensors(DEEPSEEK_EXPERT_TENSORS)
)
