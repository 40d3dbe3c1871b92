"""Quantization of the weights of linear maps to int8, with a scale for each output."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from levanter_infer.kernels.xla.linear import as_floats, to_bits

MOST = 127
"""The largest code. -128 is not one, so that codes are as far to both sides of zero."""


def quantized(weight: Array, num_in: int, *, is_stack: bool = True) -> tuple[Array, Array]:
    """Codes of weights and the scale of each output, the output's largest magnitude divided by `MOST`: a weight is off
    by at most half a scale. Codes do not depend on how the weights are sharded.

    Args:
        weight: [layers, ..., in...], or without layers; floats, traced or on devices of which each has its part of
            every layer.
        num_in: number of the last axes that are inputs.
        is_stack: whether it has layers.
    Returns: i8[layers, ..., in...] and f32[layers, ...]; the scale of an output with a weight that is not finite is not
        finite.
    """
    stack = _as_read_by_layers(weight if is_stack else weight[None])
    _, results = jax.lax.scan(_layer(num_in, weight.dtype), None, stack)  # so that float32 is that of one layer
    as_before = _placement(weight)
    codes, scales = (as_before(each if is_stack else each[0]) for each in results)
    return codes, scales


@functools.cache  # a function of its own for each call would be compiled for each weight
def _layer(num_in: int, dtype: jnp.dtype) -> Callable[[None, Array], tuple[None, tuple[Array, Array]]]:
    """The body of a scan over layers: codes and scales of one, whose floats are of `dtype`."""

    def one(carry: None, stored: Array) -> tuple[None, tuple[Array, Array]]:
        weight = as_floats(stored, dtype)
        ins = tuple(range(weight.ndim - num_in, weight.ndim))
        largest = jnp.max(jnp.abs(weight), axis=ins, keepdims=True).astype(jnp.float32)
        scale = jnp.where(largest == 0, jnp.float32(1), largest / jnp.float32(MOST))
        codes = jnp.round(weight.astype(jnp.float32) / scale)
        return carry, (jnp.clip(codes, -MOST, MOST).astype(jnp.int8), jnp.squeeze(scale, ins))

    return one


def _as_read_by_layers(stack: Array) -> Array:
    """The stack, or the bits of its floats on a CPU, where XLA converts a stack of 16-bit floats to float32 as a whole
    before it takes the first layer."""
    is_traced = isinstance(stack, Tracer)
    return stack if is_traced or [device.platform for device in stack.devices()] != ["cpu"] else to_bits(stack)


def _placement(weight: Array) -> Callable[[Array], Array]:
    """Sharding of arrays like `weight`, or of its first axes, as it is sharded: XLA need not find the same."""
    sharding = None if isinstance(weight, Tracer) else weight.sharding
    if not isinstance(sharding, NamedSharding):
        return lambda array: array
    return lambda array: jax.device_put(
        array, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: array.ndim]))
    )
