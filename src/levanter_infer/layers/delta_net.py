"""Gated DeltaNet as a mixer (Qwen3-Next, OLMo Hybrid): a matrix per head, corrected by each token."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import KEY_SIZE, STATE_HEAD, VALUE_SIZE
from levanter_infer.cache.memory import FixedState
from levanter_infer.layers.causal_conv import CausalConv, joined
from levanter_infer.layers.linear import Fusion, Linear, apply, split_key
from levanter_infer.layers.norm import NormConfig, RMSNorm
from levanter_infer.layers.recurrence import RecurrentMixer, TokenInputs, repeated, unit


@dataclass(frozen=True)
class DeltaNetBlock:
    """Gated DeltaNet, without its parameters."""

    num_key_heads: int
    """Heads of queries and keys; each serves as many heads of values, one after the other."""
    num_value_heads: int
    key_size: int
    value_size: int
    taps: int
    """Inputs that an output of the convolution of queries, keys and values sees."""
    norm_eps: float
    """Epsilon of the norm of each head's result."""
    beta_scale: float = 1.0
    """Factor of β: 2 where the memory may have negative eigenvalues (OLMo Hybrid). Source: arXiv:2411.12537."""

    def __post_init__(self):
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.num_value_heads} is no multiple of "
                f"linear_num_key_heads={self.num_key_heads}"
            )

    @property
    def stored(self) -> "DeltaNetBlock":
        """The block with neutral options that no parameter depends on: blocks that are equal here share a stack."""
        return dataclasses.replace(self, beta_scale=1.0)

    @property
    def channels(self) -> int:
        """Those of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def memory(self) -> FixedState:
        """Memory of a layer, for each sequence."""
        memory = (self.num_value_heads, self.key_size, self.value_size)
        return FixedState((("conv", (self.taps - 1, self.channels)), ("memory", memory)))

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        values = self.num_value_heads * self.value_size
        maps = hidden * (self.channels + 2 * values + 2 * self.num_value_heads)
        return maps + self.channels * self.taps + 2 * self.num_value_heads + self.value_size


class DeltaNet(RecurrentMixer):
    """`out(norm(o) · silu(z))`, where o is the gated delta rule (`layers.recurrence`) of queries, keys and values that
    passed a short convolution and SiLU; queries and keys have unit length, and queries are divided by √key_size.

    Source: arXiv:2412.06464.
    """

    q_proj: Linear
    k_proj: Linear
    """[layers, state_head, key_size, embed]"""
    v_proj: Linear
    z_proj: Linear
    """[layers, state_head, value_size, embed]; z is the gate of the result."""
    b_proj: Linear
    a_proj: Linear
    """[layers, state_head, embed]; β = sigmoid(b), and the decay comes from a."""
    q_conv: CausalConv
    k_conv: CausalConv
    v_conv: CausalConv
    a_log: NamedArray
    dt_bias: NamedArray
    """f32[layers, state_head]; the logarithm of the decay is -exp(a_log) · softplus(a + dt_bias)."""
    norm: RMSNorm
    """f32[layers, value_size]"""
    out_proj: Linear
    """[layers, embed, state_head, value_size]"""

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, block: DeltaNetBlock, *, key: Array | None, dtype) -> "DeltaNet":
        """Random maps as in `Linear.init`, no decay bias; `batch`: axes of independent layers."""
        keys = iter(split_key(key, 10))
        k_heads = (Axis(STATE_HEAD, block.num_key_heads), Axis(KEY_SIZE, block.key_size))
        head, value = Axis(STATE_HEAD, block.num_value_heads), Axis(VALUE_SIZE, block.value_size)

        def linear(*outs: Axis) -> Linear:
            return Linear.init(batch, outs, (embed,), key=next(keys), dtype=dtype)

        def conv(heads: int, size: int) -> CausalConv:
            return CausalConv.init(batch, heads * size, block.taps, key=next(keys), dtype=dtype)

        return DeltaNet(  # type: ignore[call-arg]  # conv is a property
            q_proj=linear(*k_heads),
            k_proj=linear(*k_heads),
            v_proj=linear(head, value),
            z_proj=linear(head, value),
            b_proj=linear(head),
            a_proj=linear(head),
            q_conv=conv(block.num_key_heads, block.key_size),
            k_conv=conv(block.num_key_heads, block.key_size),
            v_conv=conv(block.num_value_heads, block.value_size),
            a_log=hax.zeros((*batch, head)),
            dt_bias=hax.zeros((*batch, head)),
            norm=RMSNorm.init(batch, value, config=NormConfig(block.norm_eps), dtype=jnp.float32),
            out_proj=Linear.init(batch, (embed,), (head, value), key=next(keys), dtype=dtype),
        )

    @property
    def conv(self) -> CausalConv:
        """The convolutions of queries, keys and values as one."""
        return joined(self.q_conv, self.k_conv, self.v_conv)

    def _mixed(
        self,
        x: NamedArray,
        around: Fusion,
        block: DeltaNetBlock,
        convolve: Callable[[Array], Array],
        recur: Callable[[TokenInputs], Array],
    ) -> NamedArray:
        maps = (self.q_proj, self.k_proj, self.v_proj, self.z_proj, self.b_proj, self.a_proj)
        q, k, v, z, b, a = apply(x, *maps, norm=around.norm)
        lead = x.array.shape[:-1]
        flat = jnp.concatenate([each.array.reshape(*lead, -1) for each in (q, k, v)], axis=-1)
        keys = block.num_key_heads * block.key_size

        def inputs(flat: Array, a: Array, b: Array) -> list[Array]:
            lead = flat.shape[:-1]
            q_flat, k_flat, v_flat = jnp.split(jax.nn.silu(flat), [keys, 2 * keys], axis=-1)
            q_unit, k_unit = (unit(each.reshape(*lead, *q.array.shape[-2:])) for each in (q_flat, k_flat))
            q_heads = repeated(q_unit * jnp.float32(block.key_size**-0.5), block.num_value_heads)
            k_heads = repeated(k_unit, block.num_value_heads)
            beta = jax.nn.sigmoid(b.astype(jnp.float32))
            beta = beta if block.beta_scale == 1 else beta * jnp.float32(block.beta_scale)
            return [q_heads, k_heads, v_flat.reshape(*lead, *v.array.shape[-2:]), self._log_decay(a), beta]

        def gated(result: NamedArray, z: NamedArray) -> NamedArray:
            wide = self.norm(result).array * jax.nn.silu(z.array.astype(jnp.float32))
            return NamedArray(wide.astype(x.dtype), result.axes)

        out = self.out_proj
        tokens = out.backend.by_rows(inputs, out.num_rows, convolve(flat), a.array, b.array)
        result = out.by_rows(gated, NamedArray(recur(TokenInputs(*tokens)), v.axes), z)
        return apply(result, out, residual=around.residual)[0]

    def _log_decay(self, a: Array) -> Array:
        rate, bias = (each.array.reshape(*(1,) * (a.ndim - 1), -1) for each in (self.a_log, self.dt_bias))
        return -jnp.exp(rate) * jax.nn.softplus(a.astype(jnp.float32) + bias)
