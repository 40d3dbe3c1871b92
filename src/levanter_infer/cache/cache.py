"""`Cache`: everything that a model remembers of all sequences, one pool for each kind of memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import replace
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

    @staticmethod
    def init(pools: Sequence[PoolSpec], sizes: PoolSizes) -> "Cache":
        """Pools of zeros."""
        return Cache(tuple(spec.memory.init(len(spec.layers), sizes) for spec in pools))

    def with_pool(self, number: int, pool: Pool) -> "Cache":
        """The cache with a new value of one pool."""
        return Cache((*self.pools[:number], pool, *self.pools[number + 1 :]))

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in self.pools)

    def zero(self) -> "Cache":
        """The same cache with every byte cleared."""
        return replace(self, pools=tuple(pool.zero() for pool in self.pools))

    # Pages

    def copy_pages(self, source: Array, target: Array) -> "Cache":
        """`Pool.copy` in all paged pools."""
        return self._paged(lambda pool, _: pool.copy(source, target))

    def take_pages(self, pages: Array) -> tuple[Any, ...]:
        """`Pool.take` of all paged pools, one entry each."""
        return tuple(pool.take(pages) for pool in self.pools if pool.is_paged)

    def put_pages(self, pages: Array, contents: tuple[Any, ...]) -> "Cache":
        """Store what `take_pages` gave into `pages`."""
        return self._paged(lambda pool, number: pool.put(pages, contents[number]))

    def _paged(self, change: Callable[[Pool, int], Pool]) -> "Cache":
        """`change(pool, number)` in place of each paged pool, numbered among those."""
        numbers = iter(range(len(self.pools)))
        return Cache(tuple(change(pool, next(numbers)) if pool.is_paged else pool for pool in self.pools))
