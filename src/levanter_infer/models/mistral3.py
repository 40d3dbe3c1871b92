"""Mistral 3, its text model, which is a Mistral (Mistral Small 3.1) or a Ministral 3."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, LLAVA_PREFIXES, LLAVA_UNUSED, Family
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.ministral3 import MINISTRAL3
from levanter_infer.models.mistral import MISTRAL

_TEXT = {family.model_type: family for family in (MISTRAL, MINISTRAL3)}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    text = hf.text_config(
        *("vision_config", "vision_feature_layer", "image_token_index", "image_token_id"),
        *("projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size"),
    )
    hf.finish()
    kind = HfConfig(text).one_of("model_type", "mistral", tuple(_TEXT))
    return _TEXT[kind].config_from_hf(text)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return _TEXT[config.model_type].config_to_hf(config)


MISTRAL3_WITH_VISION = Family(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    config_from_hf,
    config_to_hf,
    LLAMA_TENSORS,
    prefixes=LLAVA_PREFIXES,
    unused=LLAVA_UNUSED,
)
"""Read as its text model, and saved as one (`mistral` or `ministral3`)."""
