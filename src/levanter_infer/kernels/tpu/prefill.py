"""The prefill path of the `tpu` implementation: rows with two or more queries, as chunked prefill has them.

The queries of a row are cut into query blocks, and a query block meets the keys KV block by KV block. For one group of
heads the pairs of query and head are the rows that stream through the matrix unit, so many of them that pushing keys
and values into it costs little. They are cut into stripes, so that the matmuls of one stripe overlap the softmax of
another.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import MASKED, NOTHING_SEEN
from levanter_infer.kernels.tpu.pipeline import LOG2_E, Inputs, Item, Pipeline, Rows, mask_unmapped, run_kernel
from levanter_infer.kernels.tpu.pool import LANES, TpuPool, apart, pairs, side_by_side
from levanter_infer.kernels.tpu.scales import KEYS, VALUES, load_scales, scales_of_rows
from levanter_infer.kernels.tpu.sizes import Scratch, Sizes, Tile, align_queries

STRIPE = 256
"""Rows per stripe."""
_MAX_PAIRS = 2**22
"""Up to so many pairs a comparison of all takes fewer cycles than a search."""


def prefill_attention(
    call: AttentionCall, tile: Tile, operand: jnp.dtype, *, invariant: bool = False, interpret
) -> Array:
    """Attention of rows with two or more queries.

    Args:
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
    )
    q_starts, source, target = _aligned(call, align_queries(per_group), sizes.least_queries)

    def by_row(values: Array) -> Array:
        """[Hq] -> [groups, rows, 128]"""
        rows = jnp.tile(values.reshape(groups, per_group), (1, tile.queries))
        return jnp.broadcast_to(rows[:, :, None], (groups, sizes.rows, LANES))

    q = pool.pack_queries(call.q.astype(operand)).at[source].get(mode="clip")
    q = q.transpose(1, 3, 0, 2, 4).reshape(groups * pool.lane_tiles, -1, LANES)
    if not interpret:
        # Else XLA may put them in VMEM, where a copy is a loop of loads and stores.
        q = pltpu.with_memory_space_constraint(q, memory_space=pltpu.HBM)
    out = run_kernel(attend_prefill, call, sizes, Inputs.of(call, q, by_row), q_starts, interpret=interpret)
    out = out.reshape(groups, pool.value_tiles, -1, per_group, LANES).transpose(2, 0, 3, 1, 4)
    out = out.at[target].get(mode="clip")
    return pool.unpack_outputs(out.reshape(num_tokens, groups, per_group, pool.value_tiles * LANES))


def _aligned(call: AttentionCall, align: int, least: int) -> tuple[Array, Array, Array]:
    """A layout of the tokens of rows with `least` or more, in which each row begins at a multiple of `align`.

    Returns: the first position of each row in it, i32[R]; the token at each position; the position of each token,
        i32[T].
    """
    q_lens = jnp.where(call.q_lens >= least, call.q_lens, 0)
    ends = jnp.cumsum((q_lens + (align - 1)) // align * align)
    q_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]).astype(jnp.int32)
    rows = min(call.num_rows, call.num_tokens // least)
    capacity = call.num_tokens + (align - 1) * rows
    aligned = jnp.arange(-(-capacity // align) * align, dtype=jnp.int32)
    last = call.num_rows - 1
    row = jnp.minimum(_row_at(ends, aligned), last)
    source = call.cu_q_lens[row] + aligned - q_starts[row]
    token = jnp.arange(call.num_tokens, dtype=jnp.int32)
    row = jnp.minimum(row_of_token(call), last)
    return q_starts, source, q_starts[row] + token - call.cu_q_lens[row]


def row_of_token(call: AttentionCall) -> Array:
    """The row of each token, i32[T]; R or less for padding."""
    return _row_at(call.cu_q_lens[1:], jnp.arange(call.num_tokens, dtype=jnp.int32))


def _row_at(ends: Array, places: Array) -> Array:
    """The number of `ends` at or before each place.

    Up to `_MAX_PAIRS` all pairs are compared at once. A search is a loop of gathers: of 512 places among 256 ends it
    takes a v5e 9 steps of some 6,000 cycles, and comparing takes 3,500; of 8,192 among 1,024 comparing takes 84,000.
    """
    method = "compare_all" if ends.size * places.size <= _MAX_PAIRS else "scan"
    return jnp.searchsorted(ends, places, side="right", method=method).astype(jnp.int32)


def attend_prefill(rows: Rows, inputs: Inputs, out_ref, scratch: Scratch, *, call: AttentionCall, sizes: Sizes):
    pipeline = Pipeline(call, sizes, rows, inputs, out_ref, scratch)

    def unmasked(item, q_slot, prefetch):
        _compute(call, pipeline, item, q_slot, None, prefetch)

    def masked(item, q_slot):
        def one(subblock, carry):
            _compute(call, pipeline, item, q_slot, subblock, None)
            return carry

        jax.lax.fori_loop(*pipeline.live_subblocks(item), one, 0)

    def finish(slot):
        _finish(sizes, scratch, slot)
        _reset(inputs, scratch)

    _reset(inputs, scratch)
    pipeline.run(unmasked if call.rules.mask_mod is None else None, masked, finish)


def _reset(inputs: Inputs, scratch: Scratch) -> None:
    """Set m, l and acc to what they are before the first key."""
    shape = scratch.m_ref.shape
    if inputs.sinks is not None:
        scratch.m_ref[...] = inputs.sinks[...]
        lane = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
        scratch.l_ref[...] = jnp.where(lane == 0, jnp.float32(1), jnp.float32(0))
    else:
        scratch.m_ref[...] = jnp.full(shape, NOTHING_SEEN, jnp.float32)
        scratch.l_ref[...] = jnp.zeros(shape, jnp.float32)
    scratch.acc_ref[...] = jnp.zeros(scratch.acc_ref.shape, jnp.float32)


class _Slopes:
    """ALiBi's slopes of a stripe, indexed as `ScoreRules` does."""

    def __init__(self, ref, group: int, stripe):
        self._slopes = ref[group, stripe, :1]

    def __getitem__(self, head: Array) -> Array:
        return self._slopes


def _compute(call: AttentionCall, pipeline: Pipeline, item, q_slot, subblock, prefetch) -> None:
    """Add a work item, or one sub-block of it, to the attention of its query block.

    Args:
        subblock: None for the whole item, without masks; else index of the sub-block.
        prefetch: as in the decode path.
    """
    sizes, inputs, scratch, f32 = pipeline.sizes, pipeline.inputs, pipeline.scratch, jnp.float32
    index, slot, tiles = pipeline.index(item), pipeline.slot(item), sizes.pool.lane_tiles
    value_tiles = sizes.pool.value_tiles
    masked = subblock is not None
    pages, first_page = (sizes.subblock_pages, subblock * sizes.subblock_pages) if masked else (sizes.tile.pages, 0)
    if sizes.invariant:
        pages = sizes.subblock_pages
    stretches = 1 if masked else sizes.tile.pages // pages
    width = pages * sizes.page_size
    rules = dataclasses.replace(call.rules, sliding_window=pipeline.window)
    plain = rules.soft_cap is None and rules.alibi_slopes is None and rules.score_mod is None
    start = pipeline.items[index, Item.KV_BLOCK] * sizes.tokens + first_page * sizes.page_size
    first_pos = pipeline.first_pos(pipeline.items[index, Item.ROW], pipeline.items[index, Item.Q_BLOCK])
    per_group = sizes.heads_per_group
    stripe_rows = STRIPE if sizes.rows % STRIPE == 0 else sizes.rows
    stripes = sizes.rows // stripe_rows
    first_kv_pos = start + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    mapped = mask_unmapped(pipeline, item, first_kv_pos) if masked else None
    all_scales = [load_scales(pipeline, slot, first_page + i * pages, pages) for i in range(stretches)]
    dot = functools.partial(
        jax.lax.dot_general,
        preferred_element_type=f32,
        precision=None if sizes.operand.itemsize < 4 else jax.lax.Precision.HIGHEST,
    )

    def load(slab, stretch):
        own = pl.ds(first_page + stretch * pages, pages)
        return pipeline.kv[slot, own, slab].reshape(width, LANES).astype(sizes.operand)

    def rows_of(stripe):
        at = stripe * stripe_rows
        return pl.ds(at if isinstance(stripe, int) else pl.multiple_of(at, stripe_rows), stripe_rows)

    def positions(group, stripe):
        """Positions of the queries and numbers of the heads of a stripe's rows, i32[rows, 1]."""
        row = stripe * stripe_rows + jax.lax.broadcasted_iota(jnp.int32, (stripe_rows, 1), 0)
        query = jnp.floor((row.astype(f32) + f32(0.5)) * f32(1 / per_group)).astype(jnp.int32)
        return first_pos + query, (pipeline.part * sizes.groups + group) * per_group + row - query * per_group

    def scores_of(stretch, group, stripe):
        """f32[stripe_rows, width]"""
        matmul = [
            dot(
                side_by_side([scratch.q_buf[q_slot, group * tiles + t, rows_of(stripe)] for t in pair]),
                side_by_side([load(sizes.keys(group, t), stretch) for t in pair]),
                (((1,), (1,)), ((), ())),
            )
            for pair in pairs(tiles)
        ]
        matmul = functools.reduce(jnp.add, matmul)
        q_pos, head = positions(group, stripe)
        scales, kv_pos = all_scales[stretch], first_kv_pos + stretch * width if stretch else first_kv_pos
        if scales is not None:
            matmul = matmul * scales_of_rows(pipeline, scales, group, KEYS, head)
        if plain:
            scores = matmul * f32(rules.scale * LOG2_E)
        else:
            own = {} if inputs.slopes is None else dict(alibi_slopes=_Slopes(inputs.slopes, group, rows_of(stripe)))
            scores = dataclasses.replace(rules, **own).scores(matmul, q_pos, kv_pos, head) * f32(LOG2_E)
        if mapped is None:
            return scores
        return jnp.where(rules.seen(q_pos, kv_pos, head) & mapped, scores, f32(MASKED))

    def weights_of(stretch, group, stripe, scores):
        """The weights [stripe_rows, width] and alpha; updates m and l."""
        rows, scales = rows_of(stripe), all_scales[stretch]
        m_prev = scratch.m_ref[group, rows]
        m_new = jnp.maximum(m_prev, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - m_new[:, :1])
        alpha = jnp.exp2(m_prev - m_new)
        if sizes.invariant:  # exactly, whatever the unit for exponentials gives for 0
            alpha = jnp.where(m_prev == m_new, f32(1), alpha)
        scratch.m_ref[group, rows] = m_new
        columns = [weights[:, at : at + LANES] for at in range(0, width, LANES)]
        if width % LANES:
            columns[-1] = jnp.pad(columns[-1], ((0, 0), (0, LANES - width % LANES)))
        scratch.l_ref[group, rows] = scratch.l_ref[group, rows] * alpha + functools.reduce(jnp.add, columns)
        if scales is not None:
            weights = weights * scales_of_rows(pipeline, scales, group, VALUES, positions(group, stripe)[1])
        return weights.astype(sizes.operand), alpha

    def add_values(stretch, group, stripe, weights, alpha):
        for pair in pairs(value_tiles):
            loaded = [load(sizes.values(group, t), stretch) for t in pair]
            if rules.mask_mod is not None:
                seen = _seen_by_any(rules, pipeline, item, group, start, width)
                loaded = [jnp.where(seen, values, jnp.zeros((), values.dtype)) for values in loaded]
            places = [(group * value_tiles + t, rows_of(stripe)) for t in pair]
            before = [scratch.acc_ref[at] * alpha for at in places]
            sums = apart(dot(weights, side_by_side(loaded), (((1,), (0,)), ((), ()))))
            for at, old, new in zip(places, before, sums, strict=True):
                scratch.acc_ref[at] = old + new

    if masked:
        for group in range(sizes.groups):

            def one(stripe, carry, group=group):
                unit = 0, group, stripe
                add_values(*unit, *weights_of(*unit, scores_of(*unit)))
                return carry

            jax.lax.fori_loop(0, stripes, one, 0)
        return
    # The matmuls of a stripe are written before the softmax of the one before it, so that they overlap.
    order = list(itertools.product(range(stretches), range(sizes.groups), range(stripes)))
    scores = scores_of(*order[0])
    if prefetch is not None:
        prefetch(range(sizes.tile.pages))
    for step, unit in enumerate(order):
        next_scores = scores_of(*order[step + 1]) if step + 1 < len(order) else None
        add_values(*unit, *weights_of(*unit, scores))
        scores = next_scores


def _seen_by_any(rules, pipeline: Pipeline, item, group: int, start, width: int) -> Array:
    """bool[width, 128]: which keys `mask_mod` shows to some row of the query block; as in the decode path."""
    shape, index, sizes = (width, LANES), pipeline.index(item), pipeline.sizes
    first = pipeline.first_pos(pipeline.items[index, Item.ROW], pipeline.items[index, Item.Q_BLOCK])
    kv_pos = start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
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
        denominator = jnp.sum(scratch.l_ref[group], axis=1, keepdims=True)
        scale = jnp.float32(1) / jnp.where(denominator == 0, jnp.float32(1), denominator)
        for t in range(tiles):
            tile = group * tiles + t
            out[slot, tile] = (scratch.acc_ref[tile] * scale).astype(out.dtype)
