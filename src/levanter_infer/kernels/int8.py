"""Keys and values as 8-bit integers: each head of each token with a scale of its own, which is stored as a code of 8
bits. A scale is a power of 2 in steps of an eighth, so that the code is an integer and a scale costs one exponential.

The rounding error of a number is at most half a scale, and a scale at most 2^(1/8) / 127 of the head's largest number:
0.43 % of it.
"""

import jax.numpy as jnp
from jax import Array

STEPS = 8
"""Codes from one power of 2 to the next."""
_LARGEST = 127


def encode(x: Array) -> tuple[Array, Array]:
    """Numbers as integers and codes.

    Args:
        x: [..., D], a floating dtype; numbers that are not finite count as 0.
    Returns: i8[..., D], i8[..., 1]
    """
    x = jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype)).astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    code = jnp.ceil(STEPS * jnp.log2(jnp.maximum(largest, jnp.float32(1e-30)) / _LARGEST))
    code = jnp.clip(code, -128, _LARGEST)
    integers = jnp.clip(jnp.round(x / scale_of(code)), -_LARGEST, _LARGEST)
    return integers.astype(jnp.int8), code.astype(jnp.int8)


def decode(integers: Array, codes: Array) -> Array:
    """Back from `encode`, as f32."""
    return integers.astype(jnp.float32) * scale_of(codes)


def scale_of(code: Array) -> Array:
    """What integers are multiplied by, f32: from about 1.5e-5 to 6e4."""
    return jnp.exp2(code.astype(jnp.float32) * jnp.float32(1 / STEPS))
