"""The `tpu` implementation: Pallas on Mosaic, for TPUs from v4 on.

Paged attention takes two paths: `decode` computes rows with one query, which read each key once for a few queries and
are bound by memory; `prefill` computes rows with more, in blocks of queries, and is bound by the matrix unit. Both read
pages of the full pool, all layers (`pool`); nothing is sliced or copied for them.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.tiling import Tiles, TileShape, cut_queries, generation
from levanter_infer.kernels.tpu.decode import decode_attention
from levanter_infer.kernels.tpu.prefill import prefill_attention
from levanter_infer.kernels.tpu.tile_table import choose

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)


def supports_dtype(dtype) -> bool:
    """Whether pages of this dtype can be read."""
    return jnp.dtype(dtype) in _DTYPES


def tpu_attention(call: AttentionCall, tiles: Tiles | None = None, *, interpret: bool = False) -> Array:
    """`ragged_paged_attention` on a TPU.

    Args:
        tiles: None for those that `tile_table.choose` gives.
        interpret: run in Pallas' interpreter, on a CPU, slowly, with its race detector; for tests.
    Returns: [T, Hq, D], 0 for padding tokens.
    Raises: ValueError for pages of other dtypes.
    """
    if not supports_dtype(call.kv_dtype):
        raise ValueError(
            f'impl="tpu" reads pages of float32, bfloat16, float8_e4m3fn or int8, not {call.kv_dtype}; use "xla"'
        )
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan") if interpret else False
    operand = _operand_dtype(call)
    shape = TileShape(
        generation(), call.kv_heads, call.q.shape[2], call.heads_per_kv_head, call.page_size, call.kv_dtype.name
    )
    tiles = choose(shape) if tiles is None else tiles
    out = decode_attention(call, tiles.decode, operand, interpret=params)
    q_lens = call.q_lens
    if call.num_tokens > 1:
        prefill = cut_queries(tiles.prefill, shape, call.num_tokens)
        row = jnp.searchsorted(call.cu_q_lens[1:], jnp.arange(call.num_tokens, dtype=jnp.int32), side="right")
        decodes = (q_lens.at[row].get(mode="fill", fill_value=0) == 1)[:, None, None]

        def with_prefill(carry):
            prefilled = prefill_attention(call, prefill, operand, interpret=params)
            return jnp.bool(False), jnp.where(decodes, carry[1], prefilled)

        # A loop of no or one turn, because a branch (`lax.cond`) would copy what it carries on other devices.
        _, out = jax.lax.while_loop(lambda carry: carry[0], with_prefill, (jnp.any(q_lens > 1), out))
    live = jnp.arange(call.num_tokens, dtype=jnp.int32) < call.cu_q_lens[call.num_seqs]
    return jnp.where(live[:, None, None], out, jnp.zeros((), out.dtype))


def _operand_dtype(call: AttentionCall) -> jnp.dtype:
    """Dtype of the matmuls' operands: bfloat16 if queries and pages are no wider, so that the matrix unit takes them as
    they are."""
    narrow = call.q.dtype == jnp.bfloat16 and (call.kv_dtype == jnp.bfloat16 or call.kv_dtype.itemsize == 1)
    return jnp.dtype(jnp.bfloat16) if narrow else jnp.dtype(jnp.float32)
