"""Rotary position embedding with every scaling that HF checkpoints of the Llama kin use.

Frequencies are computed on the host, once per traced program, in the order of operations of HF transformers 4.57
(`modeling_rope_utils.py`), so that they carry the same rounding.

Length-dependent scalings. `dynamic` and `longrope` choose their frequencies by the length of the whole sequence, which
is no function of a position: keys that are stored already rotated would have to be rotated anew when the sequence
grows. Here the length is fixed per program (`rope_len`): the uncached forward takes the size of its position axis, as
HF does; the paged forward takes the longest length that the engine admits. So sequences of an engine whose limit
is within the original length equal HF at every length; beyond it all its sequences use the frequencies of that
limit, and equal HF's forward over a sequence of that length (dynamic) or of any length beyond the original (longrope).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from levanter_infer.axes import HEAD_SIZE

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True)
class RopeConfig:
    """A rope in HF's terms. Fields that its kind has no use for stay None."""

    kind: str = "default"
    """One of `ROPE_KINDS`."""
    theta: float = 10000.0
    factor: float | None = None
    """Factor by which the context is extended; all kinds but default (longrope: for the attention factor; proportional:
    None is 1)."""
    original_len: int | None = None
    """Tokens of context before scaling; all kinds but default, linear and proportional."""
    attention_factor: float | None = None
    """Multiplies cos and sin; yarn and longrope, derived from `factor` where None."""
    long_attention_factor: float | None = None
    """longrope: the attention factor beyond the original length; None: it is the same there."""
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    """yarn; where None: 32, 1, none, none, true."""
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    """llama3"""
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    """longrope: a divisor for each frequency, half as many as there are rotated numbers."""
    partial: float = 1.0
    """Share of a head that is rotated, its first numbers; the others pass. 0: none, and only queries are scaled.
    proportional: share of the frequencies of the whole head, the fastest; the others are zero, so that their pairs of
    numbers, which are of the whole head, pass."""
    interleaved: bool = False
    """Whether pairs are neighbours (x[2i], x[2i + 1]), and not (x[i], x[i + half])."""
    query_beta: float | None = None
    """Queries are also multiplied by 1 + query_beta · ln(1 + ⌊(position + query_shift) / original_len⌋), as in
    Ministral 3."""
    query_shift: int = 0
    """1 in Llama 4, which counts positions from one here."""

    @property
    def depends_on_length(self) -> bool:
        """Whether sequences beyond `original_len` change the frequencies of all positions."""
        long = self.attention_factor if self.long_attention_factor is None else self.long_attention_factor
        differs = self.short_factor != self.long_factor or self.attention_factor != long
        return self.kind == "dynamic" or (self.kind == "longrope" and differs)

    @property
    def is_of_whole_head(self) -> bool:
        """Whether all numbers of a head are rotated."""
        return rotated_share(self) == 1

    @property
    def unfused(self) -> str | None:
        """The part that no kernel fuses with the cache; None: kernels that rotate compute this rope."""
        if not self.is_of_whole_head or self.interleaved:
            return "a rope of a part of a head or of neighbours"
        return "queries that are scaled by their position" if self.query_beta is not None else None


@dataclass(frozen=True)
class Rope:
    """The angles of one rope at the tokens of a step."""

    config: RopeConfig
    cos: NamedArray
    sin: NamedArray
    """f32[..., head_size / 2], scaled by the attention factor; of a part of a head, half of that."""
    query_scale: NamedArray | None = None
    """f32[...], a factor of the queries."""

    @property
    def angles(self) -> tuple[NamedArray, ...]:
        """The arrays, of each token."""
        return (self.cos, self.sin) if self.query_scale is None else (self.cos, self.sin, self.query_scale)

    def of(self, angles: Sequence[NamedArray]) -> "Rope":
        """The rope of other tokens. Args: as `angles`."""
        return Rope(self.config, *angles)

    def rotate(self, x: NamedArray, factor: float = 1.0) -> NamedArray:
        """Rotate the pairs of x [..., head_size] by the angles, and multiply by a factor, in float32. Returns: as `x`.

        Args: factor: 1 for a rope of a part of a head.
        """
        rotated = 2 * self.cos.axis_size(HEAD_SIZE)
        assert factor == 1 or self.config.is_of_whole_head, "a factor of a head of which a part is rotated"
        if rotated == 0:
            return x
        if rotated == x.axis_size(HEAD_SIZE):
            return rotate(x, self.cos, self.sin, factor, interleaved=self.config.interleaved)
        first = rotate(x[HEAD_SIZE, :rotated], self.cos, self.sin, interleaved=self.config.interleaved)
        return hax.concatenate(HEAD_SIZE, [first, x[HEAD_SIZE, rotated:]]).rearrange(x.axes)

    def scale_queries(self, q: NamedArray) -> NamedArray:
        """Rotated queries with the factor of their positions."""
        if self.query_scale is None:
            return q
        return (q * self.query_scale.astype(q.dtype)).rearrange(q.axes)


def rope_at(config: RopeConfig, head_dim: int, positions: NamedArray, rope_len: int) -> Rope:
    """The rope of heads of `head_dim` numbers at `positions`. Args: as in `rotary_tables`."""
    tables = rotary_tables(config, rotated_size(config, head_dim), positions, rope_len)
    # Else XLA moves them into the loop over layers, and computes them in each.
    cos, sin = jax.lax.optimization_barrier(tables)
    return Rope(config, cos, sin, _query_scale(config, positions))


def _query_scale(config: RopeConfig, positions: NamedArray) -> NamedArray | None:
    if config.query_beta is None:
        return None
    counted = positions.array + config.query_shift if config.query_shift else positions.array
    stretches = jnp.log1p((counted // _need(config, "original_len")).astype(jnp.float32))
    return NamedArray(1 + jnp.float32(config.query_beta) * stretches, positions.axes)


def rotated_size(config: RopeConfig, head_dim: int) -> int:
    """Numbers of a head that are rotated."""
    return int(head_dim * rotated_share(config))


def rotated_share(config: RopeConfig) -> float:
    """Share of a head whose numbers are pairs with a frequency, be it zero."""
    return 1.0 if config.kind == "proportional" else config.partial


def rotary_tables(
    config: RopeConfig, head_dim: int, positions: NamedArray, rope_len: int
) -> tuple[NamedArray, NamedArray]:
    """Cosines and sines of every position.

    Args:
        head_dim: numbers of a head that are rotated.
        positions: i32[...], places in the sequence.
        rope_len: tokens of the longest sequence; only length-dependent kinds look at it.
    Returns: cos, sin: f32[..., head_size / 2], scaled by the attention factor.
    """
    inv_freq, scaling = frequencies(config, head_dim, rope_len)
    inv_freq = hax.named(jnp.asarray(inv_freq), HEAD_SIZE)
    angles = (hax.broadcast_axis(positions.astype(jnp.float32), inv_freq.axes) * inv_freq).rearrange((..., HEAD_SIZE))
    return hax.cos(angles) * jnp.float32(scaling), hax.sin(angles) * jnp.float32(scaling)


def rotate(
    x: NamedArray, cos: NamedArray, sin: NamedArray, factor: float = 1.0, *, interleaved: bool = False
) -> NamedArray:
    """Rotate each pair (x[i], x[i + head_size / 2]) by its angle, in float32.

    Args:
        x: [..., head_size]
        cos, sin: f32[some axes of x, head_size / 2]
        factor: of the result, before it is rounded.
        interleaved: pairs are (x[2i], x[2i + 1]).
    Returns: as `x`.
    """
    half = x.axis_size(HEAD_SIZE) // 2
    wide = x.astype(jnp.float32)
    if factor != 1:
        cos, sin = cos * jnp.float32(factor), sin * jnp.float32(factor)
    if interleaved:
        first, second = wide[HEAD_SIZE, 0::2], wide[HEAD_SIZE, 1::2]
        pairs = [first * cos - second * sin, second * cos + first * sin]
        pair = hax.stack("pair", [part.rearrange((..., HEAD_SIZE)) for part in pairs]).rearrange((..., "pair"))
        merged = pair.flatten_axes((HEAD_SIZE, "pair"), HEAD_SIZE)
        return merged.rearrange(x.axes).astype(x.dtype)
    first, second = wide[HEAD_SIZE, :half], wide[HEAD_SIZE, half:]
    rotated = hax.concatenate(HEAD_SIZE, [first * cos - second * sin, second * cos + first * sin])
    return rotated.rearrange(x.axes).astype(x.dtype)


def frequencies(config: RopeConfig, head_dim: int, rope_len: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies f32[head_dim / 2] (radians per position) and the factor on cos and sin.

    Args:
        rope_len: tokens of the longest sequence; only length-dependent kinds look at it.
    Raises: ValueError for an unknown kind, or one that lacks its parameters.
    """
    if config.kind not in ROPE_KINDS:
        raise ValueError(f"rope kind {config.kind!r}: expected one of {', '.join(ROPE_KINDS)}")
    theta = config.theta
    if config.kind == "dynamic":
        theta = _dynamic_theta(config, head_dim, rope_len)
    periods = _powers(theta, head_dim)
    if config.kind == "linear":
        return _reciprocal(periods) / np.float32(_need(config, "factor")), 1.0
    if config.kind == "yarn":
        return _yarn(config, head_dim, periods), _yarn_attention_factor(config)
    if config.kind == "longrope":
        beyond = rope_len > _need(config, "original_len")
        divisors = _need(config, "long_factor" if beyond else "short_factor")
        own = config.long_attention_factor if beyond else None
        scaling = _longrope_attention_factor(config) if own is None else own
        return _reciprocal(np.asarray(divisors, np.float32) * periods), scaling
    if config.kind == "llama3":
        return _llama3(config, _reciprocal(periods)), 1.0
    if config.kind == "proportional":
        rotated = np.arange(head_dim // 2) < int(config.partial * head_dim // 2)
        return np.where(rotated, _reciprocal(periods) / np.float32(config.factor or 1), np.float32(0)), 1.0
    return _reciprocal(periods), 1.0


def _need(config: RopeConfig, name: str):
    value = getattr(config, name)
    if value is None:
        raise ValueError(f"rope kind {config.kind!r} needs {name}; set it in rope_scaling of config.json")
    return value


def _powers(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2i / head_dim), f32. float64 inside comes closest to the bits of torch's float32 power."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (float(theta) ** exponents.astype(np.float64)).astype(np.float32)


def _reciprocal(values: np.ndarray) -> np.ndarray:
    return np.float32(1.0) / values


def _dynamic_theta(config: RopeConfig, head_dim: int, rope_len: int) -> float:
    """Source: NTK-aware scaling by bloc97 and emozilla."""
    factor, original = _need(config, "factor"), _need(config, "original_len")
    if head_dim <= 2:
        raise ValueError(f"rope: heads of {head_dim} have one frequency, which the type dynamic does not scale")
    stretch = factor * max(rope_len, original) / original - (factor - 1)
    return config.theta * stretch ** (head_dim / (head_dim - 2))


def _yarn(config: RopeConfig, head_dim: int, periods: np.ndarray) -> np.ndarray:
    """Fast dimensions keep their frequency, slow ones are divided by `factor`. Source: arXiv:2309.00071."""
    factor, original = _need(config, "factor"), _need(config, "original_len")
    if config.theta == 1:
        raise ValueError("rope: rope_theta=1 gives all dimensions one frequency; expected another with the type yarn")

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times within the original length."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast or 32), dimension(config.beta_slow or 1)
    if config.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1.0) - np.clip(ramp, np.float32(0), np.float32(1))
    interpolated = _reciprocal(np.float32(factor) * periods)
    return interpolated * (np.float32(1.0) - keep) + _reciprocal(periods) * keep


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def mscale(weight: float) -> float:
        factor = _need(config, "factor")
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def _longrope_attention_factor(config: RopeConfig) -> float:
    """Source: arXiv:2402.13753, with Phi-3's scaling."""
    if config.attention_factor is not None:
        return config.attention_factor
    factor, original = _need(config, "factor"), _need(config, "original_len")
    if factor > 1 and original <= 1:
        raise ValueError(f"rope: original_max_position_embeddings={original}, expected more with the type longrope")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _llama3(config: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, original = np.float32(_need(config, "factor")), _need(config, "original_len")
    low, high = _need(config, "low_freq_factor"), _need(config, "high_freq_factor")
    wavelengths = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1.0) - smooth) * inv_freq / factor + smooth * inv_freq
    stretched = np.where(wavelengths > np.float32(original / low), inv_freq / factor, between)
    return np.where(wavelengths < np.float32(original / high), inv_freq, stretched)
