"""The `reference` implementation: gather every page of every row, then one dense softmax per token."""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.kernels.call import NO_KEY, AttentionCall, IndexQueries
from levanter_infer.kernels.rules import MASKED, decode_bits

_TOKENS_AT_ONCE = 16
"""Bounds the memory of long prompts; no effect on the results."""


def reference_attention(call: AttentionCall) -> tuple[Array, Array]:
    """The specification of `ragged_paged_attention`: a dense softmax.

    Returns: the output [T, Hq, D], of latents [T, Hq, value_dim]; and the attention weights f32[T, Hq, max_pages *
        page_size]; the weights of a query and head sum to 1, to less with `sinks`, to 0 where no key is seen.
    """
    num_tokens, num_q_heads, head_dim = call.q.shape
    rules, sinks = call.rules, call.sinks
    gathered, mapped = _gathered(call)
    width = gathered.shape[1]
    if call.value_dim is None:
        stored = gathered[..., 0, :], gathered[..., 1, :]
    else:
        stored = gathered[..., 0, :head_dim], gathered[..., 0, : call.value_dim]

    head = jnp.arange(num_q_heads, dtype=jnp.int32)[:, None]
    kv_head = head[:, 0] // call.heads_per_kv_head
    kv_pos = jnp.arange(width, dtype=jnp.int32)[None, :]

    def attend(token):
        row, q_pos, live = _place(call, token)
        q_pos = q_pos[None, None]
        seen = rules.seen(q_pos, kv_pos, head) & mapped[row][None, :] & live
        seen = jnp.broadcast_to(seen, (num_q_heads, width))
        if call.chosen is not None:
            seen = seen & jnp.zeros((1, width), bool).at[0, call.chosen[token]].set(True, mode="drop")
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


def reference_choice(call: AttentionCall, queries: IndexQueries) -> Array:
    """The specification of `Backend.choose_keys`: all scores of a token, and a sort of its keys by them."""
    gathered, mapped = _gathered(call)
    keys = gathered[..., 0, 0, call.q.shape[2] :]
    width = keys.shape[1]
    kv_pos = jnp.arange(width, dtype=jnp.int32)

    def choose(token):
        row, q_pos, live = _place(call, token)
        seen = (kv_pos <= q_pos) & mapped[row] & live
        q, weights = queries.q[token].astype(jnp.float32), queries.weights[token].astype(jnp.float32)
        matmul = jnp.einsum("hd,kd->hk", q, keys[row], precision="highest")
        scores = jnp.sum(jax.nn.relu(matmul) * weights[:, None], axis=0)
        by_score = jnp.argsort(jnp.where(seen, -scores, jnp.inf), stable=True)[: queries.num_chosen]
        return jnp.sort(jnp.where(seen[by_score], by_score.astype(jnp.int32), NO_KEY))

    return jax.lax.map(choose, jnp.arange(call.num_tokens, dtype=jnp.int32), batch_size=_TOKENS_AT_ONCE)


def _gathered(call: AttentionCall) -> tuple[Array, Array]:
    """The contents of each row's pages, f32[R, positions, Hkv, sides, D], and whether there is a page, bool[R,
    positions]."""
    stored = decode_bits(call.kv_pages.at[call.layer, call.page_indices].get(mode="clip"), call.kv_dtype)
    mapped = jnp.repeat(call.page_indices < call.kv_pages.shape[1], call.page_size, axis=1)
    return stored.reshape(*mapped.shape, call.kv_heads, -1, stored.shape[-1]), mapped


def _place(call: AttentionCall, token: Array) -> tuple[Array, Array, Array]:
    """Row and position of a token, i32[] each, and whether it is no padding."""
    row = jnp.searchsorted(call.cu_q_lens[1:], token, side="right").astype(jnp.int32)
    row = jnp.minimum(row, call.num_rows - 1)
    position = call.seq_lens[row] - call.cu_q_lens[row + 1] + token
    return row, position, token < call.cu_q_lens[call.num_seqs]
