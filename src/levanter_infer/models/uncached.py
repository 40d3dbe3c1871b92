"""Whole sequences through the plain forward: the judge of everything that works with a cache."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.axes import POSITION, ROW, ROW_BOUND, SEQ_PAGE, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.cache import Cache, by_layer
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.cache.memory import PoolSizes
from levanter_infer.kernels.xla.backend import ReferenceBackend
from levanter_infer.layers.attention import AttentionSpec
from levanter_infer.models.decoder import PLAIN, DecoderModel

BLOCK = 64
"""Positions whose logits are there at once."""


class TokenScores(eqx.Module):
    """Scores of each token of a sequence but the first. Plain arrays over tokens."""

    logprobs: Array
    """f32, of the token that stands there."""
    best_logprobs: Array
    """f32, of the likeliest one."""
    best_ids: Array
    """i32"""


def next_token(model: DecoderModel, tokens: Array, length: Array, attention: AttentionSpec = PLAIN) -> Array:
    """The likeliest token after the first `length` of `tokens`, i32[n], all of which are computed. i32[]"""
    hidden = model.plain_hidden(hax.named(tokens, (POSITION,)), attention)
    last = jax.lax.dynamic_slice_in_dim(hidden.array, length - 1, 1)
    return jnp.argmax(model.logits(hax.named(last, (POSITION, model.embed))).array[0]).astype(jnp.int32)


def token_scores(model: DecoderModel, tokens: Array, attention: AttentionSpec = PLAIN) -> TokenScores:
    """Scores of `tokens[1:]`, i32[n], each after all that stand before it.

    Logits are computed a block of positions at a time: there is never an array of all tokens and the whole vocabulary.
    Attention holds the matrix of scores of one layer, [heads, n, n].

    Requires: n is a multiple of `BLOCK`. The last entry of the result means nothing.
    """
    hidden = model.plain_hidden(hax.named(tokens, (POSITION,)), attention).rearrange((POSITION, model.embed)).array

    def block(part: tuple[Array, Array]) -> TokenScores:
        states, following = part
        logits = model.logits(hax.named(states, (POSITION, model.embed))).rearrange((POSITION, ...)).array
        total = jax.nn.logsumexp(logits, axis=1)
        chosen = jnp.take_along_axis(logits, following[:, None], axis=1)[:, 0]
        return TokenScores(
            chosen - total, jnp.max(logits, axis=1) - total, jnp.argmax(logits, axis=1).astype(jnp.int32)
        )

    parts = (hidden.reshape(-1, BLOCK, hidden.shape[1]), jnp.roll(tokens, -1).reshape(-1, BLOCK))
    return jax.tree.map(lambda scores: scores.reshape(-1), jax.lax.map(block, parts))


def keys_and_values(model: DecoderModel, tokens: Array, attention: AttentionSpec = PLAIN) -> dict[int, Array]:
    """Keys and values of `tokens` i32[n], computed in one piece, and kept in one page by the reference attention.

    Requires: n is a power of two.
    Returns: f32[n, kv_head, 2, head_size], of latents f32[n, 1, 1, head_size], by the number of each layer that stores
        some.
    """
    size = tokens.shape[0]
    index = jnp.arange(size, dtype=jnp.int32)
    batch = PageBatchInfo(
        tokens=hax.named(tokens, (TOKEN,)),
        positions=hax.named(index, (TOKEN,)),
        slot_ids=hax.named(jnp.zeros(1, jnp.int32), (ROW,)),
        cu_q_lens=hax.named(jnp.asarray([0, size], jnp.int32), (ROW_BOUND,)),
        seq_lens=hax.named(jnp.full(1, size, jnp.int32), (ROW,)),
        page_indices=hax.named(jnp.zeros((1, 1), jnp.int32), (ROW, SEQ_PAGE)),
        num_seqs=hax.named(jnp.int32(1), ()),
        new_token_dests=hax.named(index, (TOKEN,)),
        page_size=size,
    )
    pools = model.config.pools
    sizes = PoolSizes(num_pages=1, page_size=size, num_slots=1, dtype=model.dtype, backend=ReferenceBackend())
    _, cache = model.hidden(batch, Cache.init(pools, sizes), attention)
    stored = [(spec, pool) for spec, pool in zip(pools, cache.pools, strict=True) if isinstance(pool, KvPages)]
    return by_layer((spec, pool.by_head(pool.pages.array[:, 0]).astype(jnp.float32)) for spec, pool in stored)
