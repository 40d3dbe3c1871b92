"""Phi-3.5-MoE: LayerNorm, a pair of experts by SparseMixer, and LongRoPE with an attention factor for either length."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.layers.router import Router, Score
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import expert_tensors
from levanter_infer.models.family import Family, common_to_hf, read_sizes
from levanter_infer.models.hf_config import FULL, SLIDING, HfConfig
from levanter_infer.models.mixtral import local_experts_to_hf

_MSCALES = ("short_mscale", "long_mscale")


def ropes(hf: HfConfig, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    """LongRoPE with both attention factors, or a plain rope.

    Beyond the original length the long divisors hold, as in Microsoft's code and vLLM; transformers 5.23 keeps the
    short ones there.
    """
    where = "rope_scaling" if hf.raw.get("rope_parameters") is None else "rope_parameters"
    scaling = hf.raw.get(where)
    scaling = dict(scaling) if isinstance(scaling, dict) else {}
    factors = HfConfig({name: scaling.pop(name) for name in _MSCALES if name in scaling})
    if factors.raw:
        hf.raw[where] = scaling
    rope = hf.rope(head_dim, max_positions, theta=1e6, aliases={"su": "longrope"})
    if rope.kind not in ("default", "longrope"):
        raise ValueError(
            f"config.json: rope type {rope.kind!r}, expected default or longrope: this family has no other"
        )
    if rope.kind == "longrope":
        for name in _MSCALES:
            if name not in factors.raw:
                raise ValueError(f"config.json: {where} lacks {name}, expected the factor of cosines and sines")
        short, long = (factors.number(name, 1.0) for name in _MSCALES)
        rope = dataclasses.replace(rope, attention_factor=short, long_attention_factor=long)
    return dict.fromkeys((FULL, SLIDING), rope)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=8, head_dim=None, max_positions=131072, norm_eps=1e-5, ropes=ropes)
    number = hf.count("num_local_experts", 16)
    if number < 2:
        raise hf.fail("num_local_experts", "at least 2: every token goes through two")
    hf.only("num_experts_per_tok", 2)
    router = Router(Score.SPARSEMIXER, sparsity=2 * hf.number("router_jitter_noise", 0.01))
    hf.ignore("input_jitter_noise")  # of training
    bias, head_bias = hf.flag("attention_bias", False), hf.flag("lm_head_bias", False)
    window = hf.optional_count("sliding_window")
    hf.own_code("configuration_phimoe", "modeling_phimoe")
    hf.finish()
    experts = ExpertsBlock(number, 2, sizes.intermediate_size, router)
    mixer = sizes.attention(window=window, qkv_bias=bias, out_bias=bias)
    block = Block(mixer, experts, sizes.norm(center=True, bias=True))
    return sizes.decoder("phimoe", [block] * sizes.num_layers, head_bias=head_bias)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys, rope, experts = common_to_hf(config), config.ropes[0], config.experts
    assert experts is not None and experts.router.sparsity is not None
    if rope.kind == "longrope":
        del keys["rope_scaling"]["attention_factor"]
        keys["rope_scaling"] |= {"short_mscale": rope.attention_factor, "long_mscale": rope.long_attention_factor}
        keys["rope_scaling"]["original_max_position_embeddings"] = rope.original_len  # where HF looks for it here
    return {
        **keys,
        **local_experts_to_hf(config),
        "router_jitter_noise": experts.router.sparsity / 2,
        "sliding_window": config.windows[0],
        "attention_bias": config.kv_attention[0].qkv_bias,
        "lm_head_bias": config.head_bias,
    }


PHIMOE_TENSORS = expert_tensors("block_sparse_moe", names=("w1", "w3", "w2"))
PHIMOE = Family("phimoe", "PhimoeForCausalLM", config_from_hf, config_to_hf, PHIMOE_TENSORS)
