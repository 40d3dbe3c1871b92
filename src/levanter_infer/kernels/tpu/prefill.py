"""The chunk path of the `tpu` implementation: rows with many queries.

Their queries are computed in blocks, and a block meets the keys item by item. For one group of heads the pairs of query
and head are the rows that stream through the matrix unit, so many of them that pushing keys and values costs little;
they are cut into stripes whose matmuls, softmax and matmuls overlap each other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import MASKED, NOTHING_SEEN
from levanter_infer.kernels.tpu.decode import LOG2_E
from levanter_infer.kernels.tpu.pipeline import (
    BLOCK,
    QUERIES,
    ROW,
    Walk,
    id_chunks,
    meta,
    rows_with_none,
    without_none,
)
from levanter_infer.kernels.tpu.pool import LANES
from levanter_infer.kernels.tpu.scales import KEYS, VALUES, load_scales, scales_of_rows
from levanter_infer.kernels.tpu.sizes import Sizes, Tile, align_queries

STRIPE = 256
"""Rows of a stripe."""


def chunk_rows(call: AttentionCall, tile: Tile, operand: jnp.dtype, *, interpret) -> Array:
    """Attention of the tokens of rows that hold two or more.

    Returns: [T, Hq, D]; anything at other tokens.
    """
    pool = call.tpu_pool
    assert pool is not None
    num_tokens, num_heads, _ = call.q.shape
    groups, per_group = pool.groups, num_heads // pool.groups
    sizes = Sizes(
        tile=tile,
        pool=pool,
        page_size=call.page_size,
        q_per_kv=call.heads_per_kv_head,
        rows=tile.queries * per_group,
        operand=operand,
    )
    places, source, target = _aligned(call, align_queries(per_group))

    def by_row(values: Array) -> Array:
        """[Hq] -> [groups, rows, 128]"""
        rows = jnp.tile(values.reshape(groups, per_group), (1, tile.queries))
        return jnp.broadcast_to(rows[:, :, None], (groups, sizes.rows, LANES))

    q = pool.place_queries(call.q.astype(operand)).at[source].get(mode="clip")
    q = q.transpose(1, 3, 0, 2, 4).reshape(groups * pool.lane_tiles, -1, LANES)
    kv = call.kv_pages.reshape(-1, *call.kv_pages.shape[2:])
    if not interpret:
        # Else XLA may put them in VMEM, where a transfer is a loop of loads and stores.
        q = pltpu.with_memory_space_constraint(q, memory_space=pltpu.HBM)
    inputs = dict(q=q, kv=kv, ids=id_chunks(call.page_indices))
    heads = {}
    if call.rules.alibi_slopes is not None:
        heads["slopes"] = by_row(call.rules.alibi_slopes)
    if call.sinks is not None:
        heads["sinks"] = by_row(call.sinks * jnp.float32(LOG2_E))
    part = pl.BlockSpec((sizes.groups, sizes.rows, LANES), lambda part, *_: (part, 0, 0))
    scratch = sizes.scratch(call.kv_pages.dtype, call.q.dtype)
    per_row = pltpu.VMEM((sizes.groups, sizes.rows, LANES), jnp.float32)
    scratch |= dict(high=per_row, total=per_row, acc=pltpu.VMEM((sizes.q_tiles, sizes.rows, LANES), jnp.float32))
    out = pl.pallas_call(
        functools.partial(_chunk, call=call, sizes=sizes),
        out_shape=jax.ShapeDtypeStruct(q.shape, call.q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(tile.parts,),
            in_specs=[dict.fromkeys(inputs, pl.BlockSpec(memory_space=pl.ANY)), dict.fromkeys(heads, part)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[scratch],
        ),
        # As in the decode path.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True, disable_semaphore_checks=True
        ),
        name="attend_chunk",
        interpret=interpret,
    )(call.seq_lens, call.cu_q_lens, meta(call), rows_with_none(call), places, inputs, heads)
    out = out.reshape(groups, pool.lane_tiles, -1, per_group, LANES).transpose(2, 0, 3, 1, 4)
    out = out.at[target].get(mode="clip")
    return pool.take_outputs(out.reshape(num_tokens, groups, per_group, pool.lane_tiles * LANES))


def _aligned(call: AttentionCall, align: int) -> tuple[Array, Array, Array]:
    """The tokens of rows with two or more, moved apart so that each row begins at a multiple of `align`.

    Returns: where each row begins, i32[R]; the token at each place; the place of each token, i32[T].
    """
    q_lens = jnp.where(call.q_lens > 1, call.q_lens, 0)
    ends = jnp.cumsum((q_lens + (align - 1)) // align * align)
    places = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]).astype(jnp.int32)
    rows = min(call.num_rows, call.num_tokens // 2)
    room = call.num_tokens + (align - 1) * rows
    place = jnp.arange(-(-room // align) * align, dtype=jnp.int32)
    last = call.num_rows - 1
    row = jnp.minimum(jnp.searchsorted(ends, place, side="right").astype(jnp.int32), last)
    source = call.cu_q_lens[row] + place - places[row]
    token = jnp.arange(call.num_tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(call.cu_q_lens[1:], token, side="right").astype(jnp.int32), last)
    return places, source, places[row] + token - call.cu_q_lens[row]


def _chunk(
    seq_lens, cu_q_lens, meta, has_none, places, inputs, heads, out_ref, scratch, *, call: AttentionCall, sizes: Sizes
):
    walk = Walk(call, sizes, seq_lens, cu_q_lens, meta, has_none, places, inputs, out_ref, scratch)
    narrow = sizes.narrow_pages

    def whole(item, q_slot, send):
        _compute(call, walk, heads, item, q_slot, None, send)

    def masked(item, q_slot):
        def one(part, carry):
            _compute(call, walk, heads, item, q_slot, part, None)
            return carry

        jax.lax.fori_loop(*walk.live_parts(item), one, 0)

    def finish(slot):
        _finish(sizes, scratch, slot)
        _begin(sizes, heads, scratch)

    _begin(sizes, heads, scratch)
    walk.run(whole if call.rules.mask_mod is None else None, masked, narrow, finish)


def _begin(sizes: Sizes, heads, scratch) -> None:
    shape = scratch["high"].shape
    if "sinks" in heads:
        scratch["high"][...] = heads["sinks"][...]
        lane = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
        scratch["total"][...] = jnp.where(lane == 0, jnp.float32(1), jnp.float32(0))
    else:
        scratch["high"][...] = jnp.full(shape, NOTHING_SEEN, jnp.float32)
        scratch["total"][...] = jnp.zeros(shape, jnp.float32)
    scratch["acc"][...] = jnp.zeros(scratch["acc"].shape, jnp.float32)


class _Slopes:
    """ALiBi's slopes of a stripe, as `ScoreRules` asks for them."""

    def __init__(self, ref, group: int, stripe):
        self._slopes = ref[group, stripe, :1]

    def __getitem__(self, head: Array) -> Array:
        return self._slopes


def _compute(call: AttentionCall, walk: Walk, heads, item, q_slot, part, send) -> None:
    """An item's share of its block's attention, or a narrow part of it.

    Args:
        part: None for the whole item, all of it seen by all; else number of the narrow part.
        send: as in the decode path.
    """
    sizes, scratch, f32 = walk.sizes, walk.scratch, jnp.float32
    index, slot, tiles = walk.index(item), walk.slot(item), sizes.pool.lane_tiles
    masked = part is not None
    pages, first_page = (sizes.narrow_pages, part * sizes.narrow_pages) if masked else (sizes.tile.pages, 0)
    width = pages * sizes.page_size
    rules = dataclasses.replace(call.rules, sliding_window=walk.window)
    plain = rules.soft_cap is None and rules.alibi_slopes is None and rules.score_mod is None
    start = walk.items[index, BLOCK] * sizes.tokens + first_page * sizes.page_size
    first_pos = walk.first_pos(walk.items[index, ROW], walk.items[index, QUERIES])
    per_group = sizes.heads_per_group
    stripe_rows = STRIPE if sizes.rows % STRIPE == 0 else sizes.rows
    stripes = sizes.rows // stripe_rows
    kv_pos = start + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    exists = without_none(walk, item, kv_pos) if masked else None
    scales = load_scales(walk, slot, first_page, pages)
    dot = functools.partial(
        jax.lax.dot_general,
        preferred_element_type=f32,
        precision=None if sizes.operand.itemsize < 4 else jax.lax.Precision.HIGHEST,
    )

    def load(slab):
        return walk.kv[slot, pl.ds(first_page, pages), slab].reshape(width, LANES).astype(sizes.operand)

    def rows_of(stripe):
        at = stripe * stripe_rows
        return pl.ds(at if isinstance(stripe, int) else pl.multiple_of(at, stripe_rows), stripe_rows)

    def positions(group, stripe):
        """Positions of the queries and numbers of the heads of a stripe's rows, i32[rows, 1]."""
        row = stripe * stripe_rows + jax.lax.broadcasted_iota(jnp.int32, (stripe_rows, 1), 0)
        query = jnp.floor((row.astype(f32) + f32(0.5)) * f32(1 / per_group)).astype(jnp.int32)
        return first_pos + query, (walk.part * sizes.groups + group) * per_group + row - query * per_group

    def scores_of(group, stripe):
        matmul = [
            dot(
                scratch["q_buf"][q_slot, group * tiles + t, rows_of(stripe)],
                load(sizes.keys(group, t)),
                (((1,), (1,)), ((), ())),
            )
            for t in range(tiles)
        ]
        matmul = functools.reduce(jnp.add, matmul)
        q_pos, head = positions(group, stripe)
        if scales is not None:
            matmul = matmul * scales_of_rows(walk, scales, group, KEYS, head)
        if plain:
            scores = matmul * f32(rules.scale * LOG2_E)
        else:
            own = {} if "slopes" not in heads else dict(alibi_slopes=_Slopes(heads["slopes"], group, rows_of(stripe)))
            scores = dataclasses.replace(rules, **own).scores(matmul, q_pos, kv_pos, head) * f32(LOG2_E)
        if exists is None:
            return scores
        return jnp.where(rules.seen(q_pos, kv_pos, head) & exists, scores, f32(MASKED))

    def weights_of(group, stripe, scores):
        rows = rows_of(stripe)
        high = scratch["high"][group, rows]
        new_high = jnp.maximum(high, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - new_high[:, :1])
        shrink = jnp.exp2(high - new_high)
        scratch["high"][group, rows] = new_high
        parts = [weights[:, at : at + LANES] for at in range(0, width, LANES)]
        if width % LANES:
            parts[-1] = jnp.pad(parts[-1], ((0, 0), (0, LANES - width % LANES)))
        scratch["total"][group, rows] = scratch["total"][group, rows] * shrink + functools.reduce(jnp.add, parts)
        if scales is not None:
            weights = weights * scales_of_rows(walk, scales, group, VALUES, positions(group, stripe)[1])
        return weights.astype(sizes.operand), shrink

    def add_values(group, stripe, weights, shrink):
        for t in range(tiles):
            values = load(sizes.values(group, t))
            if rules.mask_mod is not None:
                values = jnp.where(
                    _seen_by_any(rules, walk, item, group, start, width), values, jnp.zeros((), values.dtype)
                )
            place = group * tiles + t, rows_of(stripe)
            scratch["acc"][place] = scratch["acc"][place] * shrink + dot(weights, values, (((1,), (0,)), ((), ())))

    if masked:
        for group in range(sizes.groups):

            def one(stripe, carry, group=group):
                add_values(group, stripe, *weights_of(group, stripe, scores_of(group, stripe)))
                return carry

            jax.lax.fori_loop(0, stripes, one, 0)
        return
    # The matmuls of a stripe are written before the softmax of the one before it, so that they overlap.
    order = [(group, stripe) for group in range(sizes.groups) for stripe in range(stripes)]
    scores = scores_of(*order[0])
    if send is not None:
        send(range(sizes.tile.pages))
    for step, place in enumerate(order):
        following = scores_of(*order[step + 1]) if step + 1 < len(order) else None
        add_values(*place, *weights_of(*place, scores))
        scores = following


def _seen_by_any(rules, walk: Walk, item, group: int, start, width: int) -> Array:
    """bool[width, 128]: which keys `mask_mod` shows to some row of the block; as in the decode path."""
    shape, index, sizes = (width, LANES), walk.index(item), walk.sizes
    first = walk.first_pos(walk.items[index, ROW], walk.items[index, QUERIES])
    kv_pos = start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    head = (walk.part * sizes.groups + group) * sizes.heads_per_group
    end = walk.end_pos(walk.items[index, ROW], walk.items[index, QUERIES])

    def one(row, any_row):
        query = row // sizes.heads_per_group
        seen = rules.seen(
            jnp.full(shape, first + query), kv_pos, jnp.full(shape, head + row - query * sizes.heads_per_group)
        )
        return jnp.where(seen & (first + query < end), 1, any_row)

    return jax.lax.fori_loop(0, sizes.rows, one, jnp.zeros(shape, jnp.int32)) > 0


def _finish(sizes: Sizes, scratch, slot) -> None:
    """The block's output, from the sums over all its items."""
    tiles, out = sizes.pool.lane_tiles, scratch["out_buf"]
    for group in range(sizes.groups):
        total = jnp.sum(scratch["total"][group], axis=1, keepdims=True)
        scale = jnp.float32(1) / jnp.where(total == 0, jnp.float32(1), total)
        for t in range(tiles):
            place = group * tiles + t
            out[slot, place] = (scratch["acc"][place] * scale).astype(out.dtype)
