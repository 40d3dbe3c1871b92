"""`PageBatchInfo`: the packed batch of one step, as the model and paged attention see it."""

import dataclasses
from typing import Any

import equinox as eqx
import haliax.haxtyping as ht
import jax
from haliax import NamedArray
from jax import Array

from levanter_infer.axes import ROW, ROW_BOUND, TOKEN
from levanter_infer.cache.page_math import offset_of, page_of


class WindowBatch(eqx.Module):
    """Pages of a step in the pools of layers with a sliding window: ids of its window pages."""

    page_indices: ht.i32[NamedArray, "row seq_page"]
    """As in `PageBatchInfo`; none before the first page that the row's first query sees."""
    new_token_dests: ht.i32[NamedArray, " token"]


class PageBatchInfo(eqx.Module):
    """The packed tokens of one step, their sequences, and where their keys and values are written.

    All arrays are int32 and padded on the right. Query `i` of row `s` sees the keys `0 … seq_lens[s] - q_len + i` of
    that sequence and no others, where `q_len = cu_q_lens[s + 1] - cu_q_lens[s]`.
    """

    tokens: ht.i32[NamedArray, " token"]
    positions: ht.i32[NamedArray, " token"]
    """Position of each token in its sequence; 0 for padding."""
    slot_ids: ht.i32[NamedArray, " row"]
    """Slot of each row; none is the number of slots."""
    cu_q_lens: ht.i32[NamedArray, " row_bound"]
    """Row `s` owns the tokens `cu_q_lens[s] … cu_q_lens[s + 1] - 1`; padding repeats the last bound."""
    seq_lens: ht.i32[NamedArray, " row"]
    """Tokens that are stored after this step has written its own; 0 for padding."""
    page_indices: ht.i32[NamedArray, "row seq_page"]
    """Pages of each row in logical order; none is the number of pages in the pool."""
    num_seqs: ht.i32[NamedArray, ""]
    """Rows in use."""
    new_token_dests: ht.i32[NamedArray, " token"]
    """Destination of each token's K/V: `page * page_size + page offset`; none is `num_pages * page_size`."""
    page_size: int = eqx.field(static=True)
    windows: tuple[WindowBatch, ...] = ()
    """As `Shapes.windows`, for pools of layers whose window has pages of its own."""
    write_plan: Any = None
    """`Backend.write_plan` of one pool (`KvPages.planned`); None: none has been computed."""

    def in_group(self, group: int) -> "PageBatchInfo":
        """The batch for the pools of one numbering of pages: 0 is the tables', `i` that of `windows[i - 1]`."""
        if group == 0:
            return self
        own = self.windows[group - 1]
        pages = dict(page_indices=own.page_indices, new_token_dests=own.new_token_dests)
        return dataclasses.replace(self, **pages, windows=(), write_plan=None)

    def first(self, tokens: int, rows: int) -> "PageBatchInfo":
        """The batch cut to its first `tokens` tokens and `rows` rows. Requires: it holds no others."""
        sizes = {TOKEN: tokens, ROW: rows, ROW_BOUND: rows + 1}

        def cut(array: NamedArray) -> NamedArray:
            if not array.axes or array.axes[0].name not in sizes:
                return array
            size = sizes[array.axes[0].name]
            return NamedArray(array.array[:size], (array.axes[0].resize(size), *array.axes[1:]))

        return jax.tree.map(cut, self, is_leaf=lambda part: isinstance(part, NamedArray))

    def pages_and_offsets(self) -> tuple[Array, Array]:
        """(page, page offset) of each new token; the page is none for padding."""
        dests = self.new_token_dests.array
        return page_of(dests, self.page_size), offset_of(dests, self.page_size)
