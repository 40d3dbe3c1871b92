"""RMSNorm, and LayerNorm without a bias."""

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
    center: bool = False
    """Whether the mean is subtracted first: LayerNorm without a bias, as in Cohere."""

    @property
    def unfused(self) -> str | None:
        """The part that no kernel fuses with a matmul or with the rotation; None: kernels compute this norm."""
        if self.plus_one:
            return "a norm with 1 + weight"
        return "a norm that subtracts the mean" if self.center else None


class RMSNorm(eqx.Module):
    """`x / sqrt(mean(x²) + eps) · weight` over the axes of the weight, in float32, returned in the dtype of `x`.

    With `config.center`, of `x - mean(x)`. Source: arXiv:1910.07467; with `center` arXiv:1607.06450.
    """

    weight: NamedArray
    """[layers, axes...]; without `layers` once a scan has picked a layer."""
    config: NormConfig = eqx.field(static=True)
    layer: Array | None = None
    """i32[], which layer of the stack is meant. None where there is no stack."""
    shard_axis: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """How the normed axes are sharded: the squares are added up over all shards."""
    width: int | None = eqx.field(static=True, default=None)
    """Numbers whose squares are averaged, in all shards; None: those of the weight."""
    num_normed: int | None = eqx.field(static=True, default=None)
    """The last axes of the weight over which `x` is normed; None: all."""

    @staticmethod
    def init(
        batch: Sequence[Axis],
        axes: Axis | Sequence[Axis],
        *,
        config: NormConfig,
        dtype,
        num_normed: int | None = None,
    ) -> "RMSNorm":
        """The norm that changes nothing but the scale of `x`. `batch`: axes of independent layers."""
        axes = (axes,) if isinstance(axes, Axis) else tuple(axes)
        make = hax.zeros if config.plus_one else hax.ones
        weight = make((*batch, *axes), dtype=dtype)
        return RMSNorm(weight, config, num_normed=num_normed)

    def at(self, layer: Array) -> "RMSNorm":
        """The norm of one layer of a stack."""
        return dataclasses.replace(self, layer=layer)

    @property
    def fusable(self) -> tuple[Array, float] | None:
        """Weight and epsilon as kernels take them; None where they cannot compute this norm."""
        is_part = self.num_normed is not None or self.shard_axis != REPLICATED
        return None if is_part or self.config.unfused is not None else (self.weight.array, self.config.eps)

    def normed(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Those of the weight's axes over which `x` is normed."""
        return axes if self.num_normed is None else axes[len(axes) - self.num_normed :]

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: any axes, among them the weight's."""
        weight = self.weight if self.layer is None else pick_layer(self.weight, self.layer)
        wide = x.astype(jnp.float32)
        axes = self.normed(weight.axes)
        if self.config.center:
            wide = wide - self._mean(wide, axes)
        normed = wide * hax.rsqrt(self._mean(wide * wide, axes) + jnp.float32(self.config.eps))
        factor = weight.astype(jnp.float32)
        factor = factor + jnp.float32(1) if self.config.plus_one else factor
        return (normed * factor).rearrange(x.axes).astype(x.dtype)

    def _mean(self, values: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        if self.width is None:
            return hax.mean(values, axis=axes[0] if len(axes) == 1 else axes)
        total = hax.sum(values, axis=axes)
        return NamedArray(self.shard_axis.sum(total.array) / jnp.float32(self.width), total.axes)
