"""Pages of sequences: allocation, copy-on-write, preemption, forks, release. Running out of pages is never an error.

Where layers with a sliding window have pages of their own (`DecodeState.windows`), each operation moves the references
to the window pages along: a slot that has computed n tokens holds those of its columns from `first_column(n)` on.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import (
    cumsum,
    gather,
    gather_along,
    replace,
    scatter,
    scatter_add,
    scatter_max,
    scatter_min,
)
from levanter_infer.cache.page_math import offset_of, page_of, pages_for
from levanter_infer.cache.page_table import PageTable, ragged_index
from levanter_infer.cache.prefix_table import PrefixTable
from levanter_infer.cache.window_pages import WindowPages
from levanter_infer.decode.codes import FINISHED, RUNNING, WAITING
from levanter_infer.decode.sequence_table import SequenceTable
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.kernels.loops import by_turns, in_parts, run_if, turn_size

_BLOCK = 256
"""Pages that a trip of a loop shares or releases: those of one or two sequences. A TPU takes as long for an unused
entry as for a page."""
_COUNTED = 4096
"""Pages per trip of `_released_by_suffix`, which reads those of all sequences."""
_ENTERED = 64
"""Pages of prompt chunks per trip that are entered into a page table: those of 1,024 tokens with pages of 16."""
_BEHIND = 128
"""Window pages left behind per trip: those of one step."""


def pages_needed(state: DecodeState, take: Array) -> tuple[Array, Array]:
    """Pages that each slot needs to compute `take` more tokens.

    Returns: i32[seq], new pages to append; i32[seq], the first page that it writes if that is shared, so that it may
        have to be copied, else none.
    """
    table, page_table = state.sequences, state.page_table
    computed, size, none = table.num_computed, page_table.page_size, page_table.num_pages
    new = pages_for(computed + take, size) - pages_for(computed, size)
    tail = gather_along(table.page_indices, page_of(computed, size), none)
    is_shared = (take > 0) & (offset_of(computed, size) != 0) & (gather(page_table.ref_counts, tail, 0) > 1)
    return new, jnp.where(is_shared, tail, none)


def preempt(state: DecodeState, order: Array, take: Array) -> tuple[DecodeState, Array, tuple[Array, Array]]:
    """Preempt the last sequences in `order` until the free pages suffice for the step.

    A preempted sequence keeps its tokens, waits, and recomputes them later. The first in order is never preempted; it
    fits alone, because requests that do not are refused.

    Returns: the new state, `take` with 0 for the preempted sequences, and the `pages_needed` for it.
    """
    new, source = pages_needed(state, take)
    need = new + (source < state.page_table.num_pages).astype(jnp.int32)
    short = jnp.sum(need, dtype=jnp.int32) > state.num_free

    def body(carry):
        state, take, _ = carry
        table = state.sequences
        rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32))
        released = _released_by_suffix(table, state.page_table, rank)
        needed = cumsum(need[order])
        # The first k survive. Their needs grow with k, and fewer pages are released by the others.
        fits = needed <= state.page_table.num_free + released
        for each in state.windows:
            fits &= needed <= each.num_free + _released_by_suffix(table, each.table, rank, each)
        survivors = jnp.maximum(jnp.sum(fits, dtype=jnp.int32), 1)
        survivors = state.beams.num_survivors(table, order, survivors)
        live = (table.status == RUNNING) | (table.status == WAITING)
        stops = live & (rank >= survivors)
        victims = stops & (table.num_computed > 0)
        counters = state.counters.plus(
            preemptions=jnp.sum(victims, dtype=jnp.int32),
            recomputed=jnp.sum(jnp.where(victims, table.num_computed, 0), dtype=jnp.int32),
        )
        state = release(replace(state, counters=counters), victims)
        table = replace(
            state.sequences,
            status=jnp.where(stops, WAITING, state.sequences.status),
            fork_source=state.beams.sharing_again(state.sequences.fork_source, stops),
        )
        state, take = replace(state, sequences=table), jnp.where(stops, 0, take)
        return state, take, pages_needed(state, take)

    return run_if(short, body, (state, take, (new, source)))


def allocate_pages(state: DecodeState, shapes: Shapes, needed: tuple[Array, Array]) -> tuple[DecodeState, Array, Array]:
    """Allocate the pages that the scheduled tokens are written to; a shared page that is written gets a copy.

    Args: needed: `pages_needed` for the scheduled tokens.
    Returns: the new state, and (source, target) pages to copy, i32[seq] each; unused pairs hold `num_pages`.
    Requires: enough free pages (`preempt` sees to it).
    Source: copy-on-write of PagedAttention, arXiv:2309.06180, section 4.4.
    """
    table, page_table = state.sequences, state.page_table
    size, num_pages = page_table.page_size, page_table.num_pages
    new, source = needed
    first, shared = page_of(table.num_computed, size), source < num_pages
    copies = shared & ~run_if(jnp.any(shared), lambda _: _keeps_page(page_table, source), jnp.zeros_like(shared))

    counts = new + copies.astype(jnp.int32)
    total = jnp.sum(counts, dtype=jnp.int32)
    page_table, pages = page_table.allocate(total, shapes.max_new_pages)
    begin = jnp.where(copies, first, pages_for(table.num_computed, size))
    page_indices = _entered(table.page_indices, begin, counts, pages)

    source = jnp.where(copies, source, num_pages)

    def copied(carry: tuple[PageTable, Array]) -> tuple[PageTable, Array]:
        target = jnp.where(copies, gather_along(page_indices, first, num_pages), num_pages)
        # A copied page keeps at least one reference: `_keeps_page` leaves it to one of its holders.
        return replace(carry[0], ref_counts=scatter_add(carry[0].ref_counts, source, -1)), target

    page_table, target = run_if(jnp.any(copies), copied, (page_table, jnp.full_like(source, num_pages)))
    state = replace(
        state,
        sequences=replace(table, page_indices=page_indices),
        page_table=page_table,
        windows=tuple(_attached(each, pages, total, source) for each in state.windows),
        counters=state.counters.plus(copied_pages=jnp.sum(copies, dtype=jnp.int32)),
    )
    return count_taken(state, pages, total), source, target


def _entered(page_indices: Array, begin: Array, counts: Array, pages: Array) -> Array:
    """`page_indices` [seq, seq_page] with the next `counts` i32[seq] of `pages` in each row, from the column `begin`
    i32[seq] on. Requires: `begin >= 0`, and no more pages than there are."""
    return jax.lax.platform_dependent(page_indices, begin, counts, pages, tpu=_entered_by_row, default=_entered_by_page)


def _entered_by_page(page_indices: Array, begin: Array, counts: Array, pages: Array) -> Array:
    slot, item, valid = ragged_index(counts, jnp.int32(0), pages.shape[0])
    row = jnp.where(valid, slot, counts.shape[0])
    return scatter(page_indices, (row, gather(begin, slot, 0) + item), pages)


def _entered_by_row(page_indices: Array, begin: Array, counts: Array, pages: Array) -> Array:
    """A TPU writes a table faster than a few hundred of its numbers. Decode tokens need one page each."""
    before = cumsum(counts) - counts
    column = jax.lax.broadcasted_iota(jnp.int32, page_indices.shape, 1)
    is_first = (column == begin[:, None]) & (counts > 0)[:, None]
    page_indices = jnp.where(is_first, gather(pages, before)[:, None], page_indices)
    others = jnp.maximum(counts - 1, 0)
    total = jnp.sum(others, dtype=jnp.int32)

    def enter_others(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        start, page_indices = carry
        slot, item, valid = ragged_index(others, start, _ENTERED)
        own = gather(pages, gather(before, slot, 0) + 1 + item)
        row = jnp.where(valid, slot, counts.shape[0])
        return start + _ENTERED, scatter(page_indices, (row, gather(begin, slot, 0) + 1 + item), own)

    carry = jnp.int32(0), page_indices
    return jax.lax.while_loop(lambda carry: carry[0] < total, enter_others, carry)[1]


def count_taken(state: DecodeState, pages: Array, count: Array) -> DecodeState:
    """Forget the prefix-cache entries and snapshots of the first `count` of `pages`, i32[n], which have a new owner.

    Requires: the others are none.
    """
    page_table, prefix, counters = state.page_table, state.prefix, state.counters
    if prefix is not None:

        def forget(carry: tuple[PrefixTable, Array], part: Array) -> tuple[PrefixTable, Array]:
            prefix, found = carry
            return prefix.forget(part), found + jnp.sum(prefix.findable(part), dtype=jnp.int32)

        prefix, found = in_parts(forget, (prefix, jnp.int32(0)), pages, count, page_table.num_pages)
        counters = counters.plus(prefix_evictions=found)
    snapshots = state.snapshots
    if snapshots is not None:
        snapshots = snapshots.detach(pages)
    held_now = page_table.num_pages - page_table.num_free
    counters = replace(counters, pages_peak=jnp.maximum(counters.pages_peak, held_now))
    return replace(state, prefix=prefix, snapshots=snapshots, counters=counters)


def release(state: DecodeState, slots: Array) -> DecodeState:
    """Release all pages of the slots in the mask `slots`, bool[seq]; their tokens stay.

    Afterwards `num_computed` is 0 and `page_indices` is none. The pages of a sequence are released from the last to the
    first, so that the start of its text stays in the pool longest.
    """

    def release_all(state: DecodeState) -> DecodeState:
        table, page_table = state.sequences, state.page_table
        held = jnp.where(slots, table.num_held(page_table.page_size), 0)
        page_table = release_tails(page_table, table.page_indices, jnp.zeros_like(held), held)
        windows = tuple(
            replace(each, table=release_tails(each.table, table.page_indices, _first(table, each), held, each))
            for each in state.windows
        )
        page_indices = jnp.where(slots[:, None], page_table.num_pages, table.page_indices)
        table = replace(
            table,
            page_indices=page_indices,
            num_computed=jnp.where(slots, 0, table.num_computed),
            num_reached=jnp.where(slots, jnp.maximum(table.num_reached, table.num_computed), table.num_reached),
        )
        return replace(state, sequences=table, page_table=page_table, windows=windows)

    return run_if(jnp.any(slots & (state.sequences.num_computed > 0)), release_all, state)


def release_tails(
    page_table: PageTable,
    page_indices: Array,
    begin: Array,
    end: Array,
    window: WindowPages | None = None,
    block: int = _BLOCK,
) -> PageTable:
    """Drop a reference to the pages at columns `begin … end - 1` of each row, the last ones first.

    Args:
        page_indices: i32[row, seq_page]
        begin, end: i32[row]
        window: the reference is to the window pages of these pages, and `page_table` is theirs.
        block: pages per trip of a loop.
    """
    counts, none = jnp.maximum(end - begin, 0), page_table.num_pages

    def release(table: PageTable, _: Array, pages: Array) -> PageTable:
        return table.release(pages)

    return by_blocks(page_table, release, page_indices, counts, end - 1, none, step=-1, window=window, size=block)


def share_tails(
    page_table: PageTable, page_indices: Array, begin: Array, end: Array, window: WindowPages | None = None
) -> PageTable:
    """Add a reference to the pages at columns `begin … end - 1` of each row; arguments as in `release_tails`."""
    counts, none = jnp.maximum(end - begin, 0), page_table.num_pages

    def share(table: PageTable, _: Array, pages: Array) -> PageTable:
        return table.share(pages)

    return by_blocks(page_table, share, page_indices, counts, begin, none, window=window)


Value = TypeVar("Value")


def by_blocks(
    value: Value,
    change: Callable[[Value, Array, Array], Value],
    page_indices: Array,
    counts: Array,
    first: Array,
    none: int,
    *,
    step: int = 1,
    window: WindowPages | None = None,
    size: int = _BLOCK,
) -> Value:
    """`change(value, row, pages)` for `counts` i32[row] pages of each row, `size` of them at a time.

    Args:
        change: gets i32[size] each; in unused entries `row` is the number of rows, and `pages` is `none`.
        page_indices: i32[row, seq_page]
        first: i32[row], the column of the first page of each row; the next one is `step` columns further.
        none: the number that stands for no page.
        window: the pages are the window pages of these.
    """
    total, size = jnp.sum(counts, dtype=jnp.int32), turn_size(size, page_indices.size)
    no_page = none if window is None else window.attached.shape[0]

    def block(value: Value, start: Array) -> Value:
        row, item, valid = ragged_index(counts, start, size)
        page = gather(page_indices, (row, gather(first, row, 0) + step * item), no_page)
        page = page if window is None else window.of(page)
        return change(value, row, jnp.where(valid, page, none))

    return by_turns(block, value, total, size, page_indices.size)


def free_pages_for_finished(state: DecodeState, finished: Array, reason: Array) -> DecodeState:
    """End the sequences in the mask `finished` with `reason` (i32[seq]) and release their pages.

    Forks that still wait for one of them compute the prompt themselves: its slot may belong to another sequence by the
    next step.
    """
    table = state.sequences
    source = table.fork_source
    orphaned = gather(finished, source, False)
    table = replace(
        table,
        status=jnp.where(finished, FINISHED, table.status),
        finish_reason=jnp.where(finished, reason, table.finish_reason),
        fork_source=jnp.where(finished | orphaned, table.num_slots, source),
    )
    return release(replace(state, sequences=table, beams=state.beams.without(finished)), finished)


def fork(state: DecodeState, children: Array, parents: Array, lens: Array) -> DecodeState:
    """Share the pages that hold the first `lens` tokens of `parents` with their `children`. Copies no data.

    Args:
        children: bool[seq], slots that hold no pages.
        parents: i32[seq], the slot whose pages each child shares.
        lens: i32[seq], tokens to share; at most the parent's `num_computed`.
    Requires: child and parent have the same first `lens` tokens; what the children can see of them is there
        (`can_see`).
    """

    def share(state: DecodeState) -> DecodeState:
        table, page_table = state.sequences, state.page_table
        held = pages_for(lens, page_table.page_size)
        column = jnp.arange(table.page_indices.shape[1], dtype=jnp.int32)
        inherits = children[:, None] & (column[None, :] < held[:, None])
        none = page_table.num_pages
        pages = jnp.where(inherits, gather(table.page_indices, parents, none), none)
        table = replace(
            table,
            page_indices=jnp.where(children[:, None], pages, table.page_indices),
            num_computed=jnp.where(children, lens, table.num_computed),
        )
        counters = state.counters.plus(forks=jnp.sum(children, dtype=jnp.int32))
        windows = tuple(
            _reclaimed(each, jnp.where(_is_seen(each, lens, column), pages, none)) for each in state.windows
        )
        page_table = share_tails(page_table, table.page_indices, jnp.zeros_like(held), jnp.where(children, held, 0))
        return replace(state, sequences=table, page_table=page_table, counters=counters, windows=windows)

    return run_if(jnp.any(children), share, state)


def tokens_to_fork(table: SequenceTable) -> Array:
    """Tokens that each slot may compute before its forks start, i32[seq]: all where none waits for it.

    A fork needs the state of its parent after all of the prompt but the last token: a step has to end there.
    """
    waiting = table.is_status(WAITING) | table.is_status(RUNNING)
    source = jnp.where(waiting, table.fork_source, table.num_slots)
    is_parent = scatter(jnp.zeros(table.num_slots, jnp.bool_), source, True)
    left = table.prompt_lens - 1 - table.num_computed
    return jnp.where(is_parent & (left > 0), left, jnp.iinfo(jnp.int32).max)


def fork_origins(before: SequenceTable, after: SequenceTable, origins: Array) -> Array:
    """`origins`, i32[seq], with the parents of the forks that have started between two tables."""
    is_fork = (before.fork_source < before.num_slots) & (before.num_computed == 0) & (after.num_computed > 0)
    return jnp.where(is_fork, before.fork_source, origins)


def fork_when_ready(state: DecodeState, shapes: Shapes) -> DecodeState:
    """Start the forks whose parent has computed the prompt.

    A child shares all of the prompt but its last token, which it computes itself, so that it samples its first
    token like any other sequence. If that token's page is shared, writing it copies the page.
    """
    table = state.sequences
    source = table.fork_source
    waiting = (table.is_status(WAITING) | table.is_status(RUNNING)) & (source < table.num_slots)
    lens = table.prompt_lens - 1
    parent_status = gather(table.status, source, FINISHED)
    parent_computed = gather(table.num_computed, source, 0)
    ready = waiting & (parent_status == RUNNING) & (parent_computed >= lens) & (lens > 0)
    alone = waiting & (lens == 0)
    if state.windows:
        gone = ready & ~can_see(state, ready, source, lens)
        ready, alone = ready & ~gone, alone | gone
    if shapes.slot_state:  # the parent's state is no longer that after the prompt: the child computes the prompt itself
        late = ready & (parent_computed > lens)
        ready, alone = ready & ~late, alone | late
    state = fork(state, ready, source, lens)
    table = replace(state.sequences, fork_source=jnp.where(ready | alone, table.num_slots, source))
    return replace(state, sequences=table)


def page_at(table: SequenceTable, slots: Array, column: Array) -> Array:
    """The page at `column` (i32[n]) of each of `slots` (i32[n]); none where there is none.

    Requires: column is at least -1; before the first page there is none.
    """
    none = jnp.iinfo(jnp.int32).max  # past the end of any pool, as columns past the end of the table are
    page = gather(table.page_indices, (slots, column), none)
    return jnp.where(column < 0, none, page)


def leave_behind(state: DecodeState, before: Array) -> DecodeState:
    """Release the window pages that windows have passed since slots had computed `before` i32[seq] tokens."""

    def changed(each: WindowPages) -> WindowPages:
        table = state.sequences
        begin, end = each.first_column(before), _first(table, each)

        def left_behind(page_table: PageTable) -> PageTable:
            return release_tails(page_table, table.page_indices, begin, end, each, _BEHIND)

        return replace(each, table=run_if(jnp.any(end > begin), left_behind, each.table))

    return replace(state, windows=tuple(changed(each) for each in state.windows))


def window_pages_held(table: SequenceTable, window: WindowPages) -> Array:
    """The window pages that each slot holds, at their columns, i32[seq, seq_page]; none elsewhere."""
    column = jnp.arange(table.page_indices.shape[1], dtype=jnp.int32)
    seen = _is_seen(window, table.num_computed, column)
    return jnp.where(seen, window.of(table.page_indices), window.num_pages)


def can_see(state: DecodeState, slots: Array, parents: Array, lens: Array) -> Array:
    """Whether all window pages that a sequence with the first `lens` tokens of its parent sees are there, bool[seq];
    true outside of the mask `slots`.

    A parent that is far ahead holds others, and what it does not hold may have been overwritten.
    """
    table = state.sequences
    there = jnp.ones_like(slots)
    column = jnp.arange(table.page_indices.shape[1], dtype=jnp.int32)
    for each in state.windows:
        ahead = slots & (each.first_column(gather(table.num_computed, parents, 0)) > each.first_column(lens))

        def look(there: Array, each=each) -> Array:
            held = column[None, :] < pages_for(lens, each.table.page_size)[:, None]
            pages = gather(table.page_indices, parents, each.attached.shape[0])
            missing = _is_seen(each, lens, column) & held & (each.of(pages) >= each.num_pages)
            return there & ~(slots & jnp.any(missing, axis=1))

        there = run_if(jnp.any(ahead), look, there)
    return there


def _is_seen(window: WindowPages, computed: Array, column: Array) -> Array:
    """Columns, i32[seq_page], that a sequence with `computed` i32[seq] tokens still sees, bool[seq, seq_page]."""
    return column[None, :] >= window.first_column(computed)[:, None]


def _first(table: SequenceTable, window: WindowPages) -> Array:
    """Column of the first window page that each slot holds, i32[seq]."""
    return window.first_column(table.num_computed)


def _reclaimed(window: WindowPages, pages: Array) -> WindowPages:
    """A reference more to the window page of each of `pages`, of any shape; none entries are ignored."""
    return replace(window, table=window.table.reclaim(window.of(pages)))


def _attached(window: WindowPages, pages: Array, count: Array, copied: Array) -> WindowPages:
    """With window pages for the new `pages`, and a reference less to those of the `copied` ones, i32[seq]."""
    before = window.of(copied)
    window = window.attach(pages, count)
    # Other holders may have left a copied page behind, so that its window page becomes free, unlike the page itself.
    is_any = jnp.any(before < window.num_pages)
    return replace(window, table=run_if(is_any, lambda table: table.release(before), window.table))


def _keeps_page(page_table: PageTable, source: Array) -> Array:
    """Slots that write a shared page and keep it: the first, if all its holders write in this step. bool[seq]

    Args:
        source: i32[seq], the shared page that each slot writes; none elsewhere.
    """
    # Each writer removes a reference; where none is left, the count itself can record the first writer.
    left = scatter_add(page_table.ref_counts, source, -1)
    all_write = gather(left, source, 1) == 0
    place = jnp.arange(source.shape[0], 0, -1, dtype=jnp.int32)
    first = scatter_max(left, jnp.where(all_write, source, page_table.num_pages), place)
    return all_write & (gather(first, source, 0) == place)


def _released_by_suffix(
    table: SequenceTable, page_table: PageTable, rank: Array, window: WindowPages | None = None
) -> Array:
    """Pages that become free if all slots after the first k + 1 release theirs, i32[k].

    Args:
        rank: i32[seq], rank of each slot in the order.
        window: `page_table` is that of its pages.
    """
    num_slots, num_pages = rank.shape[0], page_table.num_pages
    begin = jnp.zeros_like(rank) if window is None else _first(table, window)
    held = jnp.maximum(table.num_held(page_table.page_size) - begin, 0)

    def mark(first: Array, row: Array, pages: Array) -> Array:
        return scatter_min(first, pages, gather(rank, row, num_slots))

    first = jnp.full(num_pages, num_slots, jnp.int32)
    first = by_blocks(first, mark, table.page_indices, held, begin, num_pages, window=window, size=_COUNTED)
    freed = scatter_add(jnp.zeros(num_slots, jnp.int32), first, 1)
    return jnp.sum(freed, dtype=jnp.int32) - cumsum(freed)
