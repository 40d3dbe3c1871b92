"""Writing new keys and values into a TPU's pool.

An async copy moves rows of 32 bits, and such a *word row* holds two tokens of 16 bits, or four of 8. So a token's word
row is read into VMEM, changed, and stored back. Decode tokens, which come first in a step, each of a sequence of its
own, are written in groups whose turns have no branches: the reads of all groups are started first, then each group is
waited for, changed and stored.

The tokens of prompt chunks that go to one tile-high *stretch* of a page are written together, in the same way. Their
stretches take turns in a ring of buffers: while one is changed, others are on their way in or out.

The cores of a chip run grid steps at the same time. So a stretch is written by the grid step of its first token, which
is given the tokens behind its own too.

Starting a copy takes scalar instructions alone, and rotating queries and keys takes vector instructions:
`rotate_and_write` has both in the same bundles.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import Rotation
from levanter_infer.kernels.tpu import rotate
from levanter_infer.kernels.tpu.pool import LANES
from levanter_infer.kernels.tpu.tiling import cores_of, generation
from levanter_infer.kernels.tpu.word_rows import load_words, packing, store_words

_GROUP = 8
"""Decode tokens of a group."""
_STEP_BYTES = 2**20
"""Bytes of the new tokens of a grid step, in 32 bits, at most. A grid step ends with a wait for HBM."""
_CORE_TOKENS = 32
"""Cores share the new tokens of a step in grid steps of a multiple of this. It is enough that the lanes of one head are
exchanged while others are stored."""
_STEP_TOKENS = 512
"""New tokens of a grid step, at most, so that their queries fit beside them."""
_RING_BYTES = 2**19
"""Bytes of the stretches in the ring, of which there are at least 8: half of them are on their way in, which hides the
latency of HBM if they are many."""
_MOST_SLOTS = 32


@dataclass(frozen=True)
class _Sizes:
    num_pages: int
    """Pages per layer."""
    page_size: int
    rows: int
    """Tokens per stretch."""
    word_tokens: int
    """Tokens per word row."""
    block: int
    """New tokens per grid step."""
    slots: int
    """Stretches in the ring; a power of two."""
    slabs: int
    tail: int
    """Tokens behind those of a grid step that it may write: those of a tile, if there are more grid steps."""
    interpreted: bool = False

    @property
    def page_word_rows(self) -> int:
        """Word rows of a page, all slabs together."""
        return self.page_size // self.word_tokens * self.slabs

    @property
    def groups(self) -> int:
        """Groups of decode tokens per grid step."""
        return self.block // _GROUP

    @staticmethod
    def of(pages: Array, num_tokens: int) -> "_Sizes":
        num_pages, slabs, page_size, lanes = pages.shape[1:]
        itemsize = pages.dtype.itemsize
        rows = min(page_size, 32 // itemsize)
        if page_size % rows:
            raise ValueError(f"page_size: got {page_size}, expected a multiple of {rows} or less for {pages.dtype}")
        slots = _slots(slabs * rows * lanes * itemsize)
        block = block_of(num_tokens, slabs)
        tail = 32 // itemsize if block < num_tokens else 0
        return _Sizes(num_pages, page_size, rows, math.gcd(page_size, 4 // itemsize), block, slots, slabs, tail)


def block_of(num_tokens: int, slabs: int) -> int:
    """New tokens per grid step, of tokens that have so many slabs: whole groups, the same number in every step if there
    is one that divides them and is not much smaller than the largest, and the same number of steps on every core if
    they have tokens enough."""
    groups = -(-num_tokens // _GROUP)
    most = max(1, min(_STEP_BYTES // (slabs * LANES * 4), _STEP_TOKENS) // _GROUP)

    def steps_of(cores: int, unit: int) -> int | None:
        """Grid steps on so many cores, each of a multiple of `unit` groups."""
        fewest = cores * -(-groups // (cores * most))
        return next((steps for steps in range(fewest, 2 * fewest + 1, cores) if groups % (steps * unit) == 0), None)

    cores = cores_of(generation())
    shared = steps_of(cores, _CORE_TOKENS // _GROUP) if cores > 1 else None
    return -(-groups // (shared or steps_of(1, 1) or -(-groups // most))) * _GROUP


class WritePlan(NamedTuple):
    """The destinations of a step's tokens, in scalar memory. They are the same in every layer."""

    dests: Any
    """SMEM i32[T]"""
    word_rows: Any
    """SMEM i32[T], word row of each token in the first slab of its page, counted from the layer's first."""
    places: Any
    """SMEM i32[T / _GROUP], 4 bits for each token of a group, the first one's lowest: its place in its word row."""
    groups: Any
    """SMEM i32[grid steps], groups of decode tokens at the start of each."""
    stretches: Any
    """SMEM i32[T]: of each stretch of the other tokens its first one, counted from the first of the grid step, and from
    bit 16 on how many tokens go to it, those of the next grid steps included. Those of a grid step begin where its
    tokens do."""
    counts: Any
    """SMEM i32[grid steps], stretches of each."""

    @staticmethod
    def of(pages: Array, dests: Array) -> "WritePlan":
        """
        Args:
            pages: the pool, [layers, P, slabs, page_size, 128].
            dests: i32[T], `page * page_size + page offset`; P * page_size or more for tokens that are not stored.
                Tokens of one sequence are adjacent, in the order of their positions, and no two tokens have the same
                destination.
        Raises: ValueError for a page size that is not whole tiles.
        """
        sizes = _Sizes.of(pages, dests.shape[0])
        none = sizes.num_pages * sizes.page_size
        dests = jnp.pad(dests, (0, -dests.shape[0] % sizes.block), constant_values=none)
        page, is_stored = dests // sizes.page_size, dests < none
        begins = is_stored & ((dests != jnp.pad(dests[:-1] + 1, (1, 0))) | (dests % sizes.rows == 0))
        goes_on = is_stored & ~begins
        is_alone = begins & ~jnp.pad(goes_on[1:], (0, 1))
        begins, goes_on, is_alone = (each.reshape(-1, sizes.block) for each in (begins, goes_on, is_alone))
        # The first tokens that are alone in their stretch, which no copy of a stretch touches then.
        token = jnp.arange(sizes.block, dtype=jnp.int32)[None, :]
        groups = jnp.min(jnp.where(is_alone, sizes.block, token), axis=1) // _GROUP
        begins = begins & (token >= groups[:, None] * _GROUP)
        number = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
        entry = token[:, :, None]
        first = jnp.sum(number[:, None, :] <= entry, axis=2, dtype=jnp.int32)
        is_own = (number[:, None, :] == entry + 1) & (begins | goes_on)[:, None, :]
        is_last = token == number[:, -1:] - 1
        count = jnp.sum(is_own, axis=2, dtype=jnp.int32) + jnp.where(is_last, _behind(goes_on, sizes), 0)
        place = (dests % sizes.word_tokens).reshape(-1, _GROUP)
        return WritePlan(
            dests=dests,
            word_rows=page * sizes.page_word_rows + (dests - page * sizes.page_size) // sizes.word_tokens,
            places=jnp.sum(place << (4 * jnp.arange(_GROUP, dtype=jnp.int32)[None, :]), axis=1, dtype=jnp.int32),
            groups=groups,
            stretches=(first | (count << 16)).reshape(-1),
            counts=number[:, -1],
        )


def _behind(goes_on: Array, sizes: _Sizes) -> Array:
    """How many tokens behind those of each grid step go on with its last stretch, i32[grid steps, 1].

    Args:
        goes_on: bool[grid steps, block]: whether a token goes on with the stretch of the one before it.
    """
    nexts = range(1, 1 + -(-sizes.tail // sizes.block))
    tail = [jnp.pad(goes_on, ((0, number), (0, 0)))[number:] for number in nexts]
    if not tail:
        return jnp.zeros((goes_on.shape[0], 1), jnp.int32)
    tail = jnp.concatenate(tail, axis=1)[:, : sizes.tail]
    return jnp.min(jnp.where(tail, sizes.tail, jnp.arange(sizes.tail, dtype=jnp.int32)), axis=1, keepdims=True)


class _Scalars(NamedTuple):
    plan: WritePlan
    layer: Any
    """SMEM i32[1]"""


class _Scratch(NamedTuple):
    words: Any
    """VMEM [groups, _GROUP * slabs, tokens of a word row, 128], the pool's dtype."""
    word_in_sem: Any
    """DMA semaphores [groups]."""
    word_out_sem: Any
    """DMA semaphore."""
    buf: Any
    """VMEM [slots, slabs, word rows of a stretch, tokens of a word row, 128], the pool's dtype."""
    in_sem: Any
    """DMA semaphores [slots]."""
    out_sem: Any
    """DMA semaphores [slots]."""


def write_kv(pages: Array, layer: Array, tokens: Array, plan: WritePlan, *, interpret: Any = False) -> Array:
    """Store the keys and values of new tokens, in place where the pool is donated.

    Args:
        pages: [layers, P, slabs, page_size, 128].
        layer: i32[].
        tokens: [T, slabs, 128] as `TpuPool.pack` gives them, in the pool's dtype, or in float32 numbers that it holds
            exactly.
        plan: of the pool and the destinations of the tokens.
        interpret: as `pallas_call` takes it.
    Returns: the pool.
    """
    sizes = dataclasses.replace(_Sizes.of(pages, tokens.shape[0]), interpreted=bool(interpret))
    # A row of 32-bit elements can be read by itself.
    wide = jnp.float32 if jnp.issubdtype(pages.dtype, jnp.floating) else jnp.int32
    padding = -tokens.shape[0] % sizes.block + sizes.tail
    tokens = jnp.pad(tokens.astype(wide), ((0, padding), (0, 0), (0, 0))).reshape(-1, LANES)

    def kernel(scalars, new, _, pool, scratch):
        _write(scalars, new, pool, scratch, sizes)

    rows = pl.Element((sizes.block + sizes.tail) * sizes.slabs), pl.Element(LANES)
    inputs = [(tokens, pl.BlockSpec(rows, lambda i, *_: (i * sizes.block * sizes.slabs, 0)))]
    return _call("write_kv", kernel, pages, _Scalars(plan, layer.reshape(1)), inputs, [], [], sizes, interpret)[0]


def rotate_and_write(
    pages: Array,
    layer: Array,
    sides: tuple[Array, Array, Array],
    rotation: Rotation,
    plan: WritePlan,
    *,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Rotate queries and keys, and store keys and values as `write_kv` does, in place where the pool is donated.

    Args:
        sides: queries [T, Hq, 128], keys and values [T, Hkv, 128], as `rotates` takes them.
    Returns: the rotated queries, and the pool.
    """
    q, k, _ = sides
    (num_tokens, q_heads, _), kv_heads = q.shape, k.shape[1]
    sizes = dataclasses.replace(_Sizes.of(pages, num_tokens), interpreted=bool(interpret))
    trip = rotate.trip_of(sizes.block, q_heads)

    def kernel(scalars, q, own, tail, _, pool, rotated, scratch, packed, wide):
        k, v, cos, sin = own
        refs = rotate.Refs(q, k, v, cos, sin, rotated, packed, wide)
        trips = _Interleaved(
            trip // _GROUP,
            lambda number: rotate.rotate_tokens(refs, number * trip, trip, rotation.query_factor),
            lambda: rotate.rotate_keys(refs.of_keys(*tail), sizes.block, rotate.TAIL),
        )
        _write(scalars, packed, pool, scratch, sizes, trips)

    def part(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec((sizes.block, array.shape[1]), lambda i, *_: (i, 0))

    def tail(array: Array) -> pl.BlockSpec:
        """The first tokens of the next grid step; for the last one some others, which it does not read."""
        own, last = sizes.block // rotate.TAIL, num_tokens // rotate.TAIL - 1
        return pl.BlockSpec((rotate.TAIL, array.shape[1]), lambda i, *_: (jnp.minimum((i + 1) * own, last), 0))

    queries, *rows = (side.reshape(num_tokens, -1) for side in sides)
    rows += [rotation.cos, rotation.sin]
    tails = rows if sizes.tail else []
    inputs = [(queries, part(queries)), (rows, [*map(part, rows)]), (tails, [*map(tail, tails)])]
    buffers = [
        pltpu.VMEM(((sizes.block + rotate.TAIL) * 2 * kv_heads, LANES), jnp.float32),
        pltpu.VMEM((rotate.wide_rows(sizes.block, q_heads, kv_heads), LANES), jnp.float32),
    ]
    rotated = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        pl.BlockSpec((sizes.block, q_heads, LANES), lambda i, *_: (i, 0, 0)),
    )
    scalars = _Scalars(plan, layer.reshape(1))
    limit = rotate.vmem_limit(sizes.block, q_heads, kv_heads)
    pages, q = _call("rotate_and_write", kernel, pages, scalars, inputs, [rotated], buffers, sizes, interpret, limit)
    return q, pages


def rotates(q: Array, k: Array, rotation: Rotation, kv_dtype: jnp.dtype) -> bool:
    """Whether `rotate_and_write` takes these. Args: q, k: [T, heads, D]."""
    block = block_of(q.shape[0], 2 * k.shape[1])
    return q.shape[0] % block == 0 and rotate.supports(q, k, rotation, kv_dtype, block)


def _call(
    name: str,
    kernel: Callable,
    pages: Array,
    scalars: _Scalars,
    inputs: Sequence[tuple[Any, Any]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    buffers: Sequence[Any],
    sizes: _Sizes,
    interpret: Any,
    vmem_limit: int | None = None,
) -> list[Array]:
    """`kernel(scalars, *inputs, _, pool, *outputs, scratch, *buffers)` for each grid step.

    Args:
        inputs: of each argument of the kernel the arrays and their blocks, pytrees of the same structure.
        outputs: what it stores, and its blocks.
    Returns: the pool, and the outputs.
    """
    num_pages, slabs, page_size = pages.shape[1:4]
    # The same bytes: a tile of 128 lanes is one word row after the other.
    by_word = (-1, slabs, page_size // sizes.word_tokens, sizes.word_tokens, LANES)
    tile = sizes.slots, slabs, sizes.rows // sizes.word_tokens, sizes.word_tokens, LANES
    dma, any_memory = pltpu.SemaphoreType.DMA, pl.BlockSpec(memory_space=pl.ANY)
    arguments, blocks = [each for each, _ in inputs], [each for _, each in inputs]
    pool, *results = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((pages.shape[0] * num_pages, *by_word[1:]), pages.dtype),
            *(shape for shape, _ in outputs),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=scalars.plan.groups.shape,
            in_specs=[*blocks, any_memory],
            out_specs=[any_memory, *(block for _, block in outputs)],
            scratch_shapes=[
                _Scratch(
                    words=pltpu.VMEM((sizes.groups, _GROUP * slabs, sizes.word_tokens, LANES), pages.dtype),
                    word_in_sem=dma((sizes.groups,)),
                    word_out_sem=dma,
                    buf=pltpu.VMEM(tile, pages.dtype),
                    in_sem=dma((sizes.slots,)),
                    out_sem=dma((sizes.slots,)),
                ),
                *buffers,
            ],
        ),
        input_output_aliases={len(jax.tree.leaves((scalars, arguments))): 0},
        # Destinations beyond the pool are skipped.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=vmem_limit,
        ),
        name=name,
        interpret=interpret,
    )(scalars, *arguments, pages.reshape(by_word))
    return [pool.reshape(pages.shape), *results]


def _slots(stretch_bytes: int) -> int:
    slots = _MOST_SLOTS
    while slots > 8 and slots * stretch_bytes > _RING_BYTES:
        slots //= 2
    return slots


def _div(x, size: int):
    """x // size for x >= 0."""
    return x >> (size.bit_length() - 1) if size & (size - 1) == 0 else jax.lax.div(x, jnp.int32(size))


class _Interleaved(NamedTuple):
    """Work on all tokens of a grid step that is done between the starts of copies."""

    groups: int
    """Groups of tokens per trip."""
    run: Callable[[Any], None]
    """Do the work on a trip's tokens. Args: the trip's number, i32[]."""
    run_tail: Callable[[], None]
    """Do the work on the tokens behind those of the grid step."""


def _write(
    scalars: _Scalars, new, pool, scratch: _Scratch, sizes: _Sizes, interleaved: _Interleaved | None = None
) -> None:
    """Write the tokens of a grid step. Args: interleaved: is done before `new` is read."""
    first_page = scalars.layer[0] * sizes.num_pages
    arguments = scalars, new, pool.at[pl.ds(first_page, sizes.num_pages)], scratch, sizes
    write_groups, wait_groups = _groups(*arguments, interleaved)
    write_stretches = _stretches(*arguments)
    write_groups()
    if interleaved is not None and sizes.tail:
        pl.when(_last_end(scalars.plan, sizes) > sizes.block)(interleaved.run_tail)
    write_stretches()
    wait_groups()


def _last_end(plan: WritePlan, sizes: _Sizes):
    """One past the last token of the last stretch of a grid step, counted from its first token."""
    last = jnp.maximum(plan.counts[pl.program_id(0)] - 1, 0)
    entry = plan.stretches[pl.program_id(0) * sizes.block + last]
    return (entry & 0xFFFF) + (entry >> 16)


def _put(buf, at: Callable[[int], tuple], new, tokens: Iterable[tuple[Any, Any]], sizes: _Sizes) -> None:
    """Change a word row, `buf[at(slab)]` in all slabs.

    Args:
        tokens: of each token of `new` its index and its place in the word row.
    """
    tokens = list(tokens)
    for slab in range(sizes.slabs):
        index = at(slab)
        old = buf[index]
        place, changed = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0), old.astype(new.dtype)
        for token, own in tokens:
            changed = jnp.where(
                place == own, jnp.broadcast_to(new[token * sizes.slabs + slab][None, :], old.shape), changed
            )
        buf[index] = changed.astype(old.dtype)


def _word_rows(layer, row, sizes: _Sizes):
    """A word row of all slabs. Args: row: as in `WritePlan.word_rows`."""
    if not sizes.interpreted:
        # An address is a sum over the axes, so that pages need not be separated from rows, which takes scalars.
        return layer.at[0, :, row]
    page = row // sizes.page_word_rows
    return layer.at[page, :, row - page * sizes.page_word_rows]


def _code(dtype: jnp.dtype, sizes: _Sizes) -> Callable[[Array], Array] | None:
    """A function from numbers of new tokens, as the kernel takes them, to the bits in the pool, i32; None where the
    bits are not known, or where a row of words does not hold whole words."""
    if sizes.word_tokens != packing(dtype):
        return None
    if dtype == jnp.int8:
        return lambda new: new & 0xFF
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    if dtype == jnp.bfloat16:
        return lambda new: jax.lax.shift_right_logical(bits(new), 16)
    return bits if dtype == jnp.float32 else None


def _put_group(words, group, codes: Array, places, sizes: _Sizes) -> None:
    """Change the word rows of a group's tokens.

    Args:
        codes: i32[_GROUP * slabs, 128].
        places: as in `WritePlan`.
    """
    bits = 32 // sizes.word_tokens
    if bits < 32:
        token = jax.lax.broadcasted_iota(jnp.int32, codes.shape, 0) // sizes.slabs
        shift = (jax.lax.shift_right_logical(jnp.full(codes.shape, places, jnp.int32), 4 * token) & 15) * bits
        old = load_words(words, (group,), interpreted=sizes.interpreted)
        mask = jax.lax.shift_left(jnp.full(codes.shape, (1 << bits) - 1, jnp.int32), shift)
        codes = (old & ~mask) | jax.lax.shift_left(codes, shift)
    store_words(words, (group,), codes, interpreted=sizes.interpreted)


def _groups(scalars: _Scalars, new, layer, scratch: _Scratch, sizes: _Sizes, interleaved: _Interleaved | None):
    """Functions that write the groups of decode tokens, and that wait for it."""
    words, in_sem, out_sem = scratch.words, scratch.word_in_sem, scratch.word_out_sem
    plan, first_token = scalars.plan, pl.program_id(0) * sizes.block
    count, first_group = plan.groups[pl.program_id(0)], pl.program_id(0) * sizes.groups

    def own(array, group):
        """An array's entries of a group's tokens. They are read before a copy starts, which might change them as far as
        the compiler knows."""
        entries = array.at[pl.ds(first_token + group * _GROUP, _GROUP)]
        return [entries[i] for i in range(_GROUP)]

    def copies(group, start):
        for i, row in enumerate(own(plan.word_rows, group)):
            start(_word_rows(layer, row, sizes), words.at[group, pl.ds(i * sizes.slabs, sizes.slabs)])

    def load(group, carry):
        sem = in_sem.at[group]
        copies(group, lambda source, target: pltpu.make_async_copy(source, target, sem).start())
        return carry

    def wait(group, sem):
        pltpu.make_async_copy(words.at[group], words.at[group], sem).wait()

    def change(group, carry):
        wait(group, in_sem.at[group])
        places, count = plan.places[first_group + group], _GROUP * sizes.slabs
        if (code := _code(words.dtype, sizes)) is not None:
            _put_group(words, group, code(new[pl.ds(group * count, count)]), places, sizes)
        else:
            for i in range(_GROUP):
                token = group * _GROUP + i, (places >> (4 * i)) & 15
                _put(words, lambda slab, i=i: (group, i * sizes.slabs + slab), new, [token], sizes)
        copies(group, lambda target, source: pltpu.make_async_copy(source, target, out_sem).start())
        return carry

    def write():
        _start(load, count, sizes.groups, interleaved)
        jax.lax.fori_loop(0, count, change, 0)

    def wait_stored(group, carry):
        wait(group, out_sem)
        return carry

    return write, lambda: jax.lax.fori_loop(0, count, wait_stored, 0)


def _start(load: Callable, count: Array, groups: int, interleaved: _Interleaved | None) -> None:
    """`load` each of the first `count` of all `groups`, between the trips of what is `interleaved`."""
    if interleaved is None:
        jax.lax.fori_loop(0, count, load, 0)
        return
    run, per_trip = interleaved.run, interleaved.groups
    full_trips = _div(count, per_trip)

    def run_only(trip, carry):
        run(trip)
        return carry

    def run_and_load(trip, carry):
        run(trip)
        for group in range(per_trip):
            load(trip * per_trip + group, carry)
        return carry

    jax.lax.fori_loop(0, full_trips, run_and_load, 0)
    jax.lax.fori_loop(full_trips * per_trip, count, load, 0)
    jax.lax.fori_loop(full_trips, groups // per_trip, run_only, 0)


def _stretches(scalars: _Scalars, new, layer, scratch: _Scratch, sizes: _Sizes):
    """A function that writes the stretches of the other tokens."""
    buf, in_sem, out_sem = scratch.buf, scratch.in_sem, scratch.out_sem
    page_size, rows, slots = sizes.page_size, sizes.rows, sizes.slots
    plan, first_token = scalars.plan, pl.program_id(0) * sizes.block
    count = plan.counts[pl.program_id(0)]
    ahead = slots // 2

    def slot_of(stretch):
        return stretch & (slots - 1)

    def first_of(stretch):
        """The first token of a stretch in the grid step, its destination, and how many there are."""
        entry = plan.stretches[first_token + stretch]
        token = entry & 0xFFFF
        return token, plan.dests[first_token + token], entry >> 16

    def stretch_ref(dest):
        page = _div(dest, page_size)
        if rows == page_size:
            return layer.at[page]
        height = rows // sizes.word_tokens
        start = _div(dest - page * page_size, rows) * height
        return layer.at[page, :, pl.ds(pl.multiple_of(start, height), height)]

    def wait(slot, sem):
        pltpu.make_async_copy(buf.at[slot], buf.at[slot], sem.at[slot]).wait()

    def load(stretch):
        slot = slot_of(stretch)

        @pl.when(stretch < count)
        def _():
            dest = first_of(stretch)[1]
            pl.when(stretch >= slots)(lambda: wait(slot, out_sem))
            pltpu.make_async_copy(stretch_ref(dest), buf.at[slot], in_sem.at[slot]).start()

    def turn(stretch, carry):
        load(stretch + ahead)
        slot, (token, dest, num) = slot_of(stretch), first_of(stretch)
        wait(slot, in_sem)
        offset, places = dest - _div(dest, rows) * rows, range(sizes.word_tokens)

        def put(row, carry):
            def own(place):
                """The token at a place of the word row, and the place; -1 where it is none of the stretch's."""
                i = row * sizes.word_tokens + place - offset
                is_own = (i >= 0) & (i < num)
                return token + jnp.where(is_own, i, 0), jnp.where(is_own, place, -1)

            _put(buf, lambda slab: (slot, slab, row), new, map(own, places), sizes)
            return carry

        jax.lax.fori_loop(_div(offset, sizes.word_tokens), _div(offset + num - 1, sizes.word_tokens) + 1, put, carry)
        pltpu.make_async_copy(buf.at[slot], stretch_ref(dest), out_sem.at[slot]).start()
        return carry

    def start(stretch, carry):
        load(stretch)
        return carry

    def wait_stored(stretch, carry):
        wait(slot_of(stretch), out_sem)
        return carry

    def write():
        jax.lax.fori_loop(0, ahead, start, 0)
        jax.lax.fori_loop(0, count, turn, 0)
        jax.lax.fori_loop(jnp.maximum(count - slots, 0), count, wait_stored, 0)

    return write
