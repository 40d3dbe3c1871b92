"""Writing one number into each of many rows of a table in HBM.

XLA's scatter takes 80 cycles for a number, and where the table fits VMEM it is moved there and back in every step. Here
the 128 numbers around each are read into VMEM, changed and stored back, all of them on their way at once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.tpu.pool import LANES

_SUBLANES = 8


class _Scalars(NamedTuple):
    places: Any
    """SMEM i32[m]: the stretch of 128 numbers of each value; negative for values that are dropped."""
    lanes: Any
    """SMEM i32[m]"""
    values: Any
    """SMEM i32[m]"""
    count: Any
    """SMEM i32[1], of values that are not dropped."""


class _Scratch(NamedTuple):
    words: Any
    """VMEM [m, 1, 128]"""
    in_sem: Any
    """DMA semaphore."""
    out_sem: Any
    """DMA semaphore."""


def supports(table: Array) -> bool:
    """Whether the kernel takes a table [rows, columns]: of whole registers of 32 bits."""
    return table.dtype == jnp.int32 and table.shape[0] % _SUBLANES == 0 and table.shape[1] % LANES == 0


def put(table: Array, row: Array, column: Array, values: Array, *, interpret: Any = False) -> Array:
    """`table` with `values` at (`row`, `column`), in place where it is donated; absent ones are dropped.

    Args:
        table: i32[rows, columns] that `supports` takes.
        row, column, values: i32[m]; negative indices are absent. Requires: no row occurs twice, but for absent ones.
        interpret: as `pallas_call` takes it.
    """
    rows, columns = table.shape
    tiles = rows // _SUBLANES, columns // LANES
    # The bytes of the table as they are: registers of 8 rows of 128 numbers, one beside the other.
    stretches = table.reshape(tiles[0], _SUBLANES, tiles[1], LANES).swapaxes(1, 2).reshape(-1, 1, LANES)
    place = (row // _SUBLANES * tiles[1] + column // LANES) * _SUBLANES + row % _SUBLANES
    exists = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    scalars = _Scalars(jnp.where(exists, place, -1), column % LANES, values, jnp.sum(exists, dtype=jnp.int32)[None])
    count, dma, hbm = row.shape[0], pltpu.SemaphoreType.DMA, pl.BlockSpec(memory_space=pltpu.HBM)
    stretches = pl.pallas_call(
        _put,
        out_shape=pltpu.HBM(stretches.shape, stretches.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[hbm],
            out_specs=hbm,
            scratch_shapes=[_Scratch(pltpu.VMEM((count, 1, LANES), stretches.dtype), dma, dma)],
        ),
        input_output_aliases={len(scalars): 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, disable_semaphore_checks=True),
        name="put",
        interpret=interpret,
    )(scalars, stretches if interpret else pltpu.with_memory_space_constraint(stretches, pltpu.HBM))
    return stretches.reshape(*tiles, _SUBLANES, LANES).swapaxes(1, 2).reshape(rows, columns)


def _put(scalars: _Scalars, _, table, scratch: _Scratch) -> None:
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

    def each(act) -> None:
        def one(i, carry):
            act(i, scalars.places[i])
            return carry

        jax.lax.fori_loop(0, scalars.places.shape[0], one, 0, unroll=8)

    def read(i, place):
        pl.when(place >= 0)(pltpu.make_async_copy(table.at[place], scratch.words.at[i], scratch.in_sem).start)

    def change(i, place):
        # Also of absent values, so that no branch is taken for a copy alone.
        scratch.words[i] = jnp.where(lane == scalars.lanes[i], scalars.values[i], scratch.words[i])
        pl.when(place >= 0)(pltpu.make_async_copy(scratch.words.at[i], table.at[place], scratch.out_sem).start)

    def wait(sem) -> None:
        """Wait for all copies: the size of a copy is not data, so for 1, 2, 4, … of them."""
        for bit in range(scratch.words.shape[0].bit_length()):
            words = scratch.words.at[pl.ds(0, 1 << bit)]
            pl.when((scalars.count[0] >> bit) & 1 == 1)(pltpu.make_async_copy(words, words, sem).wait)

    each(read)
    wait(scratch.in_sem)
    each(change)
    wait(scratch.out_sem)
