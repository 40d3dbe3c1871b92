"""Gemma 3, its text model: Gemma 2 with norms of queries and keys, and another rope in layers with a window."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family, common_to_hf, ropes_by_kind_to_hf
from levanter_infer.models.gemma import read_gemma
from levanter_infer.models.gemma2 import GEMMA2_TENSORS, gemma2_decoder, gemma2_keys
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.multimodal import LLAVA_PREFIXES, LLAVA_UNUSED, Parent


def ropes(hf: HfConfig, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    return hf.ropes_by_kind(head_dim, max_positions, theta=1e6, local_theta=1e4)


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_gemma(hf, kv_heads=4, max_positions=131072, ropes=ropes)
    bias = hf.flag("attention_bias", False)
    scale = hf.count("query_pre_attn_scalar", 256) ** -0.5
    hf.only("attn_logit_softcapping", None)  # HF's Gemma 3 does not apply it
    final_cap = hf.optional_number("final_logit_softcapping", None)
    window, pattern = hf.optional_count("sliding_window", 4096), hf.count("sliding_window_pattern", 6)
    hf.only("use_qk_norm", True)  # Levanter writes it
    hf.count("_sliding_window_pattern", 6)  # transformers writes it, and reads the other
    windows = hf.windows(sizes.num_layers, window, lambda layer: (layer + 1) % pattern != 0)
    hf.finish()
    fields = dict(qkv_bias=bias, out_bias=bias, qk_norm=sizes.norm(plus_one=True), scale=scale)
    return gemma2_decoder("gemma3_text", sizes, windows, final_cap, **fields)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**common_to_hf(config, ropes_by_kind_to_hf(config)), **gemma2_keys(config)}


def text_config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """The text model of Gemma 3 with vision, whose files leave out keys that have HF's defaults."""
    sizes = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216}
    return config_from_hf({**sizes, "num_hidden_layers": 26, "num_attention_heads": 8, **raw})


GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", config_from_hf, config_to_hf, GEMMA2_TENSORS)
GEMMA3_WITH_VISION = Parent(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    (dataclasses.replace(GEMMA3, config_from_hf=text_config_from_hf),),
    ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    prefixes=LLAVA_PREFIXES,
    unused=LLAVA_UNUSED,
)
