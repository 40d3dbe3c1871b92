"""The prefill path of the `tpu` implementation: rows with two or more queries, as chunked prefill has them.

The queries of a row are cut into query blocks, and a query block meets the keys KV block by KV block. Scores are
computed transposed, with keys in sublanes and the pairs of query and head of one group in lanes, as *columns*:

    scores [keys, columns] = K · Qᵀ,  outputs [head size, columns] += Vᵀ · P

The maximum and the sum over keys then are elementwise operations of registers, m, l and their factor are one row for
all keys, and the weights P, of which there are more than of anything else, are the stationary operand of the second
matmul: 256 keys x 256 columns, which fills a matrix unit of 256 x 256 where values of 128 fill half of it.

The scores of a KV block are computed while the one before it goes through softmax and the second matmul, because the
compiler overlaps within one turn of a loop only (`_turn`). They wait in VMEM.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import MASKED, NOTHING_SEEN
from levanter_infer.kernels.tpu import choice
from levanter_infer.kernels.tpu.pipeline import Pipeline, mapped_keys, run_kernel
from levanter_infer.kernels.tpu.pool import LANES, TpuPool, pairs, side_by_side
from levanter_infer.kernels.tpu.scales import KEYS, VALUES, scales_of_keys
from levanter_infer.kernels.tpu.sizes import SUBLANES, Scratch, Sizes, Tile
from levanter_infer.kernels.tpu.tables import Inputs, Tables
from levanter_infer.kernels.tpu.tiling import adds_late, transposes_queries, vmem_bytes
from levanter_infer.kernels.tpu.word_rows import copied_dtype, store_rows, word_rows
from levanter_infer.kernels.tpu.work_items import Item, Rows

STRIPE = 256
"""Columns per stripe."""
CHUNK = 256
"""Keys that softmax and the matmuls of a stripe take at once."""
BEYOND = 2**30
"""A position behind all queries."""


def prefill_attention(
    call: AttentionCall, tile: Tile, tables: Tables, operand: jnp.dtype, *, invariant: bool = False, interpret
) -> Array:
    """Attention of rows with two or more queries.

    Args:
        tables: `Tables.of(call, tile)`.
        operand: dtype of the matmuls' operands.
        invariant: compute all rows, and every query by the same operations in the same order, whatever other queries
            stand in its query block and whichever keys they see: sub-block of keys after sub-block, which begin at
            multiples of their width. A sub-block of which a query sees nothing changes none of its bits.
        interpret: as `pallas_call` takes it.
    Returns: `call.out_shape`; unspecified at the tokens of other rows.
    """
    pool = TpuPool.of(call)
    num_tokens, num_heads, _ = call.q.shape
    groups, per_group = pool.groups, num_heads // pool.groups
    sizes = Sizes(
        tile=tile,
        pool=pool,
        page_size=call.page_size,
        q_per_kv=call.heads_per_kv_head,
        rows=tile.queries * per_group,
        operand=operand,
        invariant=invariant,
        adds_late=adds_late(),
        transposes_queries=transposes_queries(),
        interpreted=bool(interpret),
        vmem_bytes=vmem_bytes(),
    )

    def by_column(values: Array) -> Array:
        """[Hq] -> [groups, 8, columns]"""
        columns = jnp.tile(values.reshape(groups, per_group), (1, tile.queries))
        columns = jnp.pad(columns, ((0, 0), (0, sizes.columns - sizes.rows)))
        return jnp.broadcast_to(columns[:, None], (groups, SUBLANES, sizes.columns))

    q = call.q.astype(copied_dtype(operand, per_group))
    if not interpret:
        # Else XLA brings them into the order of heads first in every step, with chunks or without.
        q = with_layout_constraint(q, Layout((0, 1, 2)))
    q = choice.with_own_lane(pool.pack_queries(q), call, tile.queries)
    q = word_rows(q.transpose(1, 3, 0, 2, 4).reshape(groups * pool.query_tiles, -1, LANES))
    if not interpret:
        # Else XLA may put them in VMEM, where a copy is a loop of loads and stores.
        q = pltpu.with_memory_space_constraint(q, memory_space=pltpu.HBM)
    inputs = Inputs.of(call, tables, q, by_column)
    out = run_kernel(attend_prefill, call, sizes, tables.rows, inputs, interpret=interpret)
    out = out.reshape(groups, pool.value_tiles, num_tokens, per_group, LANES).transpose(2, 0, 3, 1, 4)
    out = pool.unpack_outputs(out.reshape(num_tokens, groups, per_group, pool.value_tiles * LANES))
    return out.astype(call.q.dtype)


def attend_prefill(rows: Rows, inputs: Inputs, out_ref, scratch: Scratch, *, call: AttentionCall, sizes: Sizes):
    pipeline = Pipeline(call, sizes, rows, inputs, out_ref, scratch)
    block = _Block(call, pipeline)

    def finish(slot):
        _finish(sizes, scratch, slot)
        _reset(inputs, scratch)

    _reset(inputs, scratch)
    unmasked = block.turn if call.rules.mask_mod is None and not sizes.invariant else None
    pipeline.run(unmasked, block.masked, finish, prepare=block.prepare)


def _reset(inputs: Inputs, scratch: Scratch) -> None:
    """Set m, l and acc to what they are before the first key."""
    shape = scratch.m_ref.shape
    if inputs.sinks is not None:
        scratch.m_ref[...] = inputs.sinks[...]
        sublane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        scratch.l_ref[...] = jnp.where(sublane == 0, jnp.float32(1), jnp.float32(0))
    else:
        scratch.m_ref[...] = jnp.full(shape, NOTHING_SEEN, jnp.float32)
        scratch.l_ref[...] = jnp.zeros(shape, jnp.float32)
    scratch.acc_ref[...] = jnp.zeros(scratch.acc_ref.shape, jnp.float32)


class _Slopes:
    """ALiBi's slopes of a stripe, indexed as `ScoreRules` does."""

    def __init__(self, ref, group: int, columns):
        self._slopes = ref[group, :1, columns]

    def __getitem__(self, head: Array) -> Array:
        return self._slopes


class _Stripe(NamedTuple):
    """Some columns of a group of heads."""

    group: int
    first: int
    count: int

    @property
    def columns(self):
        return pl.ds(self.first, self.count)


class _Keys(NamedTuple):
    """Keys of a work item."""

    item: Array
    slot: Array
    """Slot of their buffer."""
    first: Any
    """The first one, relative to the KV block."""
    count: int

    def part(self, at: int, count: int) -> "_Keys":
        return self if count == self.count else _Keys(self.item, self.slot, self.first + at, count)


class _Block:
    """The computations for one query block."""

    def __init__(self, call: AttentionCall, pipeline: Pipeline):
        self.pipeline, self.sizes, self.scratch = pipeline, pipeline.sizes, pipeline.scratch
        self.rules = dataclasses.replace(call.rules, sliding_window=pipeline.window)
        sizes = self.sizes
        starts = range(0, sizes.columns, STRIPE)
        self.stripes = [
            _Stripe(group, first, min(STRIPE, sizes.columns - first))
            for group in range(sizes.groups)
            for first in starts
        ]
        # Sums of 256 numbers of 32 bits round more than those of 128, and no matrix unit adds them faster.
        tiles = sizes.pool.query_tiles
        self.depths = pairs(tiles) if sizes.operand.itemsize < 4 else [range(t, t + 1) for t in range(tiles)]
        self.known_scales: dict = {}
        """Scales of int8 that one method has read, by keys, side and head."""
        page_size = sizes.page_size
        is_whole = sizes.tokens % CHUNK == 0 and (CHUNK % page_size == 0 or page_size % CHUNK == 0)
        self.chunk = CHUNK if is_whole else sizes.tokens
        self.dot = functools.partial(
            jax.lax.dot_general,
            preferred_element_type=jnp.float32,
            precision=None if sizes.operand.itemsize < 4 else jax.lax.Precision.HIGHEST,
        )

    def prepare(self, item: Array, q_slot: Array) -> None:
        """Compute the scores of an item's keys, m and its factor."""
        self._begin(self._keys(item), q_slot, self.chunk)

    def turn(self, item: Array, next_item: Array | None, q_slot: Array, prefetch) -> None:
        """Add an item whose scores have been computed to the attention, and compute those of `next_item`, if given."""
        next_keys, pages = None if next_item is None else self._keys(next_item), range(self.sizes.tile.pages)
        self._add(self._keys(item), next_keys, q_slot, self.chunk, meanwhile=lambda: prefetch(pages))

    def masked(self, item: Array, q_slot: Array) -> None:
        """Add the sub-blocks of an item that hold a key that some query sees to the attention."""
        count = self.sizes.subblock_pages * self.sizes.page_size
        first, end = self.pipeline.live_subblocks(item)

        def keys_of(subblock: Array) -> _Keys:
            return _Keys(item, self.pipeline.slot(item), subblock * count, count)

        def visible(keys: _Keys) -> Array:
            kv_pos = self._positions(keys)
            return jnp.where(mapped_keys(self.pipeline, item, kv_pos) > 0, kv_pos, jnp.int32(BEYOND))

        def one(subblock: Array, carry):
            next_keys = keys_of(subblock + 1)
            self._add(keys_of(subblock), next_keys, q_slot, count, visible(next_keys))
            return carry

        @pl.when(first < end)
        def _():
            keys = keys_of(first)
            self._begin(keys, q_slot, count, visible(keys))
            jax.lax.fori_loop(first, end - 1, one, 0)
            self._add(keys_of(end - 1), None, q_slot, count)

    def _begin(self, keys: _Keys, q_slot: Array, chunk: int, visible: Array | None = None) -> None:
        """Compute the scores of keys, m and its factor.

        Args:
            chunk: keys that are taken at once; all if `visible` is given.
            visible: as in `_scores`.
        """
        self.known_scales = {}
        for stripe in self.stripes:
            maxima = [
                self._put_scores(q_slot, stripe, keys.part(at, chunk), at, visible)
                for at in range(0, keys.count, chunk)
            ]
            self._put_max(stripe, maxima)
        self._put_values(keys, chunk)

    def _add(
        self,
        keys: _Keys,
        next_keys: _Keys | None,
        q_slot: Array,
        chunk: int,
        next_visible: Array | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Add keys whose scores have been computed to the attention, and compute those of `next_keys`, if given.

        The scores of a stripe and chunk of keys replace those that were just read: so the compiler finds work for the
        matrix unit while it computes powers. With `Sizes.adds_late` the second matmul of a chunk is written behind the
        scores of the next, which v5e and v5p schedule better, v4 and v6e worse.

        Args:
            chunk: as in `_begin`.
            next_visible: as `visible` of `_scores`, for `next_keys`.
            meanwhile: is called behind the first stripe.
        """
        late, self.known_scales = [], {}
        for number, stripe in enumerate(self.stripes):
            own = stripe.group, slice(None), stripe.columns
            m, factor, sums, maxima = self.scratch.m_ref[own], self.scratch.factor_ref[own], [], []
            for at in range(0, keys.count, chunk):
                scores = self.scratch.score_ref[stripe.group, pl.ds(at, chunk), stripe.columns]
                if next_keys is not None:
                    maxima.append(self._put_scores(q_slot, stripe, next_keys.part(at, chunk), at, next_visible))
                weights, total = self._weights(stripe, keys.part(at, chunk), scores, m)
                sums.append(total)
                late.append(
                    functools.partial(
                        self._add_values, stripe, range(at, at + chunk), weights, factor if at == 0 else None
                    )
                )
                if len(late) > self.sizes.adds_late:
                    late.pop(0)()
            self.scratch.l_ref[own] = self.scratch.l_ref[own] * factor + functools.reduce(jnp.add, sums)
            if next_keys is not None:
                self._put_max(stripe, maxima)
            if number == 0:  # keys are not loaded past a copy's start, but the second stripe has much else to do
                meanwhile()
        for add_values in late:
            add_values()
        if next_keys is not None:
            self._put_values(next_keys, chunk)

    def _keys(self, item: Array) -> _Keys:
        return _Keys(item, self.pipeline.slot(item), 0, self.sizes.tokens)

    def _load(self, keys: _Keys, slab: int) -> Array:
        """[keys, 128]"""
        sizes, page_size = self.sizes, self.sizes.page_size
        if isinstance(keys.first, int) and (keys.first % page_size or keys.count % page_size):
            page, offset = divmod(keys.first, page_size)
            assert offset + keys.count <= page_size, "a part of a page and of the next"
            loaded = self.pipeline.kv[keys.slot, page, slab, pl.ds(offset, keys.count)]
        else:
            first = (
                keys.first // page_size
                if isinstance(keys.first, int)
                else jax.lax.div(keys.first, jnp.int32(page_size))
            )
            pages = pl.ds(first, keys.count // page_size)
            loaded = self.pipeline.kv[keys.slot, pages, slab].reshape(keys.count, LANES)
        return loaded.astype(sizes.operand)

    def _positions(self, keys: _Keys) -> Array:
        """i32[keys, 128]"""
        index = self.pipeline.index(keys.item)
        start = self.pipeline.items[index, Item.KV_BLOCK] * self.sizes.tokens + keys.first
        return start + jax.lax.broadcasted_iota(jnp.int32, (keys.count, LANES), 0)

    def _queries(self, keys: _Keys, stripe: _Stripe) -> tuple[Array, Array]:
        """Positions of the queries and numbers of the heads of a stripe's columns, i32[1, columns]."""
        per_group, pipeline, index = self.sizes.heads_per_group, self.pipeline, self.pipeline.index(keys.item)
        column = stripe.first + jax.lax.broadcasted_iota(jnp.int32, (1, stripe.count), 1)
        query = jnp.floor((column.astype(jnp.float32) + 0.5) * jnp.float32(1 / per_group)).astype(jnp.int32)
        first_pos = pipeline.first_pos(pipeline.items[index, Item.ROW], pipeline.items[index, Item.Q_BLOCK])
        first_head = (pipeline.part * self.sizes.groups + stripe.group) * per_group
        return first_pos + query, first_head + column - query * per_group

    def _scores(self, q_slot: Array, stripe: _Stripe, keys: _Keys, visible: Array | None) -> Array:
        """f32[keys, columns], in units of log2; with masks if `visible` is given, positions i32[keys, 128] of which
        those on pages that are none are `BEYOND`."""
        sizes, rules = self.sizes, self.rules
        f32 = jnp.float32
        matmul = [
            self.dot(
                side_by_side([self._load(keys, sizes.keys(stripe.group, t)) for t in pair]),
                *self._q_operand(q_slot, stripe, pair),
            )
            for pair in self.depths
        ]
        matmul = plain = functools.reduce(jnp.add, matmul)
        q_pos, head = self._queries(keys, stripe)
        if sizes.pool.scaled:
            matmul = matmul * self._scales(stripe, keys, KEYS, head)
        kv_pos = _widen(self._positions(keys), stripe.count)
        slopes = self.pipeline.inputs.slopes
        own = {} if slopes is None else dict(alibi_slopes=_Slopes(slopes, stripe.group, stripe.columns))
        scores = dataclasses.replace(rules, **own).scores_in_log2(matmul, q_pos, kv_pos, head)
        scores = choice.masked(scores, plain, rules) if sizes.pool.masked else scores
        if visible is None:
            return scores
        # Causality hides what is beyond: one comparison for both.
        visible = _widen(visible, stripe.count)
        seen = rules.seen(q_pos, visible if rules.mask_mod is None else kv_pos, head)
        return jnp.where(seen if rules.mask_mod is None else seen & (visible <= q_pos), scores, f32(MASKED))

    def _q_operand(self, q_slot: Array, stripe: _Stripe, tiles: range) -> tuple[Array, tuple]:
        """Some tiles of 128 numbers of a stripe's queries, and the dimension numbers of a matmul of keys with them."""
        own = self.scratch.q_columns_ref
        if own is None:
            first = stripe.group * self.sizes.pool.query_tiles
            q = side_by_side([self.pipeline.queries(q_slot, first + t, stripe.first, stripe.count) for t in tiles])
            return q, (((1,), (1,)), ((), ()))
        numbers = pl.ds(tiles[0] * LANES, len(tiles) * LANES)
        slabs = range(stripe.first // LANES, (stripe.first + stripe.count) // LANES)
        return side_by_side([own[stripe.group, slab, numbers] for slab in slabs]), (((1,), (0,)), ((), ()))

    def _scales(self, stripe: _Stripe, keys: _Keys, side: int, head: Array) -> Array:
        """The scales of int8 keys or values for a stripe, f32[keys, columns]."""
        sizes = self.sizes
        heads = sizes.pool.heads_per_group
        first = (self.pipeline.part * sizes.groups + stripe.group) * heads

        def of(number: int) -> Array:
            # All stripes use the same; computed anew they would need as many exponentials as the weights.
            name = id(keys.item), id(keys.first) if not isinstance(keys.first, int) else keys.first, side
            if (*name, stripe.group, number) not in self.known_scales:
                codes = self._load(keys, sizes.number_slabs)
                self.known_scales[*name, stripe.group, number] = scales_of_keys(codes, first + number, side)
            return _widen(self.known_scales[*name, stripe.group, number], stripe.count)

        found = of(0)
        for number in range(1, heads):
            found = jnp.where(head >= (first + number) * sizes.q_per_kv, of(number), found)
        return found

    def _put_scores(self, q_slot: Array, stripe: _Stripe, keys: _Keys, at: int, visible: Array | None) -> Array:
        """Store scores as those of the keys from `at` on. Returns: their maxima, f32[8, columns]."""
        scores = self._scores(q_slot, stripe, keys, visible)
        self.scratch.score_ref[stripe.group, pl.ds(at, keys.count), stripe.columns] = scores
        return _fold(scores, jnp.max)

    def _max(self, stripe: _Stripe, maxima: list[Array]) -> tuple[Array, Array]:
        """The new m, and the factor of what was summed with the old one: f32[8, columns], all rows the same."""
        before = self.scratch.m_ref[stripe.group, :, stripe.columns]
        m = jnp.maximum(before, jnp.max(functools.reduce(jnp.maximum, maxima), axis=0, keepdims=True))
        factor = jnp.exp2(before - m)
        if self.sizes.invariant:  # exactly, whatever the unit for exponentials gives for 0
            factor = jnp.where(before == m, jnp.float32(1), factor)
        return m, factor

    def _put_max(self, stripe: _Stripe, maxima: list[Array]) -> None:
        own = stripe.group, slice(None), stripe.columns
        self.scratch.m_ref[own], self.scratch.factor_ref[own] = self._max(stripe, maxima)

    def _weights(self, stripe: _Stripe, keys: _Keys, scores: Array, m: Array) -> tuple[Array, Array]:
        """The weights [keys, columns], and their sums f32[8, columns]."""
        apart = scores.reshape(-1, SUBLANES, stripe.count)
        weights = jnp.exp2(apart - m[None])
        total = jnp.sum(weights, axis=0)
        weights = weights.reshape(keys.count, stripe.count)
        if self.sizes.pool.scaled:
            weights = weights * self._scales(stripe, keys, VALUES, self._queries(keys, stripe)[1])
        return weights.astype(self.sizes.operand), total

    def _values(self, keys: _Keys, group: int) -> Array:
        """[numbers of a value, keys]"""
        tiles = []
        for t in range(self.sizes.pool.value_tiles):
            values = self._load(keys, self.sizes.values(group, t))
            if self.rules.mask_mod is not None:
                seen = _seen_by_any(self.rules, self.pipeline, keys.item, group, self._positions(keys))
                values = jnp.where(seen, values, jnp.zeros((), values.dtype))
            tiles.append(values.T)
        return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=0)

    def _put_values(self, keys: _Keys, chunk: int) -> None:
        width = self.sizes.value_width
        for group in range(self.sizes.groups):
            for at in range(0, keys.count, chunk):
                values = self._values(keys.part(at, chunk), group)
                for first in range(0, chunk, width):
                    self.scratch.value_ref[group, (at + first) // width] = values[:, first : first + width]

    def _add_values(self, stripe: _Stripe, keys: range, weights: Array, factor: Array | None) -> None:
        """Add the values of `keys`, some of those stored, times weights to acc, after its multiplication by
        `factor`."""
        own, width = (stripe.group, slice(None), stripe.columns), self.sizes.value_width
        slabs = range(keys.start // width, keys.stop // width)
        values = side_by_side([self.scratch.value_ref[stripe.group, slab] for slab in slabs])
        before = self.scratch.acc_ref[own]
        if factor is not None:
            before = (before.reshape(-1, SUBLANES, stripe.count) * factor[None]).reshape(before.shape)
        self.scratch.acc_ref[own] = before + self.dot(values, weights, (((1,), (0,)), ((), ())))


def _fold(scores: Array, reduce: Callable[..., Array]) -> Array:
    """[keys, columns] -> [8, columns], register by register."""
    return reduce(scores.reshape(-1, SUBLANES, scores.shape[1]), axis=0)


def _widen(values: Array, columns: int) -> Array:
    """[keys, 128], the same in all lanes -> [keys, columns]"""
    return values if columns == LANES else jnp.concatenate([values] * (columns // LANES), axis=1)


def _seen_by_any(rules, pipeline: Pipeline, item, group: int, kv_pos: Array) -> Array:
    """bool[keys, 128]: which keys `mask_mod` shows to some row of the query block; as in the decode path."""
    shape, index, sizes = kv_pos.shape, pipeline.index(item), pipeline.sizes
    first = pipeline.first_pos(pipeline.items[index, Item.ROW], pipeline.items[index, Item.Q_BLOCK])
    head = (pipeline.part * sizes.groups + group) * sizes.heads_per_group
    end = pipeline.end_pos(pipeline.items[index, Item.ROW], pipeline.items[index, Item.Q_BLOCK])

    def one(row, any_row):
        query = row // sizes.heads_per_group
        seen = rules.seen(
            jnp.full(shape, first + query), kv_pos, jnp.full(shape, head + row - query * sizes.heads_per_group)
        )
        return jnp.where(seen & (first + query < end), 1, any_row)

    return jax.lax.fori_loop(0, sizes.rows, one, jnp.zeros(shape, jnp.int32)) > 0


def _finish(sizes: Sizes, scratch: Scratch, slot) -> None:
    """Write the outputs of a query block, acc / l, into their buffer."""
    tiles, out = sizes.pool.value_tiles, scratch.out_buf
    for group in range(sizes.groups):
        denominator = jnp.sum(scratch.l_ref[group], axis=0, keepdims=True)
        scale = jnp.float32(1) / jnp.where(denominator == 0, jnp.float32(1), denominator)
        for t in range(tiles):
            outputs = scratch.acc_ref[group, pl.ds(t * LANES, LANES)] * scale
            at = slot, group * tiles + t
            store_rows(out, at, outputs.astype(out.dtype).T, interpreted=sizes.interpreted)
