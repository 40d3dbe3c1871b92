"""Choosing the next token of every row: any mixture of parameters in one batch.

Order of processing, as in HF transformers:
1. the engine's `logits_mod`, if it has one; logit bias;
2. repetition penalty (tokens of prompt and output), then frequency and presence penalty (output only);
3. while fewer than `min_tokens` tokens are generated: one-token stop sequences become impossible; so do the tokens that
   a constraint of the request (a regex, schema, grammar, token list) does not allow next;
   a row that has one token left takes it, without any of this;
4. temperature; below GREEDY_TEMPERATURE the likeliest token is taken and nothing further applies;
5. top_k, then top_p of what top_k leaves, then min_p relative to the likeliest token.

vLLM has the same order, but applies min_p before top_k and top_p.

Tokens that tie with the threshold of top_k or top_p are all kept. Sampling is batch-invariant: the result of a row
depends, to the bit, on that row alone, not on its index, the number of rows or the parameters of the others. Work that
no row asks for is skipped.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import gather, scatter, scatter_add
from levanter_infer.decode.constraints import RowMasks
from levanter_infer.decode.sampling_draw import draw, draw_by_kernels, draw_rows, num_words, random_words, row_sums
from levanter_infer.decode.sampling_filters import filter_thresholds, thresholds_by_kernels
from levanter_infer.decode.sampling_table import SamplingTable as SamplingTable
from levanter_infer.decode.sampling_table import stop_match as stop_match
from levanter_infer.kernels import MIN_EXPONENT, scopes
from levanter_infer.kernels.backend import Backend, DrawKey, DrawRules, LogitChanges, RowKernels, SamplingKernels
from levanter_infer.kernels.loops import branching, in_blocks, run_if
from levanter_infer.layers.shard_axis import Vocabulary

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one are greedy: argmax, lowest id on ties."""
_HISTORY_CHUNK = 1024
_CHANGED_ROWS = 32
"""Rows whose logits are copied and changed at once where all are sampled together: copies of all, with counts of all
tokens, would be several times the size of the logits."""


class LogitStats(eqx.Module):
    """Statistics of each row of logits."""

    peak: Array
    """f32[row], the largest logit."""
    total: Array
    """f32[row], the sum of e^(logit - peak); NaN, or 0, where a logit is NaN or +inf, or all are -inf."""
    best: Array | None = None
    """i32[row], argmax, lowest id on ties; None: not computed yet."""

    @staticmethod
    def of(logits: Array, vocab: Vocabulary | None = None) -> "LogitStats":
        """logits: f32[row, vocab], of this device's part of `vocab`; None: of all of it."""
        axis = _vocab_of(logits, vocab).shard_axis
        peak = axis.max(jnp.max(logits, axis=1))
        return LogitStats(peak, axis.sum(row_sums(jnp.exp(logits - peak[:, None]))))

    @staticmethod
    def of_kernel(
        backend: Backend, logits: Array, num_rows: Array, vocab: Vocabulary | None = None
    ) -> "LogitStats | None":
        """The same of the first `num_rows` rows, by the backend's kernel; None where it has none."""
        found = backend.logit_stats(logits, num_rows)
        vocab = _vocab_of(logits, vocab)
        if found is None or vocab.shard_axis.mesh_axis is None:
            return None if found is None else LogitStats(*found)
        own, total, best = found
        peak = vocab.shard_axis.max(own)
        # In a part in which all logits are -inf there is nothing to add, and -inf less -inf would be NaN.
        merged = jnp.where(total == 0, 0, total * jnp.exp(own - peak))
        return LogitStats(peak, vocab.shard_axis.sum(merged), vocab.first_of_parts(best, own == peak))


class BeamCandidates(eqx.Module):
    """Continuations of each row: the likeliest ones that do not end it, best first, then those that do."""

    ids: Array
    """i32[row, candidate]"""
    scores: Array
    """f32[row, candidate], processed log probabilities; -inf where there is none."""
    logprobs: Array
    """f32[row, candidate], log probabilities under the model."""


class SampleOutput(eqx.Module):
    """One sampled token per row, as plain arrays. Rows without a token hold zeros."""

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
    """bool[row]; false if the model's logits hold NaN or +inf, or are all -inf, or a `logits_mod` gave NaN or +inf."""
    possible: Array
    """bool[row], whether a token was chosen; false if `finite` is, or if penalties, bias, masks or a `logits_mod` have
    left no token a finite logit."""
    candidates: BeamCandidates | None = None
    """None: no request searches."""
    memory: Any = None
    """State of a `logits_mod` for each row; None: there is none."""


class History(NamedTuple):
    """The known tokens of the sequences that the rows belong to."""

    positions: Array
    """i32[row], the position that the new token will take."""
    tokens: Array
    """i32[slot, position], all known tokens."""
    slot_ids: Array
    """i32[row]; rows with an absent slot are padding."""
    prompt_lens: Array
    """i32[row]"""
    seq_lens: Array
    """i32[row], known tokens of the row's sequence, prompt included."""


class ChosenTokens(NamedTuple):
    """The token of each row, and what the log probabilities are computed from."""

    tokens: Array
    """i32[row], -1 for none."""
    logits: Array
    """f32[row], of the tokens."""
    processed_logprobs: Array
    """f32[row], as in `SampleOutput`."""
    num_top: Array
    """i32[row], likeliest tokens that are reported."""
    top_ids: Array
    """i32[row, max_top], as in `SampleOutput`."""
    top_logits: Array
    """f32[row, max_top], their logits; anything beyond `num_top`."""
    stats: LogitStats
    """Of the model's logits."""

    def sampled(self) -> SampleOutput:
        """The tokens and their log probabilities."""
        finite = self.stats.total > 0
        possible = finite & (self.tokens >= 0)
        is_reported = jax.lax.broadcasted_iota(jnp.int32, self.top_ids.shape, 1) < self.num_top[:, None]
        return SampleOutput(
            tokens=jnp.where(possible, self.tokens, 0),
            logprobs=jnp.where(possible, _logprobs(self.logits, self.stats), 0),
            processed_logprobs=jnp.where(possible, self.processed_logprobs, 0),
            top_ids=self.top_ids,
            top_logprobs=jnp.where(is_reported, _logprobs(self.top_logits, self.stats), 0),
            finite=finite,
            possible=possible,
        )


def choose(
    logits: Array,
    rows: SamplingTable,
    history: History,
    *,
    max_top: int,
    stats: LogitStats | None = None,
    vocab: Vocabulary | None = None,
    backend: Backend | None = None,
    modified: Array | None = None,
    masks: RowMasks | None = None,
) -> ChosenTokens:
    """Choose one token per row.

    Args:
        logits: f32[row, vocab] of the model, of this device's part of the vocabulary; -inf is allowed.
        rows: how to sample, over `row` (`SamplingTable.rows`).
        max_top: width of the output's `top_ids`.
        stats: of these logits, where they are known already.
        vocab: of the logits; None: one device has all of it. Where it is sharded, every device chooses the same tokens,
            and those of one device but for rounding: no device ever has a full row of logits.
        backend: whose kernels sample, if it has some; None: XLA's code does.
        modified: f32[row, vocab], the logits after a caller's `logits_mod`; None: there is none.
        masks: the tokens that may follow; None: no request is constrained.
    """
    vocab = _vocab_of(logits, vocab)
    kernels = None if stats is None else _kernels_of(backend, logits, vocab)
    as_read = kernels.as_read if kernels is not None else lambda logits: logits
    by_rows = isinstance(kernels, RowKernels)
    stats = LogitStats.of(logits, vocab) if stats is None else stats
    peak, all_rows = stats.peak, _Rows.of(rows, history, vocab, modified, masks)
    column, _, changes, used, greedy = all_rows
    num_rows = jnp.max(jnp.where(used, jnp.arange(1, used.shape[0] + 1, dtype=jnp.int32), 0))
    drawn_or_best = functools.partial(_drawn_or_best, vocab=vocab, kernels=kernels)

    def take_best():
        tokens = _possible(_best(logits, peak, stats, vocab), peak)
        return changes.best_allowed(tokens, logits, vocab, backend, num_rows), jnp.zeros_like(peak)

    def process_and_choose(rows: _Rows, logits: Array, num_rows: Array):
        z = rows.changes.applied(logits, rows.column, rows.history, vocab, as_read, backend, num_rows)
        found = None if backend is None else LogitStats.of_kernel(backend, z, num_rows, vocab)
        if found is None:
            z_peak = vocab.shard_axis.max(jnp.max(z, axis=1))
        else:  # a kernel's peak passes over NaN; its sum does not
            z_peak = jnp.where(found.total > 0, found.peak, jnp.nan)
        return drawn_or_best(rows, z, z_peak, _best(z, z_peak, found, vocab), num_rows)

    def process_block(numbers: Array):
        first, count = numbers[0], numbers.shape[0]
        part = jax.lax.dynamic_slice_in_dim(logits, first, count)
        return process_and_choose(all_rows.part(first, count), part, jnp.clip(num_rows - first, 0, count))

    def choose_changed_or_not():
        changed, best = changes.rows & used, _best(logits, peak, stats, vocab)

        def process():
            if not by_rows:
                return tuple(in_blocks(process_block, num_rows, used.shape[0], _CHANGED_ROWS))
            # Rows without changes are not copied: each call skips the rows that it is not for.
            own = process_and_choose(all_rows._replace(used=changed), logits, num_rows)
            others = drawn_or_best(all_rows._replace(used=used & ~changed), logits, peak, best, num_rows)
            return tuple(jnp.where(changed, *each) for each in zip(own, others, strict=True))

        with jax.named_scope(scopes.CHANGED):
            return jax.lax.cond(
                jnp.any(changed), process, lambda: drawn_or_best(all_rows, logits, peak, best, num_rows)
            )

    # Rows that want nothing else, the commonest, are spared the copy of the logits that processing works on: greedy
    # ones, masked or not, and where a kernel draws whole rows, all whose logits stay as they are.
    if kernels is None or by_rows:
        process = choose_changed_or_not if by_rows else lambda: process_and_choose(all_rows, logits, num_rows)
        with jax.named_scope(scopes.PROCESSED):
            copies = jnp.any((changes.rewritten | ~greedy) & used)
            chosen, processed = jax.lax.cond(copies, process, take_best)
    else:
        chosen, processed = choose_changed_or_not()
    chosen = changes.chosen(chosen, as_read(logits), vocab)
    num_top = jnp.where(used & (stats.total > 0) & (chosen >= 0), column["num_logprobs"], 0)
    top_ids, top_logits = _top_logits(as_read(logits), stats, num_top, max_top, vocab, backend)
    of_tokens = _logits_of(as_read(logits), chosen, vocab)
    return ChosenTokens(chosen, of_tokens, processed, num_top, top_ids, top_logits, stats)


class _Changes(NamedTuple):
    """Changes of the logits before the draw, each with a mask bool[row] of the rows that it concerns."""

    used: Array
    """Rows that sample and are not forced."""
    penalised: Array
    biased: Array
    banned: Array
    """Rows in which one-token stop sequences are impossible yet."""
    modified: Array | None
    """The logits of a caller's making, f32[row, vocab], in place of the model's."""
    masks: RowMasks | None
    forced: Array
    """Rows, bool[row], in which one token may follow. They get it: no logit changes, and nothing is drawn."""

    @staticmethod
    def of(
        column: dict[str, Array],
        history: History,
        used: Array,
        vocab: Vocabulary,
        modified: Array | None,
        masks: RowMasks | None,
    ) -> "_Changes":
        """The changes of the rows `used`, bool[row]."""
        banned = is_banned(column, history.seq_lens - history.prompt_lens) & used
        # A caller's logits, and a stop sequence that is impossible yet, may leave a row no token at all.
        forced = jnp.zeros_like(used) if masks is None or modified is not None else masks.forced < vocab.size
        forced = forced & used & ~banned
        free = used & ~forced
        penalised, biased = is_penalised(column) & free, is_biased(column, vocab.size) & free
        return _Changes(free, penalised, biased, banned, modified, masks, forced)

    def chosen(self, tokens: Array, logits: Array, vocab: Vocabulary) -> Array:
        """The tokens i32[row], with those of forced rows; -1 where the model's logit of one is not finite."""
        if self.masks is None:
            return tokens
        own = vocab.at(logits, self.masks.forced[:, None], -jnp.inf)[:, 0]
        return jnp.where(self.forced, _possible(self.masks.forced, own), tokens)

    def best_allowed(
        self, tokens: Array, logits: Array, vocab: Vocabulary, backend: Backend | None, num_rows: Array
    ) -> Array:
        """The likeliest tokens i32[row], -1 for none: those of rows that a mask changes in place of `tokens`."""
        masks = self.masks
        if masks is None:
            return tokens

        def allowed(tokens: Array) -> Array:
            peak, best = masks.best(logits, vocab, backend, num_rows)
            return jnp.where(masks.constrained, _possible(best, peak), tokens)

        return run_if(jnp.any(self._masked), allowed, tokens)

    @property
    def rewritten(self) -> Array:
        """Rows whose logits change other than by a mask, bool[row]."""
        return self.penalised | self.biased | self.banned if self.modified is None else self.used

    @property
    def rows(self) -> Array:
        """Rows whose logits change, bool[row]."""
        return self.rewritten if self.masks is None else self.rewritten | self._masked

    @property
    def _masked(self) -> Array:
        """Rows whose logits a mask changes, bool[row]. Requires: there are masks."""
        assert self.masks is not None
        return self.masks.constrained & self.used

    def applied(
        self,
        logits: Array,
        column: dict[str, Array],
        history: History,
        vocab: Vocabulary,
        as_read,
        backend: Backend | None,
        num_rows: Array,
    ) -> Array:
        """The changed logits. Args: as_read: as the kernels that draw take logits; backend: whose kernel changes the
        first `num_rows`, if it has one."""
        z = as_read(logits if self.modified is None else self.modified)
        if backend is not None and vocab.shard_axis.mesh_axis is None:
            found = backend.changed_logits(z, self._for_kernel(column, history, vocab), num_rows)
            if found is not None:
                return found
        with branching(False):  # a branch would copy the logits, which are still wanted as they were
            z = run_if(jnp.any(self.biased), lambda z: as_read(add_bias(z, column, vocab)), z)
            penalised, masks = self.penalised, self.masks
            with jax.named_scope(scopes.PENALISED):
                z = run_if(
                    jnp.any(penalised), lambda z: as_read(apply_penalties(z, column, history, vocab, penalised)), z
                )
            z = as_read(run_if(jnp.any(self.banned), lambda z: as_read(_ban_stops(z, column, self.banned, vocab)), z))
            if masks is None:
                return z
            return as_read(run_if(jnp.any(self._masked), lambda z: as_read(masks.apply(z, vocab)), z))

    def _for_kernel(self, column: dict[str, Array], history: History, vocab: Vocabulary) -> LogitChanges:
        """The changes as `Backend.changed_logits` makes them."""
        masks = self.masks
        return LogitChanges(
            column["bias_ids"],
            column["bias_values"],
            column["repetition_penalty"],
            column["frequency_penalty"],
            column["presence_penalty"],
            history.tokens,
            history.slot_ids,
            history.prompt_lens,
            jnp.where(self.penalised, history.seq_lens, 0),
            _banned_ids(column, self.banned, vocab),
            jnp.zeros((self.used.shape[0], 0), jnp.uint32) if masks is None else masks.words,
            jnp.zeros_like(self.used) if masks is None else self._masked,
            self.rows & self.used,
        )


class _Rows(NamedTuple):
    """How some rows are sampled: each array has an axis of these rows, but for the tokens of all sequences."""

    column: dict[str, Array]
    history: History
    changes: _Changes
    used: Array
    greedy: Array

    @staticmethod
    def of(
        rows: SamplingTable,
        history: History,
        vocab: Vocabulary,
        modified: Array | None,
        masks: RowMasks | None,
    ) -> "_Rows":
        """Args: as of `choose`."""
        column, used = rows.columns, history.slot_ids < history.tokens.shape[0]
        changes = _Changes.of(column, history, used, vocab, modified, masks)
        greedy = (column["temperature"] < GREEDY_TEMPERATURE) | changes.forced
        return _Rows(column, history, changes, used, greedy)

    def part(self, first: Array, count: int) -> "_Rows":
        """The rows from `first` on."""
        tokens = self.history.tokens  # [slot, position], which is taken out to slice the others
        per_row = self._replace(history=self.history._replace(tokens=None))
        part = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, first, count), per_row)
        return part._replace(history=part.history._replace(tokens=tokens))


def _drawn_or_best(
    rows: _Rows,
    z: Array,
    peak: Array,
    best: Array,
    num_rows: Array,
    *,
    vocab: Vocabulary,
    kernels: SamplingKernels | RowKernels | None,
) -> tuple[Array, Array]:
    """Tokens i32[row], -1 for none, and their log probabilities f32[row]: drawn, or the `best` in greedy rows.

    Args:
        z: f32[row, vocab], the logits to draw from.
        peak: f32[row], the largest of them; best: i32[row], the first token that has it.
    """
    draws, by_rows = jnp.any(~rows.greedy & rows.used), isinstance(kernels, RowKernels)

    def draw_all():
        positions = rows.history.positions
        return _draw_tokens(z, peak, rows.column, positions, rows.greedy, vocab, kernels, num_rows, rows.used)

    def draw_none():
        return jnp.zeros_like(best), jnp.zeros_like(peak)

    with jax.named_scope(scopes.DRAWN):  # kernels skip rows by themselves
        drawn, logprobs = draw_all() if by_rows else jax.lax.cond(draws, draw_all, draw_none)
    return _possible(jnp.where(rows.greedy, best, drawn), peak), jnp.where(rows.greedy, 0, logprobs)


def _possible(tokens: Array, peak: Array) -> Array:
    """The tokens i32[row], -1 for rows without one: `peak` is not finite."""
    return jnp.where(jnp.isfinite(peak), tokens, -1)


def _kernels_of(backend: Backend | None, logits: Array, vocab: Vocabulary) -> SamplingKernels | RowKernels | None:
    kernels = None if backend is None else backend.sampling_kernels(logits)
    # `RowKernels` read whole rows; of a sharded vocabulary a device has a part of each.
    return None if isinstance(kernels, RowKernels) and vocab.shard_axis.mesh_axis is not None else kernels


def samples_whole_rows(backend: Backend, logits: Array, vocab: Vocabulary) -> bool:
    """Whether kernels draw from whole rows of these logits, so that any number of rows may be sampled together."""
    return isinstance(_kernels_of(backend, logits, vocab), RowKernels)


def _vocab_of(logits: Array, vocab: Vocabulary | None) -> Vocabulary:
    return Vocabulary(logits.shape[1]) if vocab is None else vocab


def logprobs_of(logits: Array, tokens: Array, stats: LogitStats, vocab: Vocabulary | None = None) -> Array:
    """Log probability under the model of the token i32[row] of each row of logits f32[row, vocab], f32[row].

    NaN or infinite where the logits are not finite.
    """
    return _logprobs(_logits_of(logits, tokens, _vocab_of(logits, vocab)), stats)


def _logits_of(logits: Array, tokens: Array, vocab: Vocabulary) -> Array:
    """The logit of the token i32[row] of each row, f32[row]; NaN where it is none."""
    return vocab.at(logits, tokens[:, None], jnp.nan)[:, 0]


def _logprobs(logits: Array, stats: LogitStats) -> Array:
    """Log probabilities under the model, of logits f32[row] or f32[row, n]."""
    peak, log_total = stats.peak, jnp.log(stats.total)
    return logits - peak - log_total if logits.ndim == 1 else logits - peak[:, None] - log_total[:, None]


def likeliest(logits: Array, stats: LogitStats, count: int, vocab: Vocabulary | None = None) -> tuple[Array, Array]:
    """The `count` likeliest tokens of each row of logits f32[row, vocab], i32[row, count], best first, and their log
    probabilities under the model, f32[row, count], with the bits of `logprobs_of`."""
    values, ids = _largest(logits, stats, count, _vocab_of(logits, vocab))
    return ids, _logprobs(values, stats)


def _largest(logits: Array, stats: LogitStats, count: int, vocab: Vocabulary) -> tuple[Array, Array]:
    """The `count` largest logits of each row, f32[row, count], the largest first, and their tokens."""
    if count == 1:
        return stats.peak[:, None], _best(logits, stats.peak, stats, vocab)[:, None]
    return vocab.largest(logits, count)


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
    stop_lens, stop_ids = column["stop_lens"], column["stop_ids"]
    if stop_lens.size == 0:
        return stop_lens
    last = stop_ids.reshape(*stop_lens.shape, -1)[:, :, -1]
    return jnp.where(stop_lens == 1, last, vocab)


def apply_penalties(
    logits: Array, column: dict[str, Array], history: History, vocab: Vocabulary, penalised: Array
) -> Array:
    """Logits after the penalties of the rows in the mask `penalised`, bool[row].

    Source: repetition penalty, arXiv:1909.05858 section 4.1; the others as in the OpenAI API.
    """
    lens = jnp.where(penalised, history.seq_lens, 0)
    counts = _token_counts(vocab, history.tokens, history.slot_ids, history.prompt_lens, lens)
    generated, seen = counts[0], (counts[0] + counts[1]) > 0
    repetition = column["repetition_penalty"][:, None]
    z = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    z = z - column["frequency_penalty"][:, None] * generated.astype(jnp.float32)
    z = z - column["presence_penalty"][:, None] * (generated > 0).astype(jnp.float32)
    return jnp.where(is_penalised(column)[:, None], z, logits)


def _token_counts(vocab: Vocabulary, tokens: Array, slots: Array, prompt_lens: Array, lens: Array) -> Array:
    """Occurrences of each token in the output, and in the prompt, i32[2, row, vocab], of this device's part.

    Reads the history in chunks, up to the longest of `lens` (0 for rows that need no counts).
    """
    rows = slots.shape[0]
    chunk = min(_HISTORY_CHUNK, tokens.shape[1])
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, chunk), 0)

    def add(index, counts):
        place = index * chunk + jax.lax.broadcasted_iota(jnp.int32, (rows, chunk), 1)
        known = place < lens[:, None]
        token = gather(tokens, (slots[:, None], place), 0)
        is_prompt = (place < prompt_lens[:, None]).astype(jnp.int32)
        return scatter_add(counts, (is_prompt, jnp.where(known, row, rows), vocab.local(token)), 1)

    num_chunks = (jnp.max(lens) + (chunk - 1)) // chunk
    return jax.lax.fori_loop(0, num_chunks, add, jnp.zeros((2, rows, vocab.part_size), jnp.int32))


def _row_ids(ids: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, ids.shape, 0)


def add_bias(logits: Array, column: dict[str, Array], vocab: Vocabulary) -> Array:
    ids = vocab.local(column["bias_ids"])
    return scatter_add(logits, (_row_ids(ids), ids), column["bias_values"])


def _ban_stops(logits: Array, column: dict[str, Array], banned: Array, vocab: Vocabulary) -> Array:
    """Make the one-token stop sequences of `banned` rows impossible."""
    ids = vocab.local(_banned_ids(column, banned, vocab))
    return scatter(logits, (_row_ids(ids), ids), -jnp.inf)


def _banned_ids(column: dict[str, Array], banned: Array, vocab: Vocabulary) -> Array:
    """The one-token stop sequences of `banned` rows, i32[row, stop]; none is `vocab.size`."""
    return jnp.where(banned[:, None], one_token_stops(column, vocab.size), vocab.size)


def _best(logits: Array, peak: Array, stats: LogitStats | None, vocab: Vocabulary) -> Array:
    """The lowest id among the tokens of each row whose logit is `peak`, i32[row]; a row of NaN has none.

    Args: stats: of these logits, where they are known.
    """
    return vocab.first(logits == peak[:, None]) if stats is None or stats.best is None else stats.best


def _draw_tokens(
    logits: Array,
    peak: Array,
    column: dict[str, Array],
    positions: Array,
    greedy: Array,
    vocab: Vocabulary,
    kernels: SamplingKernels | RowKernels | None,
    num_rows: Array,
    used: Array,
):
    """Temperature, filters and the draw. Returns: tokens i32[row] and their log probabilities f32[row]."""
    inverse = jnp.where(greedy, 1, 1 / jnp.where(greedy, 1, column["temperature"]))
    floor = jnp.maximum(column["log_min_p"], MIN_EXPONENT)

    def exponents(z):
        return (z - peak[:, None]) * inverse[:, None]

    def weights(z, threshold, floor):
        exponent = exponents(z)
        kept = (z >= threshold[:, None]) & (exponent >= floor[:, None])
        return jnp.where(kept, jnp.exp(exponent), 0)

    off = greedy | ~jnp.isfinite(peak)
    top_k = jnp.where(off | (column["top_k"] == 0), vocab.size, jnp.minimum(column["top_k"], vocab.size))
    top_p = jnp.where(off, 1, column["top_p"])
    if isinstance(kernels, RowKernels):
        drawn = used & ~greedy & jnp.isfinite(peak)
        is_k, is_p = drawn & (top_k < vocab.size), drawn & (top_p < 1)
        rules = DrawRules(
            peak, inverse, floor, jnp.where(is_k, top_k, 0), jnp.where(is_p, top_p, 1), drawn.astype(jnp.int32)
        )
        key = DrawKey(column["seed"], column["sample_index"], positions)
        return draw_rows(kernels, logits, rules, kernels.thresholds(logits, rules), key)
    words = random_words(column["seed"], column["sample_index"], positions, num_words(vocab.size))
    everything = jnp.full_like(peak, -jnp.inf)

    def terms(threshold: Array, floor: Array) -> Array:
        return jnp.stack([peak, inverse, threshold, floor], axis=1)

    def thresholds():
        lightest = jnp.full_like(peak, MIN_EXPONENT)
        if kernels is not None:
            own = terms(everything, lightest)
            return thresholds_by_kernels(kernels, logits, own, top_k, top_p, vocab, num_rows)
        return filter_thresholds(logits, lambda z: weights(z, everything, lightest), top_k, top_p, vocab)

    with jax.named_scope(scopes.FILTERED):
        threshold = jax.lax.cond(jnp.any((top_k < vocab.size) | (top_p < 1)), thresholds, lambda: everything)

    def at(ids, stride=None):
        return vocab.at(logits if kernels is None else kernels.as_read(logits), ids, -jnp.inf, stride)

    if kernels is not None:

        def leaves(ids, stride):
            z = at(ids, stride)
            return weights(z, threshold, floor), exponents(z)

        own = terms(threshold, floor)
        token, total, exponent = draw_by_kernels(kernels, logits, own, leaves, words, vocab, num_rows)
        return token, exponent - jnp.log(total)
    token, total = draw(weights(logits, threshold, floor), lambda ids: weights(at(ids), threshold, floor), words, vocab)
    return token, exponents(at(token[:, None]))[:, 0] - jnp.log(total)


def _top_logits(
    logits: Array, stats: LogitStats, wanted: Array, max_top: int, vocab: Vocabulary, backend: Backend | None
) -> tuple[Array, Array]:
    """The `wanted` i32[row] likeliest tokens of each row, i32[row, max_top], and their logits; none and anything in
    further columns."""
    rows = logits.shape[0]
    nothing = jnp.full((rows, max_top), vocab.size, jnp.int32), jnp.zeros((rows, max_top), jnp.float32)
    if max_top == 0:
        return nothing

    def likeliest() -> tuple[Array, Array]:
        is_sharded = vocab.shard_axis.mesh_axis is not None
        top = None if backend is None or is_sharded else backend.likeliest(logits, wanted, max_top)
        values, ids = _largest(logits, stats, max_top, vocab) if top is None else top
        is_asked = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1) < wanted[:, None]
        return jnp.where(is_asked, ids, vocab.size), values

    return jax.lax.cond(jnp.any(wanted > 0), likeliest, lambda: nothing)
