"""The `gpu` implementation: Pallas on Triton, for NVIDIA GPUs of compute capability 8.0 and above.

The packed tokens are cut into blocks of queries of one row, as in `rpa_xla`, and a program computes one block for one
kv head: the query heads of the kv head and the queries of the block are the rows of one tile, at least 16 of them as
the tensor cores want. Blocks go in two lanes. In the chunk lane a program reads all keys that its queries see. In the
decode lane a sequence has one query, so that few programs would read long histories; they are cut into splits, whose
maxima, sums and outputs a second kernel combines. Where they are cut depends on the sequence's own length alone, and
with it the bits of a row.

A program finds its block itself, from the bounds of the rows: what is computed before a kernel would be ten launches a
layer. A grid holds the worst division of the tokens into rows, and programs without work end at once.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.gpu.triton import plt
from levanter_infer.kernels.rules import MASKED, NOTHING_SEEN

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_LOG2_E = math.log2(math.e)

MIN_CAPABILITY = 8.0
"""Compute capability of the oldest GPUs whose tensor cores take bfloat16."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Static sizes of one program."""

    rows: int
    """Pairs of query and head; a power of two, at least 16."""
    keys: int
    """Keys of one turn of the streaming softmax; a power of two, at least 16."""
    warps: int
    stages: int
    """Turns whose keys and values are on their way at once."""
    decodes: bool
    """Whether this is the lane of rows with one query; else of those with more."""
    splits: int = 1
    """Parts that a history is cut into, at most; a power of two."""
    min_turns: int = 1
    """Turns of a split, at least."""


MAX_SPLITS, MIN_SPLIT_TOKENS = 32, 256
"""A history of 8192 tokens or more occupies 32 programs per kv head; a shorter one fewer, as splits cost the second
kernel's reads."""
_TURN_BYTES = 32 * 1024
"""Keys and values of one turn. Times the stages this is the shared memory of a program: at most 99 KB on the smallest
of these GPUs, and little enough that several programs run on one multiprocessor."""


def lanes(*, heads_per_kv_head: int, head_dim: int, itemsize: int, max_tokens: int) -> tuple[Tile, Tile]:
    """Tiles of decode tokens and of chunks.

    Args:
        itemsize: bytes of one number as the matmuls take it.
        max_tokens: longest history.
    """
    dim = _side(head_dim)
    keys = max(16, min(64, _TURN_BYTES // (2 * dim * itemsize)))
    warps = 8 if dim > 128 else 4
    splits = min(MAX_SPLITS, _power_of_two(-(-max_tokens // MIN_SPLIT_TOKENS)))
    decode = Tile(
        rows=min(64, _side(heads_per_kv_head)),
        keys=keys,
        warps=warps,
        stages=3,
        decodes=True,
        splits=splits,
        min_turns=MIN_SPLIT_TOKENS // keys,
    )
    return decode, Tile(rows=64, keys=keys, warps=warps, stages=3, decodes=False)


def supports_dtype(dtype) -> bool:
    """Whether pages of this dtype can be read."""
    return jnp.dtype(dtype) in _DTYPES


def gpu_attention(call: AttentionCall, *, interpret: bool = False) -> Array:
    """`ragged_paged_attention` on a GPU.

    Args:
        interpret: run by Pallas' interpreter, on any platform, slowly; for tests.
    Raises: ValueError for pages of a dtype that the tensor cores do not take.
    """
    if not supports_dtype(call.kv_dtype):
        raise ValueError(f'impl="gpu" reads pages of float32, bfloat16 or float16, not {call.kv_dtype}; use "xla"')
    decode, chunk = lanes(
        heads_per_kv_head=call.heads_per_kv_head,
        head_dim=call.q.shape[2],
        itemsize=_operand_dtype(call).itemsize,
        max_tokens=call.page_indices.shape[1] * call.page_size,
    )
    out = jnp.zeros_like(call.q)
    if call.num_tokens > 1:
        out = _run(call, chunk, out, interpret)
    return _run(call, decode, out, interpret)


def _run(call: AttentionCall, tile: Tile, out: Array, interpret: bool) -> Array:
    """Fill in the output of a lane's tokens."""
    num_heads, head_dim = out.shape[1:]
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
    whole = jax.ShapeDtypeStruct(out.shape, out.dtype)
    if tile.splits == 1:
        return attend(out_shape=(whole,), input_output_aliases={0: 0}, name="attend")(out, inputs)[0]
    by_split = (num_blocks, tile.splits, num_heads)
    stats = jax.ShapeDtypeStruct(by_split, f32)
    partial = jax.ShapeDtypeStruct((*by_split, head_dim), f32)
    parts = attend(out_shape=(partial, stats, stats), name="attend_split")(None, inputs)
    combine = pl.pallas_call(
        functools.partial(_combine, call=call, tile=tile),
        out_shape=whole,
        grid=(num_heads, num_blocks),
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="combine_splits",
    )
    return combine(out, *parts, dict(bounds, sinks=call.sinks))


def _attend(_, refs: dict, *out_refs, call: AttentionCall, tile: Tile) -> None:
    """One block, kv head and split: a streaming softmax over its keys."""
    block, split = pl.program_id(1), pl.program_id(2)
    per_kv_head, head_dim = call.heads_per_kv_head, call.q.shape[2]
    num_pages, operand, f32 = call.kv_pages.shape[1], _operand_dtype(call), jnp.float32
    tile_heads = min(per_kv_head, tile.rows)
    head_blocks = -(-per_kv_head // tile.rows)
    kv_head, head_block = pl.program_id(0) // head_blocks, pl.program_id(0) % head_blocks

    row, first_token, num_queries, first_pos = _block(call, tile, refs, block)

    @pl.when(num_queries > 0)
    def live_block():
        layer = refs["layer"][0]
        rules = _rules(call, refs)
        start, end, lo, turns, per_split = _cut_history(rules, tile, first_pos, num_queries)

        place = jnp.arange(tile.rows, dtype=jnp.int32)
        query, head = place // tile_heads, head_block * tile_heads + place % tile_heads
        live = (query < num_queries) & (query < tile.rows // tile_heads) & (head < per_kv_head)
        # Rows that do not exist compute with the last head, and are stored nowhere: a masked store would do on a GPU,
        # but Pallas' interpreter writes back what it finds there, over what another row has stored.
        head = kv_head * per_kv_head + jnp.minimum(head, per_kv_head - 1)
        stored_head = jnp.where(live, head, call.q.shape[1])
        token, q_pos = first_token + query, first_pos + query
        dim = jnp.arange(_side(head_dim), dtype=jnp.int32)

        def in_heads(mask: Array) -> Array:
            """[n] -> the mask of a load or store of [n, head_dim]."""
            mask = mask[:, None]
            return mask if dim.shape[0] == head_dim else mask & (dim < head_dim)[None, :]

        q = _load(refs["q"].at[token[:, None], head[:, None], dim[None, :]], in_heads(live)).astype(operand)

        def turn(index: Array, carry):
            high, total, acc = carry
            kv_pos = lo + index * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
            reached = (kv_pos >= start) & (kv_pos < end)
            page = plt.load(refs["pages"].at[row, kv_pos // call.page_size], mask=reached, other=jnp.int32(num_pages))
            stored = page < num_pages
            seen = rules.seen(q_pos[:, None], kv_pos[None, :], head[:, None]) & (live[:, None] & stored[None, :])
            if rules.mask_mod is not None:
                # 0 * NaN is NaN: what no query of the block sees is not loaded, not only given no weight. Without
                # `mask_mod` these are the places that are not reached.
                stored = jnp.sum(seen.astype(jnp.int32), axis=0) > 0

            def load(pair: Array) -> Array:
                place = layer, page[:, None], (kv_pos % call.page_size)[:, None], pair, dim[None, :]
                values = _load(refs["kv"].at[place], in_heads(stored))
                if values.dtype != call.kv_dtype:
                    values = jax.lax.bitcast_convert_type(values, call.kv_dtype)
                return values.astype(operand)

            matmul = _dot(q, load(2 * kv_head), transpose=True)
            scores = rules.scores(matmul, q_pos[:, None], kv_pos[None, :], head[:, None])
            scores = jnp.where(seen, scores, f32(MASKED))
            new_high = jnp.maximum(high, jnp.max(scores, axis=1))
            weights = _exp(scores - new_high[:, None])
            shrink = _exp(high - new_high)
            total = total * shrink + jnp.sum(weights, axis=1)
            acc = acc * shrink[:, None] + _dot(weights.astype(operand), load(2 * kv_head + 1))
            return new_high, total, acc

        if tile.splits == 1 and call.sinks is not None:
            high, total = refs["sinks"][head], jnp.ones(tile.rows, f32)
        else:
            high, total = jnp.full(tile.rows, NOTHING_SEEN, f32), jnp.zeros(tile.rows, f32)
        acc = jnp.zeros((tile.rows, dim.shape[0]), f32)
        first = split * per_split
        last = jnp.minimum(first + per_split, turns)

        def store(ref, index, values, mask) -> None:
            plt.store(ref.at[index], values.astype(ref.dtype), mask=mask)

        if tile.splits == 1:
            _, total, acc = jax.lax.fori_loop(first, last, turn, (high, total, acc))
            result = acc / jnp.where(total == 0, f32(1), total)[:, None]
            store(out_refs[0], (token[:, None], stored_head[:, None], dim[None, :]), result, in_heads(live))
        else:

            @pl.when(first < last)
            def live_split():
                results = jax.lax.fori_loop(first, last, turn, (high, total, acc))
                store(out_refs[0], (block, split, stored_head[:, None], dim[None, :]), results[2], in_heads(live))
                store(out_refs[1], (block, split, stored_head), results[0], live)
                store(out_refs[2], (block, split, stored_head), results[1], live)


def _combine(_, acc_ref, high_ref, total_ref, refs: dict, out_ref, *, call: AttentionCall, tile: Tile) -> None:
    """One block and query head of the decode lane: the splits' results as one."""
    head, block = pl.program_id(0), pl.program_id(1)
    head_dim, f32 = call.q.shape[2], jnp.float32

    _, token, num_queries, first_pos = _block(call, tile, refs, block)

    @pl.when(num_queries > 0)
    def live_block():
        *_, turns, per_split = _cut_history(_rules(call, refs), tile, first_pos, num_queries)
        split = jnp.arange(tile.splits, dtype=jnp.int32)
        dim = jnp.arange(_side(head_dim), dtype=jnp.int32)
        live = split * per_split < turns
        high = plt.load(high_ref.at[block, split, head], mask=live, other=f32(NOTHING_SEEN))
        highest = jnp.max(high)
        if call.sinks is not None:
            highest = jnp.maximum(highest, refs["sinks"][head])
        shrink = _exp(high - highest)
        total = jnp.sum(_load(total_ref.at[block, split, head], live) * shrink)
        if call.sinks is not None:
            total = total + _exp(refs["sinks"][head] - highest)
        exists = live[:, None] & (dim < head_dim)[None, :]
        parts = _load(acc_ref.at[block, split[:, None], head, dim[None, :]], exists)
        result = jnp.sum(parts * shrink[:, None], axis=0) / jnp.where(total == 0, f32(1), total)
        plt.store(out_ref.at[token, head, dim], result.astype(out_ref.dtype), mask=dim < head_dim)


def _block_q(call: AttentionCall, tile: Tile) -> int:
    """Queries of a block."""
    return 1 if tile.decodes else max(1, tile.rows // call.heads_per_kv_head)


def _block(call: AttentionCall, tile: Tile, refs: dict, block: Array) -> tuple[Array, Array, Array, Array]:
    """Row, first token, queries and position of the first query of a block, i32[] each; 0 queries if there is none.

    A decode block is a row. Among the blocks of chunks, row s begins with number cu_q_lens[s] // block_q + s: that
    leaves each row enough of them, whatever the rows before it are, and some that have no work.
    """
    block_q = _block_q(call, tile)
    if tile.decodes:
        row, skipped = block, jnp.int32(0)
    else:
        rows = jnp.arange(_power_of_two(call.num_rows), dtype=jnp.int32)
        in_use = rows < refs["num_seqs"][0]
        begins = plt.load(refs["cu_q_lens"].at[rows], mask=in_use, other=jnp.int32(0)) // block_q + rows
        row = jnp.sum((in_use & (begins <= block)).astype(jnp.int32)) - 1
        row = jnp.maximum(row, 0)
        skipped = (block - refs["cu_q_lens"][row] // block_q - row) * block_q
    first, end = refs["cu_q_lens"][row], refs["cu_q_lens"][row + 1]
    q_len = end - first
    belongs = (q_len == 1) if tile.decodes else (q_len > 1)
    belongs = belongs & (row < refs["num_seqs"][0])
    num_queries = jnp.where(belongs, jnp.clip(q_len - skipped, 0, block_q), 0)
    return row, first + skipped, num_queries, refs["seq_lens"][row] - q_len + skipped


def _cut_history(rules, tile: Tile, first_pos: Array, num_queries: Array):
    """The keys that a block sees, and their division into turns and splits: i32[] each.

    Returns: first key, end, start of the first turn, turns, turns of a split.
    """
    start, end = rules.first_seen(first_pos), first_pos + num_queries
    lo = start // tile.keys * tile.keys
    turns = (end - lo + (tile.keys - 1)) // tile.keys
    per_split = jnp.maximum((turns + (tile.splits - 1)) // tile.splits, tile.min_turns)
    return start, end, lo, turns, per_split


def _rules(call: AttentionCall, refs: dict):
    """The rules of the call as the kernel's body reads them: `slopes[head]` is a load."""
    window = None if refs["window"] is None else refs["window"][0]
    return dataclasses.replace(call.rules, sliding_window=window, alibi_slopes=refs.get("slopes"))


def _load(ref, mask: Array) -> Array:
    return plt.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def _dot(a: Array, b: Array, *, transpose: bool = False) -> Array:
    """f32 sums. f32 operands are multiplied as such, not as TF32."""
    dims = (((1,), (1 if transpose else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _exp(x: Array) -> Array:
    return jnp.exp2(x * jnp.float32(_LOG2_E))


def _operand_dtype(call: AttentionCall) -> jnp.dtype:
    """Of the matmul: that of queries and pages if it is one, so that the tensor cores take them as they are."""
    return call.kv_dtype if call.q.dtype == call.kv_dtype else jnp.dtype(jnp.float32)


def _power_of_two(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def _side(size: int) -> int:
    """Of a product's operand in Triton: a power of two, at least 16."""
    return max(16, _power_of_two(size))
