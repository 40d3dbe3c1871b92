"""KV offload: pages of preempted sequences move to host memory and back instead of being recomputed.

The device says when (`host_call`) and the host chooses the victims (`engine/kv_offload.py`). The operations here move
them: contents by `read_pages` and `write_pages`, a few pages a call, tables by `mark_swapped` and `swap_in`. Pages that
several sequences of a request share move once and are shared again.

The seam to scheduler and loop is `may_start`, `unless_called` and `host_call`, which are no-ops without offload.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from levanter_infer.cache.arrays import cumsum, full, gather, replace, scatter, scatter_add
from levanter_infer.cache.cache import Cache
from levanter_infer.cache.window_pages import WindowPages
from levanter_infer.decode.admission_policy import pages_to_continue
from levanter_infer.decode.codes import RUNNING, SWAPPED, WAITING
from levanter_infer.decode.paging import count_taken, pages_needed, release
from levanter_infer.decode.sequence_table import SequenceTable, in_order, is_ready, precede
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState

# What the device asks of the host
NO_CALL = 0
SHORT = 1  # swap out: the next step may need more pages than are free
ROOM = 2  # swap in: the sequences that were offloaded first fit again, or no other sequence is left


class HostTerms(eqx.Module):
    """Terms on which the device calls the host, uploaded once a round."""

    yields: Bool[Array, ""]
    """Whether the round ends for a call. Else it continues, and preempts the youngest sequences as it needs pages."""
    return_pages: Int32[Array, ""]
    """Pages that must be free for the sequences that were offloaded first to be swapped in and continue."""


def may_start(table: SequenceTable, ready: Array, shapes: Shapes) -> Array:
    """The slots of the mask `ready`, bool[seq], that come before all sequences whose pages are in host memory."""
    return ready & precede(table, SWAPPED) if shapes.offload else ready


def host_call(state: DecodeState, shapes: Shapes, terms: HostTerms | None) -> Array:
    """The reason why the host is called before the next step: NO_CALL, SHORT or ROOM. i32[]

    SHORT errs on the safe side where several prompts are computed at once. A step that starts waiting sequences is
    not short for them: they start only if there are pages.
    """
    if terms is None:
        return jnp.int32(NO_CALL)
    table, free = state.sequences, state.page_table.num_free
    running = table.is_status(RUNNING)
    pending = jnp.where(running, table.seq_lens - table.num_computed, 0)
    new, source = pages_needed(state, jnp.minimum(pending, shapes.max_step_tokens))
    need = jnp.sum(new, dtype=jnp.int32) + jnp.sum(source < shapes.num_pages, dtype=jnp.int32)
    short = jnp.minimum(need, shapes.max_new_pages) > state.num_free

    first = jnp.any(table.is_status(SWAPPED)) & ~jnp.any(is_ready(table) & precede(table, SWAPPED))
    num_running = jnp.sum(running, dtype=jnp.int32)
    growth = jnp.sum(jnp.where(_is_started(state), pages_to_continue(state, shapes), 0), dtype=jnp.int32)
    fits = (terms.return_pages <= free - growth) & (num_running < shapes.max_seqs)
    fits_again = first & (fits | (num_running == 0))
    return jnp.where(short, SHORT, jnp.where(fits_again, ROOM, NO_CALL)).astype(jnp.int32)


def unless_called(steps_on: Array, state: DecodeState, shapes: Shapes, terms: HostTerms | None) -> Array:
    """`steps_on`, bool[], if the round need not end for the host to move pages. It ends in any case if the next step
    would compute nothing."""
    if terms is None:
        return steps_on
    called = host_call(state, shapes, terms) != NO_CALL
    return steps_on & ~(called & (terms.yields | ~jnp.any(state.sequences.is_status(RUNNING))))


class WindowSnapshot(eqx.Module):
    """The columns of one `WindowPages` that the host reads."""

    attached: Array
    """i32[page]"""
    ref_counts: Array
    """i32[window_page]"""


class TableSnapshot(eqx.Module):
    """The columns that the host reads before it moves pages."""

    status: Array
    """i32[seq]"""
    rank: Array
    """i32[seq], rank of each slot in the order of `in_order`."""
    is_ready: Array
    """bool[seq], waits only to be started."""
    goes_on: Array
    """bool[seq], runs, or waits and holds pages."""
    computed: Array
    """i32[seq]"""
    growth: Array
    """i32[seq], pages that each slot will need beyond those it holds."""
    page_indices: Array
    """i32[seq, seq_page]"""
    ref_counts: Array
    """i32[page]"""
    windows: tuple[WindowSnapshot, ...]
    """As `Shapes.windows`."""


def snapshot(state: DecodeState, shapes: Shapes) -> TableSnapshot:
    table, order = state.sequences, in_order(state.sequences)
    return TableSnapshot(
        status=table.status,
        rank=jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32)),
        is_ready=is_ready(table),
        goes_on=_is_started(state),
        computed=table.num_computed,
        growth=pages_to_continue(state, shapes),
        page_indices=table.page_indices,
        ref_counts=state.page_table.ref_counts,
        windows=tuple(WindowSnapshot(each.attached, each.table.ref_counts) for each in state.windows),
    )


def _is_started(state: DecodeState) -> Array:
    table = state.sequences
    return table.is_status(RUNNING) | (table.is_status(WAITING) & (table.num_computed > 0))


def read_pages(cache: Cache, pages: Array) -> tuple[Array, ...]:
    """The contents of `pages`, i32[transfer_pages], in host memory, of each paged pool."""
    return jax.device_put(cache.take_pages(pages), jax.memory.Space.Host)


def write_pages(cache: Cache, contents: tuple[Array, ...], pages: Array, places: Array) -> Cache:
    """Store contents that `read_pages` has read.

    Args:
        contents: of `transfer_pages` pages, in host memory.
        pages: i32[page], from `swap_in`.
        places: i32[transfer_pages], index into `pages` for each page of `contents`; absent: it is not stored.
    """
    target = gather(pages, places, pages.shape[0])
    return cache.put_pages(target, jax.device_put(contents, jax.memory.Space.Device))


def read_window_pages(cache: Cache, attached: Array, pages: Array, group: int) -> tuple[Array, ...]:
    """As `read_pages`, of the pools of one window's layers: the window pages `attached` i32[page] to `pages`."""
    target = gather(attached, pages, cache.paged(group)[0].num_entries)
    return jax.device_put(cache.take_pages(target, group), jax.memory.Space.Host)


def write_window_pages(
    cache: Cache, attached: Array, contents: tuple[Array, ...], pages: Array, places: Array, group: int
) -> Cache:
    """As `write_pages`, of the pools of one window's layers."""
    target = gather(attached, gather(pages, places, pages.shape[0]), cache.paged(group)[0].num_entries)
    return cache.put_pages(target, jax.device_put(contents, jax.memory.Space.Device), group)


def mark_swapped(state: DecodeState, slots: Array, status: Array) -> DecodeState:
    """Release the pages of `slots`, bool[seq], and set their status, i32[]: SWAPPED or LOADING."""
    state = release(state, slots)
    table = state.sequences
    table = replace(table, status=jnp.where(slots, status, table.status))
    return replace(state, sequences=table)


def swap_in(
    state: DecodeState, slots: Array, places: Array, computed: Array, count: Array
) -> tuple[DecodeState, Array]:
    """Allocate pages for swapped sequences; they wait to be started.

    Args:
        slots: bool[seq].
        places: i32[seq, seq_page], which of the `count` new pages each column holds; absent past the last.
        computed: i32[seq], tokens whose K/V will be in these pages; 0 for a sequence that starts anew.
        count: i32[], pages to allocate. Each has at least one holder.
    Returns: the new state, and the pages, i32[page], of which the first `count` are allocated.
    Requires: as many free pages.
    """
    table, page_table = state.sequences, state.page_table
    none = page_table.num_pages
    page_table, pages = page_table.allocate(count, none)
    own = jnp.where(slots[:, None], gather(pages, places, none), none)
    counts = scatter_add(page_table.share(own).ref_counts, pages, -1)
    table = replace(
        table,
        fork_source=state.beams.sharing_again(table.fork_source, slots & (computed == 0)),
        page_indices=jnp.where(slots[:, None], own, table.page_indices),
        num_computed=jnp.where(slots, computed, table.num_computed),
        status=jnp.where(slots, WAITING, table.status),
    )
    state = replace(state, sequences=table, page_table=replace(page_table, ref_counts=counts))
    state = replace(state, windows=tuple(_with_window_pages(table, each, slots) for each in state.windows))
    return count_taken(state, pages, count), pages


def _with_window_pages(table: SequenceTable, window: WindowPages, slots: Array) -> WindowPages:
    """With window pages for the pages that slots have just got, of those that they still see. Args: slots: bool[seq].

    Requires: as many free window pages.
    """
    num_pages = window.attached.shape[0]
    column = jnp.arange(table.page_indices.shape[1], dtype=jnp.int32)[None, :]
    seen = slots[:, None] & (column >= window.first_column(table.num_computed)[:, None])
    own = jnp.where(seen, table.page_indices, num_pages)
    is_seen = scatter(jnp.zeros(num_pages, jnp.bool_), own, True)
    rank = cumsum(is_seen)
    page = jnp.arange(num_pages, dtype=jnp.int32)
    width = min(num_pages, window.num_pages)
    pages = scatter(full(width, num_pages), jnp.where(is_seen, rank - 1, width), page)
    window = window.attach(pages, rank[-1])
    counts = scatter_add(window.table.share(window.of(own)).ref_counts, window.of(pages), -1)
    return replace(window, table=replace(window.table, ref_counts=counts))
