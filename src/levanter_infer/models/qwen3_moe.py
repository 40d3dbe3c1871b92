"""Qwen3 with experts: Qwen3's attention, and a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Router
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import tensor_table


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=4, head_dim=None, max_positions=32768)
    experts, chosen = read_num_experts(hf, 128, 8)
    width = hf.count("moe_intermediate_size", 768)
    normalize, bias = hf.flag("norm_topk_prob", False), hf.flag("attention_bias", False)
    # Layers without experts, and windows: HF has them, no checkpoint uses them.
    hf.only("decoder_sparse_step", 1)
    hf.only("mlp_only_layers", None, [])
    hf.only("use_sliding_window", False)
    hf.optional_count("sliding_window")
    hf.size("max_window_layers", 28)
    hf.only("mlp_bias", False)
    hf.finish()
    norm = sizes.norm()
    attention = sizes.attention(qkv_bias=bias, out_bias=bias, qk_norm=norm)
    block = Block(attention, ExpertsBlock(experts, chosen, width, Router(normalize=normalize)), norm)
    return sizes.decoder("qwen3_moe", [block] * sizes.num_layers)


def read_num_experts(hf: HfConfig, default: int, chosen: int) -> tuple[int, int]:
    """Experts, and those of one token. transformers 4 writes `num_experts`, and 5 `num_local_experts`.

    Args: default, chosen: HF's defaults.
    """
    experts = hf.count("num_experts", hf.count("num_local_experts", default))
    if hf.raw.get("num_local_experts", experts) != experts:
        raise hf.fail("num_local_experts", f"the same as num_experts={experts}")
    chosen = hf.count("num_experts_per_tok", chosen)
    if chosen > experts:
        raise hf.fail("num_experts_per_tok", f"at most num_experts={experts}")
    return experts, chosen


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        **common_to_hf(config),
        "attention_bias": config.kv_attention[0].qkv_bias,
        "moe_intermediate_size": experts.width,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "norm_topk_prob": experts.router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_EXPERTS = "model.layers.{layer}.mlp.experts.{expert}"
_NAMES = {
    **{path: name for path, name in TENSOR_NAMES.items() if not path.startswith("layers.mlp.")},
    "layers.mlp.router.weight": "model.layers.{layer}.mlp.gate.weight",
    **{f"layers.mlp.{name}_proj.weight": f"{_EXPERTS}.{name}_proj.weight" for name in ("gate", "up", "down")},
}
QWEN3_MOE_TENSORS = tensor_table(_NAMES)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", config_from_hf, config_to_hf, QWEN3_MOE_TENSORS)
