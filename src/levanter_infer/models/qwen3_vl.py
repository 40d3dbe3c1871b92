"""Qwen3-VL, its text models: Qwen3, dense or with experts, whose rope has several axes. In text all of a token's
positions are the same, so that the axes make no difference."""

from collections.abc import Callable, Mapping
from typing import Any

from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import stacked_experts
from levanter_infer.models.family import Family
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.qwen3 import QWEN3
from levanter_infer.models.qwen3_moe import QWEN3_MOE
from levanter_infer.models.tensors import Tensor


def without_rope_axes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's keys, without those that say which part of a rope has the positions of which axis."""
    raw = dict(raw)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(key), dict):
            raw[key] = {k: v for k, v in raw[key].items() if k not in ("mrope_section", "mrope_interleaved")}
    return raw


def with_vision(
    model_type: str,
    architecture: str,
    text: Family,
    text_from_hf: Callable[[Mapping[str, Any]], DecoderConfig],
    alternatives: tuple[Tensor, ...] = (),
) -> Family:
    """The multimodal parent of a text model, read as that and saved as that. Args: text_from_hf: reads text_config."""

    def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
        """The text model of a checkpoint with vision."""
        hf = HfConfig(raw)
        keys = hf.text_config(
            *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
            "language_model_only",
        )
        hf.finish()
        return text_from_hf(keys)

    return Family(
        model_type,
        architecture,
        config_from_hf,
        text.config_to_hf,
        text.tensors,
        prefixes=(("model.language_model.", "model."),),
        unused=(*text.unused, "model.visual."),
        alternatives=alternatives or text.alternatives,
    )


def dense_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    return QWEN3.config_from_hf(_with_theta(without_rope_axes(raw)))


def experts_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    raw = _with_theta(without_rope_axes(raw))
    HfConfig(raw).only("norm_topk_prob", True)  # HF norms whatever it says
    return QWEN3_MOE.config_from_hf({**raw, "norm_topk_prob": True})


def _with_theta(raw: dict[str, Any]) -> dict[str, Any]:
    """With HF's default of the rope's base, which is not that of Qwen3."""
    ropes = (raw.get("rope_parameters"), raw.get("rope_scaling"))
    is_given = "rope_theta" in raw or any("rope_theta" in rope for rope in ropes if isinstance(rope, dict))
    return raw if is_given else {**raw, "rope_theta": 5e5}


_STACKED = stacked_experts("model.layers.{layer}.mlp.experts", transposed=True)
"""Experts as Qwen publishes them."""
QWEN3_VL = with_vision("qwen3_vl", "Qwen3VLForConditionalGeneration", QWEN3, dense_from_hf)
QWEN3_VL_MOE = with_vision(
    "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", QWEN3_MOE, experts_from_hf, alternatives=_STACKED
)
