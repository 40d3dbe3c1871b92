"""Qwen2-VL and Qwen2.5-VL, their text models: Qwen2, whose rope has several axes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.multimodal import QWEN_VISION, Parent, with_theta, without_rope_axes
from levanter_infer.models.qwen2 import QWEN2

AXES = "mrope"
"""The type of a rope with several axes: without them, it is a default one."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    raw = with_theta(without_rope_axes(raw), 1e6)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(key), dict):
            raw[key] = {k: "default" if v == AXES and k in ("type", "rope_type") else v for k, v in raw[key].items()}
    return QWEN2.config_from_hf({"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80, **raw})


def _parent(model_type: str, architecture: str) -> Parent:
    text = dataclasses.replace(QWEN2, model_type=f"{model_type}_text", config_from_hf=config_from_hf)
    others = (*QWEN_VISION, "vision_token_id")
    return Parent(model_type, architecture, (text,), others, unused=("visual.", "model.visual."), flat=True)


QWEN2_VL = _parent("qwen2_vl", "Qwen2VLForConditionalGeneration")
QWEN2_5_VL = _parent("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")
