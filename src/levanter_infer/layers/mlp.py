"""The dense feed-forward block: gated, as SwiGLU, or plain."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import equinox as eqx
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import MLP
from levanter_infer.layers.activation import Activation, Xielu
from levanter_infer.layers.linear import Fusion, Linear, apply, fuses_gated_pair, fuses_swiglu, split_key


@dataclass(frozen=True)
class DenseBlock:
    """A feed-forward block that all tokens go through, without its parameters."""

    width: int
    """Inner width."""
    activation: Activation = Activation.SILU
    gated: bool = True
    """`down(activation(gate(x)) · up(x))`; else `down(activation(up(x)))`."""
    bias: bool = False
    """Whether all its maps have one."""
    gate_multiplier: float = 1.0
    """Factor of the gate, before the activation."""
    out_multiplier: float = 1.0
    """Factor of the result."""

    @property
    def stored(self) -> "DenseBlock":
        """The block with neutral options that no parameter depends on: blocks that are equal here share a stack."""
        has_parameters = self.activation is Activation.XIELU
        own = self if has_parameters else dataclasses.replace(self, activation=Activation.SILU)
        return dataclasses.replace(own, gate_multiplier=1.0, out_multiplier=1.0)

    def __post_init__(self):
        if self.gated and self.activation is Activation.XIELU:
            raise ValueError("a gated block with xIELU is not implemented: no family has one")

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        inner = 2 if self.gated else 1
        of_activation = 4 if self.activation is Activation.XIELU else 0
        return (inner + 1) * hidden * self.width + (inner * self.width + hidden) * self.bias + of_activation


class Mlp(eqx.Module):
    """`down(activation(gate(x)) · up(x))`. Source: arXiv:2002.05202."""

    gate_proj: Linear | None
    """None: the block is not gated."""
    up_proj: Linear
    down_proj: Linear
    xielu: Xielu | None
    """The activation, where it has parameters."""

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, block: DenseBlock, *, key: Array | None, dtype) -> "Mlp":
        """Random maps as in `Linear.init`; `batch`: axes of independent layers."""
        gate, up, down = split_key(key, 3)
        mlp = Axis(MLP, block.width)

        def linear(out: Axis, ins: Axis, key: Array | None) -> Linear:
            return Linear.init(batch, (out,), (ins,), key=key, dtype=dtype, bias=block.bias)

        return Mlp(
            gate_proj=linear(mlp, embed, gate) if block.gated else None,
            up_proj=linear(mlp, embed, up),
            down_proj=linear(embed, mlp, down),
            xielu=Xielu.init(batch, dtype=dtype) if block.activation is Activation.XIELU else None,
        )

    def __call__(self, x: NamedArray, around: Fusion, block: DenseBlock) -> NamedArray:
        """Args: x: [..., embed]; around: the norm of its input, and what is added. Returns: [..., embed]."""
        if self.gate_proj is None:
            (up,) = apply(x, self.up_proj, norm=around.norm)
            activation = self.xielu or block.activation
            up = self.up_proj.by_rows(lambda up: NamedArray(activation(up.array), up.axes), up)
            return apply(up, self.down_proj, residual=around.residual)[0]
        gate: NamedArray | None
        neutral = block.gate_multiplier == block.out_multiplier == 1
        if neutral and fuses_swiglu(self.gate_proj, self.up_proj, self.down_proj, block.activation):
            maps = self.gate_proj, self.up_proj, self.down_proj
            return apply(x, *maps, norm=around.norm, residual=around.residual, is_gated_pair=True)[0]
        if block.gate_multiplier == 1 and fuses_gated_pair(self.gate_proj, self.up_proj, block.activation):
            (up,), gate = apply(x, self.gate_proj, self.up_proj, norm=around.norm, is_gated_pair=True), None
        else:
            gate, up = apply(x, self.gate_proj, self.up_proj, norm=around.norm)
        if gate is not None and block.gate_multiplier != 1:
            gate = self.gate_proj.by_rows(lambda gate: gate * jnp.asarray(block.gate_multiplier, gate.dtype), gate)
        if block.out_multiplier != 1:
            (result,) = apply(up, self.down_proj, gate=gate, activation=block.activation)
            factor = jnp.asarray(block.out_multiplier, result.dtype)
            return around.after(self.down_proj.by_rows(lambda result: result * factor, result))
        return apply(up, self.down_proj, gate=gate, activation=block.activation, residual=around.residual)[0]
