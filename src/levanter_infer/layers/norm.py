"""RMSNorm."""

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray


class RMSNorm(eqx.Module):
    """`x / sqrt(mean(x²) + eps) · weight` over one axis, in float32, returned in the dtype of `x`.

    Source: arXiv:1910.07467.
    """

    weight: NamedArray
    """[layers, axis]; without `layers` once a scan has picked a layer."""
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(batch: Sequence[Axis], axis: Axis, *, eps: float, dtype) -> "RMSNorm":
        return RMSNorm(weight=hax.ones((*batch, axis), dtype=dtype), eps=eps)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: any axes, among them the weight's one."""
        (axis,) = self.weight.axes
        wide = x.astype(jnp.float32)
        variance = hax.mean(wide * wide, axis=axis)
        normed = wide * hax.rsqrt(variance + jnp.float32(self.eps))
        return (normed * self.weight.astype(jnp.float32)).rearrange(x.axes).astype(x.dtype)
