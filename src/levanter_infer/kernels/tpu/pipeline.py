"""What both paths of the `tpu` implementation have in common: which keys are read when, and how they come.

A kernel walks over *items*: a stretch of one sequence's keys for one block of its queries, across the bounds of
sequences, so that the memory never waits for a sequence to end. While an item is computed the pages of those after it
are on their way, and the page ids of the one after them: page tables stay in HBM, whatever their size.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.tpu.pool import LANES
from levanter_infer.kernels.tpu.sizes import OUT_SLOTS, Sizes, align_queries

ROW, QUERIES, BLOCK, COUNT, FIRST, LAST, LOW, HIGH, NONE, SEEN, END, WHOLE, TOKENS = range(13)
"""What `items` holds of an item: row; block of its queries; block of its keys; number of blocks of queries before it,
of any row; whether it is the first, the last of them; bounds of its live pages within the block; whether a page of the
row is none; first and end of the keys that some of the queries see, relative to the block; whether all queries see all
keys of the block, none of them on a page of none, and more items follow for them; number of the queries."""


def _div(x, size: int) -> Array:
    """Of numbers that are not negative: without the care that others need."""
    if size & (size - 1) == 0:
        return x >> (size.bit_length() - 1)
    return jax.lax.div(x, jnp.int32(size))


def _rem(x, size: int) -> Array:
    return x & (size - 1) if size & (size - 1) == 0 else jax.lax.rem(x, jnp.int32(size))


def id_chunks(page_indices: Array) -> Array:
    """[R, max_pages] -> [R * chunks, 1, 128]: each chunk can be fetched by itself."""
    num_rows, max_pages = page_indices.shape
    chunks = -(-max_pages // LANES)
    padded = jnp.pad(page_indices, ((0, 0), (0, chunks * LANES - max_pages)))
    return padded.reshape(num_rows * chunks, 1, LANES)


def meta(call: AttentionCall) -> Array:
    """i32[6]: the layer's first page, rows in use, window, pages of a layer, chunks of ids of a row, the last row.

    What depends on the pool's size and the tables' is data: kernels whose tiles are the same are the same, whatever
    they read from, so that one that compiles answers for the others (scripts/sweep_tpu.py).
    """
    window, num_pages = call.rules.sliding_window, call.kv_pages.shape[1]
    return jnp.stack(
        [
            call.layer * num_pages,
            call.num_seqs,
            jnp.int32(0) if window is None else window,
            jnp.int32(num_pages),
            jnp.int32(-(-call.page_indices.shape[1] // LANES)),
            jnp.int32(call.num_rows - 1),
        ]
    )


def rows_with_none(call: AttentionCall) -> Array:
    """i32[R]: 1 where some page between the first key that the row's queries see and the last is none. Such rows take
    the slow way with masks throughout, so that the others' pages need not be looked at one by one."""
    first = call.rules.first_seen(call.seq_lens - call.q_lens) // call.page_size
    end = (call.seq_lens + (call.page_size - 1)) // call.page_size
    place = jnp.arange(call.page_indices.shape[1], dtype=jnp.int32)[None, :]
    none = (call.page_indices >= call.kv_pages.shape[1]) & (place >= first[:, None]) & (place < end[:, None])
    return jnp.any(none, axis=1).astype(jnp.int32)


class Walk:
    """The order of the items, and the transfers of one walk. A state is (items noted, row, block of queries, block of
    keys, blocks of queries begun): i32[] each."""

    def __init__(
        self, call: AttentionCall, sizes: Sizes, seq_lens, cu_q_lens, meta, has_none, places, inputs, out_ref, scratch
    ):
        """`places`: where a row's queries begin in the inputs and in the output, counted in tokens."""
        self.sizes, self.tile = sizes, sizes.tile
        self.first_page, self.num_rows, self.has_none = meta[0], meta[1], has_none
        self.window = None if call.rules.sliding_window is None else meta[2]
        self.num_pages, self.id_rows, self.last_row = meta[3], meta[4], meta[5]
        self.seq_lens, self.cu_q_lens, self.places = seq_lens, cu_q_lens, places
        self.inputs, self.out_ref, self.scratch = inputs, out_ref, scratch
        self.items, self.ids, self.kv = scratch["items"], scratch["ids_buf"], scratch["kv_buf"]
        self.part = pl.program_id(0)
        self.ahead, self.num_items = self.tile.slots - 1, self.tile.slots + 1

    def index(self, item: Array) -> Array:
        return _rem(item, self.num_items)

    def slot(self, item: Array) -> Array:
        return _rem(item, self.tile.slots)

    def q_len(self, row: Array) -> Array:
        return self.cu_q_lens[row + 1] - self.cu_q_lens[row]

    def first_pos(self, row: Array, queries: Array) -> Array:
        """Position of the first query of a block."""
        if self.tile.queries == 1:
            return self.seq_lens[row] - 1
        return self.seq_lens[row] - self.q_len(row) + queries * self.tile.queries

    def end_pos(self, row: Array, queries: Array) -> Array:
        if self.tile.queries == 1:
            return self.seq_lens[row]
        return jnp.minimum(self.first_pos(row, queries) + self.tile.queries, self.seq_lens[row])

    def first_seen(self, row: Array, queries: Array) -> Array:
        """First key that some query of a block sees."""
        if self.window is None:
            return jnp.int32(0)
        return jnp.maximum(self.first_pos(row, queries) + 1 - self.window, 0)

    def next_row(self, row: Array) -> Array:
        """The first row from `row` on that goes this way."""

        def other(r):
            q_len = self.q_len(jnp.minimum(r, self.num_rows - 1))
            return (r < self.num_rows) & ((q_len != 1) if self.tile.queries == 1 else (q_len < 2))

        return jax.lax.while_loop(other, lambda r: r + 1, row)

    def start(self) -> tuple[Array, ...]:
        row = self.next_row(jnp.int32(0))
        return jnp.int32(0), row, jnp.int32(0), self._first_block(row, jnp.int32(0)), jnp.int32(0)

    def _first_block(self, row, queries):
        row = jnp.minimum(row, self.last_row)
        return _div(self.first_seen(row, queries), self.sizes.tokens)

    def _sees_all(self, row, queries, start, last):
        whole = ~last & (self.has_none[row] == 0) & (self.first_pos(row, queries) + 1 - start >= self.sizes.tokens)
        if self.window is not None:
            whole = whole & (self.end_pos(row, queries) - self.window <= start)
        return whole.astype(jnp.int32)

    def step(self, state: tuple[Array, ...]) -> tuple[Array, ...]:
        """Note the next item, if there is one, and send for its page ids."""
        items, sizes = self.items, self.sizes
        noted, place, queries, block, count = state
        exists, row = place < self.num_rows, jnp.minimum(place, self.last_row)
        start = block * sizes.tokens
        seen, end = self.first_seen(row, queries) - start, self.end_pos(row, queries) - start
        last = end <= sizes.tokens

        @pl.when(exists)
        def _():
            index = self.index(noted)
            live_pages = _div(end + (sizes.page_size - 1), sizes.page_size)
            values = {
                ROW: row,
                QUERIES: queries,
                BLOCK: block,
                COUNT: count,
                FIRST: (block == self._first_block(row, queries)).astype(jnp.int32),
                LAST: last.astype(jnp.int32),
                LOW: _div(jnp.maximum(seen, 0), sizes.page_size),
                HIGH: jnp.minimum(live_pages, self.tile.pages),
                NONE: self.has_none[row],
                SEEN: seen,
                END: end,
                WHOLE: self._sees_all(row, queries, start, last),
                TOKENS: self.end_pos(row, queries) - self.first_pos(row, queries),
            }
            for field, value in values.items():
                items[index, field] = value
            for chunk in range(sizes.id_chunks):
                self._id_copy(index, chunk).start()

        new_queries, row_ends = queries, last
        if self.tile.queries > 1:
            more = (queries + 1) * self.tile.queries < self.q_len(row)
            new_queries = jnp.where(last, jnp.where(more, queries + 1, 0), queries)
            row_ends = last & ~more
        # Without a row to end the loop over rows stays where it is, and beyond the last row too.
        new_row = self.next_row(place + row_ends.astype(jnp.int32))
        new_block = jnp.where(last, self._first_block(new_row, new_queries), block + 1)
        following = noted + 1, new_row, new_queries, new_block, count + last.astype(jnp.int32)
        return tuple(jnp.where(exists, new, old) for new, old in zip(following, state, strict=True))

    def prepare(self, item: Array, exists: Array) -> tuple[Array, Array]:
        """Wait for an item's page ids and send for its queries. Returns: bounds of the pages to send for."""
        index = self.index(item)

        @pl.when(exists)
        def _():
            for chunk in range(self.sizes.id_chunks):
                self._id_copy(index, chunk).wait()

            @pl.when(self.items[index, FIRST] == 1)
            def _():
                self._q_copy(index).start()

        none = jnp.int32(0)
        return jnp.where(exists, self.items[index, LOW], none), jnp.where(exists, self.items[index, HIGH], none)

    def page(self, index: Array, j: Array) -> Array:
        """Id of page `j` of an item."""
        return self._id_reader(index)(j)

    def _id_reader(self, index: Array):
        if self.sizes.id_chunks > 1:
            return lambda j: self.ids[index, j // LANES, 0, j % LANES]
        # The ids of an item lie at a multiple of its pages.
        offset = (self.items[index, BLOCK] * self.tile.pages) & (LANES - 1)
        ids = self.ids.at[index, 0, 0, pl.ds(offset, self.tile.pages)]
        return lambda j: ids[j]

    def sender(self, item: Array, low: Array, high: Array):
        """`send(pages)` sends for some pages of an item, by their numbers, those that are live; for another page if one
        is none. All that they have in common is computed here, once."""
        sizes, slot = self.sizes, self.slot(item)
        page_id = self._id_reader(self.index(item))
        sem, target = self.scratch["kv_sem"].at[slot], self.kv.at[slot]

        def send_one(j, place):
            @pl.when((j < high) if self.window is None else (j >= low) & (j < high))
            def _():
                source, own = self.inputs["kv"].at[place], target.at[j]
                if self.tile.parts == 1:
                    pltpu.make_async_copy(source, own, sem).start()
                    return
                numbers = pl.ds(self.part * sizes.number_slabs, sizes.number_slabs)
                if not sizes.pool.scaled:
                    pltpu.make_async_copy(source.at[numbers], own, sem).start()
                    return
                pltpu.make_async_copy(source.at[numbers], own.at[pl.ds(0, sizes.number_slabs)], sem).start()
                pltpu.make_async_copy(source.at[sizes.pool.number_slabs], own.at[sizes.number_slabs], sem).start()

        def send(pages):
            # All ids are read before the first transfer starts: as far as the compiler knows it might change them, so
            # that each would wait for the transfer before it.
            places = [self.first_page + jnp.minimum(page_id(j), self.num_pages - 1) for j in pages]
            for j, place in zip(pages, places, strict=True):
                send_one(j, place)

        return send

    def send_pages(self, item: Array, low: Array, high: Array) -> None:
        """Send for an item's pages, some at a time."""
        send, some = self.sender(item, low, high), min(8, self.tile.pages)

        def several(turn, carry):
            send([turn * some + j for j in range(some)])
            return carry

        jax.lax.fori_loop(_div(low, some), _div(high + (some - 1), some), several, 0)

    def wait_pages(self, item: Array, whole: bool) -> None:
        """`whole`: all of them have been sent for."""
        index, slot = self.index(item), self.slot(item)
        if whole:
            pages = self.kv.at[slot]
            pltpu.make_async_copy(pages, pages, self.scratch["kv_sem"].at[slot]).wait()
            return
        count = self.items[index, HIGH] - self.items[index, LOW]
        for bit in range(self.tile.pages.bit_length()):

            @pl.when((count >> bit) & 1 == 1)
            def _(some=1 << bit):
                pages = self.kv.at[slot, pl.ds(0, some)]
                pltpu.make_async_copy(pages, pages, self.scratch["kv_sem"].at[slot]).wait()

    def live_parts(self, item: Array) -> tuple[Array, Array]:
        """Bounds of the narrow parts of an item that hold a key to be seen."""
        sizes, index = self.sizes, self.index(item)
        width = sizes.narrow_pages * sizes.page_size
        first = _div(jnp.maximum(self.items[index, SEEN], 0), width)
        end = _div(self.items[index, END] + (width - 1), width)
        return first, jnp.minimum(end, self.tile.pages // sizes.narrow_pages)

    def wait_queries(self, item: Array) -> Array:
        """Slot of the queries of an item."""
        index = self.index(item)

        @pl.when(self.items[index, FIRST] == 1)
        def _():
            self._q_copy(index).wait()

        return self.slot(self.items[index, COUNT])

    def run(self, whole, masked, masked_pages: int, finish) -> None:
        """All items, in order.

        Args:
            whole: `whole(item, q_slot, send)` computes an item of which every query sees every key, and meanwhile sends
                for all pages of a later one; None if no item is such a one.
            masked: `masked(item, q_slot)` computes any item, in stretches of `masked_pages` pages, of which it leaves
                out those without a key to be seen.
            finish: `finish(slot)` writes the outputs of a block of queries once its last item is computed.
        """

        def begin(item, state, whole):
            state = self.step(state)
            later = item + self.ahead
            low, high = self.prepare(later, later < state[0])
            self.wait_pages(item, whole)
            return state, (later, low, high), self.wait_queries(item)

        def is_whole(item, state):
            return (self.items[self.index(item), WHOLE] == 1) & (item < state[0])

        def whole_turn(carry):
            item, state, _ = carry
            state, later, q_slot = begin(item, state, True)
            whole(item, q_slot, self.sender(*later))
            return item + 1, state, is_whole(item + 1, state)

        def turn(carry):
            # The loop of whole items is one of its own: most of the time is spent there.
            item, state = carry
            if whole is not None:
                item, state, _ = jax.lax.while_loop(lambda c: c[2], whole_turn, (item, state, is_whole(item, state)))
            state, later, q_slot = begin(item, state, False)
            self.send_pages(*later)
            clear_values(self, item, masked_pages)
            masked(item, q_slot)
            self.send_outputs(item, finish)
            return item + 1, state

        state = self.start()
        for _ in range(self.ahead):
            state = self.step(state)
        for item in map(jnp.int32, range(self.ahead)):
            self.send_pages(item, *self.prepare(item, item < state[0]))
        _, state = jax.lax.while_loop(lambda carry: carry[0] < carry[1][0], turn, (jnp.int32(0), state))
        self.drain(state[4])

    def send_outputs(self, item: Array, fill) -> None:
        """Let `fill(slot)` write the outputs of the block of queries that ends with this item, and send them off."""
        index, out_tokens = self.index(item), self.scratch["out_tokens"]

        @pl.when(self.items[index, LAST] == 1)
        def _():
            count = self.items[index, COUNT]
            slot = _rem(count, OUT_SLOTS)
            pl.when(count >= OUT_SLOTS)(lambda: self._out_copy(index, slot, out_tokens[slot]).wait())
            fill(slot)
            out_tokens[slot] = self.items[index, TOKENS]
            self._out_copy(index, slot, out_tokens[slot]).start()

    def drain(self, count: Array) -> None:
        """Wait for the last outputs, after `count` blocks of queries."""
        for back in range(1, OUT_SLOTS + 1):
            slot = (count - back) % OUT_SLOTS
            pl.when(count >= back)(lambda slot=slot: self._out_copy(0, slot, self.scratch["out_tokens"][slot]).wait())

    def _id_copy(self, index, chunk):
        at = self.items[index, ROW] * self.id_rows + _div(self.items[index, BLOCK] * self.tile.pages, LANES) + chunk
        return pltpu.make_async_copy(
            self.inputs["ids"].at[at], self.ids.at[index, chunk], self.scratch["ids_sem"].at[index]
        )

    def _q_copy(self, index):
        slot = self.slot(self.items[index, COUNT])
        buf, sem = self.scratch["q_buf"].at[slot], self.scratch["q_sem"].at[slot]
        return self._block_copy(
            index, self.items[index, TOKENS], lambda hbm, part: (hbm(self.inputs["q"]), part(buf), sem)
        )

    def _out_copy(self, index, slot, tokens):
        buf, sem = self.scratch["out_buf"].at[slot], self.scratch["out_sem"].at[slot]
        return self._block_copy(index, tokens, lambda hbm, part: (part(buf), hbm(self.out_ref), sem))

    def _block_copy(self, index, tokens, ends) -> "_Copies":
        """Of a block's queries or outputs, for this part of the heads. `ends(hbm, part)` gives source, target and
        semaphore: `hbm` takes the block's place from an array, `part` from a buffer."""
        sizes, tiles, row = self.sizes, self.sizes.q_tiles, self.items[index, ROW]
        own = pl.ds(self.part * tiles, tiles)
        if self.tile.queries == 1:
            whole = pltpu.make_async_copy(*ends(lambda ref: ref.at[self.places[row], own], lambda buf: buf))
            return _Copies([(None, lambda: whole)])
        align = align_queries(sizes.heads_per_group)
        units = _div(tokens + (align - 1), align)
        place = self.places[row] + self.items[index, QUERIES] * self.tile.queries
        unit_rows = align * sizes.heads_per_group
        copies = []
        # A block's tokens are its own up to the unit in which they end: they go in pieces of 1, 2, 4, … units.
        for bit in range((self.tile.queries // align).bit_length()):
            done = (units >> (bit + 1)) << (bit + 1)

            def copy(size=unit_rows << bit, done=done):
                at = pl.multiple_of(done * unit_rows, unit_rows)
                first = pl.multiple_of(place * sizes.heads_per_group + at, unit_rows)
                return pltpu.make_async_copy(
                    *ends(lambda ref: ref.at[own, pl.ds(first, size)], lambda buf: buf.at[:, pl.ds(at, size)])
                )

            copies.append(((units >> bit) & 1 == 1, copy))
        return _Copies(copies)


class _Copies:
    """Transfers that belong together, each under a condition or None."""

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


def clear_values(walk: Walk, item: Array, step: int) -> None:
    """Set the values of an item's unseen keys to 0 where they lie: 0 * NaN is NaN, and nobody knows what lies there.
    Only in those stretches of `step` pages that hold a key to be seen; the others are not computed."""
    sizes, kv, index, slot = walk.sizes, walk.kv, walk.index(item), walk.slot(item)
    seen, end = walk.items[index, SEEN], walk.items[index, END]
    page_size = sizes.page_size
    slabs = [sizes.values(group, t) for group in range(sizes.groups) for t in range(sizes.pool.lane_tiles)]

    def clear(j, _=None):
        for slab in slabs:
            kv[slot, j, slab] = jnp.zeros((page_size, LANES), kv.dtype)
        return _

    def clear_part(j):
        place = j * page_size + jax.lax.broadcasted_iota(jnp.int32, (page_size, LANES), 0)
        keep = (place >= seen) & (place < end)
        for slab in slabs:
            kv[slot, j, slab] = jnp.where(keep, kv[slot, j, slab], jnp.zeros((), kv.dtype))

    first, last = _div(jnp.maximum(seen, 0), page_size), _div(jnp.minimum(end, sizes.tokens), page_size)
    pages = jnp.minimum(_div(end + (step * page_size - 1), step * page_size) * step, walk.tile.pages)
    jax.lax.fori_loop(_div(first, step) * step, first, clear, 0)
    pl.when(seen > 0)(lambda: clear_part(first))
    pl.when(last < pages)(lambda: clear_part(last))
    jax.lax.fori_loop(last + 1, pages, clear, 0)

    @pl.when(walk.items[index, NONE] > 0)
    def _():
        def clear_none(j, _):
            pl.when(walk.page(index, j) >= walk.num_pages)(lambda: clear(j))
            return _

        jax.lax.fori_loop(walk.items[index, LOW], walk.items[index, HIGH], clear_none, 0)


def without_none(walk: Walk, item: Array, kv_pos: Array) -> Array:
    """Which keys lie in pages that exist: bool, of the shape of their positions."""
    sizes, index = walk.sizes, walk.index(item)
    start = walk.items[index, BLOCK] * sizes.tokens

    def hide(j, exists):
        place = kv_pos - (start + j * sizes.page_size)
        hidden = (place >= 0) & (place < sizes.page_size) & (walk.page(index, j) >= walk.num_pages)
        return jnp.where(hidden, 0, exists)

    low = walk.items[index, LOW]
    high = jnp.where(walk.items[index, NONE] > 0, walk.items[index, HIGH], low)
    return jax.lax.fori_loop(low, high, hide, jnp.ones(kv_pos.shape, jnp.int32)) > 0
