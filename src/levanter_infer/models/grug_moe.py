"""GrugMoE (Marin): gated norms, exclusive self-attention, and experts with a biased choice.

Schema 1 is Snowball, as `levanter.models.snowball` defines it; schema 2 is Hero, as `levanter.models.hero_model` does,
with short convolutions, experts of latents, several shared experts, and fewer heads of keys in global layers.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.branch_conv import FEED_FORWARD, KEYS, MIXER, BranchConvBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.norm import NormConfig
from levanter_infer.layers.router import Router, Score, SelectionBias
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import tensors_by_expert
from levanter_infer.models.family import TENSOR_NAMES, Family, Sizes, common_to_hf, one_rope, read_sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.qwen3_moe import read_num_experts
from levanter_infer.models.tensors import Tensor, tensor_table

GATE_RANK = 128
QK_NORM = NormConfig(1e-6, weight=False)
ROUTER = Router(Score.SIGMOID, True, sum_eps=1e-9, scale=2.5, selection_bias=SelectionBias.ON_LOGITS)
QK_MULT = 1.5703274004183786
"""Default of `qk_mult`."""
ALIASES = {
    "hidden_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "attention_head_dim": "head_dim",
    "max_seq_len": "max_position_embeddings",
    "layer_norm_eps": "rms_norm_eps",
    "initializer_std": "initializer_range",
    "num_local_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "intermediate_dim": "moe_intermediate_size",
    "intermediate_size": "moe_intermediate_size",
    "shared_expert_intermediate_dim": "shared_expert_intermediate_size",
}
"""Other names of keys that Levanter reads, from older exports."""
SITES = {"k": KEYS, "attn": MIXER, "mlp": FEED_FORWARD}
"""Entries of `sconv_sites`."""
SCHEMA_2 = (
    *("num_shared_experts", "latent_dim", "local_kv_heads", "global_kv_heads", "global_every", "rope_fused"),
    *("sconv", "sconv_kernel", "sconv_sites"),
)
"""Keys that schema 2 adds; files have all of them."""
MAX_SHARED = 16
ropes = functools.partial(one_rope, partial=True, default_partial=0.5)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(_with_own_names(raw))
    schema = hf.count("grugmoe_artifact_schema_version", 1)
    if schema not in (1, 2):
        raise hf.fail("grugmoe_artifact_schema_version", "1 (Snowball) or 2 (Hero)")
    hf.only("grugmoe_attention_mode", "production")
    hf.only("disable_pko", True)
    hf.only("disable_long_rope", True)
    sizes = read_sizes(
        hf,
        kv_heads=5,
        head_dim=128,
        max_positions=65536,
        norm_eps=1e-5,
        width_key="moe_intermediate_size",
        ropes=ropes,
    )
    if sizes.rope.kind != "default":
        raise hf.fail("rope_scaling", "none: Levanter applies none")
    hf.only("partial_rotary_factor", 0.5)
    hf.only("tie_word_embeddings", False)
    number, chosen = read_num_experts(hf, 256, 4)
    shared = hf.size("shared_expert_intermediate_size", 2560) or None
    window, multiplier = hf.count("sliding_window", 2048), hf.number("qk_mult", QK_MULT)
    every, rope, kv_heads, convs = 4, sizes.rope, (sizes.num_kv_heads,) * 2, None
    experts = ExpertsBlock(number, chosen, sizes.intermediate_size, ROUTER, shared_width=shared)
    if schema == 2:
        absent = [key for key in SCHEMA_2 if key not in hf.raw]
        if absent:
            raise ValueError(f"config.json: {', '.join(absent)} missing, expected in grugmoe_artifact_schema_version=2")
        every, kv_heads, convs = hf.count("global_every"), _read_kv_heads(hf, sizes), _read_convs(hf, sizes)
        rope = dataclasses.replace(rope, interleaved=hf.flag("rope_fused", True))
        experts = dataclasses.replace(
            experts,
            num_shared=hf.count("num_shared_experts", most=MAX_SHARED),
            latent_dim=hf.optional_count("latent_dim"),
            latent_norm=None if hf.raw["latent_dim"] is None else sizes.norm(),
        )
    elif shared is None:
        raise hf.fail("shared_expert_intermediate_size", "at least 1")
    hf.finish()
    norm = sizes.norm(gate_rank=GATE_RANK)
    options = dict(qk_norm=QK_NORM, scale=multiplier * sizes.head_dim**-0.5, exclusive=True, head_gate=True)
    blocks = []
    for layer in range(sizes.num_layers):
        is_long = (layer + 1) % every == 0 or layer == sizes.num_layers - 1
        place = {"rope": None} if is_long else {"rope": rope, "window": window}
        heads = {"num_kv_heads": kv_heads[is_long], "unused_kv_heads": sizes.num_kv_heads - kv_heads[is_long]}
        attention = dataclasses.replace(sizes.attention(**options, **place), **heads)
        blocks.append(Block(attention, experts, norm, convs=convs))
    return sizes.decoder("grug_moe", blocks, embedding_norm=norm)


def _read_kv_heads(hf: HfConfig, sizes: Sizes) -> tuple[int, int]:
    """Heads of keys and values that local and global layers use, of those that all have."""
    local, everywhere = hf.optional_count("local_kv_heads"), hf.optional_count("global_kv_heads")
    if local is None and everywhere is None:
        return sizes.num_kv_heads, sizes.num_kv_heads
    if local is None or everywhere is None or max(local, everywhere) != sizes.num_kv_heads:
        raise hf.fail("local_kv_heads", f"with global_kv_heads={everywhere} the larger of both, {sizes.num_kv_heads}")
    return local, everywhere


def _read_convs(hf: HfConfig, sizes: Sizes) -> BranchConvBlock | None:
    """The short convolutions of every layer."""
    channels = {KEYS: sizes.num_kv_heads * sizes.head_dim, MIXER: sizes.hidden_size, FEED_FORWARD: sizes.hidden_size}
    taps, sites = hf.count("sconv_kernel"), hf.names("sconv_sites", tuple(SITES))
    if not hf.flag("sconv", True) or not sites:
        return None
    if taps < 2:
        raise hf.fail("sconv_kernel", "at least 2")
    return BranchConvBlock(taps, tuple((SITES[site], channels[SITES[site]]) for site in SITES if site in sites))


def _with_own_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys under the names that Levanter writes. Raises: ValueError if a key has two values."""
    found: dict[str, Any] = {}
    for key, value in raw.items():
        name = ALIASES.get(key, key)
        if found.setdefault(name, value) != value:
            raise ValueError(f"config.json: {key}={value!r} but {name} is also {found[name]!r}; leave one out")
    return found


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    experts, mixer = config.experts, config.kv_attention[0]
    assert experts is not None and mixer.scale is not None
    left_out = ("intermediate_size", "hidden_act", "rope_scaling", "partial_rotary_factor")
    schema = 1 if experts.num_shared is None else 2
    return {
        **{key: value for key, value in common_to_hf(config).items() if key not in left_out},
        "num_key_value_heads": mixer.num_kv_heads + mixer.unused_kv_heads,
        "sliding_window": next((window for window in config.windows if window is not None), 2048),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.width,
        "shared_expert_intermediate_size": experts.shared_width or 0,
        "qk_mult": _factor(mixer.scale, config.head_dim**-0.5),
        "grugmoe_attention_mode": "production",
        "grugmoe_artifact_schema_version": schema,
        **(_schema_2_to_hf(config) if schema == 2 else {}),
    }


def _schema_2_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The keys that schema 2 adds."""
    local = next((mixer for mixer in config.kv_attention if mixer.rope is not None), None)
    experts, convs, last = config.experts, config.blocks[0].convs, config.kv_attention[-1]
    assert experts is not None
    sites = [] if convs is None else [site for site, _ in convs.channels]
    every = next(i for i, mixer in enumerate(config.kv_attention, 1) if mixer.rope is None)
    return {
        "num_shared_experts": experts.num_shared,
        "latent_dim": experts.latent_dim,
        "local_kv_heads": last.num_kv_heads + last.unused_kv_heads if local is None else local.num_kv_heads,
        "global_kv_heads": last.num_kv_heads,
        "global_every": every,
        "rope_fused": local is None or local.rope is None or local.rope.interleaved,
        "sconv": convs is not None,
        "sconv_kernel": 4 if convs is None else convs.taps,
        "sconv_sites": [name for name, site in SITES.items() if site in sites],
    }


def _factor(scaled: float, other: float) -> float:
    """The factor with which `other` gives exactly `scaled`, so that a saved model is the loaded one to the bit."""
    near = scaled / other
    return next(f for f in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)) if f * other == scaled)


_LAYER = "model.layers.{layer}"
_GATES = {
    "embedding_norm": "model.embed_gated_norm",
    "layers.input_norm": f"{_LAYER}.attn_gated_norm",
    "layers.mlp_norm": f"{_LAYER}.mlp_gated_norm",
    "norm": "model.final_gated_norm",
}
GRUG_MOE_TENSORS = tensor_table(
    {
        **{path: name for path, name in TENSOR_NAMES.items() if not path.startswith("layers.mlp.")},
        "embedding_norm.weight": "model.embed_norm.weight",
        **{
            f"{path}.gate_{to}.weight": f"{name}.{to}_proj.weight"
            for path, name in _GATES.items()
            for to in ("down", "up")
        },
        "layers.attention.gate_proj.weight": f"{_LAYER}.self_attn.attn_gate.weight",
        "layers.mlp.router.weight": f"{_LAYER}.mlp.router.weight",
        "layers.mlp.selection_bias": f"{_LAYER}.mlp.router.bias",
        **{
            f"layers.mlp.shared.{name}_proj.weight": f"{_LAYER}.shared_expert.{name}_proj.weight"
            for name in ("gate", "up", "down")
        },
        **{
            f"layers.mlp.shared_experts.{i}.{name}_proj.weight": f"{_LAYER}.shared_experts.{i}.{name}_proj.weight"
            for i in range(MAX_SHARED)
            for name in ("gate", "up", "down")
        },
        **{f"layers.mlp.latent_{to}.weight": f"{_LAYER}.mlp.latent_{to}_proj.weight" for to in ("down", "up")},
        "layers.mlp.latent_norm.weight": f"{_LAYER}.mlp.latent_norm.weight",
    },
    *(
        Tensor(f"{_LAYER}.{name}.weight", (f"layers.convs.{site}.weight",), transposed=True)
        for name, site in {"self_attn.sconv_k": KEYS, "sconv_attn": MIXER, "sconv_mlp": FEED_FORWARD}.items()
    ),
    *(
        Tensor(f"{_LAYER}.mlp.experts.{name}_proj.weight", (f"layers.mlp.{name}_proj.weight",), stacked_experts=True)
        for name in ("gate", "up", "down")
    ),
)
GRUG_MOE = Family(
    "grug_moe",
    "GrugMoeForCausalLM",
    config_from_hf,
    config_to_hf,
    GRUG_MOE_TENSORS,
    alternatives=tensors_by_expert(f"{_LAYER}.mlp.experts"),
)
