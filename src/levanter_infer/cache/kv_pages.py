"""`KvPages`: the pool of layers that remember keys and values."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import DATA, HEAD_SIZE, KV_HEADS, KV_PAIR, LAYERS, PAGE, PAGE_OFFSET, SEQ_PAGE, TOKEN
from levanter_infer.cache.arrays import replace
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.pool import Pool
from levanter_infer.kernels import scopes
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.call import KvWrite, PoolShape, Rotation
from levanter_infer.kernels.xla.backend import XLA

_AXES = (LAYERS, PAGE, PAGE_OFFSET, KV_PAIR, HEAD_SIZE)


class KvPages(Pool):
    """Keys and values of some layers, in pages, with the backend that reads and writes them.

    The backend decides the memory layout in `init`: the order of the axes layers, page, page_offset, kv_pair and
    head_size, what the last two count, and the stored dtype. Kernels receive the full pool and a layer index in it.
    """

    pages: NamedArray
    dtype: jnp.dtype = eqx.field(static=True)
    """Dtype of the stored numbers, in whatever form."""
    num_kv_heads: int = eqx.field(static=True)
    head_size: int = eqx.field(static=True)
    backend: Backend = eqx.field(static=True)
    is_latent: bool = eqx.field(static=True, default=False)
    """Whether tokens store latents (`PoolShape.is_latent`)."""
    index_dim: int = eqx.field(static=True, default=0)
    """`PoolShape.index_dim`."""

    @staticmethod
    def init(shape: PoolShape, backend: Backend = XLA) -> "KvPages":
        """A pool of zeros."""
        array = backend.init_pool(shape)
        names = [_AXES[axis] for axis in backend.pool_order]
        axes = tuple(Axis(name, size) for name, size in zip(names, array.shape, strict=True))
        sizes = jnp.dtype(shape.dtype), shape.kv_heads, shape.head_dim
        return KvPages(NamedArray(array, axes), *sizes, backend, shape.is_latent, shape.index_dim)

    @property
    def num_layers(self) -> int:
        return self.pages.axis_size(LAYERS)

    @property
    def num_pages(self) -> int:
        return self.pages.axis_size(PAGE)

    @property
    def num_entries(self) -> int:
        return self.num_pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.pages.axis_size(PAGE_OFFSET)

    @property
    def shape(self) -> PoolShape:
        """Sizes of the pool."""
        pages = self.num_layers, self.num_pages, self.page_size
        return PoolShape(*pages, self.num_kv_heads, self.head_size, self.dtype, self.is_latent, self.index_dim)

    def planned(self, batch: PageBatchInfo) -> PageBatchInfo:
        """With the plan of the layers' writes."""
        plan = self.backend.write_plan(self.pages.array, batch.new_token_dests.array)
        return dataclasses.replace(batch, write_plan=plan)

    def write(self, layer: Array, batch: PageBatchInfo, k: NamedArray, v: NamedArray) -> "KvPages":
        """Store the step's new keys and values of one layer, all tokens at once.

        Args:
            layer: i32[], may be traced.
            k, v: [token, kv_head, head_size], already rotated.
        """
        return self._written(self._write_of(layer, batch, *_heads(k, v)))[1]

    def write_latents(self, layer: Array, batch: PageBatchInfo, latents: Array) -> "KvPages":
        """As `write`, into a pool of latents. Args: latents: [T, kv_head, head_size], their keys rotated."""
        assert self.is_latent, "a pool of keys and values"
        return self._written(self._write_of(layer, batch, latents, None))[1]

    def rotates(self, rotation: Rotation, q: Array, k: NamedArray) -> bool:
        """Whether `rotate_and_write` takes these. Requires: the backend fuses a rotation. Args: as its own."""
        return self.backend.rotates(rotation, q, k.rearrange((TOKEN, KV_HEADS, HEAD_SIZE)).array, self.dtype)

    def rotate_and_write(
        self, layer: Array, batch: PageBatchInfo, q: Array, k: NamedArray, v: NamedArray, rotation: Rotation
    ) -> tuple[Array, "KvPages"]:
        """As `write`, but norms and rotates queries and keys first. Requires: `rotates`.

        Args:
            q: [T, Hq, D], not yet rotated.
            k, v: [token, kv_head, head_size], not rotated either.
        Returns: q as attention takes it, and the pool.
        """
        write = self._write_of(layer, batch, *_heads(k, v))
        rotated, kv = self._written(dataclasses.replace(write, q=q, rotation=rotation))
        assert rotated is not None
        return rotated, kv

    def _write_of(self, layer: Array, batch: PageBatchInfo, k: Array, v: Array | None) -> KvWrite:
        page, offset = batch.pages_and_offsets()
        dests, plan = batch.new_token_dests.array, batch.write_plan
        return KvWrite(k, v, layer, dests, page, offset, self.dtype, plan=plan, index_dim=self.index_dim)

    def _written(self, write: KvWrite) -> tuple[Array | None, "KvPages"]:
        with jax.named_scope(scopes.KV_WRITE):
            q, pages = self.backend.write_kv(self.pages.array, write)
        return q, replace(self, pages=pages)

    def no_choice(self, batch: PageBatchInfo, num_chosen: int) -> Array:
        """Zeros in the form of a choice of keys (`Backend.choose_keys`), with which the loop over layers begins. They
        are not read: the first layer with sparse attention has an indexer."""
        num_tokens, max_pages = batch.tokens.array.shape[0], batch.page_indices.axis_size(SEQ_PAGE)
        choice = self.backend.choice_type(num_tokens, max_pages, self.page_size, num_chosen, self.dtype)
        return jnp.zeros(choice.shape, choice.dtype)

    def copy(self, source: Array, target: Array) -> "KvPages":
        """Copy whole pages, in all layers: `source[i]` to `target[i]`, i32[n]; pairs of none are ignored."""
        return replace(self, pages=self.backend.copy_pages(self.pages.array, source, target))

    def values_at(self, pages: Array, offsets: Array, rank: int = 0) -> Array:
        """Keys and values of stored tokens, all layers, f32[layers, n, 2 * kv_heads, head_size], heads interleaved; of
        latents f32[layers, n, kv_heads, head_size]. On a mesh the heads are those of all devices, copies included.

        Requires: the pool is no tracer, and this process holds the rank's part of it.

        Args:
            pages, offsets: i32[n], where each token is stored.
            rank: the data-parallel rank that stores them.
        """
        names = [axis.name for axis in self.pages.axes]
        ranks, head, of_devices = DATA in names, names.index(KV_PAIR), {}
        for shard in self.pages.array.addressable_shards:
            if not ranks or shard.index[0] == slice(rank, rank + 1):
                array = shard.data[0] if ranks else shard.data
                heads = self.backend.read_kv(array, self.shape, *jax.device_put((pages, offsets), shard.device))
                of_devices[shard.index[head].start or 0] = np.asarray(heads)
        return jnp.asarray(np.concatenate([of_devices[start] for start in sorted(of_devices)], axis=2))

    def by_head(self, values: Array) -> Array:
        """Keys and values [layers, n, kv_pair, head_size] as [layers, n, kv_heads, 2, head_size]; 1 of latents."""
        layers, count, _, size = values.shape
        return values.reshape(layers, count, -1, 1 if self.is_latent else 2, size)

    def take(self, entries: Array) -> Array:
        """As `Pool.take`: `[layers, n, …]` as stored."""
        return self.pages.array.at[:, entries].get(mode="clip")

    def put(self, entries: Array, contents: Array) -> "KvPages":
        return replace(self, pages=self.pages.array.at[:, entries].set(contents, mode="drop"))


def _heads(k: NamedArray, v: NamedArray) -> tuple[Array, Array]:
    """Keys and values as `KvWrite` takes them."""
    keys, values = (side.rearrange((TOKEN, KV_HEADS, HEAD_SIZE)).array for side in (k, v))
    return keys, values
