"""`Pool`: what the layers of one kind remember of all sequences."""

from abc import abstractmethod
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.batch_info import PageBatchInfo


class Pool(eqx.Module):
    """The storage of the layers with one kind of memory (`cache/memory.py`), for all sequences.

    A pool has entries, which are pages or slots (`is_paged`). Page `p` of every paged pool of a group holds the same
    tokens: the tables know pages, never pools. Entry `i` of a pool of slots belongs to the sequence in slot `i`.

    A mixer gets the pool whole with the number of its layer in it, reads and writes it, and returns it; the layer loop
    carries all pools and never slices a layer out of one. Arrays are named (`axes.py`), so that a mesh shards them.

    - `init` is the memory's (`Memory.init`).
    - Reset: the tables forget all sequences and the pool is not touched, so a mixer never reads what the sequence
      before left in an entry: nothing at or beyond `num_computed` in a page, nothing at all at position 0.
    - Copy on write and forks: `copy`, of whole entries in all layers.
    - KV offload: `take` and `put`, which move whole entries to host memory and back, to the bit.
    - Sizes: `nbytes` here, and `Memory.entry_bytes` before a pool is made.
    - Invariants of entries belong to the tables that hand them out (`decode/invariants.py`).
    """

    is_paged: ClassVar[bool] = True
    """Whether the entries are pages; else they are slots."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Layers that share the pool."""

    @property
    @abstractmethod
    def num_entries(self) -> int:
        """Pages, or slots; an absent entry is this number."""

    @abstractmethod
    def copy(self, source: Array, target: Array) -> Self:
        """Copy entries in all layers: `source[i]` to `target[i]`, i32[n]; pairs of absent entries are ignored."""

    @abstractmethod
    def take(self, entries: Array) -> Any:
        """Contents of `entries`, i32[n], in all layers; anything where an entry is absent."""

    @abstractmethod
    def put(self, entries: Array, contents: Any) -> Self:
        """Store what `take` gave into `entries`, i32[n]; absent ones are ignored."""

    def planned(self, batch: PageBatchInfo) -> PageBatchInfo:
        """A step's batch with what the layers of this pool derive from it alike."""
        return batch

    def zero(self) -> Self:
        """The same pool with every byte cleared, for debugging and for callers that must wipe."""
        return jax.tree.map(jnp.zeros_like, self)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))
