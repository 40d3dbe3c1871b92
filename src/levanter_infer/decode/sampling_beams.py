"""What a row of logits offers to a beam search."""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import scatter
from levanter_infer.cache.page_table import run_if
from levanter_infer.decode.sampling import (
    BeamCandidates,
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
from levanter_infer.layers.shard_axis import Vocabulary


def candidates(
    logits: Array,
    rows: SamplingTable,
    searches: Array,
    *,
    tokens: Array,
    slot_ids: Array,
    prompt_lens: Array,
    seq_lens: Array,
    width: int,
    stats: LogitStats | None = None,
    vocab: Vocabulary | None = None,
) -> BeamCandidates:
    """The `width` likeliest continuations of each row that do not end it, and every one that does.

    Log probabilities are processed as logits are in sampling, which is what HF transformers does: bias, penalties, and
    while fewer than `min_tokens` tokens are generated no token that ends.

    Args:
        logits: f32[row, vocab]
        searches: bool[row], which rows belong to beams; the others are offered nothing.
        width: static, at least the number of beams of any group.
        vocab: as in `sample`.
    """
    vocab = vocab or Vocabulary(logits.shape[1])
    width = min(width, vocab.size)
    column = rows.columns
    stops = one_token_stops(column, vocab.size)

    def offered() -> BeamCandidates:
        known = LogitStats.of(logits, vocab) if stats is None else stats
        logprobs = logits - (known.peak + jnp.log(known.total))[:, None]
        penalised, biased = is_penalised(column) & searches, is_biased(column, vocab.size) & searches
        history = (tokens, slot_ids, prompt_lens, jnp.where(penalised, seq_lens, 0))
        z = run_if(jnp.any(biased), lambda z: add_bias(z, column, vocab), logprobs)
        z = run_if(jnp.any(penalised), lambda z: apply_penalties(z, column, history, vocab), z)

        row = jax.lax.broadcasted_iota(jnp.int32, stops.shape, 0)
        banned = is_banned(column, seq_lens - prompt_lens)[:, None]
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


def no_candidates(num_rows: int, width: int, limits: SamplingLimits) -> BeamCandidates:
    """What `candidates` gives rows that do not search."""
    shape = (num_rows, min(width, limits.vocab_size) + limits.max_stop_sequences)
    return BeamCandidates(
        ids=jnp.zeros(shape, jnp.int32), scores=jnp.full(shape, -jnp.inf), logprobs=jnp.zeros(shape, jnp.float32)
    )
