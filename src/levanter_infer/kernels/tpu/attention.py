"""The `tpu` implementation: Pallas on Mosaic, for TPUs from v4 on.

Rows with one query and rows with more go two ways: `rpa_tpu_decode` reads each key once for a handful of queries and is
bound by memory, `rpa_tpu_chunk` multiplies blocks of queries and is bound by the matrix unit. Both read the pool where
it lies (`tpu_pool`): whole, all layers, page by page.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.tiling import Tiles, TileShape, cut_queries, generation
from levanter_infer.kernels.tpu.decode import decode_rows
from levanter_infer.kernels.tpu.prefill import chunk_rows
from levanter_infer.kernels.tpu.tile_table import choose

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)


def supports_dtype(dtype) -> bool:
    """Whether pages of this dtype can be read."""
    return jnp.dtype(dtype) in _DTYPES


def tpu_attention(call: AttentionCall, tiles: Tiles | None = None, *, interpret: bool = False) -> Array:
    """`ragged_paged_attention` on a TPU.

    Args:
        tiles: None for those of `tile_table`.
        interpret: run by Pallas' interpreter, on a CPU, slowly, with its detector of races; for tests.
    """
    if not supports_dtype(call.kv_dtype):
        raise ValueError(
            f'impl="tpu" reads pages of float32, bfloat16, float8_e4m3fn or int8, not {call.kv_dtype}; use "xla"'
        )
    assert call.tpu_pool is not None, "the entry says how the pool lies"
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan") if interpret else False
    operand = _operand_dtype(call)
    shape = TileShape(
        generation(), call.kv_heads, call.q.shape[2], call.heads_per_kv_head, call.page_size, call.kv_dtype.name
    )
    tiles = choose(shape) if tiles is None else tiles
    out = decode_rows(call, tiles.decode, operand, interpret=params)
    q_lens = call.q_lens
    if call.num_tokens > 1:
        chunk = cut_queries(tiles.chunk, shape, call.num_tokens)
        row = jnp.searchsorted(call.cu_q_lens[1:], jnp.arange(call.num_tokens, dtype=jnp.int32), side="right")
        alone = (q_lens.at[row].get(mode="fill", fill_value=0) == 1)[:, None, None]

        def with_chunks(carry):
            chunks = chunk_rows(call, chunk, operand, interpret=params)
            return jnp.bool(False), jnp.where(alone, carry[1], chunks)

        # A loop of no or one turn: a branch would copy what it carries on other devices.
        _, out = jax.lax.while_loop(lambda carry: carry[0], with_chunks, (jnp.any(q_lens > 1), out))
    live = jnp.arange(call.num_tokens, dtype=jnp.int32) < call.cu_q_lens[call.num_seqs]
    return jnp.where(live[:, None, None], out, jnp.zeros((), out.dtype))


def _operand_dtype(call: AttentionCall) -> jnp.dtype:
    """Of the matmul: bfloat16 if queries and pages are no wider, so that the matrix unit takes them as they are."""
    narrow = call.q.dtype == jnp.bfloat16 and (call.kv_dtype == jnp.bfloat16 or call.kv_dtype.itemsize == 1)
    return jnp.dtype(jnp.bfloat16) if narrow else jnp.dtype(jnp.float32)
