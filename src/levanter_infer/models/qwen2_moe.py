"""Qwen2 with experts: beside them a shared expert with a gate of its own, and dense layers where the config says so."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Router
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_to_hf, read_sizes, windows_to_hf
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.qwen3_moe import QWEN3_MOE_TENSORS, read_num_experts
from levanter_infer.models.tensors import Tensor


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=16, head_dim=None, max_positions=32768)
    number, chosen = read_num_experts(hf, 60, 4)
    width, shared = hf.count("moe_intermediate_size", 1408), hf.count("shared_expert_intermediate_size", 5632)
    normalize = hf.flag("norm_topk_prob", False)
    experts = ExpertsBlock(number, chosen, width, Router(normalize=normalize), shared_width=shared, shared_gate=True)
    step, dense = hf.count("decoder_sparse_step", 1), hf.layers("mlp_only_layers", sizes.num_layers)
    bias = hf.flag("qkv_bias", True)
    hf.ignore("sliding_window")  # HF writes 0 where none is used
    window = hf.optional_count("sliding_window", 4096) if hf.flag("use_sliding_window", False) else None
    last = hf.size("max_window_layers", 28)
    needs = "use_sliding_window=true and a sliding_window"
    windows = hf.windows(sizes.num_layers, window, lambda i: window is not None and i % 2 == 0 and i < last, needs)
    hf.finish()
    blocks = []
    for layer, window in enumerate(windows):
        has_experts = layer not in dense and (layer + 1) % step == 0
        attention = sizes.attention(qkv_bias=bias, window=window)
        blocks.append(Block(attention, experts if has_experts else sizes.dense(), sizes.norm()))
    return sizes.decoder("qwen2_moe", blocks)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    parts, windows = [block.feed_forward for block in config.blocks], windows_to_hf(config)
    experts = config.experts
    width = next((part.width for part in parts if isinstance(part, DenseBlock)), config.hidden_size)
    keys = {**common_to_hf(config), **windows, "use_sliding_window": windows["sliding_window"] is not None}
    if experts is not None:
        keys |= {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_chosen,
            "norm_topk_prob": experts.router.normalize,
            "moe_intermediate_size": experts.width,
            "shared_expert_intermediate_size": experts.shared_width,
        }
    dense = [layer for layer, part in enumerate(parts) if isinstance(part, DenseBlock)]
    return {**keys, "intermediate_size": width, "mlp_only_layers": dense, "qkv_bias": config.kv_attention[0].qkv_bias}


_MLP = "model.layers.{layer}.mlp"
QWEN2_MOE_TENSORS = (
    *QWEN3_MOE_TENSORS,
    *(Tensor(name, (path,)) for path, name in TENSOR_NAMES.items() if path.startswith("layers.mlp.")),
    *(
        Tensor(f"{_MLP}.shared_expert.{name}_proj.weight", (f"layers.mlp.shared.{name}_proj.weight",))
        for name in ("gate", "up", "down")
    ),
    Tensor(f"{_MLP}.shared_expert_gate.weight", ("layers.mlp.shared_gate.weight",)),
)
QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", config_from_hf, config_to_hf, QWEN2_MOE_TENSORS)
