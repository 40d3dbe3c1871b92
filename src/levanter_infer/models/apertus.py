"""Apertus: a feed-forward block without a gate whose activation has parameters, and norms of queries and keys."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family, common_to_hf, read_sizes, renamed_tensors, rope_parameters
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import Tensor, tensor_table

DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""HF's, theta included, where the file has neither rope_parameters nor rope_scaling."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        raw = {**raw, "rope_parameters": DEFAULT_ROPE}
    hf = HfConfig(raw)
    keys: dict[str, Any] = dict(max_positions=65536, norm_eps=1e-5, theta=12e6, activation=Activation.XIELU)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, **keys)
    bias = hf.flag("attention_bias", False)
    # HF's Apertus has these, whatever the keys of the files say.
    for key, value in {"mlp_bias": False, "post_norm": False, "qk_norm": True}.items():
        hf.only(key, value)
    hf.finish()
    attention = sizes.attention(qkv_bias=bias, out_bias=bias, qk_norm=sizes.norm())
    block = Block(attention, sizes.dense(gated=False), sizes.norm())
    return sizes.decoder("apertus", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    rope = {"rope_parameters": rope_parameters(config.ropes[0], config.max_position_embeddings)}
    return {**common_to_hf(config, rope), "attention_bias": config.kv_attention[0].qkv_bias}


_NAMES = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
_ACTIVATION = "model.layers.{layer}.mlp.act_fn"
APERTUS_TENSORS = tensor_table(
    renamed_tensors(_NAMES),
    *(Tensor(f"{_ACTIVATION}.{name}", (f"layers.mlp.xielu.{name}",)) for name in ("alpha_p", "alpha_n")),
    *(Tensor(f"{_ACTIVATION}.{name}", (f"layers.mlp.xielu.{name}",), scalar=True) for name in ("beta", "eps")),
)
APERTUS = Family("apertus", "ApertusForCausalLM", config_from_hf, config_to_hf, APERTUS_TENSORS)
