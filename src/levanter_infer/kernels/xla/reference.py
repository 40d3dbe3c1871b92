"""The `reference` implementation: gather every page of every row, then one dense softmax per token."""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import MASKED, decode_bits

_TOKENS_AT_ONCE = 16
"""Bounds the memory of long prompts; no effect on the results."""


def reference_attention(call: AttentionCall) -> tuple[Array, Array]:
    """The specification of `ragged_paged_attention`.

    Returns: the output [T, Hq, D], and the attention weights f32[T, Hq, max_pages * page_size]; a row of weights sums
        to 1, to less with `sinks`, to 0 where nothing is seen.
    """
    num_tokens, num_q_heads, head_dim = call.q.shape
    num_pages, page_size, num_rows = call.kv_pages.shape[1], call.page_size, call.num_rows
    width = call.page_indices.shape[1] * page_size
    cu_q_lens, rules, sinks = call.cu_q_lens, call.rules, call.sinks

    gathered = call.kv_pages.at[call.layer, call.page_indices].get(mode="clip")
    gathered = decode_bits(gathered, call.kv_dtype).reshape(num_rows, width, call.kv_heads, 2, head_dim)
    stored = jnp.repeat(call.page_indices < num_pages, page_size, axis=1)

    head = jnp.arange(num_q_heads, dtype=jnp.int32)[:, None]
    kv_head = head[:, 0] // call.heads_per_kv_head
    kv_pos = jnp.arange(width, dtype=jnp.int32)[None, :]

    def attend(token):
        row = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
        row = jnp.minimum(row, num_rows - 1)
        live = token < cu_q_lens[call.num_seqs]
        q_pos = (call.seq_lens[row] - cu_q_lens[row + 1] + token)[None, None]
        seen = rules.seen(q_pos, kv_pos, head) & stored[row][None, :] & live
        seen = jnp.broadcast_to(seen, (num_q_heads, width))
        # 0 * NaN is NaN: what is not seen is cleared, not only given no weight.
        keys, values = (
            jnp.where(seen[:, :, None], gathered[row, :, :, pair][:, kv_head].transpose(1, 0, 2), jnp.float32(0))
            for pair in (0, 1)
        )
        query = call.q[token].astype(jnp.float32)
        matmul = jnp.einsum("hd,hkd->hk", query, keys, precision="highest")
        scores = jnp.where(seen, rules.scores(matmul, q_pos, kv_pos, head), jnp.float32(MASKED))
        highest = jnp.max(scores, axis=1)
        if sinks is not None:
            highest = jnp.maximum(highest, sinks)
        weights = jnp.where(seen, jnp.exp(scores - highest[:, None]), jnp.float32(0))
        total = jnp.sum(weights, axis=1)
        if sinks is not None:
            total = total + jnp.exp(sinks - highest)
        weights = weights / jnp.where(total == 0, jnp.float32(1), total)[:, None]
        return jnp.einsum("hk,hkd->hd", weights, values, precision="highest").astype(call.q.dtype), weights

    return jax.lax.map(attend, jnp.arange(num_tokens, dtype=jnp.int32), batch_size=_TOKENS_AT_ONCE)
