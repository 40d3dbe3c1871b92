"""The arrays of a call as the kernels of both paths read them: tables, queries, keys and values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import LOG2_E
from levanter_infer.kernels.tpu.pool import LANES
from levanter_infer.kernels.tpu.sizes import Tile
from levanter_infer.kernels.tpu.work_items import Rows, Scalar


class Tables(NamedTuple):
    """The tables of a call, for one path. Layers with the same window and the same pages have the same, but for the
    layer."""

    rows: Rows
    page_ids: Array
    """i32[R * chunks, 1, 128]: the page table in chunks that can be copied one by one."""

    @staticmethod
    def of(call: AttentionCall, tile: Tile) -> "Tables":
        num_rows, max_pages = call.page_indices.shape
        chunks = -(-max_pages // max(LANES, tile.pages)) * tile.id_chunks
        padded = jnp.pad(call.page_indices, ((0, 0), (0, chunks * LANES - max_pages)))
        rows = Rows(
            call.seq_lens, call.cu_q_lens, _scalars(call, chunks), _has_unmapped_page(call), call.layer.reshape(1)
        )
        return Tables(rows, padded.reshape(num_rows * chunks, 1, LANES))


class Inputs(NamedTuple):
    """The arrays of a call. Parameters of heads are blocks in VMEM, all others stay in HBM."""

    page_ids: Any
    """As `Tables.page_ids`."""
    kv: Any
    """[layers * P, slabs, page_size, 128]: the pool."""
    q: Any
    """The queries, in the operands' dtype. Decode: [T, groups * query_tiles, rows, 128]; prefill:
    [groups * query_tiles, T * heads_per_group, 128], as `word_rows`, in the dtype that `copied_dtype` gives."""
    sinks: Any = None
    """Attention sinks in units of log2: f32[groups, rows, 128], for prefill f32[groups, 8, columns]; None for none."""
    slopes: Any = None
    """ALiBi's, in the same shape; None for none."""
    chosen: Any = None
    """`choice.choose_keys`' result, in HBM; None: queries see all keys."""

    @staticmethod
    def of(call: AttentionCall, tables: Tables, q: Array, per_head: Callable[[Array], Array]) -> "Inputs":
        """The arrays of a call. Args: per_head: [Hq] -> the shape of `sinks`."""
        sinks, slopes = call.sinks, call.rules.alibi_slopes
        return Inputs(
            page_ids=tables.page_ids,
            kv=call.kv_pages.reshape(-1, *call.kv_pages.shape[2:]),
            q=q,
            sinks=None if sinks is None else per_head(sinks * jnp.float32(LOG2_E)),
            slopes=None if slopes is None else per_head(slopes),
            chosen=call.chosen,
        )


def _scalars(call: AttentionCall, id_chunks: int) -> Array:
    """i32[len(Scalar)].

    Everything that depends on the sizes of the pool and of the page table is data: kernels with the same tiles are the
    same whatever they read from, so that one that compiles answers for the others (scripts/sweep_tpu.py).
    """
    window, num_pages = call.rules.sliding_window, call.kv_pages.shape[1]
    values = {
        Scalar.NUM_SEQS: call.num_seqs,
        Scalar.WINDOW: jnp.int32(0) if window is None else window,
        Scalar.LAYER_PAGES: jnp.int32(num_pages),
        Scalar.ID_CHUNKS: jnp.int32(id_chunks),
        Scalar.LAST_ROW: jnp.int32(call.num_rows - 1),
    }
    return jnp.stack([values[entry] for entry in Scalar])


def _has_unmapped_page(call: AttentionCall) -> Array:
    """i32[R]: 1 where a page between the first and the last key that the row's queries see is none. All items of such a
    row are computed with masks, so that the page ids of the other rows need not be checked one by one."""
    first = call.rules.first_seen(call.seq_lens - call.q_lens) // call.page_size
    end = (call.seq_lens + (call.page_size - 1)) // call.page_size
    column = jnp.arange(call.page_indices.shape[1], dtype=jnp.int32)[None, :]
    unmapped = (call.page_indices >= call.kv_pages.shape[1]) & (column >= first[:, None]) & (column < end[:, None])
    # A maximum of bools would be converted in every layer.
    return jnp.max(unmapped.astype(jnp.int32), axis=1)
