"""Multimodal parents of which the text model is served, and saved as one."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family
from levanter_infer.models.hf_config import HfConfig


@dataclass(frozen=True)
class Parent:
    """One `model_type` of HF, whose `text_config.model_type` says which family its text model is of."""

    model_type: str
    architecture: str
    """HF's class name."""
    texts: tuple[Family, ...]
    """The families of text models; the first where `text_config` has no `model_type`."""
    others: tuple[str, ...]
    """Keys of config.json that belong to other parts of the model."""
    prefixes: tuple[tuple[str, str], ...] = (("model.language_model.", "model."),)
    """As `Family.prefixes`."""
    unused: tuple[str, ...] = ("model.visual.",)
    """As `Family.unused`."""
    modules: tuple[str, ...] = ()
    """Modules that `auto_map` may name: their classes are those of HF."""
    flat: bool = False
    """Whether files before transformers 4.52 have the keys of the text model beside the others, without `text_config`;
    those of 4.52 and 4.53 have them in both places, where `text_config` counts."""

    def family_of(self, raw: Mapping[str, Any]) -> Family:
        """The family of a config.json.

        Raises: ValueError if `text_config` is missing or of no family that is served here.
        """
        types = {family.model_type: family for family in self.texts}
        keys = {} if self._is_flat(raw) else HfConfig(raw).text_config()
        text = types[HfConfig(keys).one_of("model_type", next(iter(types)), tuple(types))]

        def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
            return text.config_from_hf(self._text_of(raw))

        return dataclasses.replace(
            text,
            model_type=self.model_type,
            architecture=self.architecture,
            config_from_hf=config_from_hf,
            prefixes=self.prefixes,
            unused=(*text.unused, *self.unused),
        )

    def _is_flat(self, raw: Mapping[str, Any]) -> bool:
        return self.flat and "text_config" not in raw

    def _text_of(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_flat(raw):
            return {key: value for key, value in raw.items() if key not in (*self.others, "model_type")}
        hf = HfConfig(raw)
        text = hf.text_config(*self.others)
        hf.own_code(*self.modules)
        if self.flat:
            hf.ignore(*text)
        hf.finish()
        return {key: value for key, value in text.items() if not (self.flat and key in self.others)}


LLAVA_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
"""`Family.prefixes` of a text model within HF's LLaVA, as published, and as transformers 5 writes them."""
LLAVA_UNUSED = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
QWEN_VISION = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "language_model_only",
)
"""`Parent.others` of Qwen's models with vision."""


def without_rope_axes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's keys, without those that say which part of a rope has the positions of which axis: in text all of
    a token's positions are the same, so that the axes make no difference."""
    raw = dict(raw)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(key), dict):
            raw[key] = {k: v for k, v in raw[key].items() if k not in ("mrope_section", "mrope_interleaved")}
    return raw


def with_theta(raw: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """A text model's keys, with HF's default of the rope's base where they have none."""
    ropes = (raw.get("rope_parameters"), raw.get("rope_scaling"))
    is_given = "rope_theta" in raw or any("rope_theta" in rope for rope in ropes if isinstance(rope, dict))
    return dict(raw) if is_given else {**raw, "rope_theta": theta}
