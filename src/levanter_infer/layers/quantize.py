"""Quantization of the weights of linear maps to int8, with a scale for each output."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from levanter_infer.kernels.xla.linear import as_floats, to_bits

MOST = 127
"""The largest code. -128 is not one, so that codes are as far to both sides of zero."""
MOST_BLOCKS = 256
"""Blocks of outputs in which a table is quantized on a CPU, at most; a power of two, as most vocabularies have many."""


def quantized(weight: Array, num_in: int, *, dtype=None, is_stack: bool = True) -> tuple[Array, Array]:
    """Codes of weights and the scale of each output, the output's largest magnitude divided by `MOST`: a weight is off
    by at most half a scale. Codes do not depend on how the weights are sharded.

    Args:
        weight: [layers, ..., in...], or without layers; floats, traced or on devices of which each has its part of
            every layer.
        num_in: number of the last axes that are inputs.
        dtype: of the floats, where the weight holds their bits; None: it holds the floats.
        is_stack: whether it has layers.
    Returns: i8[layers, ..., in...] and f32[layers, ...]; the scale of an output with a weight that is not finite is not
        finite.
    """
    given = jnp.asarray(weight)
    one_layer = _layer(num_in, jnp.dtype(given.dtype if dtype is None else dtype))
    is_on_host = not isinstance(given, Tracer) and [device.platform for device in given.devices()] == ["cpu"]
    # On a CPU, XLA converts a stack of 16-bit floats to float32 as a whole before it takes the first layer; of their
    # bits it converts one layer at a time.
    stored = to_bits(given) if is_on_host else given
    reshaped = _host_reshaped if is_on_host else jnp.reshape
    blocks = math.gcd(given.shape[0], MOST_BLOCKS) if is_on_host else 1
    stack = stored if is_stack else reshaped(stored, (blocks, given.shape[0] // blocks, *given.shape[1:]))
    _, (codes, scales) = jax.lax.scan(one_layer, None, stack)
    if not is_stack:
        codes, scales = (reshaped(each, given.shape[: each.ndim - 1]) for each in (codes, scales))
    as_before = _placement(given)
    return as_before(codes), as_before(scales)


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


def _host_reshaped(array: Array, shape: tuple[int, ...]) -> Array:
    """An array of a CPU in another shape, in the same memory: JAX would copy it."""
    return jax.device_put(np.asarray(array).reshape(shape))


def _placement(weight: Array) -> Callable[[Array], Array]:
    """Sharding of arrays like `weight`, or of its first axes, as it is sharded: XLA need not find the same."""
    sharding = None if isinstance(weight, Tracer) else weight.sharding
    if not isinstance(sharding, NamedSharding):
        return lambda array: array
    return lambda array: jax.device_put(
        array, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: array.ndim]))
    )
