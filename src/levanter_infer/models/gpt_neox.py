"""GPT-NeoX, Pythia: LayerNorm, biases, a rope of a part of each head, and blocks in parallel behind two norms."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import PLAIN_ACTIVATIONS, Family, one_rope, read_sizes, renamed_keys, renamed_tensors
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import Order, Tensor, tensor_table

_KEYS = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
"""Names of this family."""


def ropes(hf: HfConfig, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    return one_rope(hf, head_dim, max_positions, partial=True, default_partial=0.25)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    for key, own in _KEYS.items():
        if key in raw and own not in raw:
            raise ValueError(f"config.json: {key}={raw[key]!r}, expected {own}: HF ignores {key} in this family")
    hf = HfConfig(raw, _KEYS)
    keys: dict[str, Any] = dict(max_positions=2048, norm_eps=1e-5, norm_eps_key="layer_norm_eps", ropes=ropes)
    sizes = read_sizes(
        hf, kv_heads=None, head_dim=None, activation=Activation.GELU, activations=PLAIN_ACTIVATIONS, **keys
    )
    bias = hf.flag("attention_bias", True)
    placement = Placement.PARALLEL_TWO if hf.flag("use_parallel_residual", True) else Placement.BEFORE
    hf.finish()
    feed_forward = sizes.dense(gated=False, bias=True)
    attention = sizes.attention(qkv_bias=bias, out_bias=bias)
    block = Block(attention, feed_forward, sizes.norm(center=True, bias=True), placement)
    return sizes.decoder("gpt_neox", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    block = config.blocks[0]
    return {
        **renamed_keys(config, {**_KEYS, "rms_norm_eps": "layer_norm_eps"}, drop=("num_key_value_heads", "head_dim")),
        "rotary_pct": config.ropes[0].partial,
        "attention_bias": config.kv_attention[0].qkv_bias,
        "use_parallel_residual": block.placement.is_parallel,
    }


_NAMES = {
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.layers": "gpt_neox.layers",
    "model.norm": "gpt_neox.final_layer_norm",
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "lm_head": "embed_out",
}
GPT_NEOX_TENSORS = tensor_table(
    renamed_tensors(_NAMES),
    *(
        Tensor(
            f"gpt_neox.layers.{{layer}}.attention.query_key_value.{kind}",
            tuple(f"layers.attention.{name}_proj.{kind}" for name in "qkv"),
            order=Order.BY_KV_HEAD,
        )
        for kind in ("weight", "bias")
    ),
)
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    config_from_hf,
    config_to_hf,
    GPT_NEOX_TENSORS,
    prefixes=(("lm_head.", "embed_out."),),
    derived=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
)
