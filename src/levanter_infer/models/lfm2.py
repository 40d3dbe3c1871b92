"""LFM2: gated short convolutions, and attention with norms of queries and keys in some layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.short_conv import ShortConvBlock
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Family, Sizes, common_to_hf, read_sizes
from levanter_infer.models.hf_config import FULL, HfConfig
from levanter_infer.models.tensors import tensor_table

CONV = "conv"
"""Entry of `layer_types`."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf, sizes = read_lfm2_sizes({"intermediate_size": 12288, **raw})
    dense = DenseBlock(_width(hf, sizes.intermediate_size), sizes.activation)
    blocks = lfm2_blocks(hf, sizes, [dense] * sizes.num_layers)
    hf.finish()
    return sizes.decoder("lfm2", blocks)


def read_lfm2_sizes(raw: Mapping[str, Any]) -> tuple[HfConfig, Sizes]:
    """The configuration and the sizes that all models have, without the layers."""
    names = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}  # of Liquid's own files
    instead = {new: raw[old] for old, new in names.items() if old in raw}
    hf = HfConfig({**{key: value for key, value in raw.items() if key not in names}, **instead})
    sizes = read_sizes(
        hf,
        kv_heads=8,
        head_dim=None,
        max_positions=128000,
        tied=True,
        norm_eps=1e-5,
        norm_eps_key="norm_eps",
        theta=1e6,
    )
    _read_own_keys(hf, sizes.hidden_size, sizes.num_heads)
    return hf, sizes


def lfm2_blocks(hf: HfConfig, sizes: Sizes, feed_forward: Sequence[DenseBlock | ExpertsBlock]) -> list[Block]:
    """The layers. Args: feed_forward: that of each."""
    conv = ShortConvBlock(sizes.hidden_size, hf.count("conv_L_cache", 3), hf.flag("conv_bias", False))
    kinds, norm = _kinds(hf, sizes.num_layers), sizes.norm()
    mixers = {FULL: sizes.attention(qk_norm=norm), CONV: conv}
    return [Block(mixers[kind], part, norm) for kind, part in zip(kinds, feed_forward, strict=True)]


def _read_own_keys(hf: HfConfig, hidden: int, heads: int) -> None:
    """Keys of Liquid's own files that repeat others, or say how weights were initialised."""
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        hf.only(key, hidden)
    hf.only("num_heads", heads)
    hf.only("block_use_swiglu", True)
    hf.only("use_pos_enc", True)
    for key in ("block_norm_eps", "block_mlp_init_scale", "block_out_init_scale"):
        hf.optional_number(key, None)
    hf.flag("block_use_xavier_init", True)
    hf.flag("conv_use_xavier_init", True)


def _width(hf: HfConfig, width: int) -> int:
    """Inner width of the feed-forward block, of the one that the file says."""
    multiple, factor = hf.count("block_multiple_of", 256), hf.optional_number("block_ffn_dim_multiplier", 1.0)
    if not hf.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _kinds(hf: HfConfig, num_layers: int) -> tuple[str, ...]:
    """The kind of every layer."""
    attends, kinds = hf.layers("full_attn_idxs", num_layers), hf.names("layer_types", (FULL, CONV))
    if kinds is None:
        is_every = hf.raw.get("full_attn_idxs") is None
        return tuple(FULL if is_every or layer in attends else CONV for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise hf.fail("layer_types", f"one entry for each of num_hidden_layers={num_layers}")
    return kinds


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {**lfm2_keys(config), "block_auto_adjust_ff_dim": False}


def lfm2_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys that all models write alike."""
    convs = [block.recurrent for block in config.blocks if isinstance(block.recurrent, ShortConvBlock)]
    keys = common_to_hf(config)
    own = {"norm_eps": keys.pop("rms_norm_eps")}
    if convs:
        own |= {"conv_L_cache": convs[0].taps, "conv_bias": convs[0].bias}
    return {**keys, **own, "layer_types": [CONV if block.attention is None else FULL for block in config.blocks]}


_LAYER = "model.layers.{layer}"
LFM2_NAMES = {
    **{path: name for path, name in TENSOR_NAMES.items() if not path.startswith("layers.mlp.")},
    "layers.input_norm.weight": f"{_LAYER}.operator_norm.weight",
    "layers.mlp_norm.weight": f"{_LAYER}.ffn_norm.weight",
    "layers.attention.o_proj.weight": f"{_LAYER}.self_attn.out_proj.weight",
    "layers.attention.q_norm.weight": f"{_LAYER}.self_attn.q_layernorm.weight",
    "layers.attention.k_norm.weight": f"{_LAYER}.self_attn.k_layernorm.weight",
    **{
        f"layers.recurrent.{name}.{kind}": f"{_LAYER}.conv.{name}.{kind}"
        for name in ("in_proj", "conv", "out_proj")
        for kind in ("weight", "bias")
    },
    **{
        f"layers.mlp.{name}_proj.weight": f"{_LAYER}.feed_forward.{other}.weight"
        for name, other in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    "norm.weight": "model.embedding_norm.weight",
}
LFM2 = Family("lfm2", "Lfm2ForCausalLM", config_from_hf, config_to_hf, tensor_table(LFM2_NAMES))
