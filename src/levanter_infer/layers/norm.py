"""RMSNorm and LayerNorm, with or without weight and bias."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis
from levanter_infer.layers.stack import pick_layer

ByRows = Callable[..., Any]
"""`by_rows(compute, *rows)` gives `compute(*rows)`, row by row where the backend has them apart
(`layers.linear.by_rows`)."""


@dataclass(frozen=True)
class NormConfig:
    """A norm, without its parameters."""

    eps: float
    """Added to the mean square, or to the variance, before the root."""
    plus_one: bool = False
    """Whether the factor is 1 + weight, as in Gemma."""
    center: bool = False
    """Whether the mean is subtracted first: LayerNorm."""
    weight: bool = True
    """Whether there is a factor."""
    bias: bool = False
    """Whether there is a summand, after the factor."""
    gate_rank: int | None = None
    """Inner width of the gate that multiplies the result (`GatedNorm`); None: there is none."""

    @property
    def unfused(self) -> str | None:
        """Why no kernel computes this norm with its matmul; None: kernels do."""
        reasons = {
            "a norm with 1 + weight": self.plus_one,
            "a norm that subtracts the mean": self.center,
            "a norm without a weight": not self.weight,
            "a norm with a bias": self.bias,
            "a norm with a gate": self.gate_rank is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def num_parameters(self, width: int) -> int:
        """Parameters of a norm over `width` numbers."""
        return width * (self.weight + self.bias + 2 * (self.gate_rank or 0))


class RMSNorm(eqx.Module):
    """`x / sqrt(mean(x²) + eps) · weight + bias` over some axes, in float32, returned in the dtype of `x`.

    With `center`, of `x - mean(x)`. Source: arXiv:1910.07467; with `center` arXiv:1607.06450.
    """

    weight: NamedArray | None
    """[layers, axes...]; without `layers` once a scan has picked a layer. None: the factor is 1."""
    config: NormConfig = eqx.field(static=True)
    bias: NamedArray | None = None
    """As the weight; None: nothing is added."""
    layer: Array | None = None
    """i32[], which layer of the stack is meant. None where there is no stack."""
    shard_axis: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """How the normed axes are sharded: the squares are added up over all shards."""
    width: int | None = eqx.field(static=True, default=None)
    """Numbers whose squares are averaged, in all shards; None: those of the normed axes."""
    over: tuple[str, ...] | None = eqx.field(static=True, default=None)
    """Names of the axes over which `x` is normed; None: those of the weight."""
    squares: Array | None = None
    """f32[row], sums of the squares of this device's columns of `x`, for the matmuls of a ring
    (`collective_matmul.gathered`); None: not known. The norm itself does not read them."""

    @staticmethod
    def init(
        batch: Sequence[Axis], axes: Axis | Sequence[Axis], *, config: NormConfig, dtype, num_normed: int | None = None
    ) -> "RMSNorm":
        """The norm that changes nothing but the scale of `x`.

        Args:
            batch: axes of independent layers.
            axes: those of its parameters.
            num_normed: the last of them over which `x` is normed; None: all.
        """
        axes = (axes,) if isinstance(axes, Axis) else tuple(axes)
        normed = axes if num_normed is None else axes[len(axes) - num_normed :]
        make = hax.zeros if config.plus_one else hax.ones
        return RMSNorm(
            weight=make((*batch, *axes), dtype=dtype) if config.weight else None,
            config=config,
            bias=hax.zeros((*batch, *axes), dtype=dtype) if config.bias else None,
            over=tuple(axis.name for axis in normed) if normed != axes or not config.weight else None,
        )

    def at(self, layer: Array | None, num_rows: Array | None = None) -> "RMSNorm":
        """The norm of one layer of a stack. `num_rows`: as for `Linear.at`; all rows are normed."""
        return dataclasses.replace(self, layer=layer)

    @property
    def fusable(self) -> tuple[Array, float] | None:
        """Weight and epsilon as kernels take them; None where they cannot compute this norm."""
        is_other = self.config.unfused is not None or self.over is not None or self.shard_axis != REPLICATED
        return None if is_other or self.weight is None else (self.weight.array, self.config.eps)

    def normed(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Those of these axes, of the weight, over which `x` is normed."""
        return axes if self.over is None else tuple(axis for axis in axes if axis.name in self.over)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: any axes, among them the weight's."""
        weight, bias = (self._of_layer(part) for part in (self.weight, self.bias))
        wide = x.astype(jnp.float32)
        axes = self.normed(x.axes if weight is None else weight.axes)
        if self.config.center:
            wide = wide - self._mean(wide, axes)
        result = wide * hax.rsqrt(self._mean(wide * wide, axes) + jnp.float32(self.config.eps))
        if weight is not None:
            factor = weight.astype(jnp.float32)
            result = result * (factor + jnp.float32(1) if self.config.plus_one else factor)
        if bias is not None:
            result = result + bias.astype(jnp.float32)
        return result.rearrange(x.axes).astype(x.dtype)

    def by_rows(self, x: NamedArray, rows: ByRows) -> NamedArray:
        """The norm of x [row, ...] or, in the plain forward, of any. Args: rows: `linear.by_rows` for those of `x`."""
        return rows(self.picked(), x)

    def picked(self) -> "RMSNorm":
        """The norm with the parameters of its layer alone."""
        weight, bias = self._of_layer(self.weight), self._of_layer(self.bias)
        return dataclasses.replace(self, weight=weight, bias=bias, layer=None)

    def _of_layer(self, parameter: NamedArray | None) -> NamedArray | None:
        return parameter if parameter is None or self.layer is None else pick_layer(parameter, self.layer)

    def _mean(self, values: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        if self.width is None:
            return hax.mean(values, axis=axes[0] if len(axes) == 1 else axes)
        total = hax.sum(values, axis=axes)
        return NamedArray(self.shard_axis.sum(total.array) / jnp.float32(self.width), total.axes)
