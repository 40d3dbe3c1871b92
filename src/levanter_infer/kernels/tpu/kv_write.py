"""Writing new keys and values into a TPU's pool.

A transfer moves whole tiles of memory, and a tile holds several tokens: so the tokens that go to one *stretch* of a
page are written together, by reading the stretch, changing it, and sending it back. Stretches follow each other in a
ring: while one is changed, others come and go.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.tpu.pool import LANES

_TOKENS, _PLACE, _FIRST, _COUNT = 128, 0, 1, 2
_SLOTS = 8
"""Stretches on their way."""


def write_kv(pages: Array, layer: Array, tokens: Array, dests: Array, *, interpret: Any = False) -> Array:
    """Store what new tokens leave behind, in place where the pool is donated.

    Args:
        pages: [layers, P, slabs, page_size, 128].
        layer: i32[].
        tokens: [T, slabs, 128] as `TpuPool.pack` gives them, in the pool's dtype.
        dests: i32[T], `page * page_size + page offset`; P * page_size or more for tokens that go nowhere. Tokens of one
            sequence stand side by side, in the order of their positions, and each goes elsewhere.
        interpret: as `pallas_call` takes it.
    """
    num_pages, slabs, page_size = pages.shape[1:4]
    rows = min(page_size, 32 // pages.dtype.itemsize)
    if page_size % rows:
        raise ValueError(f"page_size: got {page_size}, expected a multiple of {rows} or less for {pages.dtype}")
    block = min(_TOKENS, tokens.shape[0])
    padding = -tokens.shape[0] % block
    # A row of 32 bits can be read by itself.
    wide = jnp.float32 if jnp.issubdtype(pages.dtype, jnp.floating) else jnp.int32
    tokens = jnp.pad(tokens.astype(wide), ((0, padding), (0, 0), (0, 0)))
    dests = jnp.pad(dests, (0, padding), constant_values=num_pages * page_size)
    dma = pltpu.SemaphoreType.DMA
    return pl.pallas_call(
        functools.partial(_write, num_pages=num_pages, page_size=page_size, rows=rows, block=block),
        out_shape=jax.ShapeDtypeStruct((pages.shape[0] * num_pages, *pages.shape[2:]), pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tokens.shape[0] // block,),
            in_specs=[
                pl.BlockSpec((block, slabs, LANES), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.SMEM((_SLOTS, 4), jnp.int32),
                pltpu.VMEM((_SLOTS, slabs, rows, LANES), pages.dtype),
                dma((_SLOTS,)),
                dma((_SLOTS,)),
            ],
        ),
        input_output_aliases={3: 0},
        # Destinations beyond the pool are passed over.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, disable_semaphore_checks=True),
        name="write_kv",
        interpret=interpret,
    )(dests, layer.reshape(1), tokens, pages.reshape(-1, *pages.shape[2:])).reshape(pages.shape)


def _write(dests, layer, new, _, pool, ring, buf, in_sem, out_sem, *, num_pages, page_size, rows, block):
    first_token = pl.program_id(0) * block
    ahead = _SLOTS // 2

    def dest(token):
        return dests[first_token + jnp.minimum(token, block - 1)]

    def slot_of(stretch):
        return jax.lax.rem(stretch, jnp.int32(_SLOTS))

    def stretch_ref(slot):
        place = ring[slot, _PLACE]
        page = layer[0] * num_pages + jax.lax.div(place, jnp.int32(page_size))
        if rows == page_size:
            return pool.at[page]
        offset = jax.lax.rem(place, jnp.int32(page_size))
        return pool.at[page, :, pl.ds(pl.multiple_of(offset, rows), rows)]

    def read(slot):
        return pltpu.make_async_copy(stretch_ref(slot), buf.at[slot], in_sem.at[slot])

    def send(slot):
        return pltpu.make_async_copy(buf.at[slot], stretch_ref(slot), out_sem.at[slot])

    def step(state):
        """Note the next stretch, if there is one, and send for it."""
        count, token = state
        token = jax.lax.while_loop(lambda t: (t < block) & (dest(t) >= num_pages * page_size), lambda t: t + 1, token)

        exists, slot, start = token < block, slot_of(count), dest(token)
        place = start - jax.lax.rem(start, jnp.int32(rows))
        end = jax.lax.while_loop(
            lambda t: (t < block) & (dest(t) == start + (t - token)) & (dest(t) < place + rows),
            lambda t: t + 1,
            token + 1,
        )

        @pl.when(exists)
        def _():
            pl.when(count >= _SLOTS)(lambda: send(slot).wait())
            ring[slot, _PLACE], ring[slot, _FIRST], ring[slot, _COUNT] = place, token, end - token
            read(slot).start()

        return jnp.where(exists, count + 1, count), jnp.where(exists, end, token)

    def turn(carry):
        stretch, state = carry
        state = step(state)
        slot = slot_of(stretch)
        read(slot).wait()
        first = ring[slot, _FIRST]
        row = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)

        def put(i, offset):
            for slab in range(buf.shape[1]):
                old = buf[slot, slab]
                token = jnp.broadcast_to(new[first + i, slab][None, :], (rows, LANES))
                changed = jnp.where(row == offset + i, token, old.astype(new.dtype))
                buf[slot, slab] = changed.astype(old.dtype)
            return offset

        jax.lax.fori_loop(0, ring[slot, _COUNT], put, dest(first) - ring[slot, _PLACE])
        send(slot).start()
        return stretch + 1, state

    state = jnp.int32(0), jnp.int32(0)
    for _ in range(ahead):
        state = step(state)
    _, (count, _) = jax.lax.while_loop(lambda c: c[0] < c[1][0], turn, (jnp.int32(0), state))
    for back in range(1, _SLOTS + 1):
        pl.when(count >= back)(lambda back=back: send(slot_of(count - back)).wait())
