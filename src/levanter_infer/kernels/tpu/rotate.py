"""Rotation of queries and keys on a TPU, from the rows that matmuls give to those that attention and the pool take.

A matmul gives a token's heads side by side in lanes, eight or sixteen tokens in a register; attention reads a token's
heads one below the other. XLA transposes the queries, rotates them, and transposes them back, and takes four more
copies for keys and values. Here each head is rotated as it comes, by one exchange of the halves of its lanes, and
stored with a stride of a token's heads.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import Rotation
from levanter_infer.kernels.tpu.pool import LANES

_TOKENS = 128
"""Tokens per grid step, at most."""
_ROWS = 8
"""Query heads of a token have to fill whole registers, or XLA would store them otherwise than the kernel."""


def supports(q: Array, k: Array, rotation: Rotation, kv_dtype: jnp.dtype) -> bool:
    """Whether the kernel takes these. Args: q, k: [T, heads, D]."""
    num_tokens, num_heads, head_dim = q.shape
    narrow = all(dtype == jnp.bfloat16 for dtype in (q.dtype, k.dtype, kv_dtype))
    whole = head_dim == LANES and num_heads % _ROWS == 0 and num_tokens % min(_TOKENS, num_tokens) == 0
    return narrow and whole and num_tokens % 16 == 0 and rotation.norms is None


def rotate(q: Array, k: Array, v: Array, rotation: Rotation, *, interpret=False) -> tuple[Array, Array]:
    """Rotated queries, and keys and values as `TpuPool.pack` orders them.

    Args:
        q: [T, Hq, D]
        k, v: [T, Hkv, D]
        interpret: as `pallas_call` takes it.
    Returns: [T, Hq, D], and f32[T, 2 * Hkv, D], keys rounded to their dtype.
    """
    num_tokens, q_heads, head_dim = q.shape
    kv_heads, block = k.shape[1], min(_TOKENS, num_tokens)

    def rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, width), lambda i: (i, 0))

    rotated, packed = pl.pallas_call(
        functools.partial(_rotate, query_factor=rotation.query_factor),
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, q_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((num_tokens * 2 * kv_heads, head_dim), jnp.float32),
        ],
        grid=(num_tokens // block,),
        in_specs=[
            *map(rows, (q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)),
            *[rows(head_dim // 2)] * 2,
        ],
        out_specs=[
            pl.BlockSpec((block, q_heads, head_dim), lambda i: (i, 0, 0)),
            pl.BlockSpec((block * 2 * kv_heads, head_dim), lambda i: (i, 0)),
        ],
        scratch_shapes=[pltpu.VMEM((block * q_heads, head_dim), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="rotate",
        interpret=interpret,
    )(*(side.reshape(num_tokens, -1) for side in (q, k, v)), rotation.cos, rotation.sin)
    return rotated, packed.reshape(num_tokens, 2 * kv_heads, head_dim)


def _rotate(q_ref, k_ref, v_ref, cos_ref, sin_ref, rotated_ref, packed_ref, wide_ref, *, query_factor: float):
    tokens, q_heads, _ = rotated_ref.shape
    kv_heads = k_ref.shape[1] // LANES
    cos = jnp.concatenate([cos_ref[...]] * 2, axis=1)
    sin = jnp.concatenate([-sin_ref[...], sin_ref[...]], axis=1)

    def head(ref, number: int) -> Array:
        return ref[:, number * LANES : (number + 1) * LANES].astype(jnp.float32)

    def rotated(x: Array, cos: Array, sin: Array) -> Array:
        return x * cos + pltpu.roll(x, LANES // 2, 1) * sin

    of_queries = cos * jnp.float32(query_factor), sin * jnp.float32(query_factor)
    for number in range(q_heads):
        wide_ref[pl.ds(number, tokens, stride=q_heads), :] = rotated(head(q_ref, number), *of_queries)
    rotated_ref[...] = wide_ref[...].reshape(rotated_ref.shape).astype(rotated_ref.dtype)
    for number in range(kv_heads):
        key = rotated(head(k_ref, number), cos, sin).astype(k_ref.dtype).astype(jnp.float32)
        packed_ref[pl.ds(2 * number, tokens, stride=2 * kv_heads), :] = key
        packed_ref[pl.ds(2 * number + 1, tokens, stride=2 * kv_heads), :] = head(v_ref, number)
