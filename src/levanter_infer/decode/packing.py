"""What runs next: which waiting sequences start, and which tokens the step computes.

All policies are prefix sums over slots ordered by arrival; nothing loops over sequences.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.named import replace
from levanter_infer.decode.sequence_table import RUNNING, WAITING, pages_for
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState


class StepPlan(eqx.Module):
    """What one step computes. Plain i32 arrays; absent slots are `num_slots`."""

    take: Array
    """[seq] tokens of each slot that this step computes."""
    slot_ids: Array
    """[row] slots that take part: those that decode, oldest first, then prompts, oldest first."""
    cu_q_lens: Array
    """[row + 1] bounds of each row's tokens."""
    num_rows: Array
    num_tokens: Array


def start_waiting(state: DecodeState, shapes: Shapes, order: Array) -> DecodeState:
    """Give free places to waiting sequences, in order of arrival.

    One starts only if the pages that it needs for all its known tokens are free beyond those that the running ones
    still need and one more for each of them: otherwise it would be preempted again at once. If nobody runs, the
    oldest starts in any case; pages are then found by preemption.
    """
    table, page_table = state.sequences, state.page_table
    size = page_table.page_size
    running = table.is_status(RUNNING)
    ready = table.is_status(WAITING) & (table.fork_source.array == table.num_slots)
    # One page more than the tokens need: the next page of a growing sequence, or the copy of a shared tail.
    need = jnp.maximum(pages_for(table.seq_lens.array + 1, size) + 1 - table.num_held(size), 0)
    num_running = jnp.sum(running, dtype=jnp.int32)
    available = page_table.num_free.array - jnp.sum(jnp.where(running, need, 0), dtype=jnp.int32)

    ready_in_order = ready[order]
    rank = jnp.cumsum(ready_in_order, dtype=jnp.int32)
    cumulative = jnp.cumsum(jnp.where(ready_in_order, need[order], 0), dtype=jnp.int32)
    fits = (cumulative <= available) | ((num_running == 0) & (rank == 1))
    starts = ready_in_order & (rank + num_running <= shapes.max_seqs) & fits
    status = table.status.array.at[order].set(jnp.where(starts, RUNNING, table.status.array[order]))
    return eqx.tree_at(lambda s: s.sequences, state, replace(table, status=status))


def choose_tokens(state: DecodeState, shapes: Shapes, order: Array, waits: Array) -> Array:
    """Tokens that each slot computes in this step, i32[seq]; none for those in the mask `waits`.

    Every running sequence with one pending token decodes; what is left of the token budget goes to prompts in order
    of arrival, the last of them in part. Decoding never waits for prompts. Prompts are not starved either: one that
    runs holds one of `max_seqs <= max_step_tokens` places, so at least one token of the budget is left for it.
    """
    table = state.sequences
    pending = jnp.where(table.is_status(RUNNING) & ~waits, table.seq_lens.array - table.num_computed.array, 0)
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
    decodes = (in_order == 1) & (table.seq_lens.array - table.num_computed.array == 1)[order]
    chunks = (in_order > 0) & ~decodes
    num_decodes = jnp.sum(decodes, dtype=jnp.int32)
    row = jnp.where(decodes, jnp.cumsum(decodes, dtype=jnp.int32), num_decodes + jnp.cumsum(chunks, dtype=jnp.int32))
    row = jnp.where(in_order > 0, row - 1, shapes.max_rows)
    slot_ids = jnp.full(shapes.max_rows, table.num_slots, jnp.int32).at[row].set(order, mode="drop")
    q_lens = take.at[slot_ids].get(mode="fill", fill_value=0)
    bounds = jnp.cumsum(q_lens, dtype=jnp.int32)
    return StepPlan(
        take=take,
        slot_ids=slot_ids,
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), bounds]),
        num_rows=jnp.sum(in_order > 0, dtype=jnp.int32),
        num_tokens=bounds[-1],
    )
