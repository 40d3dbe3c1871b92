"""Parts that families with experts share: the layers that have experts, DeepSeek-V3's keys, tables of tensors."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock
from levanter_infer.layers.router import Groups, Router, Score, SelectionBias
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.family import TENSOR_NAMES, Sizes
from levanter_infer.models.hf_config import HfConfig
from levanter_infer.models.tensors import Tensor, tensor_table


def stacked_experts(experts: str, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """The lines of all experts of a layer in two tensors, [expert, ., .]. Args: experts: start of their names."""
    gate_up = ("layers.mlp.gate_proj.weight", "layers.mlp.up_proj.weight")
    return (
        Tensor(f"{experts}.gate_up_proj", gate_up, transposed=transposed, stacked_experts=True),
        Tensor(f"{experts}.down_proj", ("layers.mlp.down_proj.weight",), transposed=transposed, stacked_experts=True),
    )


MIXTRAL_ROUTER = (".mlp.gate.", ".block_sparse_moe.gate.")
"""`Family.renamed`: the name of Mixtral's router in the memory of transformers 5, which adapters of PEFT have, and that
in files."""


def tensors_by_expert(experts: str) -> tuple[Tensor, ...]:
    """The lines of gated experts that have a tensor for each matrix. Args: experts: the start of the names."""
    return tuple(
        Tensor(f"{experts}.{{expert}}.{name}_proj.weight", (f"layers.mlp.{name}_proj.weight",))
        for name in ("gate", "up", "down")
    )


def feed_forwards(
    num_layers: int,
    experts: ExpertsBlock,
    dense: DenseBlock,
    *,
    first: int = 0,
    last: int | None = None,
    step: int = 1,
    without: Collection[int] = (),
) -> list[ExpertsBlock | DenseBlock]:
    """The feed-forward block of each layer.

    Args:
        first, last: layers before the first and after the last are dense; last None: no layer is the last.
        step: of the others, only every `step`-th layer has experts, counted from the model's first layer.
        without: further dense layers.
    """
    last = num_layers - 1 if last is None else last

    def has_experts(layer: int) -> bool:
        return first <= layer <= last and (layer + 1) % step == 0 and layer not in without

    return [experts if has_experts(layer) else dense for layer in range(num_layers)]


def dense_layers(config: DecoderConfig) -> list[int]:
    """The layers without experts."""
    return [layer for layer, block in enumerate(config.blocks) if isinstance(block.feed_forward, DenseBlock)]


def dense_width(config: DecoderConfig) -> int:
    """Inner width of the layers without experts; where there is none, one that files may have all the same."""
    parts = (block.feed_forward for block in config.blocks)
    return next((part.width for part in parts if isinstance(part, DenseBlock)), config.hidden_size)


def check_chosen(hf: HfConfig, key: str, chosen: int, experts: int) -> int:
    """`chosen`, of this key. Raises: ValueError if it exceeds the number of experts."""
    if chosen > experts:
        raise hf.fail(key, f"at most the number of experts, {experts}")
    return chosen


def read_deepseek_experts(hf: HfConfig, sizes: Sizes, **defaults: Any) -> ExpertsBlock:
    """Experts with DeepSeek-V3's router: sigmoids, a selection bias and groups. Args: as in `read_grouped_experts`."""
    hf.only("scoring_func", "sigmoid")
    hf.only("topk_method", "noaux_tc")
    router = Router(Score.SIGMOID, selection_bias=SelectionBias.ON_SCORES, exact_logits=True)
    return read_grouped_experts(hf, sizes, router, **defaults)


def read_grouped_experts(
    hf: HfConfig,
    sizes: Sizes,
    router: Router,
    *,
    experts: int,
    chosen: int,
    width: int,
    groups: tuple[int, int],
    scale: float,
    left_out: float = -math.inf,
) -> ExpertsBlock:
    """Experts with DeepSeek-V3's keys.

    Args:
        router: what the keys do not say of it.
        experts, chosen, width, groups, scale: HF's defaults.
        left_out: as in `Groups`.
    """
    experts = hf.count("n_routed_experts", experts)
    chosen = check_chosen(hf, "num_experts_per_tok", hf.count("num_experts_per_tok", chosen), experts)
    width, num_shared = hf.count("moe_intermediate_size", width), hf.size("n_shared_experts", 1)
    router = dataclasses.replace(
        router,
        normalize=hf.flag("norm_topk_prob", True),
        sum_eps=1e-20,
        scale=hf.number("routed_scaling_factor", scale),
        groups=read_groups(hf, experts, chosen, groups, left_out=left_out),
    )
    return ExpertsBlock(experts, chosen, width, router, sizes.activation, shared_width=num_shared * width or None)


def read_groups(
    hf: HfConfig, experts: int, chosen: int, defaults: tuple[int, int], *, left_out: float = -math.inf
) -> Groups | None:
    """The groups of experts; None where there is one group only.

    Args:
        defaults: HF's, of both keys.
        left_out: as in `Groups`.
    """
    number = hf.count("n_group", defaults[0], null=1)
    best = hf.count("topk_group", defaults[1], null=1)
    if experts % number or best > number:
        raise hf.fail("n_group", f"a divisor of the number of experts, {experts}, and at least topk_group={best}")
    if experts // number * best < chosen:
        raise hf.fail("topk_group", f"enough groups of {experts // number} experts for num_experts_per_tok={chosen}")
    return None if best == number else Groups(number, best, left_out=left_out)


DENSE, SPARSE = "dense", "sparse"
"""Entries of `mlp_layer_types`."""


def read_sparse_layers(hf: HfConfig, experts: ExpertsBlock, dense: DenseBlock, num_layers: int) -> list:
    """The feed-forward block of each layer, from `mlp_layer_types` or, in files before transformers 5, from
    `first_k_dense_replace`."""
    first = hf.size("first_k_dense_replace", 1)
    kinds = hf.names("mlp_layer_types", (DENSE, SPARSE))
    if kinds is None:
        return feed_forwards(num_layers, experts, dense, first=first)
    if len(kinds) != num_layers:
        raise hf.fail("mlp_layer_types", f"one entry for each of num_hidden_layers={num_layers}")
    return [experts if kind == SPARSE else dense for kind in kinds]


def sparse_layers_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `read_sparse_layers`."""
    dense = dense_layers(config)
    return {"mlp_layer_types": [DENSE if layer in dense else SPARSE for layer in range(config.num_layers)]}


def deepseek_experts_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The keys of all feed-forward blocks: of the experts, and of the dense layers before them."""
    keys = {"first_k_dense_replace": len(dense_layers(config)), "intermediate_size": dense_width(config)}
    return keys if config.experts is None else {**keys, **router_to_hf(config.experts)}


def router_to_hf(experts: ExpertsBlock) -> dict[str, Any]:
    """The inverse of `read_grouped_experts`."""
    groups = experts.router.groups or Groups(1, 1)
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.width,
        "n_shared_experts": (experts.shared_width or 0) // experts.width,
        "norm_topk_prob": experts.router.normalize,
        "routed_scaling_factor": experts.router.scale,
        "n_group": groups.number,
        "topk_group": groups.chosen,
    }


def expert_tensors(
    block: str,
    *others: Tensor,
    dense: str | None = None,
    router: str = "gate",
    experts: str = "experts",
    shared: str = "shared_experts",
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Tensor, ...]:
    """The lines of Llama, with experts beside the dense blocks: each in tensors of its own.

    Args:
        block: HF's name of the feed-forward block in a layer.
        others: lines that stand for these, or beside them.
        dense: HF's name of the block in layers without experts; None: the same.
        router, experts, shared: parts of the block.
        names: HF's names of the maps of an expert.
    """
    prefix, maps = f"model.layers.{{layer}}.{block}", ("gate_proj", "up_proj", "down_proj")
    of_mlp = {path: name for path, name in TENSOR_NAMES.items() if path.startswith("layers.mlp.")}
    lines = {path: name for path, name in TENSOR_NAMES.items() if path not in of_mlp}
    lines |= {f"layers.mlp.router.{kind}": f"{prefix}.{router}.{kind}" for kind in ("weight", "bias")}
    lines |= {f"layers.mlp.shared.{name}.weight": f"{prefix}.{shared}.{name}.weight" for name in maps}
    lines |= {
        f"layers.mlp.{ours}.weight": f"{prefix}.{experts}.{{expert}}.{name}.weight"
        for ours, name in zip(maps, names, strict=True)
    }
    of_dense = (Tensor(name.replace(".mlp.", f".{dense or block}."), (path,)) for path, name in of_mlp.items())
    return (*of_dense, *tensor_table(lines, *others))


SELECTION_BIAS = "layers.mlp.selection_bias"
DEEPSEEK_EXPERT_TENSORS = expert_tensors(
    "mlp", Tensor("model.layers.{layer}.mlp.gate.e_score_correction_bias", (SELECTION_BIAS,))
)
