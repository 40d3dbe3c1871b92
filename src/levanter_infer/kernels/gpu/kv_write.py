"""Norms and rotation of queries and keys, and the write of keys and values, of the `gpu` backend: Pallas on Triton.

A program takes one token: all of its heads, each in two halves, which the rotation mixes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from levanter_infer.kernels.call import KvWrite, Rotation
from levanter_infer.kernels.gpu import plt


def rotate_and_write(pool: Array, write: KvWrite, *, interpret: bool = False) -> tuple[Array, Array]:
    """`Backend.write_kv` of a write with a rotation, in one launch.

    Args:
        pool: [layers, P, page_size, 2 * Hkv, D], changed in place where it is donated.
        interpret: run in Pallas' interpreter, on any platform, slowly; for tests.
    Returns: the queries, rotated, in their dtype, as the attention takes them; and the pool.
    """
    q, rotation = write.q, write.rotation
    assert q is not None and rotation is not None and write.v is not None, "queries to rotate, keys and values"
    assert rotation.norms is None or rotation.norm_layer is not None, "norms have a layer"
    own = () if rotation.norms is None else rotation.norms
    inputs = _Inputs(
        q=q,
        k=write.k,
        v=write.v,
        cos=rotation.cos,
        sin=rotation.sin,
        norms=tuple(weight for weight, _ in own),
        layer=write.layer.reshape(1),
        norm_layer=_layer_of(rotation, write),
        dests=write.dests,
    )
    types = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (pool, q)]
    pool, rotated = pl.pallas_call(
        functools.partial(_write, eps=tuple(eps for _, eps in own), query_factor=rotation.query_factor),
        out_shape=types,
        grid=(q.shape[0],),
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="rotate_and_write",
    )(pool, inputs)
    return rotated, pool


def _layer_of(rotation: Rotation, write: KvWrite) -> Array:
    return (write.layer if rotation.norm_layer is None else rotation.norm_layer).reshape(1)


class _Inputs(NamedTuple):
    q: Any
    """[T, Hq, D]"""
    k: Any
    """[T, Hkv, D]"""
    v: Any
    """[T, Hkv, D]"""
    cos: Any
    """f32[T, D / 2]"""
    sin: Any
    """f32[T, D / 2]"""
    norms: Any
    """Weights [layers, D] of queries and of keys; none without norms."""
    layer: Any
    """i32[1], of the pool."""
    norm_layer: Any
    """i32[1]"""
    dests: Any
    """i32[T], as in `KvWrite`. Pages and offsets would be one more launch a layer."""


def _write(_, inputs: _Inputs, pool_ref, q_ref, *, eps: tuple[float, ...], query_factor: float) -> None:
    """One token. The first argument is the pool, which `pool_ref` aliases."""
    token = pl.program_id(0)
    half, f32 = inputs.cos.shape[1], jnp.float32
    dim = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)
    exists = dim < half
    cos, sin = (plt.load(ref.at[token, dim], mask=exists, other=f32(0)) for ref in (inputs.cos, inputs.sin))
    num_pages, page_size = pool_ref.shape[1:3]
    dest, layer = inputs.dests[token], inputs.layer[0]
    page, offset = dest // page_size, dest % page_size
    # A token that is not stored has an index out of bounds too: Pallas' interpreter writes back what a mask leaves out.
    stored = page < num_pages

    def heads(ref) -> tuple[Array, Array]:
        """Numbers of the heads of [T, heads, D], those that do not exist out of bounds, and whether they exist."""
        head = jnp.arange(pl.next_power_of_2(ref.shape[1]), dtype=jnp.int32)
        return head, (head < ref.shape[1])[:, None] & exists[None, :]

    def halves(ref) -> list[Array]:
        head, mask = heads(ref)
        places = [ref.at[token, head[:, None], (dim + first)[None, :]] for first in (0, half)]
        return [plt.load(place, mask=mask, other=jnp.zeros((), ref.dtype)).astype(f32) for place in places]

    def rotated(ref, side: int) -> list[Array]:
        first, second = halves(ref)
        if eps:
            squares = jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)
            scale = jax.lax.rsqrt(squares / f32(2 * half) + f32(eps[side]))[:, None]
            weight = inputs.norms[side]
            factors = [
                plt.load(weight.at[inputs.norm_layer[0], dim + start], mask=exists, other=jnp.zeros((), weight.dtype))
                for start in (0, half)
            ]
            first, second = (
                part * scale * factor.astype(f32)[None, :]
                for part, factor in zip((first, second), factors, strict=True)
            )
        return [first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]]

    def store(ref, index, values: Array, mask: Array) -> None:
        plt.store(ref.at[*index], values.astype(ref.dtype), mask=mask)

    head, mask = heads(inputs.q)
    for part, first in zip(rotated(inputs.q, 0), (0, half), strict=True):
        store(q_ref, (token, head[:, None], (dim + first)[None, :]), part * f32(query_factor), mask)
    head, mask = heads(inputs.k)
    for parts, after in ((rotated(inputs.k, 1), 0), (halves(inputs.v), 1)):
        for part, first in zip(parts, (0, half), strict=True):
            slot = 2 * head + after
            store(pool_ref, (layer, page, offset, slot[:, None], (dim + first)[None, :]), part, mask & stored)
