"""Quantization of keys and values to int8, with a scale per token and head that is stored as an 8-bit code.

A scale is 2^(code / 8), so that the code is an integer and decoding it costs one exponential. The rounding error of a
number is at most half a scale, and a scale is at most 2^(1/8) / 127 of the head's largest number: 0.43 % of it.
"""

import jax.numpy as jnp
from jax import Array

STEPS = 8
"""Codes per power of 2."""
_LARGEST = 127


def encode(x: Array) -> tuple[Array, Array]:
    """Quantize keys or values.

    Args:
        x: [..., D], a floating dtype; numbers that are not finite are stored as 0.
    Returns: the integers i8[..., D], the codes of the scales i8[..., 1].
    """
    x = jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype)).astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    code = jnp.ceil(STEPS * jnp.log2(jnp.maximum(largest, jnp.float32(1e-30)) / _LARGEST))
    code = jnp.clip(code, -128, _LARGEST)
    integers = jnp.clip(jnp.round(x / scale_of(code)), -_LARGEST, _LARGEST)
    return integers.astype(jnp.int8), code.astype(jnp.int8)


def decode(integers: Array, codes: Array) -> Array:
    """The inverse of `encode`, as f32[..., D]."""
    return integers.astype(jnp.float32) * scale_of(codes)


def scale_of(code: Array) -> Array:
    """The scale of a code, f32: from about 1.5e-5 to 6e4."""
    return jnp.exp2(code.astype(jnp.float32) * jnp.float32(1 / STEPS))
