"""`Memory`: what one layer remembers of each sequence, a frozen value that its mixer block names.

Layers with equal memories share a pool (`DecoderConfig.pools`), and `Cache` holds the pools of a model. A new kind of
memory is a subclass of `Memory` here and a subclass of `Pool` in a module next to this one; the contract of both is
below and in `cache/pool.py`.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.cache.pool import Pool
from levanter_infer.cache.slot_state import SlotState
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.call import PoolShape
from levanter_infer.kernels.xla.backend import XLA


@dataclass(frozen=True)
class PoolSizes:
    """Sizes and storage that the pools of one cache share; each kind of memory uses those that concern it."""

    num_pages: int
    """Pages of the tables."""
    page_size: int
    """Tokens per page: one number for all pools."""
    num_slots: int
    """Sequences of the tables: entries of a pool whose entries are slots."""
    num_snapshots: int = dataclasses.field(default=0, kw_only=True)
    """States of fixed size that prefix caching keeps."""
    dtype: jnp.dtype
    """Dtype of the stored keys and values."""
    backend: Backend = XLA
    """Stores, writes and reads keys and values."""
    local_heads: Callable[[int], int] = int
    """Key and value heads of one device, from those of the model."""
    windows: tuple[tuple[int, int], ...] = ()
    """(window, pages) of each sliding window whose layers have pages of their own."""

    def group_of(self, memory: "Memory") -> int:
        """The numbering of the pages of a memory's pool: 0 is the tables', `i` that of `windows[i - 1]`."""
        return next((i + 1 for i, (window, _) in enumerate(self.windows) if window == memory.window), 0)

    def pages_of(self, group: int) -> int:
        """Pages of a pool of this numbering."""
        return self.windows[group - 1][1] if group else self.num_pages


class Memory(ABC):
    """A kind of memory of one layer, of each sequence. Subclasses are frozen dataclasses: equal values share a pool."""

    is_paged: ClassVar[bool] = True
    """Whether the entries of its pool are pages; else they are slots (`Pool.is_paged`)."""
    window: int | None = None
    """A token is read by the `window` queries from its own position on, and by none later; None: by all."""

    @abstractmethod
    def init(self, num_layers: int, sizes: PoolSizes) -> Pool:
        """The pool of `num_layers` layers with this memory, full of zeros."""

    def entry_bytes(self, num_layers: int, sizes: PoolSizes) -> int:
        """Bytes of one entry of that pool (a page, or a slot) in all its layers, on one device."""
        one = dataclasses.replace(sizes, num_pages=1, num_slots=1, windows=())
        return jax.eval_shape(lambda: self.init(num_layers, one)).nbytes


@dataclass(frozen=True)
class FullKv(Memory):
    """Keys and values of every token, for attention that sees all of them."""

    kv_heads: int
    head_dim: int

    def init(self, num_layers: int, sizes: PoolSizes) -> KvPages:
        heads = sizes.local_heads(self.kv_heads)
        num_pages = sizes.pages_of(sizes.group_of(self))
        shape = PoolShape(num_layers, num_pages, sizes.page_size, heads, self.head_dim, jnp.dtype(sizes.dtype))
        return KvPages.init(shape, sizes.backend)


@dataclass(frozen=True)
class Latents(Memory):
    """The latent of every token and the key that all heads share, for latent attention (`layers/latent_attention.py`).

    Entries are pages of the same tokens as those of `FullKv`. Every device of a mesh that shards heads has all of them.
    """

    size: int
    """Numbers of a token: its latent and that key, and its index key."""
    index_dim: int = 0
    """Numbers of the index key, by which an indexer chooses keys (`layers/indexer.py`); 0: there is none."""

    def init(self, num_layers: int, sizes: PoolSizes) -> KvPages:
        heads, dtype = sizes.local_heads(1), jnp.dtype(sizes.dtype)
        pages = num_layers, sizes.num_pages, sizes.page_size
        shape = PoolShape(*pages, heads, self.size, dtype, is_latent=True, index_dim=self.index_dim)
        return KvPages.init(shape, sizes.backend)


@dataclass(frozen=True)
class WindowKv(FullKv):
    """Keys and values of the last `window` tokens, for sliding-window attention."""

    window: int = dataclasses.field()  # without the default of `Memory`


@dataclass(frozen=True)
class FixedState(Memory):
    """Arrays of a fixed size for each sequence, whatever its length: recurrences and short convolutions."""

    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each array in one layer."""

    is_paged = False

    def init(self, num_layers: int, sizes: PoolSizes) -> SlotState:
        return SlotState.init(num_layers, sizes.num_slots, dict(self.sizes))
