"""Candidates: the continuations that a row of logits offers to a beam search."""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import gather, scatter
from levanter_infer.decode.beam_table import BeamTable, NoBeams
from levanter_infer.decode.sampling import (
    BeamCandidates,
    History,
    LogitStats,
    add_bias,
    apply_penalties,
    is_banned,
    is_biased,
    is_penalised,
    one_token_stops,
)
from levanter_infer.decode.sampling_table import SamplingTable
from levanter_infer.decode.shapes import SamplingLimits
from levanter_infer.kernels.loops import run_if
from levanter_infer.layers.shard_axis import Vocabulary


def candidates(
    beams: NoBeams,
    logits: Array,
    rows: SamplingTable,
    history: History,
    stats: LogitStats | None = None,
    vocab: Vocabulary | None = None,
    *,
    max_beams: int,
) -> BeamCandidates | None:
    """The `max_beams` likeliest continuations of each row that do not end it, and every one that does; None where no
    request searches.

    Log probabilities are processed as logits are in sampling, which is what HF transformers does: bias, penalties, and
    while fewer than `min_tokens` tokens are generated no token that ends.

    Args:
        logits: f32[row, vocab]
        beams: rows that do not belong to one of its beams are offered nothing.
        vocab: as in `choose`.
        max_beams: most beams of any group.
    """
    if not isinstance(beams, BeamTable):
        return None
    searches = gather(beams.searches, history.slot_ids, False)
    vocab = vocab or Vocabulary(logits.shape[1])
    width = min(max_beams, vocab.size)
    column = rows.columns
    stops = one_token_stops(column, vocab.size)

    def offered() -> BeamCandidates:
        known = LogitStats.of(logits, vocab) if stats is None else stats
        logprobs = logits - (known.peak + jnp.log(known.total))[:, None]
        penalised, biased = is_penalised(column) & searches, is_biased(column, vocab.size) & searches
        z = run_if(jnp.any(biased), lambda z: add_bias(z, column, vocab), logprobs)
        z = run_if(jnp.any(penalised), lambda z: apply_penalties(z, column, history, vocab, penalised), z)

        row = jax.lax.broadcasted_iota(jnp.int32, stops.shape, 0)
        banned = is_banned(column, history.seq_lens - history.prompt_lens)[:, None]
        ending = jnp.where(banned, -jnp.inf, vocab.at(z, stops, -jnp.inf))
        others = scatter(z, (row, vocab.local(stops)), -jnp.inf)
        going_on, ids = vocab.largest(others, width)
        ids = jnp.concatenate([ids, stops], axis=1)
        return BeamCandidates(
            ids=ids,
            scores=jnp.where(searches[:, None], jnp.concatenate([going_on, ending], axis=1), -jnp.inf),
            logprobs=vocab.at(logprobs, ids, 0.0),
        )

    return jax.lax.cond(jnp.any(searches), offered, lambda: no_candidates(logits.shape[0], width, rows.limits))


def no_candidates(num_rows: int, width: int, limits: SamplingLimits) -> BeamCandidates | None:
    """The `candidates` of rows that do not search; None where no request does: `width` is 0."""
    if width == 0:
        return None
    shape = (num_rows, min(width, limits.vocab_size) + limits.max_stop_sequences)
    return BeamCandidates(
        ids=jnp.zeros(shape, jnp.int32), scores=jnp.full(shape, -jnp.inf), logprobs=jnp.zeros(shape, jnp.float32)
    )
