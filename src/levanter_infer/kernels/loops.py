"""Control flow of device code."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels import scopes

Value = TypeVar("Value")


_branching = contextvars.ContextVar("branching", default=False)

_AT_ONCE = 1 << 16
"""Entries that one turn takes at most in programs with branches."""
_PAIRS_AT_ONCE = 1 << 24
"""Pairs that `in_blocks` compares at once at most in programs with branches."""


@contextlib.contextmanager
def branching(value: bool) -> Iterator[None]:
    """Whether optional work that is traced meanwhile is a branch, and tables are changed in one turn (decision 0058).

    For platforms that decide branches on the device and loops on the host, and whose branches change state in place.
    JAX keeps what it has traced of a function by the function alone: one that lives longer than the context, and calls
    what is here, must not be given to `jax.lax` or `jax.jit` in both forms.
    """
    token = _branching.set(value)
    try:
        yield
    finally:
        _branching.reset(token)


def run_if(condition: Array, function: Callable[[Value], Value], value: Value) -> Value:
    """`function(value)` if `condition`, else `value`, as a loop of zero or one trips unless programs are `branching`.

    `lax.cond` copies what it carries on a CPU; a loop keeps it in place. Every optional write to state goes this way.
    """
    if _branching.get():
        return jax.lax.cond(condition, function, lambda value: value, value)

    def body(carry):
        return jnp.asarray(False), function(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], body, (condition, value))[1]


def run_bucket(
    count: Array,
    sizes: Sequence[int],
    scope: Callable[[int], str],
    function: Callable[[int, Value], Value],
    value: Value,
) -> Value:
    """`function(size, value)` for the smallest of the ascending `sizes` that holds `count` i32[]; `value` for none.

    Args: scope: name of the scope of a size.
    Requires: the largest size holds `count`.
    """
    lowers = (0, *sizes[:-1])
    runs = [functools.partial(function, size) for size in sizes]
    if not _branching.get():
        for lower, size, run in zip(lowers, sizes, runs, strict=True):
            with jax.named_scope(scope(size)):
                value = run_if((count > lower) & (count <= size), run, value)
        return value
    number = jnp.sum(count > jnp.asarray(lowers, jnp.int32), dtype=jnp.int32)
    runs = [jax.named_scope(scope(size))(run) for size, run in zip(sizes, runs, strict=True)]
    return jax.lax.switch(number, [lambda value: value, *runs], value)


def turn_size(usual: int, total: int) -> int:
    """Entries that one of the turns over `total` entries takes: `usual`, or as many as pay where turns cost more."""
    return min(max(usual, _AT_ONCE) if _branching.get() else usual, total)


def by_turns(change: Callable[[Value, Array], Value], value: Value, count: Array, size: int, total: int) -> Value:
    """`change(value, start)` for every `size`-th `start` below `count` i32[], which is at most `total`.

    Requires: what `change` does for entries from `count` on does not matter.
    """
    if _branching.get() and size >= total:
        return run_if(count > 0, lambda value: change(value, jnp.int32(0)), value)

    def turn(carry):
        start, value = carry
        return start + size, change(value, start)

    return jax.lax.while_loop(lambda carry: carry[0] < count, turn, (jnp.int32(0), value))[1]


_PAIRED = 64
"""Rows that `in_blocks` compares at once with all others."""


def in_blocks(
    compute: Callable[[Array], Sequence[Array]], num_rows: Array, total: int, most: int = _PAIRED
) -> list[Array]:
    """`compute(rows)` for the first `num_rows` i32[] of `total` rows, `most` at a time; anything for others.

    For comparisons of all pairs, where there may be many rows and few are in use, and for copies of much of each row.

    Args: compute: of the numbers of consecutive rows, i32[n], gives arrays [n, …].
    """
    if _branching.get() and total * total <= _PAIRS_AT_ONCE:
        return list(compute(jnp.arange(total, dtype=jnp.int32)))
    size = min(most, total)
    types = jax.eval_shape(compute, jax.ShapeDtypeStruct((size,), jnp.int32))

    def block(results: list[Array], start: Array) -> list[Array]:
        first = jnp.minimum(start, total - size)  # the last block may repeat rows of another
        found = compute(first + jnp.arange(size, dtype=jnp.int32))
        pairs = zip(results, found, strict=True)
        return [jax.lax.dynamic_update_slice_in_dim(into, part, first, 0) for into, part in pairs]

    zeros = [jnp.zeros((total, *own.shape[1:]), own.dtype) for own in types]
    return by_turns(block, zeros, num_rows, size, total)


_PART = 64
"""Entries that `in_parts` takes at once."""


def in_parts(
    change: Callable[[Value, Array], Value],
    value: Value,
    entries: Array,
    count: Array,
    none: int,
    size: int | None = None,
) -> Value:
    """`change(value, part)` for `size` consecutive entries at a time, until the first `count` i32[] of `entries`
    i32[n, …] are done. Without a size, as many as pay.

    For tables of which few entries are in use. Requires: `change` does nothing for the others, nor for `none`, with
    which the last part is filled up.
    """
    size = turn_size(_PART, entries.shape[0]) if size is None else size
    if entries.shape[0] <= size:
        return change(value, entries)
    missing = [(0, -entries.shape[0] % size)] + [(0, 0)] * (entries.ndim - 1)
    entries = jnp.pad(entries, missing, constant_values=none)

    def part(value: Value, start: Array) -> Value:
        return change(value, jax.lax.dynamic_slice_in_dim(entries, start, size))

    return by_turns(part, value, count, size, entries.shape[0])


_BLOCK = 4
"""Rows that an inner loop of `one_by_one` goes through."""


def one_by_one(compute: Callable[..., list[Array]], num_rows: Array, *rows: Array) -> list[Array]:
    """`compute(*rows)` for one row after the other, so that every row goes through the same code.

    The rows are an inner loop over a block, whose shapes do not depend on the number of rows: XLA merges nothing into
    the body of a loop, so that programs for different numbers of rows have the same one.

    Args:
        compute: of arrays [1, …] gives arrays [1, …].
        num_rows: i32[], rows that count; the others give zeros.
        rows: [row, …] each.
    Returns: [row, …] each.
    """
    count = rows[0].shape[0]
    missing = max(_BLOCK - count, 0)

    def slices(arrays: Sequence[Array], start: Array, size: int) -> list[Array]:
        return [jax.lax.dynamic_slice_in_dim(array, start, size) for array in arrays]

    def written(arrays: Sequence[Array], parts: Sequence[Array], start: Array) -> list[Array]:
        pairs = zip(arrays, parts, strict=True)
        return [jax.lax.dynamic_update_slice_in_dim(array, part, start, 0) for array, part in pairs]

    def one_block(number: Array, results: list[Array]) -> list[Array]:
        start = jnp.minimum(number * _BLOCK, count + missing - _BLOCK)  # the last block may repeat rows of another
        own = slices(padded, start, _BLOCK)

        def one_row(row: Array, block: list[Array]) -> list[Array]:
            return written(block, compute(*slices(own, row, 1)), row)

        block = jax.lax.fori_loop(0, jnp.minimum(num_rows - start, _BLOCK), one_row, slices(results, start, _BLOCK))
        return written(results, block, start)

    with jax.named_scope(scopes.BY_ROWS):
        padded = [jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for array in rows] if missing else rows
        types = jax.eval_shape(compute, *(jax.ShapeDtypeStruct((1, *array.shape[1:]), array.dtype) for array in rows))
        zeros = [jnp.zeros((count + missing, *own.shape[1:]), own.dtype) for own in types]
        results = jax.lax.fori_loop(0, -(-num_rows // _BLOCK), one_block, zeros)
        return [array[:count] for array in results] if missing else results
