"""Kimi delta attention as a mixer (Kimi-Linear): gated DeltaNet in which every channel of a key decays by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import GATE_RANK, KEY_SIZE, STATE_HEAD, VALUE_SIZE
from levanter_infer.cache.memory import FixedState
from levanter_infer.layers.causal_conv import CausalConv, joined
from levanter_infer.layers.linear import Fusion, Linear, apply, split_key
from levanter_infer.layers.norm import NormConfig, RMSNorm
from levanter_infer.layers.recurrence import RecurrentMixer, TokenInputs, unit


@dataclass(frozen=True)
class KimiDeltaBlock:
    """Kimi delta attention, without its parameters."""

    num_heads: int
    head_dim: int
    """Numbers of a query, a key and a value; also the rank of the maps to decays and to the gate."""
    taps: int
    """Inputs that an output of the convolutions of queries, keys and values sees."""
    norm_eps: float
    """Epsilon of the norm of each head's result."""

    @property
    def stored(self) -> "KimiDeltaBlock":
        """The block with neutral options that no parameter depends on: blocks that are equal here share a stack."""
        return self

    @property
    def width(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def memory(self) -> FixedState:
        """Memory of a layer, for each sequence."""
        memory = (self.num_heads, self.head_dim, self.head_dim)
        return FixedState((("conv", (self.taps - 1, 3 * self.width)), ("memory", memory)))

    def num_parameters(self, hidden: int) -> int:
        """From the sizes alone. Args: hidden: width of the residual stream."""
        maps = hidden * (4 * self.width + self.num_heads) + 2 * self.head_dim * (hidden + self.width)
        return maps + (3 * self.taps + 1) * self.width + self.num_heads + self.head_dim


class KimiDelta(RecurrentMixer):
    """`out(norm(o) · sigmoid(g))`, where o is the gated delta rule (`layers.recurrence`) of queries, keys and values
    that passed a short convolution and SiLU; queries and keys have unit length, and queries are divided by √head_dim.

    Source: arXiv:2510.26692.
    """

    q_proj: Linear
    k_proj: Linear
    """[layers, state_head, key_size, embed]"""
    v_proj: Linear
    """[layers, state_head, value_size, embed]"""
    q_conv: CausalConv
    k_conv: CausalConv
    v_conv: CausalConv
    b_proj: Linear
    """[layers, state_head, embed]; β = sigmoid(b)."""
    f_a_proj: Linear
    """[layers, gate_rank, embed]"""
    f_b_proj: Linear
    """[layers, state_head, key_size, gate_rank]; the decay comes from f."""
    a_log: NamedArray
    """f32[layers, state_head]"""
    dt_bias: NamedArray
    """f32[layers, state_head, key_size]; the logarithm of the decay is -exp(a_log) · softplus(f + dt_bias)."""
    g_a_proj: Linear
    """[layers, gate_rank, embed]"""
    g_b_proj: Linear
    """[layers, state_head, value_size, gate_rank]; g is the gate of the result."""
    norm: RMSNorm
    """[layers, value_size]"""
    out_proj: Linear
    """[layers, embed, state_head, value_size]"""

    @staticmethod
    def init(batch: Sequence[Axis], embed: Axis, block: KimiDeltaBlock, *, key: Array | None, dtype) -> "KimiDelta":
        """Random maps as in `Linear.init`, no decay bias; `batch`: axes of independent layers."""
        keys = iter(split_key(key, 12))
        head, rank = Axis(STATE_HEAD, block.num_heads), Axis(GATE_RANK, block.head_dim)
        keyed, valued = (head, Axis(KEY_SIZE, block.head_dim)), (head, Axis(VALUE_SIZE, block.head_dim))

        def linear(outs: Sequence[Axis], ins: Sequence[Axis] = (embed,)) -> Linear:
            return Linear.init(batch, outs, ins, key=next(keys), dtype=dtype)

        def conv() -> CausalConv:
            return CausalConv.init(batch, block.width, block.taps, key=next(keys), dtype=dtype)

        return KimiDelta(  # type: ignore[call-arg]  # conv is a property
            q_proj=linear(keyed),
            k_proj=linear(keyed),
            v_proj=linear(valued),
            q_conv=conv(),
            k_conv=conv(),
            v_conv=conv(),
            b_proj=linear((head,)),
            f_a_proj=linear((rank,)),
            f_b_proj=linear(keyed, (rank,)),
            a_log=hax.zeros((*batch, head)),
            dt_bias=hax.zeros((*batch, *keyed)),
            g_a_proj=linear((rank,)),
            g_b_proj=linear(valued, (rank,)),
            norm=RMSNorm.init(batch, valued[1], config=NormConfig(block.norm_eps), dtype=dtype),
            out_proj=linear((embed,), valued),
        )

    @property
    def conv(self) -> CausalConv:
        """The convolutions of queries, keys and values as one."""
        return joined(self.q_conv, self.k_conv, self.v_conv)

    def _mixed(
        self,
        x: NamedArray,
        around: Fusion,
        block: KimiDeltaBlock,
        convolve: Callable[[Array], Array],
        recur: Callable[[TokenInputs], Array],
    ) -> NamedArray:
        maps = (self.q_proj, self.k_proj, self.v_proj, self.b_proj, self.f_a_proj, self.g_a_proj)
        q, k, v, b, f, g = apply(x, *maps, norm=around.norm)
        (f,), (g,) = apply(f, self.f_b_proj), apply(g, self.g_b_proj)
        lead = x.array.shape[:-1]
        flat = jnp.concatenate([each.array.reshape(*lead, -1) for each in (q, k, v)], axis=-1)

        def inputs(flat: Array, f: Array, b: Array) -> list[Array]:
            shape = (*flat.shape[:-1], *v.array.shape[-2:])
            q, k, own = (each.reshape(shape) for each in jnp.split(jax.nn.silu(flat), 3, axis=-1))
            beta = jax.nn.sigmoid(b.astype(jnp.float32))
            return [unit(q) * jnp.float32(block.head_dim**-0.5), unit(k), own, self._log_decay(f), beta]

        def gated(result: NamedArray, g: NamedArray) -> NamedArray:
            wide = self.norm(result).array * jax.nn.sigmoid(g.array.astype(jnp.float32))
            return NamedArray(wide.astype(x.dtype), result.axes)

        out = self.out_proj
        tokens = out.backend.by_rows(inputs, out.num_rows, convolve(flat), f.array, b.array)
        result = out.by_rows(gated, NamedArray(recur(TokenInputs(*tokens)), v.axes), g)
        return apply(result, out, residual=around.residual)[0]

    def _log_decay(self, f: Array) -> Array:
        """[..., head, key_size], of each channel."""
        lead = (1,) * (f.ndim - 2)
        rate, bias = self.a_log.array.reshape(*lead, -1, 1), self.dt_bias.array.reshape(*lead, *f.shape[-2:])
        return -jnp.exp(rate) * jax.nn.softplus(f.astype(jnp.float32) + bias)
