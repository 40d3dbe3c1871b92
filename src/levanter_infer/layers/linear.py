"""Linear maps whose weights are stored outputs first: `[layers, out..., in...]`."""

import math
from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

MIN_ROWS = 4
"""Fewest rows of a product. On a CPU one row of bf16 is ten times slower than four, and rows keep their bits at any
count from four up."""


class Linear(eqx.Module):
    """`y[..., out] = x[..., in] · weight[out, in] + bias[out]`, accumulated in float32, in the dtype of `x`.

    Outputs first is the order in which both CPU and TPU read weights without laying them out again.
    """

    weight: NamedArray
    """[layers, out..., in...], or its bits (`as_bits`); without `layers` once a scan has picked a layer."""
    bias: NamedArray | None
    """[layers, out...]"""
    num_in: int = eqx.field(static=True)
    """How many of the last axes of `weight` are inputs."""

    @staticmethod
    def init(
        batch: Sequence[Axis], out: Sequence[Axis], ins: Sequence[Axis], *, key: Array, dtype, bias: bool = False
    ) -> "Linear":
        """Normal weights of variance 1 / inputs, zero bias. `batch`: axes of independent maps, `layers` as a rule."""
        fan_in = math.prod(axis.size for axis in ins)
        weight = hax.random.normal(key, (*batch, *out, *ins), dtype=jnp.float32) * jnp.float32(fan_in**-0.5)
        return Linear(
            weight=weight.astype(dtype),
            bias=hax.zeros((*batch, *out), dtype=dtype) if bias else None,
            num_in=len(ins),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: [..., in...], the input axes last and in the order of the weight's."""
        return contract(x, self.weight, self.num_in, self.bias).astype(x.dtype)


def contract(x: NamedArray, weight: NamedArray, num_in: int, bias: NamedArray | None = None) -> NamedArray:
    """Contract the last `num_in` axes of `x` and of `weight`; float32 sums and result.

    Args:
        x: [rows..., in...]
        weight: [out..., in...], in the dtype of `x` or its bits (`as_bits`).
        bias: [out...]
    Returns: f32[rows..., out...]
    """
    ins, out = weight.axes[-num_in:], weight.axes[:-num_in]
    assert x.axes[-num_in:] == ins, f"input axes {x.axes} do not end with those of the weight, {ins}"
    rows = x.axes[:-num_in]
    fan_in = math.prod(axis.size for axis in ins)
    count = math.prod(axis.size for axis in rows)
    # Both as matrices: XLA's CPU backend transposes weights of more axes.
    flat = x.array.reshape(count, fan_in)
    matrix = from_bits(weight.array, x.dtype).reshape(-1, fan_in)
    if count < MIN_ROWS:
        flat = jnp.pad(flat, [(0, MIN_ROWS - count), (0, 0)])
    y = jax.lax.dot_general(flat, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    result = NamedArray(y[:count].reshape([axis.size for axis in (*rows, *out)]), (*rows, *out))
    return result if bias is None else result + bias.astype(jnp.float32)


def as_bits(array: NamedArray) -> NamedArray:
    """A bfloat16 or float16 array as the uint16 of its bits; others unchanged. `from_bits` undoes it.

    On a CPU, XLA converts a whole stack of 16-bit floats to float32 at every step, where a layer or rows are to be
    taken from it; of integers it takes the part alone.
    """
    if array.dtype.itemsize != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return NamedArray(jax.lax.bitcast_convert_type(array.array, jnp.uint16), array.axes)


def from_bits(array: Array, dtype) -> Array:
    """`array`, or what its bits mean if it is unsigned integers."""
    return jax.lax.bitcast_convert_type(array, dtype) if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else array
