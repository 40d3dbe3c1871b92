"""Free pages that a sequence needs to start: the policies of `engine.admission`."""

import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import replace
from levanter_infer.cache.page_math import pages_for
from levanter_infer.decode.codes import has_failed
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.policies import AdmissionPolicy

EMA_DECAY = 1 - 1 / 32
"""Weight that the mean share of generated tokens keeps at each sequence that ends."""


def pages_to_continue(state: DecodeState, shapes: Shapes) -> Array:
    """Pages that each slot needs beyond those it holds, for the length it is given capacity for, i32[seq]."""
    table, size = state.sequences, state.page_table.page_size
    # One page more than the tokens need, for the copy of a shared tail.
    return jnp.maximum(pages_for(_expected_lens(state, shapes), size) + 1 - table.num_held(size), 0)


def _expected_lens(state: DecodeState, shapes: Shapes) -> Array:
    """Tokens for which each slot is given capacity when it starts, i32[seq].

    optimistic: the known tokens and the next one: with less it would be preempted again at once. worst_case: all that
    it may generate: no sequence is ever preempted. expected: the share of these that recent sequences have generated.
    """
    table = state.sequences
    known, most = table.seq_lens + 1, table.max_lens
    if shapes.admission == AdmissionPolicy.OPTIMISTIC:
        return known
    if shapes.admission == AdmissionPolicy.WORST_CASE:
        return most
    prompt_lens = table.prompt_lens
    share = state.generated_share * (most - prompt_lens).astype(jnp.float32)
    return jnp.clip(prompt_lens + jnp.ceil(share).astype(jnp.int32), known, jnp.maximum(known, most))


def update_length_estimate(state: DecodeState, shapes: Shapes, finished: Array, reasons: Array) -> DecodeState:
    """Move the mean share of the allowed tokens that sequences generate towards the sequences in the mask `finished`,
    bool[seq], except those that failed by `reasons`, i32[seq]. Only admission `expected` has an estimate."""
    if shapes.admission != AdmissionPolicy.EXPECTED:
        return state
    finished, table = finished & ~has_failed(reasons), state.sequences
    prompt_lens = table.prompt_lens
    share = (table.seq_lens - prompt_lens) / jnp.maximum(table.max_lens - prompt_lens, 1)
    count = jnp.sum(finished, dtype=jnp.int32)
    mean = jnp.sum(jnp.where(finished, share, 0.0)) / jnp.maximum(count, 1).astype(jnp.float32)
    kept = jnp.power(EMA_DECAY, count.astype(jnp.float32))
    return replace(state, generated_share=kept * state.generated_share + (1.0 - kept) * mean)
