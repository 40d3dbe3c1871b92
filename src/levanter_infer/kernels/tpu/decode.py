"""The decode path of the `tpu` implementation: rows with one query.

A work item is computed head by head: matmuls with all its keys, the weights of the softmax, matmuls with all its
values. Keys and values are the stationary operand of the matrix unit, because they are many and the queries are few;
pushing them into it limits the speed. The code of all heads stands side by side so that the scheduler can overlap it:
the latencies of one head hide behind another's work, and async copies are started between the matmuls, where there are
free slots.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import MASKED, NOTHING_SEEN
from levanter_infer.kernels.tpu import choice
from levanter_infer.kernels.tpu.pipeline import Pipeline, mask_unmapped, run_kernel
from levanter_infer.kernels.tpu.pool import LANES, TpuPool, apart, pairs, side_by_side
from levanter_infer.kernels.tpu.scales import KEYS, VALUES, key_order, load_numbers, load_scales, scales_of_rows
from levanter_infer.kernels.tpu.sizes import SUBLANES, Scratch, Sizes, Tile
from levanter_infer.kernels.tpu.tables import Inputs, Tables
from levanter_infer.kernels.tpu.tiling import shifts_words
from levanter_infer.kernels.tpu.word_rows import packing, store_rows
from levanter_infer.kernels.tpu.work_items import Item, Rows

MANY_PAGES = 32
"""Pages of a KV block beyond which the copies of a later block are started at two places of the schedule."""
STRETCHES = 2
"""Stretches of a KV block that one group of heads computes side by side, as several groups do."""


def decode_attention(call: AttentionCall, tile: Tile, operand: jnp.dtype, *, interpret) -> Array:
    """Attention of rows with one query.

    Args:
        operand: dtype of the matmuls' operands.
        interpret: as `pallas_call` takes it.
    Returns: `call.out_shape`; unspecified at the tokens of other rows.
    """
    pool = TpuPool.of(call)
    num_tokens, num_heads, _ = call.q.shape
    groups, q_rows = pool.groups, num_heads // pool.groups
    sharing = _sharing_groups(groups, groups // tile.parts, q_rows, packing(call.q.dtype))
    blocks, used = groups // sharing, sharing * q_rows
    rows = -(-used // SUBLANES) * SUBLANES
    sizes = Sizes(
        tile=tile,
        pool=pool,
        page_size=call.page_size,
        q_per_kv=call.heads_per_kv_head,
        rows=rows,
        operand=operand,
        in_words=pool.scaled and call.page_size % 32 == 0 and shifts_words(),
        sharing=sharing,
        interpreted=bool(interpret),
    )

    def by_group(values: Array) -> Array:
        """[Hq] -> [groups, rows, 128]"""
        padded = jnp.pad(values.reshape(blocks, used), ((0, 0), (0, rows - used)))
        return jnp.broadcast_to(jnp.repeat(padded, sharing, axis=0)[:, :, None], (groups, rows, LANES))

    q = choice.with_own_lane(pool.pack_queries(call.q.astype(operand)), call, 1)
    q = q.reshape(num_tokens, blocks, used, pool.query_tiles, LANES)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - used), (0, 0), (0, 0))).swapaxes(2, 3)
    q = q.reshape(num_tokens, blocks * pool.query_tiles, rows, LANES)
    tables = Tables.of(call, tile)
    out = run_kernel(attend_decode, call, sizes, tables.rows, Inputs.of(call, tables, q, by_group), interpret=interpret)
    out = out.reshape(num_tokens, blocks, pool.value_tiles, rows, LANES).swapaxes(2, 3)[:, :, :used]
    return pool.unpack_outputs(out.reshape(num_tokens, groups, q_rows, pool.value_tiles * LANES))


def _sharing_groups(groups: int, groups_per_part: int, q_rows: int, pack: int) -> int:
    """Groups of heads whose queries fill the rows of one register, as `Sizes.sharing`.

    A group of its own would be filled up with rows that are computed all the same, and XLA would copy queries into that
    form, and the results out of it.

    Args:
        pack: rows of the outputs per word row. Parts share a register if each has whole ones.
    """
    fitting = [n for n in range(1, groups + 1) if groups % n == 0 and (n == 1 or n * q_rows <= SUBLANES)]
    has_word_rows = groups_per_part * q_rows % pack == 0
    return max(n for n in fitting if groups_per_part % n == 0 or (n % groups_per_part == 0 and has_word_rows))


def attend_decode(rows: Rows, inputs: Inputs, out_ref, scratch: Scratch, *, call: AttentionCall, sizes: Sizes):
    pipeline = Pipeline(call, sizes, rows, inputs, out_ref, scratch)

    def unmasked(item, q_slot, prefetch):
        _compute(call, pipeline, item, q_slot, None, prefetch)

    def masked(item, q_slot):
        first, end = pipeline.live_subblocks(item)

        def one(subblock, carry):
            _compute(call, pipeline, item, q_slot, (subblock, subblock == first), None)
            return carry

        jax.lax.fori_loop(first, end, one, 0)

    finish = functools.partial(_finish, pipeline)
    pipeline.run(unmasked if call.rules.mask_mod is None else None, masked, finish)


class _Slopes:
    """ALiBi's slopes of one group, indexed as `ScoreRules` does."""

    def __init__(self, ref, group: int):
        self._slopes = ref[group, :, :1]

    def __getitem__(self, head: Array) -> Array:
        return self._slopes


def _compute(call: AttentionCall, pipeline: Pipeline, item, q_slot, subblock, prefetch) -> None:
    """Add a work item, or one sub-block of it, to the attention of its row.

    Args:
        subblock: None for the whole item, without masks; else (index of the sub-block, whether it is the item's first).
        prefetch: starts the copies of pages of a later item (`Pipeline.page_prefetcher`); None for none.
    """
    sizes, inputs, scratch, f32 = pipeline.sizes, pipeline.inputs, pipeline.scratch, jnp.float32
    index, slot, tiles = pipeline.index(item), pipeline.slot(item), pipeline.sizes.pool.query_tiles
    rules = dataclasses.replace(call.rules, sliding_window=pipeline.window)
    value_tiles = sizes.pool.value_tiles
    is_first = pipeline.items[index, Item.IS_FIRST] == 1
    if subblock is None:
        pages, first_page = sizes.tile.pages, 0
    else:
        pages = sizes.subblock_pages
        first_page, is_first = subblock[0] * pages, is_first & subblock[1]
    stretches = STRETCHES if subblock is None and sizes.groups == 1 and pages % STRETCHES == 0 else 1
    pages //= stretches
    width = pages * sizes.page_size
    start = pipeline.items[index, Item.KV_BLOCK] * sizes.tokens + first_page * sizes.page_size
    q_row = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, 1), 0)
    first_kv_pos = start + key_order(sizes, jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, width), 1), width)
    q_pos = jnp.full((sizes.rows, 1), pipeline.seq_lens[pipeline.items[index, Item.ROW]] - 1)
    mapped = None if subblock is None else mask_unmapped(pipeline, item, first_kv_pos)
    scales = [load_scales(pipeline, slot, first_page + i * pages, pages) for i in range(stretches)]
    dot = functools.partial(
        jax.lax.dot_general,
        preferred_element_type=f32,
        precision=None if sizes.operand.itemsize < 4 else jax.lax.Precision.HIGHEST,
    )

    def load(slab, stretch):
        return load_numbers(pipeline, slot, first_page + stretch * pages, pages, slab)

    def head_of(group, row):
        """Query head of each row of the group's block; padded rows repeat the last."""
        first = (pipeline.part - pipeline.place) * sizes.groups + group - group % sizes.sharing
        per_group = sizes.heads_per_group
        return first * per_group + jnp.minimum(row, sizes.sharing * per_group - 1)

    def scores_of(group, stretch):
        """f32[rows, width]"""
        matmul = [
            dot(
                side_by_side([scratch.q_buf[q_slot, group // sizes.sharing * tiles + t] for t in pair]),
                side_by_side([load(sizes.keys(group, t), stretch) for t in pair]),
                (((1,), (1,)), ((), ())),
            )
            for pair in pairs(tiles)
        ]
        matmul = plain = functools.reduce(jnp.add, matmul)
        head, kv_pos = head_of(group, q_row), first_kv_pos + stretch * width if stretch else first_kv_pos
        if scales[stretch] is not None:
            matmul = matmul * scales_of_rows(pipeline, scales[stretch], group, KEYS, head)
        own = {} if inputs.slopes is None else dict(alibi_slopes=_Slopes(inputs.slopes, group))
        scores = dataclasses.replace(rules, **own).scores_in_log2(matmul, q_pos, kv_pos, head)
        scores = choice.masked(scores, plain, rules) if sizes.pool.masked else scores
        if mapped is None:
            return scores
        return jnp.where(rules.seen(q_pos, kv_pos, head) & mapped, scores, f32(MASKED))

    def carried(value, stretch, init):
        """The running value that the keys before a stretch left."""
        return jnp.where(is_first, init, value) if stretch == 0 else value

    def weights_of(group, stretch, scores):
        """The weights [rows, width] and alpha; updates m and l."""
        m_init, l_init = f32(NOTHING_SEEN), f32(0)
        if inputs.sinks is not None:
            lane = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, LANES), 1)
            m_init, l_init = inputs.sinks[group], jnp.where(lane == 0, f32(1), f32(0))
        m_prev = carried(scratch.m_ref[group], stretch, m_init)
        l_prev = carried(scratch.l_ref[group], stretch, l_init)
        m_new = jnp.maximum(m_prev, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - m_new[:, :1])
        alpha = jnp.exp2(m_prev - m_new)
        scratch.m_ref[group] = m_new
        # Summed over lanes only when the row ends.
        columns = [weights[:, at : at + LANES] for at in range(0, width, LANES)]
        if width % LANES:
            columns[-1] = jnp.pad(columns[-1], ((0, 0), (0, LANES - width % LANES)))
        scratch.l_ref[group] = l_prev * alpha + functools.reduce(jnp.add, columns)
        if scales[stretch] is not None:
            weights = weights * scales_of_rows(pipeline, scales[stretch], group, VALUES, head_of(group, q_row))
        return weights.astype(sizes.operand), alpha

    def add_values(group, stretch, weights, alpha):
        for pair in pairs(value_tiles):
            loaded = [load(sizes.values(group, t), stretch) for t in pair]
            if rules.mask_mod is not None:
                first_head = (pipeline.part * sizes.groups + group) * sizes.heads_per_group
                heads = [first_head + i for i in range(sizes.heads_per_group)]
                seen = _seen_by_any(rules, sizes, start, q_pos[0, 0], width, heads)
                loaded = [jnp.where(seen, values, jnp.zeros((), values.dtype)) for values in loaded]
            at = [group * value_tiles + t for t in pair]
            before = [carried(scratch.acc_ref[tile], stretch, f32(0)) * alpha for tile in at]
            sums = apart(dot(weights, side_by_side(loaded), (((1,), (0,)), ((), ()))))
            for tile, old, new in zip(at, before, sums, strict=True):
                scratch.acc_ref[tile] = old + new

    # As far as the compiler knows a copy may fill what a load reads, so that neither passes the other: where they
    # alternate, it loads too early and spills. So all copies are started at one place, when half of the matmuls with
    # keys have been issued and overlap with them; many, of small pages, take so long that two places are better.
    units = [(group, stretch) for group in range(sizes.groups) for stretch in range(stretches)]
    count, places, scores = sizes.tile.pages, 1 if sizes.tile.pages <= MANY_PAGES else 2, []
    for number, unit in enumerate(units, 1):
        scores.append(scores_of(*unit))
        for place in range(places):
            if prefetch is not None and number == -(-len(units) * (place + 1) // (places + 1)):
                prefetch(range(count * place // places, count * (place + 1) // places))
    weighted = [weights_of(*unit, own) for unit, own in zip(units, scores, strict=True)]
    for unit, own in zip(units, weighted, strict=True):
        add_values(*unit, *own)


def _seen_by_any(rules, sizes: Sizes, start, q_pos, width: int, heads: Sequence) -> Array:
    """bool[width, 128]: which keys `mask_mod` shows to some of a group's heads. The values of the others are set to 0,
    because a weight of 0 does not suffice: 0 * NaN is NaN."""
    shape = (width, LANES)
    kv_pos = start + key_order(sizes, jax.lax.broadcasted_iota(jnp.int32, shape, 0), width)
    seen = [rules.seen(jnp.full(shape, q_pos), kv_pos, jnp.full(shape, head)) for head in heads]
    return functools.reduce(jnp.logical_or, seen)


def _finish(pipeline: Pipeline, slot) -> None:
    """Write the outputs of a query block, acc / l, into their buffer."""
    sizes, scratch = pipeline.sizes, pipeline.scratch
    tiles, sharing, out = sizes.pool.value_tiles, min(sizes.sharing, sizes.groups), scratch.out_buf
    row = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, LANES), 0)
    first_row = pipeline.place * sizes.groups * sizes.heads_per_group

    def own_rows(groups: Sequence[Array]) -> Array:
        """The rows of each of the part's groups that share them, from its own results."""
        return functools.reduce(
            lambda found, i: jnp.where(row >= first_row + i * sizes.heads_per_group, groups[i], found),
            range(1, sharing),
            groups[0],
        )

    for block in range(sizes.groups // sharing):
        groups = range(block * sharing, (block + 1) * sharing)
        sums = [[scratch.acc_ref[group * tiles + t] for group in groups] for t in range(tiles)]
        denominator = jnp.sum(own_rows([scratch.l_ref[group] for group in groups]), axis=1, keepdims=True)
        scale = jnp.float32(1) / jnp.where(denominator == 0, jnp.float32(1), denominator)
        for t, each in enumerate(sums):
            outputs = (own_rows(each) * scale).astype(out.dtype)
            if sizes.sharing_parts == 1:
                out[slot, block * tiles + t] = outputs
            else:
                store_rows(out, (slot, block * tiles + t), outputs, interpreted=sizes.interpreted)
