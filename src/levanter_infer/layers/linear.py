"""Linear maps whose weights are stored outputs first: `[layers, out..., in...]`."""

import dataclasses
import math
from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax import Array
from jax.core import Tracer
from jax.experimental.multihost_utils import process_allgather

from levanter_infer.axes import LAYERS, MIN_ROWS, PANEL, PANEL_SIZE
from levanter_infer.kernels.cpu.bindings import panel_rows, stacked_matmul, to_panels
from levanter_infer.kernels.gpu import linear as linear_gpu
from levanter_infer.layers.norm import RMSNorm
from levanter_infer.layers.shard_axis import ALONE, ShardAxis
from levanter_infer.layers.stack import pick_layer


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
    spread: ShardAxis = eqx.field(static=True, default=ALONE)
    """How the inputs are spread; results are added up over all parts, in the dtype of `x`."""

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
        """The map of one layer of a stack. `num_rows`: as in `PanelLinear`; all rows are computed here."""
        return jax.tree.map(
            lambda part: pick_layer(part, layer), self, is_leaf=lambda part: isinstance(part, NamedArray)
        )

    def compute(self, x: NamedArray, maps: Sequence["Linear"], around: "Around") -> list[NamedArray]:
        """`apply` for maps of this kind."""
        x = around.before(x)
        return [around.after(_biased(part._product(x), part).astype(x.dtype)) for part in maps]

    def _product(self, x: NamedArray) -> NamedArray:
        y = contract(x, self.weight, self.num_in)
        return NamedArray(self.spread.sum_in(x.dtype, y.array), y.axes)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: [..., in...], the input axes last and in the order of the weight's."""
        return apply(x, self)[0]


def readable(array: Array) -> Array:
    """The same, where this process can read it whole: what several processes have in parts, all of them gather."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return array
    return array if array.is_fully_addressable or array.is_fully_replicated else process_allgather(array, tiled=True)


class PanelLinear(eqx.Module):
    """A `Linear` for a CPU: its weights lie as the C++ kernels read them, and all layers stay in one piece."""

    panels: NamedArray
    """[layers, panel, panel_size] of `kernels.cpu.to_panels`; without `layers` where the map is not one of a stack."""
    bias: NamedArray | None
    """[layers, out...], or [out...] where the layer has been chosen."""
    outs: tuple[Axis, ...] = eqx.field(static=True)
    ins: tuple[Axis, ...] = eqx.field(static=True)
    layer: Array
    """i32[], which entry of the stack is meant; 0 where there is none."""
    num_rows: Array | None = None
    """i32[], how many rows of x count; the others cost nothing and give zeros. None: all."""
    isa: str | None = eqx.field(static=True, default=None)
    """Instruction set that the panels are laid out for and that computes; None for the widest (`kernels.cpu.isas`)."""

    @staticmethod
    def of(linear: Linear, *, stacked: bool = True, isa: str | None = None) -> "PanelLinear":
        """The same map. `stacked`: whether the first axis of the weight is that of layers."""
        axes = linear.weight.axes[1:] if stacked else linear.weight.axes
        outs, ins = axes[: -linear.num_in], axes[-linear.num_in :]
        sizes = [math.prod(axis.size for axis in part) for part in (outs, ins)]
        weight = readable(linear.weight.array).reshape(*([-1] if stacked else []), *sizes)
        panels = to_panels(weight, isa_name=isa)
        names = (LAYERS, PANEL, PANEL_SIZE) if stacked else (PANEL, PANEL_SIZE)
        return PanelLinear(
            panels=NamedArray(panels, tuple(map(Axis, names, panels.shape))),
            bias=linear.bias,
            outs=outs,
            ins=ins,
            layer=jnp.int32(0),
            isa=isa,
        )

    def at(self, layer: Array, num_rows: Array) -> "PanelLinear":
        """The map of one layer, for x whose first `num_rows` rows count. Nothing is sliced here."""
        bias = None if self.bias is None else pick_layer(self.bias, layer)
        return dataclasses.replace(self, bias=bias, layer=layer, num_rows=num_rows)

    def rows(self, indices: Array, dtype) -> Array:
        """Rows of the matrix, [n, in] of `dtype`; zeros for an index out of range. Requires: not one of a stack."""
        inputs = math.prod(axis.size for axis in self.ins)
        return from_bits(panel_rows(self.panels.array, indices, inputs, isa_name=self.isa), dtype)

    def compute(self, x: NamedArray, maps: Sequence["PanelLinear"], around: "Around") -> list[NamedArray]:
        """`apply` for maps of this kind, all in one call. The results are float32."""
        rows, norm = x.axes[: -len(self.ins)], around.norm
        assert x.axes[-len(self.ins) :] == self.ins, f"{x.axes} do not end with the inputs {self.ins}"

        def flat(named: NamedArray | None, last: tuple[Axis, ...]) -> Array | None:
            if named is None:
                return None
            assert named.axes == (*rows, *last), f"{named.axes} are not {(*rows, *last)}"
            return named.array.reshape(-1, math.prod(axis.size for axis in last)).astype(jnp.float32)

        inputs = flat(x, self.ins)
        assert inputs is not None
        results = stacked_matmul(
            inputs,
            [_stack(part.panels) for part in maps],
            [math.prod(axis.size for axis in part.outs) for part in maps],
            self.layer,
            self.num_rows,
            norm=None if norm is None else _stack(norm.weight, ndim=2),
            eps=0.0 if norm is None else norm.eps,
            gate=flat(around.gate, self.ins),
            residual=flat(around.residual, self.outs),
            isa_name=self.isa,
        )
        return [
            _biased(NamedArray(y.reshape([axis.size for axis in (*rows, *part.outs)]), (*rows, *part.outs)), part)
            for y, part in zip(results, maps, strict=True)
        ]

    def __call__(self, x: NamedArray) -> NamedArray:
        """As `Linear`."""
        return apply(x, self)[0]


class GpuLinear(eqx.Module):
    """A `Linear` for an NVIDIA GPU: its stack of layers is read where it lies (`kernels.linear_gpu`)."""

    weight: NamedArray
    """[layers, out..., in...]; without `layers` where a scan has picked one, and XLA computes the product."""
    bias: NamedArray | None
    """[layers, out...], or [out...] where the layer has been chosen."""
    num_in: int = eqx.field(static=True)
    interpret: bool = eqx.field(static=True, default=False)
    """Run by Pallas' interpreter, for tests."""
    layer: Array | None = None
    """i32[], which entry of the stack is meant."""
    num_rows: Array | None = None
    """As in `PanelLinear`."""

    @staticmethod
    def of(linear: Linear, *, interpret: bool = False) -> "GpuLinear":
        """The same map, with the same arrays."""
        return GpuLinear(weight=linear.weight, bias=linear.bias, num_in=linear.num_in, interpret=interpret)

    def at(self, layer: Array, num_rows: Array) -> "GpuLinear":
        """The map of one layer, for x whose first `num_rows` rows count. The weights are not sliced."""
        bias = None if self.bias is None else pick_layer(self.bias, layer)
        return dataclasses.replace(self, bias=bias, layer=layer, num_rows=num_rows)

    def compute(self, x: NamedArray, maps: Sequence["GpuLinear"], around: "Around") -> list[NamedArray]:
        """`apply` for maps of this kind, all in one call."""
        x = around.before(x)
        if self.layer is None:
            results = [contract(x, part.weight, part.num_in) for part in maps]
        else:
            rows, ins = x.axes[: -self.num_in], math.prod(axis.size for axis in x.axes[-self.num_in :])
            outs = [part.weight.axes[1 : -part.num_in] for part in maps]
            stacks = [part.weight.array.reshape(part.weight.axes[0].size, -1, ins) for part in maps]
            matmul = linear_gpu.stacked_matmul(
                x.array.reshape(-1, ins), stacks, self.layer, self.num_rows, interpret=self.interpret
            )
            results = [
                NamedArray(y.reshape([axis.size for axis in (*rows, *out)]), (*rows, *out))
                for y, out in zip(matmul, outs, strict=True)
            ]
        return [around.after(_biased(y, part).astype(x.dtype)) for y, part in zip(results, maps, strict=True)]

    def __call__(self, x: NamedArray) -> NamedArray:
        """As `Linear`."""
        return apply(x, self)[0]


LinearMap = Linear | PanelLinear | GpuLinear


@dataclasses.dataclass(frozen=True)
class Around:
    """What happens before and after a product, which a kernel may do in the same call."""

    norm: RMSNorm | None = None
    """The input is norm(x)."""
    gate: NamedArray | None = None
    """The input is silu(gate) · x, as in SwiGLU."""
    residual: NamedArray | None = None
    """Added to the result."""

    def before(self, x: NamedArray) -> NamedArray:
        """The input of the product, in the dtype of `x`."""
        if self.norm is not None:
            x = self.norm(x)
        if self.gate is not None:
            x = (hax.nn.silu(self.gate.astype(jnp.float32)) * x.astype(jnp.float32)).astype(x.dtype)
        return x

    def after(self, y: NamedArray) -> NamedArray:
        """The result."""
        return y if self.residual is None else self.residual + y


def apply(x: NamedArray, *maps: LinearMap, **around) -> list[NamedArray]:
    """Several maps, of one kind and of the same layer, of the same input; `around`: the fields of `Around`."""
    return maps[0].compute(x, maps, Around(**around))  # type: ignore[arg-type]


def _biased(y: NamedArray, part: LinearMap) -> NamedArray:
    return y if part.bias is None else y + part.bias.astype(jnp.float32)


def _stack(named: NamedArray, ndim: int = 3) -> Array:
    """An array with its axis of layers; what is not one of a stack becomes a stack of one."""
    return named.array if named.ndim == ndim else named.array[None]


def contract(x: NamedArray, weight: NamedArray, num_in: int) -> NamedArray:
    """Contract the last `num_in` axes of `x` with those of the weight; float32 sums and results.

    Args:
        x: [rows..., in...]
        weight: [out..., in...], in the dtype of `x` or its bits (`as_bits`).
    Returns: f32[rows..., out...].
    """
    ins, rows = x.axes[-num_in:], x.axes[:-num_in]
    assert weight.axes[-num_in:] == ins, f"input axes {x.axes} do not end with those of the weight, {weight.axes}"
    fan_in, out = math.prod(axis.size for axis in ins), weight.axes[:-num_in]
    y = _product(x.array.reshape(-1, fan_in), from_bits(weight.array, x.dtype).reshape(-1, fan_in))
    return NamedArray(y.reshape([axis.size for axis in (*rows, *out)]), (*rows, *out))


def _product(flat: Array, matrix: Array) -> Array:
    """[rows, in] · [out, in]ᵀ. As matrices: XLA's CPU backend transposes weights of more axes."""
    count = flat.shape[0]
    if count < MIN_ROWS:
        flat = jnp.pad(flat, [(0, MIN_ROWS - count), (0, 0)])
    return jax.lax.dot_general(flat, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)[:count]


def as_bits(array: NamedArray) -> NamedArray:
    """A bfloat16 or float16 array as the uint16 of its bits; others unchanged. `from_bits` undoes it.

    On a CPU, XLA converts a whole stack of 16-bit floats to float32 at every step, where a layer or rows are to be
    taken from it; of integers it takes the part alone. Outside of a trace the result shares the memory of `array`.
    """
    if array.dtype.itemsize != 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if isinstance(array.array, Tracer):
        return NamedArray(jax.lax.bitcast_convert_type(array.array, jnp.uint16), array.axes)
    # If somebody donates `array`, JAX sees that its memory is in use and copies.
    place = array.array.sharding if array.array.committed else None
    return NamedArray(jax.device_put(np.asarray(array.array).view(np.uint16), place), array.axes)


def from_bits(array: Array, dtype) -> Array:
    """`array`, or what its bits mean if it is unsigned integers."""
    return jax.lax.bitcast_convert_type(array, dtype) if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else array
