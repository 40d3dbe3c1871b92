"""Sampling on a TPU: each pass over the logits reads them once, eight or sixteen rows at a time, from HBM or, where
they fit, from VMEM.

XLA writes every level of a sum that has a fixed order, stores the logits a second time in another layout for it, and
sorts the vocabulary for the largest few. Here a row's numbers stay in one sublane: nothing is transposed, and what a
row gets depends on that row alone.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels import scopes
from levanter_infer.kernels.tpu.pool import LANES
from levanter_infer.kernels.tpu.tiling import cores_of, generation

_MAX_DEPTH, _MIN_DEPTH = 16, 4
"""Candidates of a lane, powers of 2: those of all parts together are to be a few thousand."""
_ROWS = 8
"""Rows of a block: the sublanes of a register of 32-bit numbers."""
_ROWS_AT_ONCE, _AT_ONCE_BYTES = 128, 10 * 2**20
"""Rows of a block where a row is short, at most, and their bytes in VMEM: what waits for one register's lanes is done
beside others."""
_CHUNK = 512
"""Logits of a row that a trip of a loop reads."""
_WIDE_CHUNK = 4096
"""The same for kernels that do little with each, so that fewer would wait for the results of the units."""
_FAN = 16
_KEY_BITS, _SIGN = 32, -(2**31)
_MAX_BLOCK_BYTES = 6 * 2**20
"""Bytes of a block of logits; two blocks are in VMEM."""
_NEAR_BYTES: dict[str, int] = {"v5e": 40 << 20, "v6e": 40 << 20}
"""Bytes of all logits that stay in VMEM while they are sampled, at most. A core of v4 has 16 MiB. On v5p XLA leaves
31 MiB in HBM all the same, and libtpu 0.0.51 ends the process over 8 MiB (64 sequences of 8B, TP 4)."""


Interpret = pltpu.InterpretParams | bool


@dataclass(frozen=True)
class TpuSampling:
    """`SamplingKernels` for a TPU."""

    interpret: Interpret = False

    def as_read(self, logits: Array) -> Array:
        return as_read(logits)

    def candidates(self, logits: Array, parts: int, num_rows: Array) -> tuple[Array, Array]:
        return candidates(logits, parts, num_rows, interpret=self.interpret)

    def thresholds(self, values: Array, rules: Array, num_rows: Array) -> Array:
        return thresholds(values, rules, num_rows, interpret=self.interpret)

    def reached(self, logits: Array, terms: Array, pivots: Array, rows: Array) -> Array:
        return reached(logits, terms, pivots, rows, interpret=self.interpret)

    def total_weights(self, logits: Array, terms: Array, num_rows: Array) -> Array:
        return total_weights(logits, terms, num_rows, interpret=self.interpret)

    def weight_sums(self, logits: Array, terms: Array, widths: Sequence[int], num_rows: Array) -> tuple[Array, Array]:
        return weight_sums(logits, terms, widths, num_rows, interpret=self.interpret)

    def descend(
        self, upper: Array, lower: Array, clocks: Array, widths: Sequence[int], num_rows: Array
    ) -> tuple[Array, Array]:
        return descend(upper, lower, clocks, widths, num_rows, interpret=self.interpret)


def supports(logits: Array) -> bool:
    """Whether the kernels take these logits [row, vocab]: eight rows fit VMEM, and there is more than one chunk."""
    num = logits.shape[1]
    return logits.dtype == jnp.float32 and num > _CHUNK and _padded(num) * _ROWS * 4 <= _MAX_BLOCK_BYTES


def as_read(logits: Array) -> Array:
    """The same array, stored row by row: XLA prefers rows in lanes, which need less padding."""
    return with_layout_constraint(logits, Layout((0, 1)))


def bucketed(compute: Callable[[int], Array], num_rows: Array, buckets: Sequence[int], zeros: Array) -> Array:
    """`Backend.bucketed`, with a branch for each bucket.

    A loop of zero or one trips carries the results of the others, which the compiler moves to VMEM and back: for 256
    rows of 32,064 logits 63 MiB a step on v5e, and 94 on v6e.
    """

    def branch(rows: int) -> Callable[[], Array]:
        def results() -> Array:
            with jax.named_scope(scopes.head(rows)):
                return as_read(zeros.at[:rows].set(compute(rows)))

        return results

    bucket = sum((num_rows > lower).astype(jnp.int32) for lower in (0, *buckets[:-1]))
    with jax.named_scope(scopes.HEAD):
        return as_read(jax.lax.switch(bucket, [lambda: zeros, *map(branch, buckets)]))


def logit_stats(logits: Array, num_rows: Array, *, interpret: Interpret = False) -> tuple[Array, Array, Array]:
    """The largest logit of each row of f32[row, vocab], the sum of e^(logit - largest), NaN where a logit is NaN or
    +inf and 0 where all are -inf, and the first index of the largest. Rows from `num_rows` i32[] on are anything."""
    rows, num = logits.shape
    column = jax.ShapeDtypeStruct((rows, 1), jnp.float32)
    outs = (column, column, jax.ShapeDtypeStruct((rows, 1), jnp.int32))
    kernel, sizes = functools.partial(_stats, num=num), _whole_rows(rows, num)
    peak, total, best = _by_blocks(
        "logit_stats", kernel, _near(logits, interpret), num_rows, (), outs, (), interpret, **sizes
    )
    return peak[:, 0], total[:, 0], best[:, 0]


def total_weights(logits: Array, terms: Array, num_rows: Array, *, interpret: Interpret = False) -> Array:
    """`SamplingKernels.total_weights`: a sum in each lane, and then of the lanes."""
    rows, num = logits.shape
    outs = (jax.ShapeDtypeStruct((rows, 1), jnp.float32),)
    kernel, sizes = functools.partial(_total, num=num), _whole_rows(rows, num)
    logits = _near(logits, interpret)
    (total,) = _by_blocks("total_weights", kernel, logits, num_rows, (terms,), outs, (), interpret, **sizes)
    return total[:, 0]


def candidates(logits: Array, parts: int, num_rows: Array, *, interpret: Interpret = False) -> tuple[Array, Array]:
    """The largest logits of each lane, of all lanes together f32[row, n], -inf where a lane has fewer, and a bound of
    the other logits of the row, f32[row]. Lane i has the logits i, i + LANES, i + 2 * LANES, …

    The largest logits of a row are in many lanes, so that the candidates hold several hundred of them. Where a lane
    keeps eight, each of its logits takes part in nine maxima and minima. The bound says what they do not hold.
    """
    rows, num = logits.shape
    depth = min(max(_power_of_2(2 * _MAX_DEPTH // parts), _MIN_DEPTH), _MAX_DEPTH)
    outs = (
        jax.ShapeDtypeStruct((rows, depth * LANES), jnp.float32),
        jax.ShapeDtypeStruct((rows, 1), jnp.float32),
    )
    kernel = functools.partial(_candidates, num=num, depth=depth)
    width = _whole(num)
    logits = _near(logits, interpret)
    values, bound = _by_blocks("candidates", kernel, logits, num_rows, (), outs, (), interpret, width=width)
    return values, bound[:, 0]


def thresholds(values: Array, rules: Array, num_rows: Array, *, interpret: Interpret = False) -> Array:
    """`SamplingKernels.thresholds`: the largest number, bit by bit, that enough values or enough weight reach."""
    outs = (jax.ShapeDtypeStruct((values.shape[0], 1), jnp.float32),)
    block = _rows_at_once(values.shape[0], 4 * values.shape[1])
    scratch = tuple(pltpu.VMEM((block, values.shape[1]), dtype) for dtype in (jnp.int32, jnp.float32))
    found = _by_blocks("thresholds", _thresholds, values, num_rows, (rules,), outs, scratch, interpret, block=block)
    return found[0][:, 0]


def reached(logits: Array, terms: Array, pivots: Array, rows: Array, *, interpret: Interpret = False) -> Array:
    """`SamplingKernels.reached`. Blocks without a row that counts are not read."""
    num_blocks = pl.cdiv(logits.shape[0], _ROWS)
    of_blocks = jnp.pad(rows, (0, num_blocks * _ROWS - rows.shape[0])).reshape(num_blocks, _ROWS).any(axis=1)
    # Those with such rows first; the others repeat the last of them.
    order = jnp.argsort(~of_blocks, stable=True).astype(jnp.int32)
    count = jnp.sum(of_blocks, dtype=jnp.int32)
    order = order[jnp.minimum(jnp.arange(num_blocks), jnp.maximum(count - 1, 0))]

    def block(index, count, order):
        return order[index], 0

    def body(count, order, *refs):
        @pl.when(pl.program_id(0) < count[0])
        def _():
            _reached(*refs, num=logits.shape[1])

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((logits.shape[0], pivots.shape[1]), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_blocks,),
            in_specs=[
                pl.BlockSpec((_ROWS, _padded(logits.shape[1])), block),
                *(pl.BlockSpec((_ROWS, other.shape[1]), block) for other in (terms, pivots)),
            ],
            out_specs=pl.BlockSpec((_ROWS, pivots.shape[1]), block),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="reached",
    )(count[None], order, _near(logits, interpret), terms, pivots)


def weight_sums(
    logits: Array, terms: Array, widths: Sequence[int], num_rows: Array, *, interpret: Interpret = False
) -> tuple[Array, Array]:
    """Levels of sums of the weights of a row's logits: e^((logit - peak) * inverse), and 0 for logits below a threshold
    and exponents below a floor.

    Entry i of a level is the sum of the entries i, i + width, i + 2 * width, … of the level before, of which the first
    is the weights, in the order of `sampling_draw.fold_sums`.

    Args:
        logits: f32[row, vocab]
        terms: f32[row, 4]: peak, inverse, threshold and floor of each row.
        widths: sizes of the levels, two at least, the last one 1.
    Returns: the levels from the second on, one behind the other, each filled up to a multiple of LANES with zeros; and
        the first, cut into its `_FAN` stretches of `widths[1]` entries, each filled up likewise, with anything.
    """
    rows, num = logits.shape
    tiles = [pl.cdiv(width, LANES) for width in widths[1:]]
    outs = (
        jax.ShapeDtypeStruct((rows, sum(tiles) * LANES), jnp.float32),
        jax.ShapeDtypeStruct((rows, _FAN * tiles[0] * LANES), jnp.float32),
    )
    kernel = functools.partial(_sums, num=num, widths=tuple(widths))
    chunk = _sums_chunk(num, widths[0])
    first = pltpu.VMEM((_ROWS, pl.cdiv(widths[0], chunk) * chunk), jnp.float32)
    width = _padded(num, chunk)
    logits = _near(logits, interpret)
    upper, lower = _by_blocks("weight_sums", kernel, logits, num_rows, (terms,), outs, (first,), interpret, width=width)
    return upper, lower


def descend(
    upper: Array, lower: Array, clocks: Array, widths: Sequence[int], num_rows: Array, *, interpret: Interpret = False
) -> tuple[Array, Array]:
    """Choose a child at every level of `upper`, from the last, and give the children of the last choice.

    Args:
        upper, lower: of `weight_sums`.
        clocks: f32[row, depth * _FAN], times of `sampling_draw.clocks` for each level from the last on.
        widths: as in `weight_sums`, without the last, 1.
    Returns: the entry of level 1 that was chosen, i32[row], and the _FAN entries of level 0 that it is the sum of,
        f32[row, _FAN].
    """
    rows = upper.shape[0]
    outs = (jax.ShapeDtypeStruct((rows, 1), jnp.int32), jax.ShapeDtypeStruct((rows, _FAN), jnp.float32))
    kernel = functools.partial(_descend, widths=tuple(widths))
    clocks = jnp.pad(clocks, ((0, 0), (0, -clocks.shape[1] % LANES)))
    block = _rows_at_once(rows, 2 * sum(array.shape[1] for array in (upper, lower, clocks)))
    node, masses = _by_blocks("descend", kernel, upper, num_rows, (lower, clocks), outs, (), interpret, block=block)
    return node[:, 0], masses


def _near(logits: Array, interpret: Interpret) -> Array:
    """The logits in VMEM where they fit: a matmul stores them there, and every kernel reads them without HBM. XLA would
    have them in HBM, or move them there and back around conditions."""
    if interpret or logits.nbytes > _NEAR_BYTES.get(generation() or "", 0):
        return logits
    return pltpu.with_memory_space_constraint(logits, pltpu.VMEM)


def _rows_at_once(rows: int, numbers: int) -> int:
    """Rows of a block, for rows that have as many 32-bit `numbers` in VMEM each: a block for each core, if they fit."""
    block, rows = _ROWS_AT_ONCE, pl.cdiv(rows, cores_of(generation()))
    while block > _ROWS and (block // 2 >= rows or block * numbers * 4 > _AT_ONCE_BYTES):
        block //= 2
    return block


def _power_of_2(most: int) -> int:
    """The largest power of 2 up to `most`; 0 for 0."""
    return 1 << most.bit_length() - 1 if most else 0


def _whole_rows(rows: int, num: int) -> dict[str, int]:
    """The block and width of `_by_blocks` for a pass over whole rows of logits."""
    width = _whole(num)
    block = 2 * _ROWS if rows > _ROWS and 2 * _ROWS * 4 * width <= _MAX_BLOCK_BYTES else _ROWS
    return {"block": block, "width": width}


def _whole(num: int) -> int:
    """Lanes of a block that is as it is stored: what is in VMEM is read there, and not copied."""
    return pl.cdiv(num, LANES) * LANES


def _padded(num: int, chunk: int = _CHUNK) -> int:
    """Lanes of a block of `num` logits: chunks may begin in any tile, and read past the end."""
    return pl.cdiv(num + chunk, _CHUNK) * _CHUNK + _CHUNK


def _sums_chunk(num: int, width: int) -> int:
    """Sums of a row that a trip computes, each of stretches of `width` of `num` logits: so many that it reads some 256
    registers, and the lanes of one are shifted while others are added up."""
    return _CHUNK * min(max(1, 4 * _FAN // pl.cdiv(num, width)), pl.cdiv(width, _CHUNK))


def _by_blocks(
    name, kernel, values, num_rows, others, outs, scratch, interpret, *, block=_ROWS, width=None
) -> list[Array]:
    """`kernel(values, *others, *outs, *scratch)` for each block of rows that holds one of the first `num_rows`.

    Args: width: lanes of the block of `values`.
    """
    rows = values.shape[0]
    width = values.shape[1] if width is None else width

    def read(index, count):
        return jnp.minimum(index, jnp.maximum(pl.cdiv(count[0], block) - 1, 0)), 0

    def body(count, *refs):
        @pl.when(pl.program_id(0) * block < count[0])
        def _():
            kernel(*refs)

    return pl.pallas_call(
        body,
        out_shape=outs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, block),),
            in_specs=[
                pl.BlockSpec((block, width), read),
                *(pl.BlockSpec((block, other.shape[1]), read) for other in others),
            ],
            out_specs=[pl.BlockSpec((block, out.shape[1]), lambda index, count: (index, 0)) for out in outs],
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=name,
    )(jnp.reshape(num_rows, 1), values, *others)


def _chunks(refs, num: int, init, step: Callable, size: int = _CHUNK):
    """`carry = step(carry, chunk, index of its first logit)` over all chunks of `size` logits, and a smaller last one,
    a multiple of _CHUNK, with -inf past the end."""

    def one(index, carry):
        start = pl.multiple_of(index * size, size)
        return step(carry, refs[:, pl.ds(start, size)], start)

    carry = jax.lax.fori_loop(0, num // size, one, init) if num >= size else init
    if rest := num % size:
        start = num - rest
        chunk = refs[:, start : start + pl.cdiv(rest, LANES) * LANES]
        filled = [jnp.where(_lanes(chunk) < rest, chunk, -jnp.inf)]
        if missing := -chunk.shape[1] % _CHUNK:
            filled.append(jnp.full((chunk.shape[0], missing), -jnp.inf))
        carry = step(carry, jnp.concatenate(filled, axis=1), start)
    return carry


def _lanes(like: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, 1)


def _stats(logits, peak_out, total_out, best_out, *, num: int):
    shape = (logits.shape[0], _CHUNK)

    def largest(carry, chunk, start):
        most, first = carry
        for place in range(0, chunk.shape[1], _CHUNK):
            part = chunk[:, place : place + _CHUNK]
            is_larger = part > most
            most, first = jnp.where(is_larger, part, most), jnp.where(is_larger, start + place, first)
        return most, first

    nothing = jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32)
    most, first = _chunks(logits, num, nothing, largest, _WIDE_CHUNK)
    peak = jnp.max(most, axis=1, keepdims=True)
    shift = jnp.where(peak == -jnp.inf, 0.0, peak)

    def add(total, chunk, _):
        for place in range(0, chunk.shape[1], _CHUNK):
            total = total + jnp.exp(chunk[:, place : place + _CHUNK] - shift)
        return total

    total = _chunks(logits, num, jnp.zeros(shape), add, _WIDE_CHUNK)
    peak_out[...] = peak
    total_out[...] = jnp.sum(total, axis=1, keepdims=True)
    best_out[...] = jnp.min(jnp.where(most == peak, first + _lanes(first), num), axis=1, keepdims=True)


def _total(logits, terms, out, *, num: int):
    peak, inverse, floor = terms[:, 0:1], terms[:, 1:2], terms[:, 3:4]

    def add(total, chunk, _):
        for place in range(0, chunk.shape[1], _CHUNK):
            exponent = (chunk[:, place : place + _CHUNK] - peak) * inverse
            total = total + jnp.where(exponent >= floor, jnp.exp(exponent), 0.0)
        return total

    total = _chunks(logits, num, jnp.zeros((logits.shape[0], _CHUNK)), add, _WIDE_CHUNK)
    out[...] = jnp.sum(total, axis=1, keepdims=True)


def _candidates(logits, out, bound, *, num: int, depth: int):
    none = jnp.full((_ROWS, LANES), -jnp.inf)

    def insert(bests, chunk, _):
        places = range(0, chunk.shape[1], LANES)
        for start in range(0, len(places), depth):
            group = [chunk[:, place : place + LANES] for place in places[start : start + depth]]
            bests = _largest_of(bests, _sorted([*group, *[none] * (depth - len(group))]))
        return tuple(bests)

    bests = _chunks(logits, num, (none,) * depth, insert, _WIDE_CHUNK)
    for number, best in enumerate(bests):
        out[:, number * LANES : (number + 1) * LANES] = best
    bound[...] = jnp.max(bests[-1], axis=1, keepdims=True)


def _sorted(values: list[Array]) -> list[Array]:
    """Arrays whose numbers descend in each lane, by Batcher's odd-even mergesort (1968). Requires: a power of 2."""
    size = 1
    while size < len(values):
        step = size
        while step:
            for first in range(step % size, len(values) - step):
                is_pair = (first - step % size) % (2 * step) < step
                if is_pair and first // (2 * size) == (first + step) // (2 * size):
                    _exchange(values, first, first + step)
            step //= 2
        size *= 2
    return values


def _largest_of(some: Sequence[Array], others: Sequence[Array]) -> list[Array]:
    """The largest half of two lists whose numbers descend in each lane, in the same order, by a bitonic merge."""
    values = [jnp.maximum(a, b) for a, b in zip(some, reversed(others), strict=True)]
    step = len(values) // 2
    while step:
        for first in range(len(values)):
            if not first & step:
                _exchange(values, first, first + step)
        step //= 2
    return values


def _exchange(values: list[Array], first: int, second: int) -> None:
    """Puts the larger number of each lane first."""
    a, b = values[first], values[second]
    values[first], values[second] = jnp.maximum(a, b), jnp.minimum(a, b)


def _thresholds(values, rules, out, keys, weights):
    peak, inverse, floor, bound, total, most, share = (rules[:, i : i + 1] for i in range(7))
    wants_k, wants_p = most > 0, share < 1

    def largest(is_wanted: Array, target: Array, added: Callable[[Array], Array]) -> Array:
        """The largest logit such that the values from it up add up to `target`; NaN where all of them do not."""

        def decide(bit, key):
            tried = key | jax.lax.shift_right_logical(jnp.int32(_SIGN), bit)
            reached = jnp.sum(added(keys[...] >= (tried ^ _SIGN)), axis=1, keepdims=True) >= target
            return jnp.where(reached, tried, key)

        bits = jnp.where(jnp.max(jnp.where(is_wanted, 1, 0)) > 0, _KEY_BITS, 0)
        return _from_key(jax.lax.fori_loop(0, bits, decide, jnp.zeros(peak.shape, jnp.int32)) ^ _SIGN)

    keys[...] = _to_key(values[...])
    kth = largest(wants_k, most, lambda reached: jnp.where(reached, 1.0, 0.0))
    kth = jnp.where(wants_k, kth, -jnp.inf)
    exponent = (values[...] - peak) * inverse
    weights[...] = jnp.where((exponent >= floor) & (values[...] >= kth), jnp.exp(exponent), 0.0)
    kept = jnp.sum(weights[...], axis=1, keepdims=True)
    pth = largest(
        wants_p, share * jnp.where(wants_k, kept, total), lambda reached: jnp.where(reached, weights[...], 0.0)
    )
    # What is not among the values is at most the bound. It may be one of those that tie with the k-th largest, which
    # counts where their mass does.
    tie_counts = wants_p & (bound > -jnp.inf)
    found_k = ~wants_k | (kth > bound) | ((kth == bound) & ~tie_counts)
    found_p = ~wants_p | (pth >= bound)
    threshold = jnp.maximum(kth, jnp.where(wants_p, pth, -jnp.inf))
    out[...] = jnp.where(found_k & found_p, threshold, jnp.nan)


def _reached(logits, terms, pivots, out, *, num: int):
    peak, inverse, threshold, floor = (terms[:, i : i + 1] for i in range(4))
    count = pivots.shape[1]
    bounds = [jnp.broadcast_to(pivots[:, i : i + 1], (_ROWS, LANES)) for i in range(count)]

    def add(sums, chunk, _):
        exponent = (chunk - peak) * inverse
        kept = (chunk >= threshold) & (exponent >= floor)
        weights, keys = jnp.where(kept, jnp.exp(exponent), 0.0), _to_key(chunk)
        for place in range(0, _CHUNK, LANES):
            own, key = weights[:, place : place + LANES], keys[:, place : place + LANES]
            sums = tuple(total + jnp.where(key >= bound, own, 0.0) for total, bound in zip(sums, bounds, strict=True))
        return sums

    sums = _chunks(logits, num, tuple(jnp.zeros((_ROWS, LANES)) for _ in range(count)), add)
    for i, total in enumerate(sums):
        out[:, i : i + 1] = jnp.sum(total, axis=1, keepdims=True)


def _to_key(values: Array) -> Array:
    """i32 in the order of f32."""
    bits = pltpu.bitcast(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ (2**31 - 1), bits)


def _from_key(keys: Array) -> Array:
    return pltpu.bitcast(jnp.where(keys < 0, keys ^ (2**31 - 1), keys), jnp.float32)


def _sums(logits, terms, upper, lower, first, *, num: int, widths: tuple[int, ...]):
    _first_level(logits, terms, first, num, widths[0])
    tiles = [first[:, tile * LANES : (tile + 1) * LANES] for tile in range(pl.cdiv(widths[0], LANES))]
    place = 0
    for level, (size, width) in enumerate(zip(widths, widths[1:], strict=False)):
        pieces = _stretches(tiles, size, width)
        if level == 0:
            for number, piece in enumerate(piece for stretch in pieces for piece in stretch):
                lower[:, number * LANES : (number + 1) * LANES] = jnp.zeros_like(tiles[0]) if piece is None else piece
        tiles = [_tree_sum([stretch[part] for stretch in pieces]) for part in range(pl.cdiv(width, LANES))]
        tiles = [jnp.where(_lanes(tile) < width - part * LANES, tile, 0.0) for part, tile in enumerate(tiles)]
        for tile in tiles:
            upper[:, place : place + LANES] = tile
            place += LANES


def _first_level(logits, terms, first, num: int, width: int) -> None:
    """The sums of the weights, `width` of them."""
    peak, inverse, threshold, floor = (terms[:, i : i + 1] for i in range(4))

    def weights(tile, size: int, may_pass_end: bool) -> Array:
        # What a stretch would read behind the block counts for nothing.
        last = (logits.shape[1] - size) // LANES
        place = jnp.minimum(tile, last) if may_pass_end else tile
        z = logits[:, pl.ds(pl.multiple_of(place * LANES, LANES), size)]
        exponent = (z - peak) * inverse
        kept = (z >= threshold) & (exponent >= floor)
        if may_pass_end:
            kept &= _lanes(z) < num - tile * LANES
        return jnp.where(kept, jnp.exp(exponent), 0.0)

    # Base tile and lane in it of the stretches that hold logits, and whether the end is in the stretch.
    starts = [start for start in range(0, num, width)]
    stretches = [(*divmod(start, LANES), start + width > num) for start in starts]
    size = _sums_chunk(num, width)
    per_chunk = size // LANES

    def chunk(index, carries):
        pieces, rolled_last = [], []
        for (base, lane, ends), carry in zip(stretches, carries, strict=True):
            if lane == 0:
                pieces.append(weights(base + index * per_chunk, size, ends))
                rolled_last.append(carry)
                continue
            values = weights(base + index * per_chunk + 1, size, ends)
            rolled = [carry, *(_rolled(values[:, i * LANES : (i + 1) * LANES], lane) for i in range(per_chunk))]
            pieces.append(
                jnp.concatenate([_joined(*pair, lane) for pair in zip(rolled, rolled[1:], strict=False)], axis=1)
            )
            rolled_last.append(rolled[-1])
        total = _tree_sum(_filled(pieces))
        start = pl.multiple_of(index * size, size)
        first[:, pl.ds(start, size)] = jnp.where(_lanes(total) + start < width, total, 0.0)
        return tuple(rolled_last)

    nothing = jnp.zeros((_ROWS, LANES))
    carries = tuple(_rolled(weights(base, LANES, ends), lane) if lane else nothing for base, lane, ends in stretches)
    jax.lax.fori_loop(0, pl.cdiv(width, size), chunk, carries)


def _stretches(tiles: list[Array], size: int, width: int) -> list[list[Array | None]]:
    """For each stretch of `width` of the `size` entries in `tiles` its tiles, with anything behind it; None: zeros.
    `_FAN` stretches."""
    found: list[list[Array | None]] = []
    for start in (stretch * width for stretch in range(_FAN)):
        pieces: list[Array | None] = []
        for place in range(start, start + width, LANES):
            tile, lane = divmod(place, LANES)
            if place >= size:
                pieces.append(None)
            elif lane == 0:
                pieces.append(tiles[tile])
            else:
                following = tiles[tile + 1] if tile + 1 < len(tiles) else jnp.zeros_like(tiles[tile])
                pieces.append(_joined(_rolled(tiles[tile], lane), _rolled(following, lane), lane))
        found.append(pieces)
    return found


def _rolled(tile: Array, lane: int) -> Array:
    """The tile with its `lane` first."""
    return pltpu.roll(tile, LANES - lane, 1)


def _joined(low: Array, high: Array, lane: int) -> Array:
    """The entries from `lane` on of a tile and the one behind it, both `_rolled`."""
    return jnp.where(_lanes(low) < LANES - lane, low, high)


def _filled(values: Sequence[Array]) -> list[Array | None]:
    """With None for zeros up to a power of two."""
    count = 1 << (len(values) - 1).bit_length()
    return [*values, *[None] * (count - len(values))]


def _tree_sum(values: Sequence[Array | None]) -> Array:
    """Sum of a power of two of values by adding halves; None is zero."""
    while len(values) > 1:
        half = len(values) // 2
        pairs = zip(values[:half], values[half:], strict=True)
        values = [low if high is None else high if low is None else low + high for low, high in pairs]
    assert values[0] is not None
    return values[0]


def _descend(upper, lower, clocks, node_out, masses_out, *, widths: tuple[int, ...]):
    counts = [pl.cdiv(width, LANES) for width in widths[1:]]
    firsts = [sum(counts[:level]) for level in range(len(counts))]
    rows = upper.shape[0]
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    node = jnp.zeros((rows, 1), jnp.int32)
    steps = [*widths[2:], 1]

    def tile_of(ref, number: int) -> Array:
        return ref[:, number * LANES : (number + 1) * LANES]

    def entries(tiles: Sequence[Array], index: Array) -> Array:
        """The entry of each lane's number `index` i32[row, LANES]; 0 where there is none."""
        found = jnp.zeros((rows, LANES))
        for part, tile in enumerate(tiles):
            found = jnp.where(index // LANES == part, _at_lanes(tile, index % LANES), found)
        return found

    for depth, level in enumerate(reversed(range(len(counts)))):
        tiles = [tile_of(upper, firsts[level] + part) for part in range(counts[level])]
        masses = entries(tiles, node + steps[level] * lane)
        clock = tile_of(clocks, depth * _FAN // LANES)
        if shift := depth * _FAN % LANES:
            clock = _rolled(clock, shift)
        arrival = jnp.where((masses > 0) & (lane < _FAN), clock / masses, jnp.inf)
        first = jnp.min(arrival, axis=1, keepdims=True)
        node = node + steps[level] * jnp.min(jnp.where(arrival == first, lane, LANES), axis=1, keepdims=True)
    per, part_of, lane_of = counts[0], node // LANES, jnp.broadcast_to(node % LANES, lane.shape)
    masses = jnp.zeros((rows, LANES))
    for child in range(_FAN):
        tile = tile_of(lower, child * per)
        for part in range(1, per):
            tile = jnp.where(part_of == part, tile_of(lower, child * per + part), tile)
        masses = jnp.where(lane == child, _at_lanes(tile, lane_of), masses)
    node_out[...] = node
    masses_out[...] = masses[:, :_FAN]


def _at_lanes(tile: Array, lane: Array) -> Array:
    """For each lane of f32[row, LANES] the entry at `lane` i32[row, LANES] of its row."""
    return jnp.take_along_axis(tile, lane, axis=1, mode="promise_in_bounds")
