"""Writing new keys and values into a TPU's pool.

An async copy moves whole tiles of memory, and a tile holds several tokens. So the tokens that go to one tile-high
*stretch* of a page are written together: the stretch is read into VMEM, changed, and stored back. Stretches take turns
in a ring of buffers: while one is changed, others are on their way in or out.
"""

import enum
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


class _Field(enum.IntEnum):
    """The fields of a stretch in the ring, i32 each."""

    DEST = 0  # destination of its first row, as in `dests`
    FIRST = 1  # its first token, counted from the first of the grid step
    COUNT = 2  # how many tokens go to it


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
    layer: Any
    """SMEM i32[1]"""


class _Scratch(NamedTuple):
    ring: Any
    """SMEM i32[slots, 4]: the fields of each stretch."""
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
    return pl.pallas_call(
        functools.partial(_write, sizes=_Sizes(num_pages, page_size, rows, block, slots)),
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
                    ring=pltpu.SMEM((slots, 4), jnp.int32),
                    buf=pltpu.VMEM((slots, slabs, rows, LANES), pages.dtype),
                    in_sem=dma((slots,)),
                    out_sem=dma((slots,)),
                )
            ],
        ),
        input_output_aliases={3: 0},
        # Destinations beyond the pool are skipped.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, disable_semaphore_checks=True),
        name="write_kv",
        interpret=interpret,
    )(_Scalars(dests, layer.reshape(1)), tokens, pages.reshape(-1, *pages.shape[2:])).reshape(pages.shape)


def _slots(stretch_bytes: int) -> int:
    slots = _MOST_SLOTS
    while slots > 8 and slots * stretch_bytes > _RING_BYTES:
        slots //= 2
    return slots


def _write(scalars: _Scalars, new, _, pool, scratch: _Scratch, *, sizes: _Sizes):
    ring, buf, in_sem, out_sem = scratch
    page_size, rows, block = sizes.page_size, sizes.rows, sizes.block
    end_dest = sizes.num_pages * page_size
    first_token = pl.program_id(0) * block
    ahead = sizes.slots // 2

    def dest(token):
        return scalars.dests[first_token + jnp.minimum(token, block - 1)]

    def slot_of(stretch):
        return jax.lax.rem(stretch, jnp.int32(sizes.slots))

    def stretch_ref(slot):
        start = ring[slot, _Field.DEST]
        page = scalars.layer[0] * sizes.num_pages + jax.lax.div(start, jnp.int32(page_size))
        if rows == page_size:
            return pool.at[page]
        offset = jax.lax.rem(start, jnp.int32(page_size))
        return pool.at[page, :, pl.ds(pl.multiple_of(offset, rows), rows)]

    def load(slot):
        return pltpu.make_async_copy(stretch_ref(slot), buf.at[slot], in_sem.at[slot])

    def store(slot):
        return pltpu.make_async_copy(buf.at[slot], stretch_ref(slot), out_sem.at[slot])

    def advance(state):
        """Write the fields of the next stretch, if there is one, and start to load it."""
        count, token = state
        token = jax.lax.while_loop(lambda t: (t < block) & (dest(t) >= end_dest), lambda t: t + 1, token)

        exists, slot, first_dest = token < block, slot_of(count), dest(token)
        start = first_dest - jax.lax.rem(first_dest, jnp.int32(rows))
        end = jax.lax.while_loop(
            lambda t: (t < block) & (dest(t) == first_dest + (t - token)) & (dest(t) < start + rows),
            lambda t: t + 1,
            token + 1,
        )

        @pl.when(exists)
        def _():
            pl.when(count >= sizes.slots)(lambda: store(slot).wait())
            ring[slot, _Field.DEST], ring[slot, _Field.FIRST], ring[slot, _Field.COUNT] = start, token, end - token
            load(slot).start()

        return jnp.where(exists, count + 1, count), jnp.where(exists, end, token)

    def turn(carry):
        stretch, state = carry
        state = advance(state)
        slot = slot_of(stretch)
        load(slot).wait()
        first = ring[slot, _Field.FIRST]
        row = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)

        def put(i, offset):
            for slab in range(buf.shape[1]):
                old = buf[slot, slab]
                token = jnp.broadcast_to(new[first + i, slab][None, :], (rows, LANES))
                changed = jnp.where(row == offset + i, token, old.astype(new.dtype))
                buf[slot, slab] = changed.astype(old.dtype)
            return offset

        jax.lax.fori_loop(0, ring[slot, _Field.COUNT], put, dest(first) - ring[slot, _Field.DEST])
        store(slot).start()
        return stretch + 1, state

    def wait_stored(back, count):
        pl.when(count > back)(lambda: store(slot_of(count - 1 - back)).wait())
        return count

    state = jax.lax.fori_loop(0, ahead, lambda _, state: advance(state), (jnp.int32(0), jnp.int32(0)))
    _, (count, _) = jax.lax.while_loop(lambda c: c[0] < c[1][0], turn, (jnp.int32(0), state))
    jax.lax.fori_loop(0, sizes.slots, wait_stored, count)
