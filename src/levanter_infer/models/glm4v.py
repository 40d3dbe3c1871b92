"""GLM-4.1V, GLM-4.5V and GLM-4.6V, their text models: GLM-4, dense or with experts, whose rope has several axes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family
from levanter_infer.models.glm import GLM4
from levanter_infer.models.glm4_moe import GLM4_MOE
from levanter_infer.models.multimodal import Parent, without_rope_axes

OTHERS = (
    *("vision_config", "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id"),
    *("video_start_token_id", "video_end_token_id"),
)


def _text(model_type: str, family: Family, **defaults: Any) -> Family:
    """A text model. Args: defaults: HF's, where they are not those of the family."""

    def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
        """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
        return family.config_from_hf({**defaults, **without_rope_axes(raw)})

    return dataclasses.replace(family, model_type=model_type, config_from_hf=config_from_hf)


GLM4V = Parent(
    "glm4v",
    "Glm4vForConditionalGeneration",
    (_text("glm4v_text", GLM4, max_position_embeddings=32768, rms_norm_eps=1e-5, head_dim=None),),
    OTHERS,
    flat=True,
)
GLM4V_MOE = Parent(
    "glm4v_moe",
    "Glm4vMoeForConditionalGeneration",
    (_text("glm4v_moe_text", GLM4_MOE, max_position_embeddings=65536, attention_bias=True),),
    OTHERS,
    flat=True,
)
