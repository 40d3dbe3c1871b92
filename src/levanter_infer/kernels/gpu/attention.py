"""The `gpu` implementation: Pallas on Triton, for NVIDIA GPUs of compute capability 8.0 and above.

The packed tokens are cut into query blocks of one row each, as in `kernels.xla.blocks`, and a program computes one
query block for one kv head: the query heads of the kv head and the queries of the block are the rows of one tile, at
least 16 of them because the tensor cores need so many. There are two lanes. In the prefill lane, rows with two or more
queries, a program reads all keys that its queries see. In the decode lane a row has one query, so that few programs
would read long histories; they are cut into splits (flash decoding), whose m, l and acc a second kernel combines. The
splits depend on the sequence's own length alone, so the bits of a decode token do not depend on batch composition. A
step of few tokens has one lane, whose splits are those of the decode lane; the bits of a chunk depend on which lane
computes it. With `numerics: batch_invariant` one lane computes all tokens too, and its splits begin at fixed positions.

Latents, whose first numbers are values too, are loaded in two parts, these and the rotated rest: powers of two, as a
rule, and the first part serves both matmuls.

A program finds its query block itself, from `cu_q_lens`: to compute a table of blocks before the kernel would be ten
launches per layer. The grid is large enough for the worst division of the tokens into rows, and programs without work
end at once.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from levanter_infer.kernels.call import NO_KEY, AttentionCall
from levanter_infer.kernels.gpu import plt
from levanter_infer.kernels.rules import LOG2_E, MASKED, NOTHING_SEEN

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

MIN_CAPABILITY = 8.0
"""Compute capability of the oldest GPUs whose tensor cores take bfloat16."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Static sizes of one program."""

    rows: int
    """Pairs of query and head; a power of two, at least 16."""
    keys: int
    """Keys per turn of the online softmax; a power of two, at least 16."""
    warps: int
    stages: int
    """Depth of Triton's software pipeline: turns whose keys and values are loaded at once."""
    decodes: bool
    """True for the decode lane, whose blocks are rows; false for lanes whose blocks are parts of rows."""
    splits: int = 1
    """Maximal number of splits per history; a power of two."""
    min_turns: int = 1
    """Minimal number of turns per split."""
    least_queries: int = 2
    """Fewest queries of the rows of a lane that is not the decode lane; 1: the lane computes all rows."""
    split_tokens: int = 0
    """Keys per split; splits begin at multiples of it. 0: the splits of a history are equally long."""
    unmasks: bool = False
    """Whether turns in which every query sees all keys have a loop of their own, without masks."""

    @property
    def pads(self) -> bool:
        """Whether the lane, which is the last, writes the zeros of padding tokens."""
        return self.decodes or self.least_queries == 1


MAX_SPLITS, MOST_ROWS_SPLITS = 32, 8
"""Most splits of a history, with few rows and with many."""
_SPLIT_PROGRAMS = 4096
"""Programs of the decode lane, as far as more splits of each row make them; those without work cost too. With many rows
there are more, so that a long history that is left alone at the end of a batch is read by several programs."""
FIXED_SPLITS, MIN_FIXED_SPLIT_TOKENS = 16, 512
"""Most splits, and fewest keys of one, where splits begin at fixed positions: partial results are stored for each token
of a prompt chunk too."""
ONE_LANE_TOKENS = 64
"""Most tokens of a step that the tiles of decode tokens compute, chunks included, in one lane: the launch of another
would take longer than they save."""
_MANY_PROGRAMS = 256
"""Programs of the decode lane from which on each has one warp and short turns, or two warps where turns are short
anyway: many then run on one multiprocessor, and where each thread of a warp loads the page of one key, Triton loads the
keys of two turns at once."""
_TURN_BYTES = 32 * 1024
"""Bytes of keys and values per turn. Times the stages this is the shared memory of a program: at most 99 KB on the
smallest of these GPUs, and little enough that several programs run on one multiprocessor."""


def lanes(
    *, heads_per_kv_head: int, head_dim: int, itemsize: int, max_tokens: int, num_rows: int, kv_heads: int
) -> tuple[Tile, Tile]:
    """The tiles of the decode lane and of the prefill lane, by times on an H200 (`scripts/gpu_tiles.py`).

    Args:
        itemsize: bytes per element of the matmuls' operands.
        max_tokens: tokens of the longest history.
        num_rows: rows of the step, those that are not in use included.
    """
    dim = _side(head_dim)
    keys = max(16, min(64, _TURN_BYTES // (2 * dim * itemsize)))
    # 64 queries of more than 512 bytes do not fit into shared memory beside a turn, nor their outputs into registers.
    warps, rows = 8 if dim > 128 else 4, 64 if dim * itemsize <= 512 else 32
    stages = max(1, min(3, 3 * _TURN_BYTES // (2 * keys * dim * itemsize)))
    decode_rows = min(rows, _side(heads_per_kv_head))
    num_programs = num_rows * kv_heads * -(-heads_per_kv_head // decode_rows)  # without splits
    least = least_split(num_programs)
    most = max(MOST_ROWS_SPLITS, min(MAX_SPLITS, _SPLIT_PROGRAMS // pl.next_power_of_2(num_programs)))
    decode = Tile(
        rows=decode_rows,
        keys=keys,
        warps=warps,
        stages=stages,
        decodes=True,
        splits=min(most, pl.next_power_of_2(-(-max_tokens // least))),
        min_turns=max(1, least // keys),
    )
    if num_programs >= _MANY_PROGRAMS and warps == 4 and decode_rows == 16:
        many = dict(keys=32, warps=1, min_turns=least // 32) if keys == 64 else dict(warps=2)
        decode = dataclasses.replace(decode, **many)
    # With four warps chunks of float32 took more registers than there are.
    prefill = Tile(rows=rows, keys=keys, warps=8, stages=stages, decodes=False, unmasks=True)
    if dim * itemsize <= 256:
        prefill = dataclasses.replace(prefill, rows=128, keys=max(16, keys // 2), stages=2)
    return decode, prefill


def least_split(num_programs: int) -> int:
    """Fewest keys of a split. Splits of few programs are short, so that all multiprocessors read; others serve only
    histories that are longer than most, because the start of a split takes as long as some turns."""
    return 64 if num_programs <= 64 else min(1024, 2 * pl.next_power_of_2(num_programs))


def supports_dtype(dtype) -> bool:
    """Whether pages of this dtype can be read."""
    return jnp.dtype(dtype) in _DTYPES


def gpu_attention(call: AttentionCall, *, invariant: bool = False, interpret: bool = False) -> Array:
    """`ragged_paged_attention` on a GPU.

    Args:
        invariant: compute decode tokens as chunks of one token, so that the bits of a token depend neither on what
            stands beside it nor on where its chunk begins and ends: turns of keys and splits of a history begin at
            multiples of their number, and one of which a query sees nothing changes none of its bits. How long a split
            is follows from the width of the page table.
        interpret: run in Pallas' interpreter, on any platform, slowly; for tests.
    Returns: `call.out_shape`, 0 for padding tokens.
    Raises: ValueError for pages of a dtype that the tensor cores do not take.
    """
    if not supports_dtype(call.kv_dtype):
        raise ValueError(f'impl="gpu" reads pages of float32, bfloat16 or float16, not {call.kv_dtype}; use "xla"')
    max_tokens = call.page_indices.shape[1] * call.page_size
    sizes = dict(
        heads_per_kv_head=call.heads_per_kv_head,
        head_dim=call.out_shape[2],
        itemsize=_operand_dtype(call).itemsize,
        kv_heads=call.kv_heads,
    )
    if call.chosen is not None:
        tile, _ = lanes(**sizes, max_tokens=call.chosen.shape[1], num_rows=call.num_tokens)
        tile = dataclasses.replace(tile, decodes=False, least_queries=1)
        if call.num_tokens > ONE_LANE_TOKENS:  # partial results of every token would take much memory
            tile = dataclasses.replace(tile, splits=1)
        return _run(call, tile, None, interpret)
    # The order of sums must not depend on how many rows there may be
    decode, prefill = lanes(**sizes, max_tokens=max_tokens, num_rows=1 if invariant else call.num_rows)
    if invariant:
        width = max(MIN_FIXED_SPLIT_TOKENS, pl.next_power_of_2(-(-max_tokens // FIXED_SPLITS)))
        splits = dict(splits=pl.next_power_of_2(-(-max_tokens // width)), split_tokens=width)
        tile = dataclasses.replace(decode, decodes=False, least_queries=1, **splits)
        return _run(call, tile, None, interpret)
    if 1 < call.num_tokens <= ONE_LANE_TOKENS:
        return _run(call, dataclasses.replace(decode, decodes=False, least_queries=1), None, interpret)
    out = _run(call, prefill, None, interpret) if call.num_tokens > 1 else None
    return _run(call, decode, out, interpret)


class _Splits(NamedTuple):
    """Partial results of the splits, f32 in global memory. Places are rows in the decode lane, else tokens."""

    acc: Any
    """[places, splits, Hq, size of values]: sum of p · v."""
    m: Any
    """[places, splits, Hq]: maximum of the scores, in units of log2."""
    l: Any  # noqa: E741
    """[places, splits, Hq]: sum of the weights."""


def _run(call: AttentionCall, tile: Tile, out: Array | None, interpret: bool) -> Array:
    """Compute the tokens of one lane. Returns: `out`, or a new array without it, with their outputs, and with zeros for
    padding tokens if the lane `pads`."""
    num_heads, head_dim = call.out_shape[1:]
    num_blocks = call.num_rows if tile.decodes else call.num_rows + call.num_tokens // _block_q(call, tile)
    head_blocks = -(-call.heads_per_kv_head // tile.rows)
    rules, f32 = call.rules, jnp.float32
    bounds = dict(
        cu_q_lens=call.cu_q_lens,
        seq_lens=call.seq_lens,
        num_seqs=call.num_seqs.reshape(1),
        window=None if rules.sliding_window is None else rules.sliding_window.reshape(1),
    )
    inputs = dict(
        bounds,
        q=call.q,
        kv=call.kv_pages,
        layer=call.layer.reshape(1),
        pages=call.page_indices,
        chosen=call.chosen,
        slopes=rules.alibi_slopes,
        sinks=call.sinks,
    )
    attend = functools.partial(
        pl.pallas_call,
        functools.partial(_attend, call=call, tile=tile),
        grid=(call.kv_heads * head_blocks, num_blocks, tile.splits),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )
    out_type = jax.ShapeDtypeStruct(call.out_shape, call.q.dtype)
    in_place = {} if out is None else {0: 0}
    if tile.splits == 1:
        return attend(out_shape=(out_type,), input_output_aliases=in_place, name="attend")(out, inputs)[0]
    num_places = num_blocks if tile.decodes else call.num_tokens
    by_split = (num_places, tile.splits, num_heads)
    stats = jax.ShapeDtypeStruct(by_split, f32)
    acc = jax.ShapeDtypeStruct((*by_split, head_dim), f32)
    splits = _Splits(*attend(out_shape=(acc, stats, stats), name="attend_split")(None, inputs))
    combine = pl.pallas_call(
        functools.partial(_combine, call=call, tile=tile),
        out_shape=out_type,
        grid=(num_heads, num_places),
        input_output_aliases=in_place,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="combine_splits",
    )
    return combine(out, splits, dict(bounds, sinks=call.sinks))


def _attend(_, refs: dict, *out_refs, call: AttentionCall, tile: Tile) -> None:
    """The online softmax of one query block, kv head and split over its keys.

    Args:
        refs: cu_q_lens i32[R + 1], seq_lens i32[R], num_seqs i32[1], window i32[1] or None, q [T, Hq, D],
            kv [layers, P, page_size, 2 * Hkv, D] (of latents Hkv), layer i32[1], pages i32[R, max_pages], chosen
            i32[T, n], slopes and sinks f32[Hq], or None.
        out_refs: the output [T, Hq, size of values], which the first argument aliases; for several splits those of
            `_Splits`.
    """
    block, split = pl.program_id(1), pl.program_id(2)
    if not tile.decodes:  # the last blocks of a chunk, which read most keys, first
        block = pl.num_programs(1) - 1 - block
    per_kv_head, parts = call.heads_per_kv_head, _parts(call)
    num_pages, operand, f32 = call.kv_pages.shape[1], _operand_dtype(call), jnp.float32
    tile_heads = min(per_kv_head, tile.rows)
    head_blocks = -(-per_kv_head // tile.rows)
    kv_head, head_block = pl.program_id(0) // head_blocks, pl.program_id(0) % head_blocks
    if tile.pads and tile.splits == 1:
        own = head_block * tile_heads + jnp.arange(tile.rows, dtype=jnp.int32)
        exists = (own < per_kv_head) & (own < (head_block + 1) * tile_heads)
        _store_zeros(out_refs[0], refs, jnp.where(exists, kv_head * per_kv_head + own, call.q.shape[1]), block)

    row, first_token, num_queries, first_pos = _block(call, tile, refs, block)

    @pl.when(num_queries > 0)
    def live_block():
        layer = refs["layer"][0]
        rules = _rules(call, refs)
        start, end, lo, turns = _seen_keys(call, rules, tile, first_pos, num_queries)

        tile_row = jnp.arange(tile.rows, dtype=jnp.int32)
        query, head = tile_row // tile_heads, head_block * tile_heads + tile_row % tile_heads
        live = (query < num_queries) & (query < tile.rows // tile_heads) & (head < per_kv_head)
        # Rows that do not exist compute with the last head, and their index is out of bounds when they are stored: a
        # mask would do on a GPU, but Pallas' interpreter writes back what it reads there, over another row's output.
        head = kv_head * per_kv_head + jnp.minimum(head, per_kv_head - 1)
        stored_head = jnp.where(live, head, call.q.shape[1])
        token, q_pos = first_token + query, first_pos + query
        dims = [jnp.arange(_side(size), dtype=jnp.int32) for _, size in parts]

        def in_heads(mask: Array, part: int = 0) -> Array:
            """The mask bool[n] broadcast to a load or store of [n, numbers of a part]; values are of part 0."""
            mask, dim, (_, size) = mask[:, None], dims[part], parts[part]
            return mask if dim.shape[0] == size else mask & (dim < size)[None, :]

        def numbers(part: int) -> Array:
            """Where the numbers of a part are in a key: i32[1, numbers]."""
            first, _ = parts[part]
            return (dims[part] if first == 0 else dims[part] + first)[None, :]

        def load_queries(part: int) -> Array:
            index = token[:, None], head[:, None], numbers(part)
            return _load(refs["q"].at[index], in_heads(live, part)).astype(operand)

        queries = [load_queries(part) for part in range(len(parts))]

        def turn(index: Array, carry, *, all_seen: bool = False):
            """The keys of one turn. `all_seen`: every query sees each of them that a page holds."""
            m_prev, l_prev, acc = carry  # f32[rows], f32[rows], f32[rows, head_dim]
            kv_pos = lo + index * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
            in_range = (kv_pos >= start) & (kv_pos < end)
            if call.chosen is not None:  # by the only query of the block
                kv_pos = plt.load(refs["chosen"].at[first_token, kv_pos], mask=in_range, other=jnp.int32(NO_KEY))
                in_range = kv_pos != NO_KEY
            page = plt.load(refs["pages"].at[row, kv_pos // call.page_size], mask=in_range, other=jnp.int32(num_pages))
            mapped = page < num_pages
            seen = mapped[None, :]
            if not all_seen:
                seen = rules.seen(q_pos[:, None], kv_pos[None, :], head[:, None]) & (live[:, None] & seen)
            if rules.mask_mod is not None:
                # Keys that no query of the block sees are not loaded; a weight of 0 would not suffice, because 0 * NaN
                # is NaN. Without `mask_mod` these are the keys that are not in range.
                mapped = jnp.sum(seen.astype(jnp.int32), axis=0) > 0

            def load(pair: Array, part: int = 0) -> Array:
                index = layer, page[:, None], (kv_pos % call.page_size)[:, None], pair, numbers(part)
                values = _load(refs["kv"].at[index], in_heads(mapped, part))
                if values.dtype != call.kv_dtype:
                    values = jax.lax.bitcast_convert_type(values, call.kv_dtype)
                return values.astype(operand)

            sides = 2 if call.value_dim is None else 1
            keys = [load(sides * kv_head, part) for part in range(len(parts))]
            matmul = functools.reduce(
                jnp.add, [_dot(q, own, transpose=True) for q, own in zip(queries, keys, strict=True)]
            )
            scores = rules.scores_in_log2(matmul, q_pos[:, None], kv_pos[None, :], head[:, None])
            scores = jnp.where(seen, scores, f32(MASKED))
            m_new = jnp.maximum(m_prev, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - m_new[:, None])
            alpha = jnp.exp2(m_prev - m_new)
            l_new = l_prev * alpha + jnp.sum(weights, axis=1)
            values = load(2 * kv_head + 1) if call.value_dim is None else keys[0]
            acc = acc * alpha[:, None] + _dot(weights.astype(operand), values)
            return m_new, l_new, acc

        if tile.splits == 1 and call.sinks is not None:
            m_init, l_init = refs["sinks"][head] * f32(LOG2_E), jnp.ones(tile.rows, f32)
        else:
            m_init, l_init = jnp.full(tile.rows, NOTHING_SEEN, f32), jnp.zeros(tile.rows, f32)
        dim = dims[0]
        acc = jnp.zeros((tile.rows, dim.shape[0]), f32)
        first, last = _turns_of(tile, split, lo, turns)

        def all_turns(carry):
            if not tile.unmasks or rules.mask_mod is not None:
                return jax.lax.fori_loop(first, last, turn, carry)
            # Of the turns between these bounds every query sees all keys, which spares the arithmetic of the mask.
            begin = first
            if rules.sliding_window is not None or rules.attention_chunk is not None:
                last_start = rules.first_seen(first_pos + num_queries - 1)
                begin = jnp.clip((last_start - lo + (tile.keys - 1)) // tile.keys, first, last)
                carry = jax.lax.fori_loop(first, begin, turn, carry)
            stop = jnp.clip((first_pos + 1 - lo) // tile.keys, begin, last)
            carry = jax.lax.fori_loop(begin, stop, functools.partial(turn, all_seen=True), carry)
            return jax.lax.fori_loop(stop, last, turn, carry)

        def store(ref, index, values, mask) -> None:
            plt.store(ref.at[index], values.astype(ref.dtype), mask=mask)

        if tile.splits == 1:
            _, l_last, acc = all_turns((m_init, l_init, acc))
            result = acc / jnp.where(l_last == 0, f32(1), l_last)[:, None]
            store(out_refs[0], (token[:, None], stored_head[:, None], dim[None, :]), result, in_heads(live))
        else:

            @pl.when(first < last)
            def live_split():
                m_last, l_last, acc_last = all_turns((m_init, l_init, acc))
                outs = _Splits(*out_refs)
                place = jnp.broadcast_to(block, token.shape) if tile.decodes else token
                store(outs.acc, (place[:, None], split, stored_head[:, None], dim[None, :]), acc_last, in_heads(live))
                store(outs.m, (place, split, stored_head), m_last, live)
                store(outs.l, (place, split, stored_head), l_last, live)


def _combine(_, splits: _Splits, refs: dict, out_ref, *, call: AttentionCall, tile: Tile) -> None:
    """Combine the splits of one token and query head. `refs`: as in `_attend`."""
    head, place = pl.program_id(0), pl.program_id(1)
    head_dim, f32 = call.out_shape[2], jnp.float32
    dim = jnp.arange(_side(head_dim), dtype=jnp.int32)
    if tile.decodes:
        _store_zeros(out_ref, refs, head + jnp.arange(1, dtype=jnp.int32), place)
        _, token, num_queries, first_pos = _block(call, tile, refs, place)
        is_token = num_queries > 0
    else:
        token = place
        is_token, first_pos, num_queries = _block_of(call, tile, refs, token)

        @pl.when(~is_token)
        def padding():
            plt.store(out_ref.at[token, head, dim], jnp.zeros(dim.shape, out_ref.dtype), mask=dim < head_dim)

    @pl.when(is_token)
    def live_token():
        # A split of which only others of its query block see something adds zeros.
        *_, lo, turns = _seen_keys(call, _rules(call, refs), tile, first_pos, num_queries)
        split = jnp.arange(tile.splits, dtype=jnp.int32)
        first, last = _turns_of(tile, split, lo, turns)
        live = first < last
        m_split = plt.load(splits.m.at[place, split, head], mask=live, other=f32(NOTHING_SEEN))
        m_all = jnp.max(m_split)
        if call.sinks is not None:
            m_all = jnp.maximum(m_all, refs["sinks"][head] * f32(LOG2_E))
        alpha = jnp.exp2(m_split - m_all)
        l_all = jnp.sum(_load(splits.l.at[place, split, head], live) * alpha)
        if call.sinks is not None:
            l_all = l_all + jnp.exp2(refs["sinks"][head] * f32(LOG2_E) - m_all)
        exists = live[:, None] & (dim < head_dim)[None, :]
        acc = _load(splits.acc.at[place, split[:, None], head, dim[None, :]], exists)
        result = jnp.sum(acc * alpha[:, None], axis=0) / jnp.where(l_all == 0, f32(1), l_all)
        plt.store(out_ref.at[token, head, dim], result.astype(out_ref.dtype), mask=dim < head_dim)


def _store_zeros(out_ref, refs: dict, heads: Array, block: Array) -> None:
    """Zeros for the outputs of padding tokens, shared out among the first blocks of a lane, as many as there are rows.

    Args: heads: i32[n], those of this program; any that is out of bounds is left out.
    """
    num_tokens, num_heads, head_dim = out_ref.shape
    num_blocks = refs["seq_lens"].shape[0]
    first = refs["cu_q_lens"][refs["num_seqs"][0]] + block
    dim = jnp.arange(_side(head_dim), dtype=jnp.int32)
    mask = (heads < num_heads)[:, None] & (dim < head_dim)[None, :]

    def store(index: Array, _) -> None:
        place = out_ref.at[first + index * num_blocks, heads[:, None], dim[None, :]]
        plt.store(place, jnp.zeros(mask.shape, out_ref.dtype), mask=mask)

    jax.lax.fori_loop(0, (jnp.maximum(num_tokens - first, 0) + (num_blocks - 1)) // num_blocks, store, None)


def _parts(call: AttentionCall) -> list[tuple[int, int]]:
    """First number and size of each part of a key: all of it; of a latent, the value and the rest."""
    size, value_dim = call.q.shape[2], call.value_dim
    return [(0, size)] if value_dim in (None, size) else [(0, value_dim), (value_dim, size - value_dim)]


def _block_q(call: AttentionCall, tile: Tile) -> int:
    """Queries per query block."""
    return 1 if tile.decodes or call.chosen is not None else max(1, tile.rows // call.heads_per_kv_head)


def _block(call: AttentionCall, tile: Tile, refs: dict, block: Array) -> tuple[Array, Array, Array, Array]:
    """The row, the first token, the number of queries and the position of the first query of a query block, i32[] each;
    0 queries if the block does not exist.

    In the decode lane a block is a row. In the prefill lane the blocks of row s begin with number
    cu_q_lens[s] // block_q + s: that leaves each row enough of them, whatever the rows before it are, and some that
    have no work.
    """
    block_q = _block_q(call, tile)
    if tile.decodes:
        row, skipped = block, jnp.int32(0)
    else:
        row = _row_of(call, refs, block, lambda first, rows: first // block_q + rows)
        skipped = (block - refs["cu_q_lens"][row] // block_q - row) * block_q
    first, end = refs["cu_q_lens"][row], refs["cu_q_lens"][row + 1]
    q_len = end - first
    belongs = (q_len == 1) if tile.decodes else (q_len >= tile.least_queries)
    belongs = belongs & (row < refs["num_seqs"][0])
    num_queries = jnp.where(belongs, jnp.clip(q_len - skipped, 0, block_q), 0)
    return row, first + skipped, num_queries, refs["seq_lens"][row] - q_len + skipped


def _row_of(call: AttentionCall, refs: dict, place: Array, begins) -> Array:
    """The last row in use that begins at or before a place; 0 if none does.

    Args: begins: `begins(first, rows)` gives the places where rows i32[n] begin, from their first tokens.
    """
    rows = jnp.arange(pl.next_power_of_2(call.num_rows), dtype=jnp.int32)
    in_use = rows < refs["num_seqs"][0]
    first = plt.load(refs["cu_q_lens"].at[rows], mask=in_use, other=jnp.int32(0))
    return jnp.maximum(jnp.sum((in_use & (begins(first, rows) <= place)).astype(jnp.int32)) - 1, 0)


def _block_of(call: AttentionCall, tile: Tile, refs: dict, token: Array) -> tuple[Array, Array, Array]:
    """Whether a token is one of a row, and the position of the first query and the number of queries of its block."""
    row = _row_of(call, refs, token, lambda first, rows: first)
    first, end = refs["cu_q_lens"][row], refs["cu_q_lens"][row + 1]
    block_q = _block_q(call, tile)
    skipped = (token - first) // block_q * block_q
    is_token = token < refs["cu_q_lens"][refs["num_seqs"][0]]
    return is_token, refs["seq_lens"][row] - (end - first) + skipped, jnp.minimum(end - first - skipped, block_q)


def _seen_keys(call: AttentionCall, rules, tile: Tile, first_pos: Array, num_queries: Array | int):
    """The keys that a query block sees, in turns; of chosen keys, their places in `chosen`.

    Returns: first key, end of the keys, start of the first turn, number of turns: i32[] each.
    """
    start, end = rules.first_seen(first_pos), first_pos + num_queries
    if call.chosen is not None:
        start, end = jnp.int32(0), jnp.minimum(end, call.chosen.shape[1])
    lo = start // tile.keys * tile.keys
    return start, end, lo, (end - lo + (tile.keys - 1)) // tile.keys


def _turns_of(tile: Tile, split: Array, lo: Array, turns: Array) -> tuple[Array, Array]:
    """Bounds of the turns of a split; empty where it has none. Args: lo, turns: of `_seen_keys`."""
    if tile.split_tokens:
        per_split = tile.split_tokens // tile.keys
        begin = split * per_split - lo // tile.keys
        return jnp.maximum(begin, 0), jnp.minimum(begin + per_split, turns)
    per_split = jnp.maximum((turns + (tile.splits - 1)) // tile.splits, tile.min_turns)
    return split * per_split, jnp.minimum(split * per_split + per_split, turns)


def _rules(call: AttentionCall, refs: dict):
    """The rules of the call with the kernel's refs: `alibi_slopes[head]` is a load."""
    window = None if refs["window"] is None else refs["window"][0]
    return dataclasses.replace(call.rules, sliding_window=window, alibi_slopes=refs.get("slopes"))


def _load(ref, mask: Array) -> Array:
    return plt.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def _dot(a: Array, b: Array, *, transpose: bool = False) -> Array:
    """a · b, or a · bᵀ, accumulated in f32; f32 operands are not rounded to TF32."""
    dims = (((1,), (1 if transpose else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _operand_dtype(call: AttentionCall) -> jnp.dtype:
    """Dtype of the matmuls' operands: that of queries and pages if it is the same, so that the tensor cores take them
    as they are; else f32."""
    return call.kv_dtype if call.q.dtype == call.kv_dtype else jnp.dtype(jnp.float32)


def _side(size: int) -> int:
    """`size` padded to what Triton takes as a side of a matmul's operand: a power of two, at least 16."""
    return max(16, pl.next_power_of_2(size))
