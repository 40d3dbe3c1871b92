"""Sums in a fixed order, and one draw per row from unnormalised weights."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.axes import VOCAB_GROUPS
from levanter_infer.kernels.backend import DrawKey, DrawRules, RowKernels, SamplingKernels
from levanter_infer.layers.shard_axis import Vocabulary

FAN = VOCAB_GROUPS
"""Children of a node of the sampling tree; a power of two."""
LANES = 128
"""Columns that kernels fill a level of sums up to."""


def group_sums(values: Array) -> Array:
    """f32[row, n] -> f32[row, ceil(n / FAN)]: entry i is the sum of the entries i, i + width, i + 2 * width, ...

    Only elementwise additions, in an order that the code fixes: a reduction may associate differently for another
    number of rows, and the bits of a row would depend on the batch composition.
    """
    return _stretch_sums(values, group_width(values.shape[1]))


def _stretch_sums(values: Array, width: int) -> Array:
    """f32[row, n] -> f32[row, width]: the sum of a row's stretches of `width` entries, of which FAN, or a smaller power
    of two, hold n."""
    rows, size = values.shape
    count = 1
    while count * width < size:
        count *= 2
    return _fold(jnp.pad(values, ((0, 0), (0, count * width - size))).reshape(rows, count, width))


def _fold(values: Array) -> Array:
    """Sum over axis 1, whose size is a power of two, by adding halves."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values[:, 0]


def group_width(size: int) -> int:
    return -(-size // FAN)


def row_sums(values: Array) -> Array:
    """f32[row, n] -> f32[row], in a fixed order."""
    while values.shape[1] > 1:
        values = group_sums(values)
    return values[:, 0]


def random_words(seed: Array, sample_index: Array, position: Array, count: int) -> Array:
    """u32[row, count], a function of (seed, sample index, position) alone.

    Args:
        seed: u32[row, 2], high word first.
        sample_index: i32[row]
        position: i32[row], the position that the sampled token takes in its sequence.

    Each pair of words is one threefry2x32 block at its own counter, through `fold_in`: unlike `jax.random.bits` that
    does not depend on JAX's settings.
    """

    def words(seed, sample_index, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        blocks = jax.vmap(lambda block: jax.random.fold_in(key, block))(jnp.arange(-(-count // 2), dtype=jnp.int32))
        return jax.random.key_data(blocks).reshape(-1)[:count]

    return jax.vmap(words)(seed, sample_index, position)


def num_words(size: int) -> int:
    """Random words that `draw` needs per row for `size` weights."""
    return FAN * len(_level_sizes(size))


def _level_sizes(size: int) -> list[int]:
    """Sizes of the levels of the tree below its root, the leaves first."""
    sizes = [size]
    while sizes[-1] > FAN:
        sizes.append(group_width(sizes[-1]))
    return sizes


def level_widths(size: int) -> list[int]:
    """Sizes of the sums above the weights of `size` tokens, in the tree and up to the sum of all."""
    widths = _level_sizes(size)[1:]
    while not widths or widths[-1] > 1:
        widths.append(group_width(widths[-1] if widths else size))
    return widths


def draw(
    weights: Array, leaf_weights: Callable[[Array], Array], words: Array, vocab: Vocabulary | None = None
) -> tuple[Array, Array]:
    """Choose one index per row with probability proportional to its weight.

    Descends a tree of sums from the root, with one choice among FAN children per level. Each choice is made with
    fresh random words and relative to the masses of these children only, so that f32 rounding is relative too: about
    2^-22 of a token's probability, however small. A cumulative sum over the vocabulary would be off by 2^-24 of the
    total mass at every token, which is more than a token of the tail has.

    Args:
        weights: f32[row, n], at least 0. Consumed by one sum only, so that it need not be stored.
        leaf_weights: the weights of the tokens i32[row, k] as f32[row, k], 0 for indices from n up.
        words: u32[row, num_words(n)].
        vocab: of the weights, where a device has a part of n = `vocab.size`. Every part then holds its share of
            each sum, and only the FAN masses of a choice are added up over the parts.
    Returns:
        The index i32[row] (arbitrary where all weights are 0, else one with a weight above 0) and the row's sum of
        weights f32[row].
    """
    vocab = vocab or Vocabulary(weights.shape[1])
    sizes = _level_sizes(vocab.size)
    levels = [weights]
    for width in sizes[1:]:
        levels.append(_stretch_sums(levels[-1], width))
    total = vocab.shard_axis.sum(row_sums(levels[-1]))
    clocks = _clocks(words)
    node = jnp.zeros(weights.shape[0], jnp.int32)
    for depth, (level, size) in enumerate(zip(reversed(levels), reversed(sizes), strict=True)):
        width = group_width(size)
        children = _children(node, width)
        if depth == len(levels) - 1:
            masses = leaf_weights(children)
        else:
            masses = vocab.shard_axis.sum(jnp.take_along_axis(level, children, axis=1, mode="fill", fill_value=0.0))
        node = node + width * _first_child(masses, clocks[:, depth * FAN : (depth + 1) * FAN])
    return node, total


def draw_by_kernels(
    kernels: SamplingKernels,
    logits: Array,
    terms: Array,
    leaves: Callable[[Array, int], tuple[Array, Array]],
    words: Array,
    vocab: Vocabulary,
    num_rows: Array,
) -> tuple[Array, Array, Array]:
    """`draw`, with the same sums in the same order, of the weights that `kernels.weight_sums` gives logits.

    Of what a choice needs of other devices all levels but the last two are sent at once.

    Args: leaves: the weights of the tokens i32[row, k], which are a stride apart, and something else of them, f32[row,
        k] each.
    Returns: also what `leaves` says of the token, f32[row].
    """
    widths = level_widths(vocab.size)
    upper, lower = kernels.weight_sums(logits, terms, widths, num_rows)
    upper = vocab.shard_axis.sum(upper)
    clocks = _clocks(words)
    sizes = _level_sizes(vocab.size)
    node, masses = kernels.descend(upper, lower, clocks, sizes[1:], num_rows)
    masses = vocab.shard_axis.sum(masses)
    node = node + sizes[2] * _first_child(masses, clocks[:, -2 * FAN : -FAN])
    masses, values = leaves(_children(node, sizes[1]), sizes[1])
    child = _first_child(masses, clocks[:, -FAN:])
    chosen = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) == child[:, None]
    return node + sizes[1] * child, upper[:, -LANES], jnp.sum(jnp.where(chosen, values, 0), axis=1)


def draw_rows(
    kernels: RowKernels, logits: Array, rules: DrawRules, threshold: Array, key: DrawKey
) -> tuple[Array, Array]:
    """`draw` of the weights of rows of the whole vocabulary, with the same sums in the same order and the words that
    `random_words` gives for the key.

    Returns: the token i32[row] and its log probability, f32[row].
    """
    return kernels.draw(logits, rules, threshold, key, _level_sizes(logits.shape[1]))


def _children(node: Array, width: int) -> Array:
    return node[:, None] + width * jax.lax.broadcasted_iota(jnp.int32, (1, FAN), 1)


def _clocks(words: Array) -> Array:
    """Exponential times of rate 1, f32, from words u32. They have their resolution, 2^-32, at 0, where light children
    win: a child's probability is that close to its share."""
    uniform = words.astype(jnp.float32) * jnp.float32(2.0**-32) + jnp.float32(2.0**-33)
    return -jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2.0**-24)))


def _first_child(masses: Array, clocks: Array) -> Array:
    """Index i32[row] of one of the FAN masses f32[row, FAN], in proportion to them.

    A race: child i arrives after its time in `clocks` f32[row, FAN] at the rate `masses[i]`, and the first one wins.
    Without mass it never arrives.
    """
    arrival = jnp.where(masses > 0, clocks / masses, jnp.inf)
    # Two plain reductions: that of an argmin, of values and indices together, takes a TPU several times as long.
    is_first = arrival == jnp.min(arrival, axis=1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, arrival.shape, 1)
    return jnp.min(jnp.where(is_first, index, arrival.shape[1]), axis=1)
