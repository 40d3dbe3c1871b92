"""The feed-forward block of a mixture of experts: each token goes through the few that its router chooses."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import ROW
from levanter_infer.kernels import MIN_ROWS
from levanter_infer.layers.linear import Linear, apply
from levanter_infer.layers.norm import RMSNorm
from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis

_MAX_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class MoeSizes:
    """What `Moe.init` makes."""

    expert: Axis
    mlp: Axis
    """Width of one expert."""
    num_chosen: int
    """Experts of each token."""
    normalize: bool
    """Whether the weights of the chosen experts are normalized to a sum of one."""


class Moe(eqx.Module):
    """`sum of weight · down(silu(gate(x)) · up(x))` over the experts with the largest router probabilities.

    Tokens are sorted by expert. In the paged forward each expert's tokens are computed in blocks of a fixed size by
    the same matmuls as everything else, so that an expert without tokens costs nothing, and what a token gets does
    not depend on the other tokens of its block. The plain forward leaves that to `jax.lax.ragged_dot`, which has a
    gradient.
    Source: sparsely gated experts, arXiv:1701.06538; softmax before the choice as in Qwen3-MoE.
    """

    router: Linear
    """[layers, expert, embed]"""
    gate_proj: Linear
    up_proj: Linear
    """[layers, expert, mlp, embed]"""
    down_proj: Linear
    """[layers, expert, embed, mlp]"""
    num_chosen: int = eqx.field(static=True)
    """Experts of each token."""
    normalize: bool = eqx.field(static=True)
    """Whether the weights of the chosen experts are normalized to a sum of one."""
    layer: Array | None = None
    """i32[], which layer of the stack is meant; None where a scan has picked one."""
    num_rows: Array | None = None
    """i32[], how many tokens count."""
    experts: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """How the experts are sharded (expert parallel): each device computes its own for the tokens that chose them."""
    sums: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """Mesh axes over which results are added up: experts, and the shards of each."""

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, sizes: "MoeSizes", *, key: Array, dtype) -> "Moe":
        """Random maps as in `Linear.init`; `batch`: axes of independent layers."""
        expert, mlp = sizes.expert, sizes.mlp
        keys = jax.random.split(key, 4)
        each = (*batch, expert)
        return Moe(
            router=Linear.init(batch, (expert,), (embed,), key=keys[0], dtype=dtype),
            gate_proj=Linear.init(each, (mlp,), (embed,), key=keys[1], dtype=dtype),
            up_proj=Linear.init(each, (mlp,), (embed,), key=keys[2], dtype=dtype),
            down_proj=Linear.init(each, (embed,), (mlp,), key=keys[3], dtype=dtype),
            num_chosen=sizes.num_chosen,
            normalize=sizes.normalize,
        )

    def at(self, layer: Array, num_rows: Array) -> "Moe":
        """The block of one layer of a stack, for inputs whose first `num_rows` rows count. Nothing is sliced here."""
        return dataclasses.replace(self, router=self.router.at(layer, num_rows), layer=layer, num_rows=num_rows)

    def __call__(self, x: NamedArray, norm: RMSNorm) -> NamedArray:
        """`x + moe(norm(x))`. Args: x: [..., embed]. Returns: [..., embed]."""
        embed = x.axes[-1]
        normed = norm(x)
        rows = NamedArray(normed.array.reshape(-1, embed.size), (Axis(ROW, x.array.size // embed.size), embed))
        chosen, weights = self._route(rows)
        compute = self._grouped if self.layer is None else self._in_blocks
        results = compute(rows, chosen).reshape(*chosen.shape, embed.size)
        # One after the other, so that the order of the sum is the same for any number of tokens
        total = sum(weights[:, i : i + 1] * results[:, i] for i in range(1, self.num_chosen))
        total = self.sums.sum_in(x.dtype, weights[:, :1] * results[:, 0] + total)
        return x + NamedArray(total.reshape(x.array.shape).astype(x.dtype), x.axes)

    def _route(self, rows: NamedArray) -> tuple[Array, Array]:
        """Experts of each row i32[row, chosen], and their weights f32[row, chosen]."""
        own = apply(rows, self.router)[0].rearrange((ROW, ...)).array.astype(jnp.float32)
        logits = self.experts.all_gather(own, 1)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.num_chosen)
        if self.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return chosen.astype(jnp.int32), weights

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
            flat = jnp.where(place < self.num_rows * self.num_chosen, flat, self._num_experts)
        counts = jnp.zeros(self._num_experts, jnp.int32).at[flat].add(1, mode="drop")
        return jnp.argsort(flat, stable=True).astype(jnp.int32), counts

    def _in_blocks(self, rows: NamedArray, chosen: Array) -> Array:
        """Result of each chosen expert for its row, f32[row · chosen, embed]; zeros for rows that do not count, and for
        experts of other devices."""
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
            inputs = rows.array.at[pair // self.num_chosen].get(mode="fill", fill_value=0)
            gate, up, down = (part.at(first_map + expert, used) for part in maps)
            gated = apply(NamedArray(inputs, (Axis(ROW, size), embed)), gate, up)
            (result,) = apply(gated[1], down, gate=gated[0])
            return index + 1, results.at[pair].set(result.array.astype(jnp.float32), mode="drop")

        empty = jnp.zeros((num_pairs, embed.size), jnp.float32)
        return jax.lax.while_loop(lambda carry: carry[0] < ends[-1], block, (jnp.int32(0), empty))[1]

    def _grouped(self, rows: NamedArray, chosen: Array) -> Array:
        """As `_in_blocks`, for weights [expert, out, in]."""
        order, counts = self._sorted(chosen)

        def matmul(x: Array, part: Linear) -> Array:
            return part.backend.grouped_matmul(x, part.weight.array, counts)

        inputs = rows.array[order // self.num_chosen]
        gated = jax.nn.silu(matmul(inputs, self.gate_proj)) * matmul(inputs, self.up_proj)
        results = matmul(gated.astype(inputs.dtype), self.down_proj)
        return jnp.zeros_like(results).at[order].set(results)


def block_size(num_pairs: int, num_experts: int) -> int:
    """Rows of a block: a power of two, about twice an expert's share of (row, expert) pairs."""
    share = max(1, -(-2 * num_pairs // num_experts))
    return min(max(MIN_ROWS, 1 << (share - 1).bit_length()), _MAX_BLOCK)
