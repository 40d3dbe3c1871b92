"""The forward and the head in blocks of one size, always by the same code (`engine.numerics: batch_invariant`).

XLA and the compilers of kernels choose tiles, and with them the order of sums, by the shapes of a program. So in this
mode no shape depends on the batch: a step is a loop over blocks of so many tokens, each of which goes through the whole
model before the next, as prompt chunks do. Every token of every step is computed by the same instructions of
the same program, whatever stands beside it.
"""

import dataclasses
from collections.abc import Callable

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import Array

from levanter_infer.axes import ROW, ROW_BOUND, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.decode.shapes import Shapes
from levanter_infer.kernels import scopes


def forward_in_blocks(compute: Callable, whole: PageBatchInfo, carry: tuple, shapes: Shapes) -> tuple:
    """The model for all tokens of a step, block after block.

    Args:
        compute: of a batch, the cache and the table of routes gives these two and the hidden states that
            `scoring.keep_hidden` keeps.
        whole: the step's batch, of a multiple of `shapes.block_tokens` tokens.
        carry: the cache, the table of routes, and hidden states of all that are kept, [n, embed].
    Returns: the new `carry`.
    """
    size = shapes.block_tokens
    assert size is not None
    num_tokens = whole.cu_q_lens.array[-1]
    whole = _of_several_blocks(whole, size)

    def one_block(state):
        index, (cache, routes, hidden) = state
        batch, rows = _block(whole, index * size, size, shapes)
        cache, routes, states = compute(batch, cache, routes)
        if shapes.scoring is not None:
            hidden = jax.lax.dynamic_update_slice_in_dim(hidden, states, index * size, 0)
        else:  # of a row that goes on in the next block this is not the last token, whose states come then
            hidden = hidden.at[rows].set(states, mode="drop")
        return index + 1, (cache, routes, hidden)

    with jax.named_scope(scopes.forward(size)):
        return jax.lax.while_loop(lambda state: state[0] * size < num_tokens, one_block, (jnp.int32(0), carry))[1]


def _of_several_blocks(whole: PageBatchInfo, size: int) -> PageBatchInfo:
    """`whole` with arrays for the tokens of two blocks or more.

    The tokens of a single block would be the same in every trip of the loop over blocks. XLA would move what is
    computed from them alone, such as the first layer's matmuls, in front of the loop, and compile it otherwise than in
    engines whose steps have several blocks.
    """

    def padded(values: NamedArray) -> NamedArray:
        return hax.named(_rows_of_blocks(values.array, size), (TOKEN,))

    def with_dests(batch):
        return dataclasses.replace(batch, new_token_dests=padded(batch.new_token_dests))

    windows = tuple(with_dests(own) for own in whole.windows)
    return dataclasses.replace(
        with_dests(whole), tokens=padded(whole.tokens), positions=padded(whole.positions), windows=windows
    )


def _rows_of_blocks(rows: Array, size: int) -> Array:
    """Zeros behind `rows`, [n, ...], up to a multiple of `size`, and to two blocks at least."""
    missing = max(-len(rows) % size, 2 * size - len(rows))
    return jnp.pad(rows, ((0, missing), *[(0, 0)] * (rows.ndim - 1)))


def _block(whole: PageBatchInfo, start: Array, size: int, shapes: Shapes) -> tuple[PageBatchInfo, Array]:
    """The `size` tokens from `start` on as a batch, in which a row that goes on behind them ends; and the row of
    `whole` of each of its rows, i32[row], of none the number of rows."""
    bounds = whole.cu_q_lens.array
    num_rows, capacity = bounds.shape[0] - 1, shapes.rows(size)
    first = jnp.sum(bounds[1:] <= start, dtype=jnp.int32)  # rows that have ended before
    row = first + jnp.arange(capacity, dtype=jnp.int32)
    begin, end = (bounds.at[row + i].get(mode="clip") for i in (0, 1))
    used = (row < whole.num_seqs.array) & (begin < start + size)

    def of_row(values: Array, none: int) -> Array:
        found = values.at[row].get(mode="clip")
        return jnp.where(used.reshape(-1, *[1] * (found.ndim - 1)), found, none)

    def of_token(values: NamedArray) -> NamedArray:
        return hax.named(jax.lax.dynamic_slice_in_dim(values.array, start, size), (TOKEN,))

    def of_pages(pages: NamedArray, num_pages: int) -> NamedArray:
        return NamedArray(of_row(pages.array, num_pages), (pages.axes[0].resize(capacity), *pages.axes[1:]))

    seq_lens = whole.seq_lens.array.at[row].get(mode="clip") - jnp.maximum(end - (start + size), 0)
    cut = jnp.concatenate([bounds.at[row].get(mode="clip"), bounds.at[first + capacity].get(mode="clip")[None]])
    windows = (
        dataclasses.replace(
            own,
            page_indices=of_pages(own.page_indices, sizes.num_pages),
            new_token_dests=of_token(own.new_token_dests),
        )
        for own, sizes in zip(whole.windows, shapes.windows, strict=True)
    )
    batch = PageBatchInfo(
        tokens=of_token(whole.tokens),
        positions=of_token(whole.positions),
        slot_ids=hax.named(of_row(whole.slot_ids.array, shapes.num_slots), (ROW,)),
        cu_q_lens=hax.named(jnp.clip(cut - start, 0, size), (ROW_BOUND,)),
        seq_lens=hax.named(jnp.where(used, seq_lens, 0), (ROW,)),
        page_indices=of_pages(whole.page_indices, shapes.num_pages),
        num_seqs=hax.named(jnp.sum(used, dtype=jnp.int32), ()),
        new_token_dests=of_token(whole.new_token_dests),
        page_size=whole.page_size,
        windows=tuple(windows),
    )
    return batch, jnp.where(used, row, num_rows)


def logits_in_blocks(model, hidden: Array, num_rows: Array, size: int) -> Array:
    """Logits of the first `num_rows` hidden states [n, embed], for this device's part of the vocabulary: f32[n, vocab],
    zeros for the others. Computed for `size` rows at a time."""
    count = hidden.shape[0]
    padded = _rows_of_blocks(hidden, size)
    zeros = jnp.zeros((count + -count % size, model.vocab.part_size), jnp.float32)
    kernels = model.backend.sampling_kernels(zeros)
    as_read = (lambda logits: logits) if kernels is None else kernels.as_read

    def one_block(state: tuple[Array, Array]) -> tuple[Array, Array]:
        index, logits = state
        rows = jax.lax.dynamic_slice_in_dim(padded, index * size, size)
        own = model.logits(hax.named(rows, (ROW, model.embed)), num_rows - index * size).rearrange((ROW, ...)).array
        return index + 1, as_read(jax.lax.dynamic_update_slice_in_dim(logits, own, index * size, 0))

    with jax.named_scope(scopes.head(size)):
        state = jax.lax.while_loop(lambda state: state[0] * size < num_rows, one_block, (jnp.int32(0), zeros))
    return state[1][:count]
