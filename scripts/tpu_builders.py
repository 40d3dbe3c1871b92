"""Programs to compile for a TPU and look at, for scripts/tpu_schedule.py and tools of its kind.

`decode`, `chunk` and `mixed` are one call of the attention entry; `program` is the engine's own round. All take

    heads=(query heads, kv heads, head size) of one chip, page=tokens of a page, seqs=sequences, context=tokens of each,
    tokens=query tokens of the step, kv_dtype=, window=, pool_pages=pages of the pool (default: as many as the page
    tables can name, at most 2 GiB worth; the tables keep their full shape), impl=attention implementation, and
    tiles=what that implementation takes as tiles (default: it chooses).

A pool has LAYERS layers, of which a call reads one.
"""

import functools
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from levanter_infer.kernels import ragged_paged_attention  # noqa: E402

LAYERS = 2
MAX_POOL_BYTES = 2**31


def decode(mesh, *, heads=(32, 8, 128), page=64, seqs=64, context=8192, tokens=None, **options):
    """Every sequence has one query."""
    return _call(heads=heads, page=page, seqs=seqs, context=context, tokens=tokens or seqs, **options)


def chunk(mesh, *, heads=(32, 8, 128), page=64, seqs=1, context=8192, tokens=256, **options):
    """Few sequences have many queries each."""
    return _call(heads=heads, page=page, seqs=seqs, context=context, tokens=tokens, **options)


def mixed(mesh, *, heads=(32, 8, 128), page=64, seqs=64, context=8192, tokens=512, **options):
    """Many sequences, some with one query and some with many."""
    return _call(heads=heads, page=page, seqs=seqs, context=context, tokens=tokens, **options)


def _call(
    *, heads, page, seqs, context, tokens, kv_dtype="bfloat16", window=None, pool_pages=None, impl="tpu", tiles=None
):
    num_q_heads, num_kv_heads, head_dim = heads
    kv_dtype = jnp.dtype(kv_dtype)
    seq_pages = -(-context // page)
    page_bytes = LAYERS * page * 2 * num_kv_heads * head_dim * kv_dtype.itemsize
    pool_pages = pool_pages or max(1, min(seqs * seq_pages, MAX_POOL_BYTES // page_bytes))
    options = {"sliding_window": window, "impl": impl, **({} if tiles is None else {"tiles": tiles})}

    def call(q, kv_pages, layer, page_indices, seq_lens, cu_q_lens, num_seqs):
        return ragged_paged_attention(
            q,
            kv_pages,
            layer=layer,
            page_indices=page_indices,
            seq_lens=seq_lens,
            cu_q_lens=cu_q_lens,
            num_seqs=num_seqs,
            scale=head_dim**-0.5,
            **options,
        )

    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    arguments = (
        jax.ShapeDtypeStruct((tokens, num_q_heads, head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((LAYERS, pool_pages, page, 2 * num_kv_heads, head_dim), kv_dtype),
        i32(()),
        i32((seqs, seq_pages)),
        i32((seqs,)),
        i32((seqs + 1,)),
        i32(()),
    )
    return call, arguments
