"""DeepSeek-V3.2 and GLM-5, as far as their sparse attention is dense.

An indexer chooses `index_topk` keys for each query (DeepSeek sparse attention: report of V3.2-Exp, section 2.1).
In sequences of no more tokens it chooses all, so that the model is one of DeepSeek-V3's kind: it is read as one
(`glm4_moe_lite`, which has the same layers in any order) without the indexer, and longer sequences are refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family
from levanter_infer.models.glm4_moe_lite import GLM4_MOE_LITE
from levanter_infer.models.hf_config import HfConfig

_INDEXER = (
    *("index_head_dim", "index_n_heads", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"),
    *("indexer_types", "indexer_rope_interleave"),
)
"""Keys of the indexer, without that of the number of keys."""
_INDEXED = "indexed_attention"
"""Entry of `layer_types`."""


def indexer_tensors(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Starts of the names of the indexers' tensors."""
    return tuple(f"model.layers.{layer}.self_attn.indexer." for layer in range(raw.get("num_hidden_layers", 0)))


def _family(model_type: str, architecture: str, **defaults: Any) -> Family:
    """Args: defaults: HF's, where they are not those of `glm4_moe_lite`."""

    def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
        """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
        hf = HfConfig(raw)
        topk = hf.count("index_topk", 2048, null=2048)
        hf.own_code("configuration_deepseek", "modeling_deepseek")
        for key, value in (("moe_layer_freq", 1), ("ep_size", 1), ("rope_interleave", True), ("mlp_bias", False)):
            hf.only(key, value)
        if any(kind != _INDEXED for kind in hf.names("layer_types", (_INDEXED,)) or ()):
            raise hf.fail("layer_types", _INDEXED)
        own = (*_INDEXER, "auto_map", "moe_layer_freq", "ep_size", "mlp_bias", "layer_types")
        rest = {key: raw[key] for key in raw if key not in own}
        config = GLM4_MOE_LITE.config_from_hf({**defaults, **rest, "index_topk": topk})
        return dataclasses.replace(config, max_position_embeddings=min(config.max_position_embeddings, topk))

    return dataclasses.replace(
        GLM4_MOE_LITE,
        model_type=model_type,
        architecture=architecture,
        config_from_hf=config_from_hf,
        unread=indexer_tensors,
    )


DEEPSEEK_V32 = _family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    **{"first_k_dense_replace": 3, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
)
GLM_MOE_DSA = _family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    **{"first_k_dense_replace": 3, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 2048},
    **{"qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 256, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
)
"""GLM-5."""
