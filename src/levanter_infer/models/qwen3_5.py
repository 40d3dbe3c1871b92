"""Qwen3.5, its text models: the layers of Qwen3-Next, dense or with experts, in tensors of their own."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import stacked_experts
from levanter_infer.models.family import LLAMA_TENSORS, Family, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.multimodal import QWEN_VISION, Parent, without_rope_axes
from levanter_infer.models.qwen2_moe import QWEN2_MOE_TENSORS
from levanter_infer.models.qwen3_next import (
    MTP,
    experts_to_hf,
    mixers_to_hf,
    projections,
    read_experts,
    read_mixers,
    ropes,
    with_delta_net,
)

DENSE, EXPERTS = "qwen3_5_text", "qwen3_5_moe_text"
_STACKED = stacked_experts("model.layers.{layer}.mlp.experts")
"""Experts as Qwen publishes them, and transformers has them in memory; its files have each expert by itself."""
_TENSORS = (projections("in_proj_qkv", "qkv"), *(projections(f"in_proj_{part}", part) for part in "zba"))


def _read(raw: Mapping[str, Any]) -> HfConfig:
    hf = HfConfig({"intermediate_size": 12288, **without_rope_axes(raw)})
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        hf.ignore(key)
    return hf


def dense_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = _read(raw)
    sizes = read_sizes(hf, kv_heads=4, head_dim=256, max_positions=32768, ropes=ropes)
    mixers = read_mixers(hf, sizes)
    hf.only("mlp_only_layers", None, [])
    hf.finish()
    norm = sizes.norm(plus_one=True)
    return sizes.decoder(DENSE, [Block(mixer, sizes.dense(), norm) for mixer in mixers])


def experts_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = _read(raw)
    sizes = read_sizes(hf, kv_heads=2, head_dim=256, max_positions=32768, ropes=ropes)
    mixers, experts = read_mixers(hf, sizes), read_experts(hf, 256, 8, True)
    hf.only("norm_topk_prob", True, None)
    hf.only("decoder_sparse_step", 1, None)
    hf.only("mlp_only_layers", None, [])
    hf.finish()
    norm = sizes.norm(plus_one=True)
    return sizes.decoder(EXPERTS, [Block(mixer, experts, norm) for mixer in mixers])


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = {**mixers_to_hf(config), **experts_to_hf(config)}
    return keys if config.experts is None else {k: v for k, v in keys.items() if k != "intermediate_size"}


QWEN3_5 = Family(
    DENSE, "Qwen3_5ForCausalLM", dense_from_hf, to_hf, with_delta_net(LLAMA_TENSORS, *_TENSORS), unused=MTP
)
QWEN3_5_MOE = Family(
    EXPERTS,
    "Qwen3_5MoeForCausalLM",
    experts_from_hf,
    to_hf,
    with_delta_net(QWEN2_MOE_TENSORS, *_TENSORS),
    unused=MTP,
    alternatives=_STACKED,
)
QWEN3_5_WITH_VISION = Parent("qwen3_5", "Qwen3_5ForConditionalGeneration", (QWEN3_5,), QWEN_VISION)
QWEN3_5_MOE_WITH_VISION = Parent("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", (QWEN3_5_MOE,), QWEN_VISION)
