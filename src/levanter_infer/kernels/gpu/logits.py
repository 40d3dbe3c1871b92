"""Statistics of logits of the `gpu` backend in one pass over them: Pallas on Triton."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from levanter_infer.kernels.gpu import plt

_PART = 4096
"""Logits of a program."""
_LEAST = -3e38
"""Below every finite logit that a model gives, and finite itself: a difference with it is never NaN."""


def logit_stats(logits: Array, *, interpret: bool = False) -> tuple[Array, Array, Array]:
    """`Backend.logit_stats` of all rows, in two launches: parts of each row, and what they make together.

    Args:
        logits: f32[row, vocab]
        interpret: run in Pallas' interpreter, on any platform, slowly; for tests.
    Returns: the largest logit, the sum of e^(logit - largest), NaN where a logit is NaN or +inf and 0 where all are
        -inf, and the first index of the largest.
    """
    rows, vocab = logits.shape
    parts = pl.cdiv(vocab, _PART)

    def call(kernel, grid, shape, warps: int, name: str):
        types = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)]
        params = plt.CompilerParams(num_warps=warps, num_stages=1)
        return pl.pallas_call(
            kernel, grid=grid, out_shape=types, compiler_params=params, interpret=interpret, name=name
        )

    found = call(_part_stats, (rows, parts), (rows, parts), 8, "logit_parts")(logits)
    return tuple(call(functools.partial(_combine, vocab=vocab), (rows,), (rows,), 1, "logit_stats")(_Stats(*found)))


class _Stats(NamedTuple):
    """Statistics of parts of rows, [row, part] each."""

    peak: Any
    total: Any
    best: Any


def _part_stats(logits_ref, peak_ref, total_ref, best_ref) -> None:
    row, part = pl.program_id(0), pl.program_id(1)
    index = part * _PART + jnp.arange(_PART, dtype=jnp.int32)
    f32, vocab = jnp.float32, logits_ref.shape[1]
    logits = plt.load(logits_ref.at[row, index], mask=index < vocab, other=f32(-jnp.inf))
    peak = jnp.maximum(jnp.max(logits), f32(_LEAST))
    peak_ref[row, part] = peak
    total_ref[row, part] = jnp.sum(jnp.exp(logits - peak))
    best_ref[row, part] = jnp.min(jnp.where(logits == peak, index, jnp.int32(vocab)))


def _combine(stats: _Stats, peak_ref, total_ref, best_ref, *, vocab: int) -> None:
    row, f32 = pl.program_id(0), jnp.float32
    num_parts = stats.peak.shape[1]
    part = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)

    def load(ref, other) -> Array:
        return plt.load(ref.at[row, part], mask=part < num_parts, other=jnp.asarray(other, ref.dtype))

    peaks = load(stats.peak, _LEAST)
    peak = jnp.max(peaks)
    total = jnp.sum(load(stats.total, 0) * jnp.exp(peaks - peak))
    best = jnp.min(jnp.where(peaks == peak, load(stats.best, vocab), jnp.int32(vocab)))
    nothing = peak <= f32(_LEAST)
    peak_ref[row] = jnp.where(nothing, f32(-jnp.inf), peak)
    total_ref[row] = total
    best_ref[row] = jnp.minimum(best, vocab - 1)
