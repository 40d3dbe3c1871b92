"""Cohere (Command-R): mixer and feed-forward block in parallel behind one LayerNorm, and a scale of the logits."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, Sizes, common_to_hf, one_rope, read_sizes
from levanter_infer.models.hf_config import HfConfig


def read_cohere(hf: HfConfig, theta: float) -> tuple[Sizes, bool, float]:
    """Read the keys that Cohere and Cohere 2 share: sizes, biases of attention, and the scale of the logits.

    Args: theta: HF's default.
    """
    ropes = functools.partial(one_rope, theta=theta, interleaved=True)
    keys: dict[str, Any] = dict(max_positions=8192, tied=True, norm_eps=1e-5, norm_eps_key="layer_norm_eps")
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, ropes=ropes, **keys)
    return sizes, hf.flag("attention_bias", False), hf.number("logit_scale", 0.0625)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes, bias, scale = read_cohere(hf, 5e5)
    norm = sizes.norm(center=True)
    qk_norm = norm if hf.flag("use_qk_norm", False) else None
    hf.finish()
    attention = sizes.attention(qkv_bias=bias, out_bias=bias, qk_norm=qk_norm, qk_norm_by_head=qk_norm is not None)
    block = Block(attention, sizes.dense(), norm, Placement.PARALLEL)
    return sizes.decoder("cohere", [block] * sizes.num_layers, logits_multiplier=scale)


def cohere_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Keys that both write alike."""
    keys = common_to_hf(config)
    keys["layer_norm_eps"] = keys.pop("rms_norm_eps")
    return {**keys, "attention_bias": config.kv_attention[0].qkv_bias, "logit_scale": config.logits_multiplier}


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**cohere_to_hf(config), "use_qk_norm": config.kv_attention[0].qk_norm is not None}


COHERE = Family("cohere", "CohereForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
