"""Quantization of the weights of linear maps to int8, with a scale for each output."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

MOST = 127
"""The largest code. -128 is not one, so that codes are as far to both sides of zero."""


def quantized(stack: Array, num_in: int) -> tuple[Array, Array]:
    """Codes of weights and the scale of each output, the output's largest magnitude divided by `MOST`: a weight is off
    by at most half a scale. Codes do not depend on how the weights are sharded.

    Args:
        stack: [layers, ..., in...], floats; traced, or on devices of which each has its part of every layer.
        num_in: number of the last axes that are inputs.
    Returns: i8[layers, ..., in...] and f32[layers, ...]; the scale of an output with a weight that is not finite is not
        finite.
    """
    ins = tuple(range(stack.ndim - 1 - num_in, stack.ndim - 1))

    def one(weight: Array) -> tuple[Array, Array]:
        largest = jnp.max(jnp.abs(weight), axis=ins, keepdims=True).astype(jnp.float32)
        scale = jnp.where(largest == 0, jnp.float32(1), largest / jnp.float32(MOST))
        codes = jnp.round(weight.astype(jnp.float32) / scale)
        return jnp.clip(codes, -MOST, MOST).astype(jnp.int8), jnp.squeeze(scale, ins)

    codes, scales = jax.lax.map(one, stack)  # one layer after the other, so that float32 is that of one
    as_before = _placement(stack)
    return as_before(codes), as_before(scales)


def _placement(stack: Array) -> Callable[[Array], Array]:
    """Sharding of arrays like `stack`, or of its first axes, as it is sharded: XLA need not find the same."""
    sharding = None if isinstance(stack, Tracer) else stack.sharding
    if not isinstance(sharding, NamedSharding):
        return lambda array: array
    return lambda array: jax.device_put(
        array, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: array.ndim]))
    )
