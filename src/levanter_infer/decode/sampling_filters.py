"""Thresholds of top_k and top_p, without sorting the vocabulary."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.decode.sampling_draw import row_sums
from levanter_infer.kernels import scopes
from levanter_infer.kernels.backend import SamplingKernels
from levanter_infer.layers.shard_axis import ShardAxis, Vocabulary

CANDIDATES = 64
"""Likeliest tokens among which thresholds are searched first."""
_KEY_BITS, _PASS_BITS = 32, 4
_SIGN = 0x80000000


def filter_thresholds(
    logits: Array, weigh: Callable[[Array], Array], top_k: Array, top_p: Array, vocab: Vocabulary | None = None
) -> Array:
    """The smallest logit that a token may have to pass top_k and then top_p, f32[row].

    top_k keeps the tokens whose logit is at least the k-th largest. top_p keeps, of these, the tokens for which the
    likelier ones together have less than `top_p` of their mass. Tokens that equal the threshold are all kept: which
    tokens pass does not depend on the order of the vocabulary.

    The thresholds are mostly among the CANDIDATES likeliest tokens. For a row where they do not they are found bit by
    bit, exactly, in 32 passes over the vocabulary. Which way a row goes depends on that row alone.

    Args:
        logits: f32[row, vocab], of this device's part; without NaN in rows whose result matters.
        weigh: unnormalised probabilities of some logits f32[row, n], increasing with the logit.
        top_k: i32[row]; vocab or more: off.
        top_p: f32[row]; 1 or more: off.
        vocab: of the logits; None: one device has all of it.
    """
    rows, vocab = logits.shape[0], vocab or Vocabulary(logits.shape[1])
    wants_k, wants_p = top_k < vocab.size, top_p < 1
    count = min(CANDIDATES, vocab.size)
    best, _ = vocab.largest(logits, count)
    mass = weigh(best)

    rank = jnp.clip(top_k - 1, 0, count - 1)
    kth = jnp.take_along_axis(best, rank[:, None], axis=1)[:, 0]
    kth = jnp.where(wants_k, kth, -jnp.inf)
    found_k = ~wants_k | (top_k <= count)
    complete = wants_k & found_k & (best[:, -1] < kth)  # every token that passes top_k is a candidate

    with jax.named_scope(scopes.NUCLEUS):
        total = jax.lax.cond(
            jnp.any(wants_p & ~wants_k),
            lambda: vocab.shard_axis.sum(row_sums(weigh(logits))),
            lambda: jnp.zeros(rows, jnp.float32),
        )
    kept_mass = row_sums(jnp.where(best >= kth[:, None], mass, 0))
    budget = top_p * jnp.where(wants_k, kept_mass, total)
    # Of equal candidates the first counts only what is likelier, and if it passes the threshold admits them all
    passes = (_mass_before(mass) < budget[:, None]) & (best >= kth[:, None])
    pth = jnp.where(wants_p, jnp.min(jnp.where(passes, best, jnp.inf), axis=1), -jnp.inf)
    found_p = ~wants_p | complete | (~wants_k & ~passes[:, -1])

    found = found_k & found_p
    threshold = jnp.maximum(kth, pth)
    with jax.named_scope(scopes.FOUND):
        return jax.lax.cond(
            jnp.all(found),
            lambda: threshold,
            lambda: jnp.where(found, threshold, _searched_thresholds(logits, weigh(logits), top_k, top_p, vocab)),
        )


def thresholds_by_kernels(
    kernels: SamplingKernels,
    logits: Array,
    terms: Array,
    top_k: Array,
    top_p: Array,
    vocab: Vocabulary,
    num_rows: Array,
) -> Array:
    """`filter_thresholds`, by bisection among a few thousand candidates of each row instead of a sort.

    Which path a row takes depends on that row alone. A mass is a sum in another order, so that a token at which it
    reaches top_p to within rounding may pass one way and not the other.

    Args: terms: of `SamplingKernels.weight_sums`, without a threshold.
    """
    is_row = jnp.arange(top_p.size, dtype=jnp.int32) < num_rows  # kernels leave the others as they were
    wants_k, wants_p = (top_k < vocab.size) & is_row, (top_p < 1) & is_row
    values, bound = kernels.candidates(logits, vocab.shard_axis.parts, num_rows)
    bound = vocab.shard_axis.max(bound)

    def weigh_all() -> Array:
        return vocab.shard_axis.sum(kernels.total_weights(logits, terms, num_rows))

    with jax.named_scope(scopes.NUCLEUS):
        total = jax.lax.cond(jnp.any(wants_p & ~wants_k), weigh_all, lambda: jnp.zeros_like(top_p))
    most = jnp.where(wants_k, top_k, 0).astype(jnp.float32)
    rules = jnp.stack([terms[:, 0], terms[:, 1], terms[:, 3], bound, total, most, top_p], axis=1)
    threshold = _thresholds_of_own_rows(kernels, values, rules, num_rows, vocab.shard_axis)
    wanted = wants_k | wants_p
    found = ~wanted | (threshold == threshold)

    def search() -> Array:
        searched = _search_by_kernels(kernels, logits, terms, top_k, top_p, total, ~found, vocab)
        return jnp.where(found, threshold, searched)

    with jax.named_scope(scopes.FOUND):
        threshold = jax.lax.cond(jnp.all(found), lambda: threshold, search)
    return jnp.where(wanted, threshold, -jnp.inf)


def _thresholds_of_own_rows(
    kernels: SamplingKernels, values: Array, rules: Array, num_rows: Array, axis: ShardAxis
) -> Array:
    """`SamplingKernels.thresholds`, f32[row]. Each device searches a stretch of the rows, among all candidates."""
    rows = values.shape[0]
    size = -(-rows // axis.parts)
    values, rules = (jnp.pad(each, ((0, size * axis.parts - rows), (0, 0))) for each in (values, rules))
    own_count = jnp.clip(num_rows - axis.index * size, 0, size)
    found = kernels.thresholds(axis.exchanged(values), axis.own(rules, 0), own_count)
    return axis.all_gather(found, 0)[:rows]


def _search_by_kernels(
    kernels: SamplingKernels,
    logits: Array,
    terms: Array,
    top_k: Array,
    top_p: Array,
    total: Array,
    rows: Array,
    vocab: Vocabulary,
) -> Array:
    """Thresholds of the rows in the mask `rows`, a few bits at each pass over their logits; -inf where all pass.

    Args: total: the weight of all tokens, where top_p applies without top_k.
    """

    def reached(terms: Array, pivots: Array) -> Array:
        return vocab.shard_axis.sum(kernels.reached(logits, terms, pivots, rows))

    def largest(terms: Array, target: Array) -> Array:
        """The largest logit such that those from it up weigh `target`, f32[row]; -inf where all do not."""

        def decide(step, key):
            shift = jnp.uint32(_KEY_BITS) - jnp.uint32(_PASS_BITS) * (step + 1).astype(jnp.uint32)
            digits = jnp.arange(1, 2**_PASS_BITS, dtype=jnp.uint32)
            pivots = key[:, None] | (digits[None, :] << shift)
            enough = reached(terms, signed_keys(pivots)) >= target[:, None]
            return key | (jnp.sum(enough, axis=1, dtype=jnp.uint32) << shift)

        key = jax.lax.fori_loop(0, _KEY_BITS // _PASS_BITS, decide, jnp.zeros(rows.shape, jnp.uint32))
        return jnp.where(key == 0, -jnp.inf, key_floats(key))

    wants_k, wants_p = top_k < vocab.size, top_p < 1
    everything = jnp.full_like(top_p, -jnp.inf)
    zeros = jnp.zeros_like(top_p)
    ones = jnp.stack([zeros, zeros, everything, everything], axis=1)  # every logit but -inf weighs 1
    kth = jax.lax.cond(jnp.any(wants_k & rows), lambda: largest(ones, top_k.astype(jnp.float32)), lambda: everything)
    kth = jnp.where(wants_k, kth, -jnp.inf)

    def nucleus() -> Array:
        own = jnp.stack([terms[:, 0], terms[:, 1], kth, terms[:, 3]], axis=1)
        lowest = jnp.full_like(top_k, jnp.iinfo(jnp.int32).min)[:, None]
        kept = jnp.where(wants_k, reached(own, lowest)[:, 0], total)
        return largest(own, top_p * kept)

    pth = jax.lax.cond(jnp.any(wants_p & rows), nucleus, lambda: everything)
    return jnp.where(wants_p, jnp.maximum(kth, pth), kth)


def signed_keys(keys: Array) -> Array:
    """i32 in the order of `float_keys`, which are u32."""
    return jax.lax.bitcast_convert_type(keys ^ jnp.uint32(_SIGN), jnp.int32)


def _mass_before(mass: Array) -> Array:
    """Exclusive prefix sums over axis 1, in a fixed order."""
    sums = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))
    shift = 1
    while shift < mass.shape[1]:
        sums = sums + jnp.pad(sums[:, :-shift], ((0, 0), (shift, 0)))
        shift *= 2
    return sums


def _searched_thresholds(logits: Array, weights: Array, top_k: Array, top_p: Array, vocab: Vocabulary) -> Array:
    """`filter_thresholds` of every row, bit by bit."""
    keys = float_keys(logits)
    everything = jnp.full_like(top_p, -jnp.inf)

    def kth():
        ones = jnp.ones((1, 1), jnp.float32)  # a count of less than 2^24 is exact in f32
        return key_floats(_largest_key(keys, ones, jnp.minimum(top_k, vocab.size).astype(jnp.float32), vocab))

    # Tokens are compared as floats and not by their keys, so that -0.0 and 0.0 tie
    kth_logit = jnp.where(
        top_k < vocab.size, jax.lax.cond(jnp.any(top_k < vocab.size), kth, lambda: everything), -jnp.inf
    )

    def nucleus():
        kept = jnp.where(logits >= kth_logit[:, None], weights, 0)
        return key_floats(_largest_key(keys, kept, top_p * vocab.shard_axis.sum(row_sums(kept)), vocab))

    pth_logit = jax.lax.cond(jnp.any(top_p < 1), nucleus, lambda: everything)
    return jnp.where(top_p < 1, jnp.maximum(kth_logit, pth_logit), kth_logit)


def _largest_key(keys: Array, weights: Array, target: Array, vocab: Vocabulary) -> Array:
    """The largest key of each row such that the keys from it up weigh at least `target`, u32[row].

    That is the key of a token: the first one with which the sum, from the largest key down, reaches the target.

    Requires: 0 < target <= the row's weight.
    """

    def decide(bit, key):
        tried = key | (jnp.uint32(_SIGN) >> bit.astype(jnp.uint32))
        weight = vocab.shard_axis.sum(row_sums(jnp.where(keys >= tried[:, None], weights, 0)))
        return jnp.where(weight >= target, tried, key)

    return jax.lax.fori_loop(0, _KEY_BITS, decide, jnp.zeros(keys.shape[0], jnp.uint32))


def float_keys(values: Array) -> Array:
    """uint32 in the order of the float32 `values`."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >= jnp.uint32(_SIGN), ~bits, bits | jnp.uint32(_SIGN))


def key_floats(keys: Array) -> Array:
    """The float32 values of `float_keys`."""
    bits = jnp.where(keys >= jnp.uint32(_SIGN), keys & jnp.uint32(_SIGN - 1), ~keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
