"""The attention entry: checks the arguments and chooses the implementation."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.cpu.bindings import cpu_attention
from levanter_infer.kernels.gpu.attention import gpu_attention
from levanter_infer.kernels.rules import ScoreRules
from levanter_infer.kernels.tiling import Tiles
from levanter_infer.kernels.tpu.attention import tpu_attention
from levanter_infer.kernels.tpu.pool import TpuPool
from levanter_infer.kernels.xla.attention import xla_attention
from levanter_infer.kernels.xla.reference import reference_attention

IMPLEMENTATIONS = ("reference", "xla", "cpu", "gpu", "gpu_interpret", "tpu", "tpu_interpret")
TPU_POOL = ("tpu", "tpu_interpret")
"""Implementations that read the pool as `tpu_pool` lays it out."""


def ragged_paged_attention(
    q: Array,
    kv_pages: Array,
    *,
    layer: ArrayLike,
    page_indices: Array,
    seq_lens: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    scale: float,
    kv_dtype: DTypeLike | None = None,
    kv_heads: int | None = None,
    sliding_window: ArrayLike | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    impl: str = "auto",
    tiles: Tiles | None = None,
    isa: str | None = None,
    return_attn: bool = False,
) -> Array | tuple[Array, Array]:
    """Attend from the packed tokens of many sequences to the pages that hold their keys and values.

    Row `s` is one sequence. It owns the tokens `cu_q_lens[s] … cu_q_lens[s + 1] - 1`, which are the last `q_len`
    positions of its `seq_lens[s]` stored tokens: query `i` stands at position `seq_lens[s] - q_len + i` and sees the
    keys of its own sequence from 0 to there, itself included. So a decode token, a whole prompt and a prompt chunk
    with history are one case. Position `p` lies in page `page_indices[s, p // page_size]` at offset `p % page_size`.
    Query head `h` reads kv head `h // (Hq // Hkv)`. Reads the pool only; keys must be written (and rotated) before.

    The result of a row depends on its own queries, keys and values alone. NaN in other sequences' pages, beyond the
    end of a sequence, in padding tokens or on keys outside all windows does not reach it. Where a query sees no key
    it gives zeros.

    Args:
        q: [T, Hq, D], already rotated; a floating dtype. Tokens from `cu_q_lens[num_seqs]` on are padding.
        kv_pages: [layers, P, page_size, 2 * Hkv, D], heads interleaved k0, v0, k1, v1, …; `kv_dtype`, or the unsigned
            integer of its width that holds its bits; for int8 [..., D + 1], the code of each head's scale behind its
            integers (`kernels.int8`). For `tpu`: [layers, P, slabs, page_size, 128] of `kv_dtype`, as `tpu_pool` lays
            it out.
        layer: i32[], which layer of the pool; may be traced. The layer is never sliced out of the pool.
        page_indices: i32[R, max_pages]; none is P. Keys on a page of none are not seen.
        seq_lens: i32[R], stored tokens including this step's.
        cu_q_lens: i32[R + 1], first entry 0, ascending; padding repeats the last bound.
        num_seqs: i32[], rows in use.
        scale: factor of the dot products q · k.
        kv_dtype: what the stored bits mean; None for the dtype of `kv_pages`.
        kv_heads: Hkv; needed for `tpu`, whose pool does not show it.
        sliding_window: i32[] or int, may be traced: only keys with q_pos - k_pos < window are seen.
        soft_cap: scores become soft_cap * tanh(score / soft_cap), before ALiBi and `score_mod`.
        alibi_slopes: f32[Hq]; adds slope * (k_pos - q_pos).
        sinks: f32[Hq]; a logit per head that takes part in the softmax and has no value.
        score_mod: `score_mod(score, q_pos, kv_pos, head) -> score`, traced into the implementation. The arrays
            broadcast against each other and have equal rank; `score` is f32. It runs on unseen keys too, without
            effect.
        mask_mod: `mask_mod(q_pos, kv_pos, head) -> bool`, true = seen, on top of causality and window.
        impl: `reference` (dense; the oracle), `xla` (streaming softmax), `cpu` (C++, on a CPU only, without
            `score_mod` and `mask_mod`, see `kernels.cpu`), `gpu` (Pallas, on an NVIDIA GPU only), `gpu_interpret` (the
            same in Pallas' interpreter, for tests), `tpu` (Pallas, on a TPU only), `tpu_interpret` (likewise) or `auto`
            (`xla`, which runs everywhere; the pool of `tpu` has another layout).
        tiles: of `tpu`; None for those that `kernels.tiling` knows.
        isa: of `cpu`, its instruction set; None for the widest (`kernels.cpu.isas`).
        return_attn: also return the attention weights, f32[T, Hq, max_pages * page_size]; `reference` only.

    Returns: [T, Hq, D] in q's dtype, accumulated in f32; padding tokens give zeros.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an implementation that does not exist.

    Source: PagedAttention, arXiv:2309.06180, section 4.1; the online softmax of FlashAttention, arXiv:2205.14135,
        section 3.1; the ragged batch of one call follows jax's TPU ragged paged attention.
    """
    impl = _resolve(impl)
    if return_attn and impl != "reference":
        raise ValueError(f'return_attn=True with impl="{impl}", which never has all weights at once; use "reference"')
    dtype = jnp.dtype(kv_pages.dtype if kv_dtype is None else kv_dtype)
    if tiles is not None and impl not in TPU_POOL:
        raise ValueError(f'tiles: got some with impl="{impl}", expected None; they are for "tpu"')
    if isa is not None and impl != "cpu":
        raise ValueError(f'isa: got {isa!r} with impl="{impl}", expected None; it is for "cpu"')
    check_pool = _check_tpu_pool if impl in TPU_POOL else _check_pool
    tpu_pool = check_pool(q, kv_pages, dtype, kv_heads)
    _check_batch(page_indices=page_indices, seq_lens=seq_lens, cu_q_lens=cu_q_lens, num_seqs=num_seqs)
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is not None and per_head.shape != (q.shape[1],):
            raise ValueError(f"{name}: got shape {per_head.shape}, expected one entry per query head, ({q.shape[1]},)")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: got {soft_cap}, expected a positive number, or None for no cap")
    f32 = jnp.float32
    rules = ScoreRules(
        scale=scale,
        sliding_window=None if sliding_window is None else _scalar("sliding_window", sliding_window),
        soft_cap=soft_cap,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.astype(f32),
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    call = AttentionCall(
        q=q,
        kv_pages=kv_pages,
        layer=_scalar("layer", layer),
        page_indices=page_indices,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
        kv_dtype=dtype,
        tpu_pool=tpu_pool,
        rules=rules,
        sinks=None if sinks is None else sinks.astype(f32),
    )
    if impl == "cpu":
        return cpu_attention(call, isa_name=isa)
    result = _RUN[impl](call) if tiles is None else _RUN[impl](call, tiles)
    if impl == "reference":
        return result if return_attn else result[0]
    return result


_RUN = {
    "reference": reference_attention,
    "xla": xla_attention,
    "gpu": gpu_attention,
    "gpu_interpret": functools.partial(gpu_attention, interpret=True),
    "tpu": tpu_attention,
    "tpu_interpret": functools.partial(tpu_attention, interpret=True),
}


def _resolve(impl: str) -> str:
    if impl == "auto":
        return "xla"
    if impl in IMPLEMENTATIONS:
        return impl
    known = ", ".join(("auto", *IMPLEMENTATIONS))
    raise ValueError(f'impl="{impl}" is unknown; use one of: {known}')


def _scalar(name: str, value: ArrayLike) -> Array:
    """`value` as i32[]."""
    array = jnp.asarray(value, jnp.int32) if isinstance(value, int) else jnp.asarray(value)
    if array.shape != () or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}, expected an int32 scalar")
    return array.astype(jnp.int32)


def _check_queries(q: Array) -> None:
    if q.ndim != 3 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q: got {q.dtype}{list(q.shape)}, expected a float array [tokens, query heads, head_dim]")


def _check_tpu_pool(q: Array, kv_pages: Array, kv_dtype: jnp.dtype, kv_heads: int | None) -> TpuPool:
    _check_queries(q)
    if kv_heads is None or kv_heads < 1 or q.shape[1] % kv_heads != 0:
        raise ValueError(
            f"kv_heads: got {kv_heads}, expected a number that divides the {q.shape[1]} query heads; this pool does "
            "not show it"
        )
    pool = TpuPool(kv_heads, q.shape[2], scaled=kv_dtype == jnp.int8)
    if kv_pages.ndim != 5 or kv_pages.shape[2] != pool.slabs or kv_pages.shape[4] != 128:
        raise ValueError(
            f"kv_pages: got shape {kv_pages.shape}, expected [layers, pages, {pool.slabs}, page_size, 128] for "
            f"{kv_heads} kv heads of {q.shape[2]}, as kernels.tpu_pool lays it out"
        )
    if kv_pages.dtype != kv_dtype:
        raise ValueError(f"kv_pages: got dtype {kv_pages.dtype}, expected {kv_dtype}; a TPU's pool holds no bits")
    return pool


def _check_pool(q: Array, kv_pages: Array, kv_dtype: jnp.dtype, kv_heads: int | None) -> None:
    _check_queries(q)
    if kv_pages.ndim != 5:
        raise ValueError(
            f"kv_pages: got shape {kv_pages.shape}, expected [layers, pages, page_size, 2 * kv_heads, head_dim]; "
            "give the whole pool and `layer`, not one layer of it"
        )
    pairs, head_dim = kv_pages.shape[3:]
    expected, of = (q.shape[2] + 1, " and one for the scale") if kv_dtype == jnp.int8 else (q.shape[2], "")
    if head_dim != expected:
        raise ValueError(f"kv_pages: got head_dim {head_dim}, expected {expected} as in q{of}")
    if pairs == 0 or pairs % 2 != 0 or q.shape[1] % (pairs // 2) != 0:
        raise ValueError(
            f"kv_pages: got {pairs} interleaved heads for {q.shape[1]} query heads, expected 2 * kv_heads, where "
            "kv_heads divides the query heads"
        )
    if kv_heads is not None and pairs != 2 * kv_heads:
        raise ValueError(f"kv_heads: got {kv_heads}, expected {pairs // 2} as in kv_pages")
    if not jnp.issubdtype(kv_dtype, jnp.floating) and kv_dtype != jnp.int8:
        raise ValueError(f"kv_dtype: got {kv_dtype}, expected int8 or the floating dtype that the stored bits mean")
    stored = kv_pages.dtype
    as_bits = jnp.issubdtype(stored, jnp.unsignedinteger) and stored.itemsize == kv_dtype.itemsize
    if stored != kv_dtype and not as_bits:
        raise ValueError(
            f"kv_pages: got dtype {stored}, expected {kv_dtype} or an unsigned integer of {kv_dtype.itemsize} bytes"
        )


def _check_batch(*, page_indices: Array, seq_lens: Array, cu_q_lens: Array, num_seqs: Array) -> None:
    if page_indices.ndim != 2 or 0 in page_indices.shape:
        raise ValueError(f"page_indices: got shape {page_indices.shape}, expected [rows, max_pages], none of them 0")
    rows = page_indices.shape[0]
    arrays = dict(page_indices=page_indices, seq_lens=seq_lens, cu_q_lens=cu_q_lens, num_seqs=num_seqs)
    expected = dict(page_indices=page_indices.shape, seq_lens=(rows,), cu_q_lens=(rows + 1,), num_seqs=())
    for name, array in arrays.items():
        if array.shape != expected[name] or array.dtype != jnp.int32:
            raise ValueError(
                f"{name}: got {array.dtype}{list(array.shape)}, expected int32{list(expected[name])} for {rows} rows"
            )
