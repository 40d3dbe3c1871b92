"""Cohere 2 (Command-R7B, Command A): Cohere with a window in three of four layers; only these have a rope."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.cohere import cohere_to_hf, read_cohere
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import LLAMA_TENSORS, Family, windows_to_hf
from levanter_infer.models.hf_config import HfConfig


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes, bias, scale = read_cohere(hf, 1e4)
    window, pattern = hf.optional_count("sliding_window", 4096), hf.count("sliding_window_pattern", 4)
    windows = hf.windows(sizes.num_layers, window, lambda layer: (layer + 1) % pattern != 0)
    hf.only("use_qk_norm", False)
    # Published files have these keys of Cohere's own code; HF's class computes these values of them.
    for key in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding"):
        hf.only(key, True)
    hf.only("position_embedding_type", "rope_gptj")
    hf.only("order_of_interleaved_layers", "local_attn_first")
    hf.only("rotary_pct", 1.0)
    hf.only("layer_switch", pattern)
    hf.finish()
    blocks = []
    for window in windows:
        rope = {"rope": None} if window is None else {}
        attention = sizes.attention(qkv_bias=bias, out_bias=bias, window=window, **rope)
        blocks.append(Block(attention, sizes.dense(), sizes.norm(center=True), Placement.PARALLEL))
    return sizes.decoder("cohere2", blocks, logits_multiplier=scale)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**cohere_to_hf(config), **windows_to_hf(config)}


COHERE2 = Family("cohere2", "Cohere2ForCausalLM", config_from_hf, config_to_hf, LLAMA_TENSORS)
