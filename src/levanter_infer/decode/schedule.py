"""The scheduler of a step: which waiting sequences start, which tokens the step computes, which pages they get.

Continuous batching with chunked prefill and preemption. All policies are prefix sums over slots in the order of
`in_order`; nothing loops over sequences.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import cumsum, full, gather, gather_together, replace, scatter
from levanter_infer.cache.page_table import ragged_index
from levanter_infer.decode.admission_policy import pages_to_continue
from levanter_infer.decode.codes import RUNNING
from levanter_infer.decode.kv_offload import may_start
from levanter_infer.decode.paging import allocate_pages, preempt, tokens_to_fork
from levanter_infer.decode.prefix import match_prefix
from levanter_infer.decode.sequence_table import in_order, is_ready
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.snapshots import StatePlan, tokens_to_bound, whole_pages
from levanter_infer.decode.speculation import propose, row_states
from levanter_infer.decode.state import DecodeState


class StepPlan(eqx.Module):
    """The tokens that one step computes. i32 arrays; absent slots are `num_slots`."""

    take: Array
    """[seq] tokens of each slot that this step computes."""
    slot_ids: Array
    """[row] slots that take part: those that decode, in order, then prompts, in order."""
    cu_q_lens: Array
    """[row + 1] bounds of each row's tokens."""
    num_rows: Array
    num_tokens: Array
    states: StatePlan | None = None
    """None: no states of fixed size are kept."""
    ahead: Array | None = None
    """[row] draft tokens of the row's sequence before the row's one: each is a row of its own, behind that of the token
    that the sequence has to compute. None: there is no speculation."""
    drafts: Array | None = None
    """[seq] draft tokens among those of `take`; None: there is no speculation."""
    automaton_states: Array | None = None
    """[row] state of the automaton that constrains the row's token; None: no request is constrained."""

    @property
    def known(self) -> Array:
        """[seq] tokens of each slot that this step computes, without drafts."""
        return self.take if self.drafts is None else self.take - self.drafts

    def of_rows(self, values: Array) -> Array:
        """[row] A number of tokens, [seq], of the row's slot, and the draft tokens before the row's one more."""
        own = gather(values, self.slot_ids, 0)
        return own if self.ahead is None else own + self.ahead


def schedule(state: DecodeState, shapes: Shapes) -> tuple[DecodeState, StepPlan, Array, Array]:
    """Choose the tokens of a step and give them pages.

    Returns: the new state, the plan, and (source, target) pages to copy before anything is written.
    """
    order = in_order(state.sequences)
    state = start_waiting(state, shapes, order)
    state, waits, states = match_prefix(state, shapes, order)
    take = choose_tokens(state, shapes, order, waits, states)
    state, take, needed = preempt(state, order, take)
    state, source, target = allocate_pages(state, shapes, needed)
    state, drafts = propose(state, shapes, take)
    plan = pack(state, shapes, order, take, drafts)
    automaton_states = row_states(state, plan.slot_ids, plan.ahead, shapes)
    return state, replace(plan, states=states, automaton_states=automaton_states), source, target


def start_waiting(state: DecodeState, shapes: Shapes, order: Array) -> DecodeState:
    """Let waiting sequences run, in order, while fewer than `max_seqs` do.

    A sequence starts only if the pages that it will need (`pages_to_continue`) are free beyond those that the running
    ones will need. If no sequence runs, the first starts in any case; preemption then frees pages.
    """
    table, page_table = state.sequences, state.page_table
    running = table.is_status(RUNNING)
    ready = may_start(table, state.beams.ready(table, is_ready(table)), shapes)
    need = pages_to_continue(state, shapes)
    num_running = jnp.sum(running, dtype=jnp.int32)
    available = page_table.num_free - jnp.sum(jnp.where(running, need, 0), dtype=jnp.int32)

    ready_in_order = gather(ready, order)
    rank = cumsum(ready_in_order)
    cumulative = cumsum(jnp.where(ready_in_order, gather(need, order), 0))
    num_first = state.beams.num_first(order, ready_in_order)
    fits = (cumulative <= available) | ((num_running == 0) & (rank <= num_first))
    starts = ready_in_order & (rank + num_running <= shapes.max_seqs) & fits
    starts = scatter(jnp.zeros_like(ready), order, starts)
    starts = state.beams.starting(starts, running)
    return replace(state, sequences=replace(table, status=jnp.where(starts, RUNNING, table.status)))


def choose_tokens(
    state: DecodeState, shapes: Shapes, order: Array, waits: Array, states: StatePlan | None = None
) -> Array:
    """Tokens that each slot computes in this step, i32[seq]; none for those in the mask `waits`.

    Every running sequence with one pending token decodes; the rest of the token budget goes to prompts in order, of
    the last one to a chunk (chunked prefill). Decoding never waits for prompts. Prompts are not starved either: each
    running one is among `max_seqs <= max_step_tokens` sequences, so at least one token of the budget is left for it.

    Where states of fixed size are kept, chunks end where one is wanted, and else at the end of a page if they have one.
    """
    table = state.sequences
    pending = jnp.where(table.is_status(RUNNING) & ~waits, state.beams.pending(table), 0)
    decodes = pending == 1
    if shapes.slot_state:
        pending = jnp.minimum(pending, tokens_to_fork(table))
    if states is not None:
        pending = jnp.minimum(pending, tokens_to_bound(table, states, shapes.page_size))
    budget = shapes.max_step_tokens - jnp.sum(decodes, dtype=jnp.int32)
    wanted = gather(jnp.where(decodes, 0, pending), order)
    before = cumsum(wanted) - wanted
    chunk = jnp.clip(budget - before, 0, wanted)
    if states is not None:
        chunk = whole_pages(gather(table.num_computed, order), chunk, chunk < wanted, shapes.page_size)
    return jnp.where(decodes, 1, scatter(jnp.zeros_like(pending), order, chunk))


def pack(state: DecodeState, shapes: Shapes, order: Array, take: Array, drafts: Array | None) -> StepPlan:
    """Order the chosen tokens into rows, decode tokens first; each draft token is a row behind those of its sequence.

    Args: drafts: i32[seq]; None: there is no speculation.
    Requires: only sequences that decode have drafts, and there are rows for all.
    """
    table = state.sequences
    columns = dict(take=take, pending=table.seq_lens - table.num_computed)
    found = gather_together(columns, order, dict.fromkeys(columns, 0))
    in_order = found["take"]
    decodes = (in_order == 1) & (found["pending"] == 1)
    chunks = (in_order > 0) & ~decodes
    num_decodes = jnp.sum(decodes, dtype=jnp.int32)
    row = jnp.where(decodes, cumsum(decodes), num_decodes + cumsum(chunks))
    row = jnp.where(in_order > 0, row - 1, shapes.max_rows)
    slot_ids, ahead = scatter(full(shapes.max_rows, table.num_slots), row, order), None
    if drafts is not None:
        counts = jnp.where(slot_ids < table.num_slots, 1 + gather(drafts, slot_ids, 0), 0)
        row, ahead, used = ragged_index(counts, jnp.int32(0), shapes.max_rows)
        slot_ids, ahead = gather(slot_ids, row, table.num_slots), jnp.where(used, ahead, 0)
    bounds = cumsum(gather(take, slot_ids, 0))
    return StepPlan(
        take=take if drafts is None else take + drafts,
        slot_ids=slot_ids,
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), bounds]),
        num_rows=jnp.sum(slot_ids < table.num_slots, dtype=jnp.int32),
        num_tokens=bounds[-1],
        ahead=ahead,
        drafts=drafts,
    )


def last_tokens(cu_q_lens: Array) -> Array:
    """Index of each row's last token among the packed ones, i32[row], from their bounds i32[row + 1]."""
    return jnp.clip(cu_q_lens[1:] - 1, 0)
