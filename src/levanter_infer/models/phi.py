"""Phi-1, Phi-1.5, Phi-2: blocks in parallel behind one LayerNorm, biases everywhere, the head's included."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import PLAIN_ACTIVATIONS, Family, one_rope, read_sizes, renamed_keys, renamed_tensors
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import tensor_table


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    ropes = functools.partial(one_rope, partial=True, default_partial=0.5)
    keys: dict[str, Any] = dict(max_positions=2048, norm_eps=1e-5, norm_eps_key="layer_norm_eps", ropes=ropes)
    sizes = read_sizes(
        hf, kv_heads=None, head_dim=None, activation=Activation.GELU_TANH, activations=PLAIN_ACTIVATIONS, **keys
    )
    norm = sizes.norm(center=True, bias=True)
    qk_norm = norm if hf.flag("qk_layernorm", False) else None
    hf.own_code("configuration_phi", "modeling_phi")
    hf.finish()
    attention = sizes.attention(qkv_bias=True, out_bias=True, qk_norm=qk_norm)
    block = Block(attention, sizes.dense(gated=False, bias=True), norm, Placement.PARALLEL)
    return sizes.decoder("phi", [block] * sizes.num_layers, head_bias=True)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.kv_attention[0]
    keys = renamed_keys(config, {"rms_norm_eps": "layer_norm_eps"})
    return {**keys, "partial_rotary_factor": config.ropes[0].partial, "qk_layernorm": mixer.qk_norm is not None}


_NAMES = {
    "model.norm": "model.final_layernorm",
    "self_attn.o_proj": "self_attn.dense",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
PHI = Family("phi", "PhiForCausalLM", config_from_hf, config_to_hf, tensor_table(renamed_tensors(_NAMES)))
