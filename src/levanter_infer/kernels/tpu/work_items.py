"""The scalars of the pipeline: those of a call, those of a work item, and the place in the list of work items."""

import enum
from typing import Any, NamedTuple

from jax import Array


class Scalar(enum.IntEnum):
    """The entries of `Rows.scalars`."""

    NUM_SEQS = 0  # rows in use
    WINDOW = 1  # sliding window, 0 for none
    LAYER_PAGES = 2  # pages per layer
    ID_CHUNKS = 3  # chunks of 128 page ids per row of the page table
    LAST_ROW = 4  # index of the last row, in use or not


class Rows(NamedTuple):
    """The scalars of a call, prefetched to SMEM."""

    seq_lens: Any
    """i32[R]"""
    cu_q_lens: Any
    """i32[R + 1]"""
    scalars: Any
    """i32[len(Scalar)]"""
    has_unmapped_page: Any
    """i32[R], 1 where a page that the row reads is none."""
    layer: Any
    """i32[1]. It is apart from `scalars`, which are the same in layers of the same window."""


class Item(enum.IntEnum):
    """The fields of a work item, i32 each, and their places in a row of `Scratch.items`."""

    ROW = 0  # row of the batch
    Q_BLOCK = 1  # query block within the row
    KV_BLOCK = 2  # KV block within the sequence
    Q_BLOCKS_BEFORE = 3  # query blocks before this one, over all rows: selects the buffer of outputs
    IS_FIRST = 4  # 1 for the first item of its query block: queries are loaded
    IS_LAST = 5  # 1 for the last item of its query block: outputs are stored
    FIRST_PAGE = 6  # first page of the KV block that some query sees
    END_PAGE = 7  # one past the last page of the KV block that holds a key
    HAS_UNMAPPED_PAGE = 8  # 1 if some page of the row is none
    FIRST_KEY = 9  # first key that some query sees, relative to the KV block; may be negative
    END_KEY = 10  # one past the last key that some query sees, relative to the KV block; may be beyond its end
    IS_UNMASKED = 11  # 1 if all queries see all keys, no page of the row is none, and the query block has more items
    NUM_QUERIES = 12  # queries of the query block that exist
    Q_SLOT = 13  # slot of its queries


class Cursor(NamedTuple):
    """The position of `Pipeline.advance` in the list of work items, i32[] each."""

    num_items: Array
    """Items whose fields have been written."""
    row: Array
    q_block: Array
    kv_block: Array
    num_q_blocks: Array
    """Query blocks before `q_block`, over all rows."""
