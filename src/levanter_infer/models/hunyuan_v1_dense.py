"""Hunyuan without experts: norms of queries and keys after the rotation, and a rope that `alpha` stretches."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.attention import AttentionBlock
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, Sizes, common_to_hf, one_rope, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import tensor_table

ropes = functools.partial(one_rope, fixed_alpha=True)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_hunyuan(hf)
    attention = read_attention(hf, sizes)
    hf.finish()
    block = Block(attention, sizes.dense(), sizes.norm())
    return sizes.decoder("hunyuan_v1_dense", [block] * sizes.num_layers)


def read_hunyuan(hf: HfConfig) -> Sizes:
    return read_sizes(hf, kv_heads=None, head_dim=None, max_positions=2048, norm_eps=1e-5, ropes=ropes)


def read_attention(hf: HfConfig, sizes: Sizes) -> AttentionBlock:
    """Attention, and the keys of Tencent's own files that HF's class does not have."""
    hf.only("attention_head_dim", sizes.head_dim)
    hf.only("use_qk_norm", True)
    hf.only("qk_norm", True)
    hf.only("use_cla", False)
    hf.optional_count("cla_share_factor")
    hf.only("mlp_bias", False)
    hf.only("norm_type", "rms")
    hf.only("org_vocab_size", sizes.vocab_size)
    hf.optional_count("eod_token_id")
    bias = hf.flag("attention_bias", False)
    return sizes.attention(qkv_bias=bias, out_bias=bias, qk_norm=sizes.norm(), qk_norm_after_rope=True)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), "attention_bias": config.kv_attention[0].qkv_bias}


NORM_NAMES = {
    f"layers.attention.{name[0]}_norm.weight": f"model.layers.{{layer}}.self_attn.{name}_layernorm.weight"
    for name in ("query", "key")
}
HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    config_from_hf,
    config_to_hf,
    tensor_table({**TENSOR_NAMES, **NORM_NAMES}),
)
