"""GraniteMoE: Granite with a mixture of experts in every layer; all experts of a layer are in one tensor."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_to_hf, read_sizes
from levanter_infer.models.granite import multipliers_to_hf, read_decoder
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.mixtral import local_experts_to_hf, read_local_experts
from levanter_infer.models.tensors import Tensor, tensor_table


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=2048)
    return read_decoder(hf, sizes, read_local_experts(hf, sizes))


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), **multipliers_to_hf(config), **local_experts_to_hf(config)}


_BLOCK = "model.layers.{layer}.block_sparse_moe"
_NAMES = {path: name for path, name in TENSOR_NAMES.items() if not path.startswith("layers.mlp.")}
GRANITEMOE_TENSORS = tensor_table(
    {**_NAMES, "layers.mlp.router.weight": f"{_BLOCK}.router.layer.weight"},
    Tensor(
        f"{_BLOCK}.input_linear.weight",
        ("layers.mlp.gate_proj.weight", "layers.mlp.up_proj.weight"),
        stacked_experts=True,
    ),
    Tensor(f"{_BLOCK}.output_linear.weight", ("layers.mlp.down_proj.weight",), stacked_experts=True),
)
GRANITEMOE = Family("granitemoe", "GraniteMoeForCausalLM", config_from_hf, config_to_hf, GRANITEMOE_TENSORS)
