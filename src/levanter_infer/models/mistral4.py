"""Mistral Small 4: DeepSeek-V3's latent attention, with queries scaled by position, and experts by softmax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.layers.router import Router
from levanter_infer.models import ministral3
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import (
    DEEPSEEK_EXPERT_TENSORS,
    deepseek_experts_to_hf,
    feed_forwards,
    read_grouped_experts,
    stacked_experts,
)
from levanter_infer.models.family import Family
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.latent import latent_attention_to_hf, latent_tensors, read_latent_attention
from levanter_infer.models.tensors import replaced

NOPE, ROPE = 64, 64
"""HF's defaults of `qk_nope_head_dim` and `qk_rope_head_dim`."""
DEFAULT_ROPE = {
    **ministral3.DEFAULT_ROPE,
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}


def ropes(hf: HfConfig, rope_dim: int, max_positions: int, *, interleaved: bool) -> dict[str, RopeConfig]:
    """Ropes of the rotated part of a head, of which HF says that it is a share of the whole head."""
    whole = hf.count("qk_nope_head_dim", NOPE) + rope_dim
    share = rope_dim / whole
    options = dict(interleaved=interleaved, partial=True, default_partial=share)
    by_kind = ministral3.ropes(hf, whole, max_positions, **options)
    for rope in by_kind.values():
        if rope.partial != share:
            raise ValueError(
                f"config.json: partial_rotary_factor={rope.partial!r}, expected {share!r}: qk_rope_head_dim of a head"
            )
    return {kind: dataclasses.replace(rope, partial=1.0) for kind, rope in by_kind.items()}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        raw = {**raw, "rope_parameters": DEFAULT_ROPE}
    hf = HfConfig(raw)
    nope, rope_dim = hf.count("qk_nope_head_dim", NOPE), hf.count("qk_rope_head_dim", ROPE)
    hf.only("head_dim", None, nope + rope_dim)
    hf = HfConfig({key: value for key, value in raw.items() if key != "head_dim"})
    sizes, attention = read_latent_attention(
        hf, q_rank=1024, kv_rank=256, nope=NOPE, rope=ROPE, max_positions=1048576, ropes=ropes
    )
    # Scores are not multiplied by YaRN's mscale squared, as DeepSeek's are. Mistral's own params.json says so
    # (`apply_scale: false`), and `mscale` = `mscale_all_dim` stands for it here. transformers 5.23 multiplies.
    attention = dataclasses.replace(attention, scale=(nope + rope_dim) ** -0.5)
    experts = read_grouped_experts(
        hf, sizes, Router(), experts=128, chosen=4, width=2048, groups=(1, 1), scale=1.0, left_out=0.0
    )
    parts = feed_forwards(sizes.num_layers, experts, sizes.dense(), first=hf.size("first_k_dense_replace", 0))
    hf.only("mlp_bias", False)
    hf.finish()
    return sizes.decoder("mistral4", [Block(attention, part, sizes.norm()) for part in parts])


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    keys = {**latent_attention_to_hf(config), **deepseek_experts_to_hf(config)}
    keys |= {"head_dim": keys["qk_nope_head_dim"] + keys["qk_rope_head_dim"]}
    del keys["rope_theta"], keys["rope_scaling"]
    return {**keys, **ministral3.rope_keys(config), "rope_interleave": config.ropes[0].interleaved}


_BY_EXPERT = latent_tensors(DEEPSEEK_EXPERT_TENSORS)
MISTRAL4 = Family(
    "mistral4",
    "Mistral4ForCausalLM",
    config_from_hf,
    config_to_hf,
    replaced(_BY_EXPERT, *stacked_experts("model.layers.{layer}.mlp.experts")),
    alternatives=tuple(line for line in _BY_EXPERT if "{expert}" in line.name),
)
