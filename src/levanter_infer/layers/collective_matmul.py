"""Matmuls beside the transfers that tensor parallelism needs, for a residual stream whose columns devices share.

A device has its columns of the residual stream, norms and adds those, and no others. Before a layer's inner matmuls the
columns of the other devices arrive one after the other around a ring, and each is multiplied by the weights of its
inputs while the next is on its way: an all-gather behind a matmul. After them, the columns of each other device are
multiplied first, added to what arrives for them, and sent on: a reduce-scatter behind a matmul. Every weight is read
once. Both directions of the ring are used; the device opposite gets half of its columns by each.

Sums have one order, whatever the rows: those of a column are added in the order in which its ring passes the devices.
Source: arXiv:2302.05442 and doi:10.1145/3567955.3567959; decision 0044 has the figures.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.call import LinearCall
from levanter_infer.layers.shard_axis import ShardAxis


def gathered(
    x: Array,
    weights: Sequence[Array],
    num_outs: Sequence[int],
    norm: tuple[Array, float] | None,
    ring: ShardAxis,
    backend: Backend,
    *,
    squares: Array | None = None,
) -> list[Array]:
    """`norm(all columns of x) · weightᵀ` for each of several weights, f32[row, out].

    Args:
        x: [row, in / parts], this device's columns.
        weights: [out, in]; with more axes XLA copies a part of the inputs, instead of reading it in the matmul.
        norm: factors f32[in] and epsilon of an RMSNorm; None: there is none.
        squares: `sums_of_squares(x)`, if they are known.
    """
    size = x.shape[1]
    totals: list[Array] = []

    def add(columns: Array, part: Array) -> None:
        """Add what the columns of device `part` contribute."""
        nonlocal totals
        if norm is not None:
            wide = columns.astype(jnp.float32)
            columns = (wide * _chunk(norm[0], part, size, 0)[None]).astype(columns.dtype)
        chunks = [_chunk(weight, part, size, 1) for weight in weights]
        found = backend.linear(LinearCall(columns, chunks, num_outs))
        totals = found if not totals else [total + y for total, y in zip(totals, found, strict=True)]

    here, half = ring.index, ring.parts // 2
    up = down = x
    for distance in range(half + 1):
        part, opposite = (up, down), distance == half
        if distance + 1 == half:
            up, down = ring.shifted(up[:, : size // 2], 1), ring.shifted(down[:, size // 2 :], -1)
        elif not opposite:
            up, down = ring.shifted(up, 1), ring.shifted(down, -1)
        if distance == 0:
            add(x, here)
        elif opposite:
            add(jnp.concatenate(part, axis=1), _at(here, distance, ring))
        else:
            add(part[0], _at(here, -distance, ring))
            add(part[1], _at(here, distance, ring))
    if norm is None:
        return totals
    total = _around(sums_of_squares(x) if squares is None else squares, ring)
    scale = jax.lax.rsqrt(total / jnp.float32(size * ring.parts) + jnp.float32(norm[1]))[:, None]
    return [total * scale for total in totals]


def sums_of_squares(x: Array) -> Array:
    """f32[row], over this device's columns.

    XLA computes them in the addition that gives `x`, if both are in the same iteration of the loop over layers.
    """
    wide = x.astype(jnp.float32)
    return jnp.sum(wide * wide, axis=1)


def _around(own: Array, ring: ShardAxis) -> Array:
    """f32[row], the sum over all devices. It is needed after the matmuls, which hide these transfers."""
    total = up = down = own
    for distance in range(1, ring.parts // 2 + 1):
        up = ring.shifted(up, 1)
        total = total + up
        if 2 * distance < ring.parts:
            down = ring.shifted(down, -1)
            total = total + down
    return total


def scattered(x: Array, weight: Array, ring: ShardAxis, backend: Backend, scale: Array | None = None) -> Array:
    """This device's columns of the sum over devices of `x · weightᵀ`, f32[row, out / parts].

    Args:
        x: [row, in], with the inputs of this device.
        weight: [out, in...]
        scale: f32[out], of a weight of int8.
    """
    size, here, half = weight.shape[0] // ring.parts, ring.index, ring.parts // 2
    assert size % 2 == 0, "both directions get half of the columns of the device opposite"

    def of(distance: int) -> Array:
        """This device's summand of the columns of another."""
        return columns(_at(here, distance, ring), size)

    def columns(part: Array, size: int) -> Array:
        if weight.dtype == jnp.int8:  # of a slice XLA copies the stack of all layers into another order, in each layer
            own = jax.lax.dynamic_index_in_dim(weight.reshape(-1, size, weight.shape[1]), part, keepdims=False)
        else:  # and of a part by its index it copies the part
            own = _chunk(weight, part, size, 0)
        scales = [] if scale is None else [_chunk(scale, part, size, 0)]
        (y,) = backend.linear(LinearCall(x, [own], [size], scales=scales))
        return y

    if backend.halves_ring_matmuls():
        first = _at(here, half, ring) * jnp.int32(2)
        halves = [columns(first + jnp.int32(number), size // 2).astype(x.dtype) for number in range(2)]
    else:
        halves = jnp.split(of(half).astype(x.dtype), 2, axis=1)
    up, down = ring.shifted(halves[0], 1), ring.shifted(halves[1], -1)
    for distance in range(half - 1, 0, -1):
        arrived = _widened(up, size, 0), _widened(down, size, size - down.shape[1])
        up = ring.shifted((of(distance) + arrived[0]).astype(x.dtype), 1)
        down = ring.shifted((of(-distance) + arrived[1]).astype(x.dtype), -1)
    return of(0) + _widened(up, size, 0) + _widened(down, size, size - down.shape[1])


def _at(here: Array, distance: int, ring: ShardAxis) -> Array:
    return (here + jnp.int32(distance % ring.parts)) % jnp.int32(ring.parts)


def _chunk(array: Array, part: Array, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, part * jnp.int32(size), size, axis)


def _widened(values: Array, size: int, before: int) -> Array:
    """f32[row, size], with zeros around."""
    values = values.astype(jnp.float32)
    after = size - before - values.shape[1]
    return values if values.shape[1] == size else jnp.pad(values, ((0, 0), (before, after)))
