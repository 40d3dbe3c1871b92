"""The feed-forward block of a mixture of experts: each token goes through the few that its router chooses."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import EXPERT, MLP, ROW, SHARED_GATE
from levanter_infer.kernels import MIN_ROWS
from levanter_infer.layers.activation import Activation, ClampedSwiglu
from levanter_infer.layers.linear import Fusion, Linear, apply, split_key
from levanter_infer.layers.mlp import DenseBlock, Mlp
from levanter_infer.layers.router import Router, SelectionBias
from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis
from levanter_infer.layers.stack import pick_layer

_MAX_BLOCK = 128


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
    shared_gate: bool = False
    """Whether the result of the shared expert is multiplied by sigmoid(shared_gate(x)), one number per token."""

    @property
    def stored(self) -> "ExpertsBlock":
        """The block with neutral options that no parameter depends on: blocks that are equal here share a stack."""
        return dataclasses.replace(self, num_chosen=1, router=self.router.stored, activation=Activation.SILU)

    @property
    def unfused(self) -> str:
        """The part that no kernel fuses with a matmul."""
        return "experts"

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        router = hidden + self.router.bias + (self.router.selection_bias is not SelectionBias.NONE)
        shared = 3 * hidden * (self.shared_width or 0) + hidden * self.shared_gate
        return self.num_expert_parameters(hidden) + self.num_experts * router + shared

    def num_expert_parameters(self, hidden: int) -> int:
        """Those of the experts that are chosen from, without the router. Args: as of `num_parameters`."""
        biases = (2 * self.width + hidden) * self.bias
        return self.num_experts * (3 * hidden * self.width + biases)


class Moe(eqx.Module):
    """`sum of weight · down(activation(gate(x)) · up(x))` over the experts that the router chooses.

    Tokens are sorted by expert. In the paged forward each expert's tokens are computed in blocks of a fixed size by
    the same matmuls as everything else, so that an expert without tokens costs nothing, and what a token gets does
    not depend on the other tokens of its block. The plain forward leaves that to `jax.lax.ragged_dot`, which has a
    gradient.
    Source: sparsely gated experts, arXiv:1701.06538.
    """

    router: Linear
    """[layers, expert, embed]"""
    gate_proj: Linear
    up_proj: Linear
    """[layers, expert, mlp, embed]"""
    down_proj: Linear
    """[layers, expert, embed, mlp]"""
    layer: Array | None = None
    """i32[], which layer of the stack is meant; None where a scan has picked one."""
    num_rows: Array | None = None
    """i32[], how many tokens count."""
    experts: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """How the experts are sharded (expert parallel): each device computes its own for the tokens that chose them."""
    sums: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """Mesh axes over which results are added up: experts, and the shards of each."""
    inner: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """How the inner width of each expert is sharded (tensor parallel)."""
    shared: Mlp | None = None
    """The shared expert."""
    shared_gate: Linear | None = None
    """[layers, shared_gate, embed], with one output."""
    selection_bias: NamedArray | None = None
    """f32[layers, expert], of the choice alone."""

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, block: ExpertsBlock, *, key: Array | None, dtype) -> "Moe":
        """Random maps as in `Linear.init`; `batch`: axes of independent layers."""
        expert, mlp = Axis(EXPERT, block.num_experts), Axis(MLP, block.width)
        router, gate, up, down = split_key(key, 4)
        each = (*batch, expert)
        shared = shared_gate = None
        if block.shared_width is not None:
            dense = DenseBlock(block.shared_width, block.activation)
            shared = Mlp.init(batch, embed, dense, key=_fold_in(key, 1), dtype=dtype)
        if block.shared_gate:
            gate_key = _fold_in(key, 2)
            shared_gate = Linear.init(batch, (Axis(SHARED_GATE, 1),), (embed,), key=gate_key, dtype=dtype)
        has_selection_bias = block.router.selection_bias is not SelectionBias.NONE
        router_dtype = jnp.float32 if block.router.float32 else dtype
        return Moe(
            router=Linear.init(batch, (expert,), (embed,), key=router, dtype=router_dtype, bias=block.router.bias),
            gate_proj=Linear.init(each, (mlp,), (embed,), key=gate, dtype=dtype, bias=block.bias),
            up_proj=Linear.init(each, (mlp,), (embed,), key=up, dtype=dtype, bias=block.bias),
            down_proj=Linear.init(each, (embed,), (mlp,), key=down, dtype=dtype, bias=block.bias),
            shared=shared,
            shared_gate=shared_gate,
            selection_bias=hax.zeros((*batch, expert), dtype=jnp.float32) if has_selection_bias else None,
        )

    def at(self, layer: Array, num_rows: Array) -> "Moe":
        """The block of one layer of a stack, for inputs whose first `num_rows` rows count. Nothing is sliced here."""
        parts = {"router": self.router, "shared": self.shared, "shared_gate": self.shared_gate}
        at = jax.tree.map(lambda part: part.at(layer, num_rows), parts, is_leaf=lambda part: isinstance(part, Linear))
        bias = None if self.selection_bias is None else pick_layer(self.selection_bias, layer)
        return dataclasses.replace(self, **at, selection_bias=bias, layer=layer, num_rows=num_rows)

    def __call__(self, x: NamedArray, around: Fusion, block: ExpertsBlock) -> NamedArray:
        """Args: x: [..., embed]; around: the norm of its input, and what is added. Returns: [..., embed]."""
        embed = x.axes[-1]
        normed = x if around.norm is None else around.norm(x)
        rows = NamedArray(normed.array.reshape(-1, embed.size), (Axis(ROW, x.array.size // embed.size), embed))
        chosen, weights = self._route(rows, block)
        if block.router.weigh_inputs:
            results = self._of_weighted(rows, chosen, weights, block)
            weights = jnp.ones_like(weights)
        else:
            results = self._compute(rows, chosen, block).reshape(*chosen.shape, embed.size)
        # One after the other, so that the order of the sum is the same for any number of tokens
        total = sum(weights[:, i : i + 1] * results[:, i] for i in range(1, block.num_chosen))
        total = self.sums.sum_in(x.dtype, weights[:, :1] * results[:, 0] + total)
        total = total.astype(x.dtype)
        if self.shared is not None:
            total = total + self._share(self.shared, rows, block)
        return around.after(NamedArray(total.reshape(x.array.shape), x.axes))

    def _compute(self, rows: NamedArray, chosen: Array, block: ExpertsBlock) -> Array:
        """Result of each chosen expert for its row, f32[row · chosen, embed]; zeros for rows that do not count, and for
        experts of other devices."""
        return (self._grouped if self.layer is None else self._in_blocks)(rows, chosen, block.activation)

    def _of_weighted(self, rows: NamedArray, chosen: Array, weights: Array, block: ExpertsBlock) -> Array:
        """As `_compute` [row, chosen, embed], for rows that are multiplied by the weights: each is a row of its own."""
        (_, embed), count = rows.axes, chosen.shape[1]
        weighted = rows.array[:, None] * weights.astype(rows.dtype)[:, :, None]
        pairs = NamedArray(weighted.reshape(-1, embed.size), (Axis(ROW, chosen.size), embed))
        of_pairs = self if self.num_rows is None else dataclasses.replace(self, num_rows=self.num_rows * count)
        return of_pairs._compute(pairs, chosen.reshape(-1, 1), block).reshape(*chosen.shape, embed.size)

    def _share(self, shared: Mlp, rows: NamedArray, block: ExpertsBlock) -> Array:
        """Result of the shared expert [row, embed]."""
        assert block.shared_width is not None
        result = shared(rows, Fusion(), DenseBlock(block.shared_width, block.activation)).array
        if self.shared_gate is None:
            return result
        (gate,) = apply(rows, self.shared_gate, dtype=jnp.float32)
        return (jax.nn.sigmoid(gate.array) * result.astype(jnp.float32)).astype(result.dtype)

    def _route(self, rows: NamedArray, block: ExpertsBlock) -> tuple[Array, Array]:
        """Experts of each row i32[row, chosen], and their weights f32[row, chosen]."""
        router = block.router
        with jax.default_matmul_precision("highest" if router.float32 else None):
            inputs = rows.astype(jnp.float32) if router.float32 else rows
            (own,) = apply(inputs, self.router, dtype=jnp.float32 if router.exact_logits else None)
        logits = self.experts.all_gather(own.rearrange((ROW, ...)).array.astype(jnp.float32), 1)
        bias = None if self.selection_bias is None else self.experts.all_gather(self.selection_bias.array, 0)
        return router.choose(logits, block.num_chosen, bias)

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

    def _in_blocks(self, rows: NamedArray, chosen: Array, activation: Activation | ClampedSwiglu) -> Array:
        """As `_compute`, over pages."""
        order, counts = self._sorted(chosen)
        num_pairs, (_, embed) = order.shape[0], rows.axes
        size = block_size(num_pairs, self._num_experts)
        maps = [part.merged() for part in (self.gate_proj, self.up_proj, self.down_proj)]
        blocks = -(-counts // size)
        ends, starts = jnp.cumsum(blocks, dtype=jnp.int32), jnp.cumsum(counts, dtype=jnp.int32) - counts
        item = jnp.arange(size, dtype=jnp.int32)
        assert self.layer is not None
        first_map = self.layer * self._num_experts

        def block(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            index, results = carry
            expert = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
            before = (index - ends[expert] + blocks[expert]) * size
            used = jnp.minimum(counts[expert] - before, size)
            place = jnp.where(item < used, starts[expert] + before + item, num_pairs)
            pair = order.at[place].get(mode="fill", fill_value=num_pairs)
            inputs = rows.array.at[pair // chosen.shape[1]].get(mode="fill", fill_value=0)
            gate, up, down = (part.at(first_map + expert, used) for part in maps)
            gated = apply(NamedArray(inputs, (Axis(ROW, size), embed)), gate, up)
            (result,) = apply(gated[1], self._biased_once(down), gate=gated[0], activation=activation)
            return index + 1, results.at[pair].set(result.array.astype(jnp.float32), mode="drop")

        empty = jnp.zeros((num_pairs, embed.size), jnp.float32)
        return jax.lax.while_loop(lambda carry: carry[0] < ends[-1], block, (jnp.int32(0), empty))[1]

    def _biased_once(self, down: Linear) -> Linear:
        """The map of one expert to the residual stream: one device of those with its shards has the bias."""
        if down.bias is None or self.inner.parts == 1:
            return down
        bias = jnp.where(self.inner.index == 0, down.bias.array, 0)
        return dataclasses.replace(down, bias=NamedArray(bias, down.bias.axes))

    def _grouped(self, rows: NamedArray, chosen: Array, activation: Activation | ClampedSwiglu) -> Array:
        """As `_compute`, for weights [expert, out, in]."""
        order, counts = self._sorted(chosen)

        def matmul(x: Array, part: Linear) -> Array:
            result = part.backend.grouped_matmul(x, part.weight.array, counts)
            if part.bias is None:
                return result
            place = jnp.arange(order.shape[0], dtype=jnp.int32)
            expert = jnp.searchsorted(jnp.cumsum(counts), place, side="right")
            return result + part.bias.array.astype(jnp.float32).at[expert].get(mode="fill", fill_value=0)

        inputs = rows.array[order // chosen.shape[1]]
        gated = activation.gated(matmul(inputs, self.gate_proj), matmul(inputs, self.up_proj))
        results = matmul(gated.astype(inputs.dtype), self._biased_once(self.down_proj))
        return jnp.zeros_like(results).at[order].set(results)


def _fold_in(key: Array | None, data: int) -> Array | None:
    return None if key is None else jax.random.fold_in(key, data)


def block_size(num_pairs: int, num_experts: int) -> int:
    """Rows of a block: a power of two, about twice an expert's share of (row, expert) pairs."""
    share = max(1, -(-2 * num_pairs // num_experts))
    return min(max(MIN_ROWS, 1 << (share - 1).bit_length()), _MAX_BLOCK)
