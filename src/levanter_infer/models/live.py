"""Models in training with haliax, in the shape of Levanter's `LlamaLMHeadModel`, used as they are.

Nothing of Levanter is imported: a model is known by the names of its fields and axes, which are those of Levanter's
Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE. What this engine computes is said by sizes, by the fields of the model's
configuration that are read here, and by nothing else; whatever does not fit is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from haliax.nn import RmsNorm
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

from levanter_infer.axes import EMBED, EXPERT, HEAD_SIZE, HEADS, KV_HEADS, LAYERS, MLP, Q_HEADS_PER_GROUP, VOCAB
from levanter_infer.kernels.registry import platform_of
from levanter_infer.models import live_grug
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.live_rope import check_rope, live_rope
from levanter_infer.models.registry import FAMILIES, family_for
from levanter_infer.models.tensors import parameters, set_parameter

_LAYER = "transformer.layers.stacked"
_NAMES = {
    "embeddings.weight": "embeddings.token_embeddings.weight",
    "layers.input_norm.weight": f"{_LAYER}.input_layernorm.weight",
    "layers.mlp_norm.weight": f"{_LAYER}.post_attention_layernorm.weight",
    "norm.weight": "transformer.norm.weight",
    "lm_head.weight": "lm_head.weight",
    **{f"layers.attention.{name}_norm.weight": f"{_LAYER}.self_attn.{name}_norm.weight" for name in "qk"},
    **{
        f"layers.{ours}.{name}_proj.{kind}": f"{_LAYER}.{theirs}.{name}_proj.{kind}"
        for ours, theirs, names in (("attention", "self_attn", "qkvo"), ("mlp", "mlp", ("gate", "up", "down")))
        for name in names
        for kind in ("weight", "bias")
    },
}
"""Line of a family's table of tensors -> path in the live model."""


def _names_with_experts(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    experts = {"gate": gate, "up": up, "down": down}
    return {
        **_NAMES,
        "layers.mlp.router.weight": f"{_LAYER}.{block}.gate.weight",
        **{f"layers.mlp.{ours}_proj.weight": f"{_LAYER}.{block}.experts.{own}.weight" for ours, own in experts.items()},
    }


_MOE = {
    "mlp": ("qwen3_moe", _names_with_experts("mlp", "gate_proj", "up_proj", "down_proj")),
    "block_sparse_moe": ("mixtral", _names_with_experts("block_sparse_moe", "w1", "w3", "w2")),
}
"""Field of a layer that has experts -> `model_type`, and names as above."""
_ALIASES = {"kv_heads": KV_HEADS, "layer": LAYERS, "experts": EXPERT}
"""Axis names of other releases of Levanter -> ours. Its Mistral says `layers`, its other models `layer` since 1.2."""
_FAMILIES = "Llama, Mistral, Mixtral, Qwen2, Qwen3 or Qwen3-MoE"
_SILU = ("silu", "swish")
LIVE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` of the models that `from_levanter` takes."""
_LIKELY = f"give the model's config.json as config=, if it is a {_FAMILIES} after all"


def from_levanter(model, config: DecoderConfig | Mapping[str, Any] | None = None) -> DecoderModel:
    """A live model as the engine and `generate` take it; they call this themselves.

    Weights are shared, not copied, where they are stored as `[layers, out..., in...]`, as by haliax' `Linear` by
    default (`out_first=True`) in a `Stacked`; others, such as those of experts (`MoELinear`), are transposed. Outside
    of a trace the output projection, whose heads have one axis in Levanter and two here, is shared on a CPU and copied
    on other devices. The arrays may be traced.

    Args:
        model: a module with the fields of Levanter's `LlamaLMHeadModel`, or its parameters alone: the module with None
            in place of other leaves, or mappings with the same names. A `DecoderModel` is returned as it is.
        config: what the checkpoint's config.json would say, for a model whose own configuration (`model.config`) is
            not there or does not say all. Sizes come from the parameters, the rotary embedding from the module that
            rotates (`self_attn.rot_embs`), and both must agree with it.

    A sliding window is that of the attention layers (`self_attn.config.sliding_window`). Levanter's `MistralConfig` has
    one by default, 4096, which its layers do not apply: such a model is sampled as it is trained, without it. Give
    `config=` with a `sliding_window` if it is trained with masks that have one.

    Raises: ValueError naming the field, what it holds, what was expected, and what to do.
    """
    if isinstance(model, DecoderModel):
        return model
    if _get(model, "transformer.blocks") is not None:
        return _snowball(model, config)
    kind, names = _experts_of(model)
    if isinstance(config, DecoderConfig):
        family, decoder = FAMILIES[config.model_type], config
    else:
        raw = _config_json(model, kind, names) if config is None else config
        family = family_for(raw)
        decoder = family.config_from_hf(raw)
    if family.model_type not in LIVE:
        raise ValueError(
            f"config= says model_type={family.model_type!r}, expected one of {', '.join(LIVE)}; live models of other "
            "families are not implemented, save it as a HF checkpoint and read that with load_model"
        )
    rotary = _get(model, f"{_LAYER}.self_attn.rot_embs")
    if config is not None and callable(rotary):
        check_rope(rotary, decoder.ropes[0], decoder.head_dim, decoder.max_position_embeddings)
    types = DecoderModel.types(decoder)
    params = {names[param.line]: param for param in parameters(types, family.tensors)}
    arrays = {name: _with_axes(_named(model, name), param.axes, name) for name, param in params.items()}
    _check_all_used(model, set(arrays))
    _check_one_dtype(arrays)
    for name, array in arrays.items():
        _check_norm(model, name, decoder.norm.eps)
        types = set_parameter(types, params[name].path, array)
    return types


def _snowball(model, config: DecoderConfig | Mapping[str, Any] | None) -> DecoderModel:
    """As `from_levanter`, of Levanter's `SnowballLMHeadModel`. All weights are copied, for its layers are apart."""
    raw = live_grug.config_json(_get(model, "transformer.config")) if config is None else config
    decoder = raw if isinstance(raw, DecoderConfig) else family_for(raw).config_from_hf(raw)
    if decoder.model_type != "grug_moe":
        raise ValueError(
            f"config= says model_type={decoder.model_type!r}, expected 'grug_moe' for a model with transformer.blocks"
        )

    def get(path: str):
        found = _get(model, f"transformer.{path}")
        if found is None:
            raise ValueError(
                f"{type(model).__name__} has no transformer.{path}, expected the fields of Levanter's Snowball"
            )
        return found

    types = DecoderModel.types(decoder)
    arrays = {}
    for param in parameters(types, FAMILIES["grug_moe"].tensors):
        arrays[param.path] = live_grug.parameter_of(get, decoder.num_layers, param, _without_explicit_axes)
        types = set_parameter(types, param.path, arrays[param.path])
    _check_all_used(model, {f"transformer.{path}" for path in live_grug.paths_of(decoder.num_layers)})
    _check_one_dtype({path: array for path, array in arrays.items() if not path.endswith("selection_bias")})
    live_grug.check_norms(get, types)
    return types


def names_of(model_type: str) -> Mapping[str, str]:
    """Fields of Levanter's models of a family in `LIVE`, by the lines of the family's table of tensors."""
    return next((names for kind, names in _MOE.values() if kind == model_type), _NAMES)


def _experts_of(model) -> tuple[str | None, Mapping[str, str]]:
    """`model_type` by the experts that the layers have, None without experts; and, by the line of a family's table of
    tensors, the path in this live model."""
    found = (each for block, each in _MOE.items() if _get(model, f"{_LAYER}.{block}.experts") is not None)
    return next(found, (None, _NAMES))


# What a model says of itself


def _config_json(model, moe: str | None, names: Mapping[str, str]) -> dict[str, Any]:
    """The config.json of the model. Raises: ValueError for what no family here has. Args: as `_experts_of` returns."""
    sizes = _sizes(model, names)
    config = _get(_get(model, "transformer"), "config")
    if config is None:
        raise ValueError("the model has no transformer.config that says what its parameters mean; give config=")
    attention = _get(_get(model, f"{_LAYER}.self_attn"), "config")
    _check_plain(config, attention)
    has_bias = {name: _get(model, f"{_LAYER}.self_attn.{name}_proj.bias") is not None for name in "qkvo"}
    has_norms = _get(model, f"{_LAYER}.self_attn.q_norm") is not None
    is_qwen2 = has_bias["q"] and not has_bias["o"]
    kind = moe or ("qwen3" if has_norms else "qwen2" if is_qwen2 else "llama")
    window = _get(attention, "sliding_window")
    if kind == "llama" and (window is not None or _get(config, "sliding_window") is not None and not has_bias["q"]):
        kind = "mistral"
    max_len = _first(config, "max_seq_len", "seq_len", "max_Pos")
    max_len = max_len.size if isinstance(max_len, Axis) else max_len
    return {
        "model_type": kind,
        "vocab_size": sizes[VOCAB],
        "hidden_size": sizes[EMBED],
        "intermediate_size": sizes[MLP],
        "num_hidden_layers": sizes[LAYERS],
        "num_attention_heads": sizes[KV_HEADS] * sizes[Q_HEADS_PER_GROUP],
        "num_key_value_heads": sizes[KV_HEADS],
        "head_dim": sizes[HEAD_SIZE],
        "max_position_embeddings": max_len,
        "rms_norm_eps": float(_first(_get(model, "transformer.norm"), "eps")),
        "tie_word_embeddings": _get(model, "lm_head") is None,
        **_rope(model, config, sizes[HEAD_SIZE], max_len),
        **_window(kind, window),
        **({} if is_qwen2 or kind == "mixtral" else {"attention_bias": has_bias["q"]}),
        **({"mlp_bias": _get(model, f"{_LAYER}.mlp.gate_proj.bias") is not None} if kind == "llama" else {}),
        **(_experts(kind, config, sizes) if moe else {}),
    }


def _experts(kind: str, config, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The keys of config.json for a mixture of experts in every layer."""
    chosen = _first(config, "num_experts_per_tok")
    if kind == "mixtral":
        return {"num_local_experts": sizes[EXPERT], "num_experts_per_tok": chosen}
    return {
        "num_experts": sizes[EXPERT],
        "moe_intermediate_size": sizes[MLP],
        "num_experts_per_tok": chosen,
        "norm_topk_prob": _first(config, "norm_topk_prob"),
        "decoder_sparse_step": _first(config, "decoder_sparse_step"),
        "mlp_only_layers": list(_first(config, "mlp_only_layers")),
    }


def _sizes(model, names: Mapping[str, str]) -> dict[str, int]:
    """Size of every axis of the weights."""
    arrays = (
        _named(model, names[path])
        for path in (
            "embeddings.weight",
            "layers.attention.q_proj.weight",
            "layers.mlp.gate_proj.weight",
            "norm.weight",
        )
    )
    sizes = {_ALIASES.get(axis.name, axis.name): axis.size for array in arrays for axis in array.axes}
    for name in (VOCAB, EMBED, MLP, LAYERS, KV_HEADS, Q_HEADS_PER_GROUP, HEAD_SIZE):
        if name not in sizes:
            raise ValueError(f"no weight of the model has an axis {name!r}; its axes are {', '.join(sorted(sizes))}")
    return sizes


def _check_plain(config, attention) -> None:
    """Refuse what these families do not compute."""
    activation = _first(config, "activation_function")
    name = getattr(activation, "name", activation)
    if name not in _SILU:
        raise ValueError(f"config.activation_function={name!r}, expected silu; {_LIKELY}")
    unwanted = {
        "hybrid_norm": (False, None),
        "input_embedding_norm": (False, None),
        "use_sliding_window": (False, None),
        "gated": ("none", None),
        "scaling_factor": (None,),
        "logits_soft_cap": (None,),
    }
    for owner in (config, attention):
        for key, neutral in unwanted.items():
            value = _get(owner, key)
            if value not in (None, *neutral):
                raise ValueError(f"config.{key}={value!r}, expected {neutral[0]!r}; {_LIKELY}")


def _rope(model, config, head_dim: int, max_len: int) -> dict[str, Any]:
    rope = _get(config, "rope")
    rotary = _get(model, f"{_LAYER}.self_attn.rot_embs")
    if rope is not None and not callable(rotary) and hasattr(rope, "build"):
        rotary = rope.build(Axis(HEAD_SIZE, head_dim))
    if rope is None or not callable(rotary):
        raise ValueError(f"config.rope is {type(rope).__name__}, expected one of Levanter's rotary configs; {_LIKELY}")
    return live_rope(rotary, rope, head_dim, max_len)


def _window(kind: str, window: int | None) -> dict[str, Any]:
    """The keys of config.json for a window that all layers have, or none."""
    if kind in ("mistral", "mixtral"):
        return {"sliding_window": window}
    if window is None:
        return {}
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}


def _first(owner, *names: str):
    value = next((value for value in (_get(owner, name) for name in names) if value is not None), None)
    if value is None:
        raise ValueError(f"the model's configuration has no {' or '.join(names)}; {_LIKELY}")
    return value


# Parameters


def _get(tree, path: str):
    """The value at a dotted path of attributes or keys; None where anything on the way is absent."""
    for name in path.split("."):
        if isinstance(tree, Sequence):
            tree = tree[int(name)] if name.isdecimal() and int(name) < len(tree) else None
        else:
            tree = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
        if tree is None:
            return None
    return tree


def _named(model, path: str) -> NamedArray:
    found = _get(model, path)
    if found is None and path.startswith(_LAYER) and _get(model, "transformer.layers.blocks") is not None:
        raise ValueError(
            "the model's layers are apart (transformer.layers.blocks), expected one stack; make it with "
            "scan_layers=True, or stack them with haliax.nn.scan.Stacked"
        )
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no {path}, expected the fields of Levanter's LlamaLMHeadModel; other models "
            "are loaded from a HF checkpoint with load_model"
        )
    if not isinstance(found, NamedArray):
        raise ValueError(f"{path} is {type(found).__name__}, expected a haliax NamedArray; name its axes")
    return found


def _with_axes(named: NamedArray, axes: tuple[Axis, ...], path: str) -> NamedArray:
    """The same numbers with `axes`, in memory of their own only if the order differs."""
    own = {_ALIASES.get(axis.name, axis.name): axis.size for axis in named.axes}
    wanted = {axis.name: axis.size for axis in axes}
    names = [axis.name for axis in axes]
    if HEADS in own:  # Levanter's output projection
        wanted[HEADS] = wanted.pop(KV_HEADS, 1) * wanted.pop(Q_HEADS_PER_GROUP, 1)
        names = [HEADS if name == KV_HEADS else name for name in names if name != Q_HEADS_PER_GROUP]
    if own != wanted:
        raise ValueError(f"{path} has axes {_shown(own)}, expected {_shown(wanted)}; config and model do not agree")
    array: Any = named.array
    order = [list(own).index(name) for name in names]
    if isinstance(array, np.ndarray):
        array = jax.device_put(array)
    array = _without_explicit_axes(array)
    if order != sorted(order):
        is_type = isinstance(array, jax.ShapeDtypeStruct)
        array = jax.eval_shape(lambda a: a.transpose(order), array) if is_type else jnp.transpose(array, order)
    return NamedArray(_reshaped(array, tuple(axis.size for axis in axes)), axes)


def _without_explicit_axes(array: Array) -> Array:
    """The same memory, on a mesh whose axes are the compiler's: in programs, explicit ones are part of every type."""
    sharding = getattr(array, "sharding", None)
    if isinstance(array, Tracer) or not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return array
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        raise ValueError(
            "called under a mesh with explicit axes, expected none: JAX makes it a part of every type. Call it outside "
            "of it, or under jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())); parameters may be placed on it"
        )
    if all(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return array
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)  # type: ignore[return-value]
    return jax.device_put(array, sharding)


def _reshaped(array: Array, shape: tuple[int, ...]) -> Array:
    """`array` in another shape, in the same memory where that can be had."""
    if array.shape == shape:
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=array.sharding)  # type: ignore[return-value]
    if isinstance(array, Tracer) or len(array.devices()) > 1 or array.sharding.memory_kind == "pinned_host":
        return array.reshape(shape)
    (device,) = array.devices()
    if not platform_of(device.platform).shares_memory:
        return array.reshape(shape)
    # If the caller donates `array`, JAX sees that its memory is in use and copies.
    return jax.device_put(np.asarray(array).reshape(shape), array.sharding if array.committed else None)


def _check_all_used(model, used: set[str]) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
    held = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in leaves
        if isinstance(leaf, NamedArray) or eqx.is_array_like(leaf) and getattr(leaf, "ndim", 0)
    }
    left = sorted(held - used)
    if left:
        raise ValueError(
            f"the model has parameters that this architecture has no place for: {', '.join(left[:6])}"
            f"{f' and {len(left) - 6} more' if len(left) > 6 else ''}; it is not a {_FAMILIES}"
        )


def _check_one_dtype(arrays: dict[str, NamedArray]) -> None:
    found = {str(array.dtype): path for path, array in arrays.items()}
    if len(found) > 1:
        kinds = " and ".join(f"{dtype} ({path})" for dtype, path in sorted(found.items()))
        raise ValueError(
            f"the parameters are {kinds}, expected one dtype; cast them, as with jax.tree.map(lambda x: x.astype(...))"
        )


def _check_norm(model, path: str, eps: float) -> None:
    """Refuse a norm that is none of ours, or whose epsilon the configuration does not say."""
    if "norm" not in path:
        return
    where = path.removesuffix(".weight")
    norm = _get(model, where)
    if isinstance(norm, Mapping):
        return
    if not isinstance(norm, RmsNorm):
        raise ValueError(f"{where} is {type(norm).__name__}, expected haliax.nn.RmsNorm; {_LIKELY}")
    if not np.isclose(norm.eps, eps, rtol=1e-6, atol=0):
        raise ValueError(f"{where}.eps={norm.eps}, expected {eps} as in the rest of the model or in config=")


def _shown(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
