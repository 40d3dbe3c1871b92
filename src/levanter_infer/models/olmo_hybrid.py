"""OLMo Hybrid: gated DeltaNet with norms before its blocks, and OLMo 3's attention, as a rule without a rope."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.delta_net import DeltaNetBlock
from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family, Sizes, common_to_hf, read_sizes, rope_parameters
from levanter_infer.models.hf_config import FULL, HfConfig
from levanter_infer.models.olmo2 import OLMO2_TENSORS
from levanter_infer.models.qwen3_next import LINEAR, delta_net_to_hf
from levanter_infer.models.tensors import Tensor

_NORM_EPS = 1e-5
"""Epsilon of the norm of each head's result, whatever `rms_norm_eps` says."""
_INITIAL = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
"""Keys that say how weights were initialised."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    raw, has_rope = _with_rope(raw)
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=65536)
    bias, delta_net, kinds = hf.flag("attention_bias", False), _delta_net(hf, sizes), _kinds(hf, sizes.num_layers)
    hf.ignore(*_INITIAL)
    hf.finish()
    norm = sizes.norm()
    rope = sizes.rope if has_rope else None
    attention = sizes.attention(rope=rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_whole=True)
    blocks = {
        LINEAR: Block(delta_net, sizes.dense(), norm),
        FULL: Block(attention, sizes.dense(), norm, Placement.AFTER),
    }
    return sizes.decoder("olmo_hybrid", [blocks[kind] for kind in kinds])


def _with_rope(raw: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The keys, with a rope that can be read; and whether there is one: `rope_theta: null` says that there is none."""
    rope = raw.get("rope_parameters")
    holder = rope if isinstance(rope, dict) and "rope_theta" in rope else raw
    if "rope_theta" in holder and holder["rope_theta"] is None:
        return {key: value for key, value in raw.items() if key not in ("rope_parameters", "rope_theta")}, False
    if "rope_theta" not in holder and "rope_parameters" in raw and rope is None:
        # transformers 5.23 takes its default, and the release that the first files were made for none
        raise ValueError(
            'config.json: rope_parameters=None, expected a rope_theta, or {"rope_theta": null} for layers without a '
            "rope, as in the released models"
        )
    return dict(raw), True


def _delta_net(hf: HfConfig, sizes: Sizes) -> DeltaNetBlock:
    heads = hf.count("linear_num_key_heads", sizes.num_heads, null=sizes.num_heads)
    hf.only("linear_num_value_heads", None, heads)
    size = int(0.75 * sizes.hidden_size / heads)
    size = hf.count("linear_key_head_dim", size, null=size)
    return DeltaNetBlock(
        num_key_heads=heads,
        num_value_heads=heads,
        key_size=size,
        value_size=hf.count("linear_value_head_dim", 2 * size, null=2 * size),
        taps=hf.count("linear_conv_kernel_dim", 4),
        norm_eps=_NORM_EPS,
        beta_scale=2.0 if hf.flag("linear_allow_neg_eigval", True) else 1.0,
    )


def _kinds(hf: HfConfig, num_layers: int) -> tuple[str, ...]:
    """The kind of every layer."""
    kinds = hf.names("layer_types", (FULL, LINEAR))
    if kinds is None:
        kinds = tuple(FULL if layer % 4 == 3 else LINEAR for layer in range(num_layers))
        kinds = kinds if FULL in kinds else (*kinds[:-1], FULL)
    if len(kinds) != num_layers or {*kinds} != {FULL, LINEAR}:
        raise hf.fail("layer_types", f"one entry for each of num_hidden_layers={num_layers}, some of each kind")
    return kinds


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    attention = config.kv_attention[0]
    longest = config.max_position_embeddings
    rope = {"rope_theta": None} if attention.rope is None else rope_parameters(attention.rope, longest)
    keys = {**common_to_hf(config, {"rope_parameters": rope}), "attention_bias": attention.qkv_bias}
    del keys["head_dim"]
    deltas = [block.recurrent for block in config.blocks if isinstance(block.recurrent, DeltaNetBlock)]
    return {**keys, **delta_net_to_hf(config), "linear_allow_neg_eigval": deltas[0].beta_scale == 2}


_LINEAR = "model.layers.{layer}.linear_attn"
_NAMES = {
    **{f"{name}_proj.weight": f"{name}_proj.weight" for name in "qkvba"},
    "z_proj.weight": "g_proj.weight",
    **{f"{name}_conv.weight": f"{name}_conv1d.weight" for name in "qkv"},
    "a_log": "A_log",
    "dt_bias": "dt_bias",
    "norm.weight": "o_norm.weight",
    "out_proj.weight": "o_proj.weight",
}
_LINES = tuple(Tensor(f"{_LINEAR}.{name}", (f"layers.recurrent.{path}",)) for path, name in _NAMES.items())
OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    config_from_hf,
    config_to_hf,
    (*OLMO2_TENSORS, *_LINES),
    # As published, and as transformers writes them
    renamed=(
        (".attention_layer_norm.", ".input_layernorm."),
        (".feedforward_layer_norm.", ".post_attention_layernorm."),
    ),
)
