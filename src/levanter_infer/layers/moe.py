"""The feed-forward block of a mixture of experts: each token goes through the few that its router chooses."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import EXPERT, EXPERT_LATENT, MLP, ROW, SHARED_GATE
from levanter_infer.kernels.backend import Backend
from levanter_infer.layers.activation import Activation, ClampedSwiglu
from levanter_infer.layers.linear import Fusion, Linear, apply, apply_grouped, by_rows, fold_key, split_key
from levanter_infer.layers.mlp import DenseBlock, Mlp
from levanter_infer.layers.norm import NormConfig, RMSNorm
from levanter_infer.layers.router import Router, SelectionBias
from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis
from levanter_infer.layers.stack import pick_layer


@dataclass(frozen=True)
class ExpertsBlock:
    """A feed-forward block of experts, without its parameters."""

    num_experts: int
    num_chosen: int
    """Experts of each token."""
    width: int
    """Inner width of one expert."""
    router: Router
    activation: Activation | ClampedSwiglu = Activation.SILU
    """Activation of the gate of each expert."""
    bias: bool = False
    """Whether the maps of the experts have biases; the shared expert has none."""
    shared_width: int | None = None
    """Inner width of the shared expert, which every token goes through; None: there is none."""
    norms: NormConfig | None = None
    """Norms of the input and of the result of the experts, and of the result of the shared expert (Gemma 4); the norm
    of the feed-forward block is that of the input of the shared expert alone. None: there are none."""
    num_shared: int | None = None
    """Shared experts of that width, each of its own tensors (GrugMoE 2); None: there is one at most."""
    latent_dim: int | None = None
    """Numbers of the latent of a token that the experts map to one of their result (GrugMoE 2); None: they see the
    residual stream."""
    latent_norm: NormConfig | None = None
    """Norm of the latent that the experts see; None: there is none (Nemotron 3 Super)."""
    shared_gate: bool = False
    """Whether the result of the shared expert is multiplied by sigmoid(shared_gate(x)), one number per token."""
    gated: bool = True
    """Whether the experts, the shared one too, have a gate, as in `DenseBlock`."""

    @property
    def stored(self) -> "ExpertsBlock":
        """The block with neutral options that no parameter depends on: blocks that are equal here share a stack."""
        return dataclasses.replace(self, num_chosen=1, router=self.router.stored, activation=Activation.SILU)

    @property
    def shared(self) -> DenseBlock:
        """The shared expert as a block of its own. Requires: there is one."""
        assert self.shared_width is not None and isinstance(self.activation, Activation)
        return DenseBlock(self.shared_width, self.activation, gated=self.gated)

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        router = hidden + self.router.bias + (self.router.selection_bias is not SelectionBias.NONE)
        num_shared = 1 if self.num_shared is None else self.num_shared
        shared = self._num_maps * hidden * (self.shared_width or 0) * num_shared + hidden * self.shared_gate
        latent = 2 * hidden * (self.latent_dim or 0)
        if self.latent_norm is not None:
            latent += self.latent_norm.num_parameters(self.latent_dim or 0)
        norms = sum(norm.num_parameters(hidden) for norm in (self.router.norm, *[self.norms] * 3) if norm is not None)
        router += self.router.expert_scale
        return self.num_expert_parameters(hidden) + self.num_experts * router + shared + latent + norms

    def num_expert_parameters(self, hidden: int) -> int:
        """Those of the experts that are chosen from, without the router. Args: as in `num_parameters`."""
        size = self.latent_dim or hidden
        biases = ((self._num_maps - 1) * self.width + size) * self.bias
        return self.num_experts * (self._num_maps * size * self.width + biases)

    @property
    def _num_maps(self) -> int:
        return 3 if self.gated else 2


class Moe(eqx.Module):
    """`sum of weight · down(activation(gate(x)) · up(x))` over the experts that the router chooses, or without a gate.

    Tokens are sorted by expert, and the backend computes a grouped matmul (`Backend.grouped_linear`), in which an
    expert without tokens costs nothing.
    Source: sparsely gated experts, arXiv:1701.06538.
    """

    router: Linear
    """[layers, expert, embed]"""
    gate_proj: Linear | None
    """None: the experts are not gated."""
    up_proj: Linear
    """[layers, expert, mlp, embed], of experts of latents with those in the stead of embed."""
    down_proj: Linear
    """[layers, expert, embed, mlp], as these."""
    num_rows: Array | None = None
    """i32[], how many tokens count."""
    experts: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """How the experts are sharded (expert parallel): each device computes its own for the tokens that chose them."""
    sums: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """Mesh axes over which results are added up: experts, and the shards of each."""
    shared: Mlp | None = None
    """The shared expert."""
    shared_gate: Linear | None = None
    """[layers, shared_gate, embed], with one output."""
    selection_bias: NamedArray | None = None
    """f32[layers, expert], of the choice alone."""
    router_norm: RMSNorm | None = None
    """Norm of the router's input, if it has one of its own."""
    expert_scale: NamedArray | None = None
    """[layers, expert], factors of the weights."""
    in_norm: RMSNorm | None = None
    out_norm: RMSNorm | None = None
    shared_out_norm: RMSNorm | None = None
    """As `ExpertsBlock.norms`."""
    shared_experts: tuple[Mlp, ...] = ()
    """The shared experts, where a block has several."""
    latent_down: Linear | None = None
    """[layers, expert_latent, embed]"""
    latent_norm: RMSNorm | None = None
    """[layers, expert_latent]"""
    latent_up: Linear | None = None
    """[layers, embed, expert_latent]"""

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, block: ExpertsBlock, *, key: Array | None, dtype) -> "Moe":
        """Random maps as in `Linear.init`; `batch`: axes of independent layers."""
        expert, mlp = Axis(EXPERT, block.num_experts), Axis(MLP, block.width)
        router, gate, up, down = split_key(key, 4)
        each, inner = (*batch, expert), embed
        latent: dict[str, Any] = {}
        if block.latent_dim is not None:
            inner, (up_key, down_key) = Axis(EXPERT_LATENT, block.latent_dim), split_key(fold_key(key, 3), 2)
            latent["latent_down"] = Linear.init(batch, (inner,), (embed,), key=down_key, dtype=dtype)
            if block.latent_norm is not None:
                latent["latent_norm"] = RMSNorm.init(batch, inner, config=block.latent_norm, dtype=dtype)
            latent["latent_up"] = Linear.init(batch, (embed,), (inner,), key=up_key, dtype=dtype)
        shared, shared_gate, several = None, None, ()
        if block.shared_width is not None and block.num_shared is not None:
            shared_keys = split_key(fold_key(key, 1), block.num_shared)
            several = tuple(Mlp.init(batch, embed, block.shared, key=one, dtype=dtype) for one in shared_keys)
        elif block.shared_width is not None:
            shared = Mlp.init(batch, embed, block.shared, key=fold_key(key, 1), dtype=dtype)
        if block.shared_gate:
            gate_key = fold_key(key, 2)
            shared_gate = Linear.init(batch, (Axis(SHARED_GATE, 1),), (embed,), key=gate_key, dtype=dtype)

        def expert_map(out: Axis, into: Axis, key: Array | None) -> Linear:
            return Linear.init(each, (out,), (into,), key=key, dtype=dtype, bias=block.bias)

        has_selection_bias = block.router.selection_bias is not SelectionBias.NONE

        def norm(config: NormConfig | None) -> RMSNorm | None:
            return None if config is None else RMSNorm.init(batch, embed, config=config, dtype=dtype)

        router_dtype = jnp.float32 if block.router.float32 else dtype
        return Moe(
            router=Linear.init(batch, (expert,), (embed,), key=router, dtype=router_dtype, bias=block.router.bias),
            gate_proj=expert_map(mlp, inner, gate) if block.gated else None,
            up_proj=expert_map(mlp, inner, up),
            down_proj=expert_map(inner, mlp, down),
            shared=shared,
            shared_gate=shared_gate,
            selection_bias=hax.zeros((*batch, expert), dtype=jnp.float32) if has_selection_bias else None,
            expert_scale=hax.ones((*batch, expert), dtype=dtype) if block.router.expert_scale else None,
            router_norm=norm(block.router.norm),
            in_norm=norm(block.norms),
            out_norm=norm(block.norms),
            shared_out_norm=norm(block.norms),
            shared_experts=several,
            **latent,
        )

    def at(self, layer: Array, num_rows: Array) -> "Moe":
        """The block of one layer of a stack, for inputs whose first `num_rows` rows count. Nothing is sliced here."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        maps = {name: part for name, part in parts.items() if isinstance(part, Linear | Mlp | RMSNorm | tuple)}
        at = jax.tree.map(
            lambda part: part.at(layer, num_rows), maps, is_leaf=lambda part: isinstance(part, Linear | RMSNorm)
        )
        numbers = {"selection_bias": self.selection_bias, "expert_scale": self.expert_scale}
        at |= {name: pick_layer(part, layer) for name, part in numbers.items() if part is not None}
        return dataclasses.replace(self, **at, num_rows=num_rows)

    def __call__(
        self, x: NamedArray, around: Fusion, block: ExpertsBlock, on_choice: Callable[[Array], None] | None = None
    ) -> NamedArray:
        """The block.

        Args:
            x: [..., embed]
            around: the norm of its input, and what is added.
            on_choice: called with the experts of each row, i32[row, chosen], of all devices.
        Returns: [..., embed].
        """
        embed = x.axes[-1]
        rows = NamedArray(x.array.reshape(-1, embed.size), (Axis(ROW, x.array.size // embed.size), embed))
        in_norm = around.norm if self.in_norm is None else self.in_norm
        chosen, weights = self._route(rows, in_norm if self.router_norm is None else self.router_norm, block)
        if on_choice is not None:
            on_choice(chosen)
        seen, norm = self._latents(rows, in_norm), in_norm if self.latent_down is None else None
        total = self.sums.sum_in(x.dtype, self._compute(seen, norm, chosen, weights, block)).astype(x.dtype)
        if self.latent_up is not None:
            total = apply(NamedArray(total, seen.axes), self.latent_up)[0].array
        total = self._normed(self.out_norm, total, embed)
        for shared in (*([] if self.shared is None else [self.shared]), *self.shared_experts):
            result = self._share(shared, rows, around.norm, block)
            total = total + self._normed(self.shared_out_norm, result, embed)
        return around.after(NamedArray(total.reshape(x.array.shape), x.axes))

    def _normed(self, norm: RMSNorm | None, rows: Array, embed: Axis) -> Array:
        """Rows [row, embed] with a norm, if there is one."""
        if norm is None:
            return rows
        return norm.by_rows(NamedArray(rows, (Axis(ROW, rows.shape[0]), embed)), self.router.by_rows).array

    def _latents(self, rows: NamedArray, norm: RMSNorm | None) -> NamedArray:
        """Inputs of the experts, before the norm if they are the rows [row, embed] themselves."""
        if self.latent_down is None:
            return rows
        (latents,) = apply(rows, self.latent_down, norm=norm)
        norm = self.latent_norm
        return latents if norm is None else norm.by_rows(latents, self.latent_down.by_rows)

    def _share(self, shared: Mlp, rows: NamedArray, norm: RMSNorm | None, block: ExpertsBlock) -> Array:
        """Result of the shared expert [row, embed]."""
        result = shared(rows, Fusion(norm=norm), block.shared).array
        if self.shared_gate is None:
            return result
        (gate,) = apply(rows, self.shared_gate, norm=norm, dtype=jnp.float32)

        def gated(gate: Array, result: Array) -> list[Array]:
            return [(jax.nn.sigmoid(gate) * result.astype(jnp.float32)).astype(result.dtype)]

        return self._backend.by_rows(gated, self.num_rows, gate.array, result)[0]

    def _route(self, rows: NamedArray, norm: RMSNorm | None, block: ExpertsBlock) -> tuple[Array, Array]:
        """Experts of each row i32[row, chosen], and their weights f32[row, chosen]."""
        router = block.router
        if router.float32 and rows.dtype != jnp.float32:  # after the norm, whose result has the dtype of the rows
            rows, norm = (rows if norm is None else norm.by_rows(rows, self.router.by_rows)).astype(jnp.float32), None
        with jax.default_matmul_precision("highest" if router.float32 else None):
            (own,) = apply(rows, self.router, norm=norm, dtype=jnp.float32 if router.exact_logits else None)
        logits = self.experts.all_gather(own.rearrange((ROW, ...)).array.astype(jnp.float32), 1)
        bias, scale = (
            None if part is None else self.experts.all_gather(part.array.astype(jnp.float32), 0)
            for part in (self.selection_bias, self.expert_scale)
        )
        chosen, weights = self._backend.by_rows(
            lambda logits: list(router.choose(logits, block.num_chosen, bias, scale)), self.num_rows, logits
        )
        return chosen, weights

    @property
    def _backend(self) -> Backend:
        return self.down_proj.backend

    @property
    def _num_experts(self) -> int:
        """Number of local experts."""
        return self.router.outs[0].size

    def _sorted(self, chosen: Array) -> tuple[Array, Array]:
        """Indices into flattened `chosen`, sorted by expert, i32[row · chosen]; and the number of each local expert,
        i32[expert]. Rows that do not count, or have chosen experts of other devices, come last and belong to none."""
        flat = chosen.reshape(-1) - self.experts.index * self._num_experts
        flat = jnp.where((flat >= 0) & (flat < self._num_experts), flat, self._num_experts)
        if self.num_rows is not None:
            place = jnp.arange(flat.shape[0], dtype=jnp.int32)
            flat = jnp.where(place < self.num_rows * chosen.shape[1], flat, self._num_experts)
        counts = jnp.zeros(self._num_experts, jnp.int32).at[flat].add(1, mode="drop")
        return jnp.argsort(flat, stable=True).astype(jnp.int32), counts

    def _compute(
        self, rows: NamedArray, norm: RMSNorm | None, chosen: Array, weights: Array, block: ExpertsBlock
    ) -> Array:
        """Weighted sum of the results of each row's experts, f32 like `rows`; zeros for experts of other devices."""
        order, counts = self._sorted(chosen)
        pairs, source = Axis(ROW, order.shape[0]), order // chosen.shape[1]
        if block.router.weigh_inputs:
            normed = rows if norm is None else norm.by_rows(rows, self.router.by_rows)
            rows, norm, source = _weighted(normed, weights), None, order
            weights = jnp.ones_like(weights)
        grouped = functools.partial(apply_grouped, axis=pairs, counts=counts)
        gate = None
        if self.gate_proj is not None:
            gate, up = grouped(rows, self.gate_proj, self.up_proj, rows=source, norm=norm)
        else:
            activation = block.activation
            assert isinstance(activation, Activation)
            (up,) = grouped(rows, self.up_proj, rows=source, norm=norm)
            used = None if self.num_rows is None else jnp.sum(counts)
            up = by_rows(self._backend, used, lambda up: NamedArray(activation(up.array), up.axes), up)
        down = self._biased_once(self.down_proj)
        (results,) = grouped(up, down, gate=gate, activation=block.activation, dtype=jnp.float32)
        places = jnp.zeros_like(order).at[order].set(jnp.arange(pairs.size, dtype=jnp.int32))
        return self._backend.combine(results.array, places.reshape(chosen.shape), weights, self.num_rows)

    def _biased_once(self, down: Linear) -> Linear:
        """The map of one expert to the residual stream: one device of those with its shards has the bias."""
        if down.bias is None or down.shard_axis.parts == 1:
            return down
        bias = jnp.where(down.shard_axis.index == 0, down.bias.array, 0)
        return dataclasses.replace(down, bias=NamedArray(bias, down.bias.axes))


def _weighted(rows: NamedArray, weights: Array) -> NamedArray:
    """Each row times each of its weights, [row · chosen, embed]."""
    _, embed = rows.axes
    weighted = rows.array[:, None] * weights.astype(rows.dtype)[:, :, None]
    return NamedArray(weighted.reshape(-1, embed.size), (Axis(ROW, weights.size), embed))
