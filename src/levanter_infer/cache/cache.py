"""`Cache`: everything that a model remembers of all sequences, one pool for each kind of memory."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
from jax import Array

from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.memory import Memory, PoolSizes
from levanter_infer.cache.pool import Pool
from levanter_infer.cache.slot_state import SlotState


@dataclass(frozen=True)
class PoolSpec:
    """The layers that share a pool."""

    memory: Memory
    layers: tuple[int, ...]
    """Numbers of the layers, ascending; the pool has them in this order."""


def by_layer(pools: Iterable[tuple[PoolSpec, Array]]) -> dict[int, Array]:
    """The array of each layer, by its number, from those of pools, [layers, …]."""
    return {layer: part[i] for spec, part in pools for i, layer in enumerate(spec.layers)}


class Cache(eqx.Module):
    """The pools of one model. The state of a generation carries it whole (`GenState.cache`)."""

    pools: tuple[Pool, ...]
    """As `DecoderConfig.pools`."""
    groups: tuple[int, ...] = eqx.field(static=True)
    """The numbering of each pool's pages: 0 is that of the tables, `i` that of `DecodeState.windows[i - 1]`."""
    snapshots: tuple[SlotState, ...] = ()
    """The states that prefix caching keeps (`DecodeState.snapshots`): for each pool of slots, in order, one whose
    entries are snapshots. Empty: none are kept."""

    @staticmethod
    def init(pools: Sequence[PoolSpec], sizes: PoolSizes) -> "Cache":
        """Pools of zeros."""
        found = tuple(spec.memory.init(len(spec.layers), sizes) for spec in pools)
        groups = tuple(sizes.group_of(spec.memory) for spec in pools)
        if not sizes.num_snapshots:
            return Cache(found, groups)
        kept = dataclasses.replace(sizes, num_slots=sizes.num_snapshots)
        snapshots = [spec.memory.init(len(spec.layers), kept) for spec in pools if not spec.memory.is_paged]
        return Cache(found, groups, tuple(pool for pool in snapshots if isinstance(pool, SlotState)))

    def batch_of(self, number: int, batch: PageBatchInfo) -> PageBatchInfo:
        """A step's batch for the layers of one pool, with what they have in common."""
        return self.pools[number].planned(batch.in_group(self.groups[number]))

    def with_pool(self, number: int, pool: Pool) -> "Cache":
        """The cache with a new value of one pool."""
        return self._with((*self.pools[:number], pool, *self.pools[number + 1 :]))

    def _with(self, pools: Sequence[Pool]) -> "Cache":
        return dataclasses.replace(self, pools=tuple(pools))

    @property
    def nbytes(self) -> int:
        """Bytes of all pools and snapshots."""
        return sum(pool.nbytes for pool in (*self.pools, *self.snapshots))

    def zero(self) -> "Cache":
        """The same cache with every byte cleared."""
        zeros = self._with([pool.zero() for pool in self.pools])
        return zeros.with_snapshots(tuple(pool.zero() for pool in self.snapshots))

    # Slots

    @property
    def has_slots(self) -> bool:
        """Whether the entries of a pool are slots."""
        return any(not pool.is_paged for pool in self.pools)

    def copy_slots(self, source: Array, target: Array) -> "Cache":
        """`Pool.copy` in all pools of slots: all pairs at once, so that a slot may be source and target."""
        return self._with([pool if pool.is_paged else pool.copy(source, target) for pool in self.pools])

    def with_snapshots(self, snapshots: tuple[SlotState, ...]) -> "Cache":
        """The cache with other snapshots, or with none: what does not use them need not carry them."""
        return dataclasses.replace(self, snapshots=snapshots)

    def keep_states(self, slots: Array, snapshots: Array) -> "Cache":
        """Copy the states of `slots` to `snapshots`, i32[n] each; pairs with an absent snapshot are ignored."""
        pairs = zip(self.snapshots, self._states, strict=True)
        return self.with_snapshots(tuple(kept.copy_from(pool, slots, snapshots) for kept, pool in pairs))

    def restore_states(self, snapshots: Array, slots: Array) -> "Cache":
        """Copy the states in `snapshots` to `slots`, i32[n] each; pairs with an absent slot are ignored."""
        kept = iter(self.snapshots)

        def restored(pool: Pool) -> Pool:
            return pool.copy_from(next(kept), snapshots, slots) if isinstance(pool, SlotState) else pool

        return self._with([restored(pool) for pool in self.pools])

    @property
    def _states(self) -> list[SlotState]:
        return [pool for pool in self.pools if isinstance(pool, SlotState)]

    # Pages

    def copy_pages(self, pairs: Sequence[tuple[Array, Array]]) -> "Cache":
        """`Pool.copy` in all paged pools: for each numbering, source and target pages, i32[n] each."""
        copied = [pool.copy(*pairs[group]) if pool.is_paged else pool for pool, group in self._numbered()]
        return self._with(copied)

    def take_pages(self, pages: Array, group: int = 0) -> tuple[Any, ...]:
        """`Pool.take` of the paged pools of one numbering, one entry each."""
        return tuple(pool.take(pages) for pool in self.paged(group))

    def put_pages(self, pages: Array, contents: tuple[Any, ...], group: int = 0) -> "Cache":
        """Store what `take_pages` gave into `pages`."""
        own = iter(contents)
        is_own = [pool.is_paged and number == group for pool, number in self._numbered()]
        return self._with(
            [pool.put(pages, next(own)) if o else pool for pool, o in zip(self.pools, is_own, strict=True)]
        )

    def paged(self, group: int) -> tuple[Pool, ...]:
        """The paged pools of one numbering."""
        return tuple(pool for pool, number in self._numbered() if pool.is_paged and number == group)

    def _numbered(self) -> list[tuple[Pool, int]]:
        return list(zip(self.pools, self.groups, strict=True))
