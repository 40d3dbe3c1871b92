"""Grouped matmuls in XLA: in blocks by any matmul of a stack, or by `jax.lax.ragged_dot`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels import MIN_ROWS
from levanter_infer.kernels.call import GroupedCall, LinearCall
from levanter_infer.kernels.xla.linear import as_floats

_MAX_BLOCK = 128


def in_blocks(call: GroupedCall, linear: Callable[[LinearCall], list[Array]]) -> list[Array]:
    """Each group's rows in blocks of a fixed size, so that a group without rows costs nothing. Args: linear: of a
    backend, for stacks."""
    assert call.layer is not None and call.norm is None and call.gate is None
    counts, num_results = call.counts, call.num_results
    size = block_size(num_results, call.num_groups)
    stacks, scales = ([each.reshape(-1, *each.shape[2:]) for each in all_] for all_ in (call.weights, call.scales))
    blocks = -(-counts // size)
    ends, starts = jnp.cumsum(blocks, dtype=jnp.int32), jnp.cumsum(counts, dtype=jnp.int32) - counts
    item = jnp.arange(size, dtype=jnp.int32)
    first = call.layer * call.num_groups

    def block(carry: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        index, results = carry
        group = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        before = (index - ends[group] + blocks[group]) * size
        used = jnp.minimum(counts[group] - before, size)
        place = jnp.where(item < used, starts[group] + before + item, num_results)
        row = place if call.rows is None else call.rows.at[place].get(mode="fill", fill_value=call.x.shape[0])
        inputs = call.x.at[row].get(mode="fill", fill_value=0)
        own = linear(LinearCall(inputs, stacks, call.num_outs, first + group, used, scales=scales))
        return index + 1, [all_.at[place].set(new, mode="drop") for all_, new in zip(results, own, strict=True)]

    empty = [jnp.zeros((num_results, outs), jnp.float32) for outs in call.num_outs]
    return jax.lax.while_loop(lambda carry: carry[0] < ends[-1], block, (jnp.int32(0), empty))[1]


def ragged_matmul(call: GroupedCall) -> list[Array]:
    """`jax.lax.ragged_dot` of weights [group, out, in]; has a gradient."""
    assert call.layer is None and call.norm is None and call.gate is None
    inputs = call.x if call.rows is None else call.x[call.rows]

    def one(weight: Array, outs: int) -> Array:
        matrices = as_floats(weight, inputs.dtype).reshape(call.num_groups, outs, -1)
        return jax.lax.ragged_dot(inputs, jnp.swapaxes(matrices, 1, 2), call.counts, preferred_element_type=jnp.float32)

    sums = [one(weight, outs) for weight, outs in zip(call.weights, call.num_outs, strict=True)]
    return sums if not call.scales else [y * scale for y, scale in zip(sums, scales_of_results(call), strict=True)]


def scales_of_results(call: GroupedCall) -> list[Array]:
    """The factors of each result, f32[result, out], of weights that have some; anything beyond `sum(counts)`."""
    if not call.scales:
        return []
    group = call.groups_of_results()

    def one(scale: Array) -> Array:
        own = scale if call.layer is None else jax.lax.dynamic_index_in_dim(scale, call.layer, keepdims=False)
        return own.at[group].get(mode="clip")

    return [one(scale) for scale in call.scales]


def block_size(num_results: int, num_groups: int) -> int:
    """Rows of a block: a power of two, about twice a group's share of the results."""
    share = max(1, -(-2 * num_results // num_groups))
    return min(max(MIN_ROWS, 1 << (share - 1).bit_length()), _MAX_BLOCK)
