"""Granite 4: Mamba-2 in most layers and attention in the others, a dense block or experts, Granite's multipliers."""

import math
from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.attention import AttentionBlock
from levanter_infer.layers.mamba2 import Mamba2Block
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Router
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family, Sizes, common_to_hf, read_sizes
from levanter_infer.models.granitemoe import GRANITEMOE_TENSORS
from levanter_infer.models.hf_config import FULL, HfConfig
from levanter_infer.models.tensors import Tensor

MAMBA, LINEAR, ATTENTION = "mamba", "linear_attention", "attention"
"""Entries of `layer_types`: as published, and as transformers 5 names them."""

UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Values of `time_step_limit`: as published, and as transformers 5 writes them."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig(raw)
    sizes = read_sizes(hf, kv_heads=None, head_dim=None, max_positions=2048)
    bias, has_rope = hf.flag("attention_bias", False), hf.raw.get("position_embedding_type") == "rope"
    hf.only("position_embedding_type", None, "nope", "rope")
    rope = {} if has_rope else {"rope": None}
    attention = sizes.attention(qkv_bias=bias, out_bias=bias, scale=hf.number("attention_multiplier", 1.0), **rope)
    mamba = read_mamba(hf, sizes, width=hf.count("mamba_expand", 2) * sizes.hidden_size)
    kinds = hf.names("layer_types", (MAMBA, LINEAR, ATTENTION, FULL)) or (MAMBA,) * sizes.num_layers
    if len(kinds) != sizes.num_layers:
        raise hf.fail("layer_types", f"one entry for each of num_hidden_layers={sizes.num_layers}")
    feed_forward, residual = _feed_forward(hf, sizes), hf.number("residual_multiplier", 1.0)
    embedding, divisor = hf.number("embedding_multiplier", 1.0), hf.number("logits_scaling", 1.0)
    hf.only("normalization_function", "rmsnorm")
    hf.ignore("init_method")
    hf.finish()
    blocks = [
        Block(mamba if kind in (MAMBA, LINEAR) else attention, feed_forward, sizes.norm(), residual_multiplier=residual)
        for kind in kinds
    ]
    return sizes.decoder("granitemoehybrid", blocks, embedding_multiplier=embedding, logits_divisor=divisor)


def read_mamba(hf: HfConfig, sizes: Sizes, width: int, out_bias: bool | None = None) -> Mamba2Block:
    """Mamba-2 from the keys that begin with `mamba_`.

    Args:
        width: numbers of all its heads.
        out_bias: None: as the projections of the input.
    """
    bias = hf.flag("mamba_proj_bias", False)
    heads = hf.count("mamba_n_heads", 128)
    size = width // heads
    if hf.raw.get("mamba_d_head", "auto") == "auto":
        hf.ignore("mamba_d_head")
    else:
        size = hf.count("mamba_d_head")
    if size * heads != width:
        raise hf.fail("mamba_n_heads", f"with mamba_d_head={size} numbers each, {width} together")
    hf.count("mamba_chunk_size", 256)  # how many tokens HF computes together
    hf.only("time_step_limit", None, *UNLIMITED)
    return Mamba2Block(
        num_heads=heads,
        head_size=size,
        num_groups=hf.count("mamba_n_groups", 1),
        state_size=hf.count("mamba_d_state", 256),
        taps=hf.count("mamba_d_conv", 4),
        norm_eps=sizes.norm_eps,
        conv_bias=hf.flag("mamba_conv_bias", True),
        bias=bias,
        out_bias=bias if out_bias is None else out_bias,
    )


def _feed_forward(hf: HfConfig, sizes: Sizes) -> DenseBlock | ExpertsBlock:
    shared = hf.count("shared_intermediate_size", 1024)
    number, chosen = hf.size("num_local_experts", 8), hf.size("num_experts_per_tok", 2)
    if number == 0:
        return DenseBlock(shared, sizes.activation)
    if not 0 < chosen <= number:
        raise hf.fail("num_experts_per_tok", f"1 to num_local_experts={number}")
    return ExpertsBlock(number, chosen, sizes.intermediate_size, Router(normalize=True), shared_width=shared)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    block, attention = config.blocks[0], config.kv_attention[0]
    mamba = next((b.recurrent for b in config.blocks if isinstance(b.recurrent, Mamba2Block)), None)
    experts = config.experts
    assert block.feed_forward is not None
    keys = {
        "attention_bias": attention.qkv_bias,
        "attention_multiplier": attention.scale,
        "position_embedding_type": None if attention.rope is None else "rope",
        "residual_multiplier": block.residual_multiplier,
        "embedding_multiplier": config.embedding_multiplier,
        "logits_scaling": config.logits_divisor,
        "shared_intermediate_size": block.feed_forward.width if experts is None else experts.shared_width,
        "num_local_experts": 0 if experts is None else experts.num_experts,
        "num_experts_per_tok": 0 if experts is None else experts.num_chosen,
        "layer_types": [ATTENTION if isinstance(b.mixer, AttentionBlock) else MAMBA for b in config.blocks],
    }
    if mamba is not None:
        keys |= {"mamba_expand": mamba.width // config.hidden_size, **mamba_to_hf(mamba)}
    return {**common_to_hf(config), **keys}


def mamba_to_hf(mamba: Mamba2Block) -> dict[str, Any]:
    """The keys of `read_mamba`."""
    return {
        "mamba_n_heads": mamba.num_heads,
        "mamba_d_head": mamba.head_size,
        "mamba_n_groups": mamba.num_groups,
        "mamba_d_state": mamba.state_size,
        "mamba_d_conv": mamba.taps,
        "mamba_conv_bias": mamba.conv_bias,
        "mamba_proj_bias": mamba.bias,
    }


def mamba_tensors(prefix: str) -> tuple[Tensor, ...]:
    """The tensors of Mamba-2 under a name."""
    names = {"a_log": "A_log", "dt_bias": "dt_bias", "skip": "D", "norm_weight": "norm.weight"}
    kinds = ("weight", "bias")
    return (
        *(Tensor(f"{prefix}.{name}", (f"layers.recurrent.{path}",)) for path, name in names.items()),
        *(Tensor(f"{prefix}.conv1d.{kind}", (f"layers.recurrent.conv.{kind}",)) for kind in kinds),
        *(Tensor(f"{prefix}.out_proj.{kind}", (f"layers.recurrent.out_proj.{kind}",)) for kind in kinds),
        *(
            Tensor(
                f"{prefix}.in_proj.{kind}",
                tuple(f"layers.recurrent.{part}_proj.{kind}" for part in ("z", "x", "b", "c", "dt")),
            )
            for kind in kinds
        ),
    )


def _shared(path: str) -> tuple[Tensor, ...]:
    """The dense block, whose parameters are at `path`."""
    name = "model.layers.{layer}.shared_mlp"
    return (
        Tensor(f"{name}.input_linear.weight", (f"{path}.gate_proj.weight", f"{path}.up_proj.weight")),
        Tensor(f"{name}.output_linear.weight", (f"{path}.down_proj.weight",)),
    )


GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    config_from_hf,
    config_to_hf,
    (
        *GRANITEMOE_TENSORS,
        *mamba_tensors("model.layers.{layer}.mamba"),
        *_shared("layers.mlp"),
        *_shared("layers.mlp.shared"),
    ),
)
