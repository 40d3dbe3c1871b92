"""OLMo 2: norms of the outputs only, and norms of queries and keys over all heads together."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_to_hf, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import tensor_table


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=2048, norm_eps=1e-5)
    bias = hf.flag("attention_bias", False)
    hf.finish()
    norm = sizes.norm()
    attention = sizes.attention(qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_whole=True)
    block = Block(attention, sizes.dense(), norm, Placement.AFTER)
    return sizes.decoder("olmo2", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config), "attention_bias": config.kv_attention[0].qkv_bias}


OLMO2_TENSORS = tensor_table(
    {
        **TENSOR_NAMES,
        "layers.mixer_out_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
        "layers.mlp_out_norm.weight": "model.layers.{layer}.post_feedforward_layernorm.weight",
    }
)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", config_from_hf, config_to_hf, OLMO2_TENSORS)
