"""Beam search: one step of all groups whose beams have sampled.

As in HF transformers: of all continuations of all beams, the best that do not end continue, as many as there are beams;
those among the best that end compete with the hypotheses found so far. Ties go to the earlier beam, and within a beam
to the continuation that does not end, the smaller token id first.
Source: `GenerationMixin._beam_search`, transformers 4.57.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import cumsum, gather, replace, scatter, scatter_add
from levanter_infer.decode.beam_table import BeamTable
from levanter_infer.decode.codes import EARLY, IMPOSSIBLE, LENGTH, NEVER, NOT_FINISHED, STOP
from levanter_infer.decode.resampling import moved_rows, resample
from levanter_infer.decode.sampling import BeamCandidates
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.kernels.loops import run_if


class _Groups(NamedTuple):
    """The groups that take a step; absent slots are `num_slots`."""

    members: Array
    """i32[group, beam], slots."""
    widths: Array
    """i32[group]"""
    lens: Array
    """i32[group], tokens of each of its beams."""
    generated: Array
    """i32[group], generated tokens of each beam, with the one that this step adds."""
    at_end: Array
    """bool[group], whether the length limit is reached with it."""


class _Choice(NamedTuple):
    """Continuations; arrays are [group, beam]."""

    scores: Array
    beams: Array
    """The beam that is continued."""
    tokens: Array
    logprobs: Array
    stops: Array
    """Whether the token ends the sequence."""


class BeamRows(NamedTuple):
    """The rows of beams that sample in a step."""

    slots: Array
    """i32[row]"""
    samples: Array
    """bool[row]; with one beam all of its group."""
    candidates: BeamCandidates | None
    """Continuations that each row offers; None: no request has asked for beam search."""


def search(
    state: DecodeState, shapes: Shapes, rows: BeamRows, finished: Array, reasons: Array
) -> tuple[DecodeState, Array, Array, Array]:
    """Continue the searches whose beams sample in this step.

    Args:
        finished, reasons: bool[seq] and i32[seq], slots that end.
    Returns: the new state, `finished` and `reasons` with the groups that have ended, and the slot that each slot goes
        on from, i32[seq]: where that is another one, a beam continues it.
    """
    num_slots = state.sequences.num_slots
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    if rows.candidates is None:
        return state, finished, reasons, slots

    def step(carry):
        table, page_table, windows, beams, *_ = carry
        before = replace(state, sequences=table, page_table=page_table, windows=windows, beams=beams)
        after, ended, ancestors = _step(before, shapes, rows)
        found = _beams(after).found_reasons
        # Without any possible token there are fewer hypotheses than beams
        found = jnp.where(found == NOT_FINISHED, IMPOSSIBLE, found)
        return after.sequences, after.page_table, after.windows, after.beams, ended, found, ancestors

    none, nothing = jnp.zeros(num_slots, jnp.bool_), jnp.zeros(num_slots, jnp.int32)
    carry = (state.sequences, state.page_table, state.windows, state.beams, none, nothing, slots)
    table, page_table, windows, beams, ended, found, ancestors = run_if(jnp.any(rows.samples), step, carry)
    state = replace(state, sequences=table, page_table=page_table, windows=windows, beams=beams)
    return state, finished | ended, jnp.where(ended, found, reasons), ancestors


def _beams(state: DecodeState) -> BeamTable:
    assert isinstance(state.beams, BeamTable)
    return state.beams


def _step(state: DecodeState, shapes: Shapes, beam_rows: BeamRows) -> tuple[DecodeState, Array, Array]:
    """Returns: the new state, the slots of groups that have ended, bool[seq], and the ancestors of all slots."""
    beams, (slots, samples, candidates) = _beams(state), beam_rows
    assert candidates is not None
    num_rows, offered = candidates.ids.shape
    row_of = jnp.full(shapes.num_slots, num_rows, jnp.int32)
    row_of = scatter(row_of, jnp.where(samples, slots, shapes.num_slots), jnp.arange(num_rows, dtype=jnp.int32))
    groups = _groups(state, shapes, row_of < num_rows)
    members, width = groups.members, shapes.max_beams
    rows = gather(row_of, members, num_rows)

    def flat(values: Array, fill) -> Array:
        return gather(values, rows, fill).reshape(members.shape[0], width * offered)

    scores = gather(beams.scores, members, -jnp.inf)[:, :, None] + gather(candidates.scores, rows, -jnp.inf)
    scores = scores.reshape(members.shape[0], width * offered)
    ids, logprobs = flat(candidates.ids, 0), flat(candidates.logprobs, 0.0)
    stops = jnp.arange(width * offered, dtype=jnp.int32) % offered >= min(width, shapes.limits.vocab_size)

    def best(scores: Array) -> _Choice:
        values, place = jax.lax.top_k(scores, width)
        tokens, raw = (jnp.take_along_axis(values, place, axis=1) for values in (ids, logprobs))
        return _Choice(values, place // offered, tokens, raw, stops[place])

    ends, continues = best(scores), best(jnp.where(stops[None, :], -jnp.inf, scores))
    state = _found(state, groups, ends)
    done = _is_done(state, groups, continues.scores[:, 0])
    state, ancestors = _continue(state, groups, continues, ~done)
    ended = jnp.zeros(shapes.num_slots, jnp.bool_)
    return state, scatter(ended, jnp.where(done[:, None], members, shapes.num_slots), True), ancestors


def _groups(state: DecodeState, shapes: Shapes, takes_part: Array) -> _Groups:
    table, beams = state.sequences, _beams(state)
    num_groups, none = max(1, shapes.max_seqs // 2), shapes.num_slots
    places, leaders = beams.params.places, beams.params.leaders
    number = cumsum(takes_part & (places == 0)) - 1
    group = jnp.where(takes_part, gather(number, leaders, num_groups), num_groups)
    members = jnp.full((num_groups, shapes.max_beams), none, jnp.int32)
    members = scatter(members, (group, places), jnp.arange(none, dtype=jnp.int32))
    first = members[:, 0]
    lens = gather(table.seq_lens, first, 0)
    return _Groups(
        members=members,
        widths=gather(beams.params.widths, first, 0),
        lens=lens,
        generated=lens + 1 - gather(table.prompt_lens, first, 0),
        at_end=lens + 1 >= gather(table.max_lens, first, 0),
    )


def _found(state: DecodeState, groups: _Groups, ends: _Choice) -> DecodeState:
    """Add continuations that end to the hypotheses, if they score better."""
    table, beams, members = state.sequences, _beams(state), groups.members
    running = (table.tokens, beams.logprobs)
    width = members.shape[1]
    considered = jnp.arange(width, dtype=jnp.int32)[None, :] < groups.widths[:, None]
    hits = (ends.stops | groups.at_end[:, None]) & considered
    length = jnp.power(groups.generated.astype(jnp.float32), gather(beams.params.length_penalty, members[:, 0], 0.0))
    fresh = jnp.where(hits, ends.scores / length[:, None], -jnp.inf)
    old = gather(beams.found_scores, members, -jnp.inf)
    scores, kept = jax.lax.top_k(jnp.concatenate([old, fresh], axis=1), width)
    is_new, kept = kept >= width, kept % width

    def of_new(values: Array) -> Array:
        return jnp.take_along_axis(values, kept, axis=1)

    def of_old(array: Array) -> Array:
        return of_new(gather(array, members, 0))

    slots = jnp.arange(table.num_slots, dtype=jnp.int32)
    continued = jnp.take_along_axis(members, of_new(ends.beams), axis=1)
    source = jnp.where(is_new, table.num_slots + continued, of_new(members))
    sources = scatter(slots, members, source)
    last = jnp.where(is_new, groups.lens[:, None], table.max_seq_len)

    def enter(rows):
        longest = jnp.max(groups.lens)
        return tuple(
            scatter(moved_rows(found, sources, longest, others), (members, last), of_new(new))
            for found, others, new in zip(rows, running, (ends.tokens, ends.logprobs), strict=True)
        )

    rows = (beams.found_tokens, beams.found_logprobs)
    tokens, logprobs = run_if(jnp.any(is_new & (members < table.num_slots)), enter, rows)
    lens = jnp.where(is_new, groups.lens[:, None] + 1, of_old(beams.found_lens))
    reasons = jnp.where(of_new(ends.stops), STOP, LENGTH)
    reasons = jnp.where(is_new, reasons, of_old(beams.found_reasons)).astype(jnp.int32)
    beams = replace(
        beams,
        found_tokens=tokens,
        found_logprobs=logprobs,
        found_lens=scatter(beams.found_lens, members, lens),
        found_scores=scatter(beams.found_scores, members, scores),
        found_reasons=scatter(beams.found_reasons, members, reasons),
    )
    return replace(state, beams=beams)


def _is_done(state: DecodeState, groups: _Groups, best_running: Array) -> Array:
    """Groups that have ended, bool[group]; best_running: f32[group], the best score among the running beams."""
    table, beams, first = state.sequences, _beams(state), groups.members[:, 0]
    early = gather(beams.params.early_stopping, first, 0)
    penalty = gather(beams.params.length_penalty, first, 0.0)
    most = gather(table.max_lens - table.prompt_lens, first, 1)
    length = jnp.where((early == NEVER) & (penalty > 0), most, groups.generated)
    possible = best_running / jnp.power(length.astype(jnp.float32), penalty)
    worst = jnp.min(gather(beams.found_scores, groups.members, jnp.inf), axis=1)
    all_found = jnp.all(gather(beams.found_reasons, groups.members, STOP) != NOT_FINISHED, axis=1)
    return groups.at_end | ~(possible > worst) | ((early == EARLY) & all_found)


def _continue(state: DecodeState, groups: _Groups, continues: _Choice, stays: Array) -> tuple[DecodeState, Array]:
    """Continue the groups in the mask `stays`, bool[group], with their new beams and tokens.

    Returns: the new state, and the slot that each slot goes on from, i32[seq].
    """
    beams = _beams(state)
    num_slots = state.sequences.num_slots
    members = jnp.where(stays[:, None], groups.members, num_slots)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    continued = jnp.take_along_axis(groups.members, continues.beams, axis=1)
    continued = jnp.where(continued < num_slots, continued, groups.members)  # where nothing is possible
    ancestors = scatter(slots, members, continued)

    def put(array: Array, values) -> Array:
        return scatter(array, members, values)

    def add(array: Array, values: Array) -> Array:
        return scatter(array, (members, groups.lens[:, None]), values)

    state = resample(state, put(jnp.zeros(num_slots, jnp.bool_), True), ancestors)
    table = state.sequences
    table = replace(
        table,
        tokens=add(table.tokens, continues.tokens),
        seq_lens=scatter_add(table.seq_lens, members, 1),
    )
    logprobs = moved_rows(beams.logprobs, ancestors, jnp.max(groups.lens))
    beams = replace(beams, logprobs=add(logprobs, continues.logprobs), scores=put(beams.scores, continues.scores))
    return replace(state, sequences=table, beams=beams), ancestors
