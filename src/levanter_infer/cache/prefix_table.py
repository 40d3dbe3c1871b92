"""`PrefixTable`: the full pages of the pool by their prefix, for automatic prefix caching."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Int32, UInt32

from levanter_infer.cache.arrays import ShortRows, cumsum, full, gather, replace, scatter
from levanter_infer.kernels.loops import in_blocks

WAYS = 8
"""Pages that one bucket of the table can name; a power of two."""
UNKNOWN = 0
"""Serial of a page that is not full, or whose contents must not be shared."""
_FACTOR = 0x9E3779B1
_LAST_SERIAL = 2**31 - 2**20
"""No page gets a larger serial: from there on nothing new is found until the next reset."""


class PrefixTable(eqx.Module):
    """The full pages of the pool by their contents: their tokens, and the prefix before them in the sequence.

    Contents are numbered with serials: equal serials mean equal tokens after an equal prefix. The contents of a page
    are its tokens and the serial of the page before it; the first page of a sequence follows a root, a negative number
    that stands for everything else that keys and values depend on (weights, a caller's salt). A hash leads to a few
    candidates, which are compared token by token, so that no collision can mix up two texts.

    A page is forgotten when it is allocated to a new owner, not when it is released. A page whose predecessor has been
    forgotten is not found any more; sequences release their last page first, so there is rarely one.
    Source: sharing by hashed blocks, arXiv:2309.06180, section 4.4.
    """

    tokens: Int32[Array, "page page_offset"]
    parents: Int32[Array, " page"]
    """Serial of the page before, or the root; UNKNOWN for a page that must not be found."""
    serials: Int32[Array, " page"]
    """Positive, or UNKNOWN. The other columns mean nothing where it is UNKNOWN."""
    hashes: UInt32[Array, " page"]
    """Hash of everything from the root to the page's last token."""
    buckets: Int32[Array, "bucket_row way"]
    """`ShortRows` of the `WAYS` of each bucket: pages by hash; none is `num_pages`. A page stays here until another one
    replaces it, forgotten or not."""
    next_serial: Int32[Array, ""]

    @staticmethod
    def init(num_pages: int, page_size: int) -> "PrefixTable":
        """An empty table."""
        num_buckets = 1 << (4 * num_pages // WAYS).bit_length()  # on average, one or two of the ways are in use
        num_buckets = max(num_buckets, ShortRows(1, WAYS).side_by_side)
        return PrefixTable(
            tokens=full((num_pages, page_size), 0),
            parents=full(num_pages, 0),
            serials=full(num_pages, UNKNOWN),
            hashes=full(num_pages, 0, jnp.uint32),
            buckets=full(ShortRows(num_buckets, WAYS).shape, num_pages),
            next_serial=jnp.int32(1),
        )

    @property
    def num_pages(self) -> int:
        return self.serials.shape[-1]

    @property
    def _ways(self) -> ShortRows:
        rows, width = self.buckets.shape[-2:]
        return ShortRows(rows * width // WAYS, WAYS)

    def ends(self, pages: Array, roots: Array) -> tuple[Array, Array]:
        """Serials i32[n] and hashes u32[n] of the prefixes that end with `pages` i32[n], or with `roots` i32[n] where a
        page is none."""
        none = pages >= self.num_pages
        serials = gather(self.serials, pages, UNKNOWN)
        hashes = gather(self.hashes, pages, 0)
        return jnp.where(none, roots, serials), jnp.where(none, _mixed(roots.astype(jnp.uint32)), hashes)

    def find(self, serials: Array, hashes: Array, tokens: Array, counts: Array) -> tuple[Array, Array]:
        """The longest run of known pages that continues each prefix.

        Args:
            serials, hashes: i32[n] and u32[n], of `ends`.
            tokens: i32[n, w, page_size], the w pages of text that come next.
            counts: i32[n], how many of these pages to look for.
        Returns: pages i32[n, w], none from the first on that is not known; and how many are, i32[n].
        """
        num, width, size = tokens.shape
        place = jnp.tile(jnp.arange(width, dtype=jnp.int32), num)
        flat = tokens.reshape(-1, size)
        found = self._candidates(chained(content_hashes(flat), place, jnp.repeat(hashes, width)), flat)
        own = gather(self.serials, found, UNKNOWN).reshape(num, width)
        before = jnp.concatenate([serials[:, None], own[:, :-1]], axis=1)
        parents = gather(self.parents, found, 0).reshape(num, width)
        column = jnp.arange(width, dtype=jnp.int32)[None, :]
        known = (own != UNKNOWN) & (before != UNKNOWN) & (parents == before) & (column < counts[:, None])
        known = jnp.cumprod(known.astype(jnp.int32), axis=1)
        pages = jnp.where(known > 0, found.reshape(num, width), self.num_pages)
        return pages, jnp.sum(known, axis=1, dtype=jnp.int32)

    def register(self, pages: Array, before: Array, roots: Array, place: Array, tokens: Array) -> "PrefixTable":
        """Insert pages that have just become full.

        Contents that the table knows keep their serial, and are found in their newest page from now on, which stays
        longest in the pool. The pages after one whose prefix is unknown stay unknown.

        Args:
            pages: i32[n]; none entries are ignored. The pages of one sequence are consecutive, in logical order: a run.
            before: i32[n], the page before the first one of the run; none at the start of a sequence.
            roots: i32[n], negative.
            place: i32[n], index of an entry in its run.
            tokens: i32[n, page_size]
        """
        index = jnp.arange(pages.shape[0], dtype=jnp.int32)
        starts, start_hashes = self.ends(before, roots)
        used = (pages < self.num_pages) & (starts != UNKNOWN)
        hashes = chained(content_hashes(tokens), place, start_hashes)

        def all_so_far(good: Array) -> Array:
            bad = cumsum(~good)
            return bad == jnp.where(index > place, bad[index - place - 1], 0)

        def after(serials: Array) -> Array:
            return jnp.where(place == 0, starts, jnp.roll(serials, 1))

        known = self._candidates(hashes, tokens)
        known_serials = gather(self.serials, known, UNKNOWN)
        known_parents = gather(self.parents, known, UNKNOWN)
        is_known = all_so_far((known_serials != UNKNOWN) & (known_parents == after(known_serials)))
        # The predecessor of such a page was forgotten, and is known again under another serial
        orphans = jnp.where(used & ~is_known, known, self.num_pages)

        # Several sequences may have filled a page with the same contents: the first one's is found
        fresh = self.next_serial + cumsum(used) - 1

        def equal_before(rows: Array) -> list[Array]:
            same = (hashes[rows][:, None] == hashes[None, :]) & (is_known[rows][:, None] == is_known[None, :])
            return [jnp.argmax(used[None, :] & same, axis=1).astype(jnp.int32)]

        first = jnp.where(
            used, in_blocks(equal_before, jnp.max(jnp.where(used, index + 1, 0)), index.shape[0])[0], index
        )
        serials = jnp.where(is_known, known_serials, fresh[first])
        parents = after(serials)
        agrees = (parents == parents[first]) & jnp.all(tokens == tokens[first], axis=1)
        has_numbers = self.next_serial < _LAST_SERIAL
        shared = used & all_so_far(agrees) & has_numbers & (known != pages)  # a page that is found already stays

        enters = shared & (first == index)
        older = jnp.where(enters & is_known, known, self.num_pages)
        target = jnp.where(shared, pages, self.num_pages)
        without_orphans = self.forget(orphans)
        table = replace(
            without_orphans,
            tokens=scatter(self.tokens, target, tokens),
            parents=scatter(scatter(self.parents, older, UNKNOWN), target, jnp.where(enters, parents, UNKNOWN)),
            serials=scatter(without_orphans.serials, target, serials),
            hashes=scatter(self.hashes, target, hashes),
            next_serial=self.next_serial + jnp.where(has_numbers, jnp.sum(used, dtype=jnp.int32), 0),
        )
        return table._enter(jnp.where(enters, pages, self.num_pages), hashes, fresh)

    def findable(self, pages: Array) -> Array:
        """Whether each of `pages`, of any shape, can be found; false for none."""
        serials, parents = (gather(a, pages, UNKNOWN) for a in (self.serials, self.parents))
        return (serials != UNKNOWN) & (parents != UNKNOWN)

    def forget(self, pages: Array) -> "PrefixTable":
        """Remove pages (any shape; none entries are ignored)."""
        return replace(self, serials=scatter(self.serials, pages, UNKNOWN))

    def hide(self, pages: Array) -> "PrefixTable":
        """Let pages (any shape; none entries are ignored) not be found any more, although slots may still hold them.

        They keep their serial, so that a slot that holds them still shares the pages that follow.
        """
        return replace(self, parents=scatter(self.parents, pages, UNKNOWN))

    def _candidates(self, hashes: Array, tokens: Array) -> Array:
        """The page of each hash u32[n] whose tokens are `tokens` i32[n, page_size], i32[n]; none if there is none."""
        entries = self._ways.gather(self.buckets, self._bucket(hashes))
        matches = self.findable(entries) & (gather(self.hashes, entries) == hashes[:, None])
        page = jnp.min(jnp.where(matches, entries, self.num_pages), axis=1)
        equal = jnp.all(gather(self.tokens, page, 0) == tokens, axis=1)
        return jnp.where(equal, page, self.num_pages)

    def _enter(self, pages: Array, hashes: Array, serials: Array) -> "PrefixTable":
        """Put pages into their buckets: in the way of a forgotten page or of none, or else in any way."""
        buckets = jnp.where(pages < self.num_pages, self._bucket(hashes), self._ways.num_rows)
        entries = self._ways.gather(self.buckets, buckets)
        taken = self.findable(entries)
        taken &= self._bucket(gather(self.hashes, entries)) == buckets[:, None]
        index = jnp.arange(pages.shape[0], dtype=jnp.int32)

        def equal_before(rows: Array) -> list[Array]:
            same = (buckets[rows][:, None] == buckets[None, :]) & (index[None, :] < rows[:, None])
            return [jnp.sum(same, axis=1, dtype=jnp.int32)]

        used = jnp.max(jnp.where(pages < self.num_pages, index + 1, 0))
        rank = in_blocks(equal_before, used, index.shape[0])[0]
        free_rank = jnp.cumsum(~taken, axis=1) - 1
        fitting = ~taken & (free_rank == rank[:, None])
        way = jnp.where(jnp.any(fitting, axis=1), jnp.argmax(fitting, axis=1), serials & (WAYS - 1))
        entered = self._ways.scatter(self.buckets, buckets, way, pages)
        # Stored row by row, as it is between steps: within a loop XLA prefers columns on a TPU, and copies the table.
        return replace(self, buckets=with_layout_constraint(entered, Layout((0, 1))))

    def _bucket(self, hashes: Array) -> Array:
        mask = jnp.uint32(self._ways.num_rows - 1)
        return (_mixed(hashes) & mask).astype(jnp.int32)


def content_hashes(tokens: Array) -> Array:
    """u32[n] of the tokens i32[n, page_size] of each page."""
    size = tokens.shape[1]
    weights = _mixed(jnp.arange(1, size + 1, dtype=jnp.uint32)) | jnp.uint32(1)
    return _mixed(jnp.sum((tokens.astype(jnp.uint32) + jnp.uint32(1)) * weights[None, :], axis=1, dtype=jnp.uint32))


def chained(contents: Array, place: Array, starts: Array) -> Array:
    """Hash u32[n] of each page with everything before it: `hash = _FACTOR * hash of the page before + contents`.

    Runs of pages are enumerated without a loop: divided by powers of the factor, the sums become prefix sums.

    Args:
        contents: u32[n], concatenated runs of pages.
        place: i32[n], index of a page in its run.
        starts: u32[n], hash of the prefix before the run.
    """
    count = contents.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    powers, inverses = (jnp.asarray(_powers(base, count + 1)) for base in (_FACTOR, pow(_FACTOR, -1, 2**32)))
    sums = jnp.cumsum(contents * inverses[:count], dtype=jnp.uint32)
    before = jnp.where(index > place, sums[index - place - 1], jnp.uint32(0))
    return powers[:count] * (sums - before) + powers[place + 1] * starts


def _powers(base: int, count: int) -> np.ndarray:
    powers = [1]
    for _ in range(count - 1):
        powers.append(powers[-1] * base % 2**32)
    return np.asarray(powers, np.uint32)


def _mixed(x: Array) -> Array:
    """A bijection of u32 in which every bit of the input reaches all of the output (MurmurHash3's finalizer)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
