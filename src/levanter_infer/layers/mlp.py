"""The gated feed-forward block, SwiGLU."""

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.layers.linear import Linear, LinearMap, apply


class Mlp(eqx.Module):
    """`down(silu(gate(x)) · up(x))`. Source: arXiv:2002.05202."""

    gate_proj: LinearMap
    up_proj: LinearMap
    down_proj: LinearMap

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, mlp: Axis, *, bias: bool, key: Array, dtype) -> "Mlp":
        gate, up, down = jax.random.split(key, 3)
        return Mlp(
            gate_proj=Linear.init(batch, (mlp,), (embed,), key=gate, dtype=dtype, bias=bias),
            up_proj=Linear.init(batch, (mlp,), (embed,), key=up, dtype=dtype, bias=bias),
            down_proj=Linear.init(batch, (embed,), (mlp,), key=down, dtype=dtype, bias=bias),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: [..., embed]. Returns: [..., embed]."""
        gate, up = (part.astype(jnp.float32) for part in apply(x, self.gate_proj, self.up_proj))
        return self.down_proj((hax.nn.silu(gate) * up).astype(x.dtype))
