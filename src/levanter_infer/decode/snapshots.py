"""States of fixed size at the ends of cached prefixes: when they are kept, and when a sequence goes on from one.

A state exists where a sequence has stopped, and nowhere else. So prompt chunks end where a state may be of use
(`tokens_to_bound`): at the last page bound of a prompt, where prefixes part, and else at the end of a page where the
budget of a step allows it. The state after each step that ends at the end of a page is kept, if there are snapshots.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import cumsum, gather, replace
from levanter_infer.cache.cache import Cache
from levanter_infer.cache.page_math import offset_of, page_of
from levanter_infer.cache.state_snapshots import PASSED, PROMPT, SHARED
from levanter_infer.decode.codes import is_private_root
from levanter_infer.decode.paging import page_at
from levanter_infer.decode.sequence_table import SequenceTable
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.kernels.loops import run_if

NOWHERE = jnp.iinfo(jnp.int32).max
"""A bound that no sequence reaches."""


class StatePlan(eqx.Module):
    """Copies of states of fixed size that prefix caching needs in one step."""

    restored: Array
    """i32[seq], snapshot that each slot goes on from; none: from its own state."""
    bounds: Array
    """i32[seq], tokens after which the state of each slot is wanted by others: prefixes part there. NOWHERE: none."""


def restore_states(cache: Cache, plan: StatePlan | None) -> Cache:
    """Copy the snapshots that slots go on from into their states."""
    if plan is None:
        return cache
    num_slots, num_snapshots = plan.restored.shape[0], cache.snapshots[0].num_entries
    is_any = plan.restored < num_snapshots
    slots = jnp.where(is_any, jnp.arange(num_slots, dtype=jnp.int32), num_slots)
    return run_if(jnp.any(is_any), lambda cache: cache.restore_states(plan.restored, slots), cache)


def store_states(cache: Cache, kept: Array | None, origins: Array) -> tuple[Cache, Array]:
    """Copy the state of each slot into its snapshot, i32[seq] of `keep_states`.

    Returns: the cache, and `origins`, of any type, as values that depend on it: what changes states by them comes after
        these reads, so that XLA needs no copy of the states.
    """
    if kept is None:
        return cache, origins
    slots = jnp.arange(kept.shape[0], dtype=jnp.int32)
    is_any = jnp.any(kept < cache.snapshots[0].num_entries)

    def store(carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        return carry[0] + 1, carry[1].keep_states(slots, kept)

    times, cache = run_if(is_any, store, (jnp.int32(0), cache))
    return cache, jnp.where(times >= 0, origins, 0)


def tokens_to_bound(table: SequenceTable, plan: StatePlan, page_size: int) -> Array:
    """Tokens that each slot computes until a state is to be kept, i32[seq]: where another prefix parts from its own,
    and at the last page bound of its prompt."""
    computed = table.num_computed
    bounds = jnp.where(plan.bounds > computed, plan.bounds, NOWHERE)
    end = jnp.where(is_private_root(table.roots), 0, _prompt_bound(table, page_size))
    bounds = jnp.minimum(bounds, jnp.where(end > computed, end, NOWHERE))
    return bounds - computed


def whole_pages(computed: Array, chunk: Array, is_cut: Array, page_size: int) -> Array:
    """`chunk`, i32[n] tokens after `computed`, without the part of a page at its end if there are whole ones, in the
    mask `is_cut`: the last tokens are left to the next step."""
    end = computed + chunk
    end = end - offset_of(end, page_size)
    return jnp.where(is_cut & (end > computed), end - computed, chunk)


def keep_states(
    state: DecodeState, shapes: Shapes, plan: StatePlan | None, take: Array
) -> tuple[DecodeState, Array | None]:
    """Attach snapshots to the pages whose end slots have reached in this step.

    Args:
        state: after the step's tokens count as computed and its pages were inserted into the prefix cache.
        take: i32[seq], tokens that the step has computed of each slot.
    Returns: the new state, and the snapshot that takes each slot's state, i32[seq]; none: it is not kept.
    """
    if plan is None:
        return state, None
    assert state.snapshots is not None
    assert state.prefix is not None
    table, size, num_pages = state.sequences, shapes.page_size, shapes.num_pages
    slots, computed = jnp.arange(table.num_slots, dtype=jnp.int32), table.num_computed
    kind = jnp.where(computed == _prompt_bound(table, size), PROMPT, PASSED)
    kind = jnp.where(computed == plan.bounds, SHARED, kind)
    lasting = kind > PASSED
    at_bound = (take > 0) & (offset_of(computed, size) == 0)
    if shapes.num_snapshots <= shapes.max_seqs:  # generated pages would take all of them
        at_bound &= lasting | (take > 1)
    page = page_at(table, slots, page_of(computed, size) - 1)
    at_bound &= state.prefix.findable(page)
    page = jnp.where(at_bound, page, num_pages)
    before = page_at(table, slots, page_of(computed - take, size) - 1)
    before = jnp.where(at_bound, before, num_pages)
    none = jnp.full_like(slots, shapes.num_snapshots)
    capacity = min(shapes.max_seqs, shapes.num_snapshots)

    def keep(carry):
        snapshots, counters, _ = carry
        snapshots = snapshots.pass_by(snapshots.of(before))
        present = snapshots.of(page)
        missing = at_bound & (present >= shapes.num_snapshots)
        first = cumsum(missing & lasting)
        rank = jnp.where(lasting, first, first[-1] + cumsum(missing & ~lasting)) - 1
        count = jnp.minimum(jnp.sum(missing, dtype=jnp.int32), capacity)
        taken = snapshots.allocate(state.prefix, count, capacity)
        evicted = jnp.sum(gather(snapshots.is_used(state.prefix), taken, False), dtype=jnp.int32)
        kept = jnp.where(missing, gather(taken, rank, shapes.num_snapshots), shapes.num_snapshots)
        snapshots = snapshots.attach(kept, page, kind).promote(present, kind).touch(present)
        counters = counters.plus(snapshots_kept=count, snapshot_evictions=evicted)
        return snapshots, counters, kept

    carry = (state.snapshots, state.counters, none)
    snapshots, counters, kept = run_if(jnp.any(at_bound), keep, carry)
    return replace(state, snapshots=snapshots, counters=counters), kept


def _prompt_bound(table: SequenceTable, page_size: int) -> Array:
    """The last page bound of each prompt that a sequence with the same prompt could go on from, i32[seq]."""
    last = jnp.maximum(table.prompt_lens - 1, 0)
    return last - offset_of(last, page_size)
