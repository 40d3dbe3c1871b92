"""The checks of an attention call, which all backends make before they compute it."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import NOTHING_SEEN


def checked(call: AttentionCall) -> AttentionCall:
    """The call with scalars as i32[] and parameters per head as float32.

    Raises: ValueError for shapes or dtypes that do not fit together; the pool is checked by `check_pool`, or by the
        backend that stores it in another way.
    """
    q, rules = call.q, call.rules
    if q.ndim != 3 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q: got {q.dtype}{list(q.shape)}, expected a float array [tokens, query heads, head_dim]")
    _check_batch(call)
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
    """Raises: ValueError if the pool is not [layers, P, page_size, 2 * Hkv, D] of numbers or their bits."""
    q, kv_pages, kv_dtype = call.q, call.kv_pages, call.kv_dtype
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
    if pairs != 2 * call.kv_heads:
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
