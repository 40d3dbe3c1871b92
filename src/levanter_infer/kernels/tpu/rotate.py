"""Rotation of queries and keys on a TPU, from the rows that matmuls give to those that attention and the pool take.

A matmul gives a token's heads side by side in lanes, eight or sixteen tokens in a register; attention reads a token's
heads one below the other. XLA transposes the queries, rotates them, and transposes them back, and takes four more
copies for keys and values. Here each head is rotated as it comes, by one exchange of the halves of its lanes. Eight
heads at a time are stored with a stride of eight rows, and copied to the rows of their tokens.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import Rotation
from levanter_infer.kernels.tpu.pool import LANES
from levanter_infer.kernels.tpu.tiling import generation

_TRIP, _LEAST_TRIP = 64, 16
"""Tokens per trip of a loop, at most and at least: enough that the lanes of one are exchanged while others are
stored, and whole registers of 16 bits."""
_TRIP_HEADS = 32
"""Query heads up to which a trip has `_TRIP` tokens; with more heads it has half as many."""
_ROWS = 8
"""Query heads of a token have to fill whole registers, or XLA would store them otherwise than the kernel."""
_DEFAULT_BYTES, _MORE_BYTES = 16 * 2**20, 32 * 2**20
"""VMEM that a kernel has by default, which is all that a core of v4 has, and that it asks for if its tokens need it."""
_SHARE = 0.75
"""Share of these that the tokens of a grid step may take."""
TAIL = 16
"""Tokens behind those of a grid step whose keys and values it may store: a tile of 16 bits."""


def trip_of(block: int, q_heads: int) -> int:
    """Tokens per trip, of a grid step of `block` tokens."""
    return math.gcd(block, _TRIP if q_heads <= _TRIP_HEADS else _TRIP // 2)


def wide_rows(block: int, q_heads: int, kv_heads: int) -> int:
    """Rows of `Refs.wide`."""
    return trip_of(block, q_heads) * (q_heads + 2 * kv_heads)


def step_bytes(block: int, q_heads: int, kv_heads: int) -> int:
    """VMEM that a grid step of `block` tokens takes: queries, keys and values twice each, as they come and go, their
    angles, and keys and values in float32 and as words. Keys and values of `TAIL` tokens more fit what `_SHARE`
    leaves."""
    return LANES * (block * (8 * q_heads + 20 * kv_heads + 16) + 4 * wide_rows(block, q_heads, kv_heads))


def vmem_limit(block: int, q_heads: int, kv_heads: int) -> int | None:
    """The VMEM that the kernel asks for; None: the compiler's default."""
    return None if step_bytes(block, q_heads, kv_heads) <= _SHARE * _DEFAULT_BYTES else _MORE_BYTES


def supports(q: Array, k: Array, rotation: Rotation, kv_dtype: jnp.dtype, block: int) -> bool:
    """Whether `rotate_tokens` takes these in grid steps of `block` tokens. Args: q, k: [T, heads, D]."""
    (_, q_heads, head_dim), kv_heads = q.shape, k.shape[1]
    narrow = all(dtype == jnp.bfloat16 for dtype in (q.dtype, k.dtype, kv_dtype))
    whole = head_dim == LANES and q_heads % _ROWS == 0 and trip_of(block, q_heads) >= _LEAST_TRIP
    most = _DEFAULT_BYTES if generation() == "v4" else _MORE_BYTES
    fits = step_bytes(block, q_heads, kv_heads) <= _SHARE * most
    return narrow and whole and fits and rotation.norms is None


class Refs(NamedTuple):
    """Inputs and outputs of a grid step, in VMEM."""

    q: Any
    """[block, Hq * 128]"""
    k: Any
    """[block, Hkv * 128]"""
    v: Any
    """[block, Hkv * 128]"""
    cos: Any
    """f32[block, 64]"""
    sin: Any
    """f32[block, 64]"""
    rotated: Any
    """[block, Hq, 128], rotated queries."""
    packed: Any
    """f32[(block + TAIL) * 2 * Hkv, 128], keys and values as `TpuPool.pack` orders them, keys rounded to their
    dtype."""
    wide: Any
    """f32[`wide_rows`, 128], scratch."""

    def of_keys(self, k, v, cos, sin) -> "Refs":
        """The same with other keys and values."""
        return self._replace(k=k, v=v, cos=cos, sin=sin)

    def head(self, ref, tokens, number: int) -> Array:
        """f32[tokens, 128]: one head of `q`, `k` or `v`."""
        return ref[tokens, number * LANES : (number + 1) * LANES].astype(jnp.float32)

    def angles(self, tokens) -> tuple[Array, Array]:
        """f32[tokens, 128] each, as `_rotated` takes them."""
        sines = self.sin[tokens, :]
        return jnp.concatenate([self.cos[tokens, :]] * 2, axis=1), jnp.concatenate([-sines, sines], axis=1)


def rotate_tokens(refs: Refs, first: Array, count: int, query_factor: float) -> None:
    """Rotate queries and keys of `count` tokens from `first` i32[] on. Requires: `first` is a multiple of `count`."""
    q_heads, tokens = refs.rotated.shape[1], pl.ds(pl.multiple_of(first, count), count)
    cos, sin = refs.angles(tokens)
    of_queries = cos * jnp.float32(query_factor), sin * jnp.float32(query_factor)
    for begin in range(0, q_heads, _ROWS):
        own = [_rotated(refs.head(refs.q, tokens, begin + number), *of_queries) for number in range(_ROWS)]
        x = _by_token(own, refs.wide.at[pl.ds(begin * count, _ROWS * count)])
        refs.rotated[tokens, begin : begin + _ROWS, :] = x.reshape(count, _ROWS, LANES).astype(refs.rotated.dtype)
    _pack(refs, tokens, first, count, (cos, sin))


def rotate_keys(refs: Refs, first: Any, count: int) -> None:
    """Rotate keys alone, of the first `count` tokens of `refs.k`. They are tokens of `refs.packed` from `first` on."""
    tokens = pl.ds(0, count)
    _pack(refs, tokens, first, count, refs.angles(tokens))


def _pack(refs: Refs, tokens, first: Any, count: int, angles: tuple[Array, Array]) -> None:
    """Store keys, rotated, and values of `tokens` of `refs.k` as those of `count` tokens of `refs.packed`, from `first`
    on."""
    q_heads, kv_heads = refs.rotated.shape[1], refs.k.shape[1] // LANES
    sides = []
    for number in range(kv_heads):
        sides += [
            _rotated(refs.head(refs.k, tokens, number), *angles).astype(refs.k.dtype).astype(jnp.float32),
            refs.head(refs.v, tokens, number),
        ]
    for begin in range(0, len(sides), _ROWS):
        own = sides[begin : begin + _ROWS]
        if len(sides) <= _ROWS:
            for place, side in enumerate(own):
                refs.packed[pl.ds(first * len(sides) + place, count, stride=len(sides)), :] = side
        else:
            x = _by_token(own, refs.wide.at[pl.ds((q_heads + begin) * count, len(own) * count)])
            for token in range(count):
                row = pl.multiple_of((first + token) * len(sides) + begin, math.gcd(len(sides), len(own)))
                rows = pl.ds(row, len(own))
                refs.packed[rows, :] = x[token * len(own) : (token + 1) * len(own)]


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    return x * cos + pltpu.roll(x, LANES // 2, 1) * sin


def _by_token(heads: list[Array], wide) -> Array:
    """[tokens * heads, 128]: the rows of a token's heads follow one another. They go through `wide`, because the
    compiler knows strides of 8 rows at most, and would store others row by row."""
    tokens, stride = heads[0].shape[0], len(heads)
    for number, x in enumerate(heads):
        wide[pl.ds(number, tokens, stride=stride), :] = x
    return wide[...]
