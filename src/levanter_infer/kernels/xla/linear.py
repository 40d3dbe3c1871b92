"""Matmuls in XLA, and weights stored as integers: the bits of 16-bit floats, or int8 with a scale per output."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from levanter_infer.kernels import MIN_ROWS


def matmul(x: Array, matrix: Array) -> Array:
    """[rows, in] · [out, in]ᵀ, f32. As matrices: XLA's CPU backend transposes weights of more axes."""
    count = x.shape[0]
    if count < MIN_ROWS:
        x = jnp.pad(x, [(0, MIN_ROWS - count), (0, 0)])
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)[:count]


def to_bits(array: Array) -> Array:
    """A bfloat16 or float16 array as the uint16 of its bits; others unchanged. `as_floats` undoes it.

    On a CPU, XLA converts a full stack of 16-bit floats to float32 at every step, where a layer or rows are to be
    taken from it; of integers it takes the part alone. Outside of a trace the result shares the memory of `array`.
    """
    if array.dtype.itemsize != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if isinstance(array, Tracer):
        return jax.lax.bitcast_convert_type(array, jnp.uint16)
    # If the caller donates `array`, JAX sees that its memory is in use and copies.
    sharding = array.sharding if array.committed else None
    return jax.device_put(np.asarray(array).view(np.uint16), sharding)


def as_floats(array: Array, dtype) -> Array:
    """`array`, or the floats of `dtype` whose bits its unsigned integers are, or that are equal to its int8."""
    if array.dtype == jnp.int8:
        return array.astype(dtype)
    return jax.lax.bitcast_convert_type(array, dtype) if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else array
