"""OLMo: LayerNorm without weights and biases, and clipped queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, read_sizes, renamed_keys
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=2048, norm_eps=1e-5, norm_eps_key=None)
    bias, clip = hf.flag("attention_bias", False), hf.optional_number("clip_qkv", None)
    hf.finish()
    attention = sizes.attention(qkv_bias=bias, out_bias=bias, qkv_clip=clip)
    block = Block(attention, sizes.dense(), sizes.norm(center=True, weight=False))
    return sizes.decoder("olmo", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.kv_attention[0]
    keys = renamed_keys(config, {}, drop=("rms_norm_eps",))
    return {**keys, "attention_bias": mixer.qkv_bias, "clip_qkv": mixer.qkv_clip}


OLMO = Family("olmo", "OlmoForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
