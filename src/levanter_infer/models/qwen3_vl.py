"""Qwen3-VL, its text models: Qwen3, dense or with experts, whose rope has several axes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import stacked_experts
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.multimodal import QWEN_VISION, Parent, with_theta, without_rope_axes
from levanter_infer.models.qwen3 import QWEN3
from levanter_infer.models.qwen3_moe import QWEN3_MOE

_THETA = 5e5


def dense_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    return QWEN3.config_from_hf(with_theta(without_rope_axes(raw), _THETA))


def experts_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    raw = with_theta(without_rope_axes(raw), _THETA)
    HfConfig(raw).only("norm_topk_prob", True)  # HF norms whatever it says
    return QWEN3_MOE.config_from_hf({**raw, "norm_topk_prob": True})


_STACKED = stacked_experts("model.layers.{layer}.mlp.experts", transposed=True)
"""Experts as Qwen publishes them."""
QWEN3_VL = Parent(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    (dataclasses.replace(QWEN3, model_type="qwen3_vl_text", config_from_hf=dense_from_hf),),
    QWEN_VISION,
)
QWEN3_VL_MOE = Parent(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    (
        dataclasses.replace(
            QWEN3_MOE, model_type="qwen3_vl_moe_text", config_from_hf=experts_from_hf, alternatives=_STACKED
        ),
    ),
    QWEN_VISION,
)
