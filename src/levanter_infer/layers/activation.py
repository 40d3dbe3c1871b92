"""Activations of feed-forward blocks."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import SCALAR


class Activation(enum.Enum):
    """A function of one number, by the name that HF gives it."""

    SILU = "silu"
    GELU = "gelu"
    """x · Φ(x), with the error function."""
    GELU_TANH = "gelu_pytorch_tanh"
    """Its approximation with tanh."""
    RELU = "relu"
    RELU2 = "relu2"
    """relu(x)²"""
    XIELU = "xielu"
    """`Xielu`, which has parameters."""

    @property
    def unfused(self) -> str | None:
        """This activation, if no kernel fuses it with a matmul; None: kernels compute it."""
        return None if self is Activation.SILU else "an activation other than SiLU"

    def __call__(self, x: Array) -> Array:
        """Elementwise, in the dtype of `x`. Not of `XIELU`."""
        match self:
            case Activation.SILU:
                return jax.nn.silu(x)
            case Activation.GELU:
                return jax.nn.gelu(x, approximate=False)
            case Activation.GELU_TANH:
                return jax.nn.gelu(x, approximate=True)
            case Activation.RELU:
                return jax.nn.relu(x)
            case Activation.RELU2:
                return jnp.square(jax.nn.relu(x))
            case Activation.XIELU:
                raise AssertionError("xIELU has parameters; use Xielu")

    def gated(self, gate: Array, up: Array) -> Array:
        """The activated gate times the other map, elementwise. Args: gate: before the activation."""
        return self(gate) * up


class Xielu(eqx.Module):
    """`a_p · x² + beta · x` above 0, and `a_n · (expm1(min(x, eps)) - x) + beta · x` below, with
    a_p = softplus(alpha_p) and a_n = beta + softplus(alpha_n). Source: arXiv:2411.13010.
    """

    alpha_p: NamedArray
    alpha_n: NamedArray
    beta: NamedArray
    eps: NamedArray
    """[layers, 1] each; without `layers` once a scan has picked a layer."""

    @staticmethod
    def init(batch: Sequence[Axis], *, dtype) -> "Xielu":
        """With HF's first values: a_p = a_n = 0.8. `batch`: axes of independent layers."""

        def full(value: float) -> NamedArray:
            return hax.full((*batch, Axis(SCALAR, 1)), value, dtype=dtype)

        beta = 0.5
        return Xielu(full(_softplus_inverse(0.8)), full(_softplus_inverse(0.8 - beta)), full(beta), full(-1e-6))

    def __call__(self, x: Array) -> Array:
        """Elementwise, computed in float32. Requires: one layer. Returns: as `x`."""
        wide = x.astype(jnp.float32)
        alpha_p, alpha_n, beta, eps = (
            part.array.reshape(()).astype(jnp.float32) for part in (self.alpha_p, self.alpha_n, self.beta, self.eps)
        )
        above = jax.nn.softplus(alpha_p) * wide * wide
        below = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(wide, eps)) - wide)
        return (jnp.where(wide > 0, above, below) + beta * wide).astype(x.dtype)


def _softplus_inverse(value: float) -> float:
    return math.log(math.expm1(value))


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss' gate: `(up + 1) · gate · sigmoid(alpha · gate)`, of values that are clamped first."""

    alpha: float = 1.702
    limit: float = 7.0
    """Largest gate, and largest distance of `up` from zero."""

    @property
    def value(self) -> str:
        """The name that HF gives it."""
        return Activation.SILU.value

    @property
    def unfused(self) -> str:
        """As `Activation.unfused`."""
        return "a clamped gate"

    def gated(self, gate: Array, up: Array) -> Array:
        """As `Activation.gated`."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)
