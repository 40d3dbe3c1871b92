"""The pipeline of async copies that both paths of the `tpu` implementation run: which keys are read, and when.

A kernel computes *work items*, one after the other. A work item is one KV block (`tile.pages` pages of one sequence)
for one query block of that sequence; the items of all sequences form one list, so that the memory never waits for a
sequence to end. The list is not stored: a `Cursor` walks over it, a few items ahead of the computation, and the fields
of those items (`Item`) stand in a ring in SMEM. Page tables stay in HBM, whatever their size.

The pipeline in time, with `tile.slots = 3`; `ids`, `q` and `kv` are copies HBM → VMEM or SMEM, `out` is one back:

    turn        │ i                          │ i + 1                      │ i + 2
    ────────────┼────────────────────────────┼────────────────────────────┼───────────────────────────
    ids   start │ item i+3 ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒ i+4 ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒ i+5 ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
    ids   wait  │ item i+2                   │ i+3                        │ i+4
    q     start │ item i+2 ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒   (if it begins a query block)
    kv    start │ item i+2 ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒
    kv, q wait  │ item i                     │ i+1                        │ i+2
    compute     │  item i ███████████████████│  i+1 ██████████████████████│  i+2 █████████████████████
    out   start │                item i ▒▒▒▒▒│▒▒▒▒▒▒▒▒▒▒                  │     (if it ends a query block)

The kv copies of item i + 2 are started between the matmuls of item i, where the scheduler has free slots. Their buffer
is the one that item i - 1 used. Before the first turn the copies of items 0 and 1 are started.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.tpu import choice
from levanter_infer.kernels.tpu.pool import LANES
from levanter_infer.kernels.tpu.sizes import OUT_SLOTS, Scratch, Sizes
from levanter_infer.kernels.tpu.tables import Inputs
from levanter_infer.kernels.tpu.word_rows import load_rows
from levanter_infer.kernels.tpu.work_items import Cursor, Item, Rows, Scalar


def _div(x, size: int) -> Array:
    """x // size for x >= 0, as one shift where the size is a power of two."""
    if size & (size - 1) == 0:
        return x >> (size.bit_length() - 1)
    return jax.lax.div(x, jnp.int32(size))


def _rem(x, size: int) -> Array:
    """x % size for x >= 0."""
    return x & (size - 1) if size & (size - 1) == 0 else jax.lax.rem(x, jnp.int32(size))


def _part_and_share(step, shares: int) -> tuple[Any, Any]:
    """The part of the heads and the share of the rows of a grid step."""
    return (step, jnp.int32(0)) if shares == 1 else (_div(step, shares), _rem(step, shares))


def run_kernel(body: Callable, call: AttentionCall, sizes: Sizes, rows: Rows, inputs: Inputs, *, interpret) -> Array:
    """Run the kernel of a path once for each part of the heads.

    Args:
        body: takes `Rows`, `Inputs`, the output and `Scratch`, all of refs, and `call` and `sizes`; its name is the
            kernel's.
        interpret: as `pallas_call` takes it.
    Returns: the output, of the shape of `inputs.q` but for its tiles of 128 lanes, which are those of values, and for
        its rows and dtype, which are as in `Scratch.out_buf`.
    """
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    shares = sizes.tile.row_shares

    def own_heads(values: Array | None) -> pl.BlockSpec | None:
        if values is None:
            return None
        return pl.BlockSpec(
            (sizes.groups, *values.shape[1:]), lambda step, *_: (_part_and_share(step, shares)[0], 0, 0)
        )

    others = dict(sinks=own_heads(inputs.sinks), slopes=own_heads(inputs.slopes))
    others["chosen"] = None if inputs.chosen is None else hbm
    block = sizes.out_block(call.q.dtype)
    tiles = block.shape[0] * (sizes.tile.parts // sizes.sharing_parts)
    if sizes.tile.queries == 1:
        out_shape = call.num_tokens, tiles, *block.shape[1:]
    else:
        _, _, pack, lanes = block.shape
        out_shape = tiles, call.num_tokens * sizes.heads_per_group // pack, pack, lanes
    return pl.pallas_call(
        functools.partial(body, call=call, sizes=sizes),
        out_shape=jax.ShapeDtypeStruct(out_shape, block.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(sizes.tile.parts * shares,),
            in_specs=[Inputs(page_ids=hbm, kv=hbm, q=hbm, **others)],
            out_specs=hbm,
            scratch_shapes=[sizes.scratch(inputs.kv.dtype, call.q.dtype)],
        ),
        # Page ids are clamped before they are used, and the interpreter of the tests finds what is out of bounds.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=sizes.vmem_bytes,
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
        ),
        name=body.__name__,
        interpret=interpret,
    )(rows, inputs)


class Pipeline:
    """The work items of one grid step in their order, and their async copies."""

    def __init__(self, call: AttentionCall, sizes: Sizes, rows: Rows, inputs: Inputs, out_ref, scratch: Scratch):
        self.sizes, self.tile = sizes, sizes.tile
        self.num_rows = rows.scalars[Scalar.NUM_SEQS]
        self.window = None if call.rules.sliding_window is None else rows.scalars[Scalar.WINDOW]
        self.rules = call.rules
        self.num_pages, self.row_id_chunks = rows.scalars[Scalar.LAYER_PAGES], rows.scalars[Scalar.ID_CHUNKS]
        self.last_row, self.first_page = rows.scalars[Scalar.LAST_ROW], rows.layer[0] * self.num_pages
        self.seq_lens, self.cu_q_lens, self.unmapped = rows.seq_lens, rows.cu_q_lens, rows.has_unmapped_page
        self.inputs, self.out_ref, self.scratch, self.num_tokens = inputs, out_ref, scratch, call.num_tokens
        self.items, self.page_ids, self.kv = scratch.items, scratch.page_ids_buf, scratch.kv_buf
        self.shares = self.tile.row_shares
        self.part, self.share = _part_and_share(pl.program_id(0), self.shares)
        self.tile_part, self.place = self.part, 0
        """Index of the part's tiles of queries and outputs, and its place among the parts that share their rows."""
        if sizes.sharing_parts > 1:
            self.tile_part, self.place = _part_and_share(self.part, sizes.sharing_parts)
        self.ahead, self.num_items = self.tile.slots - 1, self.tile.slots + 1

    def index(self, item: Array) -> Array:
        """Row of `Scratch.items`, and slot of the page ids."""
        return _rem(item, self.num_items)

    def slot(self, item: Array) -> Array:
        """Slot of the keys and values."""
        return _rem(item, self.tile.slots)

    def q_len(self, row: Array) -> Array:
        return self.cu_q_lens[row + 1] - self.cu_q_lens[row]

    def first_pos(self, row: Array, q_block: Array) -> Array:
        """Position of the first query of a block."""
        if self.tile.queries == 1:
            return self.seq_lens[row] - 1
        return self.seq_lens[row] - self.q_len(row) + q_block * self.tile.queries

    def end_pos(self, row: Array, q_block: Array) -> Array:
        """One past the position of the last query of a block."""
        if self.tile.queries == 1:
            return self.seq_lens[row]
        return jnp.minimum(self.first_pos(row, q_block) + self.tile.queries, self.seq_lens[row])

    def first_seen(self, row: Array, q_block: Array) -> Array:
        """Position of the first key that some query of a block sees."""
        first = jnp.int32(0)
        if self.window is not None:
            first = jnp.maximum(self.first_pos(row, q_block) + 1 - self.window, 0)
        if self.rules.attention_chunk is not None:
            first = jnp.maximum(first, self.rules.chunk_start(self.first_pos(row, q_block)))
        return first

    def _next_row(self, row: Array) -> Array:
        """The first row from `row` on of which this path and this share of the rows compute something."""
        return jax.lax.while_loop(self._is_of_others, lambda r: r + 1, row)

    def _is_of_others(self, row: Array) -> Array:
        """Whether a row is in use, and this path or this share of the rows computes nothing of it."""
        q_len = self.q_len(jnp.minimum(row, self.num_rows - 1))
        if self.tile.queries == 1:
            of_others = q_len != 1
            if self.shares > 1:
                of_others = of_others | (_rem(row, self.shares) != self.share)
        else:
            of_others = q_len < self.sizes.least_queries
            if self.shares > 1:
                of_others = of_others | (self._first_q_block(row) * self.tile.queries >= q_len)
        return (row < self.num_rows) & of_others

    def _first_q_block(self, row: Array) -> Array:
        """The first query block of a row that belongs to this share: every `shares`-th one does."""
        if self.shares == 1 or self.tile.queries == 1:
            return jnp.int32(0)
        return _rem(row + self.share, self.shares)

    def start(self) -> Cursor:
        row = self._next_row(jnp.int32(0))
        q_block = self._first_q_block(row)
        return Cursor(jnp.int32(0), row, q_block, self._first_kv_block(row, q_block), jnp.int32(0))

    def _first_kv_block(self, row, q_block):
        row = jnp.minimum(row, self.last_row)
        return _div(self.first_seen(row, q_block), self.sizes.tokens)

    def _is_unmasked(self, row, q_block, start, is_last):
        unmasked = (
            ~is_last & (self.unmapped[row] == 0) & (self.first_pos(row, q_block) + 1 - start >= self.sizes.tokens)
        )
        if self.window is not None:
            unmasked = unmasked & (self.end_pos(row, q_block) - self.window <= start)
        if self.rules.attention_chunk is not None:
            unmasked = unmasked & (self.rules.chunk_start(self.end_pos(row, q_block) - 1) <= start)
        return unmasked.astype(jnp.int32)

    def advance(self, cursor: Cursor) -> Cursor:
        """Write the fields of the next work item, if there is one, and start the copy of its page ids."""
        return self.following(cursor, self.write_item(cursor), self._next_row)

    def write_item(self, cursor: Cursor) -> Array:
        """Write the fields of the item at the cursor, if there is one, and start the copy of its page ids. Returns:
        whether it is the last of its query block."""
        items, sizes = self.items, self.sizes
        num_items, next_row, q_block, kv_block, num_q_blocks = cursor
        exists, row = next_row < self.num_rows, jnp.minimum(next_row, self.last_row)
        start = kv_block * sizes.tokens
        first_key, end_key = self.first_seen(row, q_block) - start, self.end_pos(row, q_block) - start
        is_last = end_key <= sizes.tokens

        @pl.when(exists)
        def _():
            index = self.index(num_items)
            live_pages = _div(end_key + (sizes.page_size - 1), sizes.page_size)
            values = {
                Item.ROW: row,
                Item.Q_BLOCK: q_block,
                Item.KV_BLOCK: kv_block,
                Item.Q_BLOCKS_BEFORE: num_q_blocks,
                Item.IS_FIRST: (kv_block == self._first_kv_block(row, q_block)).astype(jnp.int32),
                Item.IS_LAST: is_last.astype(jnp.int32),
                Item.FIRST_PAGE: _div(jnp.maximum(first_key, 0), sizes.page_size),
                Item.END_PAGE: jnp.minimum(live_pages, self.tile.pages),
                Item.HAS_UNMAPPED_PAGE: self.unmapped[row],
                Item.FIRST_KEY: first_key,
                Item.END_KEY: end_key,
                Item.IS_UNMASKED: self._is_unmasked(row, q_block, start, is_last),
                Item.NUM_QUERIES: self.end_pos(row, q_block) - self.first_pos(row, q_block),
                Item.Q_SLOT: _rem(num_q_blocks, self.tile.slots),
            }
            for field, value in values.items():
                items[index, field] = value
            for chunk in range(self.tile.id_chunks):
                self._page_id_copy(index, chunk).start()

        return is_last

    def following(self, cursor: Cursor, is_last: Array, find: Callable[[Array], Array]) -> Cursor:
        """The cursor of the item after that at `cursor`.

        Args:
            is_last: of `write_item`.
            find: gives `_next_row`, from a row on.
        """
        num_items, next_row, q_block, kv_block, num_q_blocks = cursor
        exists, row = next_row < self.num_rows, jnp.minimum(next_row, self.last_row)
        new_q_block, row_ends = q_block, is_last
        if self.tile.queries > 1:
            more = (q_block + self.shares) * self.tile.queries < self.q_len(row)
            new_q_block = jnp.where(is_last, jnp.where(more, q_block + self.shares, 0), q_block)
            row_ends = is_last & ~more
        # Where no row ends, or beyond the last row, the loop over rows ends at once.
        new_row = find(next_row + row_ends.astype(jnp.int32))
        if self.tile.queries > 1 and self.shares > 1:
            new_q_block = jnp.where(row_ends, self._first_q_block(new_row), new_q_block)
        new_kv_block = jnp.where(is_last, self._first_kv_block(new_row, new_q_block), kv_block + 1)
        following = Cursor(num_items + 1, new_row, new_q_block, new_kv_block, num_q_blocks + is_last.astype(jnp.int32))
        return Cursor(*(jnp.where(exists, new, old) for new, old in zip(following, cursor, strict=True)))

    def search(self, cursor: Cursor, is_of_others: Array) -> Cursor:
        """The cursor, or where `_is_of_others(cursor.row)` that of the first item of the row after it."""

        def step(carry):
            return carry[0] + 1, self._is_of_others(carry[0] + 1)

        row, _ = jax.lax.while_loop(lambda carry: carry[1], step, (cursor.row, is_of_others))
        q_block = jnp.where(is_of_others, self._first_q_block(row), cursor.q_block)
        kv_block = jnp.where(is_of_others, self._first_kv_block(row, q_block), cursor.kv_block)
        return cursor._replace(row=row, q_block=q_block, kv_block=kv_block)

    def wait_page_ids(self, item: Array) -> None:
        """Wait for the page ids of an item."""
        for chunk in range(self.tile.id_chunks):
            self._page_id_copy(self.index(item), chunk).wait()

    def page_bounds(self, item: Array, exists: Array) -> tuple[Array, Array]:
        """Bounds of the pages of an item; equal if it does not exist."""
        index, none = self.index(item), jnp.int32(0)
        first_page = jnp.where(exists, self.items[index, Item.FIRST_PAGE], none)
        return first_page, jnp.where(exists, self.items[index, Item.END_PAGE], none)

    def begins_queries(self, item: Array, exists: Array) -> Array:
        """Whether an item exists and begins a query block."""
        return exists & (self.items[self.index(item), Item.IS_FIRST] == 1)

    def start_queries(self, item: Array) -> None:
        """Start the copy of an item's queries."""
        self._q_copy(self.index(item)).start()

    def start_item(self, item: Array, exists: Array) -> tuple[Array, Array]:
        """Wait for the page ids of an item, and start the copy of its queries. Returns: `page_bounds`."""

        @pl.when(exists)
        def _():
            self.wait_page_ids(item)
            begins = self.items[self.index(item), Item.IS_FIRST] == 1
            pl.when(begins)(lambda: self.start_queries(item))

        return self.page_bounds(item, exists)

    def page_id(self, index: Array, j: Array) -> Array:
        """Id of page `j` of an item."""
        return self._page_id_reader(index)(j)

    def _page_id_reader(self, index: Array):
        if self.tile.id_chunks > 1:
            return lambda j: self.page_ids[index, j // LANES, 0, j % LANES]
        # The ids of an item begin at a multiple of its pages.
        offset = (self.items[index, Item.KV_BLOCK] * self.tile.pages) & (LANES - 1)
        ids = self.page_ids.at[index, 0, 0, pl.ds(offset, self.tile.pages)]
        return lambda j: ids[j]

    def page_prefetcher(self, item: Array, first_page: Array, end_page: Array):
        """A function `prefetch(pages)` that starts the copies of some pages of an item, by their numbers in the KV
        block: of those within the bounds; of the layer's last page in place of one that is none. What the copies have
        in common is computed here, once."""
        sizes, slot = self.sizes, self.slot(item)
        page_id = self._page_id_reader(self.index(item))
        sem, kv_block = self.scratch.kv_sem.at[slot], self.kv.at[slot]
        sees_all = self.window is None and self.rules.attention_chunk is None
        start_chosen = self._chosen_copier(item)

        def start_copy(j, pool_page):
            @pl.when((j < end_page) if sees_all else (j >= first_page) & (j < end_page))
            def _():
                source, target = self.inputs.kv.at[pool_page], kv_block.at[j]
                if start_chosen is not None:
                    start_chosen(j)
                    target = target.at[pl.ds(0, sizes.pool.slabs)]
                if self.tile.parts == 1:
                    pltpu.make_async_copy(source, target, sem).start()
                    return
                numbers = pl.ds(self.part * sizes.number_slabs, sizes.number_slabs)
                if not sizes.pool.scaled:
                    pltpu.make_async_copy(source.at[numbers], target, sem).start()
                    return
                pltpu.make_async_copy(source.at[numbers], target.at[pl.ds(0, sizes.number_slabs)], sem).start()
                pltpu.make_async_copy(source.at[sizes.pool.number_slabs], target.at[sizes.number_slabs], sem).start()

        def prefetch(pages):
            # All ids are read before the first copy starts: as far as the compiler knows a copy might change them, so
            # that each read would wait for the copy before it.
            pool_pages = [self.first_page + jnp.minimum(page_id(j), self.num_pages - 1) for j in pages]
            for j, pool_page in zip(pages, pool_pages, strict=True):
                start_copy(j, pool_page)

        return prefetch

    def _chosen_copier(self, item: Array) -> Callable | None:
        """A function that starts the copy of the choice of keys for a page of an item, into the last slab of the page;
        None: queries see all keys."""
        if self.inputs.chosen is None:
            return None
        index, slot = self.index(item), self.slot(item)
        q_block = 0 if self.tile.queries == 1 else self.items[index, Item.Q_BLOCK] * self.tile.queries
        group = choice.group_of(self.cu_q_lens[self.items[index, Item.ROW]] + q_block)
        column = self.items[index, Item.KV_BLOCK] * self.tile.pages

        def start(j) -> None:
            target = self.kv.at[slot, j, self.sizes.copied_slabs - 1]
            source = self.inputs.chosen.at[group, column + j]
            pltpu.make_async_copy(source, target, self.scratch.kv_sem.at[slot]).start()

        return start

    def prefetch_pages(self, item: Array, first_page: Array, end_page: Array) -> None:
        """Start the copies of an item's pages, several per turn of a loop."""
        prefetch, per_turn = self.page_prefetcher(item, first_page, end_page), min(8, self.tile.pages)

        def several(turn, carry):
            prefetch([turn * per_turn + j for j in range(per_turn)])
            return carry

        jax.lax.fori_loop(_div(first_page, per_turn), _div(end_page + (per_turn - 1), per_turn), several, 0)

    def wait_pages(self, item: Array, all_pages: bool) -> None:
        """Wait for an item's pages. `all_pages`: copies of all of them were started, whatever the item's fields say."""
        index, slot = self.index(item), self.slot(item)
        if all_pages:
            pages = self.kv.at[slot]
            pltpu.make_async_copy(pages, pages, self.scratch.kv_sem.at[slot]).wait()
            return
        count = self.items[index, Item.END_PAGE] - self.items[index, Item.FIRST_PAGE]
        for bit in range(self.tile.pages.bit_length()):

            @pl.when((count >> bit) & 1 == 1)
            def _(some=1 << bit):
                pages = self.kv.at[slot, pl.ds(0, some)]
                pltpu.make_async_copy(pages, pages, self.scratch.kv_sem.at[slot]).wait()

    def live_subblocks(self, item: Array) -> tuple[Array, Array]:
        """Bounds of the sub-blocks of an item (`Sizes.subblock_pages`) that hold a key that some query sees."""
        sizes, index = self.sizes, self.index(item)
        width = sizes.subblock_pages * sizes.page_size
        first = _div(jnp.maximum(self.items[index, Item.FIRST_KEY], 0), width)
        end = _div(self.items[index, Item.END_KEY] + (width - 1), width)
        return first, jnp.minimum(end, self.tile.pages // sizes.subblock_pages)

    def wait_queries(self, item: Array) -> Array:
        """Wait for the queries of an item, and transpose them where the kernel takes them so. Returns: their slot in
        `Scratch.q_buf`."""
        index = self.index(item)

        @pl.when(self.items[index, Item.IS_FIRST] == 1)
        def _():
            self._q_copy(index).wait()
            if self.scratch.q_columns_ref is not None:
                for tile in range(self.sizes.q_tiles):
                    self._transpose_queries(item, tile)

        return self.q_slot(item)

    def _transpose_queries(self, item: Array, tile: int) -> None:
        columns = self.queries(self.q_slot(item), tile, 0, self.sizes.columns).T
        group, t = divmod(tile, self.sizes.pool.query_tiles)
        for slab in range(self.sizes.columns // LANES):
            numbers = pl.ds(t * LANES, LANES)
            self.scratch.q_columns_ref[group, slab, numbers] = columns[:, slab * LANES : (slab + 1) * LANES]

    def queries(self, q_slot: Array, tile: int, first: int, count: int) -> Array:
        """`count` rows of queries of the prefill path, from `first` on, [count, 128]."""
        sizes = self.sizes
        rows = load_rows(self.scratch.q_buf, (q_slot, tile), first, count, interpreted=sizes.interpreted)
        return rows.astype(sizes.operand)

    def q_slot(self, item: Array) -> Array:
        """Slot of an item's queries in `Scratch.q_buf`."""
        return self.items[self.index(item), Item.Q_SLOT]

    def run(self, unmasked, masked, finish, prepare=None) -> None:
        """Compute all work items, in order.

        Args:
            unmasked: `unmasked(item, q_slot, prefetch)` computes an item of which every query sees every key, and
                meanwhile calls `prefetch` for all pages of a later one; None if all items need masks. With `prepare`:
                `unmasked(item, next_item, q_slot, prefetch)`, which calls `prefetch` once.
            masked: `masked(item, q_slot)` computes any item, sub-block by sub-block, without the sub-blocks that hold
                no key that some query sees.
            finish: `finish(slot)` writes the outputs of a query block to `Scratch.out_buf` after its last item.
            prepare: `prepare(item, q_slot)` begins an unmasked item. It is called for the first of several in a row,
                all of one query block; `unmasked` begins the next one itself, unless that is None. After the last one
                it is given that item again.
        """

        def begin(item, cursor):
            cursor = self.advance(cursor)
            later = item + self.ahead
            return cursor, (later, *self.start_item(later, later < cursor.num_items))

        def is_unmasked(item, cursor):
            return (self.items[self.index(item), Item.IS_UNMASKED] == 1) & (item < cursor.num_items)

        def unmasked_turn(carry):
            item, cursor, _ = carry
            cursor, later = begin(item, cursor)
            self.wait_pages(item, True)
            q_slot = self.wait_queries(item)
            if prepare is None:
                unmasked(item, q_slot, self.page_prefetcher(*later))
            else:
                prepare(item, q_slot)
                unmasked(item, None, q_slot, self.page_prefetcher(*later))
            return item + 1, cursor, is_unmasked(item + 1, cursor)

        def prepared_turn(carry):
            # The next item is of the same query block, whose queries have come: the last one of a block has masks.
            item, cursor, *_ = carry
            # The next item's fields and copies are computed among the vectors, without a branch between them, so that
            # the compiler packs both into the same bundles.
            goes_on, later = is_unmasked(item + 1, cursor), item + self.ahead
            exists = later < cursor.num_items
            pl.when(exists)(lambda: self.wait_page_ids(later))
            pl.when(goes_on)(lambda: self.wait_pages(item + 1, True))
            start_pages = self.page_prefetcher(later, *self.page_bounds(later, exists))
            after = []

            def find_following():
                new_cursor = self.following(cursor, self.write_item(cursor), lambda row: row)
                after.extend((new_cursor, self._is_of_others(new_cursor.row)))

            def prefetch(pages):
                # The schedule of latents spills a quarter less with the copies first; that of v5p is longer without.
                late = self.sizes.pool.value_dim is not None
                if not late:
                    find_following()
                start_pages(pages)
                if late:
                    find_following()

            unmasked(item, jnp.where(goes_on, item + 1, item), self.q_slot(item), prefetch)
            new_cursor, is_of_others = after
            return item + 1, new_cursor, goes_on, is_of_others, self.begins_queries(later, exists)

        def prepared_turns(carry):
            # What few turns do, and takes branches, stands in front of the loop, which those turns leave.
            item, cursor, goes_on, is_of_others, begins_queries = carry
            pl.when(begins_queries)(lambda: self.start_queries(item - 1 + self.ahead))
            no = jnp.bool_(False)
            return jax.lax.while_loop(
                lambda c: c[2] & ~c[3] & ~c[4],
                prepared_turn,
                (item, self.search(cursor, is_of_others), goes_on, no, no),
            )

        def begin_several(item):
            assert prepare is not None
            self.wait_pages(item, True)
            prepare(item, self.wait_queries(item))

        def turn(carry):
            # Unmasked items have a loop of their own: most of the time is spent there.
            item, cursor = carry
            if unmasked is not None:
                found = is_unmasked(item, cursor)
                if prepare is not None and self.ahead > 1:
                    pl.when(found)(functools.partial(begin_several, item))
                    no = jnp.bool_(False)
                    item, cursor, *_ = jax.lax.while_loop(
                        lambda c: c[2] | c[3] | c[4], prepared_turns, (item, cursor, found, no, no)
                    )
                else:
                    item, cursor, _ = jax.lax.while_loop(lambda c: c[2], unmasked_turn, (item, cursor, found))
            cursor, later = begin(item, cursor)
            self.wait_pages(item, False)
            q_slot = self.wait_queries(item)
            self.prefetch_pages(*later)
            zero_masked_values(self, item)
            masked(item, q_slot)
            self.store_outputs(item, finish)
            return item + 1, cursor

        cursor = jax.lax.fori_loop(0, self.ahead + 1, lambda _, cursor: self.advance(cursor), self.start())
        for item in map(jnp.int32, range(self.ahead)):
            self.prefetch_pages(item, *self.start_item(item, item < cursor.num_items))
        _, cursor = jax.lax.while_loop(lambda carry: carry[0] < carry[1].num_items, turn, (jnp.int32(0), cursor))
        self.wait_outputs(cursor.num_q_blocks)

    def store_outputs(self, item: Array, finish) -> None:
        """After the last item of a query block, let `finish(slot)` write its outputs, and start their copy to HBM."""
        index, out_tokens = self.index(item), self.scratch.out_tokens

        @pl.when(self.items[index, Item.IS_LAST] == 1)
        def _():
            count = self.items[index, Item.Q_BLOCKS_BEFORE]
            slot = _rem(count, OUT_SLOTS)
            pl.when(count >= OUT_SLOTS)(lambda: self._out_copy(index, slot, out_tokens[slot]).wait())
            finish(slot)
            out_tokens[slot] = self.items[index, Item.NUM_QUERIES]
            self._out_copy(index, slot, out_tokens[slot]).start()

    def wait_outputs(self, count: Array) -> None:
        """Wait for the copies of the last outputs, after `count` query blocks."""
        for back in range(1, OUT_SLOTS + 1):
            slot = (count - back) % OUT_SLOTS
            pl.when(count >= back)(lambda slot=slot: self._out_copy(0, slot, self.scratch.out_tokens[slot]).wait())

    def _page_id_copy(self, index, chunk):
        row_chunk = self.items[index, Item.ROW] * self.row_id_chunks
        at = row_chunk + _div(self.items[index, Item.KV_BLOCK] * self.tile.pages, LANES) + chunk
        return pltpu.make_async_copy(
            self.inputs.page_ids.at[at], self.page_ids.at[index, chunk], self.scratch.page_ids_sem.at[index]
        )

    def _q_copy(self, index):
        slot = self.items[index, Item.Q_SLOT]
        buf, sem = self.scratch.q_buf.at[slot], self.scratch.q_sem.at[slot]
        tokens, tiles = self.items[index, Item.NUM_QUERIES], self.sizes.q_tiles
        return self._q_block_copy(index, tokens, tiles, lambda hbm, part: (hbm(self.inputs.q), part(buf), sem))

    def _out_copy(self, index, slot, tokens):
        buf, sem = self.scratch.out_buf.at[slot], self.scratch.out_sem.at[slot]
        tiles = self.sizes.out_tiles
        if self.sizes.sharing_parts == 1:
            return self._q_block_copy(index, tokens, tiles, lambda hbm, part: (part(buf), hbm(self.out_ref), sem))
        word_rows = self.sizes.groups * self.sizes.heads_per_group // buf.shape[-2]
        rows = pl.ds(self.place * word_rows, word_rows)
        return self._q_block_copy(
            index, tokens, tiles, lambda hbm, part: (part(buf).at[:, rows], hbm(self.out_ref).at[:, rows], sem)
        )

    def _q_block_copy(self, index, tokens, tiles, ends) -> "_AsyncCopies":
        """The copies of the queries or outputs of a query block, `tiles` of them for this part of the heads.
        `ends(hbm, part)` returns source, target and semaphore: `hbm` selects the query block from an array, `part` the
        same from a buffer."""
        sizes, row = self.sizes, self.items[index, Item.ROW]
        own = pl.ds(self.tile_part * tiles, tiles)
        if self.tile.queries == 1:
            whole = pltpu.make_async_copy(*ends(lambda ref: ref.at[self.cu_q_lens[row], own], lambda buf: buf))
            return _AsyncCopies([(None, lambda: whole)])
        first_token = self.cu_q_lens[row] + self.items[index, Item.Q_BLOCK] * self.tile.queries
        copies = []
        # The number of a block's tokens is data, and the size of a copy is not: 1, 2, 4, … tokens.
        for bit in range(min(self.tile.queries, self.num_tokens).bit_length()):
            done = (tokens >> (bit + 1)) << (bit + 1)

            def copy(bit=bit, done=done):
                def part(ref, tiles, first):
                    per_token = sizes.heads_per_group // ref.shape[-2]
                    return ref.at[tiles, pl.ds(first * per_token, per_token << bit)]

                return pltpu.make_async_copy(
                    *ends(lambda ref: part(ref, own, first_token + done), lambda buf: part(buf, slice(None), done))
                )

            copies.append(((tokens >> bit) & 1 == 1, copy))
        return _AsyncCopies(copies)


class _AsyncCopies:
    """Async copies that are started and waited for together, each under a condition or None."""

    def __init__(self, copies):
        self._copies = copies

    def start(self) -> None:
        self._each(lambda copy: copy.start())

    def wait(self) -> None:
        self._each(lambda copy: copy.wait())

    def _each(self, act) -> None:
        for condition, copy in self._copies:
            if condition is None:
                act(copy())
            else:
                pl.when(condition)(lambda copy=copy: act(copy()))


def zero_masked_values(pipeline: Pipeline, item: Array) -> None:
    """Set the values of an item's unseen keys to 0 in `Scratch.kv_buf`: 0 * NaN is NaN, and the buffer may hold
    anything there. Only in sub-blocks with a key that some query sees; the others are not computed."""
    sizes, kv, index, slot = pipeline.sizes, pipeline.kv, pipeline.index(item), pipeline.slot(item)
    first_key, end_key = pipeline.items[index, Item.FIRST_KEY], pipeline.items[index, Item.END_KEY]
    page_size, step = sizes.page_size, sizes.subblock_pages
    slabs = [sizes.values(group, t) for group in range(sizes.groups) for t in range(sizes.pool.value_tiles)]

    def zero_page(j, _=None):
        for slab in slabs:
            kv[slot, j, slab] = jnp.zeros((page_size, LANES), kv.dtype)
        return _

    def zero_part(j):
        key = j * page_size + jax.lax.broadcasted_iota(jnp.int32, (page_size, LANES), 0)
        keep = (key >= first_key) & (key < end_key)
        for slab in slabs:
            kv[slot, j, slab] = jnp.where(keep, kv[slot, j, slab], jnp.zeros((), kv.dtype))

    first, last = _div(jnp.maximum(first_key, 0), page_size), _div(jnp.minimum(end_key, sizes.tokens), page_size)
    end_page = jnp.minimum(_div(end_key + (step * page_size - 1), step * page_size) * step, pipeline.tile.pages)
    jax.lax.fori_loop(_div(first, step) * step, first, zero_page, 0)
    pl.when(first_key > 0)(lambda: zero_part(first))
    pl.when(last < end_page)(lambda: zero_part(last))
    jax.lax.fori_loop(last + 1, end_page, zero_page, 0)

    @pl.when(pipeline.items[index, Item.HAS_UNMAPPED_PAGE] > 0)
    def _():
        def zero_unmapped(j, _):
            pl.when(pipeline.page_id(index, j) >= pipeline.num_pages)(lambda: zero_page(j))
            return _

        jax.lax.fori_loop(
            pipeline.items[index, Item.FIRST_PAGE], pipeline.items[index, Item.END_PAGE], zero_unmapped, 0
        )


def mask_unmapped(pipeline: Pipeline, item: Array, kv_pos: Array) -> Array:
    """bool, of the shape of `kv_pos`: false for keys on a page that is none."""
    return mapped_keys(pipeline, item, kv_pos) > 0


def mapped_keys(pipeline: Pipeline, item: Array, kv_pos: Array) -> Array:
    """i32, of the shape of `kv_pos`: 0 for keys on a page that is none, 1 for others."""
    sizes, index = pipeline.sizes, pipeline.index(item)
    start = pipeline.items[index, Item.KV_BLOCK] * sizes.tokens

    def hide(j, mapped):
        offset = kv_pos - (start + j * sizes.page_size)
        unmapped = (offset >= 0) & (offset < sizes.page_size) & (pipeline.page_id(index, j) >= pipeline.num_pages)
        return jnp.where(unmapped, 0, mapped)

    first = pipeline.items[index, Item.FIRST_PAGE]
    end = jnp.where(pipeline.items[index, Item.HAS_UNMAPPED_PAGE] > 0, pipeline.items[index, Item.END_PAGE], first)
    return jax.lax.fori_loop(first, end, hide, jnp.ones(kv_pos.shape, jnp.int32))
