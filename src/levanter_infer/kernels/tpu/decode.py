"""The decode path of the `tpu` implementation: rows with one query.

An item is computed head by head: matmuls with all its keys, the softmax's weights, matmuls with all its values. Keys
and values are the weights that the matrix unit holds, because they are many and the queries are few; pushing them is
what sets the speed. What is written side by side may run side by side: the heads' chains of latencies hide behind each
other, and transfers are started between the matmuls, where the scheduler has room.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import MASKED, NOTHING_SEEN
from levanter_infer.kernels.tpu.pipeline import (
    BLOCK,
    FIRST,
    ROW,
    Walk,
    id_chunks,
    meta,
    rows_with_none,
    without_none,
)
from levanter_infer.kernels.tpu.pool import LANES
from levanter_infer.kernels.tpu.scales import KEYS, VALUES, load_scales, scales_of_rows
from levanter_infer.kernels.tpu.sizes import Sizes, Tile

LOG2_E = math.log2(math.e)
MANY_PAGES = 32
"""Of an item: transfers of more are started at two places of the schedule."""


def decode_rows(call: AttentionCall, tile: Tile, operand: jnp.dtype, *, interpret) -> Array:
    """Attention of the tokens that are alone in their row.

    Returns: [T, Hq, D]; anything at other tokens.
    """
    pool = call.tpu_pool
    assert pool is not None
    num_tokens, num_heads, _ = call.q.shape
    groups, q_rows = pool.groups, num_heads // pool.groups
    rows = -(-q_rows // 8) * 8
    sizes = Sizes(
        tile=tile,
        pool=pool,
        page_size=call.page_size,
        q_per_kv=call.heads_per_kv_head,
        rows=rows,
        operand=operand,
    )

    def by_group(values: Array) -> Array:
        """[Hq] -> [groups, rows, 128]"""
        padded = jnp.pad(values.reshape(groups, q_rows), ((0, 0), (0, rows - q_rows)))
        return jnp.broadcast_to(padded[:, :, None], (groups, rows, LANES))

    q = pool.place_queries(call.q.astype(operand))
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - q_rows), (0, 0), (0, 0))).swapaxes(2, 3)
    q = q.reshape(num_tokens, groups * pool.lane_tiles, rows, LANES)
    inputs = dict(q=q, kv=call.kv_pages.reshape(-1, *call.kv_pages.shape[2:]), ids=id_chunks(call.page_indices))
    heads = {}
    if call.rules.alibi_slopes is not None:
        heads["slopes"] = by_group(call.rules.alibi_slopes)
    if call.sinks is not None:
        heads["sinks"] = by_group(call.sinks * jnp.float32(LOG2_E))
    part = pl.BlockSpec((sizes.groups, rows, LANES), lambda part, *_: (part, 0, 0))
    scratch = sizes.scratch(call.kv_pages.dtype, call.q.dtype)
    per_group = pltpu.VMEM((sizes.groups, rows, LANES), jnp.float32)
    scratch |= dict(high=per_group, total=per_group, acc=pltpu.VMEM((sizes.q_tiles, rows, LANES), jnp.float32))
    out = pl.pallas_call(
        functools.partial(_decode, call=call, sizes=sizes),
        out_shape=jax.ShapeDtypeStruct(q.shape, call.q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(tile.parts,),
            in_specs=[dict.fromkeys(inputs, pl.BlockSpec(memory_space=pl.ANY)), dict.fromkeys(heads, part)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[scratch],
        ),
        # Page ids are clamped before they are used, and the interpreter of the tests finds what lies outside.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True, disable_semaphore_checks=True
        ),
        name="attend_decode",
        interpret=interpret,
    )(call.seq_lens, call.cu_q_lens, meta(call), rows_with_none(call), inputs, heads)
    out = out.reshape(num_tokens, groups, pool.lane_tiles, rows, LANES).swapaxes(2, 3)[:, :, :q_rows]
    return pool.take_outputs(out.reshape(num_tokens, groups, q_rows, pool.lane_tiles * LANES))


def _decode(seq_lens, cu_q_lens, meta, has_none, inputs, heads, out_ref, scratch, *, call: AttentionCall, sizes: Sizes):
    walk = Walk(call, sizes, seq_lens, cu_q_lens, meta, has_none, cu_q_lens, inputs, out_ref, scratch)
    narrow = sizes.narrow_pages

    def whole(item, q_slot, send):
        _compute(call, walk, heads, item, q_slot, None, send)

    def masked(item, q_slot):
        first, until = walk.live_parts(item)

        def one(part, carry):
            _compute(call, walk, heads, item, q_slot, (part, part == first), None)
            return carry

        jax.lax.fori_loop(first, until, one, 0)

    walk.run(whole if call.rules.mask_mod is None else None, masked, narrow, functools.partial(_finish, sizes, scratch))


class _Slopes:
    """ALiBi's slopes of one group, as `ScoreRules` asks for them."""

    def __init__(self, ref, group: int):
        self._slopes = ref[group, :, :1]

    def __getitem__(self, head: Array) -> Array:
        return self._slopes


def _compute(call: AttentionCall, walk: Walk, heads, item, q_slot, masked, send) -> None:
    """An item's share of its row's attention, or a narrow part of it.

    Args:
        masked: None for the whole item, all of it seen; else (number of the narrow part, whether it is the first).
        send: sends for pages of a later item (`Walk.sender`); None to send for nothing.
    """
    sizes, scratch, f32 = walk.sizes, walk.scratch, jnp.float32
    index, slot, tiles = walk.index(item), walk.slot(item), walk.sizes.pool.lane_tiles
    rules = dataclasses.replace(call.rules, sliding_window=walk.window)
    plain = rules.soft_cap is None and rules.alibi_slopes is None and rules.score_mod is None
    first = walk.items[index, FIRST] == 1
    if masked is None:
        pages, first_page = sizes.tile.pages, 0
    else:
        pages = sizes.narrow_pages
        first_page, first = masked[0] * pages, first & masked[1]
    width = pages * sizes.page_size
    start = walk.items[index, BLOCK] * sizes.tokens + first_page * sizes.page_size
    q_row = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, 1), 0)
    kv_pos = start + jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, width), 1)
    q_pos = jnp.full((sizes.rows, 1), walk.seq_lens[walk.items[index, ROW]] - 1)
    exists = None if masked is None else without_none(walk, item, kv_pos)
    scales = load_scales(walk, slot, first_page, pages)
    dot = functools.partial(
        jax.lax.dot_general,
        preferred_element_type=f32,
        precision=None if sizes.operand.itemsize < 4 else jax.lax.Precision.HIGHEST,
    )

    def load(slab):
        return walk.kv[slot, pl.ds(first_page, pages), slab].reshape(width, LANES).astype(sizes.operand)

    def head_of(group, row):
        """Query head of each row; padded rows repeat the last."""
        per_group = sizes.heads_per_group
        return (walk.part * sizes.groups + group) * per_group + jnp.minimum(row, per_group - 1)

    def scores_of(group):
        matmul = [
            dot(scratch["q_buf"][q_slot, group * tiles + t], load(sizes.keys(group, t)), (((1,), (1,)), ((), ())))
            for t in range(tiles)
        ]
        matmul = functools.reduce(jnp.add, matmul)
        head = head_of(group, q_row)
        if scales is not None:
            matmul = matmul * scales_of_rows(walk, scales, group, KEYS, head)
        if plain:
            scores = matmul * f32(rules.scale * LOG2_E)
        else:
            own = {} if "slopes" not in heads else dict(alibi_slopes=_Slopes(heads["slopes"], group))
            scores = dataclasses.replace(rules, **own).scores(matmul, q_pos, kv_pos, head) * f32(LOG2_E)
        if exists is None:
            return scores
        return jnp.where(rules.seen(q_pos, kv_pos, head) & exists, scores, f32(MASKED))

    def weights_of(group, scores):
        nothing = f32(NOTHING_SEEN), f32(0)
        if "sinks" in heads:
            lane = jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, LANES), 1)
            nothing = heads["sinks"][group], jnp.where(lane == 0, f32(1), f32(0))
        high = jnp.where(first, nothing[0], scratch["high"][group])
        total = jnp.where(first, nothing[1], scratch["total"][group])
        new_high = jnp.maximum(high, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - new_high[:, :1])
        shrink = jnp.exp2(high - new_high)
        scratch["high"][group] = new_high
        # Summed over lanes only when the row ends.
        parts = [weights[:, at : at + LANES] for at in range(0, width, LANES)]
        if width % LANES:
            parts[-1] = jnp.pad(parts[-1], ((0, 0), (0, LANES - width % LANES)))
        scratch["total"][group] = total * shrink + functools.reduce(jnp.add, parts)
        if scales is not None:
            weights = weights * scales_of_rows(walk, scales, group, VALUES, head_of(group, q_row))
        return weights.astype(sizes.operand), shrink

    def add_values(group, weights, shrink):
        for t in range(tiles):
            values = load(sizes.values(group, t))
            if rules.mask_mod is not None:
                seen = _seen_by_any(rules, sizes, start, q_pos[0, 0], width, functools.partial(head_of, group))
                values = jnp.where(seen, values, jnp.zeros((), values.dtype))
            place = group * tiles + t
            acc = jnp.where(first, f32(0), scratch["acc"][place])
            scratch["acc"][place] = acc * shrink + dot(weights, values, (((1,), (0,)), ((), ())))

    # As far as the compiler knows a transfer may fill what a load reads, so that neither passes the other: where they
    # alternate, it loads too early and spills. All are started between the last product with keys and the first with
    # values.
    # As far as the compiler knows a transfer may fill what a load reads, so that neither passes the other: where they
    # alternate, it loads too early and spills. So all are started at one place, when half of the matmuls with keys are
    # there to be worked on meanwhile; many, of small pages, take so long that two places are better.
    count, turns, scores = sizes.tile.pages, 1 if sizes.tile.pages <= MANY_PAGES else 2, []
    for group in range(sizes.groups):
        scores.append(scores_of(group))
        for turn in range(turns):
            if send is not None and group + 1 == -(-sizes.groups * (turn + 1) // (turns + 1)):
                send(range(count * turn // turns, count * (turn + 1) // turns))
    weighted = [weights_of(group, scores[group]) for group in range(sizes.groups)]
    for group in range(sizes.groups):
        add_values(group, *weighted[group])


def _seen_by_any(rules, sizes: Sizes, start, q_pos, width: int, head_of) -> Array:
    """bool[width, 128]: which keys `mask_mod` shows to some head of the group. 0 * NaN is NaN: the others' values are
    cleared, not only given no weight."""
    shape = (width, LANES)
    kv_pos = start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    seen = [
        rules.seen(jnp.full(shape, q_pos), kv_pos, jnp.full(shape, head_of(row)))
        for row in range(sizes.heads_per_group)
    ]
    return functools.reduce(jnp.logical_or, seen)


def _finish(sizes: Sizes, scratch, slot) -> None:
    """The row's output, from the sums over all its items."""
    tiles, out = sizes.pool.lane_tiles, scratch["out_buf"]
    for group in range(sizes.groups):
        total = jnp.sum(scratch["total"][group], axis=1, keepdims=True)
        scale = jnp.float32(1) / jnp.where(total == 0, jnp.float32(1), total)
        for t in range(tiles):
            place = group * tiles + t
            out[slot, place] = (scratch["acc"][place] * scale).astype(out.dtype)
