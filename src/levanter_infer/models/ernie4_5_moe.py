"""Ernie 4.5 with experts: softmax with a selection bias in float32, dense layers around, one wide shared expert."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Router, SelectionBias
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.ernie4_5 import ropes
from levanter_infer.models.experts import (
    SELECTION_BIAS,
    check_chosen,
    dense_layers,
    dense_width,
    expert_tensors,
    feed_forwards,
)
from levanter_infer.models.family import Family, Sizes, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import Tensor


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=4, head_dim=None, max_positions=131072, tied=True, norm_eps=1e-5, ropes=ropes)
    experts, step = read_experts(hf, sizes), hf.count("moe_layer_interval", 1)
    first, last = hf.size("moe_layer_start_index", 1), None
    if raw.get("moe_layer_end_index", -1) == -1:
        hf.only("moe_layer_end_index", -1)
    else:
        last = hf.size("moe_layer_end_index", 0)
    parts = feed_forwards(sizes.num_layers, experts, sizes.dense(), first=first, last=last, step=step)
    hf.only("use_bias", False)
    # Of Baidu's own files; the capacity is one of training.
    hf.only("moe_use_aux_free", True)
    hf.only("moe_gate_act", "softmax")
    for key in ("moe_gate", "moe_capacity", "num_nextn_predict_layers"):
        hf.only(key, raw.get(key))
    hf.finish()
    return sizes.decoder("ernie4_5_moe", [Block(sizes.attention(), part, sizes.norm()) for part in parts])


def read_experts(hf: HfConfig, sizes: Sizes) -> ExpertsBlock:
    experts, width = hf.count("moe_num_experts", 64), hf.count("moe_intermediate_size", 1536)
    chosen = check_chosen(hf, "moe_k", hf.count("moe_k", 6), experts)
    router = Router(
        normalize=True,
        sum_min=hf.number("moe_norm_min", 1e-12),
        selection_bias=SelectionBias.ON_SCORES,
        exact_logits=True,
        float32=True,
    )
    shared = hf.size("moe_num_shared_experts", 2) * width or None
    return ExpertsBlock(experts, chosen, width, router, sizes.activation, shared_width=shared)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    experts, dense = config.experts, dense_layers(config)
    with_experts = [layer for layer in range(config.num_layers) if layer not in dense]
    keys = {**common_to_hf(config), "intermediate_size": dense_width(config), "use_bias": False}
    if experts is None:
        return {**keys, "moe_layer_start_index": config.num_layers}
    return {
        **keys,
        "moe_num_experts": experts.num_experts,
        "moe_k": experts.num_chosen,
        "moe_intermediate_size": experts.width,
        "moe_num_shared_experts": (experts.shared_width or 0) // experts.width,
        "moe_norm_min": experts.router.sum_min,
        "moe_layer_start_index": with_experts[0],
        "moe_layer_end_index": with_experts[-1],
        "moe_layer_interval": with_experts[1] - with_experts[0] if len(with_experts) > 1 else with_experts[0] + 1,
    }


_BIAS = Tensor("model.layers.{layer}.mlp.moe_statics.e_score_correction_bias", (SELECTION_BIAS,), unit_axes=(1, 0))
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    config_from_hf,
    config_to_hf,
    expert_tensors("mlp", _BIAS),
    unused=("mtp", "model.mtp"),
)
