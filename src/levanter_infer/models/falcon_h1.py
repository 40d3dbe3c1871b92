"""Falcon-H1: attention and Mamba-2 side by side in every layer, and multipliers all over (µP)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.mamba2 import GatedNorm, Mamba2Block
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.models.blocks import Block, ParallelMixer
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family, common_to_hf, read_sizes, renamed_tensors
from levanter_infer.models.granitemoehybrid import mamba_tensors, mamba_to_hf, read_mamba
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import tensor_table


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=8, head_dim=None, max_positions=8192, norm_eps=1e-5)
    bias, proj_bias = hf.flag("attention_bias", False), hf.flag("projectors_bias", False)
    expanded = hf.count("mamba_expand", 2) * sizes.hidden_size
    mamba = read_mamba(hf, sizes, hf.count("mamba_d_ssm", 1024, null=expanded), out_bias=proj_bias)
    before, normed = hf.flag("mamba_norm_before_gate", True), hf.flag("mamba_rms_norm", False)
    into, factors = hf.number("ssm_in_multiplier", 1.0), hf.numbers("ssm_multipliers", 5)
    mamba = dataclasses.replace(
        mamba,
        norm=(GatedNorm.BEFORE if before else GatedNorm.AFTER) if normed else GatedNorm.NONE,
        multipliers=tuple(into * factor for factor in factors),
    )
    attention_in = hf.number("attention_in_multiplier", 1.0)  # of queries, keys and values
    mixer = ParallelMixer(
        sizes.attention(qkv_bias=bias, out_bias=bias),
        mamba,
        key_multiplier=hf.number("key_multiplier", 1.0) * attention_in**2,
        attention_multiplier=hf.number("attention_out_multiplier", 1.0) * attention_in,
        recurrent_multiplier=hf.number("ssm_out_multiplier", 1.0),
    )
    for name, factor, has_bias in (
        ("attention_in_multiplier", attention_in, bias),
        ("ssm_in_multiplier", into, mamba.bias),
    ):
        if has_bias and factor != 1:
            raise hf.fail(name, "1.0 with a bias behind it: the bias is not multiplied")
    gate, out = hf.numbers("mlp_multipliers", 2)
    feed_forward = sizes.dense(bias=hf.flag("mlp_bias", False), gate_multiplier=gate, out_multiplier=out)
    embedding, head = hf.number("embedding_multiplier", 1.0), hf.number("lm_head_multiplier", 1.0)
    for name in ("num_logits_to_keep", "layer_types", "layers_block_type"):
        hf.ignore(name)
    hf.finish()
    blocks = [Block(mixer, feed_forward, sizes.norm())] * sizes.num_layers
    return sizes.decoder("falcon_h1", blocks, embedding_multiplier=embedding, logits_multiplier=head)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    block = config.blocks[0]
    mixer, dense = block.mixer, block.feed_forward
    assert isinstance(mixer, ParallelMixer) and isinstance(dense, DenseBlock)
    mamba = mixer.recurrent
    assert isinstance(mamba, Mamba2Block)
    return {
        **common_to_hf(config),
        **mamba_to_hf(mamba),
        "mamba_d_ssm": mamba.width,
        "mamba_rms_norm": mamba.norm is not GatedNorm.NONE,
        "mamba_norm_before_gate": mamba.norm is GatedNorm.BEFORE,
        "projectors_bias": mamba.out_bias,
        "ssm_multipliers": list(mamba.multipliers),
        "ssm_out_multiplier": mixer.recurrent_multiplier,
        "attention_out_multiplier": mixer.attention_multiplier,
        "key_multiplier": mixer.key_multiplier,
        "attention_bias": mixer.unscaled_attention.qkv_bias,
        "mlp_bias": dense.bias,
        "mlp_multipliers": [dense.gate_multiplier, dense.out_multiplier],
        "embedding_multiplier": config.embedding_multiplier,
        "lm_head_multiplier": config.logits_multiplier,
    }


_NAMES = {
    "post_attention_layernorm": "pre_ff_layernorm",
    ".mlp.": ".feed_forward.",
    "model.norm": "model.final_layernorm",
}
FALCON_H1 = Family(
    "falcon_h1",
    "FalconH1ForCausalLM",
    config_from_hf,
    config_to_hf,
    (*tensor_table(renamed_tensors(_NAMES)), *mamba_tensors("model.layers.{layer}.mamba")),
)
