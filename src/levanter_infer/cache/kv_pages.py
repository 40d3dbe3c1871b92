"""`KvPages`: the one pool that stores the keys and values of all layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import Array

from levanter_infer.axes import HEAD_SIZE, KV_HEADS, KV_PAIR, LAYERS, PAGE, PAGE_OFFSET, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.named import full, replace
from levanter_infer.kernels import int8
from levanter_infer.kernels.cpu.bindings import place_tokens
from levanter_infer.kernels.rules import decode_bits
from levanter_infer.kernels.tpu.kv_write import write_kv
from levanter_infer.kernels.tpu.pool import LANES, TpuPool

_BITS = {1: jnp.uint8, 2: jnp.uint16}


class KvPages(eqx.Module):
    """Keys and values, `[layers, page, page_offset, kv_pair, head_size]`, heads interleaved k0, v0, k1, v1, …; for the
    attention of TPUs `[layers, page, kv_pair, page_offset, head_size]`, where kv_pair counts the slabs and head_size
    the 128 lanes of `kernels.tpu_pool`.

    The memory layout is decided in `init` and known to nobody else but the attention implementations, which receive
    the pool whole, with a layer index. Pages of int8 have the code of each head's scale behind its numbers
    (`kernels.int8`), or in a slab of their own. On a CPU the 16- and 8-bit floats are stored as integers of their
    width, because XLA would otherwise convert the whole pool at every scatter (docs/decisions/0006).
    """

    pages: NamedArray
    dtype: jnp.dtype = eqx.field(static=True)
    """What the stored bits mean."""
    tpu_pool: TpuPool | None = eqx.field(static=True, default=None)
    """How the pool lies, if it lies as a TPU reads it."""

    @staticmethod
    def init(
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype,
        as_bits: bool,
        for_tpu: bool = False,
    ) -> "KvPages":
        """A pool of zeros.

        Args:
            as_bits: store narrow floats as integers of their width.
            for_tpu: lay it out for the attention of TPUs (`kernels.TPU_POOL`), which takes no bits.
        """
        dtype = jnp.dtype(dtype)
        if for_tpu:
            if as_bits:
                raise ValueError(
                    "as_bits: got True with for_tpu, expected False; a TPU's pool holds the numbers themselves"
                )
            pool = TpuPool(num_kv_heads, head_size, scaled=dtype == jnp.int8)
            axes = (
                (LAYERS, num_layers),
                (PAGE, num_pages),
                (KV_PAIR, pool.slabs),
                (PAGE_OFFSET, page_size),
                (HEAD_SIZE, LANES),
            )
            return KvPages(pages=full(axes, 0, dtype), dtype=dtype, tpu_pool=pool)
        stored = _BITS.get(dtype.itemsize, dtype) if as_bits and jnp.issubdtype(dtype, jnp.floating) else dtype
        axes = (
            (LAYERS, num_layers),
            (PAGE, num_pages),
            (PAGE_OFFSET, page_size),
            (KV_PAIR, 2 * num_kv_heads),
            (HEAD_SIZE, head_size + (dtype == jnp.int8)),
        )
        return KvPages(pages=full(axes, 0, stored), dtype=dtype)

    @staticmethod
    def token_values(num_kv_heads: int, head_size: int, dtype, *, for_tpu: bool = False) -> int:
        """Numbers of `dtype` that a layer of such a pool stores for a token."""
        scaled = jnp.dtype(dtype) == jnp.int8
        if for_tpu:
            return TpuPool(num_kv_heads, head_size, scaled).slabs * LANES
        return 2 * num_kv_heads * (head_size + scaled)

    @property
    def num_layers(self) -> int:
        return self.pages.axis_size(LAYERS)

    @property
    def num_pages(self) -> int:
        return self.pages.axis_size(PAGE)

    def write(self, layer: Array, batch: PageBatchInfo, k: NamedArray, v: NamedArray) -> "KvPages":
        """Store the step's new keys and values of one layer, all tokens at once.

        Args:
            layer: i32[], may be traced.
            k, v: [token, kv_head, head_size], already rotated.
        """
        order = (TOKEN, KV_HEADS, HEAD_SIZE)
        page, offset = batch.pages_and_offsets()
        if self.tpu_pool is not None:
            sides = [side.rearrange(order).array for side in (k, v)]
            # Under a `shard_map` these are the heads of one shard, and `tpu_pool` speaks of all.
            pool = TpuPool(k.axis_size(KV_HEADS), k.axis_size(HEAD_SIZE), self.tpu_pool.scaled)
            sides = sides if pool.scaled else [self._rounded(side) for side in sides]
            packed, dests = pool.pack(*sides), batch.new_token_dests.array

            def scatter(pages):
                return pages.at[layer, page, :, offset].set(packed, mode="drop")

            written = jax.lax.platform_dependent(
                self.pages.array, tpu=lambda pages: write_kv(pages, layer, packed, dests), default=scatter
            )
            return replace(self, pages=written)
        pair = jnp.stack([k.rearrange(order).array, v.rearrange(order).array], axis=2)
        flat = pair.reshape(pair.shape[0], 2 * pair.shape[1], pair.shape[3])
        pages = self.pages.array.at[layer, page, offset].set(self._encode(flat), mode="drop")
        return replace(self, pages=pages)

    def place(
        self,
        layer: Array,
        batch: PageBatchInfo,
        q: Array,
        k: NamedArray,
        v: NamedArray,
        rope: tuple[NamedArray, NamedArray],
        norms: tuple[tuple[Array, float], ...] | None,
        isa: str | None = None,
    ) -> tuple[Array, "KvPages"]:
        """As `write`, but norms and rotates first, in the C++ kernels.

        Args:
            q: f32[T, Hq, D], not yet rotated.
            k, v: [token, kv_head, head_size], neither.
            rope: cos, sin of each token.
            norms: weight [layers, D] and eps of q's norm and of k's; None for no norms.
            isa: instruction set, one of `kernels.cpu.isas`; None for the widest.
        Returns: q as attention takes it, and the pool.
        """
        order, f32 = (TOKEN, KV_HEADS, HEAD_SIZE), jnp.float32
        cos, sin = (side.rearrange((TOKEN, HEAD_SIZE)).array for side in rope)
        keys, values = (side.rearrange(order).array.astype(f32) for side in (k, v))
        dests = batch.new_token_dests.array
        pool = self.pages.array
        q, pages = place_tokens(
            q, keys, values, pool, layer=layer, dests=dests, cos=cos, sin=sin, norms=norms, isa_name=isa
        )
        return q, replace(self, pages=pages)

    def copy_pages(self, source: Array, target: Array) -> "KvPages":
        """Copy whole pages, in all layers: `source[i]` to `target[i]`, i32[n]; pairs of none are ignored."""

        def copy_layer(layer, pages):
            return pages.at[layer, target].set(pages.at[layer, source].get(mode="clip"), mode="drop")

        # All layers at once would need room for everything that is copied.
        return replace(self, pages=jax.lax.fori_loop(0, self.num_layers, copy_layer, self.pages.array))

    def values_at(self, pages: Array, offsets: Array) -> Array:
        """Keys and values of stored tokens, all layers, f32[layers, n, 2 * kv_heads, head_size], heads interleaved.

        Args:
            pages, offsets: i32[n], where each token stands; anything where a page is none.
        """
        pool = self.pages.array
        if self.tpu_pool is None:
            return decode_bits(pool.at[:, pages, offsets].get(mode="clip"), self.dtype)
        tokens = pool.at[:, pages, :, offsets].get(mode="clip").swapaxes(0, 1)
        return self.tpu_pool.unpack(tokens).astype(jnp.float32)

    def take(self, pages: Array) -> Array:
        """Contents of `pages`, i32[n], in all layers: `[layers, n, …]` as stored. Anything where a page is none."""
        return self.pages.array.at[:, pages].get(mode="clip")

    def put(self, pages: Array, contents: Array) -> "KvPages":
        """Store what `take` gave into `pages`, i32[n]; entries of none are ignored."""
        return replace(self, pages=self.pages.array.at[:, pages].set(contents, mode="drop"))

    def zero(self) -> "KvPages":
        """The same pool with every byte cleared, for debugging and for those who must wipe."""
        return replace(self, pages=jnp.zeros_like(self.pages.array))

    def _encode(self, values: Array) -> Array:
        if self.dtype == jnp.int8:
            return jnp.concatenate(int8.encode(values), axis=-1)
        values, stored = self._rounded(values), self.pages.array.dtype
        return values if stored == values.dtype else jax.lax.bitcast_convert_type(values, stored)

    def _rounded(self, values: Array) -> Array:
        """In the pool's dtype. 8-bit floats have no infinity, and a conversion makes NaN of what is beyond their
        largest number; it is stored as that number."""
        if self.dtype == jnp.float8_e4m3fn:
            most = float(jnp.finfo(self.dtype).max)
            values = jnp.clip(values, -most, most)
        return values.astype(self.dtype)
