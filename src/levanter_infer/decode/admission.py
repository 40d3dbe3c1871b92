"""`Admission`: all that the host tells the device, once a round."""

import dataclasses

import equinox as eqx
import haliax.haxtyping as ht
import jax.numpy as jnp
from haliax import NamedArray

from levanter_infer.cache.named import replace
from levanter_infer.cache.page_table import ragged_index, run_if
from levanter_infer.decode.beam_table import BeamParams
from levanter_infer.decode.codes import ABORT, FINISHED, FREE, LOADING, NOT_FINISHED, WAITING
from levanter_infer.decode.kv_offload import HostTerms
from levanter_infer.decode.paging import free_pages_for_finished
from levanter_infer.decode.sampling import SamplingTable
from levanter_infer.decode.state import DecodeState


class Admission(eqx.Module):
    """New sequences, or further pieces of long prompts; cancellations; and how long the round may last.

    A prompt longer than the upload buffer arrives in several pieces, one a round. Every piece repeats what is known
    of its sequence; the last one has `complete`. Forks carry no tokens: they copy the row of their source.
    """

    tokens: ht.i32[NamedArray, " upload"]
    """Tokens of all pieces, one behind the other."""
    lens: ht.i32[NamedArray, " admitted"]
    """Tokens of each piece."""
    starts: ht.i32[NamedArray, " admitted"]
    """Position of each piece's first token in its sequence."""
    slot_ids: ht.i32[NamedArray, " admitted"]
    """Slot of each piece, at most one piece a slot; none for unused entries."""
    complete: ht.bool_[NamedArray, " admitted"]
    prompt_lens: ht.i32[NamedArray, " admitted"]
    max_lens: ht.i32[NamedArray, " admitted"]
    arrival: ht.i32[NamedArray, " admitted"]
    priority: ht.i32[NamedArray, " admitted"]
    roots: ht.i32[NamedArray, " admitted"]
    fork_source: ht.i32[NamedArray, " admitted"]
    """Slot whose prompt is shared; it holds the whole prompt by the end of this admission. None: not a fork."""
    sampling: SamplingTable
    """How to sample each admitted sequence, over `admitted`."""
    beams: BeamParams | None
    """What each admitted sequence is told about its beam search; None if the state has no table for it."""
    cancel: ht.bool_[NamedArray, " seq"]
    """Slots to end with reason ABORT."""
    max_steps: ht.i32[NamedArray, ""]
    """Steps after which the round ends."""
    min_free_slots: ht.i32[NamedArray, ""]
    """Empty slots that the host needs to admit its next request: the round ends early when there are as many, places
    are empty and nothing waits. More than there are slots: the host has nothing further."""
    has_pieces: ht.bool_[NamedArray, ""]
    has_cancellations: ht.bool_[NamedArray, ""]
    host: HostTerms | None
    """None: pages are never moved to the host by policy."""


def admit(state: DecodeState, admission: Admission) -> DecodeState:
    """Apply an admission to the tables. Never touches the pool.

    Requires: admitted slots are free or finished, or loading for a further piece; each request fits alone into pool
        and tables (the engine rejects others).
    """
    state = run_if(
        admission.has_cancellations.array,
        lambda state: _cancel(state, admission),
        state,
    )
    return run_if(admission.has_pieces.array, lambda state: _write_pieces(state, admission), state)


def _cancel(state: DecodeState, admission: Admission) -> DecodeState:
    status = state.sequences.status.array
    live = (status > FREE) & (status < FINISHED)
    return free_pages_for_finished(state, admission.cancel.array & live, jnp.full_like(status, ABORT))


def _write_pieces(state: DecodeState, admission: Admission) -> DecodeState:
    table = state.sequences
    slots = admission.slot_ids.array
    size = admission.tokens.array.shape[0]
    piece, item, valid = ragged_index(admission.lens.array, jnp.int32(0), size)
    row = slots.at[piece].get(mode="fill", fill_value=table.num_slots)
    column = admission.starts.array.at[piece].get(mode="fill", fill_value=0) + item
    tokens = table.tokens.array.at[jnp.where(valid, row, table.num_slots), column].set(
        admission.tokens.array, mode="drop"
    )

    def copy_rows(tokens):
        source = admission.fork_source.array
        target = jnp.where(source < table.num_slots, slots, table.num_slots)
        return tokens.at[target].set(tokens.at[source].get(mode="clip"), mode="drop")

    tokens = run_if(jnp.any(admission.fork_source.array < table.num_slots), copy_rows, tokens)

    def column_of(name, values):
        return getattr(table, name).array.at[slots].set(values, mode="drop")

    table = replace(
        table,
        tokens=tokens,
        seq_lens=column_of("seq_lens", admission.prompt_lens.array),
        num_computed=column_of("num_computed", jnp.zeros_like(slots)),
        status=column_of("status", jnp.where(admission.complete.array, WAITING, LOADING).astype(jnp.int32)),
        finish_reason=column_of("finish_reason", jnp.full_like(slots, NOT_FINISHED)),
        arrival=column_of("arrival", admission.arrival.array),
        priority=column_of("priority", admission.priority.array),
        prompt_lens=column_of("prompt_lens", admission.prompt_lens.array),
        max_lens=column_of("max_lens", admission.max_lens.array),
        roots=column_of("roots", admission.roots.array),
        fork_source=column_of("fork_source", admission.fork_source.array),
        num_cached=column_of("num_cached", jnp.zeros_like(slots)),
        num_reached=column_of("num_reached", jnp.zeros_like(slots)),
    )
    sampling = state.sampling.set_rows(slots, admission.sampling)
    state = eqx.tree_at(lambda s: (s.sequences, s.sampling), state, (table, sampling))
    if state.beams is None:
        return state
    assert admission.beams is not None
    return dataclasses.replace(state, beams=state.beams.admit(slots, admission.beams))
