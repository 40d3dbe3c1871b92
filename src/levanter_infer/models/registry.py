"""The families, by `model_type`."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.apertus import APERTUS
from levanter_infer.models.arcee import ARCEE
from levanter_infer.models.cohere import COHERE
from levanter_infer.models.cohere2 import COHERE2
from levanter_infer.models.deepseek_v2 import DEEPSEEK_V2
from levanter_infer.models.deepseek_v3 import DEEPSEEK_V3, KIMI_K2, KIMI_K25
from levanter_infer.models.deepseek_v32 import DEEPSEEK_V32, GLM_MOE_DSA
from levanter_infer.models.ernie4_5 import ERNIE4_5
from levanter_infer.models.ernie4_5_moe import ERNIE4_5_MOE
from levanter_infer.models.exaone4 import EXAONE4
from levanter_infer.models.falcon_h1 import FALCON_H1
from levanter_infer.models.family import Family
from levanter_infer.models.gemma import GEMMA
from levanter_infer.models.gemma2 import GEMMA2
from levanter_infer.models.gemma3 import GEMMA3, GEMMA3_WITH_VISION
from levanter_infer.models.gemma4 import GEMMA4, GEMMA4_WITH_VISION
from levanter_infer.models.glm import GLM, GLM4
from levanter_infer.models.glm4_moe import GLM4_MOE
from levanter_infer.models.glm4_moe_lite import GLM4_MOE_LITE
from levanter_infer.models.glm4v import GLM4V, GLM4V_MOE
from levanter_infer.models.gpt2 import GPT2
from levanter_infer.models.gpt_neox import GPT_NEOX
from levanter_infer.models.gpt_oss import GPT_OSS
from levanter_infer.models.granite import GRANITE
from levanter_infer.models.granitemoe import GRANITEMOE
from levanter_infer.models.granitemoehybrid import GRANITEMOEHYBRID
from levanter_infer.models.granitemoeshared import GRANITEMOESHARED
from levanter_infer.models.grug_moe import GRUG_MOE
from levanter_infer.models.helium import HELIUM
from levanter_infer.models.hunyuan_v1_dense import HUNYUAN_V1_DENSE
from levanter_infer.models.hunyuan_v1_moe import HUNYUAN_V1_MOE
from levanter_infer.models.kimi_linear import KIMI_LINEAR
from levanter_infer.models.lfm2 import LFM2
from levanter_infer.models.lfm2_moe import LFM2_MOE
from levanter_infer.models.llama import LLAMA
from levanter_infer.models.llama4 import LLAMA4, LLAMA4_WITH_VISION
from levanter_infer.models.minicpm3 import MINICPM3
from levanter_infer.models.minimax_m2 import MINIMAX_M2
from levanter_infer.models.ministral3 import MINISTRAL3
from levanter_infer.models.mistral import MISTRAL
from levanter_infer.models.mistral3 import MISTRAL3_WITH_VISION
from levanter_infer.models.mistral4 import MISTRAL4
from levanter_infer.models.mixtral import MIXTRAL
from levanter_infer.models.nemotron import NEMOTRON
from levanter_infer.models.nemotron_h import NEMOTRON_H
from levanter_infer.models.olmo import OLMO
from levanter_infer.models.olmo2 import OLMO2
from levanter_infer.models.olmo3 import OLMO3
from levanter_infer.models.olmo_hybrid import OLMO_HYBRID
from levanter_infer.models.olmoe import OLMOE
from levanter_infer.models.phi import PHI
from levanter_infer.models.phi3 import PHI3
from levanter_infer.models.phimoe import PHIMOE
from levanter_infer.models.qwen2 import QWEN2
from levanter_infer.models.qwen2_moe import QWEN2_MOE
from levanter_infer.models.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from levanter_infer.models.qwen3 import QWEN3
from levanter_infer.models.qwen3_5 import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_WITH_VISION,
    QWEN3_5_WITH_VISION,
)
from levanter_infer.models.qwen3_moe import QWEN3_MOE
from levanter_infer.models.qwen3_next import QWEN3_NEXT
from levanter_infer.models.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from levanter_infer.models.seed_oss import SEED_OSS
from levanter_infer.models.smollm3 import SMOLLM3
from levanter_infer.models.stablelm import STABLELM
from levanter_infer.models.starcoder2 import STARCODER2
from levanter_infer.models.youtu import YOUTU

FAMILIES = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GRUG_MOE),
        *(OLMO2, OLMO3, GEMMA, GEMMA2, GEMMA3, PHI3, SMOLLM3, GRANITE),
        *(SEED_OSS, EXAONE4, MIXTRAL, GRANITEMOE, OLMOE, QWEN2_MOE),
        *(COHERE, COHERE2, GLM4, ERNIE4_5, MINISTRAL3),
        *(GPT_OSS, GLM4_MOE, MINIMAX_M2, ERNIE4_5_MOE, HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE, GRANITEMOESHARED),
        *(LLAMA4, GEMMA4, PHIMOE),
        *(LFM2, LFM2_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, OLMO_HYBRID),
        *(GRANITEMOEHYBRID, FALCON_H1, NEMOTRON_H, KIMI_LINEAR),
        *(DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, GLM4_MOE_LITE, DEEPSEEK_V32, GLM_MOE_DSA),
        *(MINICPM3, YOUTU, MISTRAL4),
        *(OLMO, APERTUS, GPT_NEOX, GPT2, PHI, STARCODER2),
        *(GLM, HELIUM, ARCEE, NEMOTRON, STABLELM),
    )
}
"""Families of text models, by `model_type`."""
MULTIMODAL = {
    family.model_type: family
    for family in (
        GEMMA3_WITH_VISION,
        KIMI_K25,
        GEMMA4_WITH_VISION,
        LLAMA4_WITH_VISION,
        MISTRAL3_WITH_VISION,
        QWEN3_5_WITH_VISION,
        QWEN3_5_MOE_WITH_VISION,
        QWEN3_VL,
        QWEN3_VL_MOE,
        QWEN2_VL,
        QWEN2_5_VL,
        GLM4V,
        GLM4V_MOE,
    )
}
"""Multimodal parents of which the text model is served; their configurations become those of `FAMILIES`."""


def family_for(hf_config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`. Raises: ValueError if there is none."""
    if not isinstance(hf_config, Mapping):
        raise ValueError(f"config.json is {type(hf_config).__name__}; expected a mapping of keys to values")
    model_type = hf_config.get("model_type")
    known = sorted({*FAMILIES, *MULTIMODAL})
    if not isinstance(model_type, str) or model_type not in known:
        raise ValueError(
            f"config.json: model_type={model_type!r}, expected one of {', '.join(known)}; "
            "other architectures are not implemented"
        )
    if model_type in MULTIMODAL:
        return MULTIMODAL[model_type].family_of(hf_config)
    return FAMILIES[model_type]
