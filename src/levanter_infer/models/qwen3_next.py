"""Qwen3-Next: gated DeltaNet in most layers, gated attention in the others, experts with a gated shared expert."""

from collections.abc import Mapping
from typing import Any

from levanter_infer.layers.delta_net import DeltaNetBlock
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Router
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import Family, Sizes, common_to_hf, read_sizes
from levanter_infer.models.hf_config import FULL, SLIDING, HfConfig
from levanter_infer.models.qwen2_moe import QWEN2_MOE_TENSORS
from levanter_infer.models.qwen3_moe import read_num_experts
from levanter_infer.models.tensors import Order, Tensor

LINEAR = "linear_attention"
"""Entry of `layer_types`."""


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises: ValueError naming the key that is unknown, malformed or not implemented."""
    hf = HfConfig({"intermediate_size": 5632, **raw})
    sizes = read_sizes(hf, kv_heads=2, head_dim=256, max_positions=32768, ropes=ropes)
    experts = read_experts(hf, 512, 10, hf.flag("norm_topk_prob", True))
    step, dense = hf.count("decoder_sparse_step", 1), hf.layers("mlp_only_layers", sizes.num_layers)
    feed_forward = [
        sizes.dense() if layer in dense or (layer + 1) % step else experts for layer in range(sizes.num_layers)
    ]
    mixers = read_mixers(hf, sizes)
    hf.finish()
    norm = sizes.norm(plus_one=True)
    return sizes.decoder(
        "qwen3_next", [Block(mixer, part, norm) for mixer, part in zip(mixers, feed_forward, strict=True)]
    )


def ropes(hf: HfConfig, head_dim: int, max_positions: int) -> dict:
    """Ropes of full and sliding layers."""
    return {kind: hf.rope(head_dim, max_positions, partial=True, default_partial=0.25) for kind in (FULL, SLIDING)}


def read_experts(hf: HfConfig, number: int, chosen: int, normalize: bool) -> ExpertsBlock:
    """The experts of a layer. Args: number, chosen: HF's defaults; normalize: as in `Router`."""
    number, chosen = read_num_experts(hf, number, chosen)
    width, shared = hf.count("moe_intermediate_size", 512), hf.count("shared_expert_intermediate_size", 512)
    return ExpertsBlock(number, chosen, width, Router(normalize=normalize), shared_width=shared, shared_gate=True)


def read_mixers(hf: HfConfig, sizes: Sizes) -> list:
    """The mixer of every layer."""
    bias, norm = hf.flag("attention_bias", False), sizes.norm(plus_one=True)
    hf.only("attn_output_gate", True)
    hf.only("mamba_ssm_dtype", "float32", None)
    delta_net = DeltaNetBlock(
        num_key_heads=hf.count("linear_num_key_heads", 16),
        num_value_heads=hf.count("linear_num_value_heads", 32),
        key_size=hf.count("linear_key_head_dim", 128),
        value_size=hf.count("linear_value_head_dim", 128),
        taps=hf.count("linear_conv_kernel_dim", 4),
        norm_eps=sizes.norm_eps,
    )
    attention = sizes.attention(qkv_bias=bias, out_bias=bias, qk_norm=norm, output_gate=True)
    interval, kinds = hf.count("full_attention_interval", 4), hf.names("layer_types", (FULL, LINEAR))
    if kinds is None:
        kinds = tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(sizes.num_layers))
    if len(kinds) != sizes.num_layers:
        raise hf.fail("layer_types", f"one entry for each of num_hidden_layers={sizes.num_layers}")
    return [attention if kind == FULL else delta_net for kind in kinds]


def mixers_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The keys of mixers, and those that all families have."""
    partial = config.ropes[0].partial  # written where it is one too: HF's default is a quarter
    bias = config.kv_attention[0].qkv_bias
    own = {"partial_rotary_factor": partial, "attention_bias": bias}
    return {**common_to_hf(config), **own, **delta_net_to_hf(config)}


def delta_net_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The keys of gated DeltaNet, and of the layers that have it."""
    kinds = [LINEAR if block.attention is None else FULL for block in config.blocks]
    delta_net = next((b.recurrent for b in config.blocks if isinstance(b.recurrent, DeltaNetBlock)), None)
    if delta_net is None:
        return {"layer_types": kinds}
    return {
        "linear_num_key_heads": delta_net.num_key_heads,
        "linear_num_value_heads": delta_net.num_value_heads,
        "linear_key_head_dim": delta_net.key_size,
        "linear_value_head_dim": delta_net.value_size,
        "linear_conv_kernel_dim": delta_net.taps,
        "layer_types": kinds,
    }


def experts_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The keys of experts."""
    experts = config.experts
    if experts is None:
        return {}
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.width,
        "shared_expert_intermediate_size": experts.shared_width,
    }


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    parts = [block.feed_forward for block in config.blocks]
    normalize = {} if config.experts is None else {"norm_topk_prob": config.experts.router.normalize}
    return {
        **mixers_to_hf(config),
        **experts_to_hf(config),
        **normalize,
        "intermediate_size": next((p.width for p in parts if isinstance(p, DenseBlock)), config.hidden_size),
        "mlp_only_layers": [layer for layer, part in enumerate(parts) if isinstance(part, DenseBlock)],
    }


_LINEAR = "model.layers.{layer}.linear_attn"
_GATED = tuple(
    Tensor(
        f"model.layers.{{layer}}.self_attn.q_proj.{kind}",
        (f"layers.attention.q_proj.{kind}", f"layers.attention.gate_proj.{kind}"),
        order=Order.BY_HEAD,
    )
    for kind in ("weight", "bias")
)
DELTA_NET_TENSORS = (
    *_GATED,
    Tensor(f"{_LINEAR}.conv1d.weight", tuple(f"layers.recurrent.{part}_conv.weight" for part in "qkv")),
    Tensor(f"{_LINEAR}.A_log", ("layers.recurrent.a_log",)),
    Tensor(f"{_LINEAR}.dt_bias", ("layers.recurrent.dt_bias",)),
    Tensor(f"{_LINEAR}.norm.weight", ("layers.recurrent.norm.weight",)),
    Tensor(f"{_LINEAR}.out_proj.weight", ("layers.recurrent.out_proj.weight",)),
)
"""Those of gated DeltaNet and gated attention that Qwen3-Next and Qwen3.5 share."""


def projections(name: str, parts: str, order: Order = Order.ONE_BY_ONE) -> Tensor:
    """A tensor with the rows of several projections."""
    return Tensor(f"{_LINEAR}.{name}.weight", tuple(f"layers.recurrent.{part}_proj.weight" for part in parts), order)


def with_delta_net(table: tuple[Tensor, ...], *others: Tensor) -> tuple[Tensor, ...]:
    """A table with the lines of gated DeltaNet and gated attention, in the stead of those of plain attention."""
    taken = {path for tensor in _GATED for path in tensor.parameters}
    return (*(tensor for tensor in table if not taken & set(tensor.parameters)), *DELTA_NET_TENSORS, *others)


MTP = ("mtp.",)
"""Starts of the names of tensors that predict several tokens at once."""
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    config_from_hf,
    config_to_hf,
    with_delta_net(
        QWEN2_MOE_TENSORS,
        projections("in_proj_qkvz", "qkvz", Order.BY_KEY_HEAD),
        projections("in_proj_ba", "ba", Order.BY_KEY_HEAD),
    ),
    unused=MTP,
)
