"""Kernels whose loops, spills and memory are known, as builders for scripts/tpu_schedule.py."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

VALUES = 96
"""Registers' worth of values that `many_values` holds at once; there are 64 registers."""
COPIED = 8
"""Registers that the inner loop of `nested_loops` copies."""
TRIPS, LONGER = 6, 4
"""Trips of `counted_loop`, and the one that does more."""


def nested_loops(count_ref, x_ref, out_ref):
    """Two loops, one in the other, of a number of trips that is not known."""

    def outer(i, carry):
        def inner(j, carry):
            rows = pl.ds(j * 8 * COPIED, 8 * COPIED)
            out_ref[rows] = x_ref[rows] * 2.0
            return carry

        jax.lax.fori_loop(0, count_ref[i], inner, 0)
        return carry

    jax.lax.fori_loop(0, count_ref[0], outer, 0)


def product_loop(count_ref, x_ref, w_ref, out_ref):
    """One loop with a matmul of [256, 256] by [256, 256]."""
    out_ref[...] = jnp.zeros_like(out_ref)

    def add(i, carry):
        dims = (((1,), (1,)), ((), ()))
        out_ref[...] += jax.lax.dot_general(x_ref[i], w_ref[i], dims, preferred_element_type=jnp.float32)
        return carry

    jax.lax.fori_loop(0, count_ref[0], add, 0)


def many_values(x_ref, out_ref):
    """Every value is needed before and after the largest of all is known, so that most have to be spilled."""
    values = [jnp.exp(x_ref[pl.ds(8 * i, 8)]) for i in range(VALUES)]
    peak = values[0]
    for value in values[1:]:
        peak = jnp.maximum(peak, value)
    for i, value in enumerate(values):
        out_ref[pl.ds(8 * i, 8)] = value * peak


def counted_loop(count_ref, x_ref, out_ref):
    """A loop of TRIPS trips that copies COPIED registers in each, and twice as many again in the trip LONGER."""

    def trip(i, carry):
        rows = pl.ds(i * 8 * COPIED, 8 * COPIED)
        out_ref[rows] = x_ref[rows] * 2.0

        @pl.when(i == LONGER)
        def more():
            out_ref[pl.ds(0, 16 * COPIED)] = x_ref[pl.ds(0, 16 * COPIED)] * 3.0

        return carry

    jax.lax.fori_loop(0, TRIPS, trip, 0)


def kernels(mesh):
    """All of them in one program."""
    i32, f32 = jnp.int32, jnp.float32
    smem, vmem = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)
    rows = jax.ShapeDtypeStruct((8 * VALUES, 128), f32)
    square = jax.ShapeDtypeStruct((256, 256), f32)

    def program(count, x, stack):
        copied = pl.pallas_call(nested_loops, rows, in_specs=[smem, vmem], name="nested_loops")(count, x)
        matmul = pl.pallas_call(product_loop, square, in_specs=[smem, vmem, vmem], name="product_loop")
        counted = pl.pallas_call(counted_loop, rows, in_specs=[smem, vmem], name="counted_loop")(count, x)
        return pl.pallas_call(many_values, rows, name="many_values")(copied), matmul(count, stack, stack), counted

    return program, (jax.ShapeDtypeStruct((4,), i32), rows, jax.ShapeDtypeStruct((3, 256, 256), jnp.bfloat16))


def too_large(mesh, mib=40):
    """A kernel that wants more VMEM than it may have; `mib`: of scratch."""

    def body(place_ref, x_ref, out_ref, scratch_ref):
        scratch_ref[place_ref[0]] = x_ref[...]
        out_ref[...] = scratch_ref[place_ref[1]]

    tile = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    call = pl.pallas_call(
        body,
        tile,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)],
        scratch_shapes=[pltpu.VMEM((mib * 2**20 // 4096, 8, 128), jnp.float32)],
        name="too_large",
    )
    return call, (jax.ShapeDtypeStruct((2,), jnp.int32), tile)
