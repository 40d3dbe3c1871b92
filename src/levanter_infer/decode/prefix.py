"""Automatic prefix caching: pages are looked up before they are computed, and inserted when they are full.

The next sequence to start looks up pages too, and shares those that others hold: that costs nothing, and it then needs
fewer free pages to start.

No table records which sequence computes which page. In each step, a sequence at the start of a page that others can
share looks it up; if another sequence is computing the same page, it waits. Should that one end, the next sequence
that looks finds none ahead of it, and computes the page itself.

Layers with a sliding window need of a prefix only what the window before its end holds. A prefix is taken over as far
as that is still there (`_as_far_as_seen`); their window pages stay attached to cached pages until they are reused.
"""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import gather, replace, scatter, scatter_add
from levanter_infer.cache.page_math import offset_of, page_of
from levanter_infer.cache.page_table import ragged_index
from levanter_infer.cache.prefix_table import UNKNOWN, PrefixTable, chained, content_hashes
from levanter_infer.cache.window_pages import WindowPages
from levanter_infer.decode.codes import DEFAULT_ROOT, RUNNING, is_private_root
from levanter_infer.decode.paging import page_at, release_tails
from levanter_infer.decode.sequence_table import SequenceTable, is_ready
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.kernels.loops import run_if

_WINDOW = 32
"""Pages that a sequence looks up at once."""


def match_prefix(state: DecodeState, shapes: Shapes, order: Array) -> tuple[DecodeState, Array]:
    """Let running sequences, and the next one to start, share the cached pages of the tokens they would compute next.

    Returns: the new state, and the slots that wait because another one is computing their next page, bool[seq].
    """
    none = jnp.zeros(state.sequences.num_slots, jnp.bool_)
    if state.prefix is None:
        return state, none
    size = state.page_table.page_size

    # Loops carry what they change and nothing else: everything that is carried costs time to compile.
    def share(carry):
        page_indices, before, page_table, windows, hits, _ = carry
        _, page_indices, computed = jax.lax.while_loop(
            lambda carry: carry[0],
            lambda carry: _take_window(_with(state, *carry[1:]), shapes, order, seekers),
            (jnp.asarray(True), page_indices, before),
        )
        if state.windows:
            page_indices, computed, windows = run_if(
                jnp.any(computed > before),
                lambda carry: _within_windows(state, before, *carry),
                (page_indices, computed, windows),
            )
        column = jnp.arange(page_indices.shape[1], dtype=jnp.int32)[None, :]
        found = (column >= page_of(before, size)[:, None]) & (column < page_of(computed, size)[:, None])
        page_table = page_table.reclaim(jnp.where(found, page_indices, shapes.num_pages))
        hits = hits + jnp.sum(found, dtype=jnp.int32)
        waits = _waits(_with(state, page_indices, computed), shapes, order)
        return page_indices, computed, page_table, windows, hits, waits

    table, counters = state.sequences, state.counters
    seekers = _seekers(table, shapes, order)
    carry = (table.page_indices, table.num_computed, state.page_table, state.windows, counters.prefix_hits, none)
    found = run_if(jnp.any(_shareable(state, seekers) > 0), share, carry)
    page_indices, computed, page_table, windows, hits, waits = found
    state = replace(state, sequences=_count_cached(table, computed), windows=windows)
    state = _with(state, page_indices, computed)
    return replace(state, page_table=page_table, counters=replace(counters, prefix_hits=hits)), waits


def _within_windows(
    state: DecodeState, before: Array, page_indices: Array, found: Array, windows: tuple[WindowPages, ...]
) -> tuple[Array, Array, tuple[WindowPages, ...]]:
    """`_as_far_as_seen`, with the references to window pages moved along."""
    page_indices, computed = _as_far_as_seen(state, page_indices, before, found)
    return page_indices, computed, tuple(_moved_on(each, page_indices, before, computed) for each in windows)


def _as_far_as_seen(state: DecodeState, page_indices: Array, before: Array, found: Array) -> tuple[Array, Array]:
    """The longest part of what each slot has found whose last window is there, for every window.

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
    fits &= (column >= page_of(before, size)[:, None]) & (column < page_of(found, size)[:, None])
    pages = jnp.max(jnp.where(fits, column + 1, 0), axis=1)
    computed = jnp.where(found > before, jnp.maximum(before, pages * size), before)
    beyond = (column >= page_of(computed, size)[:, None]) & (column < page_of(found, size)[:, None])
    return jnp.where(beyond, state.page_table.num_pages, page_indices), computed


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

    def insert(prefix: PrefixTable) -> PrefixTable:
        prefix = _insert_pages(replace(state, prefix=prefix), shapes, counts)
        return prefix.hide(jnp.where(failed[:, None], state.sequences.page_indices, prefix.num_pages))

    return replace(state, prefix=run_if(jnp.any((counts > 0) | failed), insert, state.prefix))


def _seekers(table: SequenceTable, shapes: Shapes, order: Array) -> Array:
    """Slots that look up pages, bool[seq]: the running ones, and the first ready one if another may run."""
    running, ready = _computes(table), is_ready(table)
    next_one = jnp.where(
        jnp.sum(table.is_status(RUNNING)) < shapes.max_seqs, order[jnp.argmax(ready[order])], table.num_slots
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
    chosen = chosen[order]
    row = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, shapes.max_seqs)
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


def _take_window(state: DecodeState, shapes: Shapes, order: Array, seekers: Array) -> tuple[Array, Array, Array]:
    """Enter the next pages that are found into `page_indices`.

    Returns: whether there may be more; `page_indices` and `num_computed`. The references are not counted yet.
    """
    table, size = state.sequences, state.page_table.page_size
    assert state.prefix is not None
    width = min(_WINDOW, table.page_indices.shape[1])
    shareable = jnp.where(offset_of(table.num_computed, size) == 0, _shareable(state, seekers), 0)
    slots = _rows(shapes, order, shareable > 0)
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


def _waits(state: DecodeState, shapes: Shapes, order: Array) -> Array:
    """Slots whose next page another one is computing, which has computed a part of it or is older. bool[seq]"""
    table, size = state.sequences, state.page_table.page_size
    slots = _rows(shapes, order, _shareable(state, _computes(table)) > 0)
    serials, hashes, tokens = _next_pages(state, slots, 1)
    page = chained(content_hashes(tokens[:, 0]), jnp.zeros_like(slots), hashes)
    offset = offset_of(gather(table.num_computed, slots, 0), size)
    index = jnp.arange(slots.shape[0], dtype=jnp.int32)
    same = (serials[:, None] == serials[None, :]) & (page[:, None] == page[None, :])
    same &= (serials != UNKNOWN)[:, None] & (slots < table.num_slots)[None, :]
    ahead = (offset[None, :] > 0) | (index[None, :] < index[:, None])
    waits = jnp.any(same & ahead, axis=1) & (offset == 0)
    return scatter(jnp.zeros(table.num_slots, jnp.bool_), slots, waits)


def _insert_pages(state: DecodeState, shapes: Shapes, counts: Array) -> PrefixTable:
    table, size = state.sequences, state.page_table.page_size
    assert state.prefix is not None
    slot, item, valid = ragged_index(counts, jnp.int32(0), shapes.max_full_pages)
    slot = jnp.where(valid, slot, table.num_slots)
    first = gather(page_of(table.num_computed, size) - counts, slot, 0)
    column = first + item
    none = state.prefix.num_pages
    pages = gather(table.page_indices, (slot, column), none)
    position = column[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None, :]
    return state.prefix.register(
        jnp.where(valid, pages, none),
        page_at(table, slot, first - 1),
        gather(table.roots, slot, DEFAULT_ROOT),
        jnp.where(valid, item, 0),
        gather(table.tokens, (slot[:, None], position), 0),
    )
