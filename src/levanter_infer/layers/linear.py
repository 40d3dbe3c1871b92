"""Linear maps whose weights are stored outputs first: `[layers, out..., in...]`."""

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

MIN_ROWS = 4
"""Fewest rows of a product. On a CPU one row of bf16 is ten times slower than four, and rows keep their bits at any
count from four up (docs/decisions)."""


class Linear(eqx.Module):
    """`y[..., out] = x[..., in] · weight[out, in] + bias[out]`, accumulated in float32, in the dtype of `x`.

    Outputs first is the order in which both CPU and TPU read weights without laying them out again.
    """

    weight: NamedArray
    """[layers, out..., in...]; without `layers` once a scan has picked a layer."""
    bias: NamedArray | None
    """[layers, out...]"""
    num_in: int = eqx.field(static=True)
    """How many of the last axes of `weight` are inputs."""

    @staticmethod
    def init(
        batch: Sequence[Axis], out: Sequence[Axis], ins: Sequence[Axis], *, key: Array, dtype, bias: bool = False
    ) -> "Linear":
        """Normal weights of variance 1 / inputs, zero bias. `batch`: axes of independent maps, `layers` as a rule."""
        fan_in = 1
        for axis in ins:
            fan_in *= axis.size
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
        weight: [out..., in...]
        bias: [out...]
    Returns: f32[rows..., out...]
    """
    ins, out = weight.axes[-num_in:], weight.axes[:-num_in]
    assert x.axes[-num_in:] == ins, f"input axes {x.axes} do not end with those of the weight, {ins}"
    rows = x.axes[:-num_in]
    count = 1
    for axis in rows:
        count *= axis.size
    flat = x.array.reshape((count, *(axis.size for axis in ins)))
    if count < MIN_ROWS:
        flat = jnp.pad(flat, [(0, MIN_ROWS - count)] + [(0, 0)] * num_in)
    contracted = (tuple(range(1, 1 + num_in)), tuple(range(len(out), len(out) + num_in)))
    y = jax.lax.dot_general(flat, weight.array, (contracted, ((), ())), preferred_element_type=jnp.float32)
    result = NamedArray(y[:count].reshape([axis.size for axis in (*rows, *out)]), (*rows, *out))
    return result if bias is None else result + bias.astype(jnp.float32)
