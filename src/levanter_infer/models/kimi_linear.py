"""Kimi-Linear: Kimi delta attention in most layers, latent attention without a rope in others, DeepSeek's experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.kimi_delta import KimiDeltaBlock
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.deepseek_v3 import MTP_KEY
from levanter_infer.models.experts import (
    MIXTRAL_ROUTER,
    SELECTION_BIAS,
    deepseek_experts_to_hf,
    expert_tensors,
    read_deepseek_experts,
    read_sparse_layers,
    sparse_layers_to_hf,
)
from levanter_infer.models.family import Family
from levanter_infer.models.hf_config import FULL, HfConfig
from levanter_infer.models.latent import latent_attention_to_hf, latent_tensors, read_latent_attention
from levanter_infer.models.qwen3_next import LINEAR
from levanter_infer.models.tensors import Tensor

NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "scoring_func": "moe_router_activation_func",
}
"""Kimi-Linear's own names of keys."""
NESTED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Keys of `linear_attn_config`, and what transformers calls them beside it. The former win, as there."""
FULL_LAYERS, DELTA_LAYERS = "full_attn_layers", "kda_layers"
"""Keys of `linear_attn_config`: numbers of layers, from one on."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(_flat(raw), NAMES)
    sizes, attention = read_latent_attention(hf, q_rank=None, max_positions=1048576, norm_eps=1e-5)
    attention = dataclasses.replace(attention, rope=None, scale=None)
    experts = read_deepseek_experts(hf, sizes, experts=256, chosen=8, width=1024, groups=(1, 1), scale=2.446)
    feed_forward = read_sparse_layers(hf, experts, sizes.dense(), sizes.num_layers)
    delta = KimiDeltaBlock(
        num_heads=hf.count("linear_num_heads", 32),
        head_dim=hf.count("linear_head_dim", 128),
        taps=hf.count("linear_conv_kernel_dim", 4),
        norm_eps=sizes.norm_eps,
    )
    kinds = hf.names("layer_types", (FULL, LINEAR))
    kinds = kinds or tuple(LINEAR if layer % 4 or not layer else FULL for layer in range(sizes.num_layers))
    if len(kinds) != sizes.num_layers:
        raise hf.fail("layer_types", f"one entry for each of num_hidden_layers={sizes.num_layers}")
    hf.own_code("configuration_kimi", "modeling_kimi")
    hf.only("mla_use_nope", True)
    hf.only("tie_word_embeddings", False)
    hf.only("use_grouped_topk", True)
    hf.only("moe_layer_freq", 1)
    hf.size(MTP_KEY, 0)
    hf.finish()
    mixers = [attention if kind == FULL else delta for kind in kinds]
    blocks = [Block(mixer, part, sizes.norm()) for mixer, part in zip(mixers, feed_forward, strict=True)]
    return sizes.decoder("kimi_linear", blocks)


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with the keys of `linear_attn_config` in the stead of that. Raises: ValueError if one is not known."""
    own = {key: value for key, value in raw.items() if key not in ("head_dim", "linear_attn_config")}
    nested = raw.get("linear_attn_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"config.json: linear_attn_config={nested!r}, expected an object")
    own |= {NESTED[key]: value for key, value in nested.items() if key in NESTED}
    unknown = set(nested) - {*NESTED, FULL_LAYERS, DELTA_LAYERS}
    if unknown:
        raise ValueError(f"config.json: linear_attn_config has {sorted(unknown)}, which are not implemented")
    full, delta = (nested.get(key) or [] for key in (FULL_LAYERS, DELTA_LAYERS))
    number = raw.get("num_hidden_layers")
    if (full or delta) and raw.get("layer_types") is None and type(number) is int:
        listed = [*full, *delta] if isinstance(full, list) and isinstance(delta, list) else []
        is_wrong = number != len(listed) or any(type(layer) is not int for layer in listed)
        if is_wrong or sorted(listed) != list(range(1, number + 1)):
            raise ValueError(
                f"config.json: linear_attn_config has {FULL_LAYERS}={full!r} and {DELTA_LAYERS}={delta!r}, expected "
                f"each of the layers 1 to {number} once"
            )
        own["layer_types"] = [FULL if layer in full else LINEAR for layer in range(1, number + 1)]
    return own


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    delta = next((b.recurrent for b in config.blocks if isinstance(b.recurrent, KimiDeltaBlock)), None)
    is_full = [block.attention is not None for block in config.blocks]
    layers = {
        FULL_LAYERS: [number for number, full in enumerate(is_full, 1) if full],
        DELTA_LAYERS: [number for number, full in enumerate(is_full, 1) if not full],
    }
    sizes = {}
    if delta is not None:
        sizes = {"head_dim": delta.head_dim, "num_heads": delta.num_heads, "short_conv_kernel_size": delta.taps}
    keys = {**latent_attention_to_hf(config), **deepseek_experts_to_hf(config), **sparse_layers_to_hf(config)}
    return {
        **{NAMES.get(key, key): value for key, value in keys.items()},
        "linear_attn_config": {**layers, **sizes},
        "mla_use_nope": True,
    }


_LAYER = "model.layers.{layer}"
_DELTA_NAMES = {
    **{f"{name}_proj.weight": f"{name}_proj.weight" for name in ("q", "k", "v", "b", "f_a", "f_b", "g_a", "g_b")},
    **{f"{name}_conv.weight": f"{name}_conv1d.weight" for name in "qkv"},
    "dt_bias": "dt_bias",
    "norm.weight": "o_norm.weight",
    "out_proj.weight": "o_proj.weight",
}
KIMI_LINEAR = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    config_from_hf,
    config_to_hf,
    (
        *latent_tensors(
            expert_tensors(
                "block_sparse_moe",
                Tensor(f"{_LAYER}.block_sparse_moe.gate.e_score_correction_bias", (SELECTION_BIAS,)),
                dense="mlp",
                names=("w1", "w3", "w2"),
            )
        ),
        *(Tensor(f"{_LAYER}.self_attn.{name}", (f"layers.recurrent.{path}",)) for path, name in _DELTA_NAMES.items()),
        Tensor(f"{_LAYER}.self_attn.A_log", ("layers.recurrent.a_log",), unit_axes=(2, 1)),
    ),
    extra_layers_key=MTP_KEY,
    # As transformers has them in memory, and PEFT in its adapters
    renamed=(
        (".self_attn.forget_gate.", ".self_attn."),
        (".mlp.shared_experts.", ".block_sparse_moe.shared_experts."),
        MIXTRAL_ROUTER,
    ),
)
