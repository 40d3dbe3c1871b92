"""OLMoE: experts in every layer, norms of queries and keys over all heads together, and values that may be clipped."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Router
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.qwen3_moe import QWEN3_MOE_TENSORS, read_num_experts


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=4096, norm_eps=1e-5)
    if sizes.head_dim * sizes.num_heads != sizes.hidden_size:
        raise hf.fail("head_dim", "hidden_size / num_attention_heads: HF's norms of queries have hidden_size weights")
    experts, chosen = read_num_experts(hf, 64, 8)
    router = Router(normalize=hf.flag("norm_topk_prob", False))
    feed_forward = ExpertsBlock(experts, chosen, sizes.intermediate_size, router)
    bias, clip = hf.flag("attention_bias", False), hf.optional_number("clip_qkv", None)
    hf.finish()
    norm = sizes.norm()
    attention = sizes.attention(qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_whole=True, qkv_clip=clip)
    return sizes.decoder("olmoe", [Block(attention, feed_forward, norm)] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    experts, mixer = config.experts, config.kv_attention[0]
    assert experts is not None
    return {
        **common_to_hf(config),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "norm_topk_prob": experts.router.normalize,
        "attention_bias": mixer.qkv_bias,
        "clip_qkv": mixer.qkv_clip,
    }


OLMOE = Family("olmoe", "OlmoeForCausalLM", config_from_hf, config_to_hf, QWEN3_MOE_TENSORS)
