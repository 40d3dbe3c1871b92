"""Writing new keys and values into a TPU's pool.

An async copy moves whole tiles of memory, and a tile holds several tokens. So the tokens that go to one tile-high
*stretch* of a page are written together: the stretch is read into VMEM, changed, and stored back. Stretches take turns
in a ring of buffers: while one is changed, others are on their way in or out.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.tpu.pool import LANES

_TOKENS = 128
"""New tokens per grid step, at most."""
_RING_BYTES = 2**19
"""Bytes of the stretches in the ring, of which there are at least 8: half of them are on their way in, which hides the
latency of HBM if they are many."""
_MOST_SLOTS = 32


@dataclass(frozen=True)
class _Sizes:
    num_pages: int
    """Pages per layer."""
    page_size: int
    rows: int
    """Tokens per stretch."""
    block: int
    """New tokens per grid step."""
    slots: int
    """Stretches in the ring; a power of two."""


class _Scalars(NamedTuple):
    dests: Any
    """SMEM i32[T]"""
    stretches: Any
    """SMEM i32[T]: of each stretch its first token, counted from the first of the grid step, and from bit 16 on how
    many tokens go to it. Those of a grid step begin where its tokens do."""
    counts: Any
    """SMEM i32[grid steps], stretches of each."""
    layer: Any
    """SMEM i32[1]"""


class _Scratch(NamedTuple):
    buf: Any
    """VMEM [slots, slabs, rows, 128], the pool's dtype."""
    in_sem: Any
    """DMA semaphores [slots]."""
    out_sem: Any
    """DMA semaphores [slots]."""


def write_kv(pages: Array, layer: Array, tokens: Array, dests: Array, *, interpret: Any = False) -> Array:
    """Store the keys and values of new tokens, in place where the pool is donated.

    Args:
        pages: [layers, P, slabs, page_size, 128].
        layer: i32[].
        tokens: [T, slabs, 128] as `TpuPool.pack` gives them, in the pool's dtype.
        dests: i32[T], `page * page_size + page offset`; P * page_size or more for tokens that are not stored. Tokens of
            one sequence are adjacent, in the order of their positions, and no two tokens have the same destination.
        interpret: as `pallas_call` takes it.
    Returns: the pool.
    Raises: ValueError for a page size that is not whole tiles.
    """
    num_pages, slabs, page_size = pages.shape[1:4]
    rows = min(page_size, 32 // pages.dtype.itemsize)
    if page_size % rows:
        raise ValueError(f"page_size: got {page_size}, expected a multiple of {rows} or less for {pages.dtype}")
    block = min(_TOKENS, tokens.shape[0])
    padding = -tokens.shape[0] % block
    # A row of 32-bit elements can be read by itself.
    wide = jnp.float32 if jnp.issubdtype(pages.dtype, jnp.floating) else jnp.int32
    tokens = jnp.pad(tokens.astype(wide), ((0, padding), (0, 0), (0, 0)))
    dests = jnp.pad(dests, (0, padding), constant_values=num_pages * page_size)
    dma, slots = pltpu.SemaphoreType.DMA, _slots(slabs * rows * LANES * pages.dtype.itemsize)
    sizes = _Sizes(num_pages, page_size, rows, block, slots)
    return pl.pallas_call(
        functools.partial(_write, sizes=sizes),
        out_shape=jax.ShapeDtypeStruct((pages.shape[0] * num_pages, *pages.shape[2:]), pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tokens.shape[0] // block,),
            in_specs=[
                pl.BlockSpec((block, slabs, LANES), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                _Scratch(
                    buf=pltpu.VMEM((slots, slabs, rows, LANES), pages.dtype),
                    in_sem=dma((slots,)),
                    out_sem=dma((slots,)),
                )
            ],
        ),
        input_output_aliases={5: 0},
        # Destinations beyond the pool are skipped.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, disable_semaphore_checks=True),
        name="write_kv",
        interpret=interpret,
    )(
        _Scalars(dests, *_stretches(dests, sizes), layer.reshape(1)), tokens, pages.reshape(-1, *pages.shape[2:])
    ).reshape(pages.shape)


def _slots(stretch_bytes: int) -> int:
    slots = _MOST_SLOTS
    while slots > 8 and slots * stretch_bytes > _RING_BYTES:
        slots //= 2
    return slots


def _stretches(dests: Array, sizes: _Sizes) -> tuple[Array, Array]:
    """`_Scalars.stretches` and `counts`. The same in every layer, so that XLA computes them once in a step."""
    dests = dests.reshape(-1, sizes.block)
    is_stored = dests < sizes.num_pages * sizes.page_size
    before = jnp.pad(dests[:, :-1], ((0, 0), (1, 0)), constant_values=-2)
    begins = is_stored & ((dests != before + 1) | (dests % sizes.rows == 0))
    number = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    entry = jnp.arange(sizes.block, dtype=jnp.int32)[None, :, None]
    first = jnp.sum(number[:, None, :] <= entry, axis=2, dtype=jnp.int32)
    count = jnp.sum((number[:, None, :] == entry + 1) & is_stored[:, None, :], axis=2, dtype=jnp.int32)
    return (first | (count << 16)).reshape(-1), number[:, -1]


def _div(x, size: int):
    """x // size for x >= 0."""
    return x >> (size.bit_length() - 1) if size & (size - 1) == 0 else jax.lax.div(x, jnp.int32(size))


def _write(scalars: _Scalars, new, _, pool, scratch: _Scratch, *, sizes: _Sizes):
    buf, in_sem, out_sem = scratch
    page_size, rows, slots = sizes.page_size, sizes.rows, sizes.slots
    first_token, count = pl.program_id(0) * sizes.block, scalars.counts[pl.program_id(0)]
    first_page, ahead = scalars.layer[0] * sizes.num_pages, slots // 2

    def slot_of(stretch):
        return stretch & (slots - 1)

    def first_of(stretch):
        """The first token of a stretch in the grid step, its destination, and how many there are."""
        entry = scalars.stretches[first_token + stretch]
        token = entry & 0xFFFF
        return token, scalars.dests[first_token + token], entry >> 16

    def stretch_ref(dest):
        page = _div(dest, page_size)
        if rows == page_size:
            return pool.at[first_page + page]
        start = _div(dest - page * page_size, rows) * rows
        return pool.at[first_page + page, :, pl.ds(pl.multiple_of(start, rows), rows)]

    def wait(slot, sem):
        pltpu.make_async_copy(buf.at[slot], buf.at[slot], sem.at[slot]).wait()

    def load(stretch):
        slot = slot_of(stretch)

        @pl.when(stretch < count)
        def _():
            dest = first_of(stretch)[1]
            pl.when(stretch >= slots)(lambda: wait(slot, out_sem))
            pltpu.make_async_copy(stretch_ref(dest), buf.at[slot], in_sem.at[slot]).start()

    def turn(stretch, carry):
        load(stretch + ahead)
        slot, (token, dest, num) = slot_of(stretch), first_of(stretch)
        wait(slot, in_sem)
        row = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)
        offset = dest - _div(dest, rows) * rows

        def put(i, carry):
            for slab in range(buf.shape[1]):
                old = buf[slot, slab]
                added = jnp.broadcast_to(new[token + i, slab][None, :], (rows, LANES))
                changed = jnp.where(row == offset + i, added, old.astype(new.dtype))
                buf[slot, slab] = changed.astype(old.dtype)
            return carry

        put(0, carry)
        jax.lax.fori_loop(1, num, put, carry)
        pltpu.make_async_copy(buf.at[slot], stretch_ref(dest), out_sem.at[slot]).start()
        return carry

    def start(stretch, carry):
        load(stretch)
        return carry

    def wait_stored(stretch, carry):
        wait(slot_of(stretch), out_sem)
        return carry

    jax.lax.fori_loop(0, ahead, start, 0)
    jax.lax.fori_loop(0, count, turn, 0)
    jax.lax.fori_loop(jnp.maximum(count - slots, 0), count, wait_stored, 0)
