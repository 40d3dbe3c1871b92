"""LFM2 with experts: dense layers first, then experts by sigmoid with a selection bias."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Router, Score, SelectionBias
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import SELECTION_BIAS, check_chosen, dense_layers, dense_width, feed_forwards
from levanter_infer.models.family import Family
from levanter_infer.models.lfm2 import LFM2_NAMES, lfm2_blocks, lfm2_keys, read_lfm2_sizes
from levanter_infer.models.tensors import Tensor, tensor_table


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf, sizes = read_lfm2_sizes({"intermediate_size": 7168, **raw})
    experts = hf.count("num_experts", 32)
    chosen = check_chosen(hf, "num_experts_per_tok", hf.count("num_experts_per_tok", 4), experts)
    has_bias = hf.flag("use_expert_bias", True)
    router = Router(
        Score.SIGMOID,
        normalize=hf.flag("norm_topk_prob", True),
        sum_eps=1e-6,
        scale=hf.number("routed_scaling_factor", 1.0),
        selection_bias=SelectionBias.ON_SCORES if has_bias else SelectionBias.NONE,
    )
    block = ExpertsBlock(experts, chosen, hf.count("moe_intermediate_size", 1792), router, sizes.activation)
    parts = feed_forwards(sizes.num_layers, block, sizes.dense(), first=hf.size("num_dense_layers", 2))
    blocks = lfm2_blocks(hf, sizes, parts)
    hf.finish()
    return sizes.decoder("lfm2_moe", blocks)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    dense = dense_layers(config)
    keys = {**lfm2_keys(config), "intermediate_size": dense_width(config), "num_dense_layers": len(dense)}
    experts = config.experts
    if experts is None:
        return keys
    return {
        **keys,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.width,
        "use_expert_bias": experts.router.selection_bias is not SelectionBias.NONE,
        "norm_topk_prob": experts.router.normalize,
        "routed_scaling_factor": experts.router.scale,
    }


_BLOCK = "model.layers.{layer}.feed_forward"
_EXPERTS = (
    Tensor(f"{_BLOCK}.gate.weight", ("layers.mlp.router.weight",)),
    Tensor(f"{_BLOCK}.expert_bias", (SELECTION_BIAS,)),
    *(
        Tensor(f"{_BLOCK}.experts.{{expert}}.{name}.weight", (f"layers.mlp.{path}_proj.weight",))
        for path, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    ),
)
LFM2_MOE = Family(
    "lfm2_moe", "Lfm2MoeForCausalLM", config_from_hf, config_to_hf, (*tensor_table(LFM2_NAMES), *_EXPERTS)
)
