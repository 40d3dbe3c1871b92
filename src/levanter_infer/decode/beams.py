"""Beam search: one step of all groups whose beams have sampled.

As in HF transformers: of all continuations of all beams the best that do not end go on, as many as there are beams;
those among the best that end compete with the hypotheses found so far. Equal scores go to the earlier beam, and within
a beam to what goes on, the smaller token id first.
Source: `GenerationMixin._beam_search`, transformers 4.57.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.named import replace
from levanter_infer.cache.page_table import run_if
from levanter_infer.decode.beam_table import BeamTable
from levanter_infer.decode.codes import EARLY, ERROR, LENGTH, NEVER, NOT_FINISHED, STOP
from levanter_infer.decode.resampling import moved_rows, resample
from levanter_infer.decode.sampling import BeamCandidates
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState


class _Groups(NamedTuple):
    """The groups that take a step; absent slots are `num_slots`."""

    members: Array
    """i32[group, beam], slots."""
    widths: Array
    """i32[group]"""
    lens: Array
    """i32[group], tokens of each of its beams."""
    generated: Array
    """i32[group], of them generated ones, with the one that this step adds."""
    at_end: Array
    """bool[group], whether there is no room for another token after it."""


class _Choice(NamedTuple):
    """Of [group, beam] each: continuations."""

    scores: Array
    beams: Array
    """The beam that is continued."""
    tokens: Array
    logprobs: Array
    stops: Array
    """Whether the token ends the sequence."""


def fail_together(beams: BeamTable, failed: Array) -> Array:
    """The slots in the mask `failed`, bool[seq], and those that search with one of them."""
    return failed | (beams.of_group(failed) > 0)


def search(
    state: DecodeState, shapes: Shapes, slots: Array, samples: Array, candidates: BeamCandidates
) -> tuple[DecodeState, Array, Array]:
    """Let the groups of the rows in the mask `samples` go on.

    Args:
        slots: i32[row]
        samples: bool[row]; with one beam all of its group.
        candidates: of the rows.
    Returns: the new state; the slots of groups that have ended, bool[seq]; the reasons of their hypotheses, i32[seq].
    """
    num_slots = state.sequences.num_slots

    def step(carry):
        table, page_table, beams, _, _ = carry
        before = dataclasses.replace(state, sequences=table, page_table=page_table, beams=beams)
        after, ended = _step(before, shapes, slots, samples, candidates)
        assert after.beams is not None
        reasons = after.beams.found_reasons.array
        # Without any possible token there are fewer hypotheses than beams
        reasons = jnp.where(reasons == NOT_FINISHED, ERROR, reasons)
        return after.sequences, after.page_table, after.beams, ended, reasons

    nobody, nothing = jnp.zeros(num_slots, jnp.bool_), jnp.zeros(num_slots, jnp.int32)
    carry = (state.sequences, state.page_table, state.beams, nobody, nothing)
    table, page_table, beams, ended, reasons = run_if(jnp.any(samples), step, carry)
    return dataclasses.replace(state, sequences=table, page_table=page_table, beams=beams), ended, reasons


def _step(state: DecodeState, shapes: Shapes, slots: Array, samples: Array, candidates: BeamCandidates):
    beams = state.beams
    assert beams is not None
    num_rows, offered = candidates.ids.shape
    row_of = jnp.full(shapes.num_slots, num_rows, jnp.int32)
    row_of = row_of.at[jnp.where(samples, slots, shapes.num_slots)].set(
        jnp.arange(num_rows, dtype=jnp.int32), mode="drop"
    )
    groups = _groups(state, shapes, row_of < num_rows)
    members, width = groups.members, shapes.max_beams
    rows = _at(row_of, members, num_rows)

    def flat(values: Array, fill) -> Array:
        return _at(values, rows, fill).reshape(members.shape[0], width * offered)

    scores = _at(beams.scores.array, members, -jnp.inf)[:, :, None] + _at(candidates.scores, rows, -jnp.inf)
    scores = scores.reshape(members.shape[0], width * offered)
    ids, logprobs = flat(candidates.ids, 0), flat(candidates.logprobs, 0.0)
    stops = jnp.arange(width * offered, dtype=jnp.int32) % offered >= min(width, shapes.limits.vocab_size)

    def best(scores: Array) -> _Choice:
        values, place = jax.lax.top_k(scores, width)
        tokens, raw = (jnp.take_along_axis(values, place, axis=1) for values in (ids, logprobs))
        return _Choice(values, place // offered, tokens, raw, stops[place])

    ends, goes_on = best(scores), best(jnp.where(stops[None, :], -jnp.inf, scores))
    state = _found(state, groups, ends)
    done = _is_done(state, groups, goes_on.scores[:, 0])
    state = _go_on(state, groups, goes_on, ~done)
    ended = jnp.zeros(shapes.num_slots, jnp.bool_)
    return state, ended.at[jnp.where(done[:, None], members, shapes.num_slots)].set(True, mode="drop")


def _groups(state: DecodeState, shapes: Shapes, takes_part: Array) -> _Groups:
    table, beams = state.sequences, state.beams
    assert beams is not None
    num_groups, none = max(1, shapes.max_seqs // 2), shapes.num_slots
    places, leaders = beams.params.places.array, beams.params.leaders.array
    number = jnp.cumsum(takes_part & (places == 0), dtype=jnp.int32) - 1
    group = jnp.where(takes_part, _at(number, leaders, num_groups), num_groups)
    members = jnp.full((num_groups, shapes.max_beams), none, jnp.int32)
    members = members.at[group, places].set(jnp.arange(none, dtype=jnp.int32), mode="drop")
    first = members[:, 0]
    lens = _at(table.seq_lens.array, first, 0)
    return _Groups(
        members=members,
        widths=_at(beams.params.widths.array, first, 0),
        lens=lens,
        generated=lens + 1 - _at(table.prompt_lens.array, first, 0),
        at_end=lens + 1 >= _at(table.max_lens.array, first, 0),
    )


def _found(state: DecodeState, groups: _Groups, ends: _Choice) -> DecodeState:
    """Enter continuations that end among the hypotheses, if they are better."""
    table, beams, members = state.sequences, state.beams, groups.members
    assert beams is not None
    running = (table.tokens.array, beams.logprobs.array)
    width = members.shape[1]
    considered = jnp.arange(width, dtype=jnp.int32)[None, :] < groups.widths[:, None]
    hits = (ends.stops | groups.at_end[:, None]) & considered
    length = jnp.power(groups.generated.astype(jnp.float32), _at(beams.params.length_penalty.array, members[:, 0], 0.0))
    fresh = jnp.where(hits, ends.scores / length[:, None], -jnp.inf)
    old = _at(beams.found_scores.array, members, -jnp.inf)
    scores, kept = jax.lax.top_k(jnp.concatenate([old, fresh], axis=1), width)
    is_new, kept = kept >= width, kept % width

    def of_new(values: Array) -> Array:
        return jnp.take_along_axis(values, kept, axis=1)

    def of_old(array: Array) -> Array:
        return of_new(_at(array, members, 0))

    slots = jnp.arange(table.num_slots, dtype=jnp.int32)
    continued = jnp.take_along_axis(members, of_new(ends.beams), axis=1)
    source = jnp.where(is_new, table.num_slots + continued, of_new(members))
    sources = slots.at[members].set(source, mode="drop")
    last = jnp.where(is_new, groups.lens[:, None], table.max_seq_len)

    def enter(rows):
        longest = jnp.max(groups.lens)
        return tuple(
            moved_rows(found, sources, longest, others).at[members, last].set(of_new(new), mode="drop")
            for found, others, new in zip(rows, running, (ends.tokens, ends.logprobs), strict=True)
        )

    rows = (beams.found_tokens.array, beams.found_logprobs.array)
    tokens, logprobs = run_if(jnp.any(is_new & (members < table.num_slots)), enter, rows)
    lens = jnp.where(is_new, groups.lens[:, None] + 1, of_old(beams.found_lens.array))
    reasons = jnp.where(of_new(ends.stops), STOP, LENGTH)
    reasons = jnp.where(is_new, reasons, of_old(beams.found_reasons.array)).astype(jnp.int32)
    beams = replace(
        beams,
        found_tokens=tokens,
        found_logprobs=logprobs,
        found_lens=beams.found_lens.array.at[members].set(lens, mode="drop"),
        found_scores=beams.found_scores.array.at[members].set(scores, mode="drop"),
        found_reasons=beams.found_reasons.array.at[members].set(reasons, mode="drop"),
    )
    return dataclasses.replace(state, beams=beams)


def _is_done(state: DecodeState, groups: _Groups, best_running: Array) -> Array:
    """Which groups have ended, bool[group]; best_running: f32[group], the best score that goes on."""
    table, beams, first = state.sequences, state.beams, groups.members[:, 0]
    assert beams is not None
    early = _at(beams.params.early_stopping.array, first, 0)
    penalty = _at(beams.params.length_penalty.array, first, 0.0)
    room = _at(table.max_lens.array - table.prompt_lens.array, first, 1)
    length = jnp.where((early == NEVER) & (penalty > 0), room, groups.generated)
    possible = best_running / jnp.power(length.astype(jnp.float32), penalty)
    worst = jnp.min(_at(beams.found_scores.array, groups.members, jnp.inf), axis=1)
    all_found = jnp.all(_at(beams.found_reasons.array, groups.members, STOP) != NOT_FINISHED, axis=1)
    return groups.at_end | ~(possible > worst) | ((early == EARLY) & all_found)


def _go_on(state: DecodeState, groups: _Groups, goes_on: _Choice, stays: Array) -> DecodeState:
    """Let the slots of the groups in the mask `stays`, bool[group], go on with their new beams and tokens."""
    beams = state.beams
    assert beams is not None
    num_slots = state.sequences.num_slots
    members = jnp.where(stays[:, None], groups.members, num_slots)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    continued = jnp.take_along_axis(groups.members, goes_on.beams, axis=1)
    continued = jnp.where(continued < num_slots, continued, groups.members)  # where nothing is possible
    ancestors = slots.at[members].set(continued, mode="drop")

    def put(array: Array, values) -> Array:
        return array.at[members].set(values, mode="drop")

    def add(array: Array, values: Array) -> Array:
        return array.at[members, groups.lens[:, None]].set(values, mode="drop")

    state = resample(state, put(jnp.zeros(num_slots, jnp.bool_), True), ancestors)
    table = state.sequences
    table = replace(
        table,
        tokens=add(table.tokens.array, goes_on.tokens),
        seq_lens=table.seq_lens.array.at[members].add(1, mode="drop"),
    )
    logprobs = moved_rows(beams.logprobs.array, ancestors, jnp.max(groups.lens))
    beams = replace(beams, logprobs=add(logprobs, goes_on.logprobs), scores=put(beams.scores.array, goes_on.scores))
    return dataclasses.replace(state, sequences=table, beams=beams)


def _at(array: Array, index: Array, fill) -> Array:
    """`array[index]` along the first axis; `fill` where the index is absent."""
    return array.at[index].get(mode="fill", fill_value=fill)
