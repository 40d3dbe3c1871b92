"""Nemotron-H: a pattern of Mamba-2, attention without positions, feed-forward blocks with relu², and experts."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.layers.mamba2 import Mamba2Block
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.experts import SELECTION_BIAS, dense_width, read_deepseek_experts, router_to_hf
from levanter_infer.models.family import Family, Sizes, read_sizes, renamed_keys
from levanter_infer.models.granitemoehybrid import mamba_tensors, mamba_to_hf, read_mamba
from levanter_infer.models.hf_config import FULL, HfConfig
from levanter_infer.models.tensors import Tensor, tensor_table

PATTERN, KINDS = "hybrid_override_pattern", "layers_block_type"
"""Keys of the list of layers: letters, or names."""
LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", FULL: "*", "mlp": "-", "moe": "E"}
"""The letter of each name, as transformers 5 writes it or as it was published."""
NAMES = {
    **{"hidden_act": "mlp_hidden_act", "mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim"},
    **{"mamba_n_groups": "n_groups", "mamba_d_state": "ssm_state_size", "mamba_d_conv": "conv_kernel"},
    **{"mamba_conv_bias": "use_conv_bias", "mamba_proj_bias": "use_bias", "mamba_chunk_size": "chunk_size"},
    **{"rms_norm_eps": "layer_norm_epsilon"},
}
UNUSED = (
    *("expand", "mamba_expand", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
    *("mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep", "moe_shared_expert_overlap", "norm_eps"),
    *("num_nextn_predict_layers", "mtp_hybrid_override_pattern", "mtp_layers_block_type"),
)
"""Keys of new parameters, of other programs, of what other keys say, and of layers that are not read."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    pattern = _pattern(raw)
    defaults = {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
    raw = {key: value for key, value in raw.items() if key != "mamba_proj_bias"}  # HF goes by `use_bias` alone
    hf = HfConfig({"num_hidden_layers": len(pattern), **defaults, **raw}, NAMES)
    sizes = read_sizes(
        hf, kv_heads=8, head_dim=128, max_positions=4096, norm_eps=1e-5, activation=Activation.RELU2, inner_factor=1
    )
    if sizes.num_layers != len(pattern):
        raise hf.fail("num_hidden_layers", f"{len(pattern)}, as many as {PATTERN} or {KINDS} has")
    dense = sizes.dense(gated=False, bias=hf.flag("mlp_bias", False))
    if dense.bias and "E" in pattern:
        raise hf.fail("mlp_bias", "false where layers have experts: their biases are not implemented")
    parts = {
        "M": read_mamba(hf, sizes, width=hf.count("mamba_n_heads") * hf.count("mamba_d_head")),
        "*": sizes.attention(rope=None),
        "-": dense,
        "E": _experts(hf, sizes),
    }
    hf.only("tie_word_embeddings", False)
    hf.only("mamba_hidden_act", "silu")
    hf.only("attention_bias", False)
    hf.only("sliding_window", None)
    hf.only("residual_in_fp32", False)
    hf.own_code("configuration_nemotron_h", "modeling_nemotron_h")
    hf.ignore(PATTERN, KINDS, *UNUSED)
    hf.finish()
    layers = re.findall("([M*]?)([-E]?)", pattern)[:-1]  # the last match is of nothing
    blocks = [Block(parts.get(mixer), parts.get(feed_forward), sizes.norm()) for mixer, feed_forward in layers]
    return sizes.decoder("nemotron_h", blocks)


def _pattern(raw: Mapping[str, Any]) -> str:
    """A letter for each mixer and each feed-forward block: what files call a layer."""
    kinds = HfConfig(raw).names(KINDS, tuple(LETTERS))
    pattern = raw.get(PATTERN) if kinds is None else "".join(LETTERS[kind] for kind in kinds)
    if not isinstance(pattern, str) or not re.fullmatch("[M*E-]+", pattern):
        raise ValueError(f"config.json: {PATTERN}={pattern!r}, expected letters M, *, - and E, or the list {KINDS}")
    if raw.get(PATTERN, pattern) != pattern:
        raise ValueError(f"config.json: {PATTERN}={raw[PATTERN]!r} but {KINDS} is {pattern!r}; leave one out")
    return pattern


def _experts(hf: HfConfig, sizes: Sizes) -> ExpertsBlock:
    experts = read_deepseek_experts(hf, sizes, experts=8, chosen=2, width=7688, groups=(1, 1), scale=1.0)
    hf.only("n_shared_experts", 1)
    shared, latent = hf.count("moe_shared_expert_intermediate_size", 7688), hf.optional_count("moe_latent_size")
    return dataclasses.replace(experts, gated=False, shared_width=shared, latent_dim=latent)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    blocks, experts = config.blocks, config.experts
    mamba = next((block.mixer for block in blocks if isinstance(block.mixer, Mamba2Block)), None)
    pattern = "".join(_letter(part) for block in blocks for part in block.parts)
    keys = renamed_keys(config, NAMES, drop=("rope_theta", "rope_scaling"))
    keys |= {
        "intermediate_size": dense_width(config),
        "mlp_bias": any(isinstance(each, DenseBlock) and each.bias for each in (b.feed_forward for b in blocks)),
        "num_hidden_layers": len(pattern),
        PATTERN: pattern,
    }
    if mamba is not None:
        keys |= {NAMES.get(key, key): value for key, value in mamba_to_hf(mamba).items()}
    if experts is not None:
        shared = {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": experts.shared_width}
        keys |= {**router_to_hf(experts), **shared, "moe_latent_size": experts.latent_dim}
    return keys


def _letter(part) -> str:
    kinds = {Mamba2Block: "M", DenseBlock: "-", ExpertsBlock: "E"}
    return kinds.get(type(part), "*")


_MIXER, _FEED_FORWARD = "backbone.layers.{mixer}", "backbone.layers.{feed_forward}"
_DENSE = {
    f"layers.mlp.{name}_proj.{kind}": f"{_FEED_FORWARD}.mixer.{name}_proj.{kind}"
    for name in ("up", "down")
    for kind in ("weight", "bias")
}
_OTHERS = {
    "embeddings.weight": "backbone.embeddings.weight",
    "layers.input_norm.weight": f"{_MIXER}.norm.weight",
    **{f"layers.attention.{name}_proj.weight": f"{_MIXER}.mixer.{name}_proj.weight" for name in "qkvo"},
    "layers.mlp_norm.weight": f"{_FEED_FORWARD}.norm.weight",
    "layers.mlp.router.weight": f"{_FEED_FORWARD}.mixer.gate.weight",
    SELECTION_BIAS: f"{_FEED_FORWARD}.mixer.gate.e_score_correction_bias",
    "layers.mlp.latent_down.weight": f"{_FEED_FORWARD}.mixer.fc1_latent_proj.weight",
    "layers.mlp.latent_up.weight": f"{_FEED_FORWARD}.mixer.fc2_latent_proj.weight",
    **{
        f"layers.mlp.{shared}{name}_proj.weight": f"{_FEED_FORWARD}.mixer.{tensor}.{name}_proj.weight"
        for shared, tensor in (("", "experts.{expert}"), ("shared.", "shared_experts"))
        for name in ("up", "down")
    },
    "norm.weight": "backbone.norm_f.weight",
    "lm_head.weight": "lm_head.weight",
}
NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    config_from_hf,
    config_to_hf,
    (
        *(Tensor(name, (path,)) for path, name in _DENSE.items()),
        *tensor_table(_OTHERS, *mamba_tensors(f"{_MIXER}.mixer")),
    ),
    prefixes=(("model.", "backbone."),),
    unused=("mtp.",),
)
