"""`resample`: sequences continue one another. The primitive of particle filters, tree search and beam search."""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import gather, replace
from levanter_infer.cache.page_table import PageTable
from levanter_infer.cache.window_pages import WindowPages
from levanter_infer.decode.codes import FINISHED, FREE, WAITING
from levanter_infer.decode.paging import release_tails, share_tails
from levanter_infer.decode.sequence_table import SequenceTable
from levanter_infer.decode.state import DecodeState
from levanter_infer.kernels.loops import run_if

_POSITIONS = 1024
"""Tokens of each row that are copied together: sequences are mostly far shorter than they may be."""


def resample(state: DecodeState, mask: Array, ancestors: Array) -> DecodeState:
    """Continue each slot in the mask from the present state of its ancestor.

    A slot takes over the text of its ancestor: tokens, prompt and length limit, root, and the pages, all by reference.
    Full and partial pages are shared; the sequence that writes a shared page first copies it (`paging.allocate_pages`).
    A slot keeps its own order of arrival and its own row of `SamplingTable`: descendants of one sequence diverge,
    because their random numbers differ. A slot whose ancestor has finished is finished for the same reason; one that
    was free or finished becomes live and waits to run. Copies nothing in the pool.

    Args:
        mask: bool[seq]
        ancestors: i32[seq], any map: several slots may name one, which need not be in the mask. A slot that names
            itself costs nothing. Ignored outside of the mask.
    Requires: none of these slots is left to the host (LOADING, SWAPPED).
    """
    slots = jnp.arange(state.sequences.num_slots, dtype=jnp.int32)
    ancestors = jnp.where(mask, ancestors, slots)
    tables = (state.sequences, state.page_table, state.windows)
    moved = run_if(jnp.any(ancestors != slots), lambda tables: _moved(tables, ancestors), tables)
    table, page_table, windows = moved
    return replace(state, sequences=table, page_table=page_table, windows=windows)


def resample_samples(
    state: DecodeState, mask: Array, ancestors: Array, sample_index: Array, arrival: Array
) -> DecodeState:
    """`resample` among samples of one request, some of which may get a slot only now.

    Args:
        sample_index, arrival: i32[seq], of the slots in the mask.
    """
    state = resample(state, mask, ancestors)
    ancestors = jnp.where(mask, ancestors, jnp.arange(mask.shape[0], dtype=jnp.int32))
    columns = {name: column[ancestors] for name, column in state.sampling.columns.items()}
    columns["sample_index"] = jnp.where(mask, sample_index, columns["sample_index"])
    table = state.sequences
    arrival = jnp.where(mask, arrival, table.arrival)
    table = replace(table, arrival=arrival, priority=table.priority[ancestors])
    constraints = state.constraints
    if constraints is not None:  # a slot that was free has those of its last sample
        constraints = constraints.moved(ancestors)
    return replace(state, sequences=table, sampling=replace(state.sampling, **columns), constraints=constraints)


_Tables = tuple[SequenceTable, PageTable, tuple[WindowPages, ...]]


def _moved(tables: _Tables, ancestors: Array) -> _Tables:
    table, page_table, windows = tables
    slots = jnp.arange(table.num_slots, dtype=jnp.int32)
    moves = ancestors != slots

    old, held = table.page_indices, table.num_held(page_table.page_size)
    new = old[ancestors]
    # Pages that both hold are left alone: mostly a long common prefix
    column = jnp.arange(old.shape[1], dtype=jnp.int32)[None, :]
    first = jnp.min(jnp.where(old != new, column, old.shape[1]), axis=1)
    page_table = share_tails(page_table, new, first, jnp.where(moves, held[ancestors], 0))
    page_table = release_tails(page_table, old, first, jnp.where(moves, held, 0))

    def moved_window(each: WindowPages) -> WindowPages:
        """Both hold these pages, and each sees its own part of them."""
        begin = each.first_column(table.num_computed)
        shared = share_tails(each.table, new, begin[ancestors], jnp.where(moves, held[ancestors], 0), each)
        return replace(each, table=release_tails(shared, old, begin, jnp.where(moves, held, 0), each))

    windows = tuple(moved_window(each) for each in windows)
    status = table.status
    lives = (status > FREE) & (status < FINISHED)
    inherited = status[ancestors]
    status = jnp.where(lives[ancestors], jnp.where(lives, status, WAITING), inherited)
    # A fork that waits for a slot whose text changes computes its prompt itself
    source = table.fork_source
    alone = moves | gather(moves, source, False)
    followed = ("seq_lens", "num_computed", "prompt_lens", "max_lens", "roots", "finish_reason")
    table = replace(
        table,
        tokens=moved_rows(table.tokens, ancestors, jnp.max(jnp.where(moves, table.seq_lens[ancestors], 0))),
        page_indices=new,
        status=status,
        fork_source=jnp.where(alone, table.num_slots, source),
        **{name: getattr(table, name)[ancestors] for name in followed},
    )
    return table, page_table, windows


def moved_rows(rows: Array, ancestors: Array, longest: Array, others: Array | None = None) -> Array:
    """`rows[ancestors]` of an array [seq, position], as far as position `longest`.

    Args:
        others: an array of the same shape, whose rows are num_slots, num_slots + 1, … in `ancestors`.
    """
    width = min(_POSITIONS, rows.shape[1])

    def block(carry):
        # A block that would pass the end starts earlier, at positions that have moved already and must not move twice
        start, rows = carry
        part = jax.lax.dynamic_slice_in_dim(rows, start, width, axis=1)
        place = jnp.minimum(start, rows.shape[1] - width) + jnp.arange(width, dtype=jnp.int32)
        known = [part]
        if others is not None:
            known.append(jax.lax.dynamic_slice_in_dim(others, start, width, axis=1))
        part = jnp.where((place >= start)[None, :], jnp.concatenate(known)[ancestors], part)
        return start + width, jax.lax.dynamic_update_slice_in_dim(rows, part, start, axis=1)

    return jax.lax.while_loop(lambda carry: carry[0] < longest, block, (jnp.int32(0), rows))[1]
