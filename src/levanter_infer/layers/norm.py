"""RMSNorm."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis
from levanter_infer.layers.stack import pick_layer


@dataclass(frozen=True)
class NormConfig:
    """A norm, without its parameters."""

    eps: float
    """Added to the mean square, or to the variance, before the root."""
    plus_one: bool = False
    """Whether the factor is 1 + weight, as in Gemma."""


class RMSNorm(eqx.Module):
    """`x / sqrt(mean(x²) + eps) · weight` over the axes of the weight, in float32, returned in the dtype of `x`.

    Source: arXiv:1910.07467.
    """

    weight: NamedArray
    """[layers, axes...]; without `layers` once a scan has picked a layer."""
    eps: float = eqx.field(static=True)
    layer: Array | None = None
    """i32[], which layer of the stack is meant. None where there is no stack."""
    plus_one: bool = eqx.field(static=True, default=False)
    """Whether the factor is 1 + weight."""
    shard_axis: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """How the normed axes are sharded: the squares are added up over all shards."""
    width: int | None = eqx.field(static=True, default=None)
    """Numbers whose squares are averaged, in all shards; None: those of the weight."""

    @staticmethod
    def init(batch: Sequence[Axis], axes: Axis | Sequence[Axis], *, config: NormConfig, dtype) -> "RMSNorm":
        """The norm that changes nothing but the scale of `x`. `batch`: axes of independent layers."""
        axes = (axes,) if isinstance(axes, Axis) else tuple(axes)
        make = hax.zeros if config.plus_one else hax.ones
        return RMSNorm(weight=make((*batch, *axes), dtype=dtype), eps=config.eps, plus_one=config.plus_one)

    def at(self, layer: Array) -> "RMSNorm":
        """The norm of one layer of a stack."""
        return dataclasses.replace(self, layer=layer)

    @property
    def fusable(self) -> tuple[Array, float] | None:
        """Weight and epsilon as kernels take them; None where they cannot compute this norm."""
        return (self.weight.array, self.eps) if not self.plus_one and self.shard_axis == REPLICATED else None

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: any axes, among them the weight's."""
        weight = self.weight if self.layer is None else pick_layer(self.weight, self.layer)
        wide = x.astype(jnp.float32)
        normed = wide * hax.rsqrt(self._mean_square(wide, weight.axes) + jnp.float32(self.eps))
        factor = weight.astype(jnp.float32)
        factor = factor + jnp.float32(1) if self.plus_one else factor
        return (normed * factor).rearrange(x.axes).astype(x.dtype)

    def _mean_square(self, wide: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        if self.width is None:
            return hax.mean(wide * wide, axis=axes[0] if len(axes) == 1 else axes)
        total = hax.sum(wide * wide, axis=axes)
        return NamedArray(self.shard_axis.sum(total.array) / jnp.float32(self.width), total.axes)
