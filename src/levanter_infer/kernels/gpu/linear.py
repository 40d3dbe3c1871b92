"""Matmuls of the `gpu` implementation: Pallas on Triton, with one layer's weights read in place from the stack of all.

XLA's own GEMMs on a GPU take a matrix, not one layer of a stack: in a loop over layers XLA first copies the weights of
each layer, which triples the memory traffic of a decode step.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from levanter_infer.kernels.call import LinearCall
from levanter_infer.kernels.gpu import plt

_DTYPES = (jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Static sizes of one program; powers of two, at least 16."""

    rows: int
    outs: int
    ins: int
    """Inputs per turn of the loop over inputs (the GEMM's K)."""
    warps: int
    stages: int


def tile_of(num_rows: int, num_ins: int) -> Tile:
    """The tile for a number of rows. A matmul of few rows is bound by memory: narrow tiles, so that all multiprocessors
    read, and long turns. One of many rows is bound by arithmetic."""
    divisor = math.gcd(num_ins, 128)
    ins = divisor if divisor >= 16 else 64  # with a mask
    if num_rows <= 64:
        rows = max(16, 1 << (num_rows - 1).bit_length())
        return Tile(rows=rows, outs=32, ins=ins, warps=4, stages=4)
    return Tile(rows=64, outs=128, ins=min(ins, 64), warps=4, stages=3)


def supports_dtype(dtype) -> bool:
    """Whether the tensor cores multiply this dtype without rounding it, as they would round f32."""
    return jnp.dtype(dtype) in _DTYPES


def stacked_matmul(call: LinearCall, *, interpret: bool = False) -> list[Array]:
    """The matmuls of `call`, accumulated in float32, in one launch.

    Args:
        call: x bf16 or f16; weights [layers, outputs..., inputs...] each, in the dtype of x. The outputs of rows that
            are not in use are zeros or their own matmul, and tiles without a row in use cost nothing. The kernel fuses
            nothing.
        interpret: run in Pallas' interpreter, on any platform, slowly; for tests.
    Returns: f32[rows, outputs] each.
    Raises: ValueError for other dtypes.
    """
    x, layer = call.x, call.layer
    assert layer is not None, "the weights are stacks of layers"
    rows, ins = x.shape
    weights = [weight.reshape(weight.shape[0], -1, ins) for weight in call.weights]
    for weight in weights:
        if not supports_dtype(x.dtype) or weight.dtype != x.dtype:
            raise ValueError(f'matmul="gpu" takes bfloat16 or float16, not {x.dtype} times {weight.dtype}; use "xla"')
    tile = tile_of(rows, ins)
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + pl.cdiv(weight.shape[1], tile.outs))
    used = jnp.int32(rows) if call.num_rows is None else call.num_rows
    return pl.pallas_call(
        functools.partial(_matmul, tile=tile, first_parts=tuple(bounds)),
        out_shape=[jax.ShapeDtypeStruct((rows, weight.shape[1]), jnp.float32) for weight in weights],
        # Programs that read the same weights are neighbours in the grid, so that all but one find them in the cache.
        grid=(pl.cdiv(rows, tile.rows), bounds[-1]),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="stacked_matmul",
    )(x, weights, _Scalars(layer.reshape(1), used.reshape(1)))


class _Scalars(NamedTuple):
    layer: Any
    """i32[1]"""
    num_rows: Any
    """i32[1], rows in use."""


def _matmul(x_ref, weight_refs, scalars: _Scalars, *out_refs, tile: Tile, first_parts: tuple[int, ...]) -> None:
    """One tile of one output. `first_parts`: of the second grid axis, where the tiles of each output begin."""
    first_row, part = pl.program_id(0) * tile.rows, pl.program_id(1)
    num_rows, num_ins = x_ref.shape
    row = first_row + jnp.arange(tile.rows, dtype=jnp.int32)
    turns = jnp.where(first_row < scalars.num_rows[0], jnp.int32(pl.cdiv(num_ins, tile.ins)), 0)
    layer = scalars.layer[0]

    def one(weight_ref, out_ref, first_part: int) -> None:
        out = (part - first_part) * tile.outs + jnp.arange(tile.outs, dtype=jnp.int32)
        num_outs = out_ref.shape[1]

        def exists(index: Array, size: int, in_range: Array) -> Array:
            """[n, ins], the mask of a load of rows `index` of `size`."""
            mask = (index < size)[:, None]
            return mask if num_ins % tile.ins == 0 else mask & in_range[None, :]

        def turn(index: Array, acc: Array) -> Array:
            k = index * tile.ins + jnp.arange(tile.ins, dtype=jnp.int32)
            zero, in_range = jnp.zeros((), x_ref.dtype), k < num_ins
            x = plt.load(x_ref.at[row[:, None], k[None, :]], mask=exists(row, num_rows, in_range), other=zero)
            weight = plt.load(
                weight_ref.at[layer, out[:, None], k[None, :]], mask=exists(out, num_outs, in_range), other=zero
            )
            dims = (((1,), (1,)), ((), ()))
            precision = jax.lax.Precision.HIGHEST
            return acc + jax.lax.dot_general(x, weight, dims, precision, preferred_element_type=jnp.float32)

        acc = jax.lax.fori_loop(0, turns, turn, jnp.zeros((tile.rows, tile.outs), jnp.float32))
        mask = (row < num_rows)[:, None] & (out < num_outs)[None, :]
        plt.store(out_ref.at[row[:, None], out[None, :]], acc, mask=mask)

    for i, (weight_ref, out_ref) in enumerate(zip(weight_refs, out_refs, strict=True)):
        first, end = first_parts[i], first_parts[i + 1]
        pl.when((part >= first) & (part < end))(functools.partial(one, weight_ref, out_ref, first))
