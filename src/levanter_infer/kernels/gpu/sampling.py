"""Temperature, filters and the draw of the `gpu` backend: Pallas on Triton.

Two launches draw a token of each row, two more find the thresholds of top_k and top_p. The first of each reads the
logits once, with many programs for a row; the second has one program for a row. Rows that want none of it are skipped
within a launch, so that no condition stands around it. What a row gets depends on that row alone.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from levanter_infer.kernels import MIN_EXPONENT
from levanter_infer.kernels.backend import DrawKey, DrawRules
from levanter_infer.kernels.gpu import plt

_FAN = 16
"""Children of a node of the tree of sums."""
_TILE = 32
"""Entries of the second level of sums that a program computes: of `_FAN`² logits each."""
_PARTS, _LANES, _DEPTH = 4, 128, 8
"""Programs of a row that look for candidates, lanes of each, and the largest logits that a lane keeps."""
_UNROLL = 4
"""Logits of a lane that are read at once."""
_SEARCH_CHUNK = 4096
"""Logits that a search over the vocabulary reads at once."""
_PASS_BITS, _KEY_BITS, _SIGN = 2, 32, -(2**31)
_INFINITY = float("inf")
_THREEFRY_TURNS, _THREEFRY_PARITY = ((13, 15, 26, 6), (17, 29, 16, 24)), 0x1BD11BDA


@dataclass(frozen=True)
class GpuSampling:
    """`RowKernels` for a GPU."""

    interpret: bool = False

    def as_read(self, logits: Array) -> Array:
        return logits

    def thresholds(self, logits: Array, rules: DrawRules) -> Array:
        return thresholds(logits, rules, interpret=self.interpret)

    def draw(
        self, logits: Array, rules: DrawRules, threshold: Array, key: DrawKey, sizes: Sequence[int]
    ) -> tuple[Array, Array]:
        return draw(logits, rules, threshold, key, sizes, interpret=self.interpret)


def supports(logits: Array) -> bool:
    """Whether the kernels take these logits [row, vocab]: the tree of sums has two levels that are stored."""
    return logits.dtype == jnp.float32 and logits.shape[1] > _FAN**2


def thresholds(logits: Array, rules: DrawRules, *, interpret: bool = False) -> Array:
    """`RowKernels.thresholds`: bisection among the largest logits of each lane; where these do not show the threshold,
    the program of the row searches the row, two bits of the threshold at each pass."""
    rows = logits.shape[0]
    count = _DEPTH * _LANES
    of_parts = jax.ShapeDtypeStruct((rows, _PARTS), jnp.float32)
    outs = (jax.ShapeDtypeStruct((rows, _PARTS * count), jnp.float32), of_parts, of_parts)
    found = _call(_candidates, "candidates", (rows, _PARTS), outs, 4, interpret)(logits, rules)
    outs = (jax.ShapeDtypeStruct((rows,), jnp.float32),)
    return _call(_thresholds, "thresholds", (rows,), outs, 16, interpret)(logits, rules, _Candidates(*found))[0]


def draw(
    logits: Array, rules: DrawRules, threshold: Array, key: DrawKey, sizes: Sequence[int], *, interpret: bool = False
) -> tuple[Array, Array]:
    """`RowKernels.draw`: the first two levels of sums, and all else of a row in one program."""
    rows, levels = logits.shape[0], sums(logits, rules, threshold, sizes, interpret=interpret)
    outs = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)
    descend = functools.partial(_descend, sizes=tuple(sizes))
    token, logprob = _call(descend, "descend", (rows,), outs, 4, interpret)(logits, rules, threshold, key, levels)
    return token, logprob


def sums(
    logits: Array, rules: DrawRules, threshold: Array, sizes: Sequence[int], *, interpret: bool = False
) -> tuple[Array, Array]:
    """The first two levels of sums of the weights of each row, f32[row, sizes[1]] and f32[row, sizes[2]]; anything for
    rows that are not drawn. Args: as in `draw`."""
    rows, widths = logits.shape[0], (sizes[1], sizes[2])
    outs = tuple(jax.ShapeDtypeStruct((rows, width), jnp.float32) for width in widths)
    grid = (rows, pl.cdiv(widths[1], _TILE))
    kernel = functools.partial(_sums, widths=widths)
    first, second = _call(kernel, "weight_sums", grid, outs, 4, interpret)(logits, rules, threshold)
    return first, second


def _call(kernel, name: str, grid: tuple[int, ...], outs, warps: int, interpret: bool):
    params = plt.CompilerParams(num_warps=warps, num_stages=1)
    return pl.pallas_call(kernel, grid=grid, out_shape=outs, compiler_params=params, interpret=interpret, name=name)


class _Candidates(NamedTuple):
    """Candidates of the parts of each row."""

    values: Any
    """f32[row, part · depth · lane]"""
    bound: Any
    """f32[row, part], a bound of the logits that are none."""
    mass: Any
    """f32[row, part], the weight of all logits."""


def _load(ref, index, mask, other: float) -> Array:
    return plt.load(ref.at[*index], mask=mask, other=jnp.asarray(other, ref.dtype))


def _weights(z: Array, peak: Array, inverse: Array, threshold: Array | float, floor: Array | float) -> Array:
    exponent = (z - peak) * inverse
    return jnp.where((z >= threshold) & (exponent >= floor), jnp.exp(exponent), jnp.float32(0))


def _candidates(logits, rules: DrawRules, values_out, bound_out, mass_out) -> None:
    """The largest logits of the lanes of one part of a row. Its lane i has the logits that are `part · _LANES + i` more
    than a multiple of `_PARTS · _LANES`, so that every lane has some of the frequent tokens, which are neighbours."""
    row, part = pl.program_id(0), pl.program_id(1)
    num, f32 = logits.shape[1], jnp.float32
    peak, inverse = rules.peak[row], rules.inverse[row]
    lane = jnp.arange(_LANES, dtype=jnp.int32)
    trips = jnp.where(_is_filtered(rules, row), jnp.int32(pl.cdiv(num, _PARTS * _LANES * _UNROLL)), 0)

    def trip(index: Array, carry):
        bests, total = carry
        place = [((index * _UNROLL + i) * _PARTS + part) * _LANES + lane for i in range(_UNROLL)]
        for value in [_load(logits, (row, each), each < num, -_INFINITY) for each in place]:
            total = total + _weights(value, peak, inverse, -_INFINITY, MIN_EXPONENT)
            sorted_bests = []
            for best in bests:
                sorted_bests.append(jnp.maximum(best, value))
                value = jnp.minimum(best, value)
            bests = tuple(sorted_bests)
        return bests, total

    nothing = jnp.full(_LANES, -_INFINITY, f32)
    bests, total = jax.lax.fori_loop(0, trips, trip, ((nothing,) * _DEPTH, jnp.zeros(_LANES, f32)))
    for depth, best in enumerate(bests):
        plt.store(values_out.at[row, (part * _DEPTH + depth) * _LANES + lane], best)
    bound_out[row, part] = jnp.max(bests[-1])
    mass_out[row, part] = jnp.sum(total)


def _is_filtered(rules: DrawRules, row: Array) -> Array:
    return (rules.top_k[row] > 0) | (rules.top_p[row] < 1)


def _thresholds(logits, rules: DrawRules, candidates: _Candidates, out) -> None:
    """The threshold of one row."""
    row, f32 = pl.program_id(0), jnp.float32
    num = logits.shape[1]
    peak, inverse = rules.peak[row], rules.inverse[row]
    most, share, is_filtered = rules.top_k[row].astype(f32), rules.top_p[row], _is_filtered(rules, row)
    wants_k, wants_p = is_filtered & (most > 0), is_filtered & (share < 1)
    part = jnp.arange(_PARTS, dtype=jnp.int32)
    bound, total = jnp.max(plt.load(candidates.bound.at[row, part])), jnp.sum(plt.load(candidates.mass.at[row, part]))
    place = jnp.arange(candidates.values.shape[1], dtype=jnp.int32)
    values = plt.load(candidates.values.at[row, place])
    keys = _to_key(values)

    def largest(is_wanted: Array, weights: Array, target: Array) -> Array:
        """The largest logit such that the candidates from it up weigh `target`; NaN where all of them do not."""

        def decide(bit, key):
            tried = key | jax.lax.shift_right_logical(jnp.int32(_SIGN), bit)
            weight = jnp.sum(jnp.where(keys >= (tried ^ jnp.int32(_SIGN)), weights, f32(0)))
            return jnp.where(weight >= target, tried, key)

        bits = jnp.where(is_wanted, jnp.int32(_KEY_BITS), 0)
        return _from_key(jax.lax.fori_loop(0, bits, decide, jnp.int32(0)) ^ jnp.int32(_SIGN))

    kth = jnp.where(wants_k, largest(wants_k, jnp.ones_like(values), most), f32(-_INFINITY))
    weights = _weights(values, peak, inverse, kth, MIN_EXPONENT)
    pth = largest(wants_p, weights, share * jnp.where(wants_k, jnp.sum(weights), total))
    # What is not among the values is at most the bound. It may be one of those that tie with the k-th largest, which
    # counts where their mass does.
    tie_counts = wants_p & (bound > -_INFINITY)
    found_k = ~wants_k | (kth > bound) | ((kth == bound) & ~tie_counts)
    found = found_k & (~wants_p | (pth >= bound))
    threshold = jnp.maximum(kth, jnp.where(wants_p, pth, f32(-_INFINITY)))

    def read(start: Array) -> Array:
        place = start + jnp.arange(_SEARCH_CHUNK, dtype=jnp.int32)
        return _load(logits, (row, place), place < num, -_INFINITY)

    def weigh_k(z: Array) -> Array:
        return jnp.where(z > -_INFINITY, f32(1), f32(0))

    searched_k = _searched(read, num, ~found & wants_k, weigh_k, most)
    searched_k = jnp.where(wants_k, searched_k, f32(-_INFINITY))

    def weigh_p(z: Array) -> Array:
        return _weights(z, peak, inverse, searched_k, MIN_EXPONENT)

    both = ~found & wants_k & wants_p
    kept = jnp.where(wants_k, _passes(read, num, both, weigh_p, (jnp.int32(_SIGN),))[0], total)
    searched_p = _searched(read, num, ~found & wants_p, weigh_p, share * kept)
    searched = jnp.where(wants_p, jnp.maximum(searched_k, searched_p), searched_k)
    out[row] = jnp.where(is_filtered, jnp.where(found, threshold, searched), f32(-_INFINITY))


def _searched(
    read: Callable[[Array], Array], num: int, is_wanted: Array, weigh: Callable[[Array], Array], target: Array
) -> Array:
    """The largest logit such that those of the row from it up weigh `target`; -inf where all do not."""
    digits = range(1, 2**_PASS_BITS)

    def decide(step, key):
        shift = jnp.int32(_KEY_BITS) - jnp.int32(_PASS_BITS) * (step + 1)
        pivots = tuple((key | jax.lax.shift_left(jnp.int32(digit), shift)) ^ jnp.int32(_SIGN) for digit in digits)
        sums = _passes(read, num, is_wanted, weigh, pivots)
        digit = functools.reduce(jnp.add, [jnp.where(each >= target, jnp.int32(1), 0) for each in sums])
        return key | jax.lax.shift_left(digit, shift)

    steps = jnp.where(is_wanted, jnp.int32(_KEY_BITS // _PASS_BITS), 0)
    key = jax.lax.fori_loop(0, steps, decide, jnp.int32(0))
    return jnp.where(key == 0, jnp.float32(-_INFINITY), _from_key(key ^ jnp.int32(_SIGN)))


def _passes(read, num: int, is_wanted: Array, weigh: Callable[[Array], Array], pivots: Sequence[Array]) -> list[Array]:
    """The weight of the logits of the row from each pivot up, in one pass."""
    trips = jnp.where(is_wanted, jnp.int32(pl.cdiv(num, _SEARCH_CHUNK)), 0)

    def trip(index, sums):
        z = read(index * _SEARCH_CHUNK)
        weights, keys = weigh(z), _to_key(z)
        return tuple(
            total + jnp.where(keys >= pivot, weights, jnp.float32(0)) for total, pivot in zip(sums, pivots, strict=True)
        )

    zeros = jnp.zeros(_SEARCH_CHUNK, jnp.float32)
    return [jnp.sum(each) for each in jax.lax.fori_loop(0, trips, trip, (zeros,) * len(pivots))]


def _to_key(values: Array) -> Array:
    """i32 in the order of f32."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _from_key(keys: Array) -> Array:
    bits = jnp.where(keys < 0, keys ^ jnp.int32(2**31 - 1), keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _sums(logits, rules: DrawRules, threshold, *levels, widths: tuple[int, int]) -> None:
    """A tile of the second level of the sums of a row's weights, and the entries of the first that it is the sum of.

    Entry i of a level is the sum of the entries i, i + width, i + 2 · width, … of the level before, in the order of
    `sampling_draw._stretch_sums`.
    """
    row, part = pl.program_id(0), pl.program_id(1)
    num, (width, upper_width) = logits.shape[1], widths
    entry = part * _TILE + jnp.arange(_TILE, dtype=jnp.int32)
    child = jnp.arange(_FAN, dtype=jnp.int32)
    place = entry[None, :] + upper_width * child[:, None]
    exists = (entry < upper_width)[None, :] & (place < width)

    @pl.when(rules.draws[row] > 0)
    def _():
        terms = rules.peak[row], rules.inverse[row], threshold[row], rules.floor[row]

        def weights(stretch: int) -> Array:
            token = place + width * stretch
            return _weights(_load(logits, (row, token), exists & (token < num), -_INFINITY), *terms)

        lower = _tree_sum(weights, 0, 1)
        plt.store(levels[0].at[row, place], lower, mask=exists)
        plt.store(levels[1].at[row, entry], _fold(lower), mask=entry < upper_width)


def _tree_sum(values: Callable[[int], Array], first: int, step: int) -> Array:
    """Sum of the `values` of `first`, `first + step`, … up to `_FAN`, by adding halves."""
    if step == _FAN:
        return values(first)
    return _tree_sum(values, first, 2 * step) + _tree_sum(values, first + step, 2 * step)


def _fold(values: Array) -> Array:
    """Sum over axis 0, of `_FAN` entries, by adding halves: each reduction is of two numbers, whose order does not
    matter."""
    while values.shape[0] > 1:
        values = jnp.sum(values.reshape(2, values.shape[0] // 2, *values.shape[1:]), axis=0)
    return values.reshape(values.shape[1:])


def _threefry(key: tuple[Array, Array], data: Array) -> tuple[Array, Array]:
    """The two words of the block `(0, data)` of threefry2x32, which are also the key of `jax.random.fold_in`. Source:
    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_THREEFRY_PARITY))
    first, second = jnp.broadcast_to(keys[0], data.shape), data + keys[1]
    for group in range(5):
        for turn in _THREEFRY_TURNS[group % 2]:
            first = first + second
            turned = jax.lax.shift_left(second, jnp.uint32(turn)) | jax.lax.shift_right_logical(
                second, jnp.uint32(32 - turn)
            )
            second = first ^ turned
        first = first + keys[(group + 1) % 3]
        second = second + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return first, second


def _descend(
    logits, rules: DrawRules, threshold, key: DrawKey, levels, token_out, logprob_out, *, sizes: tuple[int, ...]
) -> None:
    """The choices of one row: a child at every level, from the last."""
    row, f32 = pl.program_id(0), jnp.float32
    peak, inverse, floor = rules.peak[row], rules.inverse[row], rules.floor[row]
    child = jnp.arange(_FAN, dtype=jnp.int32)
    is_drawn = rules.draws[row] > 0
    seed = key.seed[row, 0], key.seed[row, 1]
    for data in (key.sample_index[row], key.position[row]):
        seed = _threefry(seed, data.astype(jnp.uint32))

    def clocks(depth: int) -> Array:
        """`sampling_draw._clocks` of the words of a choice, two words of each block."""
        block = jnp.int32(depth * (_FAN // 2)) + child // 2
        words = jnp.where(child % 2 == 0, *_threefry(seed, block.astype(jnp.uint32)))
        uniform = words.astype(f32) * f32(2.0**-32) + f32(2.0**-33)
        return -jnp.log1p(-jnp.minimum(uniform, f32(1 - 2.0**-24)))

    def entries(level: int, index: Array, exists: Array) -> Array:
        """Those entries of a level; 0 where there is none."""
        if level <= 2:
            return _load(levels[level - 1], (row, index), exists & (index < sizes[level]), 0)
        place = index[None] + sizes[level] * child.reshape(_FAN, *(1 for _ in index.shape))
        return _fold(entries(level - 1, place, (exists & (index < sizes[level]))[None]))

    def first_child(masses: Array, depth: int) -> Array:
        arrival = jnp.where(masses > 0, clocks(depth) / masses, f32(_INFINITY))
        first = jnp.min(arrival)
        return jnp.minimum(jnp.min(jnp.where(arrival == first, child, jnp.int32(_FAN))), _FAN - 1)

    node, width, total = jnp.int32(0), 1, None
    for depth, level in enumerate(range(len(sizes) - 1, 0, -1)):
        masses = entries(level, node + width * child, is_drawn)
        total = jnp.sum(_fold(masses[:, None])) if total is None else total
        node = node + width * first_child(masses, depth)
        width = sizes[level]
    assert total is not None
    token = node + width * child
    z = _load(logits, (row, token), is_drawn & (token < sizes[0]), -_INFINITY)
    chosen = first_child(_weights(z, peak, inverse, threshold[row], floor), len(sizes) - 1)
    exponent = jnp.sum(jnp.where(child == chosen, (z - peak) * inverse, f32(0)))
    token_out[row] = jnp.where(is_drawn, node + width * chosen, 0)
    logprob_out[row] = jnp.where(is_drawn, exponent - jnp.log(total), f32(0))
