"""The gated feed-forward block, SwiGLU."""

from collections.abc import Sequence

import equinox as eqx
import jax
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.layers.linear import Linear, apply
from levanter_infer.layers.norm import RMSNorm


class Mlp(eqx.Module):
    """`down(silu(gate(x)) · up(x))`. Source: arXiv:2002.05202."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, mlp: Axis, *, bias: bool, key: Array, dtype) -> "Mlp":
        gate, up, down = jax.random.split(key, 3)
        return Mlp(
            gate_proj=Linear.init(batch, (mlp,), (embed,), key=gate, dtype=dtype, bias=bias),
            up_proj=Linear.init(batch, (mlp,), (embed,), key=up, dtype=dtype, bias=bias),
            down_proj=Linear.init(batch, (embed,), (mlp,), key=down, dtype=dtype, bias=bias),
        )

    def __call__(self, x: NamedArray, norm: RMSNorm) -> NamedArray:
        """`x + mlp(norm(x))`. Args: x: [..., embed]. Returns: [..., embed]."""
        gate, up = apply(x, self.gate_proj, self.up_proj, norm=norm)
        return apply(up, self.down_proj, gate=gate, residual=x)[0]
