"""Linear maps whose weights are stored outputs first: `[layers, out..., in...]`."""

import dataclasses
import math
from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.kernels import cpu, linear_gpu

MIN_ROWS = 4
"""Fewest rows of a product. On a CPU one row of bf16 is ten times slower than four, and rows keep their bits at any
count from four up."""


class Linear(eqx.Module):
    """`y[..., out] = x[..., in] · weight[out, in] + bias[out]`, accumulated in float32, in the dtype of `x`.

    Outputs first is the order in which both CPU and TPU read weights without laying them out again.
    """

    weight: NamedArray
    """[layers, out..., in...], or its bits (`as_bits`)."""
    bias: NamedArray | None
    """[layers, out...]"""
    num_in: int = eqx.field(static=True)
    """How many of the last axes of `weight` are inputs."""
    kernel: str = eqx.field(static=True, default="xla")
    """What computes the products: xla, cpu (`kernels.cpu`), gpu (`kernels.linear_gpu`) or, in tests, gpu_interpret."""
    layer: Array | None = None
    """i32[], which layer of the stacks is meant. None where there are no stacks: a scan has picked a layer."""
    num_rows: Array | None = None
    """i32[], how many rows of x count; `cpu` and `gpu` skip the others. None: all."""

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

    def at(self, layer: Array, num_rows: Array) -> "Linear":
        """The map of one layer, for x whose first `num_rows` rows count.

        Nothing is sliced here: `cpu` and `gpu` read the stack where it lies.
        """
        return dataclasses.replace(self, layer=layer, num_rows=num_rows)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: [..., in...], the input axes last and in the order of the weight's."""
        return apply(x, self)[0]


def apply(x: NamedArray, *maps: Linear) -> list[NamedArray]:
    """Several maps of the same input; `cpu` and `gpu` compute them in one call."""
    first = maps[0]
    results = contract(
        x,
        [part.weight for part in maps],
        first.num_in,
        layer=first.layer,
        num_rows=first.num_rows,
        kernel=first.kernel,
    )
    biases = [part.bias for part in maps]
    if first.layer is not None:
        biases = [None if bias is None else pick_layer(bias, first.layer) for bias in biases]
    return [
        (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
        for y, bias in zip(results, biases, strict=True)
    ]


def pick_layer(stack: NamedArray, layer: Array) -> NamedArray:
    """One entry along the first axis."""
    return NamedArray(jax.lax.dynamic_index_in_dim(stack.array, layer, keepdims=False), stack.axes[1:])


def contract(
    x: NamedArray,
    weights: Sequence[NamedArray],
    num_in: int,
    *,
    layer: Array | None = None,
    num_rows: Array | None = None,
    kernel: str = "xla",
) -> list[NamedArray]:
    """Contract the last `num_in` axes of `x` with those of each weight; float32 sums and results.

    Args:
        x: [rows..., in...]
        weights: [out..., in...] each, in the dtype of `x` or its bits (`as_bits`); with a first axis more if `layer`
            is given.
        layer: i32[], which entry of the weights' first axis.
        num_rows: i32[], how many rows count; `cpu` and `gpu` skip the others. None: all.
        kernel: see `Linear.kernel`. What is no stack, `gpu` leaves to XLA.
    Returns: f32[rows..., out...] each.
    """
    ins, rows = x.axes[-num_in:], x.axes[:-num_in]
    for weight in weights:
        assert weight.axes[-num_in:] == ins, f"input axes {x.axes} do not end with those of the weight, {weight.axes}"
    fan_in = math.prod(axis.size for axis in ins)
    flat = x.array.reshape(-1, fan_in)
    outs = [weight.axes[0 if layer is None else 1 : -num_in] for weight in weights]
    # Stacks of matrices; a weight without layers is a stack of one.
    shapes = [(-1 if layer is not None else 1, math.prod(axis.size for axis in out), fan_in) for out in outs]
    stacks = [weight.array.reshape(shape) for weight, shape in zip(weights, shapes, strict=True)]
    if kernel == "cpu":
        index = jnp.int32(0) if layer is None else layer
        results = cpu.stacked_products(flat.astype(jnp.float32), stacks, index, num_rows)
    elif kernel in ("gpu", "gpu_interpret") and layer is not None:
        interpret = kernel == "gpu_interpret"
        results = linear_gpu.stacked_products(flat, stacks, layer, num_rows, interpret=interpret)
    else:
        picked = weights if layer is None else [pick_layer(weight, layer) for weight in weights]
        results = [_product(flat, from_bits(weight.array, x.dtype).reshape(-1, fan_in)) for weight in picked]
    return [
        NamedArray(y.reshape([axis.size for axis in (*rows, *out)]), (*rows, *out))
        for y, out in zip(results, outs, strict=True)
    ]


def _product(flat: Array, matrix: Array) -> Array:
    """[rows, in] · [out, in]ᵀ. As matrices: XLA's CPU backend transposes weights of more axes."""
    count = flat.shape[0]
    if count < MIN_ROWS:
        flat = jnp.pad(flat, [(0, MIN_ROWS - count), (0, 0)])
    return jax.lax.dot_general(flat, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)[:count]


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
