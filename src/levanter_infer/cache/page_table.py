"""`PageTable`: reference counts of the pages of the pool, and the order in which free pages are reused."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from levanter_infer.cache.arrays import cumsum, full, gather, replace, scatter, scatter_add, scatter_max
from levanter_infer.kernels.loops import in_parts, run_if


class PageTable(eqx.Module):
    """Reference counts of all pages, and the free pages in the order of their release.

    A page is free exactly if its reference count is zero. Free pages are kept in a ring, the least recently released
    first, so that allocation and release cost O(pages moved) whatever the size of the pool. The ring is derived from
    the history of releases; `check_invariants` compares it with the counts.

    Page ids are int32; "none" is `num_pages`, one past the end.
    Source: PagedAttention, arXiv:2309.06180, section 4.
    """

    ref_counts: Int32[Array, " page"]
    """Slots that hold each page."""
    free_ring: Int32[Array, " page"]
    """Ids of free pages at indices `ring_head … ring_head + num_free - 1`, modulo the ring; the others are stale."""
    ring_head: Int32[Array, ""]
    num_free: Int32[Array, ""]
    page_size: int = eqx.field(static=True)

    @staticmethod
    def init(num_pages: int, page_size: int) -> "PageTable":
        """A table in which every page is free.

        Raises: ValueError unless there is a page and `page_size` is a power of two.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}: the pool needs at least one page")
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size={page_size} is not a power of two; use one of 8, 16, 32, 64, 128")
        return PageTable(
            ref_counts=full(num_pages, 0),
            free_ring=jnp.arange(num_pages, dtype=jnp.int32),
            ring_head=jnp.int32(0),
            num_free=jnp.int32(num_pages),
            page_size=page_size,
        )

    @property
    def num_pages(self) -> int:
        return self.ref_counts.shape[-1]

    def allocate(self, count: Array, capacity: int) -> tuple["PageTable", Array]:
        """Take the `count` least recently released pages, each with one reference.

        Args:
            count: i32[], pages to take, at most `capacity`.
            capacity: static bound of `count`.
        Returns:
            The new table, and page ids i32[capacity], of which the first `count` are taken and the rest are none.
        Requires: `count <= num_free`; the scheduler guarantees it.
        """
        pages = jnp.where(jnp.arange(capacity, dtype=jnp.int32) < count, self._next_free(capacity), self.num_pages)
        table = replace(
            self,
            ref_counts=in_parts(
                lambda held, part: scatter(held, part, 1), self.ref_counts, pages, count, self.num_pages
            ),
            ring_head=jax.lax.rem(self.ring_head + count, self.num_pages),
            num_free=self.num_free - count,
        )
        return table, pages

    def _next_free(self, capacity: int) -> Array:
        """The ring from its head on, i32[capacity]."""
        last = self.num_pages - capacity
        if last < 0:
            return self.free_ring[jax.lax.rem(self.ring_head + jnp.arange(capacity, dtype=jnp.int32), self.num_pages)]
        # As slices, which take less than a number for each page.
        start = jnp.minimum(self.ring_head, last)
        ring = jnp.concatenate(
            [jax.lax.dynamic_slice_in_dim(self.free_ring, start, capacity), self.free_ring[:capacity]]
        )
        return jax.lax.dynamic_slice_in_dim(ring, self.ring_head - start, capacity)

    def share(self, pages: Array) -> "PageTable":
        """Add one reference to each of `pages` (any shape; none entries are ignored, repeats count)."""
        return replace(self, ref_counts=scatter_add(self.ref_counts, pages, 1))

    def release(self, pages: Array) -> "PageTable":
        """Drop one reference from each of `pages`; those without references become free, in this order.

        Args:
            pages: i32[n]; none entries are ignored; a page occurs once for each reference it loses.
        Requires: each page has at least as many references as it has occurrences in `pages`. The count is not
            clamped, so that `check_invariants` finds a violation.
        """
        counts = scatter_add(self.ref_counts, pages, -1)
        freed = jnp.where(gather(counts, pages, 1) == 0, pages, self.num_pages)
        # A page that several holders released occurs in `freed` several times and must enter the ring once. Its count
        # is zero, so the count itself can hold the index of its last occurrence for the moment.
        place = jnp.arange(1, pages.shape[0] + 1, dtype=jnp.int32)
        marked = scatter_max(counts, freed, place)
        enters = (gather(marked, freed, 0) == place) & (freed < self.num_pages)
        counts = scatter(marked, freed, 0)
        rank = cumsum(enters)
        target = jax.lax.rem(self.ring_head + self.num_free + rank - 1, self.num_pages)
        ring = scatter(self.free_ring, jnp.where(enters, target, self.num_pages), freed)
        return replace(self, ref_counts=counts, free_ring=ring, num_free=self.num_free + rank[-1])

    def reclaim(self, pages: Array) -> "PageTable":
        """Add one reference to each of `pages`, which may be free: free ones leave the ring, and the order of the rest
        stays. Costs O(pages of the pool).

        Args:
            pages: any shape; none entries are ignored, repeats count.
        """
        return self.share(pages).without_held()

    def without_held(self) -> "PageTable":
        """Without pages in the ring that have references: after `share` of free pages. The order of the rest stays."""

        def compacted(table: "PageTable") -> "PageTable":
            index = jnp.arange(table.num_pages, dtype=jnp.int32)
            listed = table._next_free(table.num_pages)
            stays = (index < table.num_free) & (table.ref_counts[listed] == 0)
            rank = cumsum(stays)
            ring = scatter(table.free_ring, jnp.where(stays, rank - 1, table.num_pages), listed)
            return replace(table, free_ring=ring, ring_head=jnp.zeros_like(table.ring_head), num_free=rank[-1])

        num_free = jnp.sum(self.ref_counts == 0, dtype=jnp.int32)
        return run_if(num_free < self.num_free, compacted, self)

    def reset(self) -> "PageTable":
        """Every page free, in the order of the pool."""
        return PageTable.init(self.num_pages, self.page_size)


def ragged_index(counts: Array, start: Array, size: int) -> tuple[Array, Array, Array]:
    """Enumerate the items of groups of different sizes, without a loop.

    Args:
        counts: i32[n], items of each group.
        start: i32[], the number of items to skip.
        size: how many items to enumerate.
    Returns:
        (group, item, valid), each [size]: the items numbered `start … start + size - 1` when all groups are
        concatenated; `group` is n where not `valid`.
    """
    # Each group marks the index of its first item, and a running maximum extends the marks to the right: a search would
    # take longer, to run and above all to compile.
    bounds = cumsum(counts)
    first_items = bounds - counts
    in_reach = (counts > 0) & (bounds > start)
    place = jnp.where(in_reach, jnp.maximum(first_items - start, 0), size)
    marks = scatter(jnp.full(size, -1, jnp.int32), place, jnp.arange(counts.shape[0], dtype=jnp.int32))
    flat = start + jnp.arange(size, dtype=jnp.int32)
    valid = flat < bounds[-1]
    group = jnp.where(valid, jax.lax.cummax(marks), counts.shape[0])
    return group, flat - gather(first_items, group, 0), valid
