"""Matmuls of the `gpu` implementation: Pallas on Triton, with one layer's weights read in place from the stack of all.

XLA's own GEMMs on a GPU take a matrix, not one layer of a stack: in a loop over layers XLA first copies the weights of
each layer, which triples the memory traffic of a decode step.

A residual is added to the sums before they are rounded. The norm or the gate of the input is computed in the matmul
where it has few rows: every program computes it again, for all of its rows, which is less than a launch while the rows
fit into one tile of the tensor cores. More rows are normed by a kernel of their own, and gated by XLA.
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


_FUSED_ROWS = 16
"""Most rows of a tile whose norm or gate is computed in the matmul."""


def supports_dtype(dtype) -> bool:
    """Whether the tensor cores multiply this dtype without rounding it, as they would round f32."""
    return jnp.dtype(dtype) in _DTYPES


def stacked_matmul(call: LinearCall, *, interpret: bool = False) -> list[Array]:
    """The matmuls of `call`, accumulated in float32, in one launch, or two where a norm has one of its own.

    Args:
        call: x bf16 or f16; weights [layers, outputs..., inputs...] each, in the dtype of x. The outputs of rows that
            are not in use are zeros or their own matmul, and tiles without a row in use cost nothing.
        interpret: run in Pallas' interpreter, on any platform, slowly; for tests.
    Returns: [rows, outputs] each, in `call.dtype`.
    Raises: ValueError for other dtypes.
    """
    rows, ins = call.x.shape
    weights = [weight.reshape(weight.shape[0], -1, ins) for weight in call.weights]
    for weight in weights:
        if not supports_dtype(call.x.dtype) or weight.dtype != call.x.dtype:
            raise ValueError(
                f'matmul="gpu" takes bfloat16 or float16, not {call.x.dtype} times {weight.dtype}; use "xla"'
            )
    tile = tile_of(rows, ins)
    if tile.rows > _FUSED_ROWS or call.x.dtype == jnp.float16:  # a float16 might exceed its range before it is scaled
        call = _prepared(call, interpret)
    layer = call.layer
    assert layer is not None, "the weights are stacks of layers"
    groups = [tuple(weights)] if call.is_gated_pair else [(weight,) for weight in weights]
    if call.is_gated_pair:  # a program computes as much as of one weight
        tile = dataclasses.replace(tile, outs=max(tile.outs // 2, 16))
    bounds = [0]
    for weight, *_ in groups:
        bounds.append(bounds[-1] + pl.cdiv(weight.shape[1], tile.outs))
    used = jnp.int32(rows) if call.num_rows is None else call.num_rows
    norm, eps = (None, 0.0) if call.norm is None else call.norm
    inputs = _Inputs(call.x, call.gate, norm, call.residual, layer.reshape(1), used.reshape(1))
    return pl.pallas_call(
        functools.partial(_matmul, tile=tile, first_parts=tuple(bounds), eps=eps),
        out_shape=[jax.ShapeDtypeStruct((rows, weight.shape[1]), call.dtype) for weight, *_ in groups],
        # Programs that read the same weights are neighbours in the grid, so that all but one find them in the cache.
        grid=(pl.cdiv(rows, tile.rows), bounds[-1]),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="stacked_matmul",
    )(inputs, groups)


def gated(x: Array, gate: Array) -> Array:
    """`silu(gate) · x`, computed in f32, in the dtype of `x`."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * x.astype(jnp.float32)).astype(x.dtype)


def normed(x: Array, weight: Array, eps: float) -> Array:
    """`x / sqrt(mean(x²) + eps) · weight`, computed in f32, in the dtype of `x`. Args: x: [row, in]."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + jnp.float32(eps))
    return (wide * scale * weight.astype(jnp.float32)[None, :]).astype(x.dtype)


def _prepared(call: LinearCall, interpret: bool) -> LinearCall:
    """The call, of one layer of stacks, with its norm or gate computed."""
    x = call.x if call.gate is None else gated(call.x, call.gate)
    if call.norm is not None and call.layer is not None:
        x = norm_rows(x, *call.norm, call.layer, interpret=interpret)
    return dataclasses.replace(call, x=x, norm=None, gate=None)


def norm_rows(x: Array, weights: Array, eps: float, layer: Array, *, interpret: bool = False) -> Array:
    """As `normed` with the weight of one layer, read in place from the stack.

    Args:
        x: [row, in]
        weights: [layers, in]
        interpret: as of `stacked_matmul`.
    """
    return pl.pallas_call(
        functools.partial(_norm, eps=eps),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="norm_rows",
    )(x, weights, layer.reshape(1))


def _norm(x_ref, weight_ref, layer_ref, out_ref, *, eps: float) -> None:
    """The norm of one row."""
    row, size = pl.program_id(0), x_ref.shape[1]
    place = jnp.arange(_power_of_two(size), dtype=jnp.int32)
    exists = place < size

    def load(ref, row) -> Array:
        return plt.load(ref.at[row, place], mask=exists, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)

    x = load(x_ref, row)
    scale = jax.lax.rsqrt(jnp.sum(x * x) / jnp.float32(size) + jnp.float32(eps))
    plt.store(out_ref.at[row, place], (x * scale * load(weight_ref, layer_ref[0])).astype(out_ref.dtype), mask=exists)


class _Inputs(NamedTuple):
    """Arrays that a matmul reads beside its weights."""

    x: Any
    """[rows, ins]"""
    gate: Any
    """[rows, ins] or None; not together with a norm."""
    norm: Any
    """[layers, ins] or None."""
    residual: Any
    """[rows, outs] or None."""
    layer: Any
    """i32[1]"""
    num_rows: Any
    """i32[1], rows in use."""


def _matmul(inputs: _Inputs, groups, *out_refs, tile: Tile, first_parts: tuple[int, ...], eps: float) -> None:
    """One tile of one output.

    Args:
        groups: the weights of each output, one, or a gate and its partner.
        first_parts: of the second grid axis, where the tiles of each output begin.
    """
    first_row, part = pl.program_id(0) * tile.rows, pl.program_id(1)
    num_rows, num_ins = inputs.x.shape
    row = first_row + jnp.arange(tile.rows, dtype=jnp.int32)
    turns = jnp.where(first_row < inputs.num_rows[0], jnp.int32(pl.cdiv(num_ins, tile.ins)), 0)
    layer, f32 = inputs.layer[0], jnp.float32

    def one(weight_refs, out_ref, first_part: int) -> None:
        out = (part - first_part) * tile.outs + jnp.arange(tile.outs, dtype=jnp.int32)
        num_outs = out_ref.shape[1]

        def exists(index: Array, size: int, in_range: Array) -> Array:
            """[n, ins], the mask of a load of rows `index` of `size`."""
            mask = (index < size)[:, None]
            return mask if num_ins % tile.ins == 0 else mask & in_range[None, :]

        def turn(index: Array, carry: tuple[tuple[Array, ...], Array]) -> tuple[tuple[Array, ...], Array]:
            accs, squares = carry
            k = index * tile.ins + jnp.arange(tile.ins, dtype=jnp.int32)
            in_range = k < num_ins

            def load(ref, index, size: int) -> Array:
                return plt.load(
                    ref.at[*index, k[None, :]], mask=exists(index[-1][:, 0], size, in_range), other=_zero(ref)
                )

            x = load(inputs.x, (row[:, None],), num_rows)
            weights = [load(weight_ref, (layer, out[:, None]), num_outs) for weight_ref in weight_refs]
            if inputs.gate is not None:
                x = gated(x, load(inputs.gate, (row[:, None],), num_rows))
            if inputs.norm is not None:  # the sums are scaled in the end
                wide = x.astype(f32)
                factor = plt.load(inputs.norm.at[layer, k], mask=in_range, other=_zero(inputs.norm)).astype(f32)
                squares = squares + jnp.sum(wide * wide, axis=1)
                x = (wide * factor[None, :]).astype(x.dtype)
            dims = (((1,), (1,)), ((), ()))
            precision = jax.lax.Precision.HIGHEST
            sums = [jax.lax.dot_general(x, weight, dims, precision, preferred_element_type=f32) for weight in weights]
            return tuple(acc + each for acc, each in zip(accs, sums, strict=True)), squares

        zeros = (jnp.zeros((tile.rows, tile.outs), f32),) * len(weight_refs), jnp.zeros(tile.rows, f32)
        accs, squares = jax.lax.fori_loop(0, turns, turn, zeros)
        if inputs.norm is not None:
            scale = jax.lax.rsqrt(squares / f32(num_ins) + f32(eps))[:, None]
            accs = tuple(acc * scale for acc in accs)
        acc = accs[0] if len(accs) == 1 else gated(*(each.astype(out_ref.dtype) for each in reversed(accs)))
        mask = (row < num_rows)[:, None] & (out < num_outs)[None, :]
        place = row[:, None], out[None, :]
        if inputs.residual is not None:
            added = plt.load(inputs.residual.at[*place], mask=mask, other=_zero(inputs.residual))
            acc = acc + added.astype(f32)
        plt.store(out_ref.at[*place], acc.astype(out_ref.dtype), mask=mask)

    for i, (weight_refs, out_ref) in enumerate(zip(groups, out_refs, strict=True)):
        first, end = first_parts[i], first_parts[i + 1]
        pl.when((part >= first) & (part < end))(functools.partial(one, weight_refs, out_ref, first))


def _zero(ref) -> Array:
    return jnp.zeros((), ref.dtype)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
