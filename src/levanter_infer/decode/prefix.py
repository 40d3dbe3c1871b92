"""Automatic prefix caching: pages are looked up before they are computed, and inserted when they are full.

The next sequence to start looks up pages too, and shares those that others hold: that costs nothing, and it then needs
fewer free pages to start.

No table records which sequence computes which page. In each step, a sequence at the start of a page that others can
share looks it up; if another sequence is computing the same page, it waits. Should that one end, the next sequence
that looks finds none ahead of it, and computes the page itself.

Layers with a sliding window need of a prefix only what the window before its end holds. A prefix is taken over as far
as that is still there (`_usable_prefix`); their window pages stay attached to cached pages until they are reused.

Layers with a state of fixed size need the state at the end of a prefix. A prefix is taken over as far as a snapshot of
it is there, which the sequence goes on from. Where it found more pages than that, its state is kept when it gets there
(`StatePlan.bounds`): its prefix and that of another sequence part there. So do those of sequences that wait for one
another, as far as the text of the step shows (`_partings`), so that what they share is computed once.
"""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import cumsum, full, gather, replace, scatter, scatter_add, scatter_min
from levanter_infer.cache.page_math import offset_of, page_of
from levanter_infer.cache.page_table import ragged_index
from levanter_infer.cache.prefix_table import UNKNOWN, PrefixTable, chained, content_hashes
from levanter_infer.cache.state_snapshots import StateSnapshots
from levanter_infer.cache.window_pages import WindowPages
from levanter_infer.decode.codes import DEFAULT_ROOT, RUNNING, is_private_root
from levanter_infer.decode.paging import by_blocks, page_at, release_tails, share_tails
from levanter_infer.decode.sequence_table import SequenceTable, is_ready
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.snapshots import NOWHERE, StatePlan
from levanter_infer.decode.state import DecodeState
from levanter_infer.kernels.loops import by_turns, in_blocks, run_if, turn_size

_WINDOW, _SEEKERS = 32, 4
"""Pages that a sequence looks up at once, and sequences that do."""
_INSERTED = 24
"""Pages that are inserted at once: of 256 sequences with pages of 16 tokens, 16 fill a page in a step, seldom more than
24."""


def match_prefix(state: DecodeState, shapes: Shapes, order: Array) -> tuple[DecodeState, Array, StatePlan | None]:
    """Let running sequences, and the next one to start, share the cached pages of the tokens they would compute next.

    Returns: the new state; the slots that wait because another one is computing their next page, bool[seq]; and what
        this asks of states of fixed size, None where none are kept.
    """
    none = jnp.zeros(state.sequences.num_slots, jnp.bool_)
    plan = None
    if state.prefix is None:
        return state, none, plan
    if state.snapshots is not None:
        plan = StatePlan(full(none.shape, shapes.num_snapshots), full(none.shape, NOWHERE))
    size = state.page_table.page_size

    # Loops carry what they change and nothing else: everything that is carried costs time to compile.
    def share(carry):
        page_indices, before, page_table, windows, hits, _, snapshots, plan = carry
        page_indices, computed = _take_known(state, shapes, order, seekers)
        if state.windows or plan is not None:
            found = computed
            page_indices, computed, windows = run_if(
                jnp.any(found > before),
                lambda carry: _cut_to_usable(state, before, *carry),
                (page_indices, found, windows),
            )
        if plan is not None:
            snapshots, plan = _restored(_with(state, page_indices, computed), shapes, before, found)
        begin, end = page_of(before, size), page_of(computed, size)
        page_table = share_tails(page_table, page_indices, begin, end).without_held()
        hits = hits + jnp.sum(end - begin, dtype=jnp.int32)
        waits, leaders = _waits(_with(state, page_indices, computed), shapes, order)
        if plan is not None:
            partings = _partings(_with(state, page_indices, computed), shapes, waits, leaders)
            plan = replace(plan, bounds=jnp.minimum(plan.bounds, partings))
        return page_indices, computed, page_table, windows, hits, waits, snapshots, plan

    table, counters = state.sequences, state.counters
    seekers = _seekers(table, shapes, order)
    carry = (table.page_indices, table.num_computed, state.page_table, state.windows, counters.prefix_hits, none)
    found = run_if(jnp.any(_shareable(state, seekers) > 0), share, (*carry, state.snapshots, plan))
    page_indices, computed, page_table, windows, hits, waits, snapshots, plan = found
    counters = replace(counters, prefix_hits=hits)
    if plan is not None:
        restored = jnp.sum(plan.restored < shapes.num_snapshots, dtype=jnp.int32)
        counters = counters.plus(snapshots_restored=restored)
    state = replace(state, sequences=_count_cached(table, computed), windows=windows, snapshots=snapshots)
    state = _with(state, page_indices, computed)
    return replace(state, page_table=page_table, counters=counters), waits, plan


def _cut_to_usable(
    state: DecodeState, before: Array, page_indices: Array, found: Array, windows: tuple[WindowPages, ...]
) -> tuple[Array, Array, tuple[WindowPages, ...]]:
    """`_usable_prefix`, with the references to window pages moved along."""
    page_indices, computed = _usable_prefix(state, page_indices, before, found)
    return page_indices, computed, tuple(_moved_on(each, page_indices, before, computed) for each in windows)


def _usable_prefix(state: DecodeState, page_indices: Array, before: Array, found: Array) -> tuple[Array, Array]:
    """The longest part of what each slot has found that it can go on from: its last window is there, for every window,
    and its state.

    Args:
        page_indices: i32[seq, seq_page], with the pages that were found.
        before, found: i32[seq], tokens computed so far, and with these pages.
    Returns: `page_indices` without the pages beyond, and the tokens computed with it.
    """
    size, width = state.page_table.page_size, page_indices.shape[1]
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    fits = jnp.ones(page_indices.shape, jnp.bool_)  # whether the prefix that ends with a column's page can be taken
    for each in state.windows:
        missing = jnp.where(each.of(page_indices) < each.num_pages, -1, column)
        fits &= jax.lax.cummax(missing, axis=1) < each.first_column((column + 1) * size)
    if state.snapshots is not None:
        fits &= state.snapshots.of(page_indices) < state.snapshots.num_snapshots
    fits &= (column >= page_of(before, size)[:, None]) & (column < page_of(found, size)[:, None])
    pages = jnp.max(jnp.where(fits, column + 1, 0), axis=1)
    computed = jnp.where(found > before, jnp.maximum(before, pages * size), before)
    beyond = (column >= page_of(computed, size)[:, None]) & (column < page_of(found, size)[:, None])
    return jnp.where(beyond, state.page_table.num_pages, page_indices), computed


def _restored(state: DecodeState, shapes: Shapes, before: Array, found: Array) -> tuple[StateSnapshots, StatePlan]:
    """The snapshots that slots go on from which have gone on from `before` tokens, i32[seq]; their states are wanted
    at the end of what they have `found`."""
    table, snapshots = state.sequences, state.snapshots
    assert snapshots is not None
    computed = table.num_computed
    slots = jnp.arange(table.num_slots, dtype=jnp.int32)
    own = snapshots.of(page_at(table, slots, page_of(computed, shapes.page_size) - 1))
    restored = jnp.where(computed > before, own, shapes.num_snapshots)
    return snapshots.restore(restored), StatePlan(restored, jnp.where(found > computed, found, NOWHERE))


def _moved_on(window: WindowPages, page_indices: Array, before: Array, computed: Array) -> WindowPages:
    """The references of slots that have gone from `before` to `computed` tokens, i32[seq] each, by pages that they have
    found."""
    size = window.table.page_size
    column = jnp.arange(page_indices.shape[1], dtype=jnp.int32)[None, :]
    first, moves = window.first_column(computed), computed > before
    new = moves[:, None] & (column >= jnp.maximum(first, page_of(before, size))[:, None])
    new &= column < page_of(computed, size)[:, None]
    table = window.table.reclaim(window.of(jnp.where(new, page_indices, window.attached.shape[0])))
    end = jnp.where(moves, jnp.minimum(first, page_of(before, size)), 0)
    return replace(window, table=release_tails(table, page_indices, window.first_column(before), end, window))


def _count_cached(table: SequenceTable, found: Array) -> SequenceTable:
    """Count the prompt tokens up to `found`, i32[seq], that were found instead of computed, unless the sequence has
    reached them before."""
    reached = jnp.maximum(table.num_reached, table.num_computed)
    new = jnp.minimum(found, table.prompt_lens) - reached
    cached = table.num_cached + jnp.maximum(new, 0)
    return replace(table, num_cached=cached, num_reached=jnp.maximum(reached, found))


def _with(state: DecodeState, page_indices: Array, computed: Array) -> DecodeState:
    table = replace(state.sequences, page_indices=page_indices, num_computed=computed)
    return replace(state, sequences=table)


def insert_prefix(state: DecodeState, shapes: Shapes, filled: Array, failed: Array) -> DecodeState:
    """Insert the pages that this step has filled into the prefix cache, and hide those of sequences that failed.

    Args:
        filled: i32[seq], pages that the step has filled: the last full ones of each slot.
        failed: bool[seq]
    """
    if state.prefix is None:
        return state
    counts = jnp.where(failed | is_private_root(state.sequences.roots), 0, filled)

    total = jnp.sum(counts, dtype=jnp.int32)
    # A step fills no more pages than it takes, but for those that its sequences had begun before.
    most = shapes.max_new_pages + shapes.max_seqs
    size = turn_size(_INSERTED, most)

    def insert(carry: tuple[PrefixTable, StateSnapshots | None], start: Array):
        prefix, snapshots = carry
        prefix, pages = _insert_pages(replace(state, prefix=prefix), counts, start, size)
        return prefix, None if snapshots is None else snapshots.follow(prefix, pages)

    prefix, snapshots = by_turns(insert, (state.prefix, state.snapshots), total, size, most)

    def without_failed(prefix: PrefixTable) -> PrefixTable:
        table, none = state.sequences, prefix.num_pages
        held = jnp.where(failed, table.num_held(shapes.page_size), 0)

        def hide(prefix: PrefixTable, _: Array, pages: Array) -> PrefixTable:
            return prefix.hide(pages)

        return by_blocks(prefix, hide, table.page_indices, held, jnp.zeros_like(held), none)

    return replace(state, prefix=run_if(jnp.any(failed), without_failed, prefix), snapshots=snapshots)


def _seekers(table: SequenceTable, shapes: Shapes, order: Array) -> Array:
    """Slots that look up pages, bool[seq]: the running ones, and the first ready one if another may run."""
    running, ready = _computes(table), is_ready(table)
    next_one = jnp.where(
        jnp.sum(table.is_status(RUNNING)) < shapes.max_seqs, order[jnp.argmax(gather(ready, order))], table.num_slots
    )
    return running | (ready & (jnp.arange(table.num_slots) == next_one))


def _computes(table: SequenceTable) -> Array:
    """Slots that compute pages of their own, bool[seq]: running beams may still wait for those of their leader."""
    return table.is_status(RUNNING) & (table.fork_source == table.num_slots)


def _shareable(state: DecodeState, slots: Array) -> Array:
    """Full pages of known tokens that each slot in the mask `slots` has yet to compute and may share, i32[seq].

    A sequence computes its last token in any case: it samples from it.
    """
    table, size = state.sequences, state.page_table.page_size
    pages = page_of(table.seq_lens - 1, size) - page_of(table.num_computed, size)
    return jnp.where(slots & ~is_private_root(table.roots), pages, 0)


def _rows(shapes: Shapes, order: Array, chosen: Array) -> Array:
    """The slots in the mask `chosen`, oldest first, i32[max_seqs]; unused entries are absent."""
    chosen = gather(chosen, order)
    row = jnp.where(chosen, cumsum(chosen) - 1, shapes.max_seqs)
    return scatter(jnp.full(shapes.max_seqs, shapes.num_slots, jnp.int32), row, order)


def _next_pages(state: DecodeState, slots: Array, width: int) -> tuple[Array, Array, Array]:
    """The prefix that each of `slots`, i32[n], has computed, as serials i32[n] and hashes u32[n], and its next `width`
    pages of tokens i32[n, width, size], from the page that is partly computed."""
    table, size = state.sequences, state.page_table.page_size
    assert state.prefix is not None
    column = page_of(gather(table.num_computed, slots, 0), size)
    serials, hashes = state.prefix.ends(page_at(table, slots, column - 1), gather(table.roots, slots, DEFAULT_ROOT))
    position = column[:, None] * size + jnp.arange(width * size, dtype=jnp.int32)[None, :]
    tokens = gather(table.tokens, (slots[:, None], position), 0)
    return serials, hashes, tokens.reshape(-1, width, size)


def _take_known(state: DecodeState, shapes: Shapes, order: Array, seekers: Array) -> tuple[Array, Array]:
    """Enter the pages that the slots in the mask `seekers` find into `page_indices`.

    Returns: `page_indices` and `num_computed`. The references are not counted yet.
    """
    size = state.page_table.page_size
    block = min(_SEEKERS, shapes.max_seqs)
    starts = (offset_of(state.sequences.num_computed, size) == 0) & (_shareable(state, seekers) > 0)
    slots = _rows(shapes, order, starts)
    slots = jnp.pad(slots, (0, -slots.shape[0] % block), constant_values=shapes.num_slots)
    count = jnp.sum(starts, dtype=jnp.int32)

    def of_block(carry):
        start, *found = carry
        own = jax.lax.dynamic_slice_in_dim(slots, start, block)
        _, *found = jax.lax.while_loop(
            lambda carry: carry[0],
            lambda carry: _take_window(_with(state, *carry[1:]), shapes, own, seekers),
            (jnp.asarray(True), *found),
        )
        return start + block, *found

    table = state.sequences
    carry = (jnp.int32(0), table.page_indices, table.num_computed)
    _, page_indices, computed = jax.lax.while_loop(lambda carry: carry[0] < count, of_block, carry)
    return page_indices, computed


def _take_window(state: DecodeState, shapes: Shapes, slots: Array, seekers: Array) -> tuple[Array, Array, Array]:
    """Enter the next pages that `slots` i32[n] find into `page_indices`.

    Returns: whether there may be more; `page_indices` and `num_computed`.
    """
    table, size = state.sequences, state.page_table.page_size
    assert state.prefix is not None
    width = min(_WINDOW, table.page_indices.shape[1])
    shareable = jnp.where(offset_of(table.num_computed, size) == 0, _shareable(state, seekers), 0)
    serials, hashes, tokens = _next_pages(state, slots, width)
    pages, _ = state.prefix.find(serials, hashes, tokens, gather(shareable, slots, 0))
    refs = gather(state.page_table.ref_counts, pages, 0)
    runs = gather(table.status, slots, 0) == RUNNING
    takes = jnp.cumprod((pages < shapes.num_pages) & (runs[:, None] | (refs > 0)), axis=1, dtype=jnp.int32)
    found = jnp.sum(takes, axis=1, dtype=jnp.int32)

    computed = gather(table.num_computed, slots, 0)
    column = page_of(computed, size)[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    row = jnp.where(takes > 0, slots[:, None], table.num_slots)
    page_indices = scatter(table.page_indices, (row, column), pages)
    return jnp.any(found == width), page_indices, scatter_add(table.num_computed, slots, found * size)


def _waits(state: DecodeState, shapes: Shapes, order: Array) -> tuple[Array, Array]:
    """Slots whose next page another one is computing, which has computed a part of it or is older, bool[seq]; and that
    other one, i32[seq]."""
    table, size = state.sequences, state.page_table.page_size
    slots = _rows(shapes, order, _shareable(state, _computes(table)) > 0)
    num_slots = jnp.sum(slots < table.num_slots, dtype=jnp.int32)

    def next_page(rows: Array) -> list[Array]:
        serials, hashes, tokens = _next_pages(state, slots[rows], 1)
        return [serials, chained(content_hashes(tokens[:, 0]), jnp.zeros_like(rows), hashes)]

    serials, page = in_blocks(next_page, num_slots, slots.shape[0])
    offset = offset_of(gather(table.num_computed, slots, 0), size)
    index = jnp.arange(slots.shape[0], dtype=jnp.int32)
    seeks = slots < table.num_slots

    def ahead_of(rows: Array) -> list[Array]:
        """Whether one is ahead of each of `rows`, bool[row], and the first of them, i32[row]."""
        same = (serials[rows][:, None] == serials[None, :]) & (page[rows][:, None] == page[None, :])
        same &= (serials != UNKNOWN)[rows][:, None] & seeks[None, :]
        same &= (offset[None, :] > 0) | (index[None, :] < rows[:, None])
        return [jnp.any(same, axis=1), jnp.argmax(same, axis=1).astype(jnp.int32)]

    has_leader, leader = in_blocks(ahead_of, num_slots, slots.shape[0])
    waits = has_leader & (offset == 0)
    leaders = gather(slots, leader, table.num_slots)
    no_leaders = full(table.num_slots, table.num_slots)
    return scatter(jnp.zeros(table.num_slots, jnp.bool_), slots, waits), scatter(no_leaders, slots, leaders)


def _partings(state: DecodeState, shapes: Shapes, waits: Array, leaders: Array) -> Array:
    """The first page bound after which a slot goes on differently from one that waits for it, i32[seq]: within the
    tokens of a step, else NOWHERE.

    Args: waits, leaders: of `_waits`.
    """
    table, size = state.sequences, state.page_table.page_size
    width = min(shapes.max_step_tokens, table.max_seq_len)

    def part(_: Array) -> Array:
        slots = jnp.arange(table.num_slots, dtype=jnp.int32)
        start = table.num_computed  # of a slot that waits: a page bound
        position = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        own, other = (gather(table.tokens, (each[:, None], position), 0) for each in (slots, leaders))
        last = jnp.minimum(table.seq_lens, gather(table.seq_lens, leaders, 0)) - 1
        equal = jnp.cumprod((own == other) & (position < last[:, None]), axis=1, dtype=jnp.int32)
        pages = page_of(jnp.sum(equal, axis=1, dtype=jnp.int32), size)
        bound = jnp.where((pages > 0) & (pages < page_of(width, size)), start + pages * size, NOWHERE)
        return scatter_min(full(waits.shape, NOWHERE), jnp.where(waits, leaders, table.num_slots), bound)

    return run_if(jnp.any(waits), part, full(waits.shape, NOWHERE))


def _insert_pages(state: DecodeState, counts: Array, start: Array, most: int) -> tuple[PrefixTable, Array]:
    """Insert up to `most` of the last `counts` i32[seq] full pages of each slot, from the page numbered `start` i32[]
    on.

    Returns: the table with these pages, and the pages, i32[most].
    Requires: the pages before `start` have been inserted.
    """
    table, size = state.sequences, state.page_table.page_size
    assert state.prefix is not None
    slot, item, valid = ragged_index(counts, start, most)
    # A run that has begun before goes on from its last page.
    place = jnp.where(valid, item - jnp.where(slot == slot[0], item[0], 0), 0)
    slot = jnp.where(valid, slot, table.num_slots)
    column = gather(page_of(table.num_computed, size) - counts, slot, 0) + item
    none = state.prefix.num_pages
    pages = jnp.where(valid, gather(table.page_indices, (slot, column), none), none)
    position = column[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None, :]
    prefix = state.prefix.register(
        pages,
        page_at(table, slot, column - place - 1),
        gather(table.roots, slot, DEFAULT_ROOT),
        place,
        gather(table.tokens, (slot[:, None], position), 0),
    )
    return prefix, pages
