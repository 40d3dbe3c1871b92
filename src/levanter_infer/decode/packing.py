"""What runs next: which waiting sequences start, and which tokens the step computes.

All policies are prefix sums over slots in the order of `in_order`; nothing loops over sequences.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import gather, replace, scatter
from levanter_infer.cache.page_math import pages_for
from levanter_infer.decode.codes import RUNNING, SWAPPED, WAITING
from levanter_infer.decode.sequence_table import is_ready, precede
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState

_MEMORY = 1 - 1 / 32
"""What the mean share of generated tokens keeps at each sequence that ends."""


class StepPlan(eqx.Module):
    """What one step computes. Plain i32 arrays; absent slots are `num_slots`."""

    take: Array
    """[seq] tokens of each slot that this step computes."""
    slot_ids: Array
    """[row] slots that take part: those that decode, in order, then prompts, in order."""
    cu_q_lens: Array
    """[row + 1] bounds of each row's tokens."""
    num_rows: Array
    num_tokens: Array


def start_waiting(state: DecodeState, shapes: Shapes, order: Array) -> DecodeState:
    """Give free places to waiting sequences, in order.

    One starts only if the pages that it will need (`_room_for`) are free beyond those that the running ones will. If
    nobody runs, the first starts in any case; pages are then found by preemption.
    """
    table, page_table = state.sequences, state.page_table
    running, ready = table.is_status(RUNNING), is_ready(table)
    if state.beams is not None:  # their beams wait for pages of their leader while they run
        ready |= table.is_status(WAITING) & state.beams.searches
    if shapes.offload:
        ready &= precede(table, SWAPPED)
    need = pages_to_go_on(state, shapes)
    num_running = jnp.sum(running, dtype=jnp.int32)
    available = page_table.num_free - jnp.sum(jnp.where(running, need, 0), dtype=jnp.int32)

    ready_in_order = ready[order]
    rank = jnp.cumsum(ready_in_order, dtype=jnp.int32)
    cumulative = jnp.cumsum(jnp.where(ready_in_order, need[order], 0), dtype=jnp.int32)
    first = jnp.int32(1)
    if state.beams is not None:
        first = jnp.maximum(first, state.beams.params.widths[order[jnp.argmax(ready_in_order)]])
    fits = (cumulative <= available) | ((num_running == 0) & (rank <= first))
    starts = ready_in_order & (rank + num_running <= shapes.max_seqs) & fits
    starts = jnp.zeros_like(ready).at[order].set(starts)
    if state.beams is not None:
        starts = starts & state.beams.whole(starts | running)
    status = jnp.where(starts, RUNNING, table.status)
    return replace(state, sequences=replace(table, status=status))


def pages_to_go_on(state: DecodeState, shapes: Shapes) -> Array:
    """Pages that each slot needs beyond those it holds, for what it is given room for, i32[seq]."""
    table, size = state.sequences, state.page_table.page_size
    # One page more than the tokens need, for the copy of a shared tail.
    return jnp.maximum(pages_for(_room_for(state, shapes), size) + 1 - table.num_held(size), 0)


def _room_for(state: DecodeState, shapes: Shapes) -> Array:
    """Tokens that each slot is given room for when it starts, i32[seq].

    optimistic: those that are known, and the next: with less it would be preempted again at once. worst_case: all that
    it may generate: nobody is ever preempted. expected: the share of these that recent sequences have generated.
    """
    table = state.sequences
    known, most = table.seq_lens + 1, table.max_lens
    if shapes.admission == "optimistic":
        return known
    if shapes.admission == "worst_case":
        return most
    prompt_lens = table.prompt_lens
    share = state.generated_share * (most - prompt_lens).astype(jnp.float32)
    return jnp.clip(prompt_lens + jnp.ceil(share).astype(jnp.int32), known, jnp.maximum(known, most))


def expect(state: DecodeState, finished: Array) -> DecodeState:
    """Learn from the sequences in the mask `finished`, bool[seq], how much of what they may others generate."""
    table = state.sequences
    prompt_lens = table.prompt_lens
    share = (table.seq_lens - prompt_lens) / jnp.maximum(table.max_lens - prompt_lens, 1)
    count = jnp.sum(finished, dtype=jnp.int32)
    mean = jnp.sum(jnp.where(finished, share, 0.0)) / jnp.maximum(count, 1).astype(jnp.float32)
    kept = jnp.power(_MEMORY, count.astype(jnp.float32))
    return replace(state, generated_share=kept * state.generated_share + (1.0 - kept) * mean)


def choose_tokens(state: DecodeState, shapes: Shapes, order: Array, waits: Array) -> Array:
    """Tokens that each slot computes in this step, i32[seq]; none for those in the mask `waits`.

    Every running sequence with one pending token decodes; what is left of the token budget goes to prompts in
    order, the last of them in part. Decoding never waits for prompts. Prompts are not starved either: one that
    runs holds one of `max_seqs <= max_step_tokens` places, so at least one token of the budget is left for it.
    """
    table = state.sequences
    pending = table.seq_lens - table.num_computed
    if state.beams is not None:
        pending = pending - state.beams.held_back(table)
    pending = jnp.where(table.is_status(RUNNING) & ~waits, pending, 0)
    decodes = pending == 1
    budget = shapes.max_step_tokens - jnp.sum(decodes, dtype=jnp.int32)
    wanted = jnp.where(decodes, 0, pending)[order]
    before = jnp.cumsum(wanted, dtype=jnp.int32) - wanted
    chunk = jnp.clip(budget - before, 0, wanted)
    return jnp.where(decodes, 1, jnp.zeros_like(pending).at[order].set(chunk))


def pack(state: DecodeState, shapes: Shapes, order: Array, take: Array) -> StepPlan:
    """Order the chosen tokens into rows, decode tokens first."""
    table = state.sequences
    in_order = take[order]
    decodes = (in_order == 1) & (table.seq_lens - table.num_computed == 1)[order]
    chunks = (in_order > 0) & ~decodes
    num_decodes = jnp.sum(decodes, dtype=jnp.int32)
    row = jnp.where(decodes, jnp.cumsum(decodes, dtype=jnp.int32), num_decodes + jnp.cumsum(chunks, dtype=jnp.int32))
    row = jnp.where(in_order > 0, row - 1, shapes.max_rows)
    slot_ids = scatter(jnp.full(shapes.max_rows, table.num_slots, jnp.int32), row, order)
    q_lens = gather(take, slot_ids, 0)
    bounds = jnp.cumsum(q_lens, dtype=jnp.int32)
    return StepPlan(
        take=take,
        slot_ids=slot_ids,
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), bounds]),
        num_rows=jnp.sum(in_order > 0, dtype=jnp.int32),
        num_tokens=bounds[-1],
    )
