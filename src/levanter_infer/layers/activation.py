"""Activations of feed-forward blocks."""

import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


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

    @property
    def unfused(self) -> str | None:
        """This activation, if no kernel fuses it with a matmul; None: kernels compute it."""
        return None if self is Activation.SILU else "an activation other than SiLU"

    def __call__(self, x: Array) -> Array:
        """Elementwise, in the dtype of `x`."""
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

    def gated(self, gate: Array, up: Array) -> Array:
        """The gated product, elementwise. Args: gate: not yet activated; up: the other factor."""
        return self(gate) * up


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
