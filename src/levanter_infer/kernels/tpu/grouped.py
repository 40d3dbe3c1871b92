"""Grouped matmul on a TPU, for experts: reads the matrices of groups with results, and of the full stack nothing else.

The results are cut into tiles of rows. A *visit* is a tile and a group with results in it: the kernel multiplies the
tile with the group's matrix and keeps the group's own rows. Visits are in the order of groups, so that each matrix
comes from HBM once, while the one before is multiplied; a decode step is bound by that. Source: MegaBlocks,
arXiv:2211.15841, and jax's megablox, which takes one layer's matrices, sliced out of the stack.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels import scopes
from levanter_infer.kernels.call import GroupedCall
from levanter_infer.kernels.tpu.pool import LANES
from levanter_infer.kernels.xla.grouped import scales_of_results

_TILE, _ROWS = 128, 16
"""Rows of a tile, at most: more tiles cut more groups in two, which are visited twice, and larger ones cost each visit
more than they save. And the rows in which VMEM stores bfloat16."""
_BLOCK_BYTES = 2 * 2**20
"""Bytes of a matrix that are copied at once, at most: two of them, two tiles and the results fit VMEM."""


def supports_dtype(dtype) -> bool:
    """Whether matrices of this dtype can be read."""
    return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16)


def supports(call: GroupedCall) -> bool:
    """Whether the kernel computes the call: out of a stack."""
    return call.layer is not None and call.num_results > 0


def grouped_matmul(call: GroupedCall, *, interpret: pltpu.InterpretParams | bool = False) -> list[Array]:
    """The grouped matmuls of `call`, with weights [layers, group, out, in] in the dtype of x, or int8 with scales.

    Args: interpret: parameters of Pallas' interpreter.
    """
    layer = call.layer
    assert layer is not None and call.norm is None and call.gate is None
    x = call.x if call.rows is None else call.x.at[call.rows].get(mode="clip")
    tile = min(_TILE, pl.cdiv(call.num_results, _ROWS) * _ROWS)
    visits = _visits(call.counts, call.num_results, tile)
    used = jnp.arange(call.num_results, dtype=jnp.int32) < jnp.sum(call.counts)

    def one(weight: Array, outs: int, scale: Array | None) -> Array:
        stack = weight.reshape(weight.shape[0], call.num_groups, outs, x.shape[1])
        y = _one(x, stack, layer, visits, tile, interpret)
        y = y if scale is None else y * scale
        return jnp.where(used[:, None], y, jnp.float32(0))  # rows of no group were not computed

    scales = scales_of_results(call) or [None] * len(call.weights)
    return [one(*each) for each in zip(call.weights, call.num_outs, scales, strict=True)]


def block_outs(outs: int, ins: int, itemsize: int) -> int:
    """Outputs of a matrix that are copied and multiplied at once: all of them, or a multiple of 128."""
    most = max(_BLOCK_BYTES // (ins * itemsize) // LANES, 1) * LANES
    parts = max(pl.cdiv(outs, most), 2 if outs >= 2 * LANES else 1)  # two, for chips of two cores
    return outs if parts == 1 else pl.cdiv(pl.cdiv(outs, parts), LANES) * LANES


def _visits(counts: Array, num_results: int, tile: int) -> tuple[Array, ...]:
    """Group and tile of every visit, i32[visit]; first result of each group and one past its last, i32[group]; and the
    number of visits, i32[1]. Visits beyond that repeat the last one."""
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = ends - counts
    first = starts // tile
    own = jnp.where(counts > 0, (ends - 1) // tile - first + 1, 0)
    visit_ends = jnp.cumsum(own, dtype=jnp.int32)
    total = visit_ends[-1]
    most = pl.cdiv(num_results, tile) + min(counts.shape[0], num_results) - 1
    visit = jnp.maximum(jnp.minimum(jnp.arange(most, dtype=jnp.int32), total - 1), 0)
    group = jnp.minimum(jnp.searchsorted(visit_ends, visit, side="right").astype(jnp.int32), counts.shape[0] - 1)
    place = jnp.where(total > 0, first[group] + visit - (visit_ends - own)[group], 0)
    return group, place, starts, ends, total[None]


def _one(x: Array, stack: Array, layer: Array, visits: tuple[Array, ...], tile: int, interpret) -> Array:
    (num_results, ins), outs = x.shape, stack.shape[2]
    block = block_outs(outs, ins, x.dtype.itemsize)

    def of_tile(part, visit, layer, group, place, *_):
        return place[visit], 0

    def of_matrix(part, visit, layer, group, *_):
        return layer[0], group[visit], part, 0

    def of_results(part, visit, layer, group, place, *_):
        return place[visit], part

    kernel = pl.pallas_call(
        functools.partial(_visit, tile=tile),
        out_shape=jax.ShapeDtypeStruct((num_results, outs), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(visits),
            grid=(pl.cdiv(outs, block), visits[0].shape[0]),
            in_specs=[pl.BlockSpec((tile, ins), of_tile), pl.BlockSpec((1, 1, block, ins), of_matrix)],
            out_specs=pl.BlockSpec((tile, block), of_results),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name=scopes.GROUPED_MATMUL,
    )
    with jax.named_scope(scopes.GROUPED_MATMUL):
        return kernel(layer[None], *visits, x, stack)


def _visit(layer, group, place, starts, ends, total, x, matrix, results, *, tile: int):
    visit = pl.program_id(1)

    @pl.when(visit < total[0])
    def _():
        own = group[visit]
        weight = matrix[0, 0].astype(x.dtype)
        y = jax.lax.dot_general(x[...], weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        row = place[visit] * tile + jax.lax.broadcasted_iota(jnp.int32, y.shape, 0)
        results[...] = jnp.where((row >= starts[own]) & (row < ends[own]), y, results[...])
