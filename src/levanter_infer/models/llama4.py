"""Llama 4, its text model: chunked attention with a rope, full attention without one, experts of weighted inputs."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.attention import AttentionBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.norm import NormConfig
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.layers.router import Router, Score
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import (
    check_chosen,
    dense_layers,
    dense_width,
    expert_tensors,
    feed_forwards,
    stacked_experts,
    tensors_by_expert,
)
from levanter_infer.models.family import Family, Sizes, common_to_hf, one_rope, read_sizes, rope_to_hf
from levanter_infer.models.hf_config import FULL, HfConfig
from levanter_infer.models.mixtral import local_experts_to_hf
from levanter_infer.models.multimodal import Parent

CHUNKED = "chunked_attention"
ROUTER = Router(Score.SIGMOID, weigh_inputs=True)
ropes = functools.partial(one_rope, theta=5e5, interleaved=True)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=8, head_dim=128, max_positions=131072, norm_eps=1e-5, ropes=ropes)
    mixers = read_attention(hf, sizes)
    experts = hf.count("num_local_experts", 16)
    chosen = check_chosen(hf, "num_experts_per_tok", hf.count("num_experts_per_tok", 1), experts)
    width, step = sizes.intermediate_size, hf.count("interleave_moe_layer_step", 1)
    part = ExpertsBlock(experts, chosen, width, ROUTER, sizes.activation, shared_width=width)
    dense = dataclasses.replace(sizes.dense(), width=hf.count("intermediate_size_mlp", 16384))
    layers = range(sizes.num_layers)
    if raw.get("moe_layers") is not None:
        without, step = set(layers) - hf.layers("moe_layers", sizes.num_layers), 1
    else:
        hf.only("moe_layers", None)
        without = set()
    parts = feed_forwards(sizes.num_layers, part, dense, step=step, without=without)
    hf.only("for_llm_compressor", False)
    hf.finish()
    return sizes.decoder("llama4_text", [Block(*pair, sizes.norm()) for pair in zip(mixers, parts, strict=True)])


def read_attention(hf: HfConfig, sizes: Sizes) -> list[AttentionBlock]:
    """Attention of each layer: those with a rope see a chunk, as a rule, and the others have a temperature."""
    interval, bias = hf.count("no_rope_layer_interval", 4), hf.flag("attention_bias", False)
    has_rope = [(layer + 1) % interval != 0 for layer in range(sizes.num_layers)]
    has_rope = hf.flags("no_rope_layers", has_rope) if hf.raw.get("no_rope_layers") else has_rope
    hf.only("no_rope_layers", hf.raw.get("no_rope_layers"))
    kinds = hf.names("layer_types", (FULL, CHUNKED)) or tuple(CHUNKED if each else FULL for each in has_rope)
    if len(kinds) != sizes.num_layers:
        raise hf.fail("layer_types", f"one entry for each of num_hidden_layers={sizes.num_layers}")
    chunk = hf.optional_count("attention_chunk_size", 8192)
    norm = NormConfig(sizes.norm_eps, weight=False) if hf.flag("use_qk_norm", True) else None
    beta, length = hf.number("attn_scale", 0.1), hf.count("floor_scale", 8192)
    hf.only("attn_temperature_tuning", True, False, 4)  # 4 in the first published files
    tuned = hf.raw.get("attn_temperature_tuning", True)
    temperature = RopeConfig(partial=0.0, original_len=length, query_beta=beta, query_shift=1)
    plain = sizes.attention(qkv_bias=bias, out_bias=bias, qk_norm_after_rope=True)
    with_rope = dataclasses.replace(plain, qk_norm=norm)
    without = dataclasses.replace(plain, rope=temperature if tuned else None)
    each = [with_rope if has else without for has in has_rope]
    chunks = [chunk if kind == CHUNKED else None for kind in kinds]
    return [dataclasses.replace(mixer, attention_chunk=size) for mixer, size in zip(each, chunks, strict=True)]


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    mixers, experts, dense = config.kv_attention, config.experts, dense_layers(config)
    rotated = [mixer.rope is not None and mixer.rope.partial > 0 for mixer in mixers]
    ropes_ = [mixer.rope for mixer, has in zip(mixers, rotated, strict=True) if has]
    scaled = next((m.rope for m, has in zip(mixers, rotated, strict=True) if not has and m.rope is not None), None)
    chunk = next((mixer.attention_chunk for mixer in mixers if mixer.attention_chunk is not None), None)
    keys = {
        **common_to_hf(config, rope_to_hf(ropes_[0] or RopeConfig(), config.max_position_embeddings) if ropes_ else {}),
        "no_rope_layers": [int(each) for each in rotated],
        "layer_types": [FULL if mixer.attention_chunk is None else CHUNKED for mixer in mixers],
        "attention_chunk_size": chunk,
        "attention_bias": mixers[0].qkv_bias,
        "use_qk_norm": any(mixer.qk_norm is not None for mixer in mixers),
        "attn_temperature_tuning": scaled is not None,
        "intermediate_size_mlp": dense_width(config),
        "moe_layers": [layer for layer in range(config.num_layers) if layer not in dense],
    }
    if scaled is not None:
        keys |= {"attn_scale": scaled.query_beta, "floor_scale": scaled.original_len}
    if experts is not None:
        keys |= {**local_experts_to_hf(config), "intermediate_size": experts.width}
    return keys


_EXPERTS = "model.layers.{layer}.feed_forward.experts"
LLAMA4_TENSORS = expert_tensors(
    "feed_forward",
    *stacked_experts(_EXPERTS, transposed=True),
    router="router",
    shared="shared_expert",
)
BY_EXPERT = tensors_by_expert(_EXPERTS)
"""Names of the experts' tensors in quantized files."""
LLAMA4 = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    config_from_hf,
    config_to_hf,
    LLAMA4_TENSORS,
    alternatives=BY_EXPERT,
    experts_in_out=True,
)
LLAMA4_WITH_VISION = Parent(
    "llama4",
    "Llama4ForConditionalGeneration",
    (LLAMA4,),
    others=(
        *("vision_config", "boi_token_index", "eoi_token_index", "image_token_index"),
        *("boi_token_id", "eoi_token_id", "image_token_id"),
    ),
    prefixes=(("language_model.", ""),),
    unused=("vision_model.", "multi_modal_projector."),
)
