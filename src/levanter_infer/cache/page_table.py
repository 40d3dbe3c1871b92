"""`PageTable`: who holds which page of the pool, and in which order free pages are reused."""

import equinox as eqx
import haliax.haxtyping as ht
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import Array

from levanter_infer.axes import PAGE
from levanter_infer.cache.named import full, replace, scalar
from levanter_infer.kernels.loops import run_if as run_if


class PageTable(eqx.Module):
    """Reference counts of all pages, and the free pages in the order of their release.

    A page is free exactly if its reference count is zero. Free pages stand in a ring, the least recently released
    first, so that taking and giving back cost O(pages moved) whatever the size of the pool. The ring is derived from
    the history of releases; `check_invariants` compares it with the counts.

    Page ids are int32; "none" is `num_pages`, one past the end.
    Source: PagedAttention, arXiv:2309.06180, section 4.
    """

    ref_counts: ht.i32[NamedArray, " page"]
    """Slots that hold each page."""
    free_ring: ht.i32[NamedArray, " page"]
    """Ids of free pages at places `ring_head … ring_head + num_free - 1`, modulo the ring; other places are stale."""
    ring_head: ht.i32[NamedArray, ""]
    num_free: ht.i32[NamedArray, ""]
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
        ring = full(((PAGE, num_pages),), 0)
        return PageTable(
            ref_counts=full(((PAGE, num_pages),), 0),
            free_ring=NamedArray(jnp.arange(num_pages, dtype=jnp.int32), ring.axes),
            ring_head=scalar(0),
            num_free=scalar(num_pages),
            page_size=page_size,
        )

    @property
    def num_pages(self) -> int:
        return self.ref_counts.axis_size(PAGE)

    def allocate(self, count: Array, capacity: int) -> tuple["PageTable", Array]:
        """Take the `count` least recently released pages, each with one reference.

        Args:
            count: i32[], pages to take, at most `capacity`.
            capacity: static bound of `count`.
        Returns:
            The new table, and page ids i32[capacity], of which the first `count` are taken and the rest are none.
        Requires: `count <= num_free`; the packing policy guarantees it.
        """
        index = jnp.arange(capacity, dtype=jnp.int32)
        place = jax.lax.rem(self.ring_head.array + index, self.num_pages)
        pages = jnp.where(index < count, self.free_ring.array[place], self.num_pages)
        table = replace(
            self,
            ref_counts=self.ref_counts.array.at[pages].set(1, mode="drop"),
            ring_head=jax.lax.rem(self.ring_head.array + count, self.num_pages),
            num_free=self.num_free.array - count,
        )
        return table, pages

    def share(self, pages: Array) -> "PageTable":
        """Add one reference to each of `pages` (any shape; none entries are ignored, repeats count)."""
        return replace(self, ref_counts=self.ref_counts.array.at[pages].add(1, mode="drop"))

    def release(self, pages: Array) -> "PageTable":
        """Drop one reference from each of `pages`; those that nobody holds any more become free, in this order.

        Args:
            pages: i32[n]; none entries are ignored; a page may stand there once for each reference it loses.
        Requires: each page has at least as many references as it stands in `pages`. The count is not clamped, so
            that a violation is found by `check_invariants` and not hidden.
        """
        counts = self.ref_counts.array.at[pages].add(-1, mode="drop")
        freed = jnp.where(counts.at[pages].get(mode="fill", fill_value=1) == 0, pages, self.num_pages)
        # A page that several holders gave back stands in `freed` several times and must enter the ring once. Its
        # count is zero, so the count itself can hold the last place at which it stands, for as long as we look.
        place = jnp.arange(1, pages.shape[0] + 1, dtype=jnp.int32)
        marked = counts.at[freed].max(place, mode="drop")
        enters = (marked.at[freed].get(mode="fill", fill_value=0) == place) & (freed < self.num_pages)
        counts = marked.at[freed].set(0, mode="drop")
        rank = jnp.cumsum(enters, dtype=jnp.int32)
        target = jax.lax.rem(self.ring_head.array + self.num_free.array + rank - 1, self.num_pages)
        ring = self.free_ring.array.at[jnp.where(enters, target, self.num_pages)].set(freed, mode="drop")
        return replace(self, ref_counts=counts, free_ring=ring, num_free=self.num_free.array + rank[-1])

    def reclaim(self, pages: Array) -> "PageTable":
        """Add one reference to each of `pages`, which may be free: those leave the ring, and the order of the others
        stays. Costs O(pages of the pool) if there is such a page.

        Args:
            pages: any shape; none entries are ignored, repeats count.
        """
        table = self.share(pages)
        counts = self.ref_counts.array.at[pages].get(mode="fill", fill_value=1)

        def without_held(table: "PageTable") -> "PageTable":
            index = jnp.arange(table.num_pages, dtype=jnp.int32)
            place = jax.lax.rem(table.ring_head.array + index, table.num_pages)
            listed = table.free_ring.array[place]
            stays = (index < table.num_free.array) & (table.ref_counts.array[listed] == 0)
            rank = jnp.cumsum(stays, dtype=jnp.int32)
            ring = table.free_ring.array.at[jnp.where(stays, rank - 1, table.num_pages)].set(listed, mode="drop")
            return replace(table, free_ring=ring, ring_head=jnp.zeros_like(table.ring_head.array), num_free=rank[-1])

        return run_if(jnp.any(counts == 0), without_held, table)

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
        (group, item, valid), each [size]: the items numbered `start … start + size - 1` when all groups are written
        one behind the other; `group` is n where not `valid`.
    """
    # Each group marks the place of its first item, and the marks spread to the right: a search would take longer, to
    # run and above all to compile.
    bounds = jnp.cumsum(counts, dtype=jnp.int32)
    begins = bounds - counts
    in_reach = (counts > 0) & (bounds > start)
    place = jnp.where(in_reach, jnp.maximum(begins - start, 0), size)
    marks = jnp.full(size, -1, jnp.int32).at[place].set(jnp.arange(counts.shape[0], dtype=jnp.int32), mode="drop")
    flat = start + jnp.arange(size, dtype=jnp.int32)
    valid = flat < bounds[-1]
    group = jnp.where(valid, jax.lax.cummax(marks), counts.shape[0])
    return group, flat - begins.at[group].get(mode="fill", fill_value=0), valid
