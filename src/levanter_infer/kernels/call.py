"""The arguments of the kernels, one object for each kind of call, and their checks. All arrays are plain arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from levanter_infer.kernels.rules import NOTHING_SEEN, ScoreRules


@dataclass(frozen=True)
class AttentionCall:
    """Attention from the packed tokens of many sequences to the pages that hold their keys and values.

    Row `s` is one sequence. It owns the tokens `cu_q_lens[s] … cu_q_lens[s + 1] - 1`, which are the last `q_len`
    positions of its `seq_lens[s]` stored tokens: query `i` stands at position `seq_lens[s] - q_len + i` and sees the
    keys of its own sequence from 0 to there, itself included. So a decode token, a full prompt and a prompt chunk
    with history are one case. Position `p` is stored in page `page_indices[s, p // page_size]` at offset
    `p % page_size`. Query head `h` reads kv head `h // (Hq // Hkv)`. Attention reads the pool only; keys must be
    written (and rotated) before.

    The result of a row depends on its own queries, keys and values alone. NaN in other sequences' pages, beyond the
    end of a sequence, in padding tokens or on keys outside all windows and chunks does not reach it. Where a query
    sees no key it gives zeros.

    Source: PagedAttention, arXiv:2309.06180, section 4.1; the online softmax of FlashAttention, arXiv:2205.14135,
        section 3.1; the ragged batch of one call follows jax's TPU ragged paged attention.
    """

    q: Array
    """[T, Hq, D], already rotated; a floating dtype. Tokens from `cu_q_lens[num_seqs]` on are padding."""
    kv_pages: Array
    """The pool of all layers, as `Backend.init_pool` makes it; a layer is never sliced out of it."""
    layer: Array
    """i32[], which layer of the pool; may be traced."""
    page_indices: Array
    """i32[R, max_pages]; an absent page is P, and its keys are not seen."""
    seq_lens: Array
    """i32[R], stored tokens including this step's."""
    cu_q_lens: Array
    """i32[R + 1], first entry 0, ascending; padding repeats the last bound."""
    num_seqs: Array
    """i32[], rows in use."""
    rules: ScoreRules
    """Scale, window, chunk, soft cap and the other rules of a score."""
    kv_dtype: jnp.dtype
    """Dtype of the stored numbers: that of `kv_pages`, or of the bits that its unsigned integers hold."""
    kv_heads: int
    """Hkv."""
    page_size: int
    """Tokens per page."""
    sinks: Array | None = None
    """f32[Hq], attention sinks (gpt-oss): a logit of each query head that takes part in the maximum and the sum of the
    softmax and has no value; -inf for none. Under a mesh, those of the device's heads."""
    is_q_ordered: bool = False
    """Whether a kernel has written `q` as it is read, token by token (`Backend.rotates`)."""
    value_dim: int | None = None
    """The pool is one of latents (`PoolShape.is_latent`), and values are the first `value_dim` numbers of their keys;
    results are [T, Hq, value_dim]. None: values are stored beside keys."""
    index_dim: int = 0
    """Numbers of the index key that a token stores behind its latent (`IndexQueries`), which are not among D; 0: it
    stores none."""
    chosen: Array | None = None
    """The keys that each query sees, as `choose_keys` of the same backend gives them; of a pool of latents. As a rule
    i32[T, n], ascending positions, and `NO_KEY` behind them. None: a query sees all keys from 0 to its own."""

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """[T, Hq, size of values] of the result."""
        num_tokens, heads, size = self.q.shape
        return num_tokens, heads, size if self.value_dim is None else self.value_dim

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.q.shape[0]

    @property
    def num_rows(self) -> int:
        """R, rows that are not in use included."""
        return self.page_indices.shape[0]

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that read the same keys."""
        return self.q.shape[1] // self.kv_heads

    @property
    def q_lens(self) -> Array:
        """i32[R], tokens of each row; 0 for rows that are not in use."""
        used = jnp.arange(self.num_rows, dtype=jnp.int32) < self.num_seqs
        return jnp.where(used, self.cu_q_lens[1:] - self.cu_q_lens[:-1], 0)


NO_KEY = 2**31 - 1
"""Position of a key that is none, in `AttentionCall.chosen`."""


@dataclass(frozen=True)
class IndexQueries:
    """The queries by which an indexer chooses the keys of an `AttentionCall`.

    The score of the key at position s for token t is `Σ_h weights[t, h] · max(q[t, h] · k[s], 0)`, where k[s] is the
    index key that is stored with it. A token chooses, of the keys from 0 to its own position, the `num_chosen` with the
    largest scores, and of equal scores the earlier ones.

    Source: DeepSeek sparse attention, report of DeepSeek-V3.2-Exp, section 2.1, equations 1 and 2.
    """

    q: Array
    """[T, Hi, index_dim], already rotated; a floating dtype."""
    weights: Array
    """[T, Hi]; a floating dtype."""
    num_chosen: int
    """Keys of a token, at most."""
    share: "Share | None" = None
    """The share of the tokens that this device computes; None: all."""


@dataclass(frozen=True)
class Share:
    """Work that several devices share, each of which has all that it needs."""

    index: Array
    """i32[], of this device."""
    count: int
    """Devices."""
    sum: Callable[[Array], Array]
    """The sum of an array over them; all call it."""


@dataclass(frozen=True)
class PoolShape:
    """Sizes of a pool of keys and values."""

    num_layers: int
    num_pages: int
    page_size: int
    """Tokens per page."""
    kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    """Dtype of the stored numbers. Pages of int8 also hold the code of each head's scale (`kernels.int8`)."""
    is_latent: bool = False
    """Whether a head stores keys alone, the first numbers of which are values too (latent attention)."""
    index_dim: int = 0
    """The last of its `head_dim` numbers, which are an index key (`IndexQueries`); 0: there is none."""

    @property
    def heads_per_token(self) -> int:
        """Heads that are stored of a token: keys and values of each, or keys alone."""
        return self.kv_heads if self.is_latent else 2 * self.kv_heads


@dataclass(frozen=True)
class Rotation:
    """The rotation of queries and keys, and the norms before it."""

    cos: Array
    """f32[T, D / 2]"""
    sin: Array
    """f32[T, D / 2]"""
    norms: tuple[tuple[Array, float], tuple[Array, float]] | None = None
    """Weight [layers, D] and eps of the norm of queries and of the norm of keys; None: no norms."""
    norm_layer: Array | None = None
    """i32[], layer of these weights, which may be another one than that of the pool; needed with norms."""
    query_factor: float = 1.0
    """Factor of the rotated queries, before they are rounded; other than 1 only where `Backend.scale_in_queries` gives
    it."""


@dataclass(frozen=True)
class KvWrite:
    """New keys and values of one layer, one token per row of `k` and `v`, and where they go."""

    k: Array
    """[T, Hkv, D]"""
    v: Array | None
    """[T, Hkv, D]; None for a pool of latents."""
    layer: Array
    """i32[], may be traced."""
    dests: Array
    """i32[T], `page * page_size + page offset`; P * page_size or more for tokens that are not stored."""
    page: Array
    """i32[T], page of each token; P or more for tokens that are not stored."""
    offset: Array
    """i32[T], position of each token in its page."""
    kv_dtype: jnp.dtype
    """Dtype of the stored numbers."""
    q: Array | None = None
    """[T, Hq, D], queries that are yet to be rotated; None where queries and keys are rotated already."""
    rotation: Rotation | None = None
    """Rotation of `q` and `k`; only for backends that fuse it (`Backend.fuses`)."""
    plan: Any = None
    """`Backend.write_plan` of the pool and `dests`; None: it is computed where it is needed."""
    index_dim: int = 0
    """As in `PoolShape`."""


@dataclass(frozen=True)
class LinearCall:
    """`x · weight[layer]ᵀ` for each of several weights, with all sums in float32."""

    x: Array
    """[rows, in]"""
    weights: Sequence[Array]
    """Weights from `Backend.store`, each with a leading axis of layers if `layer` is given."""
    num_outs: Sequence[int]
    """Outputs of each weight."""
    layer: Array | None = None
    """i32[], which entry of each stack of weights; None: the weights are no stacks."""
    num_rows: Array | None = None
    """i32[], how many rows count; the others may give anything and cost nothing where the kernel can skip them.
    None: all."""
    norm: tuple[Array, float] | None = None
    """Weight [layers, in] (or [in] without layers) and eps; `x / sqrt(mean(x²) + eps) · norm[layer]` replaces x. Only
    for backends that fuse it, as the next two."""
    gate: Array | None = None
    """[rows, in]; `silu(gate) · x` replaces x. Not together with `norm`."""
    residual: Array | None = None
    """[rows, out], added to the result; with one weight only, or with three of a gated pair."""
    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    """Dtype in which the results are wanted; a backend that cannot round them in its kernel returns float32."""
    is_gated_pair: bool = False
    """Whether the first two weights are a gate and its partner: the one result is `silu(first) · second`, of their
    results in `dtype`. A third weight is multiplied with that, and its result is the one result. Only for backends that
    fuse it."""
    scales: Sequence[Array] = ()
    """Factors of the sums of weights of int8: f32[out] each, with the leading axis of its weight. Empty: the weights
    are floats."""

    @property
    def result_outs(self) -> Sequence[int]:
        """Outputs of each result."""
        return self.num_outs[-1:] if self.is_gated_pair else self.num_outs


@dataclass(frozen=True)
class GroupedCall:
    """A grouped matmul: `x[rows[i]] · weight[layer, group of i]ᵀ` for each of several weights, with float32 sums.

    Results are stored group by group: the first `counts[0]` are of group 0. Those beyond `sum(counts)` are zeros.
    """

    x: Array
    """[n, in]"""
    counts: Array
    """i32[group], results of each group."""
    weights: Sequence[Array]
    """Weights from `Backend.store` with leading axes of layers, if `layer` is given, and groups."""
    num_outs: Sequence[int]
    """Outputs of each weight."""
    rows: Array | None = None
    """i32[result], the row of x of each result; anything beyond `sum(counts)`. None: result i is that of row i."""
    layer: Array | None = None
    """i32[], which entry of each stack of weights; None: the weights are no stacks."""
    norm: tuple[Array, float] | None = None
    """As in `LinearCall`. This and `gate` are for backends that fuse them."""
    gate: Array | None = None
    """[n, in]; `silu(gate) · x` replaces x. Not together with `norm`."""
    scales: Sequence[Array] = ()
    """As in `LinearCall`, with the leading axes of the weights."""

    @property
    def num_groups(self) -> int:
        return self.counts.shape[0]

    @property
    def num_results(self) -> int:
        return (self.x if self.rows is None else self.rows).shape[0]

    def groups_of_results(self) -> Array:
        """The group of each result, i32[result]; `num_groups` beyond `sum(counts)`."""
        ends = jnp.cumsum(self.counts, dtype=jnp.int32)
        return jnp.searchsorted(ends, jnp.arange(self.num_results, dtype=jnp.int32), side="right")


# Checks that all backends make before they compute an attention call


def checked(call: AttentionCall) -> AttentionCall:
    """The call with scalars as i32[] and parameters per head as float32.

    Raises: ValueError for shapes or dtypes that do not fit together; the pool is checked by `check_pool`, or by the
        backend that stores it in another way.
    """
    q, rules = call.q, call.rules
    if q.ndim != 3 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q: got {q.dtype}{list(q.shape)}, expected a float array [tokens, query heads, head_dim]")
    _check_batch(call)
    if call.value_dim is None and (call.index_dim or call.chosen is not None):
        raise ValueError("index_dim and chosen are for a pool of latents; give value_dim too")
    for name, per_head in (("alibi_slopes", rules.alibi_slopes), ("sinks", call.sinks)):
        if per_head is not None and per_head.shape != (q.shape[1],):
            raise ValueError(f"{name}: got shape {per_head.shape}, expected one entry per query head, ({q.shape[1]},)")
    if rules.soft_cap is not None and not rules.soft_cap > 0:
        raise ValueError(f"soft_cap: got {rules.soft_cap}, expected a positive number, or None for no cap")
    chunk = rules.attention_chunk
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"attention_chunk: got {chunk}, expected a positive int, or None for one chunk")
    window, slopes, sinks, f32 = rules.sliding_window, rules.alibi_slopes, call.sinks, jnp.float32
    rules = dataclasses.replace(
        rules,
        sliding_window=None if window is None else _scalar("sliding_window", window),
        alibi_slopes=None if slopes is None else slopes.astype(f32),
    )
    # A sink of -inf is none: clamped, it never makes -inf - -inf, and its weight is 0 as soon as a key is seen.
    layer = _scalar("layer", call.layer)
    sinks = None if sinks is None else jnp.maximum(sinks.astype(f32), f32(NOTHING_SEEN))
    return dataclasses.replace(call, layer=layer, rules=rules, sinks=sinks)


def check_pool(call: AttentionCall) -> None:
    """Raises: ValueError if the pool is not [layers, P, page_size, 2 * Hkv, D] of numbers or their bits; of latents,
    [layers, P, page_size, Hkv, D] with the numbers of an index key behind."""
    q, kv_pages, kv_dtype = call.q, call.kv_pages, call.kv_dtype
    if kv_pages.ndim != 5:
        raise ValueError(
            f"kv_pages: got shape {kv_pages.shape}, expected [layers, pages, page_size, 2 * kv_heads, head_dim]; "
            "give the whole pool and `layer`, not one layer of it"
        )
    pairs, head_dim = kv_pages.shape[3:]
    expected, of = q.shape[2] + call.index_dim, f" and index_dim={call.index_dim}" if call.index_dim else ""
    if kv_dtype == jnp.int8:
        expected, of = expected + 1, f"{of} and one for the scale"
    if head_dim != expected:
        raise ValueError(f"kv_pages: got head_dim {head_dim}, expected {expected} as in q{of}")
    if call.value_dim is not None:
        _check_latents(call)
    elif pairs == 0 or pairs % 2 != 0 or q.shape[1] % (pairs // 2) != 0:
        raise ValueError(
            f"kv_pages: got {pairs} interleaved heads for {q.shape[1]} query heads, expected 2 * kv_heads, where "
            "kv_heads divides the query heads"
        )
    elif pairs != 2 * call.kv_heads:
        raise ValueError(f"kv_heads: got {call.kv_heads}, expected {pairs // 2} as in kv_pages")
    if kv_pages.shape[2] != call.page_size:
        raise ValueError(f"page_size: got {call.page_size}, expected {kv_pages.shape[2]} as in kv_pages")
    if not jnp.issubdtype(kv_dtype, jnp.floating) and kv_dtype != jnp.int8:
        raise ValueError(f"kv_dtype: got {kv_dtype}, expected int8 or the floating dtype that the stored bits mean")
    stored = kv_pages.dtype
    is_bits = jnp.issubdtype(stored, jnp.unsignedinteger) and stored.itemsize == kv_dtype.itemsize
    if stored != kv_dtype and not is_bits:
        raise ValueError(
            f"kv_pages: got dtype {stored}, expected {kv_dtype} or an unsigned integer of {kv_dtype.itemsize} bytes"
        )


def _check_latents(call: AttentionCall) -> None:
    heads, size, value_dim = call.q.shape[1], call.q.shape[2], call.value_dim
    chosen = call.chosen
    if chosen is not None and (chosen.shape[:1], chosen.ndim, chosen.dtype) != ((call.num_tokens,), 2, jnp.int32):
        raise ValueError(f"chosen: got {chosen.dtype}{list(chosen.shape)}, expected int32[{call.num_tokens}, keys]")
    if call.kv_pages.shape[3] != call.kv_heads or heads % call.kv_heads:
        raise ValueError(
            f"kv_pages: got {call.kv_pages.shape[3]} heads of latents for {heads} query heads, expected "
            f"kv_heads={call.kv_heads}, which has to divide the query heads"
        )
    if value_dim is None or not 0 < value_dim <= size:
        raise ValueError(f"value_dim: got {value_dim}, expected 1 to {size}, the numbers of a latent")


def check_index(call: AttentionCall, queries: IndexQueries) -> None:
    """Raises: ValueError for index queries that do not fit the call, which has passed `check_pool`."""
    tokens, q, weights = call.num_tokens, queries.q, queries.weights
    if call.index_dim < 1 or q.shape != (tokens, *q.shape[1:2], call.index_dim):
        raise ValueError(
            f"index queries: got shape {q.shape}, expected ({tokens}, heads, {call.index_dim}): the tokens of q, and "
            "index_dim, which is at least 1"
        )
    for name, array in (("index queries", q), ("weights of index queries", weights)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}: got {array.dtype}, expected a floating dtype")
    if weights.shape != q.shape[:2]:
        raise ValueError(f"weights of index queries: got shape {weights.shape}, expected {q.shape[:2]}")
    if queries.num_chosen < 1:
        raise ValueError(f"num_chosen: got {queries.num_chosen}, expected at least 1")


def _scalar(name: str, value: ArrayLike) -> Array:
    """`value` as i32[]."""
    array = jnp.asarray(value, jnp.int32) if isinstance(value, int) else jnp.asarray(value)
    if array.shape != () or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}, expected an int32 scalar")
    return array.astype(jnp.int32)


def _check_batch(call: AttentionCall) -> None:
    pages = call.page_indices
    if pages.ndim != 2 or 0 in pages.shape:
        raise ValueError(f"page_indices: got shape {pages.shape}, expected [rows, max_pages], none of them 0")
    rows = pages.shape[0]
    expected = dict(page_indices=pages.shape, seq_lens=(rows,), cu_q_lens=(rows + 1,), num_seqs=())
    for name, shape in expected.items():
        array = getattr(call, name)
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(
                f"{name}: got {array.dtype}{list(array.shape)}, expected int32{list(shape)} for {rows} rows"
            )
