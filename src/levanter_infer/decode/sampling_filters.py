"""Thresholds of top_k and top_p, without sorting the vocabulary."""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.decode.sampling_draw import row_sums

CANDIDATES = 64
"""Likeliest tokens among which thresholds are looked for first."""
_KEY_BITS = 32


def filter_thresholds(logits: Array, weights: Array, top_k: Array, top_p: Array) -> Array:
    """The smallest logit that a token may have to pass top_k and then top_p, f32[row].

    top_k keeps the tokens whose logit is at least the k-th largest. top_p keeps, of these, the tokens for which the
    likelier ones together have less than `top_p` of their mass. Tokens that equal the threshold are all kept: which
    tokens pass does not depend on the order of the vocabulary.

    The thresholds mostly lie among the CANDIDATES likeliest tokens. A row for which they do not is bisected over the
    bits of its logits, exactly, in at most 32 rounds. Which way a row goes depends on that row alone.

    Args:
        logits: f32[row, vocab], without NaN in rows whose result matters.
        weights: f32[row, vocab], unnormalised probabilities, increasing with the logit.
        top_k: i32[row]; vocab or more: off.
        top_p: f32[row]; 1 or more: off.
    """
    rows, vocab = logits.shape
    wants_k, wants_p = top_k < vocab, top_p < 1
    count = min(CANDIDATES, vocab)
    # Behind the barrier, so that XLA does not merge slices into it and sort the whole vocabulary
    best, ids = jax.lax.optimization_barrier(jax.lax.top_k(logits, count))
    mass = jnp.take_along_axis(weights, ids, axis=1)

    rank = jnp.clip(top_k - 1, 0, count - 1)
    kth = jnp.take_along_axis(best, rank[:, None], axis=1)[:, 0]
    kth = jnp.where(wants_k, kth, -jnp.inf)
    found_k = ~wants_k | (top_k <= count)
    complete = wants_k & found_k & (best[:, -1] < kth)  # every token that passes top_k is a candidate

    total = jax.lax.cond(jnp.any(wants_p & ~complete), lambda: row_sums(weights), lambda: jnp.zeros(rows, jnp.float32))
    kept_mass = row_sums(jnp.where(best >= kth[:, None], mass, 0))
    budget = top_p * jnp.where(complete, kept_mass, total)
    # Of equal candidates the first counts only what is likelier, and if it passes the threshold admits them all
    passes = (_mass_before(mass) < budget[:, None]) & (best >= kth[:, None])
    pth = jnp.where(wants_p, jnp.min(jnp.where(passes, best, jnp.inf), axis=1), -jnp.inf)
    found_p = ~wants_p | complete | (~wants_k & ~passes[:, -1])

    found = found_k & found_p
    threshold = jnp.maximum(kth, pth)
    return jax.lax.cond(
        jnp.all(found),
        lambda: threshold,
        lambda: jnp.where(found, threshold, _bisected_thresholds(logits, weights, top_k, top_p)),
    )


def _mass_before(mass: Array) -> Array:
    """Exclusive prefix sums over axis 1, in a fixed order."""
    sums = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))
    shift = 1
    while shift < mass.shape[1]:
        sums = sums + jnp.pad(sums[:, :-shift], ((0, 0), (shift, 0)))
        shift *= 2
    return sums


def _bisected_thresholds(logits: Array, weights: Array, top_k: Array, top_p: Array) -> Array:
    """`filter_thresholds` of every row by bisection."""
    keys = float_keys(logits)
    vocab = logits.shape[1]
    kth = jax.lax.cond(
        jnp.any(top_k < vocab),
        lambda: _kth_key(keys, jnp.minimum(top_k, vocab)),
        lambda: jnp.full_like(top_k, jnp.iinfo(jnp.int32).min),
    )
    # Compare as floats: -0.0 and 0.0 are ties although their keys differ
    kth_logit = jnp.where(top_k < vocab, key_floats(kth), -jnp.inf)

    def nucleus():
        kept = jnp.where(logits >= kth_logit[:, None], weights, 0)
        return key_floats(_nucleus_key(keys, kept, top_p * row_sums(kept)))

    pth_logit = jax.lax.cond(jnp.any(top_p < 1), nucleus, lambda: kth_logit)
    return jnp.where(top_p < 1, jnp.maximum(kth_logit, pth_logit), kth_logit)


def _kth_key(keys: Array, k: Array) -> Array:
    """The largest key that at least k >= 1 of each row's keys reach, i32[row]: the row's k-th largest."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        reached = jnp.sum(keys >= middle[:, None], axis=1, dtype=jnp.int32) >= k
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    return jax.lax.fori_loop(0, _KEY_BITS, halve, _full_range(k))[0]


def _nucleus_key(keys: Array, weights: Array, budget: Array) -> Array:
    """The smallest key of each row with less than `budget` weight on larger ones, i32[row]."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down
        inside = row_sums(jnp.where(keys > middle[:, None], weights, 0)) < budget
        return jnp.where(inside, low, middle + 1), jnp.where(inside, middle, high)

    return jax.lax.fori_loop(0, _KEY_BITS, halve, _full_range(budget))[1]


def _full_range(like: Array) -> tuple[Array, Array]:
    limits = jnp.iinfo(jnp.int32)
    return jnp.full(like.shape, limits.min, jnp.int32), jnp.full(like.shape, limits.max, jnp.int32)


def float_keys(values: Array) -> Array:
    """int32 in the order of the float32 `values`."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def key_floats(keys: Array) -> Array:
    """The float32 values of `float_keys`."""
    return jax.lax.bitcast_convert_type(keys ^ ((keys >> 31) & jnp.int32(0x7FFFFFFF)), jnp.float32)
