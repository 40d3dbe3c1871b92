"""`Cache`: everything that a model remembers of all sequences, one pool for each kind of memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.memory import Memory, PoolSizes
from levanter_infer.cache.pool import Pool


@dataclass(frozen=True)
class PoolSpec:
    """The layers that share a pool."""

    memory: Memory
    layers: tuple[int, ...]
    """Numbers of the layers, ascending; the pool has them in this order."""


def in_layer_order(pools: Sequence[PoolSpec], parts: Sequence[Array]) -> Array:
    """Arrays of the layers of each pool, [layers, …], as one of all layers in their order. Requires: equal shapes."""
    order = [layer for spec in pools for layer in spec.layers]
    found = jnp.concatenate(list(parts))
    return found if order == sorted(order) else found[jnp.argsort(jnp.asarray(order))]


class Cache(eqx.Module):
    """The pools of one model. The state of a generation carries it whole (`GenState.cache`)."""

    pools: tuple[Pool, ...]
    """As `DecoderConfig.pools`."""
    groups: tuple[int, ...] = eqx.field(static=True)
    """The numbering of each pool's pages: 0 is that of the tables, `i` that of `DecodeState.windows[i - 1]`."""

    @staticmethod
    def init(pools: Sequence[PoolSpec], sizes: PoolSizes) -> "Cache":
        """Pools of zeros."""
        found = tuple(spec.memory.init(len(spec.layers), sizes) for spec in pools)
        return Cache(found, tuple(sizes.group_of(spec.memory) for spec in pools))

    def with_pool(self, number: int, pool: Pool) -> "Cache":
        """The cache with a new value of one pool."""
        return self._with((*self.pools[:number], pool, *self.pools[number + 1 :]))

    def _with(self, pools: Sequence[Pool]) -> "Cache":
        return Cache(tuple(pools), self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in self.pools)

    def zero(self) -> "Cache":
        """The same cache with every byte cleared."""
        return self._with([pool.zero() for pool in self.pools])

    # Slots

    @property
    def has_slots(self) -> bool:
        """Whether the entries of a pool are slots."""
        return any(not pool.is_paged for pool in self.pools)

    def copy_slots(self, source: Array, target: Array) -> "Cache":
        """`Pool.copy` in all pools of slots: all pairs at once, so that a slot may be source and target."""
        return self._with([pool if pool.is_paged else pool.copy(source, target) for pool in self.pools])

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
