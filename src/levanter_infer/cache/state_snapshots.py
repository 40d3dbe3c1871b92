"""`StateSnapshots`: the states of fixed size that prefix caching keeps, and the pages whose end they belong to."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from levanter_infer.cache.arrays import cumsum, full, gather, replace, scatter, scatter_max
from levanter_infer.cache.prefix_table import UNKNOWN, PrefixTable

# Why a snapshot was made
PASSED = 0
"""Its sequence has come by here, at the end of a prompt chunk or of a page that it generated."""
PROMPT = 1
"""A prompt ends here."""
SHARED = 2
"""Sequences with this prefix part here, or another one has gone on from here."""


class StateSnapshots(eqx.Module):
    """Snapshots of states at the ends of cached pages, for layers that remember a state of fixed size per sequence.

    A page that is found again brings keys and values along, which are all that attention needs of it; a recurrence
    needs the state after its last token. A *snapshot* is such a state, attached to its page. It serves as long as the
    page can be found, and is free otherwise.

    A new one takes the place of a free one, else of one that its sequence has left behind (`pass_by`), else of the one
    that was used least recently. The SHARED ones that were used last are replaced after all others, so that prompts
    that are seen once do not push out what they have in common; they are half of all at most.
    Sources: SGLang's radix cache for Mamba, which keeps states where prefixes branch; segmented LRU.
    """

    attached: Int32[Array, " page"]
    """Snapshot of each page; none is the number of snapshots."""
    owner: Int32[Array, " snapshot"]
    """The page that each snapshot is attached to; none is the number of pages."""
    kind: Int32[Array, " snapshot"]
    """PASSED, PROMPT or SHARED."""
    order: Int32[Array, " snapshot"]
    """Snapshots from the least to the most recently used, those first that were left behind."""

    @staticmethod
    def init(num_snapshots: int, num_pages: int) -> "StateSnapshots":
        """Every snapshot free."""
        return StateSnapshots(
            attached=full(num_pages, num_snapshots),
            owner=full(num_snapshots, num_pages),
            kind=full(num_snapshots, PASSED),
            order=jnp.arange(num_snapshots, dtype=jnp.int32),
        )

    @property
    def num_snapshots(self) -> int:
        """Snapshots; an absent one is this number."""
        return self.owner.shape[-1]

    def of(self, pages: Array) -> Array:
        """The snapshot of each of `pages`, of any shape; none where there is none."""
        return gather(self.attached, pages, self.num_snapshots)

    def is_used(self, prefix: PrefixTable) -> Array:
        """Whether each snapshot belongs to a page that can be found, bool[snapshot]."""
        return prefix.findable(self.owner)

    def allocate(self, prefix: PrefixTable, count: Array, capacity: int) -> Array:
        """The `count` snapshots to replace next, i32[capacity]; none from there on.

        Requires: count is at most `capacity`, which is at most the number of snapshots.
        """
        used = self.is_used(prefix)
        shared = (used & (self.kind == SHARED))[self.order]
        later = cumsum(shared[::-1])[::-1]  # shared ones that were used later, and itself
        protected = scatter(jnp.zeros_like(used), self.order, shared & (later <= (self.num_snapshots + 1) // 2))
        order = self._reordered(~used, protected).order[:capacity]
        return jnp.where(jnp.arange(capacity, dtype=jnp.int32) < count, order, self.num_snapshots)

    def attach(self, snapshots: Array, pages: Array, kind: Array) -> "StateSnapshots":
        """Attach `snapshots` of a `kind` to `pages`, i32[n] each; pairs of absent ones are ignored. They count as used
        just now.

        The pages that they were attached to, and other snapshots of `pages`, lose them.
        """
        num_pages = self.attached.shape[0]
        snapshots = jnp.where(pages < num_pages, snapshots, self.num_snapshots)
        pages = jnp.where(snapshots < self.num_snapshots, pages, num_pages)
        owner = scatter(self.owner, self.of(pages), num_pages)
        attached = scatter(self.attached, gather(owner, snapshots, num_pages), self.num_snapshots)
        attached = scatter(attached, pages, snapshots)
        changed = replace(
            self,
            attached=attached,
            owner=scatter(owner, snapshots, pages),
            kind=scatter(self.kind, snapshots, kind),
        )
        return changed.touch(snapshots)

    def detach(self, pages: Array) -> "StateSnapshots":
        """Free the snapshots of `pages` (any shape; none entries are ignored)."""
        owner = scatter(self.owner, self.of(pages), self.attached.shape[0])
        return replace(self, owner=owner, attached=scatter(self.attached, pages, self.num_snapshots))

    def follow(self, prefix: PrefixTable, pages: Array) -> "StateSnapshots":
        """Attach snapshots to `pages` i32[n] that hold the contents of their page, and are found in its stead.

        Args: prefix: after these pages were registered.
        """
        num_pages = self.attached.shape[0]
        old = jnp.where(prefix.findable(self.owner), UNKNOWN, gather(prefix.serials, self.owner, UNKNOWN))
        new = jnp.where(prefix.findable(pages), gather(prefix.serials, pages, UNKNOWN), UNKNOWN)
        same = (old[:, None] == new[None, :]) & (old != UNKNOWN)[:, None]
        moves = jnp.any(same, axis=1)
        target = jnp.where(moves, pages[jnp.argmax(same, axis=1)], num_pages)
        snapshots = jnp.arange(self.num_snapshots, dtype=jnp.int32)
        attached = scatter(self.attached, jnp.where(moves, self.owner, num_pages), self.num_snapshots)
        return replace(self, attached=scatter(attached, target, snapshots), owner=jnp.where(moves, target, self.owner))

    def touch(self, snapshots: Array) -> "StateSnapshots":
        """`snapshots` (any shape; none entries are ignored) have been used just now."""
        return self._reordered(jnp.zeros(self.num_snapshots, jnp.bool_), self._mask(snapshots))

    def promote(self, snapshots: Array, kind: Array) -> "StateSnapshots":
        """`snapshots`, i32[n], are of a `kind` i32[n] at least."""
        return replace(self, kind=scatter_max(self.kind, snapshots, kind))

    def restore(self, snapshots: Array) -> "StateSnapshots":
        """Sequences go on from `snapshots`, i32[n]; none entries are ignored."""
        kind = gather(self.kind, snapshots, PASSED)
        return self.promote(snapshots, jnp.where(kind == PROMPT, SHARED, kind)).touch(snapshots)

    def pass_by(self, snapshots: Array) -> "StateSnapshots":
        """Sequences make their next snapshots after `snapshots`, i32[n]: of these, PASSED ones are left behind."""
        first = self._mask(snapshots) & (self.kind == PASSED)
        return self._reordered(first, jnp.zeros(self.num_snapshots, jnp.bool_))

    def _mask(self, snapshots: Array) -> Array:
        """bool[snapshot]"""
        return scatter(jnp.zeros(self.num_snapshots, jnp.bool_), snapshots, True)

    def _reordered(self, first: Array, last: Array) -> "StateSnapshots":
        """With the snapshots in the mask `first` first and those in `last` last, bool[snapshot]; each keeps its order
        otherwise."""
        group = jnp.where(first, 0, jnp.where(last, 2, 1))[self.order]
        is_group = group[None, :] == jnp.arange(3)[:, None]
        place = cumsum(is_group.reshape(-1)).reshape(is_group.shape) - 1
        place = jnp.take_along_axis(place, group[None, :], axis=0)[0]
        return replace(self, order=scatter(self.order, place, self.order))
