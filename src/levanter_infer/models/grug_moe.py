"""GrugMoE, schema 1 (Marin's Snowball): gated norms, exclusive self-attention, and experts with a biased choice.

Read from `levanter.models.snowball`, which is what defines this family.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.norm import NormConfig
from levanter_infer.layers.router import Router, Score, SelectionBias
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, common_to_hf, one_rope, read_sizes
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
ropes = functools.partial(one_rope, partial=True, default_partial=0.5)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(_with_own_names(raw))
    if hf.count("grugmoe_artifact_schema_version", 1) != 1:
        raise hf.fail("grugmoe_artifact_schema_version", "1 (Snowball): schema 2 (Hero) is not implemented")
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
    shared = hf.count("shared_expert_intermediate_size", 2560)
    window, multiplier = hf.count("sliding_window", 2048), hf.number("qk_mult", QK_MULT)
    hf.finish()
    norm = sizes.norm(gate_rank=GATE_RANK)
    experts = ExpertsBlock(number, chosen, sizes.intermediate_size, ROUTER, shared_width=shared)
    options = dict(qk_norm=QK_NORM, scale=multiplier * sizes.head_dim**-0.5, exclusive=True, head_gate=True)
    blocks = []
    for layer in range(sizes.num_layers):
        is_long = layer % 4 == 3 or layer == sizes.num_layers - 1
        place = {"rope": None} if is_long else {"window": window}
        blocks.append(Block(sizes.attention(**options, **place), experts, norm))
    return sizes.decoder("grug_moe", blocks, embedding_norm=norm)


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
    return {
        **{key: value for key, value in common_to_hf(config).items() if key not in left_out},
        "sliding_window": next((window for window in config.windows if window is not None), 2048),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.width,
        "shared_expert_intermediate_size": experts.shared_width,
        "qk_mult": _factor(mixer.scale, config.head_dim**-0.5),
        "grugmoe_attention_mode": "production",
        "grugmoe_artifact_schema_version": 1,
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
    },
    *(
        Tensor(f"{_LAYER}.mlp.experts.{name}_proj.weight", (f"layers.mlp.{name}_proj.weight",), stacked_experts=True)
        for name in ("gate", "up", "down")
    ),
)
BY_EXPERT = tuple(
    Tensor(f"{_LAYER}.mlp.experts.{{expert}}.{name}_proj.weight", (f"layers.mlp.{name}_proj.weight",))
    for name in ("gate", "up", "down")
)
GRUG_MOE = Family(
    "grug_moe", "GrugMoeForCausalLM", config_from_hf, config_to_hf, GRUG_MOE_TENSORS, alternatives=BY_EXPERT
)
