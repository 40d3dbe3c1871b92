"""Hunyuan with experts: Hunyuan's attention, experts with normalized weights in every layer, and a shared one."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Router
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import check_chosen, expert_tensors
from levanter_infer.models.family import Family, common_to_hf
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.hunyuan_v1_dense import NORM_NAMES, read_attention, read_hunyuan
from levanter_infer.models.tensors import Tensor


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_hunyuan(hf)
    width, attention, norm = sizes.intermediate_size, read_attention(hf, sizes), sizes.norm()
    experts, *others = set(hf.counts("num_experts", sizes.num_layers, 1))
    if others:
        raise hf.fail("num_experts", "one number for all layers: others are not implemented")
    chosen = [check_chosen(hf, "moe_topk", each, experts) for each in hf.counts("moe_topk", sizes.num_layers, 1)]
    # Of Tencent's own files: one shared expert of the same width, and experts in all layers.
    for key, value in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        hf.only(key, value, [value] * sizes.num_layers)
    hf.only("use_mixed_mlp_moe", True)
    hf.only("moe_layer_num_skipped", 0)
    hf.only("norm_topk_prob", True)
    for key in ("moe_drop_tokens", "moe_random_routing_dropped_token", "group_limited_greedy"):
        hf.only(key, False)
    hf.optional_number("capacity_factor", None)
    hf.finish()
    blocks = []
    for count in chosen:
        part = ExpertsBlock(experts, count, width, Router(normalize=True), sizes.activation, shared_width=width)
        blocks.append(Block(attention, part, norm))
    return sizes.decoder("hunyuan_v1_moe", blocks)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    parts = [block.feed_forward for block in config.blocks]
    return {
        **common_to_hf(config),
        "attention_bias": config.kv_attention[0].qkv_bias,
        "num_experts": config.num_experts,
        "moe_topk": [part.num_chosen for part in parts if isinstance(part, ExpertsBlock)],
    }


HUNYUAN_V1_MOE_TENSORS = expert_tensors(
    "mlp", *(Tensor(name, (path,)) for path, name in NORM_NAMES.items()), router="gate.wg", shared="shared_mlp"
)
HUNYUAN_V1_MOE = Family(
    "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", config_from_hf, config_to_hf, HUNYUAN_V1_MOE_TENSORS
)
