"""`SequenceTable`: tokens, pages and scheduling state of each sequence, one slot each."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from levanter_infer.cache.arrays import full
from levanter_infer.cache.page_math import pages_for
from levanter_infer.decode.codes import DEFAULT_ROOT, FINISHED, FREE, NOT_FINISHED, WAITING


class SequenceTable(eqx.Module):
    """Per slot: the tokens, how many of them have their K/V stored, and the pages that hold these.

    A slot has work while `num_computed < seq_lens`; it samples in the step that makes them equal. Prompts, prompt
    chunks, decoding and recomputation after preemption are this one case. A slot holds exactly
    `ceil(num_computed / page_size)` pages. Absent page ids are `num_pages`, absent slots `num_slots`.
    """

    tokens: Int32[Array, "seq position"]
    seq_lens: Int32[Array, " seq"]
    """Tokens known: prompt and generated."""
    num_computed: Int32[Array, " seq"]
    """Tokens whose keys and values are stored."""
    page_indices: Int32[Array, "seq seq_page"]
    """Pages in logical order: position p is stored in page `page_indices[p // page_size]` at offset `p % page_size`."""
    status: Int32[Array, " seq"]
    finish_reason: Int32[Array, " seq"]
    arrival: Int32[Array, " seq"]
    """Order of arrival within a priority: the smallest runs first, the largest is preempted first."""
    priority: Int32[Array, " seq"]
    """Smallest first."""
    prompt_lens: Int32[Array, " seq"]
    max_lens: Int32[Array, " seq"]
    """`seq_lens` at which the sequence ends with reason LENGTH."""
    roots: Int32[Array, " seq"]
    """Negative: what keys and values depend on beside the tokens. Only sequences of one root share pages."""
    fork_source: Int32[Array, " seq"]
    """Slot whose prompt pages this one will share; none if it shares no prompt, and after the fork."""
    num_cached: Int32[Array, " seq"]
    """Prompt tokens found by prefix caching when the sequence first reached them."""
    num_reached: Int32[Array, " seq"]
    """The largest `num_computed` so far: pending tokens below it were lost by preemption."""

    @staticmethod
    def init(num_slots: int, max_seq_len: int, num_pages: int, page_size: int) -> "SequenceTable":
        return SequenceTable(
            tokens=full((num_slots, max_seq_len), 0),
            seq_lens=full(num_slots, 0),
            num_computed=full(num_slots, 0),
            page_indices=full((num_slots, -(-max_seq_len // page_size)), num_pages),
            status=full(num_slots, FREE),
            finish_reason=full(num_slots, NOT_FINISHED),
            arrival=full(num_slots, 0),
            priority=full(num_slots, 0),
            prompt_lens=full(num_slots, 0),
            max_lens=full(num_slots, 0),
            roots=full(num_slots, DEFAULT_ROOT),
            fork_source=full(num_slots, num_slots),
            num_cached=full(num_slots, 0),
            num_reached=full(num_slots, 0),
        )

    @property
    def num_slots(self) -> int:
        return self.seq_lens.shape[-1]

    @property
    def max_seq_len(self) -> int:
        return self.tokens.shape[-1]

    def is_status(self, status: int) -> Array:
        """bool[seq]"""
        return self.status == status

    def num_held(self, page_size: int) -> Array:
        """Pages that each slot holds, i32[seq]."""
        return pages_for(self.num_computed, page_size)


def in_order(table: SequenceTable) -> Array:
    """Slots by priority, and of one priority from the oldest to the youngest, i32[seq]; slots that hold no sequence
    come last."""
    live = (table.status > FREE) & (table.status < FINISHED)
    priority = jnp.where(live, table.priority, jnp.iinfo(jnp.int32).max)
    return jnp.lexsort((table.arrival, priority)).astype(jnp.int32)


def is_ready(table: SequenceTable) -> Array:
    """Slots that wait only to be started, bool[seq]."""
    return table.is_status(WAITING) & (table.fork_source == table.num_slots)


def precede(table: SequenceTable, status: int) -> Array:
    """Slots that come, in the order of `in_order`, before all slots of a status, bool[seq]."""
    theirs, last = table.is_status(status), jnp.iinfo(jnp.int32).max
    priority, arrival = table.priority, table.arrival
    first_priority = jnp.min(jnp.where(theirs, priority, last))
    first_arrival = jnp.min(jnp.where(theirs & (priority == first_priority), arrival, last))
    return (priority < first_priority) | ((priority == first_priority) & (arrival < first_arrival))
