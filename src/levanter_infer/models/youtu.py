"""Youtu-LLM: DeepSeek-V3's latent attention with Llama's feed-forward block."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.latent import latent_attention_to_hf, latent_tensors, read_latent_attention


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes, attention = read_latent_attention(hf, max_positions=131072, tied=True)
    hf.own_code("configuration_youtu", "modeling_youtu")
    hf.only("mlp_bias", False)
    hf.finish()
    return sizes.decoder("youtu", [Block(attention, sizes.dense(), sizes.norm())] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**latent_attention_to_hf(config), "rope_interleave": config.ropes[0].interleaved}


YOUTU = Family("youtu", "YoutuForCausalLM", config_from_hf, config_to_hf, latent_tensors(LLAMA_TENSORS))
