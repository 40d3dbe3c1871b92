"""MiniCPM3: a dense model with latent attention, and multipliers of embeddings, residuals and logits."""

import math
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
    sizes, attention = read_latent_attention(
        hf,
        q_rank=768,
        kv_rank=256,
        nope=64,
        rope=32,
        value=None,
        interleaved=False,
        max_positions=32768,
        norm_eps=1e-5,
        tied=True,
    )
    embeddings, depth = hf.number("scale_emb", 12), hf.optional_number("scale_depth", 1.4)
    base = hf.count("dim_model_base", 256, null=sizes.hidden_size)
    hf.own_code("configuration_minicpm", "modeling_minicpm")
    hf.only("mlp_bias", False)
    hf.finish()
    residual = 1.0 if depth is None else depth / math.sqrt(sizes.num_layers)
    block = Block(attention, sizes.dense(), sizes.norm(), residual_multiplier=residual)
    multipliers = {"embedding_multiplier": embeddings, "logits_divisor": sizes.hidden_size / base}
    return sizes.decoder("minicpm3", [block] * sizes.num_layers, **multipliers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {
        **latent_attention_to_hf(config),
        "scale_emb": config.embedding_multiplier,
        "scale_depth": round(config.blocks[0].residual_multiplier * math.sqrt(config.num_layers), 9),
        "dim_model_base": round(config.hidden_size / config.logits_divisor),
    }


MINICPM3 = Family("minicpm3", "MiniCPM3ForCausalLM", config_from_hf, config_to_hf, latent_tensors(LLAMA_TENSORS))
