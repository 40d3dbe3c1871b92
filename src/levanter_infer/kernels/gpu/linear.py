"""Matmuls of the `gpu` implementation: Pallas on Triton, with one layer's weights read in place from the stack of all.

XLA's own GEMMs on a GPU take a matrix, not one layer of a stack: in a loop over layers XLA first copies the weights of
each layer, which triples the memory traffic of a decode step.

A residual is added to the sums before they are rounded. The norm of the input has a launch of its own: in the matmul
each program would compute it again, between the load of a tile and the tensor cores, which made gate and up of one row
a third slower with the best tile (decision 0052).
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

LEAST_SHARED_MEMORY = 99 * 1024
"""Bytes of shared memory that a program can have on every GPU that the kernels are written for."""


def shared_memory(capability: float) -> int:
    """Bytes of shared memory that a program can have on a GPU of a compute capability.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability.
    """
    if 9 <= capability < 12:
        return 227 * 1024
    return 163 * 1024 if capability in (8.0, 8.7) else LEAST_SHARED_MEMORY


@dataclasses.dataclass(frozen=True)
class Tile:
    """Static sizes of one program; powers of two, at least 16."""

    rows: int
    outs: int
    ins: int
    """Inputs per turn of the loop over inputs (the GEMM's K)."""
    warps: int
    stages: int


_FEW_ROWS = {
    16: ((16_384, Tile(16, 64, 256, warps=2, stages=3)), (0, Tile(16, 32, 512, warps=2, stages=3))),
    32: (
        (16_384, Tile(32, 64, 128, warps=2, stages=3)),
        (6_144, Tile(32, 32, 128, warps=2, stages=4)),
        (0, Tile(32, 32, 512, warps=2, stages=3)),
    ),
    64: (
        (16_384, Tile(64, 64, 128, warps=4, stages=3)),
        (6_144, Tile(64, 64, 128, warps=4, stages=4)),
        (0, Tile(64, 32, 128, warps=4, stages=6)),
    ),
}
"""Tiles of matmuls of up to so many rows, which memory bounds, by their least outputs: fewer outputs are fewer
programs, each of which has to keep more loads in flight."""
_MANY_ROWS = (Tile(128, 256, 64, warps=8, stages=4), Tile(128, 128, 64, warps=8, stages=4))
"""Tiles of matmuls of more rows, which arithmetic bounds: the first that makes enough programs."""
_OTHERWISE = Tile(64, 128, 64, warps=4, stages=4)
"""The tile of matmuls for which none of `_MANY_ROWS` makes enough programs."""
_ENOUGH_PROGRAMS = 96


def tile_of(num_rows: int, num_ins: int, num_outs: int, shared_memory: int) -> Tile:
    """The tile of a matmul, by times on an H200 (`scripts/gpu_tiles.py`).

    Args:
        num_outs: outputs of all weights.
        shared_memory: bytes of it that a program can have.
    """
    if num_rows <= 64:
        tile = next(tile for least, tile in _FEW_ROWS[max(16, pl.next_power_of_2(num_rows))] if num_outs >= least)
    else:
        fitting = (tile for tile in _MANY_ROWS if 3 * _stage_bytes(tile) <= shared_memory)
        tile = next(
            (
                tile
                for tile in fitting
                if pl.cdiv(num_rows, tile.rows) * pl.cdiv(num_outs, tile.outs) >= _ENOUGH_PROGRAMS
            ),
            _OTHERWISE,
        )
    return _fitted(tile, num_ins, shared_memory)


def _fitted(tile: Tile, num_ins: int, shared_memory: int) -> Tile:
    """The tile with turns that divide the inputs, where they have a divisor of 64 or more (else the last turn has a
    mask), and with stages that fit. Shorter turns have more stages, so that as much is in flight."""
    divisor = math.gcd(num_ins, tile.ins)
    ins = divisor if divisor >= 64 else 64
    if num_ins < ins:
        ins = max(16, pl.next_power_of_2(num_ins))
    while ins > 128 and 3 * _stage_bytes(dataclasses.replace(tile, ins=ins)) > shared_memory:
        ins //= 2
    stages = min(tile.stages * max(1, tile.ins // ins), 8)
    tile = dataclasses.replace(tile, ins=ins)
    return dataclasses.replace(tile, stages=max(1, min(stages, shared_memory // _stage_bytes(tile))))


def _stage_bytes(tile: Tile) -> int:
    """Shared memory of one stage: inputs and weights of a turn."""
    return 2 * (tile.rows + tile.outs) * tile.ins


def supports_dtype(dtype) -> bool:
    """Whether the tensor cores multiply this dtype without rounding it, as they would round f32."""
    return jnp.dtype(dtype) in _DTYPES


def stacked_matmul(
    call: LinearCall, *, shared_memory: int = LEAST_SHARED_MEMORY, interpret: bool = False
) -> list[Array]:
    """The matmuls of `call`, accumulated in float32, in one launch, and one more for a norm.

    Args:
        call: x bf16 or f16; weights [layers, outputs..., inputs...] each, in the dtype of x or int8 with scales; no
            gate. The outputs of rows that are not in use are zeros or their own matmul, and tiles without a row in use
            cost nothing.
        shared_memory: bytes of it that a program can have on the device.
        interpret: run in Pallas' interpreter, on any platform, slowly; for tests.
    Returns: [rows, outputs] each, in `call.dtype`.
    Raises: ValueError for other dtypes.
    """
    rows, ins = call.x.shape
    weights = [weight.reshape(weight.shape[0], -1, ins) for weight in call.weights]
    for weight in weights:
        if not supports_dtype(call.x.dtype) or weight.dtype != (jnp.int8 if call.scales else call.x.dtype):
            raise ValueError(
                f'matmul="gpu" takes bfloat16 or float16, not {call.x.dtype} times {weight.dtype}; use "xla"'
            )
    tile = tile_of(rows, ins, sum(weight.shape[1] for weight in weights), shared_memory)
    x, layer = call.x, call.layer
    assert call.gate is None, "a gate is the layer's"
    assert layer is not None, "the weights are stacks of layers"
    if call.norm is not None:
        x = norm_rows(x, *call.norm, layer, interpret=interpret)
    parts = list(zip(weights, call.scales or [None] * len(weights), strict=True))
    groups = [parts] if call.is_gated_pair else [[part] for part in parts]
    if call.is_gated_pair:  # a program computes as much as of one weight
        tile = dataclasses.replace(tile, outs=max(tile.outs // 2, 16))
    bounds = [0]
    for (weight, _), *_ in groups:
        bounds.append(bounds[-1] + pl.cdiv(weight.shape[1], tile.outs))
    used = jnp.int32(rows) if call.num_rows is None else call.num_rows
    inputs = _Inputs(x, call.residual, layer.reshape(1), used.reshape(1))
    return pl.pallas_call(
        functools.partial(_matmul, tile=tile, first_parts=tuple(bounds)),
        out_shape=[jax.ShapeDtypeStruct((rows, weight.shape[1]), call.dtype) for (weight, _), *_ in groups],
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


def norm_rows(x: Array, weights: Array, eps: float, layer: Array, *, interpret: bool = False) -> Array:
    """As `normed` with the weight of one layer, read in place from the stack.

    Args:
        x: [row, in]
        weights: [layers, in]
        interpret: as in `stacked_matmul`.
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
    place = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
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
    residual: Any
    """[rows, outs] or None."""
    layer: Any
    """i32[1]"""
    num_rows: Any
    """i32[1], rows in use."""


def _matmul(inputs: _Inputs, groups, *out_refs, tile: Tile, first_parts: tuple[int, ...]) -> None:
    """One tile of one output.

    Args:
        groups: the weight of each output and its scales (None: it has none), one, or a gate and its partner.
        first_parts: of the second grid axis, where the tiles of each output begin.
    """
    first_row, part = pl.program_id(0) * tile.rows, pl.program_id(1)
    num_rows, num_ins = inputs.x.shape
    row = first_row + jnp.arange(tile.rows, dtype=jnp.int32)
    turns = jnp.where(first_row < inputs.num_rows[0], jnp.int32(pl.cdiv(num_ins, tile.ins)), 0)
    layer, f32 = inputs.layer[0], jnp.float32

    def one(group, out_ref, first_part: int) -> None:
        out = (part - first_part) * tile.outs + jnp.arange(tile.outs, dtype=jnp.int32)
        num_outs = out_ref.shape[1]

        def exists(index: Array, size: int, whole: int, in_range: Array) -> Array | None:
            """[n, ins], the mask of a load of rows `index` of `size`, which come in tiles of `whole`; None: of all."""
            masks = [] if size % whole == 0 else [(index < size)[:, None]]
            masks += [] if num_ins % tile.ins == 0 else [in_range[None, :]]
            shape = index.shape[0], tile.ins
            return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), shape) if masks else None

        def turn(index: Array, accs: tuple[Array, ...]) -> tuple[Array, ...]:
            k = index * tile.ins + jnp.arange(tile.ins, dtype=jnp.int32)
            in_range = k < num_ins

            def load(ref, index, size: int, whole: int) -> Array:
                mask = exists(index[-1][:, 0], size, whole, in_range)
                other = None if mask is None else _zero(ref)
                return plt.load(ref.at[*index, k[None, :]], mask=mask, other=other)

            x = load(inputs.x, (row[:, None],), num_rows, tile.rows)
            weights = [load(ref, (layer, out[:, None]), num_outs, tile.outs).astype(x.dtype) for ref, _ in group]
            dims = (((1,), (1,)), ((), ()))
            precision = jax.lax.Precision.HIGHEST
            sums = [jax.lax.dot_general(x, weight, dims, precision, preferred_element_type=f32) for weight in weights]
            return tuple(acc + each for acc, each in zip(accs, sums, strict=True))

        zeros = (jnp.zeros((tile.rows, tile.outs), f32),) * len(group)
        sums = jax.lax.fori_loop(0, turns, turn, zeros)

        def scaled(acc: Array, scale_ref) -> Array:
            if scale_ref is None:
                return acc
            scale = plt.load(scale_ref.at[layer, out], mask=out < num_outs, other=jnp.zeros((), f32))
            return acc * scale[None, :]

        accs = [scaled(acc, scale_ref) for acc, (_, scale_ref) in zip(sums, group, strict=True)]
        acc = accs[0] if len(accs) == 1 else gated(*(each.astype(out_ref.dtype) for each in reversed(accs)))
        mask = (row < num_rows)[:, None] & (out < num_outs)[None, :]
        place = row[:, None], out[None, :]
        if inputs.residual is not None:
            added = plt.load(inputs.residual.at[*place], mask=mask, other=_zero(inputs.residual))
            acc = acc + added.astype(f32)
        plt.store(out_ref.at[*place], acc.astype(out_ref.dtype), mask=mask)

    for i, (group, out_ref) in enumerate(zip(groups, out_refs, strict=True)):
        first, end = first_parts[i], first_parts[i + 1]
        pl.when((part >= first) & (part < end))(functools.partial(one, group, out_ref, first))


def _zero(ref) -> Array:
    return jnp.zeros((), ref.dtype)
