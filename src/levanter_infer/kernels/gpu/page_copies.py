"""Copies of pages of the `gpu` backend: Pallas on Triton, all layers in one launch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from levanter_infer.kernels.gpu import plt

_PART = 8192
"""Numbers that a program copies."""


class _Pairs(NamedTuple):
    source: Any
    """i32[n]"""
    target: Any
    """i32[n]"""


def copy_pages(pool: Array, source: Array, target: Array, *, interpret: bool = False) -> Array:
    """`Backend.copy_pages`, in place where the pool is donated. XLA's code is a loop over layers, which a branch of a
    CUDA graph cannot contain."""
    layers, pages, *page = pool.shape
    flat = pool.reshape(layers, pages, -1)
    copied = pl.pallas_call(
        _copy,
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        grid=(source.shape[0], layers, pl.cdiv(flat.shape[2], _PART)),
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="copy_pages",
    )(flat, _Pairs(source, target))
    return copied.reshape(layers, pages, *page)


def _copy(pool, pairs: _Pairs, out) -> None:
    """A part of one page of one layer."""
    pair, layer, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    source, target, (_, num_pages, size) = pairs.source[pair], pairs.target[pair], out.shape
    number = part * _PART + jnp.arange(_PART, dtype=jnp.int32)

    @pl.when((target >= 0) & (target < num_pages))
    def _():
        values = plt.load(pool.at[layer, jnp.clip(source, 0, num_pages - 1), number], mask=number < size)
        plt.store(out.at[layer, target, number], values, mask=number < size)
