"""What one layer remembers of each sequence, as frozen values: a mixer block names its own (`AttentionBlock.memory`).

Layers with equal memories share a pool (`DecoderConfig.pools`), and `Cache` holds the pools of a model. A new kind of
memory is a subclass of `Memory` here and a subclass of `Pool` in a module next to this one; the contract of both is
below and in `cache/pool.py`.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.cache.pool import Pool
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.call import PoolShape
from levanter_infer.kernels.xla.backend import XLA


@dataclass(frozen=True)
class PoolSizes:
    """Sizes and storage that the pools of one cache share; each kind of memory uses those that concern it."""

    num_pages: int
    page_size: int
    """Tokens per page: one number for all pools."""
    num_slots: int
    """Sequences of the tables: entries of a pool whose entries are slots."""
    dtype: jnp.dtype
    """Dtype of the stored keys and values."""
    backend: Backend = XLA
    """Stores, writes and reads keys and values."""
    local_heads: Callable[[int], int] = int
    """Key and value heads of one device, from those of the model."""


class Memory(ABC):
    """What one layer remembers of each sequence. Subclasses are frozen dataclasses: equal values share a pool."""

    window: int | None = None
    """A token is read by the `window` queries from its own position on, and by none later; None: by all."""

    @abstractmethod
    def init(self, num_layers: int, sizes: PoolSizes) -> Pool:
        """The pool of `num_layers` layers with this memory, full of zeros."""

    def entry_bytes(self, num_layers: int, sizes: PoolSizes) -> int:
        """Bytes of one entry of that pool (a page, or a slot) in all its layers, on one device."""
        one = dataclasses.replace(sizes, num_pages=1, num_slots=1)
        return jax.eval_shape(lambda: self.init(num_layers, one)).nbytes


@dataclass(frozen=True)
class FullKv(Memory):
    """Keys and values of every token, for attention that sees all of them."""

    kv_heads: int
    head_dim: int

    def init(self, num_layers: int, sizes: PoolSizes) -> KvPages:
        heads = sizes.local_heads(self.kv_heads)
        shape = PoolShape(num_layers, sizes.num_pages, sizes.page_size, heads, self.head_dim, jnp.dtype(sizes.dtype))
        return KvPages.init(shape, sizes.backend)


@dataclass(frozen=True)
class Latents(Memory):
    """The latent of every token and the key that all heads share, for latent attention (`layers/latent_attention.py`).

    Entries are pages of the same tokens as those of `FullKv`. Every device of a mesh that shards heads has all of them.
    """

    size: int
    """Numbers of a token: its latent and that key."""

    def init(self, num_layers: int, sizes: PoolSizes) -> KvPages:
        heads, dtype = sizes.local_heads(1), jnp.dtype(sizes.dtype)
        shape = PoolShape(num_layers, sizes.num_pages, sizes.page_size, heads, self.size, dtype, is_latent=True)
        return KvPages.init(shape, sizes.backend)


@dataclass(frozen=True)
class WindowKv(FullKv):
    """Keys and values of the last `window` tokens, for sliding-window attention."""

    window: int = dataclasses.field()  # without the default of `Memory`
