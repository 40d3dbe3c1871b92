"""Nemotron, Minitron: LayerNorm with 1 + weight, a rope of a part of each head, and squared ReLUs without a gate."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import (
    LLAMA_TENSORS,
    PLAIN_ACTIVATIONS,
    Family,
    one_rope,
    read_sizes,
    renamed_keys,
)
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    ropes = functools.partial(one_rope, partial=True, default_partial=0.5)
    keys: dict[str, Any] = dict(max_positions=4096, norm_eps=1e-5, norm_eps_key="norm_eps", ropes=ropes)
    keys |= dict(activation=Activation.RELU2, activations=PLAIN_ACTIVATIONS)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, **keys)
    bias, mlp_bias = hf.flag("attention_bias", False), hf.flag("mlp_bias", False)
    hf.finish()
    norm = sizes.norm(plus_one=True, center=True, bias=True)
    block = Block(sizes.attention(qkv_bias=bias, out_bias=bias), sizes.dense(gated=False, bias=mlp_bias), norm)
    return sizes.decoder("nemotron", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {
        **renamed_keys(config, {"rms_norm_eps": "norm_eps"}),
        "partial_rotary_factor": config.ropes[0].partial,
        "attention_bias": config.kv_attention[0].qkv_bias,
        "mlp_bias": config.feed_forward.bias,
    }


NEMOTRON = Family("nemotron", "NemotronForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
