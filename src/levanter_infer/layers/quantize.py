"""Quantization of the weights of linear maps to int8, with a scale for each output."""

import functools
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
    _, (codes, scales) = jax.lax.scan(_layer(num_in), None, stack)  # so that float32 is that of one layer
    as_before = _placement(stack)
    return as_before(codes), as_before(scales)


@functools.cache  # a function of its own for each call would be compiled for each weight
def _layer(num_in: int) -> Callable[[None, Array], tuple[None, tuple[Array, Array]]]:
    """The body of a scan over layers: codes and scales of one."""

    def one(carry: None, weight: Array) -> tuple[None, tuple[Array, Array]]:
        ins = tuple(range(weight.ndim - num_in, weight.ndim))
        largest = jnp.max(jnp.abs(weight), axis=ins, keepdims=True).astype(jnp.float32)
        scale = jnp.where(largest == 0, jnp.float32(1), largest / jnp.float32(MOST))
        codes = jnp.round(weight.astype(jnp.float32) / scale)
        return carry, (jnp.clip(codes, -MOST, MOST).astype(jnp.int8), jnp.squeeze(scale, ins))

    return one


def _placement(stack: Array) -> Callable[[Array], Array]:
    """Sharding of arrays like `stack`, or of its first axes, as it is sharded: XLA need not find the same."""
    sharding = None if isinstance(stack, Tracer) else stack.sharding
    if not isinstance(sharding, NamedSharding):
        return lambda array: array
    return lambda array: jax.device_put(
        array, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: array.ndim]))
    )
