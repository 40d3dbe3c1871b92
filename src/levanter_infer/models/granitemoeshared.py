"""GraniteMoE with a shared expert."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family, read_sizes
from levanter_infer.models.granite import read_decoder
from levanter_infer.models.granitemoe import GRANITEMOE_TENSORS
from levanter_infer.models.granitemoe import config_to_hf as granitemoe_to_hf
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.mixtral import read_local_experts
from levanter_infer.models.tensors import Tensor


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=2048)
    experts = read_local_experts(hf, sizes)
    shared = hf.size("shared_intermediate_size", 0) or None
    return read_decoder(hf, sizes, dataclasses.replace(experts, shared_width=shared))


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    assert config.experts is not None
    return {**granitemoe_to_hf(config), "shared_intermediate_size": config.experts.shared_width or 0}


_SHARED = "model.layers.{layer}.shared_mlp"
GRANITEMOESHARED_TENSORS = (
    *GRANITEMOE_TENSORS,
    Tensor(
        f"{_SHARED}.input_linear.weight", ("layers.mlp.shared.gate_proj.weight", "layers.mlp.shared.up_proj.weight")
    ),
    Tensor(f"{_SHARED}.output_linear.weight", ("layers.mlp.shared.down_proj.weight",)),
)
GRANITEMOESHARED = Family(
    "granitemoeshared", "GraniteMoeSharedForCausalLM", config_from_hf, config_to_hf, GRANITEMOESHARED_TENSORS
)
