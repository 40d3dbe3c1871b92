"""StableLM: LayerNorm, a rope of a part of each head, and blocks one after the other or in parallel."""

import functools
from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, one_rope, read_sizes, renamed_keys
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    ropes = functools.partial(one_rope, partial=True, default_partial=0.25)
    keys: dict[str, Any] = dict(max_positions=4096, norm_eps=1e-5, norm_eps_key="layer_norm_eps", ropes=ropes)
    sizes = read_sizes(hf, kv_heads=32, head_dim=None, **keys)
    bias = hf.flag("use_qkv_bias", False)
    placement = Placement.PARALLEL if hf.flag("use_parallel_residual", False) else Placement.BEFORE
    hf.only("qk_layernorm", False)
    hf.finish()
    block = Block(sizes.attention(qkv_bias=bias), sizes.dense(), sizes.norm(center=True, bias=True), placement)
    return sizes.decoder("stablelm", [block] * sizes.num_layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {
        **renamed_keys(config, {"rms_norm_eps": "layer_norm_eps"}),
        "partial_rotary_factor": config.ropes[0].partial,
        "use_qkv_bias": config.kv_attention[0].qkv_bias,
        "use_parallel_residual": config.blocks[0].placement.is_parallel,
    }


STABLELM = Family("stablelm", "StableLmForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
