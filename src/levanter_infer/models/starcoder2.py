"""StarCoder2: LayerNorm, biases, and a feed-forward block without a gate."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.activation import Activation
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import PLAIN_ACTIVATIONS, Family, read_sizes, renamed_keys, renamed_tensors
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import tensor_table


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    keys: dict[str, Any] = dict(max_positions=4096, tied=True, norm_eps=1e-5, norm_eps_key="norm_epsilon")
    sizes = read_sizes(
        hf, kv_heads=2, head_dim=None, activation=Activation.GELU_TANH, activations=PLAIN_ACTIVATIONS, **keys
    )
    bias, window = hf.flag("use_bias", True), hf.optional_count("sliding_window")
    hf.only("norm_type", "layer_norm")
    hf.only("mlp_type", "default")
    hf.finish()
    attention = sizes.attention(qkv_bias=bias, out_bias=bias, window=window)
    block = Block(attention, sizes.dense(gated=False, bias=bias), sizes.norm(center=True, bias=True))
    return sizes.decoder("starcoder2", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.kv_attention[0]
    keys = renamed_keys(config, {"rms_norm_eps": "norm_epsilon"})
    return {**keys, "use_bias": mixer.qkv_bias, "sliding_window": mixer.window}


STARCODER2_TENSORS = tensor_table(renamed_tensors({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}))
STARCODER2 = Family("starcoder2", "Starcoder2ForCausalLM", config_from_hf, config_to_hf, STARCODER2_TENSORS)
