"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's layers, whose tokens attend to the keys that an indexer chooses.

Source: DeepSeek sparse attention, report of DeepSeek-V3.2-Exp, section 2.1. In GLM-5's family layers may share the
choice of an earlier layer (arXiv:2603.12201).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.indexer import IndexerBlock
from levanter_infer.layers.latent_attention import LatentAttentionBlock
from levanter_infer.layers.norm import NormConfig
from levanter_infer.models import glm4_moe_lite
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.deepseek_v3 import MTP_KEY
from levanter_infer.models.experts import DEEPSEEK_EXPERT_TENSORS, read_deepseek_experts, read_sparse_layers
from levanter_infer.models.family import Family
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.latent import latent_tensors, read_latent_attention
from levanter_infer.models.tensors import Tensor

INDEXED = "indexed_attention"
"""Entry of `layer_types`."""
FULL, SHARED = "full", "shared"
"""Entries of `indexer_types`: a layer has an indexer, or attends to the keys that the last one before it has chosen."""
INDEX_NORM = NormConfig(1e-6, center=True, bias=True)


def config_from_hf(
    raw: Mapping[str, Any],
    *,
    model_type: str,
    defaults: Mapping[str, Any],
    index_heads: int,
    interleaved: bool,
    shares: bool,
) -> DecoderConfig:
    """The configuration of either family.

    Args:
        defaults, index_heads, interleaved: HF's defaults; the last of `indexer_rope_interleave`.
        shares: whether layers may share the choice of an earlier one.

    Raises: ValueError naming the key that is unknown, malformed or not implemented.
    """
    hf = HfConfig({**defaults, **raw})
    sizes, attention = read_latent_attention(hf, max_positions=defaults["max_position_embeddings"])
    hf.only("rope_interleave", True)
    experts = read_deepseek_experts(hf, sizes, experts=256, chosen=8, width=2048, groups=(1, 1), scale=2.5)
    parts = read_sparse_layers(hf, experts, sizes.dense(), sizes.num_layers)
    indexer = IndexerBlock(
        num_heads=hf.count("index_n_heads", index_heads),
        head_dim=hf.count("index_head_dim", 128),
        num_chosen=hf.count("index_topk", 2048),
        norm=INDEX_NORM,
        interleaved=hf.flag("indexer_rope_interleave", interleaved),
    )
    kinds = _indexer_types(hf, sizes.num_layers)
    if not shares and SHARED in kinds:
        raise ValueError(f"config.json: layers of {model_type} have an indexer each, and none shares another's choice")
    hf.names("layer_types", (INDEXED,))
    hf.own_code("configuration_deepseek", "modeling_deepseek")
    for key, value in (("moe_layer_freq", 1), ("ep_size", 1), ("mlp_bias", False)):
        hf.only(key, value)
    hf.size(MTP_KEY, 1)
    hf.finish()
    mixers = {
        FULL: dataclasses.replace(attention, indexer=indexer),
        SHARED: dataclasses.replace(attention, shares_choice=True),
    }
    pairs = zip(kinds, parts, strict=True)
    return sizes.decoder(model_type, [Block(mixers[kind], part, sizes.norm()) for kind, part in pairs])


def _indexer_types(hf: HfConfig, num_layers: int) -> list[str]:
    """`indexer_types` of every layer or, in files without it, what the keys of GLM-5's own code say."""
    given, freq = hf.names("indexer_types", (FULL, SHARED)), max(hf.size("index_topk_freq", 1), 1)
    offset, pattern = hf.size("index_skip_topk_offset", 2), hf.raw.get("index_topk_pattern")
    if given is not None or pattern is None:
        hf.ignore("index_topk_pattern")
    elif isinstance(pattern, str) and set(pattern) <= set("FS"):
        hf.ignore("index_topk_pattern")
        given = tuple(FULL if letter == "F" else SHARED for letter in pattern)
    elif isinstance(pattern, list):
        given = hf.names("index_topk_pattern", (FULL, SHARED))
    else:
        raise hf.fail("index_topk_pattern", "a letter F or S for each layer, or a list as in indexer_types")
    if given is None:
        return [SHARED if max(layer - offset + 1, 0) % freq else FULL for layer in range(num_layers)]
    if len(given) != num_layers:
        raise ValueError(
            f"config.json: {len(given)} entries of indexer_types or index_topk_pattern, expected one for each of "
            f"num_hidden_layers={num_layers}"
        )
    return list(given)


def shared_indexers(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Starts of the names of indexers that no layer uses, because it shares the choice of an earlier one: some files
    have them."""
    hf = HfConfig(raw)
    kinds = _indexer_types(hf, hf.count("num_hidden_layers"))
    return tuple(f"{_INDEXER.format(layer=layer)}." for layer, kind in enumerate(kinds) if kind == SHARED)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    mixers = [mixer for mixer in config.attention if isinstance(mixer, LatentAttentionBlock)]
    indexer = mixers[0].indexer
    assert indexer is not None
    kinds = [SHARED if mixer.shares_choice else FULL for mixer in mixers]
    return {
        **glm4_moe_lite.config_to_hf(config),
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.num_chosen,
        "indexer_rope_interleave": indexer.interleaved,
        **({"indexer_types": kinds} if SHARED in kinds else {}),
    }


_INDEXER = "model.layers.{layer}.self_attn.indexer"
_NAMES = {
    "q_proj.weight": "wq_b.weight",
    "k_proj.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "weight_proj.weight": "weights_proj.weight",
}
_TENSORS = (
    *latent_tensors(DEEPSEEK_EXPERT_TENSORS),
    *(Tensor(f"{_INDEXER}.{name}", (f"layers.attention.indexer.{path}",)) for path, name in _NAMES.items()),
)


def _family(
    model_type: str, architecture: str, *, index_heads: int, interleaved: bool, shares: bool, **defaults: Any
) -> Family:
    options = dict(defaults=defaults, index_heads=index_heads, interleaved=interleaved, shares=shares)
    read = functools.partial(config_from_hf, model_type=model_type, **options)
    return Family(
        model_type, architecture, read, config_to_hf, _TENSORS, unread=shared_indexers, extra_layers_key=MTP_KEY
    )


DEEPSEEK_V32 = _family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    index_heads=64,
    interleaved=False,
    shares=False,
    **{"first_k_dense_replace": 3, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8, "topk_group": 4},
)
GLM_MOE_DSA = _family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    index_heads=32,
    interleaved=True,
    shares=True,
    **{"first_k_dense_replace": 3, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 2048},
    **{"qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1},
)
"""GLM-5."""
