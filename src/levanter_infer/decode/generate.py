"""Generation as a pure function of arrays: the same steps, from start to end inside the caller's program."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import replace, scatter
from levanter_infer.cache.cache import Cache
from levanter_infer.decode.codes import WAITING
from levanter_infer.decode.loop import RoundLimits, run_steps
from levanter_infer.decode.outputs import OutputRing
from levanter_infer.decode.sampling import SamplingTable
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import GenState
from levanter_infer.layers.attention import AttentionSpec


class GenerateOutput(eqx.Module):
    """Sampled continuations; entries from `num_tokens` on are padding (token 0, logprob 0).

    The leading axes are `slots` in `generate_all` and `batch, n` in the public `generate`.
    """

    token_ids: Array
    """i32[..., max_tokens]"""
    logprobs: Array
    """f32[..., max_tokens], under the model"""
    processed_logprobs: Array
    """f32[..., max_tokens], under the distribution that was sampled from"""
    num_tokens: Array
    """i32[...]"""
    finish_reason: Array
    """i32[...]: 1 stop, 2 length, 3 error"""


def generate_all(
    model,
    cache: Cache,
    prompts: Array,
    prompt_lens: Array,
    sampling: SamplingTable,
    *,
    n: int,
    max_tokens: int,
    shapes: Shapes,
    attention: AttentionSpec,
) -> GenerateOutput:
    """Sample `n` continuations of each prompt; pure and traceable.

    Args:
        cache: of `empty_cache`, content irrelevant.
        prompts: i32[batch, length], padded on the right.
        prompt_lens: i32[batch], at least 1.
        sampling: over the slots; slot `b * n + i` is sample `i` of prompt `b`.
    Requires: `shapes.num_slots == batch * n`; each sequence fits alone into the pool and into `max_seq_len`.
    """
    state = GenState.init(shapes, cache)
    table = state.decode.sequences
    slots = jnp.arange(shapes.num_slots, dtype=jnp.int32)
    # Lengths may be traced, so the host could not check them; without a pending token a sequence would never end.
    lens = jnp.repeat(jnp.clip(prompt_lens.astype(jnp.int32), 1, prompts.shape[1]), n)
    leader = slots // n * n
    rows = jnp.repeat(prompts.astype(jnp.int32), n, axis=0)
    table = replace(
        table,
        tokens=table.tokens.at[:, : prompts.shape[1]].set(rows),
        seq_lens=lens,
        prompt_lens=lens,
        status=jnp.full_like(slots, WAITING),
        arrival=slots,
        max_lens=jnp.minimum(lens + max_tokens, shapes.max_seq_len),
        fork_source=jnp.where(slots == leader, shapes.num_slots, leader),
    )
    state = replace(state, decode=replace(state.decode, sequences=table, sampling=sampling))
    ring = OutputRing.init(shapes.ring_size, shapes.limits.max_logprobs)
    forever = jnp.int32(jnp.iinfo(jnp.int32).max)
    limits = RoundLimits(max_steps=forever, min_free_slots=jnp.int32(shapes.num_slots + 1))
    state, ring = run_steps(model, state, ring, shapes, attention, limits)
    return _collect(state, ring, prompt_lens=lens, max_tokens=max_tokens, shapes=shapes)


def _collect(
    state: GenState, ring: OutputRing, *, prompt_lens: Array, max_tokens: int, shapes: Shapes
) -> GenerateOutput:
    """Sort the ring's entries by slot, keeping the order of sampling."""
    index = jnp.arange(ring.size, dtype=jnp.int32)
    slot = jnp.where(index < ring.count, ring.slot_ids, shapes.num_slots)
    order = jnp.argsort(slot, stable=True)
    ordered = slot[order]
    place = index - jnp.searchsorted(ordered, ordered, side="left").astype(jnp.int32)

    def per_slot(values: Array) -> Array:
        empty = jnp.zeros((shapes.num_slots, max_tokens), values.dtype)
        return scatter(empty, (ordered, place), values[order])

    table = state.decode.sequences
    return GenerateOutput(
        token_ids=per_slot(ring.tokens),
        logprobs=per_slot(ring.logprobs),
        processed_logprobs=per_slot(ring.processed_logprobs),
        num_tokens=table.seq_lens - prompt_lens,
        finish_reason=table.finish_reason,
    )
