"""`check_invariants`: what must hold between any two operations on a state."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import gather, scatter_add, scatter_min
from levanter_infer.cache.page_table import PageTable
from levanter_infer.cache.prefix_table import UNKNOWN
from levanter_infer.cache.state_snapshots import StateSnapshots
from levanter_infer.cache.window_pages import WindowPages
from levanter_infer.decode.beam_table import BeamTable
from levanter_infer.decode.codes import FINISHED, FREE, LOADING, RUNNING, SWAPPED, WAITING, is_private_root
from levanter_infer.decode.paging import window_pages_held
from levanter_infer.decode.programs import compile_program, without_callers_context
from levanter_infer.decode.state import DecodeState


def violations(state: DecodeState) -> dict[str, Array]:
    """Violations of each invariant, i32[] by name; all zero in a healthy state. Works inside jit.

    docs/invariants.md explains each of them. Costs O(slots × positions + pages): for tests and debugging.
    """
    table, pages = state.sequences, state.page_table
    size, num_pages, num_slots = pages.page_size, pages.num_pages, table.num_slots
    indices, counts = table.page_indices, pages.ref_counts
    computed = table.num_computed
    held = table.num_held(size)
    column = jnp.arange(indices.shape[1], dtype=jnp.int32)[None, :]
    holds = column < held[:, None]
    slot = jnp.arange(num_slots, dtype=jnp.int32)

    recount = scatter_add(jnp.zeros(num_pages, jnp.int32), jnp.where(holds, indices, num_pages), 1)
    owner = scatter_min(
        jnp.full(num_pages, num_slots, jnp.int32),
        jnp.where(holds, indices, num_pages),
        jnp.broadcast_to(slot[:, None], indices.shape),
    )
    owner_of = gather(owner, indices, num_slots)
    owner_page = gather(indices, (owner_of, jnp.broadcast_to(column, indices.shape)), num_pages)
    twice = _repeats(jnp.where(holds, indices, num_pages), num_pages)

    status = table.status
    idle = (status == FREE) | (status == SWAPPED) | (status == FINISHED)
    live = (status > FREE) & (status < FINISHED)
    lens = table.seq_lens
    counted = {
        "reference counts equal the slots that hold a page": recount != counts,
        "no reference count is below zero": counts < 0,
        "a page stands at most once in a slot": twice,
        "held pages exist": holds & (indices >= num_pages),
        "entries past the held pages are none": ~holds & (indices != num_pages),
        "a shared page has the same index in all its slots": holds & (owner_page != indices),
        "slots that share a page agree on its tokens": _tokens_differ(state, owner_of, holds),
        "free slots hold nothing": idle & (computed > 0),
        "no more is stored than known": live & (computed > lens),
        "a sequence that can run has work": ((status == RUNNING) | (status == WAITING)) & (computed >= lens),
        "lengths stay within their limits": live & ((lens > table.max_lens) | (lens < table.prompt_lens)),
        "the free ring holds exactly the free pages": _ring_differs(pages),
        "free and held pages make up the pool": pages.num_free + jnp.sum(counts > 0, dtype=jnp.int32) != num_pages,
    }
    for each in state.windows:
        for name, bad in _window_violations(state, each, holds).items():
            counted[name] = counted.get(name, 0) + jnp.sum(bad, dtype=jnp.int32)
    if state.snapshots is not None:
        counted |= _snapshot_violations(state.snapshots)
    if state.prefix is not None:
        counted["pages that can be found hold what the table says"] = _contents_differ(state, holds)
    if isinstance(state.beams, BeamTable):
        admitted = (status > LOADING) & (status < FINISHED) & state.beams.searches
        leader_lens = gather(lens, state.beams.params.leaders, 0)
        apart = (state.beams.num_in_group(admitted) != state.beams.params.widths) | (lens != leader_lens)
        counted["the beams of a search live together and are equally long"] = admitted & apart
    return {name: jnp.sum(jnp.asarray(bad), dtype=jnp.int32) for name, bad in counted.items()}


def check_invariants(state: DecodeState) -> None:
    """Raise AssertionError that names every violated invariant and how often it is violated."""
    with without_callers_context():
        counts = jax.device_get(_compiled_violations()(state))
    bad = {name: int(count) for name, count in counts.items() if count}
    assert not bad, f"violated invariants (times): {bad}"


@functools.cache
def _compiled_violations():
    return compile_program(violations)


def _repeats(indices: Array, num_pages: int) -> Array:
    ordered = jnp.sort(indices, axis=1)
    return (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < num_pages)


def _tokens_differ(state: DecodeState, owner_of: Array, holds: Array) -> Array:
    """A slot's stored tokens that differ from those of the first holder of the same page, bool[seq, position]."""
    table, size = state.sequences, state.page_table.page_size
    tokens, computed = table.tokens, table.num_computed
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    owner = jnp.where(holds, owner_of, table.num_slots)[:, position // size]
    theirs = gather(tokens, (owner, jnp.broadcast_to(position[None, :], tokens.shape)), 0)
    stored = jnp.minimum(computed[:, None], gather(computed, owner, 0))
    return (position[None, :] < stored) & (tokens != theirs)


def _contents_differ(state: DecodeState, holds: Array) -> Array:
    """Pages of a slot whose tokens, or whose predecessor, are not those that the prefix table says, bool[seq, page]."""
    table, prefix, size = state.sequences, state.prefix, state.page_table.page_size
    assert prefix is not None
    num_slots, width = table.page_indices.shape
    pages = jnp.where(holds, table.page_indices, prefix.num_pages)
    serials = gather(prefix.serials, pages, UNKNOWN)
    position = jnp.minimum(jnp.arange(width * size, dtype=jnp.int32), table.max_seq_len - 1)
    tokens = table.tokens[:, position].reshape(num_slots, width, size)
    wrong = jnp.any(gather(prefix.tokens, pages, 0) != tokens, axis=2)
    roots = jnp.where(is_private_root(table.roots), UNKNOWN, table.roots)  # pages of whatever came before
    before = jnp.concatenate([roots[:, None], serials[:, :-1]], axis=1)
    parents = gather(prefix.parents, pages, 0)
    elsewhere = (parents != before) & (parents != UNKNOWN) & (before != UNKNOWN)
    return (serials != UNKNOWN) & (wrong | elsewhere)


def _window_violations(state: DecodeState, window: WindowPages, holds: Array) -> dict[str, Array]:
    """Violations in one `WindowPages`. Args: holds: bool[seq, seq_page], columns of pages that slots hold."""
    num_pages, num_window_pages = window.attached.shape[0], window.num_pages
    held = jnp.where(holds, window_pages_held(state.sequences, window), num_window_pages)
    column = jnp.arange(holds.shape[1], dtype=jnp.int32)[None, :]
    seen = holds & (column >= window.first_column(state.sequences.num_computed)[:, None])
    counts = window.table.ref_counts
    back = gather(window.owner, window.attached, num_pages)
    forth = gather(window.attached, window.owner, num_window_pages)
    own = jnp.arange(num_window_pages, dtype=jnp.int32)
    page = jnp.arange(num_pages, dtype=jnp.int32)
    num_held = jnp.sum(counts > 0, dtype=jnp.int32)
    return {
        "pages that a window reaches into have a window page": seen & (held >= num_window_pages),
        "window pages are counted by the slots whose window reaches them": counts
        != scatter_add(jnp.zeros_like(counts), held, 1),
        "a window page and its page name each other": (window.attached < num_window_pages) & (back != page),
        "a page and its window page name each other": (window.owner < num_pages) & (forth != own),
        "the free ring holds exactly the free window pages": _ring_differs(window.table),
        "free and held window pages make up their pool": window.num_free + num_held != num_window_pages,
    }


def _snapshot_violations(snapshots: StateSnapshots) -> dict[str, Array]:
    num_pages, num_snapshots = snapshots.attached.shape[0], snapshots.num_snapshots
    page, own = jnp.arange(num_pages, dtype=jnp.int32), jnp.arange(num_snapshots, dtype=jnp.int32)
    back = gather(snapshots.owner, snapshots.attached, num_pages)
    forth = gather(snapshots.attached, snapshots.owner, num_snapshots)
    times = scatter_add(jnp.zeros(num_snapshots, jnp.int32), snapshots.order, 1)
    return {
        "a state snapshot and its page name each other": (snapshots.attached < num_snapshots) & (back != page),
        "a page and its state snapshot name each other": (snapshots.owner < num_pages) & (forth != own),
        "the order of state snapshots holds each of them once": times != 1,
    }


def _ring_differs(pages: PageTable) -> Array:
    index = jnp.arange(pages.num_pages, dtype=jnp.int32)
    place = (pages.ring_head + index) % pages.num_pages
    listed = jnp.where(index < pages.num_free, pages.free_ring[place], pages.num_pages)
    times = scatter_add(jnp.zeros(pages.num_pages, jnp.int32), listed, 1)
    return times != (pages.ref_counts == 0).astype(jnp.int32)
