"""Live models in the shape of Levanter's `SnowballLMHeadModel`: layers apart, arrays without named axes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.tensors import Parameter

_GATE = {"gate_down.weight": "w_down", "gate_up.weight": "w_up"}
_WHOLE = {
    "embeddings.weight": "token_embed",
    "embedding_norm.weight": "embed_norm.weight",
    "norm.weight": "final_norm.weight",
    "lm_head.weight": "output_proj",
    **{f"embedding_norm.{ours}": f"embed_gated_norm.{own}" for ours, own in _GATE.items()},
    **{f"norm.{ours}": f"final_gated_norm.{own}" for ours, own in _GATE.items()},
}
_BY_LAYER = {
    "layers.input_norm.weight": "rms_attn.weight",
    "layers.mlp_norm.weight": "rms_mlp.weight",
    **{f"layers.input_norm.{ours}": f"attn_gated_norm.{own}" for ours, own in _GATE.items()},
    **{f"layers.mlp_norm.{ours}": f"mlp_gated_norm.{own}" for ours, own in _GATE.items()},
    **{f"layers.attention.{name}_proj.weight": f"attn.w_{name}" for name in "qkvo"},
    "layers.attention.gate_proj.weight": "attn.attn_gate",
    "layers.mlp.router.weight": "mlp.router",
    "layers.mlp.selection_bias": "mlp.router_bias",
    **{f"layers.mlp.{name}_proj.weight": f"mlp.expert_mlp.w_{name}" for name in ("gate", "up", "down")},
    **{f"layers.mlp.shared.{name}_proj.weight": f"shared.w_{name}" for name in ("gate", "up", "down")},
}
"""Lines of the family's table of tensors -> fields of the transformer, and of one of its blocks."""
_OUTS_FIRST = ("embeddings.weight",)
"""Matrices whose outputs come first; all others are transposed."""
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "inferred_head_dim",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "layer_norm_eps",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "moe_intermediate_size": "intermediate_dim",
    "shared_expert_intermediate_size": "shared_expert_intermediate_dim",
    "sliding_window": "sliding_window",
    "qk_mult": "qk_mult",
}
"""Keys of config.json -> fields of Levanter's `SnowballConfig`."""
_NORMS = ("embed_norm", "final_norm")


def config_json(config: Any) -> dict[str, Any]:
    """The config.json of a `SnowballConfig`. Raises: ValueError naming a field that it lacks."""
    missing = sorted(field for field in (*_KEYS.values(), "rope") if not hasattr(config, field))
    if missing:
        raise ValueError(
            f"the model's configuration {type(config).__name__} has no {', '.join(missing)}, expected Levanter's "
            "SnowballConfig; give the model's config.json as config="
        )
    keys = {key: getattr(config, field) for key, field in _KEYS.items()}
    return {"model_type": "grug_moe", **keys, "rope_theta": config.rope.theta, "tie_word_embeddings": False}


def parameter_of(get: Callable[[str], Any], num_layers: int, parameter: Parameter, place: Callable) -> NamedArray:
    """A parameter of a live model, in memory of its own.

    Args:
        get: the array at a path of fields from the transformer. Raises: ValueError if there is none.
        place: makes an array one that programs of the engine take.
    Raises: ValueError if its sizes are not those of the parameter.
    """
    line, sizes = parameter.line, tuple(axis.size for axis in parameter.axes)
    paths = [_WHOLE[line]] if line in _WHOLE else [f"blocks.{i}.{_BY_LAYER[line]}" for i in range(num_layers)]
    arrays = [get(path) for path in paths]
    lead = sizes[1 if line in _BY_LAYER else 0 : parameter.num_stacked]
    rows, *columns = parameter.slice.shape
    is_transposed = bool(columns) and line not in _OUTS_FIRST
    expected = (*lead, *columns, rows) if is_transposed else (*lead, rows, *columns)
    for path, array in zip(paths, arrays, strict=True):
        if tuple(array.shape) != expected:
            raise ValueError(
                f"transformer.{path} has shape {list(array.shape)}, expected {list(expected)}; config and model do not "
                "agree"
            )

    def joined(arrays: list) -> jax.Array:
        outs_first = [jnp.swapaxes(array, -1, -2) if is_transposed else array for array in arrays]
        stacked = jnp.stack(outs_first) if line in _BY_LAYER else outs_first[0]
        stacked = stacked.astype(jnp.float32) if line == "layers.mlp.selection_bias" else stacked
        return stacked.reshape(sizes)

    if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        types = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        return NamedArray(jax.eval_shape(joined, types), parameter.axes)  # type: ignore[arg-type]
    return NamedArray(joined([place(array) for array in arrays]), parameter.axes)


def paths_of(num_layers: int) -> set[str]:
    """Paths of all arrays of a model."""
    return {*_WHOLE.values(), *(f"blocks.{i}.{path}" for i in range(num_layers) for path in _BY_LAYER.values())}


def check_norms(get: Callable[[str], Any], model: DecoderModel) -> None:
    """Raises: ValueError if a norm's epsilon is not the model's. Norms of parameters alone say none."""
    names = (
        *_NORMS,
        *(f"blocks.{i}.{name}" for i in range(model.config.num_layers) for name in ("rms_attn", "rms_mlp")),
    )
    for name in names:
        norm = get(name)
        eps = model.config.norm.eps
        if not isinstance(norm, Mapping) and not np.isclose(getattr(norm, "eps", eps), eps, rtol=1e-6, atol=0):
            raise ValueError(f"transformer.{name}.eps={norm.eps}, expected {eps} as config says")
