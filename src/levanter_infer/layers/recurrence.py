"""Gated linear recurrences over a matrix per head: gated DeltaNet, Kimi delta attention, and Mamba-2 without the delta
rule.

    S_t = e^{g_t} S_{t-1} + k_t δ_tᵀ,    o_t = S_tᵀ q_t
    δ_t = v_t, or with the delta rule β_t (v_t - (e^{g_t} S_{t-1})ᵀ k_t)

The decay e^{g_t} is one number for a head, or in Kimi delta attention one for each channel of its keys (a row of S).

The same mathematics in three forms: `scan` a token at a time over plain sequences, which is the oracle; one token of
each row; and blocks of `BLOCK` tokens of one row by matmuls. `ragged` composes the last two over a packed batch, and
`ragged_scan` has the first form there, for equal bits whatever the batch. All numbers are float32. Sources: Gated
DeltaNet, arXiv:2412.06464; Kimi delta attention, arXiv:2510.26692; state space duality, arXiv:2405.21060.
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import Array

from levanter_infer.cache.slot_state import SlotState
from levanter_infer.kernels.scopes import BY_ROWS
from levanter_infer.layers.causal_conv import CausalConv
from levanter_infer.layers.linear import Fusion, Linear
from levanter_infer.layers.rows import RaggedRows

BLOCK = 64
"""Tokens of a row that are computed together."""
CHANNEL_BLOCK = 16
"""The same where channels decay by themselves: a block has a decay of each channel between any two of its tokens."""
_SOLVE_BLOCK = 16
"""Equations of a triangular system whose inverse is computed, row by row."""
_L2_EPS = 1e-6
_HIGHEST = jax.lax.Precision.HIGHEST


class TokenInputs(eqx.Module):
    """Inputs of the recurrence, of each token. f32, the leading axes are any."""

    q: Array
    """[..., head, key_size]"""
    k: Array
    v: Array
    """[..., head, value_size]"""
    log_decay: Array
    """[..., head], or [..., head, key_size] of each channel; at most 0."""
    beta: Array | None
    """[..., head], share of the old value that the new one replaces; None: there is no delta rule."""

    def map(self, function) -> "TokenInputs":
        return jax.tree.map(function, self)

    @property
    def is_by_channel(self) -> bool:
        """Whether every channel of the keys has a decay of its own."""
        return self.log_decay.ndim == self.k.ndim

    @property
    def channel_log_decay(self) -> Array:
        """[..., head, key_size], or of size one where all channels decay alike."""
        return self.log_decay if self.is_by_channel else self.log_decay[..., None]


def one_token(state: Array, x: TokenInputs) -> tuple[Array, Array]:
    """Args: state: f32[..., head, key_size, value_size]. Returns: the new state, and f32[..., head, value_size]."""
    state = jnp.exp(x.channel_log_decay)[..., None] * state
    delta = x.v
    if x.beta is not None:
        delta = x.beta[..., None] * (x.v - _applied(state, x.k))
    state = state + x.k[..., None] * delta[..., None, :]
    return state, _applied(state, x.q)


def _applied(state: Array, vector: Array) -> Array:
    """`stateᵀ vector` of each head, [..., head, value_size]."""

    def as_matmul(state: Array, vector: Array) -> Array:
        return _matmul("...kv,...k->...v", state, vector)

    def as_sum(state: Array, vector: Array) -> Array:
        return jnp.sum(state * vector[..., None], axis=-2)

    # XLA's CPU backend has no vectors for a sum over an axis before the last
    return jax.lax.platform_dependent(state, vector, cpu=as_matmul, default=as_sum)


def scan(x: TokenInputs) -> Array:
    """A token at a time from the zero state.

    Args: x: [..., position, head, …]
    Returns: f32[..., position, head, value_size].
    """
    axis = x.v.ndim - 3
    by_position = x.map(lambda array: jnp.moveaxis(array, axis, 0))
    zeros = jnp.zeros((*by_position.k.shape[1:], x.v.shape[-1]), jnp.float32)
    return jnp.moveaxis(jax.lax.scan(one_token, zeros, by_position)[1], 0, axis)


def block(state: Array, x: TokenInputs) -> tuple[Array, Array]:
    """Consecutive tokens of one row, by matmuls.

    The delta rule is a triangular system for all δ of the block (the WY form). A token with k = v = 0 and log_decay = 0
    changes nothing.

    Args:
        state: f32[head, key_size, value_size], before the first of them.
        x: [token, head, …]
    Returns: the state after the last, and f32[token, head, value_size].
    """
    parts = (x.q, x.k, x.v, x.channel_log_decay)
    q, k, v, log_decay = (jnp.swapaxes(each, 0, 1) for each in parts)  # [head, token, size]
    total = jnp.cumsum(log_decay, axis=1)
    num = total.shape[1]
    # The decay from each token to each later one, of sums of its own: differences of `total` would lose their digits,
    # and quotients of their exponentials would overflow.
    after = jnp.tril(jnp.ones((1, num, num), bool), -1)
    between = jnp.cumsum(jnp.where(after[..., None], log_decay[:, :, None], 0), axis=1)
    decay = jnp.exp(between)  # [head, token, earlier token, key_size or 1]

    def products(left: Array) -> Array:
        """Each token's dot products with keys of earlier ones, decayed in between; anything for later ones."""
        if x.is_by_channel:
            return jnp.sum(left[:, :, None] * k[:, None] * decay, axis=-1)
        return decay[..., 0] * _matmul("htk,hsk->hts", left, k)

    delta = v
    if x.beta is not None:
        beta = x.beta.T[..., None]
        remembered = _matmul("htk,hkv->htv", jnp.exp(total) * k, state)
        system = jnp.tril(beta * products(k), -1)  # of its diagonal of ones
        delta = solved(system, beta * (v - remembered))
    result = _matmul("htk,hkv->htv", jnp.exp(total) * q, state)
    result = result + _matmul("hts,hsv->htv", jnp.tril(products(q)), delta)
    state = jnp.exp(total[:, -1])[..., None] * state + _matmul("htk,htv->hkv", decay[:, -1] * k, delta)
    return state, jnp.swapaxes(result, 0, 1)


def solved(system: Array, right: Array) -> Array:
    """x of `x + system x = right`, by forward substitution in blocks, each with the inverse of its own equations.

    Not `jax.lax.linalg.triangular_solve`: on a CPU that is LAPACK's, in parallel on the threads that run the devices of
    a mesh, where it may wait for itself (jaxlib 0.10.2).

    Args:
        system: f32[head, n, n], zeros on and above the diagonal.
        right: f32[head, n, value_size]
    """
    num, size = right.shape[1], min(_SOLVE_BLOCK, right.shape[1])
    padding = -num % size
    system = jnp.pad(system, [(0, 0), (0, padding), (0, padding)])
    right = jnp.pad(right, [(0, 0), (0, padding), (0, 0)])
    starts = range(0, num + padding, size)
    own = jnp.stack([system[:, i : i + size, i : i + size] for i in starts], axis=1)

    def next_row(row: Array, inverse: Array) -> Array:
        known = _matmul("hbj,hbjk->hbk", jax.lax.dynamic_index_in_dim(own, row, 2, keepdims=False), inverse)
        return inverse.at[:, :, row].add(-known)

    identity = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), own.shape)
    inverse = jax.lax.fori_loop(1, size, next_row, identity)
    found: list[Array] = []
    for number, i in enumerate(starts):
        rest = right[:, i : i + size]
        if found:
            rest = rest - _matmul("hij,hjv->hiv", system[:, i : i + size, :i], jnp.concatenate(found, axis=1))
        found.append(_matmul("hij,hjv->hiv", inverse[:, number], rest))
    return jnp.concatenate(found, axis=1)[:, :num]


def ragged_scan(state: Array, x: TokenInputs, rows: RaggedRows) -> tuple[Array, Array]:
    """As `ragged`, one token after the other by the same code, so that bits do not depend on where steps end."""

    def part(array: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, start, 1)

    def one_row(row: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def next_token(item: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            own, result = carry
            place = rows.starts[row] + item
            inputs = x.map(lambda array: part(array, place))
            # A loop of one trip, into whose body XLA merges nothing (`kernels.loops.one_by_one`)
            step = lambda _, carry: one_token(carry[0], inputs)  # noqa: E731
            mixed = jnp.zeros((1, *x.v.shape[1:]), jnp.float32)
            own, mixed = jax.lax.fori_loop(0, jnp.minimum(rows.lens[row], 1), step, (own, mixed))
            return own, jax.lax.dynamic_update_slice_in_dim(result, mixed, place, 0)

        state, result = carry
        own, result = jax.lax.fori_loop(0, rows.lens[row], next_token, (part(state, row), result))
        return jax.lax.dynamic_update_slice_in_dim(state, own, row, 0), result

    with jax.named_scope(BY_ROWS):
        return jax.lax.fori_loop(0, rows.num_rows, one_row, (state, jnp.zeros(x.v.shape, jnp.float32)))


def ragged(state: Array, x: TokenInputs, rows: RaggedRows) -> tuple[Array, Array]:
    """The packed tokens of a step: rows of one token all at once, the tokens of others block by block.

    Args:
        state: f32[row, head, key_size, value_size], before each row's first token.
        x: [token, head, …]
    Returns: the state after each row's last token, and f32[token, head, value_size], zeros for padding.
    """
    num_tokens = x.v.shape[0]
    first = x.map(lambda array: array.at[rows.starts].get(mode="fill", fill_value=0))
    stepped, results = one_token(state, first)
    is_single = rows.lens == 1
    state = jnp.where(is_single[:, None, None, None], stepped, state)
    place = jnp.where(is_single, rows.starts, num_tokens)
    result = jnp.zeros(x.v.shape, jnp.float32).at[place].set(results, mode="drop")

    size = min(CHANNEL_BLOCK if x.is_by_channel else BLOCK, num_tokens)
    counts = jnp.where(rows.lens > 1, -(-rows.lens // size), 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    item = jnp.arange(size, dtype=jnp.int32)

    def body(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        index, state, result = carry
        row = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        begin = (index - ends[row] + counts[row]) * size
        place = jnp.where(item < rows.lens[row] - begin, rows.starts[row] + begin + item, num_tokens)
        tokens = x.map(lambda array: array.at[place].get(mode="fill", fill_value=0))
        new, results = block(state[row], tokens)
        return index + 1, state.at[row].set(new), result.at[place].set(results, mode="drop")

    return jax.lax.while_loop(lambda carry: carry[0] < ends[-1], body, (jnp.int32(0), state, result))[1:]


def _matmul(spec: str, left: Array, right: Array) -> Array:
    return jnp.einsum(spec, left, right, precision=_HIGHEST, preferred_element_type=jnp.float32)


def unit(x: Array) -> Array:
    """Vectors of unit length, along the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(_L2_EPS))


def repeated(heads: Array, num_heads: int) -> Array:
    """[..., group, size] for every head: each group serves as many heads, one after the other."""
    return jnp.repeat(heads, num_heads // heads.shape[-2], axis=-2)


class RecurrentMixer(eqx.Module):
    """A mixer of a short convolution and then a recurrence. Subclasses say what stands around both."""

    conv: eqx.AbstractVar[CausalConv]
    out_proj: eqx.AbstractVar[Linear]

    @abc.abstractmethod
    def _mixed(
        self,
        x: NamedArray,
        around: Fusion,
        block: Any,
        convolve: Callable[[Array], Array],
        recur: Callable[[TokenInputs], Array],
    ) -> NamedArray:
        """The mixer of x [..., embed], with the convolution and the recurrence in the form that x needs."""

    def dense(self, x: NamedArray, around: Fusion, block: Any) -> tuple[NamedArray, None]:
        """Args: x: [..., position, embed], position 0 first. Returns: [..., position, embed], and no state."""
        return self._mixed(x, around, block, self.conv.dense, scan), None

    def paged(
        self,
        x: NamedArray,
        around: Fusion,
        block: Any,
        state: SlotState,
        layer: Array,
        rows: RaggedRows,
    ) -> tuple[NamedArray, SlotState]:
        """The packed tokens of a step, [token, embed], after the state of each row in `layer` of the pool, i32[]."""
        stored, new = state.read(layer, rows.slots, rows.is_new), {}

        def convolved(inputs: Array) -> Array:
            result, new["conv"] = self.conv.ragged(inputs, stored["conv"], rows, self.out_proj)
            return result

        def recurred(tokens: TokenInputs) -> Array:
            recur = ragged_scan if self.out_proj.backend.rows_apart else ragged
            new["memory"], result = recur(stored["memory"], tokens, rows)
            return result

        mixed = self._mixed(x, around, block, convolved, recurred)
        return mixed, state.write(layer, rows.slots, new)
