"""The `reference` implementation: gather every page of every row, then one dense softmax per token."""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import AttentionCall
from levanter_infer.kernels.rules import MASKED, decode_bits

_TOKENS_AT_ONCE = 16
"""Bounds the memory of long prompts; no effect on the results."""


def reference_attention(call: AttentionCall) -> tuple[Array, Array]:
    """The specification of `ragged_paged_attention`: a dense softmax.

    Returns: the output [T, Hq, D], of latents [T, Hq, value_dim]; and the attention weights f32[T, Hq, max_pages *
        page_size]; the weights of a query and head sum to 1, to less with `sinks`, to 0 where no key is seen.
    """
    num_tokens, num_q_heads, head_dim = call.q.shape
    num_pages, page_size, num_rows = call.kv_pages.shape[1], call.page_size, call.num_rows
    width = call.page_indices.shape[1] * page_size
    cu_q_lens, rules, sinks = call.cu_q_lens, call.rules, call.sinks

    gathered = call.kv_pages.at[call.layer, call.page_indices].get(mode="clip")
    gathered = decode_bits(gathered, call.kv_dtype).reshape(num_rows, width, call.kv_heads, -1, head_dim)
    if call.value_dim is None:
        stored = gathered[..., 0, :], gathered[..., 1, :]
    else:
        stored = gathered[..., 0, :], gathered[..., 0, : call.value_dim]
    mapped = jnp.repeat(call.page_indices < num_pages, page_size, axis=1)

    head = jnp.arange(num_q_heads, dtype=jnp.int32)[:, None]
    kv_head = head[:, 0] // call.heads_per_kv_head
    kv_pos = jnp.arange(width, dtype=jnp.int32)[None, :]

    def attend(token):
        row = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
        row = jnp.minimum(row, num_rows - 1)
        live = token < cu_q_lens[call.num_seqs]
        q_pos = (call.seq_lens[row] - cu_q_lens[row + 1] + token)[None, None]
        seen = rules.seen(q_pos, kv_pos, head) & mapped[row][None, :] & live
        seen = jnp.broadcast_to(seen, (num_q_heads, width))
        # Unseen keys and values are set to 0; a weight of 0 would not suffice: 0 * NaN is NaN.
        keys, values = (
            jnp.where(seen[:, :, None], side[row][:, kv_head].transpose(1, 0, 2), jnp.float32(0)) for side in stored
        )
        query = call.q[token].astype(jnp.float32)
        matmul = jnp.einsum("hd,hkd->hk", query, keys, precision="highest")
        scores = jnp.where(seen, rules.scores(matmul, q_pos, kv_pos, head), jnp.float32(MASKED))
        m = jnp.max(scores, axis=1)
        if sinks is not None:
            m = jnp.maximum(m, sinks)
        weights = jnp.where(seen, jnp.exp(scores - m[:, None]), jnp.float32(0))
        denominator = jnp.sum(weights, axis=1)
        if sinks is not None:
            denominator = denominator + jnp.exp(sinks - m)
        weights = weights / jnp.where(denominator == 0, jnp.float32(1), denominator)[:, None]
        return jnp.einsum("hk,hkd->hd", weights, values, precision="highest").astype(call.q.dtype), weights

    return jax.lax.map(attend, jnp.arange(num_tokens, dtype=jnp.int32), batch_size=_TOKENS_AT_ONCE)
