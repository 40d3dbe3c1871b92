"""GPT-2: learnt positions, LayerNorm, biases, and matrices that are stored transposed."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import PLAIN_ACTIVATIONS, Family, read_sizes, renamed_keys, renamed_tensors
from levanter_infer.models.hf_config import FULL, SLIDING, HfConfig
from levanter_infer.models.tensors import Tensor, tensor_table

_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
"""Names of this family."""
_UNUSED = (
    *("n_ctx", "reorder_and_upcast_attn"),  # the latter says how, not what, HF computes
    *(f"summary_{key}" for key in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
)


def no_ropes(hf: HfConfig, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    return dict.fromkeys((FULL, SLIDING), RopeConfig())


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw, _KEYS)
    keys: dict[str, Any] = dict(max_positions=1024, tied=True, norm_eps=1e-5, norm_eps_key="layer_norm_epsilon")
    keys |= dict(activation=Activation.GELU_TANH, activations=PLAIN_ACTIVATIONS, inner_factor=4, ropes=no_ropes)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, **keys)
    scale = None if hf.flag("scale_attn_weights", True) else 1.0
    hf.only("scale_attn_by_inverse_layer_idx", False)
    hf.ignore(*_UNUSED)
    hf.finish()
    attention = sizes.attention(rope=None, scale=scale, qkv_bias=True, out_bias=True)
    block = Block(attention, sizes.dense(gated=False, bias=True), sizes.norm(center=True, bias=True))
    return sizes.decoder("gpt2", [block] * sizes.num_layers, learnt_positions=True)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    names = {**_KEYS, "rms_norm_eps": "layer_norm_epsilon"}
    keys = renamed_keys(config, names, drop=("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling"))
    return {**keys, "scale_attn_weights": config.kv_attention[0].scale is None}


_LAYER = "transformer.h.{layer}"
_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.{layer}": _LAYER,
    "model.norm": "transformer.ln_f",
    "post_attention_layernorm": "ln_2",
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_ALL = {**renamed_tensors(_NAMES), "position_embeddings.weight": "transformer.wpe.weight"}
_MATRICES = tuple(f"layers.{path}.weight" for path in ("attention.o_proj", "mlp.up_proj", "mlp.down_proj"))
GPT2_TENSORS = tensor_table(
    _ALL,
    *(
        Tensor(f"{_LAYER}.attn.c_attn.{kind}", tuple(f"layers.attention.{n}_proj.{kind}" for n in "qkv"), transposed=t)
        for kind, t in (("weight", True), ("bias", False))
    ),
    *(Tensor(_ALL[path], (path,), transposed=True) for path in _MATRICES),
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    config_from_hf,
    config_to_hf,
    GPT2_TENSORS,
    prefixes=tuple((f"{name}.", f"transformer.{name}.") for name in ("wte", "wpe", "h", "ln_f")),  # of old files
    derived=(".attn.bias", ".attn.masked_bias"),
)
