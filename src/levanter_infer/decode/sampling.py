"""Choosing the next token of every row: any mixture of parameters in one batch.

Order of processing, as in HF transformers and vLLM:
1. repetition penalty (tokens of prompt and output), then frequency and presence penalty (output only);
2. logit bias;
3. while fewer than `min_tokens` tokens are generated: one-token stop sequences become impossible;
4. temperature; below GREEDY_TEMPERATURE the likeliest token is taken and nothing further applies;
5. top_k, then top_p of what top_k leaves, then min_p relative to the likeliest token.

Tokens that tie with the threshold of top_k or top_p are all kept. What a row gets depends, to the bit, on that row
alone: not on its place, on the number of rows or on what the others ask for. Work that no row asks for is skipped.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.page_table import run_if
from levanter_infer.decode.sampling_draw import draw, num_words, random_words, row_sums
from levanter_infer.decode.sampling_filters import filter_thresholds
from levanter_infer.decode.sampling_table import SamplingLimits as SamplingLimits
from levanter_infer.decode.sampling_table import SamplingTable as SamplingTable
from levanter_infer.decode.sampling_table import stop_match as stop_match

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one mean the likeliest token."""
_MIN_EXPONENT = -80.0
"""Tokens e^80 times less likely than the likeliest one have probability 0, which keeps weights out of the denormals."""
_HISTORY_CHUNK = 1024


class LogitStats(eqx.Module):
    """What sampling needs to know of each row of logits."""

    peak: Array
    """f32[row], the largest logit."""
    total: Array
    """f32[row], the sum of e^(logit - peak); NaN where a logit is NaN or +inf, or all are -inf."""
    best: Array | None = None
    """i32[row], the first place of the largest logit; None where it is yet to be looked for."""

    @staticmethod
    def of(logits: Array) -> "LogitStats":
        """logits: f32[row, vocab]"""
        peak = jnp.max(logits, axis=1)
        return LogitStats(peak, row_sums(jnp.exp(logits - peak[:, None])))


class BeamCandidates(eqx.Module):
    """Continuations of each row: the likeliest ones that do not end it, best first, then those that do."""

    ids: Array
    """i32[row, candidate]"""
    scores: Array
    """f32[row, candidate], processed log probabilities; -inf where there is none."""
    logprobs: Array
    """f32[row, candidate], log probabilities under the model."""


class SampleOutput(eqx.Module):
    """One sampled token per row, as plain arrays. Rows that are not finite hold zeros."""

    tokens: Array
    """i32[row]"""
    logprobs: Array
    """f32[row], log probability of the token under the model: temperature 1, nothing applied."""
    processed_logprobs: Array
    """f32[row], log probability under the distribution that was sampled from; 0 for greedy rows, which are certain."""
    top_ids: Array
    """i32[row, max_top], the likeliest tokens under the model, best first, as many as the row asks for; else none."""
    top_logprobs: Array
    """f32[row, max_top], their log probabilities under the model; 0 where there is none."""
    finite: Array
    """bool[row]; false if the logits hold NaN or +inf, or if no token is possible (all -inf)."""
    candidates: BeamCandidates | None = None
    """None: nobody searches."""


def sample(
    logits: Array,
    rows: SamplingTable,
    *,
    positions: Array,
    tokens: Array,
    slot_ids: Array,
    prompt_lens: Array,
    seq_lens: Array,
    max_top: int,
    stats: LogitStats | None = None,
) -> SampleOutput:
    """Sample one token per row.

    Args:
        logits: f32[row, vocab] of the model; -inf is allowed.
        rows: how to sample, over `row` (`SamplingTable.rows`).
        positions: i32[row], the position that the new token will take.
        tokens: i32[slot, position], all known tokens.
        slot_ids: i32[row]; rows with an absent slot are padding.
        prompt_lens: i32[row]
        seq_lens: i32[row], tokens known of the row's sequence, prompt included.
        max_top: width of the output's `top_ids`.
        stats: of these logits, where they are known already.
    """
    stats = LogitStats.of(logits) if stats is None else stats
    column = {name: column.array for name, column in rows.columns.items()}
    used = slot_ids < tokens.shape[0]
    generated = seq_lens - prompt_lens
    peak = stats.peak

    penalised = is_penalised(column) & used
    biased = is_biased(column, logits.shape[1]) & used
    banned = is_banned(column, generated) & used

    greedy = column["temperature"] < GREEDY_TEMPERATURE

    def process_and_choose():
        history = (tokens, slot_ids, prompt_lens, jnp.where(penalised, seq_lens, 0))
        z = run_if(jnp.any(penalised), lambda z: apply_penalties(z, column, history), logits)
        z = run_if(jnp.any(biased), lambda z: add_bias(z, column), z)
        z = run_if(jnp.any(banned), lambda z: _ban_stops(z, column, banned), z)
        z_peak = jnp.max(z, axis=1)
        best = _first_best(z, z_peak)
        drawn, drawn_logprobs = jax.lax.cond(
            jnp.any(~greedy & used),
            lambda: _draw_tokens(z, z_peak, column, positions, greedy),
            lambda: (jnp.zeros_like(positions), jnp.zeros_like(peak)),
        )
        return jnp.where(greedy, best, drawn), jnp.where(greedy, 0, drawn_logprobs), jnp.isfinite(z_peak)

    # Greedy rows that want nothing else, the commonest, are spared the copy of the logits that processing works on.
    chosen, processed, possible = jax.lax.cond(
        jnp.any((penalised | biased | banned | ~greedy) & used),
        process_and_choose,
        lambda: (
            _first_best(logits, peak) if stats.best is None else stats.best,
            jnp.zeros_like(peak),
            jnp.isfinite(peak),
        ),
    )
    finite = (stats.total > 0) & possible
    raw = logprobs_of(logits, chosen, stats)
    top_ids, top_logprobs = _top_logprobs(logits, stats, column["num_logprobs"], used, finite, max_top)
    return SampleOutput(
        tokens=jnp.where(finite, chosen, 0),
        logprobs=jnp.where(finite, raw, 0),
        processed_logprobs=jnp.where(finite, processed, 0),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finite=finite,
    )


def logprobs_of(logits: Array, tokens: Array, stats: LogitStats) -> Array:
    """Log probability under the model of the token i32[row] of each row of logits f32[row, vocab], f32[row].

    NaN or infinite where the logits are not finite.
    """
    return jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - stats.peak - jnp.log(stats.total)


def likeliest(logits: Array, stats: LogitStats, count: int) -> tuple[Array, Array]:
    """The `count` likeliest tokens of each row of logits f32[row, vocab], i32[row, count], best first, and their log
    probabilities under the model, f32[row, count]."""
    log_norm = stats.peak + jnp.log(stats.total)
    if count == 1:
        best = _first_best(logits, stats.peak) if stats.best is None else stats.best
        return best[:, None], (stats.peak - log_norm)[:, None]
    values, ids = jax.lax.optimization_barrier(jax.lax.top_k(logits, count))  # as in `filter_thresholds`
    return ids, values - log_norm[:, None]


def is_penalised(column: dict[str, Array]) -> Array:
    """bool[row], whether any penalty changes anything."""
    additive = (column["frequency_penalty"] != 0) | (column["presence_penalty"] != 0)
    return additive | (column["repetition_penalty"] != 1)


def is_biased(column: dict[str, Array], vocab: int) -> Array:
    """bool[row], whether the row has a bias."""
    return jnp.any(column["bias_ids"] < vocab, axis=1)


def is_banned(column: dict[str, Array], generated: Array) -> Array:
    """bool[row], whether one-token stop sequences are impossible yet; generated: i32[row], tokens so far."""
    return (generated < column["min_tokens"]) & jnp.any(column["stop_lens"] == 1, axis=1)


def one_token_stops(column: dict[str, Array], vocab: int) -> Array:
    """The tokens that end a row by themselves, i32[row, stop]; none is `vocab`."""
    return jnp.where(column["stop_lens"] == 1, column["stop_ids"][:, :, -1], vocab)


def apply_penalties(logits: Array, column: dict[str, Array], history: tuple[Array, ...]) -> Array:
    """Source: repetition penalty, arXiv:1909.05858 section 4.1; the others as in the OpenAI API."""
    counts = _token_counts(logits.shape, *history)
    generated, seen = counts[0], (counts[0] + counts[1]) > 0
    repetition = column["repetition_penalty"][:, None]
    z = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    z = z - column["frequency_penalty"][:, None] * generated.astype(jnp.float32)
    z = z - column["presence_penalty"][:, None] * (generated > 0).astype(jnp.float32)
    return jnp.where(is_penalised(column)[:, None], z, logits)


def _token_counts(shape: tuple[int, ...], tokens: Array, slots: Array, prompt_lens: Array, lens: Array) -> Array:
    """How often each token stands in the output, and in the prompt, i32[2, row, vocab].

    Reads the history in chunks, up to the longest of `lens` (0 for rows that need no counts).
    """
    rows, vocab = shape
    chunk = min(_HISTORY_CHUNK, tokens.shape[1])
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, chunk), 0)

    def add(index, counts):
        place = index * chunk + jax.lax.broadcasted_iota(jnp.int32, (rows, chunk), 1)
        known = place < lens[:, None]
        token = tokens.at[slots[:, None], place].get(mode="fill", fill_value=0)
        is_prompt = (place < prompt_lens[:, None]).astype(jnp.int32)
        return counts.at[is_prompt, jnp.where(known, row, rows), token].add(1, mode="drop")

    num_chunks = (jnp.max(lens) + (chunk - 1)) // chunk
    return jax.lax.fori_loop(0, num_chunks, add, jnp.zeros((2, rows, vocab), jnp.int32))


def _row_ids(ids: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, ids.shape, 0)


def add_bias(logits: Array, column: dict[str, Array]) -> Array:
    ids = column["bias_ids"]
    return logits.at[_row_ids(ids), ids].add(column["bias_values"], mode="drop")


def _ban_stops(logits: Array, column: dict[str, Array], banned: Array) -> Array:
    """Make the one-token stop sequences of `banned` rows impossible."""
    ids = jnp.where(banned[:, None], one_token_stops(column, logits.shape[1]), logits.shape[1])
    return logits.at[_row_ids(ids), ids].set(-jnp.inf, mode="drop")


def _first_best(logits: Array, peak: Array) -> Array:
    """The first of the likeliest tokens of each row, whose logit is `peak`, i32[row]."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    best = jnp.min(jnp.where(logits == peak[:, None], ids, logits.shape[1]), axis=1)
    return jnp.minimum(best, logits.shape[1] - 1)  # a row of NaN has no best


def _draw_tokens(logits: Array, peak: Array, column: dict[str, Array], positions: Array, greedy: Array):
    """Temperature, filters and the draw. Returns: tokens i32[row] and their log probabilities f32[row]."""
    vocab = logits.shape[1]
    inverse = jnp.where(greedy, 1, 1 / jnp.where(greedy, 1, column["temperature"]))
    floor = jnp.maximum(jnp.minimum(jnp.log(column["min_p"]), 0), _MIN_EXPONENT)

    def exponents(z):
        return (z - peak[:, None]) * inverse[:, None]

    def weights(z, threshold, floor):
        exponent = exponents(z)
        kept = (z >= threshold[:, None]) & (exponent >= floor[:, None])
        return jnp.where(kept, jnp.exp(exponent), 0)

    off = greedy | ~jnp.isfinite(peak)
    top_k = jnp.where(off | (column["top_k"] == 0), vocab, jnp.minimum(column["top_k"], vocab))
    top_p = jnp.where(off, 1, column["top_p"])
    everything = jnp.full_like(peak, -jnp.inf)

    def thresholds():
        lightest = jnp.full_like(peak, _MIN_EXPONENT)
        return filter_thresholds(logits, lambda z: weights(z, everything, lightest), top_k, top_p)

    threshold = jax.lax.cond(jnp.any((top_k < vocab) | (top_p < 1)), thresholds, lambda: everything)

    def at(ids):
        return jnp.take_along_axis(logits, ids, axis=1, mode="fill", fill_value=-jnp.inf)

    words = random_words(column["seed"], column["sample_index"], positions, num_words(vocab))
    token, total = draw(weights(logits, threshold, floor), lambda ids: weights(at(ids), threshold, floor), words)
    return token, exponents(at(token[:, None]))[:, 0] - jnp.log(total)


def _top_logprobs(logits: Array, stats: LogitStats, wanted: Array, used: Array, finite: Array, max_top: int):
    """The `wanted` likeliest tokens of each row and their log probabilities; none and 0 in further columns."""
    rows, vocab = logits.shape
    nothing = (jnp.full((rows, max_top), vocab, jnp.int32), jnp.zeros((rows, max_top), jnp.float32))
    if max_top == 0:
        return nothing

    def best():
        ids, logprobs = likeliest(logits, stats, max_top)
        asked = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1) < wanted[:, None]
        asked = asked & finite[:, None]
        return jnp.where(asked, ids, vocab), jnp.where(asked, logprobs, 0)

    return jax.lax.cond(jnp.any((wanted > 0) & used), best, lambda: nothing)
