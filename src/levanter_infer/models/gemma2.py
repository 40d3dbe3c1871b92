"""Gemma 2: Gemma with norms before and after, capped scores and logits, and a window in every other layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, Sizes, common_to_hf, windows_to_hf
from levanter_infer.models.gemma import read_gemma
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import tensor_table


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_gemma(hf, kv_heads=4, max_positions=8192)
    bias = hf.flag("attention_bias", False)
    scale = hf.count("query_pre_attn_scalar", 256) ** -0.5
    cap = hf.optional_number("attn_logit_softcapping", 50.0)
    final_cap = hf.optional_number("final_logit_softcapping", 30.0)
    window = hf.optional_count("sliding_window", 4096)
    hf.only("sliding_window_size", None, window)  # of older files
    windows = hf.windows(sizes.num_layers, window, lambda layer: layer % 2 == 0)
    hf.finish()
    fields = dict(qkv_bias=bias, out_bias=bias, scale=scale, soft_cap=cap)
    return gemma2_decoder("gemma2", sizes, windows, final_cap, **fields)


def gemma2_decoder(
    model_type: str, sizes: Sizes, windows: Sequence[int | None], logits_soft_cap: float | None, **attention
) -> DecoderConfig:
    """A decoder with Gemma 2's norms, one layer per window. `attention`: fields of `AttentionBlock`."""
    norm = sizes.norm(plus_one=True)
    blocks = [
        Block(sizes.attention(window=window, **attention), sizes.dense(), norm, Placement.BOTH) for window in windows
    ]
    multiplier = sizes.hidden_size**0.5
    return sizes.decoder(model_type, blocks, embedding_multiplier=multiplier, logits_soft_cap=logits_soft_cap)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), **gemma2_keys(config)}


def gemma2_keys(config: DecoderConfig) -> dict[str, Any]:
    """Keys that Gemma 2 and 3 have beyond Gemma's."""
    mixer = config.kv_attention[0]
    assert mixer.scale is not None
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": mixer.qkv_bias,
        "query_pre_attn_scalar": round(mixer.scale**-2),
        "attn_logit_softcapping": mixer.soft_cap,
        "final_logit_softcapping": config.logits_soft_cap,
        **windows_to_hf(config),
    }


GEMMA2_TENSORS = tensor_table(
    {
        **TENSOR_NAMES,
        "layers.mixer_out_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
        "layers.mlp_norm.weight": "model.layers.{layer}.pre_feedforward_layernorm.weight",
        "layers.mlp_out_norm.weight": "model.layers.{layer}.post_feedforward_layernorm.weight",
    }
)
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", config_from_hf, config_to_hf, GEMMA2_TENSORS)
