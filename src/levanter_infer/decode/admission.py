"""`Admission`: the one upload of a round, from the host to the device."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from levanter_infer.cache.arrays import gather, replace, scatter
from levanter_infer.cache.page_table import ragged_index
from levanter_infer.decode.beam_table import BeamParams
from levanter_infer.decode.codes import ABORT, FINISHED, FREE, LOADING, NOT_FINISHED, WAITING
from levanter_infer.decode.constraints import ConstraintParams
from levanter_infer.decode.kv_offload import HostTerms
from levanter_infer.decode.paging import free_pages_for_finished
from levanter_infer.decode.sampling import SamplingTable
from levanter_infer.decode.state import DecodeState
from levanter_infer.kernels.loops import in_parts, run_if


class Admission(eqx.Module):
    """New sequences, or further pieces of long prompts; cancellations; and how long the round may last.

    A prompt longer than the upload buffer arrives in several pieces, one a round. Every piece repeats the columns of
    its sequence; the last one has `complete`. Forks carry no tokens: they copy those of their source.
    """

    tokens: Int32[Array, " upload"]
    """Tokens of all pieces, concatenated."""
    lens: Int32[Array, " admitted"]
    """Tokens of each piece."""
    starts: Int32[Array, " admitted"]
    """Position of each piece's first token in its sequence."""
    slot_ids: Int32[Array, " admitted"]
    """Slot of each piece, at most one piece a slot; none for unused entries."""
    complete: Bool[Array, " admitted"]
    prompt_lens: Int32[Array, " admitted"]
    max_lens: Int32[Array, " admitted"]
    arrival: Int32[Array, " admitted"]
    priority: Int32[Array, " admitted"]
    roots: Int32[Array, " admitted"]
    fork_source: Int32[Array, " admitted"]
    """Slot whose prompt is shared; its prompt is complete by the end of this admission. None: not a fork."""
    sampling: SamplingTable
    """Sampling parameters of each admitted sequence, over `admitted`."""
    beams: BeamParams | None
    """Search parameters of each admitted sequence; None if the state has no `BeamTable`."""
    constraints: ConstraintParams | None
    """Constraint of each admitted sequence; None if the state has no `ConstraintTable`."""
    cancel: Bool[Array, " seq"]
    """Slots to end with reason ABORT."""
    max_steps: Int32[Array, ""]
    """Steps after which the round ends."""
    min_free_slots: Int32[Array, ""]
    """Free slots that the host needs to admit its next request: the round ends early when there are as many, fewer than
    `max_seqs` sequences run and none waits. More than there are slots: the host has no further request."""
    has_pieces: Bool[Array, ""]
    has_cancellations: Bool[Array, ""]
    host: HostTerms | None
    """None: pages are never moved to the host by policy."""


def admit(state: DecodeState, admission: Admission) -> DecodeState:
    """Apply an admission to the tables. Never touches the pool.

    Requires: admitted slots are free or finished, or loading for a further piece; each request fits alone into pool
        and tables (the engine rejects others).
    """
    state = run_if(
        admission.has_cancellations,
        lambda state: _cancel(state, admission),
        state,
    )
    return run_if(admission.has_pieces, lambda state: _write_pieces(state, admission), state)


def _cancel(state: DecodeState, admission: Admission) -> DecodeState:
    status = state.sequences.status
    live = (status > FREE) & (status < FINISHED)
    return free_pages_for_finished(state, admission.cancel & live, jnp.full_like(status, ABORT))


def _write_pieces(state: DecodeState, admission: Admission) -> DecodeState:
    table = state.sequences
    slots = admission.slot_ids
    size = admission.tokens.shape[0]
    piece, item, valid = ragged_index(admission.lens, jnp.int32(0), size)
    row = gather(slots, piece, table.num_slots)
    column = gather(admission.starts, piece, 0) + item
    tokens = scatter(table.tokens, (jnp.where(valid, row, table.num_slots), column), admission.tokens)

    is_fork = admission.fork_source < table.num_slots
    forks = jnp.where(is_fork, slots, table.num_slots)
    entries = jnp.arange(slots.shape[0], dtype=jnp.int32)

    def copy_prompts(tokens: Array) -> Array:
        # A part at a time: the copy of all rows would be as large as the table.
        last = jnp.max(jnp.where(is_fork, entries, -1))
        return in_parts(copy_part, tokens, entries, last + 1, none=slots.shape[0])

    def copy_part(tokens: Array, part: Array) -> Array:
        source = gather(admission.fork_source, part, table.num_slots)
        return scatter(tokens, gather(forks, part, table.num_slots), tokens.at[source].get(mode="clip"))

    tokens = run_if(jnp.any(is_fork), copy_prompts, tokens)

    def column_of(name, values):
        return scatter(getattr(table, name), slots, values)

    table = replace(
        table,
        tokens=tokens,
        seq_lens=column_of("seq_lens", admission.prompt_lens),
        num_computed=column_of("num_computed", jnp.zeros_like(slots)),
        status=column_of("status", jnp.where(admission.complete, WAITING, LOADING).astype(jnp.int32)),
        finish_reason=column_of("finish_reason", jnp.full_like(slots, NOT_FINISHED)),
        arrival=column_of("arrival", admission.arrival),
        priority=column_of("priority", admission.priority),
        prompt_lens=column_of("prompt_lens", admission.prompt_lens),
        max_lens=column_of("max_lens", admission.max_lens),
        roots=column_of("roots", admission.roots),
        fork_source=column_of("fork_source", admission.fork_source),
        num_cached=column_of("num_cached", jnp.zeros_like(slots)),
        num_reached=column_of("num_reached", jnp.zeros_like(slots)),
    )
    sampling = state.sampling.set_rows(slots, admission.sampling)
    constraints = state.constraints
    if constraints is not None:
        assert admission.constraints is not None
        constraints = constraints.admit(slots, admission.constraints)
    beams = state.beams.admit(slots, admission.beams)
    return replace(state, sequences=table, sampling=sampling, beams=beams, constraints=constraints)
