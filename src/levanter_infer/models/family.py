"""What a model family has to say, and what those of the Llama kin share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
from haliax import NamedArray

from levanter_infer.axes import LAYERS
from levanter_infer.layers.linear import Linear
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.decoder import DecoderConfig, DecoderModel
from levanter_infer.models.hf_config import HfConfig

MAX_LAYERS = 10_000
"""More is taken for a broken config.json."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of HF."""

    model_type: str
    architecture: str
    """HF's class name, written to config.json."""
    config_from_hf: Callable[[Mapping[str, Any]], DecoderConfig]
    """Raises ValueError, naming the key, for whatever it cannot honour."""
    config_to_hf: Callable[[DecoderConfig], dict[str, Any]]
    """The inverse: `config_from_hf(config_to_hf(c)) == c`."""
    tensor_names: Mapping[str, str]
    """Attribute path in `DecoderModel` -> HF's tensor name, with `{layer}` in those of a layer, and `{expert}` in those
    of an expert."""


TENSOR_NAMES = {
    "embeddings.weight": "model.embed_tokens.weight",
    "layers.input_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    **{
        f"layers.attention.{name}_proj.{kind}": f"model.layers.{{layer}}.self_attn.{name}_proj.{kind}"
        for name in "qkvo"
        for kind in ("weight", "bias")
    },
    "layers.attention.q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers.attention.k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
    "layers.mlp_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    **{
        f"layers.mlp.{name}_proj.{kind}": f"model.layers.{{layer}}.mlp.{name}_proj.{kind}"
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
"""The names that Llama, Mistral, Qwen2 and Qwen3 share. A model without a parameter (a bias, say) skips its line."""

IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Ends of tensor names that old checkpoints carry and that are computed from the config."""


@dataclass(frozen=True)
class Parameter:
    """One array of a model, and the tensors of a checkpoint that make it up."""

    path: str
    """Attributes from the model, joined by dots."""
    axes: tuple
    """Axes in the model, `layers` first where it is stacked."""
    hf_names: tuple[str, ...]
    """One tensor, or one per layer, or one per layer and expert."""
    hf_shape: tuple[int, ...]
    """Shape of each of these tensors."""
    num_stacked: int
    """Leading axes over which they are stacked."""


def parameters(model: DecoderModel, family: Family) -> list[Parameter]:
    """Every parameter that `model` (or its shapes) has, in the order of the family's table.

    HF's tensors are matrices [out, in] or vectors: the stored axes, those of a side merged.
    """
    found = []
    for path, template in family.tensor_names.items():
        owner, array = _resolve(model, path)
        if array is None:
            continue
        axes = array.axes
        stacked = axes[0].name == LAYERS
        experts = "{expert}" in template
        num_stacked = stacked + experts
        sizes = [axis.size for axis in axes[num_stacked:]]
        merged = (math.prod(sizes),)
        if isinstance(owner, Linear) and path.endswith(".weight"):
            merged = (math.prod(sizes[: -owner.num_in]), math.prod(sizes[-owner.num_in :]))
        places = [{"layer": i} for i in range(axes[0].size)] if stacked else [{}]
        if experts:
            places = [{**place, "expert": i} for place in places for i in range(axes[1].size)]
        names = tuple(template.format(**place) for place in places)
        found.append(Parameter(path, axes, hf_names=names, hf_shape=merged, num_stacked=num_stacked))
    return found


def set_parameter(model: DecoderModel, path: str, array: NamedArray) -> DecoderModel:
    """`model` with the parameter at the dotted `path` replaced."""
    return eqx.tree_at(lambda tree: get_parameter(tree, path), model, array)


def get_parameter(model: DecoderModel, path: str) -> NamedArray:
    return _resolve(model, path)[1]


def is_ignored(hf_name: str) -> bool:
    """Whether a checkpoint may hold this tensor although no model has a use for it."""
    return hf_name.endswith(IGNORED_TENSORS)


def _resolve(model: DecoderModel, path: str) -> tuple[Any, Any]:
    """Owner and array at a path; (None, None) below a module that the model does not have."""
    owner: Any = None
    array: Any = model
    for name in path.split("."):
        if array is None:
            return None, None
        owner, array = array, getattr(array, name)
    return owner, array


def common_fields(hf: HfConfig, *, kv_heads: int | None, head_dim: int | None, max_positions: int) -> dict[str, Any]:
    """The fields of `DecoderConfig` that all families read alike.

    Args:
        kv_heads: HF's default where the key is absent; None for as many as query heads.
        head_dim: HF's default where the key is absent; None for hidden_size / num_attention_heads.
        max_positions: HF's default where the key is absent.
    """
    hidden, heads = hf.count("hidden_size"), hf.count("num_attention_heads")
    kv_heads = hf.count("num_key_value_heads", heads if kv_heads is None else kv_heads, null=heads)
    if head_dim is None or ("head_dim" in hf.raw and hf.raw["head_dim"] is None):
        if hf.raw.get("head_dim") is None and hidden % heads:
            raise hf.fail("hidden_size", f"a multiple of num_attention_heads={heads}, or an explicit head_dim")
        head_dim = hidden // heads
    head_dim = hf.count("head_dim", head_dim, null=head_dim)
    if heads % kv_heads:
        raise hf.fail("num_attention_heads", f"a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        raise hf.fail("head_dim", f"an even number, got {head_dim}")
    hf.one_of("hidden_act", "silu", ("silu", "swish"))
    max_positions = hf.count("max_position_embeddings", max_positions)
    return {
        "vocab_size": hf.count("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": hf.count("intermediate_size"),
        "num_layers": hf.count("num_hidden_layers", most=MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": hf.number("rms_norm_eps", 1e-6),
        "rope": hf.rope(head_dim, max_positions),
        "tie_word_embeddings": hf.flag("tie_word_embeddings", False),
    }


def common_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json that all families write alike."""
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        **rope_to_hf(config.rope, config.max_position_embeddings),
    }


def rope_to_hf(rope: RopeConfig, max_position_embeddings: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, in the spelling that every release of HF transformers reads."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    keys = "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate low_freq_factor high_freq_factor"
    for key in keys.split():
        if getattr(rope, key) is not None:
            scaling[key] = getattr(rope, key)
    for key in ("short_factor", "long_factor"):
        if getattr(rope, key) is not None:
            scaling[key] = list(getattr(rope, key))
    if rope.kind in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = rope.original_len
    keys = {"rope_theta": rope.theta, "rope_scaling": scaling}
    if rope.kind == "longrope" and rope.original_len != max_position_embeddings:
        # Beside rope_scaling, where HF looks for it; it then derives the factor itself.
        del scaling["factor"]
        keys["original_max_position_embeddings"] = rope.original_len
    return keys
