"""Mamba-2 as a mixer (Granite 4, Nemotron-H, Falcon-H1): a matrix per head that decays and gathers what tokens add."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import KEY_SIZE, STATE_GROUP, STATE_HEAD, VALUE_SIZE
from levanter_infer.cache.memory import FixedState
from levanter_infer.layers.causal_conv import CausalConv
from levanter_infer.layers.linear import Fusion, Linear, apply, split_key
from levanter_infer.layers.recurrence import RecurrentMixer, TokenInputs, repeated


class GatedNorm(enum.Enum):
    """Place of the norm of the result y and its gate z."""

    AFTER = "norm(y · silu(z))"
    """Granite 4."""
    BEFORE = "norm(y) · silu(z)"
    """Falcon-H1."""
    NONE = "y · silu(z)"
    """Falcon-H1, most sizes."""


@dataclass(frozen=True)
class Mamba2Block:
    """Mamba-2, without its parameters."""

    num_heads: int
    head_size: int
    num_groups: int
    """Groups of heads that share what the state is written and read with (B and C); also the groups of the norm."""
    state_size: int
    """Numbers of B and of C, in each group."""
    taps: int
    """Inputs that an output of the convolution sees."""
    norm_eps: float
    """Epsilon of the norm of the result, over each group."""
    conv_bias: bool = True
    bias: bool = False
    """Whether the projections of the input have one."""
    out_bias: bool = False
    """Whether the projection of the result has one."""
    norm: GatedNorm = GatedNorm.AFTER
    multipliers: tuple[float, ...] = (1.0,) * 5
    """Factors of z, x, B, C and dt."""

    def __post_init__(self):
        if self.num_heads % self.num_groups:
            raise ValueError(f"mamba heads={self.num_heads} is no multiple of mamba groups={self.num_groups}")

    @property
    def stored(self) -> "Mamba2Block":
        """The block with neutral options that no parameter depends on: blocks that are equal here share a stack."""
        norm = self.norm if self.norm is GatedNorm.NONE else GatedNorm.AFTER
        return dataclasses.replace(self, multipliers=(1.0,) * 5, norm=norm)

    @property
    def width(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_size

    @property
    def channels(self) -> int:
        """Those of the convolution: x, B and C."""
        return self.width + 2 * self.num_groups * self.state_size

    @property
    def memory(self) -> FixedState:
        """Memory of a layer, for each sequence."""
        memory = (self.num_heads, self.state_size, self.head_size)
        return FixedState((("conv", (self.taps - 1, self.channels)), ("memory", memory)))

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        rows = self.width + self.channels + self.num_heads
        conv = self.channels * (self.taps + self.conv_bias)
        norm = self.width * (self.norm is not GatedNorm.NONE)
        projections = (hidden + self.bias) * rows + hidden * (self.width + self.out_bias)
        return projections + conv + 3 * self.num_heads + norm


class Mamba2(RecurrentMixer):
    """`out(norm(y · silu(z)))` with `S_t = e^{a·dt} S_{t-1} + B_t (dt_t x_t)ᵀ` and `y_t = S_tᵀ C_t + d · x_t`, where x,
    B and C have passed a short convolution and SiLU, `dt = softplus(dt + dt_bias)` and `a = -exp(a_log)`.

    Source: arXiv:2405.21060.
    """

    z_proj: Linear
    x_proj: Linear
    """[layers, state_head, value_size, embed]"""
    b_proj: Linear
    c_proj: Linear
    """[layers, state_group, key_size, embed]"""
    dt_proj: Linear
    """[layers, state_head, embed]"""
    conv: CausalConv
    """Channels of x, B and C, in this order."""
    a_log: NamedArray
    dt_bias: NamedArray
    skip: NamedArray
    """f32[layers, state_head]; skip is d."""
    norm_weight: NamedArray | None
    """[layers, state_head, value_size]"""
    out_proj: Linear
    """[layers, embed, state_head, value_size]"""

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, block: Mamba2Block, *, key: Array | None, dtype) -> "Mamba2":
        """Random maps as in `Linear.init`, a decay of e^-dt; `batch`: axes of independent layers."""
        keys = iter(split_key(key, 7))
        head = Axis(STATE_HEAD, block.num_heads)
        value = (head, Axis(VALUE_SIZE, block.head_size))
        shared = (Axis(STATE_GROUP, block.num_groups), Axis(KEY_SIZE, block.state_size))

        def linear(*outs: Axis) -> Linear:
            return Linear.init(batch, outs, (embed,), key=next(keys), dtype=dtype, bias=block.bias)

        conv = CausalConv.init(batch, block.channels, block.taps, key=next(keys), dtype=dtype, bias=block.conv_bias)
        return Mamba2(
            z_proj=linear(*value),
            x_proj=linear(*value),
            b_proj=linear(*shared),
            c_proj=linear(*shared),
            dt_proj=linear(head),
            conv=conv,
            a_log=hax.zeros((*batch, head)),
            dt_bias=hax.zeros((*batch, head)),
            skip=hax.ones((*batch, head)),
            norm_weight=None if block.norm is GatedNorm.NONE else hax.ones((*batch, *value), dtype=dtype),
            out_proj=Linear.init(batch, (embed,), value, key=next(keys), dtype=dtype, bias=block.out_bias),
        )

    def _mixed(
        self,
        x: NamedArray,
        around: Fusion,
        block: Mamba2Block,
        convolve: Callable[[Array], Array],
        recur: Callable[[TokenInputs], Array],
    ) -> NamedArray:
        maps = (self.z_proj, self.x_proj, self.b_proj, self.c_proj, self.dt_proj)
        projected = apply(x, *maps, norm=around.norm)
        z, inputs, b, c, dt = (
            each if factor == 1 else each * jnp.asarray(factor, each.dtype)
            for each, factor in zip(projected, block.multipliers, strict=True)
        )
        lead = x.array.shape[:-1]
        flat = jnp.concatenate([each.array.reshape(*lead, -1) for each in (inputs, b, c)], axis=-1)
        sizes = [block.width, block.width + block.num_groups * block.state_size]
        of_heads = (*(1,) * len(lead), -1)
        rate, bias, skip = (each.array.reshape(of_heads) for each in (self.a_log, self.dt_bias, self.skip))

        def token_inputs(flat: Array, dt: Array) -> list[Array]:
            lead = flat.shape[:-1]
            x_flat, b_flat, c_flat = jnp.split(jax.nn.silu(flat), sizes, axis=-1)
            values = x_flat.reshape(*lead, *inputs.array.shape[-2:])
            step = jax.nn.softplus(dt.astype(jnp.float32) + bias)
            q, k = (
                repeated(flat.reshape(*lead, *shared.array.shape[-2:]), block.num_heads)
                for flat, shared in ((c_flat, c), (b_flat, b))
            )
            return [q, k, step[..., None] * values, -jnp.exp(rate) * step, values]

        def gated(result: Array, values: Array, z: Array) -> list[Array]:
            result = result + skip[..., None] * values
            gate = jax.nn.silu(z.astype(jnp.float32))
            if block.norm is GatedNorm.BEFORE:
                result = self._normed(result, block) * gate
            else:
                result = self._normed(result * gate, block)
            return [result.astype(x.dtype)]

        out = self.out_proj
        *tokens, values = out.backend.by_rows(token_inputs, out.num_rows, convolve(flat), dt.array)
        result = recur(TokenInputs(*tokens, beta=None))
        (result,) = out.backend.by_rows(gated, out.num_rows, result, values, z.array)
        return apply(NamedArray(result, z.axes), out, residual=around.residual)[0]

    def _normed(self, gated: Array, block: Mamba2Block) -> Array:
        """RMSNorm over the heads of each group, if the block has one."""
        if self.norm_weight is None:
            return gated
        groups = gated.reshape(*gated.shape[:-2], block.num_groups, -1)
        scale = jax.lax.rsqrt(jnp.mean(groups * groups, axis=-1, keepdims=True) + jnp.float32(block.norm_eps))
        weight = self.norm_weight.array.astype(jnp.float32)
        return (groups * scale).reshape(gated.shape) * weight.reshape(*(1,) * (gated.ndim - 2), *weight.shape)
