"""Which family serves which `model_type`."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.family import Family
from levanter_infer.models.llama import LLAMA
from levanter_infer.models.mistral import MISTRAL
from levanter_infer.models.qwen2 import QWEN2
from levanter_infer.models.qwen3 import QWEN3
from levanter_infer.models.qwen3_moe import QWEN3_MOE

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)}


def family_for(hf_config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`. Raises: ValueError if there is none."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={model_type!r}, expected one of {', '.join(sorted(FAMILIES))}; "
            "other architectures are not implemented"
        )
    return FAMILIES[model_type]
