"""One step of all running sequences: schedule, copy on write, forward, sample, append."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.axes import ROW, ROW_BOUND, SEQ_PAGE, TOKEN
from levanter_infer.cache.arrays import cumsum, gather, replace, scatter, scatter_add
from levanter_infer.cache.batch_info import PageBatchInfo, WindowBatch
from levanter_infer.cache.cache import Cache
from levanter_infer.cache.page_math import offset_of, page_of, pages_for
from levanter_infer.cache.page_table import ragged_index
from levanter_infer.cache.score_pages import ScorePages
from levanter_infer.cache.window_pages import WindowPages
from levanter_infer.decode.admission_policy import update_length_estimate
from levanter_infer.decode.beams import BeamRows, search
from levanter_infer.decode.blocks import forward_in_blocks, logits_in_blocks
from levanter_infer.decode.codes import ERROR, IMPOSSIBLE, LENGTH, STOP, has_failed
from levanter_infer.decode.constraints import advanced, masks_of
from levanter_infer.decode.logits_mod import LogitsMod
from levanter_infer.decode.outputs import OutputRing
from levanter_infer.decode.paging import fork_origins, fork_when_ready, free_pages_for_finished, leave_behind
from levanter_infer.decode.prefix import insert_prefix
from levanter_infer.decode.routes import RouteTable
from levanter_infer.decode.sampling import (
    ChosenTokens,
    History,
    LogitStats,
    SampleOutput,
    choose,
    samples_whole_rows,
    stop_match,
)
from levanter_infer.decode.sampling_beams import candidates, no_candidates
from levanter_infer.decode.schedule import StepPlan, schedule
from levanter_infer.decode.scoring import copy_scores, keep_hidden, may_insert, num_hidden, score_prompts
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.snapshots import keep_states, restore_states, store_states
from levanter_infer.decode.speculation import reached
from levanter_infer.decode.state import Counters, DecodeState, GenState
from levanter_infer.kernels import scopes
from levanter_infer.kernels.loops import in_parts, run_bucket, run_if, turn_size
from levanter_infer.kernels.xla.backend import XLA
from levanter_infer.layers.attention import AttentionSpec


class StateMoves(NamedTuple):
    """Copies of states of fixed size at the end of a step."""

    kept: Array | None
    """The result of `keep_states`."""
    origins: Array
    """i32[seq], the slot that each slot goes on from: another one for a fork that has started, and for a beam that
    continues another."""


_COPIED = 16
"""Pages that are copied on write at once, where turns cost little: some forks write in a step, seldom all sequences."""


def step(model, state: GenState, ring: OutputRing, shapes: Shapes, attention: AttentionSpec):
    """Run one step of all running sequences: schedule, copy on write, forward, sample, append.

    Beam search, prompt scoring and KV offload each stand behind one seam (`beam_table.NoBeams`, `scoring`,
    `kv_offload`), which does nothing where no request uses them.

    Returns: the new state and ring.
    """
    with jax.named_scope(scopes.SCHEDULE):
        decode, plan, source, target = schedule(state.decode, shapes)
    with jax.named_scope(scopes.COPIES):
        cache, scores = copy_on_write(replace(state, decode=decode), source, target, shapes)
        cache = restore_states(cache, plan.states)
    cache, routes, hidden = forward(model, decode, cache, state.routes, plan, shapes, attention)
    with jax.named_scope(scopes.SCORING):
        scores, hidden = score_prompts(model, decode, scores, hidden, plan, shapes)
    with jax.named_scope(scopes.SAMPLING):
        sampled = sample_rows(model, decode, hidden, plan, shapes, state.logits_mod)
    with jax.named_scope(scopes.APPEND):
        logits_mod = remembered(state.logits_mod, decode, plan, sampled)
        decode, ring, moves = append(decode, ring, plan, sampled, shapes, model.backend.put_numbers)
    with jax.named_scope(scopes.COPIES):
        cache = copy_states(*store_states(cache, moves.kept, moves.origins))
    return GenState(decode, cache, scores, routes, logits_mod), ring


def copy_states(cache: Cache, origins: Array) -> Cache:
    """Give each slot the state of the slot that it goes on from, i32[seq], where layers remember one: forks and beams
    go on from others."""
    if not cache.has_slots:
        return cache
    num_slots = origins.shape[0]
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    moves = origins != slots
    target = jnp.where(moves, slots, num_slots)
    return run_if(jnp.any(moves), lambda cache: cache.copy_slots(origins, target), cache)


def copy_on_write(state: GenState, source: Array, target: Array, shapes: Shapes) -> tuple[Cache, ScorePages | None]:
    """Copy the pages `source` to `target`, i32[seq] each, with their scores; absent pairs are ignored.

    Args: state: with the tables in which the targets are allocated.
    """

    def copy_part(pools: tuple[Cache, ScorePages | None], part: Array):
        cache, scores = pools
        pairs = part[:, 0], part[:, 1]
        # A copied page keeps its window page at least until the next step allocates some.
        of_windows = [(each.of(pairs[0]), each.of(pairs[1])) for each in state.decode.windows]
        return cache.copy_pages([pairs, *of_windows]), copy_scores(scores, *pairs)

    def copied(pools: tuple[Cache, ScorePages | None]):
        pairs = jnp.stack(_compact(source, target, shapes), axis=1)
        count = jnp.sum(target < shapes.num_pages, dtype=jnp.int32)
        return in_parts(copy_part, pools, pairs, count, shapes.num_pages, turn_size(_COPIED, pairs.shape[0]))

    copies = jnp.any(target < shapes.num_pages)
    return run_if(copies, copied, (state.cache, state.scores))


def forward(
    model,
    state: DecodeState,
    cache: Cache,
    routes: RouteTable | None,
    plan: StepPlan,
    shapes: Shapes,
    attention: AttentionSpec,
):
    """Compute the plan's tokens in the smallest bucket that holds them, or in blocks of a fixed size.

    A `lax.switch` would copy the pools at every step on a CPU; `run_bucket` does without.

    Returns: the cache with the new tokens, the table with their experts, and the hidden states that
        `scoring.keep_hidden` keeps.
    """
    embed = model.embed
    hidden = jnp.zeros((num_hidden(shapes), embed.size), model.activation_dtype)
    whole = batch_info(state, plan, shapes)
    snapshots, cache = cache.snapshots, cache.with_snapshots(())

    def compute(batch: PageBatchInfo, cache: Cache, routes: RouteTable | None):
        if routes is None:
            states, cache = model.hidden(batch, cache, attention)
        else:
            states, cache, chosen = model.routed(batch, cache, attention)
            routes = routes.write(batch, chosen)
        return cache, routes, keep_hidden(states.rearrange((TOKEN, embed)).array, batch.cu_q_lens.array, shapes)

    if shapes.block_tokens is not None:
        cache, routes, hidden = forward_in_blocks(compute, whole, (cache, routes, hidden), shapes)
        return cache.with_snapshots(snapshots), routes, hidden

    def run(bucket: int, carry):
        cache, routes, hidden = carry
        cache, routes, states = compute(whole.first(bucket, shapes.rows(bucket)), cache, routes)
        return cache, routes, hidden.at[: states.shape[0]].set(states)

    carry = cache, routes, hidden
    cache, routes, hidden = run_bucket(plan.num_tokens, shapes.buckets, scopes.forward, run, carry)
    return cache.with_snapshots(snapshots), routes, hidden


def sample_rows(
    model, state: DecodeState, hidden: Array, plan: StepPlan, shapes: Shapes, logits_mod: LogitsMod | None = None
) -> SampleOutput:
    """Logits and a sampled token of each row, from the hidden states [row, embed] of the rows' last tokens.

    The last row may be a prompt that goes on in the next step: its sample is not used.
    """
    logits = head(model, hidden, plan, shapes)
    table = state.sequences
    count, states = shapes.sampled_rows, plan.automaton_states
    stats = LogitStats.of_kernel(model.backend, logits, plan.num_rows, model.vocab)

    def history_of(slots: Array, lens: Array) -> History:
        prompt_lens = gather(table.prompt_lens, slots, 0)
        return History(positions=lens, tokens=table.tokens, slot_ids=slots, prompt_lens=prompt_lens, seq_lens=lens)

    def chosen_of(
        logits: Array, slots: Array, lens: Array, states: Array | None, stats: LogitStats | None, modified=None
    ) -> ChosenTokens:
        return choose(
            logits,
            state.sampling.rows(slots),
            history_of(slots, lens),
            max_top=shapes.limits.max_logprobs,
            stats=stats,
            vocab=model.vocab,
            backend=model.backend,
            modified=modified,
            masks=masks_of(state.constraints, slots, states),
        )

    def result_of(
        logits: Array, slots: Array, lens: Array, states: Array | None, stats: LogitStats | None
    ) -> SampleOutput:
        asked, history = state.sampling.rows(slots), history_of(slots, lens)
        modified, memory, finite = None, None, True
        if logits_mod is not None:
            of_mod = (slots, table.tokens, history.prompt_lens, history.seq_lens)
            modified, memory, finite = logits_mod(logits, *of_mod, model.vocab)
        sampled = chosen_of(logits, slots, lens, states, stats, modified).sampled()
        offered = candidates(state.beams, logits, asked, history, stats, model.vocab, max_beams=shapes.max_beams)
        return dataclasses.replace(sampled, finite=sampled.finite & finite, candidates=offered, memory=memory)

    lens = plan.of_rows(table.seq_lens)
    rows = (logits, plan.slot_ids, lens, states, stats)
    if count is None:
        return result_of(*rows)
    needs_copies = logits_mod is not None or shapes.max_beams > 0  # copies of logits, made of few rows at a time
    at_once = not needs_copies and stats is not None and samples_whole_rows(model.backend, logits, model.vocab)
    chosen = chosen_of(*rows) if at_once else None

    def body(carry):
        # A slice that would pass the end starts earlier, and some rows are sampled again, with the same result.
        first, sampled = carry

        def part(arrays):
            return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, first, count), arrays)

        # Of more rows than a vector holds, XLA may round the logarithm in a log probability by the place of the row.
        new = result_of(*part(rows)) if chosen is None else part(chosen).sampled()
        sampled = jax.tree.map(lambda rows, new: jax.lax.dynamic_update_slice_in_dim(rows, new, first, 0), sampled, new)
        return first + count, sampled

    nothing = dataclasses.replace(empty_sample(shapes), memory=logits_mod and logits_mod.of_rows(shapes.max_rows))
    return jax.lax.while_loop(lambda carry: carry[0] < plan.num_rows, body, (jnp.int32(0), nothing))[1]


def head(model, hidden: Array, plan: StepPlan, shapes: Shapes) -> Array:
    """Logits of each row for this device's part of the vocabulary, f32[row, vocab]. The head runs on used rows only."""
    embed = model.embed
    if shapes.block_tokens is not None:
        return logits_in_blocks(model, hidden, plan.num_rows, shapes.block_tokens)

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
        possible=jnp.ones(rows, jnp.bool_),
        candidates=no_candidates(rows, shapes.max_beams, shapes.limits),
    )


def batch_info(state: DecodeState, plan: StepPlan, shapes: Shapes) -> PageBatchInfo:
    """The plan as the model sees it, in the largest bucket."""
    table, size = state.sequences, shapes.page_size
    slots, bounds = plan.slot_ids, plan.cu_q_lens
    q_lens, begin = bounds[1:] - bounds[:-1], plan.of_rows(table.num_computed)
    row, item, valid = ragged_index(q_lens, jnp.int32(0), shapes.buckets[-1])
    slot = gather(slots, row, table.num_slots)
    position = jnp.where(valid, gather(begin, row, 0) + item, 0)
    page = gather(table.page_indices, (slot, page_of(position, size)), shapes.num_pages)
    dests = jnp.where(valid, page * size + offset_of(position, size), shapes.num_pages * size)
    page_indices = gather(table.page_indices, slots, shapes.num_pages)

    def of_window(each: WindowPages) -> WindowBatch:
        pages = each.seen_from(page_indices, begin, shapes.max_step_tokens)
        dests = jnp.where(valid, each.of(page) * size + offset_of(position, size), each.num_pages * size)
        return WindowBatch(hax.named(pages, (ROW, SEQ_PAGE)), hax.named(dests, (TOKEN,)))

    return PageBatchInfo(
        tokens=hax.named(gather(table.tokens, (slot, position), 0), (TOKEN,)),
        positions=hax.named(position, (TOKEN,)),
        slot_ids=hax.named(slots, (ROW,)),
        cu_q_lens=hax.named(bounds, (ROW_BOUND,)),
        seq_lens=hax.named(begin + q_lens, (ROW,)),
        page_indices=hax.named(page_indices, (ROW, SEQ_PAGE)),
        num_seqs=hax.named(plan.num_rows, ()),
        new_token_dests=hax.named(dests, (TOKEN,)),
        page_size=size,
        windows=tuple(of_window(each) for each in state.windows),
    )


def append(
    state: DecodeState,
    ring: OutputRing,
    plan: StepPlan,
    sampled: SampleOutput,
    shapes: Shapes,
    put: Callable[[Array, Array, Array, Array], Array] = XLA.put_numbers,
) -> tuple[DecodeState, OutputRing, StateMoves]:
    """Store the sampled tokens, end the sequences that are done, release their pages, and start forks.

    Args: put: `put_numbers` of the backend.
    Returns: the new state and ring, and what becomes of states of fixed size.
    """
    table = state.sequences
    num_slots = table.num_slots
    slots, lens = plan.slot_ids, plan.of_rows(table.seq_lens)
    samples = rows_that_sample(state, plan)
    left = gather(table.max_lens, slots, 0) - lens
    failed = samples & ~sampled.possible
    emits = samples & sampled.possible & (left > 0)  # a prompt may be scored without generating
    ends = samples & (left <= 1)
    emits, ends, searches = state.beams.rows_that_emit(slots, samples, (emits, ends))
    stopped = emits & _stops(state, slots, lens, sampled.tokens, shapes)
    done = failed | stopped | ends
    computed, writes = table.num_computed + plan.known, emits
    if plan.drafts is not None and plan.ahead is not None:
        has_more = plan.ahead < gather(plan.drafts, slots, 0)
        agrees = emits & ~done & has_more & (gather(table.tokens, (slots, lens), 0) == sampled.tokens)
        accepted = reached(agrees, plan.ahead)
        emits, done, agrees = emits & accepted, done & accepted, agrees & accepted
        computed = scatter_add(computed, jnp.where(agrees, slots, num_slots), 1)
        writes = emits & ~agrees  # a draft token that agrees is in the table

    writer = jnp.where(writes, slots, num_slots)
    tokens = put(table.tokens, writer, lens, sampled.tokens)
    seq_lens = scatter_add(table.seq_lens, jnp.where(emits, slots, num_slots), 1)
    failure = jnp.where(sampled.finite, IMPOSSIBLE, ERROR)
    reason = jnp.where(failed, failure, jnp.where(stopped, STOP, LENGTH)).astype(jnp.int32)
    ender = jnp.where(done, slots, num_slots)
    finished = scatter(jnp.zeros(num_slots, jnp.bool_), ender, done)
    reasons = scatter(jnp.zeros(num_slots, jnp.int32), ender, reason)
    searches, finished, reasons = state.beams.fail_together(slots, searches, finished, reasons)

    filled = page_of(computed, shapes.page_size) - page_of(table.num_computed, shapes.page_size)
    counters = _counted(state, plan, computed, filled, emits | searches)
    state = replace(
        state,
        sequences=replace(table, tokens=tokens, seq_lens=seq_lens, num_computed=computed),
        counters=counters,
        constraints=advanced(state.constraints, writer, plan.automaton_states, sampled.tokens),
    )
    state = leave_behind(state, table.num_computed)
    state = insert_prefix(state, shapes, may_insert(state, filled, shapes), finished & has_failed(reasons))
    ring = ring.push(emits, slots, sampled)
    state, kept = keep_states(state, shapes, plan.states, plan.take)
    beam_rows = BeamRows(slots, searches, sampled.candidates)
    state, finished, reasons, origins = search(state, shapes, beam_rows, finished, reasons)
    state = update_length_estimate(state, shapes, finished, reasons)
    before = state.sequences
    state = fork_when_ready(state, shapes)
    origins = fork_origins(before, state.sequences, origins)
    return free_pages_for_finished(state, finished, reasons), ring, StateMoves(kept, origins)


def rows_that_sample(state: DecodeState, plan: StepPlan) -> Array:
    """Rows of sequences whose last known token the step has computed, so that the next one is sampled, bool[row]."""
    table, slots = state.sequences, plan.slot_ids
    computed = gather(table.num_computed + plan.known, slots, 0)
    return (computed == gather(table.seq_lens, slots, 0)) & (slots < table.num_slots)


def remembered(
    logits_mod: LogitsMod | None, state: DecodeState, plan: StepPlan, sampled: SampleOutput
) -> LogitsMod | None:
    """State of a `logits_mod` after a step. Args: state: before the sampled tokens are stored."""
    if logits_mod is None:
        return None
    writer = jnp.where(rows_that_sample(state, plan), plan.slot_ids, state.sequences.num_slots)
    return logits_mod.remember(writer, sampled.memory)


def _counted(state: DecodeState, plan: StepPlan, computed: Array, filled: Array, generates: Array) -> Counters:
    """The counters after a step.

    Args:
        computed: i32[seq], tokens whose K/V are stored now.
        filled: i32[seq], pages that the step has filled.
        generates: bool[row].
    """
    size, known = state.page_table.page_size, plan.known
    num_chunk_tokens = jnp.sum(jnp.where(known > 1, known, 0), dtype=jnp.int32)
    context_pages = jnp.where(known > 0, pages_for(computed, size), 0)
    drafts = {}
    if plan.drafts is not None:
        accepted = jnp.sum(computed - state.sequences.num_computed - known, dtype=jnp.int32)
        drafts = {"draft_tokens": jnp.sum(plan.drafts, dtype=jnp.int32), "accepted_tokens": accepted}
    return state.counters.plus(
        **drafts,
        prefix_misses=jnp.sum(jnp.where(known > 1, filled, 0), dtype=jnp.int32),
        steps=jnp.int32(1),
        generated=jnp.sum(generates, dtype=jnp.int32),
        prompt_tokens=num_chunk_tokens,
        prompt_steps=(num_chunk_tokens > 0).astype(jnp.int32),
        pages_touched=jnp.sum(context_pages, dtype=jnp.int32),
    )


def _stops(state: DecodeState, slots: Array, lens: Array, newest: Array, shapes: Shapes) -> Array:
    """Rows that complete one of their stop token sequences with the `newest` token, behind `lens` others, bool[row].

    Only generated tokens count: a stop sequence never matches across the end of the prompt.
    """
    table, sampling = state.sequences, state.sampling.rows(slots)
    width = shapes.limits.max_stop_tokens
    prompt_lens = gather(table.prompt_lens, slots, 0)
    place = jnp.arange(width, dtype=jnp.int32)[None, :]

    def with_older(window: Array) -> Array:
        position = lens[:, None] - (width - 1) + place
        column = jnp.where(position >= prompt_lens[:, None], position, table.max_seq_len)
        older = gather(table.tokens, (slots[:, None], column), shapes.limits.vocab_size)
        return jnp.where(place == width - 1, window, older)

    # Most stop sequences are one token, and the others cost a gather of each number.
    window = jnp.where(place == width - 1, newest[:, None], shapes.limits.vocab_size)
    window = run_if(jnp.any(sampling.stop_lens > 1), with_older, window)
    enough = (lens + 1 - prompt_lens) >= sampling.min_tokens
    return stop_match(sampling.stop_ids, sampling.stop_lens, window, enough)


def _compact(source: Array, target: Array, shapes: Shapes) -> tuple[Array, Array]:
    """The pairs to copy at the front of arrays of `max_seqs` entries: only running sequences write."""
    used = target < shapes.num_pages
    place = jnp.where(used, cumsum(used) - 1, shapes.max_seqs)
    none = jnp.full(shapes.max_seqs, shapes.num_pages, jnp.int32)
    return scatter(none, place, source), scatter(none, place, target)
