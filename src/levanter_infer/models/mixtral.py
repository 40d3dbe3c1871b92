"""Mixtral: Mistral with a mixture of experts in every layer, whose weights always sum to one."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Router
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import MIXTRAL_ROUTER
from levanter_infer.models.family import TENSOR_NAMES, Family, Sizes, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import tensor_table


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=8, head_dim=None, max_positions=131072, norm_eps=1e-5, theta=1e6)
    experts = read_local_experts(hf, sizes)
    window = hf.optional_count("sliding_window")
    hf.finish()
    block = Block(sizes.attention(window=window), experts, sizes.norm())
    return sizes.decoder("mixtral", [block] * sizes.num_layers)


def read_local_experts(hf: HfConfig, sizes: Sizes) -> ExpertsBlock:
    """Experts of the width `intermediate_size`, with weights that sum to one."""
    experts, chosen = hf.count("num_local_experts", 8), hf.count("num_experts_per_tok", 2)
    if chosen > experts:
        raise hf.fail("num_experts_per_tok", f"at most num_local_experts={experts}")
    return ExpertsBlock(experts, chosen, sizes.intermediate_size, Router(normalize=True))


def local_experts_to_hf(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.num_chosen}


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), **local_experts_to_hf(config), "sliding_window": config.windows[0]}


_BLOCK = "model.layers.{layer}.block_sparse_moe"
_NAMES = {
    **{path: name for path, name in TENSOR_NAMES.items() if not path.startswith("layers.mlp.")},
    "layers.mlp.router.weight": f"{_BLOCK}.gate.weight",
    "layers.mlp.gate_proj.weight": f"{_BLOCK}.experts.{{expert}}.w1.weight",
    "layers.mlp.down_proj.weight": f"{_BLOCK}.experts.{{expert}}.w2.weight",
    "layers.mlp.up_proj.weight": f"{_BLOCK}.experts.{{expert}}.w3.weight",
}
MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", config_from_hf, config_to_hf, tensor_table(_NAMES), renamed=(MIXTRAL_ROUTER,)
)
