"""RMSNorm."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.layers.stack import pick_layer


class RMSNorm(eqx.Module):
    """`x / sqrt(mean(x²) + eps) · weight` over one axis, in float32, returned in the dtype of `x`.

    Source: arXiv:1910.07467.
    """

    weight: NamedArray
    """[layers, axis]; without `layers` once a scan has picked a layer."""
    eps: float = eqx.field(static=True)
    layer: Array | None = None
    """i32[], which layer of the stack is meant. None where there is no stack."""

    @staticmethod
    def init(batch: Sequence[Axis], axis: Axis, *, eps: float, dtype) -> "RMSNorm":
        return RMSNorm(weight=hax.ones((*batch, axis), dtype=dtype), eps=eps)

    def at(self, layer: Array) -> "RMSNorm":
        """The norm of one layer of a stack."""
        return dataclasses.replace(self, layer=layer)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: any axes, among them the weight's one."""
        weight = self.weight if self.layer is None else pick_layer(self.weight, self.layer)
        (axis,) = weight.axes
        wide = x.astype(jnp.float32)
        variance = hax.mean(wide * wide, axis=axis)
        normed = wide * hax.rsqrt(variance + jnp.float32(self.eps))
        return (normed * weight.astype(jnp.float32)).rearrange(x.axes).astype(x.dtype)
