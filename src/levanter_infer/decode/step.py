"""One step: pack, allocate, forward, sample, append, free."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.axes import ROW, ROW_BOUND, SEQ_PAGE, TOKEN
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.kv_pages import KvPages
from levanter_infer.cache.named import replace, scalar
from levanter_infer.cache.page_math import offset_of, page_of, pages_for
from levanter_infer.cache.page_table import ragged_index, run_if
from levanter_infer.decode.beams import fail_together, search
from levanter_infer.decode.codes import ERROR, LENGTH, STOP
from levanter_infer.decode.outputs import OutputRing
from levanter_infer.decode.packing import StepPlan, choose_tokens, expect, pack, start_waiting
from levanter_infer.decode.paging import fork_when_ready, free_pages_for_finished, preempt, take_pages
from levanter_infer.decode.prefix import insert_prefix, match_prefix
from levanter_infer.decode.sampling import LogitStats, SampleOutput, sample, stop_match
from levanter_infer.decode.sampling_beams import candidates, no_candidates
from levanter_infer.decode.scoring import registers, score_prompts
from levanter_infer.decode.sequence_table import in_order
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState, GenState
from levanter_infer.layers.attention import AttentionSpec
from levanter_infer.policies import AdmissionPolicy


def step(model, state: GenState, ring: OutputRing, shapes: Shapes, attention: AttentionSpec):
    """Run one step of all running sequences.

    Returns: the new state and ring.
    """
    decode, plan, source, target = schedule(state.decode, shapes)
    copies = jnp.any(target < shapes.num_pages)

    def copied(pools):
        kv, scores = pools
        pairs = _compact(source, target, shapes)
        return kv.copy_pages(*pairs), None if scores is None else scores.copy_pages(*pairs)

    kv, scores = run_if(copies, copied, (state.kv, state.scores))
    kv, hidden = forward(model, decode, kv, plan, shapes, attention)
    if scores is not None:
        scores = score_prompts(model, decode, scores, hidden, plan, shapes)
        hidden = hidden[_last_tokens(plan.cu_q_lens)]
    sampled = sample_rows(model, decode, hidden, plan, shapes)
    decode, ring = append(decode, ring, plan, sampled, shapes)
    return GenState(decode, kv, scores), ring


def schedule(state: DecodeState, shapes: Shapes) -> tuple[DecodeState, StepPlan, Array, Array]:
    """Decide what the step computes and give it pages.

    Returns: the new state, the plan, and (source, target) pages to copy before anything is written.
    """
    order = in_order(state.sequences)
    state = start_waiting(state, shapes, order)
    state, waits = match_prefix(state, shapes, order)
    take = choose_tokens(state, shapes, order, waits)
    state, take = preempt(state, order, take)
    state, source, target = take_pages(state, shapes, take)
    return state, pack(state, shapes, order, take), source, target


def forward(model, state: DecodeState, kv: KvPages, plan: StepPlan, shapes: Shapes, attention: AttentionSpec):
    """Compute the plan's tokens in the smallest bucket that holds them.

    Each bucket is a loop of zero or one trips and not a branch of `lax.switch`, which would copy the pool at every
    step on a CPU.

    Returns: the pool with the new K/V; the hidden states [row, embed] of the rows' last tokens or, where prompts are
        scored, [token, embed] of all tokens.
    """
    embed = model.embed
    size = shapes.max_rows if shapes.scoring is None else shapes.buckets[-1]
    hidden = jnp.zeros((size, embed.size), model.activation_dtype)
    whole = batch_info(state, plan, shapes)
    for lower, bucket in zip((0, *shapes.buckets), shapes.buckets, strict=False):

        def run(carry, bucket=bucket):
            kv, hidden = carry
            batch = whole.first(bucket, shapes.rows(bucket))
            states, kv = model.hidden(batch, kv, attention)
            states = states.rearrange((TOKEN, embed)).array
            states = states[_last_tokens(batch.cu_q_lens.array)] if shapes.scoring is None else states
            return kv, hidden.at[: states.shape[0]].set(states)

        fits = (plan.num_tokens > lower) & (plan.num_tokens <= bucket)
        kv, hidden = run_if(fits, run, (kv, hidden))
    return kv, hidden


def _last_tokens(bounds: Array) -> Array:
    """Place of each row's last token, i32[row], of `cu_q_lens`."""
    return jnp.clip(bounds[1:] - 1, 0)


def sample_rows(model, state: DecodeState, hidden: Array, plan: StepPlan, shapes: Shapes) -> SampleOutput:
    """Logits and a sampled token of each row, from the hidden states [row, embed] of the rows' last tokens.

    The last row may be a prompt that goes on in the next step: its sample is not used.
    """
    logits = head(model, hidden, plan, shapes)
    table = state.sequences
    count = shapes.sampled_rows
    stats = LogitStats.of_kernel(model.backend, logits, plan.num_rows)

    def result_of(logits: Array, slots: Array, stats: LogitStats | None) -> SampleOutput:
        lens = table.seq_lens.array.at[slots].get(mode="fill", fill_value=0)
        asked = state.sampling.rows(slots)
        history = {
            "tokens": table.tokens.array,
            "slot_ids": slots,
            "prompt_lens": table.prompt_lens.array.at[slots].get(mode="fill", fill_value=0),
            "seq_lens": lens,
        }
        sampled = sample(
            logits, asked, positions=lens, max_top=shapes.limits.max_logprobs, stats=stats, vocab=model.vocab, **history
        )
        if state.beams is None:
            return sampled
        searches = state.beams.searches.at[slots].get(mode="fill", fill_value=False)
        offered = candidates(logits, asked, searches, width=shapes.max_beams, stats=stats, vocab=model.vocab, **history)
        return dataclasses.replace(sampled, candidates=offered)

    rows = (logits, plan.slot_ids, stats)
    if count is None:
        return result_of(*rows)

    def body(carry):
        # A slice that would pass the end starts earlier, and some rows are sampled again, with the same result.
        first, sampled = carry
        part = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, first, count), rows)
        sampled = jax.tree.map(
            lambda rows, new: jax.lax.dynamic_update_slice_in_dim(rows, new, first, 0), sampled, result_of(*part)
        )
        return first + count, sampled

    return jax.lax.while_loop(lambda carry: carry[0] < plan.num_rows, body, (jnp.int32(0), empty_sample(shapes)))[1]


def head(model, hidden: Array, plan: StepPlan, shapes: Shapes) -> Array:
    """Logits of each row for the part of the vocabulary that is here, f32[row, vocab]. The head runs on rows in use and
    on no other tokens."""
    embed = model.embed

    def logits_of(rows: int) -> Array:
        return model.logits(hax.named(hidden[:rows], (ROW, embed)), plan.num_rows).rearrange((ROW, ...)).array

    zeros = jnp.zeros((shapes.max_rows, model.vocab.part_size), jnp.float32)
    return model.backend.bucketed(logits_of, plan.num_rows, shapes.row_buckets, zeros)


def empty_sample(shapes: Shapes) -> SampleOutput:
    rows, top = shapes.max_rows, shapes.limits.max_logprobs
    return SampleOutput(
        tokens=jnp.zeros(rows, jnp.int32),
        logprobs=jnp.zeros(rows, jnp.float32),
        processed_logprobs=jnp.zeros(rows, jnp.float32),
        top_ids=jnp.zeros((rows, top), jnp.int32),
        top_logprobs=jnp.zeros((rows, top), jnp.float32),
        finite=jnp.ones(rows, jnp.bool_),
        candidates=no_candidates(rows, shapes.max_beams, shapes.limits) if shapes.max_beams else None,
    )


def batch_info(state: DecodeState, plan: StepPlan, shapes: Shapes) -> PageBatchInfo:
    """The plan as the model sees it, in the largest bucket."""
    table, size = state.sequences, shapes.page_size
    slots, bounds = plan.slot_ids, plan.cu_q_lens
    row, item, valid = ragged_index(bounds[1:] - bounds[:-1], jnp.int32(0), shapes.buckets[-1])
    slot = slots.at[row].get(mode="fill", fill_value=table.num_slots)
    computed = table.num_computed.array
    position = jnp.where(valid, computed.at[slot].get(mode="fill", fill_value=0) + item, 0)
    page = table.page_indices.array.at[slot, page_of(position, size)].get(mode="fill", fill_value=shapes.num_pages)
    dests = jnp.where(valid, page * size + offset_of(position, size), shapes.num_pages * size)
    seq_lens = (computed + plan.take).at[slots].get(mode="fill", fill_value=0)
    page_indices = table.page_indices.array.at[slots].get(mode="fill", fill_value=shapes.num_pages)
    return PageBatchInfo(
        tokens=hax.named(table.tokens.array.at[slot, position].get(mode="fill", fill_value=0), (TOKEN,)),
        positions=hax.named(position, (TOKEN,)),
        slot_ids=hax.named(slots, (ROW,)),
        cu_q_lens=hax.named(bounds, (ROW_BOUND,)),
        seq_lens=hax.named(seq_lens, (ROW,)),
        page_indices=hax.named(page_indices, (ROW, SEQ_PAGE)),
        num_seqs=scalar(plan.num_rows),
        new_token_dests=hax.named(dests, (TOKEN,)),
        page_size=size,
    )


def append(
    state: DecodeState, ring: OutputRing, plan: StepPlan, sampled: SampleOutput, shapes: Shapes
) -> tuple[DecodeState, OutputRing]:
    """Store the sampled tokens, end the sequences that are done, give back their pages, and start forks."""
    table = state.sequences
    num_slots = table.num_slots
    computed = table.num_computed.array + plan.take
    slots = plan.slot_ids
    lens = table.seq_lens.array.at[slots].get(mode="fill", fill_value=0)
    samples = (computed.at[slots].get(mode="fill", fill_value=0) == lens) & (slots < num_slots)
    room = table.max_lens.array.at[slots].get(mode="fill", fill_value=0) - lens
    failed = samples & ~sampled.finite
    emits = samples & sampled.finite & (room > 0)  # a prompt may be there to be scored alone
    ends = samples & (room <= 1)
    searches = jnp.zeros_like(emits)
    if state.beams is not None:
        searches = samples & state.beams.searches.at[slots].get(mode="fill", fill_value=False)
        emits, ends = emits & ~searches, ends & ~searches

    writer = jnp.where(emits, slots, num_slots)
    tokens = table.tokens.array.at[writer, lens].set(sampled.tokens, mode="drop")
    seq_lens = table.seq_lens.array.at[writer].add(1, mode="drop")
    stopped = emits & _stops(state, tokens, slots, lens + 1, shapes)
    reason = jnp.where(failed, ERROR, jnp.where(stopped, STOP, LENGTH)).astype(jnp.int32)
    done = failed | stopped | ends
    finished = jnp.zeros(num_slots, jnp.bool_).at[slots].set(done, mode="drop")
    reasons = jnp.zeros(num_slots, jnp.int32).at[slots].set(reason, mode="drop")
    if state.beams is not None:
        broken = fail_together(state.beams, finished & (reasons == ERROR))
        finished, reasons = finished | broken, jnp.where(broken, ERROR, reasons)
        searches = searches & ~broken.at[slots].get(mode="fill", fill_value=False)

    q_lens = plan.cu_q_lens[1:] - plan.cu_q_lens[:-1]
    num_chunk_tokens = jnp.sum(jnp.where(q_lens > 1, q_lens, 0), dtype=jnp.int32)
    context_pages = jnp.where(plan.take > 0, pages_for(computed, shapes.page_size), 0)
    counters = state.counters
    filled = page_of(computed, shapes.page_size) - page_of(table.num_computed.array, shapes.page_size)
    counters = replace(
        counters,
        prefix_misses=counters.prefix_misses.array + jnp.sum(jnp.where(plan.take > 1, filled, 0), dtype=jnp.int32),
        steps=counters.steps.array + 1,
        generated=counters.generated.array + jnp.sum(emits | searches, dtype=jnp.int32),
        prompt_tokens=counters.prompt_tokens.array + num_chunk_tokens,
        prompt_steps=counters.prompt_steps.array + (num_chunk_tokens > 0).astype(jnp.int32),
        pages_touched=counters.pages_touched.array + jnp.sum(context_pages, dtype=jnp.int32),
    )
    table = replace(table, tokens=tokens, seq_lens=seq_lens, num_computed=computed)
    state = eqx.tree_at(lambda s: (s.sequences, s.counters), state, (table, counters))
    registered = filled if shapes.scoring is None else jnp.where(registers(state), filled, 0)
    state = insert_prefix(state, shapes, registered, finished & (reasons == ERROR))
    ring = ring.push(emits, slots, sampled)
    if sampled.candidates is not None:
        state, ended, found = search(state, shapes, slots, searches, sampled.candidates)
        finished, reasons = finished | ended, jnp.where(ended, found, reasons)
    if shapes.admission == AdmissionPolicy.EXPECTED:
        state = expect(state, finished & (reasons != ERROR))
    state = fork_when_ready(state)
    return free_pages_for_finished(state, finished, reasons), ring


def _stops(state: DecodeState, tokens: Array, slots: Array, lens: Array, shapes: Shapes) -> Array:
    """Which rows have just completed one of their stop token sequences, bool[row].

    Only generated tokens count: a stop sequence never matches across the end of the prompt.
    """
    table, sampling = state.sequences, state.sampling.rows(slots)
    width = shapes.limits.max_stop_tokens
    prompt_lens = table.prompt_lens.array.at[slots].get(mode="fill", fill_value=0)[:, None]
    position = lens[:, None] - width + jnp.arange(width, dtype=jnp.int32)[None, :]
    column = jnp.where(position >= prompt_lens, position, table.max_seq_len)
    window = tokens.at[slots[:, None], column].get(mode="fill", fill_value=shapes.limits.vocab_size)
    enough = (lens - prompt_lens[:, 0]) >= sampling.min_tokens.array
    return stop_match(sampling.stop_ids.array, sampling.stop_lens.array, window, enough)


def _compact(source: Array, target: Array, shapes: Shapes) -> tuple[Array, Array]:
    """The pairs to copy at the front of arrays of `max_seqs` entries: only sequences that run write anything."""
    used = target < shapes.num_pages
    place = jnp.where(used, jnp.cumsum(used, dtype=jnp.int32) - 1, shapes.max_seqs)
    none = jnp.full(shapes.max_seqs, shapes.num_pages, jnp.int32)
    return none.at[place].set(source, mode="drop"), none.at[place].set(target, mode="drop")
