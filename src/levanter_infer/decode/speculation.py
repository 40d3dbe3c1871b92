"""Speculative decoding by prompt lookup: a sequence's own tokens propose its next ones, and the step verifies them.

Where the last tokens of a sequence have occurred in it before, the tokens that followed them there are the *draft*.
The step computes the draft behind the token that it has to compute anyway, each token as a row of its own, and samples
at each position with the random numbers of that position. The draft is accepted as far as it is what was sampled, and
the first token that differs is the sampled one. So no token depends on the drafts: with `numerics: batch_invariant` the
tokens are, to the bit, those without speculation. There is no rejection sampling, which keeps a distribution and not
the tokens.

A draft has no more tokens than the match that it follows: while a text is copied, it grows with each step, and where
only a phrase occurs again, little is rejected.

A draft takes nothing from anyone: it ends with the page of the token before it, so that it needs no page, and there are
drafts only as long as the step has few rows (`Platform.draft_rows`), for which it reads all weights in any case. What a
rejected draft has stored is overwritten by the tokens that come in its place, and nothing remembers it.

Source: Saxena, Prompt Lookup Decoding (2023); the verification is Leviathan et al., arXiv:2211.17192, for a draft that
is certain.
"""

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.arrays import cumsum, full, gather, replace, scatter
from levanter_infer.cache.page_math import offset_of
from levanter_infer.decode.shapes import Shapes, SpeculationShapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.kernels import scopes
from levanter_infer.kernels.loops import run_if


def propose(state: DecodeState, shapes: Shapes, take: Array) -> tuple[DecodeState, Array | None]:
    """Draft tokens for the sequences that decode, written behind their known tokens.

    Args: take: i32[seq], the tokens that the step computes in any case.
    Returns: the new state, and the number of draft tokens of each slot, i32[seq]; None: there is no speculation.
    """
    sizes = shapes.speculation
    if sizes is None:
        return state, None
    most, most_rows = _most_drafts(state, shapes, sizes, take), min(sizes.rows, shapes.max_rows)
    rows, tokens = jnp.sum(take > 0, dtype=jnp.int32), jnp.sum(take, dtype=jnp.int32)
    # A step with prompt chunks keeps its bucket, and one without has all rows.
    buckets = jnp.asarray([size for size in shapes.buckets if size >= shapes.max_rows], jnp.int32)
    bucket = jnp.min(jnp.where(buckets >= tokens, buckets, shapes.buckets[-1]))
    spare = jnp.minimum(most_rows - rows, bucket - tokens)

    def look_up(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens, _ = carry
        slots = _first_slots(most > 0, min(most_rows, shapes.max_seqs))
        known, own = gather(tokens, slots, 0), gather(most, slots, 0)
        lens = gather(state.sequences.seq_lens, slots, 0)
        matched, draft = lookup(known, lens, sizes)
        own = jnp.minimum(own, matched)
        found = own > 0
        rank, count = cumsum(found), jnp.maximum(jnp.sum(found, dtype=jnp.int32), 1)
        share = spare // count + (rank <= spare % count).astype(jnp.int32)
        own = jnp.minimum(own, share)
        place = jnp.arange(sizes.num_tokens, dtype=jnp.int32)[None, :]
        row = jnp.where(place < own[:, None], slots[:, None], shapes.num_slots)
        tokens = scatter(tokens, (row, lens[:, None] + place), draft)
        return tokens, scatter(jnp.zeros(shapes.num_slots, jnp.int32), slots, own)

    nothing = state.sequences.tokens, full(shapes.num_slots, 0)
    with jax.named_scope(scopes.SPECULATION):
        known, drafts = run_if((spare > 0) & jnp.any(most > 0), look_up, nothing)
    return replace(state, sequences=replace(state.sequences, tokens=known)), drafts


def _most_drafts(state: DecodeState, shapes: Shapes, sizes: SpeculationShapes, take: Array) -> Array:
    """Draft tokens that each slot can have, i32[seq]: of those that decode, within their page and their length. Beams
    have none, nor has a sequence whose next mask the host writes."""
    table = state.sequences
    decodes = state.beams.sampling((take == 1) & (table.seq_lens - table.num_computed == 1))
    if state.constraints is not None:
        decodes &= ~state.constraints.guided
    of_page = shapes.page_size - 1 - offset_of(table.num_computed, shapes.page_size)
    of_length = table.max_lens - table.seq_lens - 1  # one more is sampled behind the draft
    most = jnp.minimum(jnp.minimum(of_page, of_length), sizes.num_tokens)
    return jnp.where(decodes, jnp.maximum(most, 0), 0)


def _first_slots(mask: Array, count: int) -> Array:
    """The first `count` slots of a mask bool[seq], i32[count]; absent ones where there are fewer."""
    num_slots = mask.shape[0]
    place = jnp.where(mask, cumsum(mask) - 1, count)
    return scatter(full(count, num_slots), place, jnp.arange(num_slots, dtype=jnp.int32))


def lookup(tokens: Array, lens: Array, sizes: SpeculationShapes) -> tuple[Array, Array]:
    """For each row, the number of its last tokens that have occurred before, and the tokens that followed them: the
    longest such match, and the latest of equally long ones.

    A draft that reaches the end of the known tokens goes on with its own first tokens, like a text that repeats itself.

    Args: tokens: i32[row, position]; lens: i32[row], the known ones.
    Returns: i32[row], at most `sizes.lookup_max` tokens, and 0 for fewer than `sizes.lookup_min`; i32[row, num_tokens].
    """
    (num_rows, size), most = tokens.shape, sizes.lookup_max
    position, row = jnp.arange(size, dtype=jnp.int32)[None, :], jnp.arange(num_rows, dtype=jnp.int32)
    goes_on = jnp.broadcast_to(position < lens[:, None] - 1, tokens.shape)
    before, matched = jnp.pad(tokens, ((0, 0), (most, 0)), constant_values=-1), jnp.zeros_like(tokens)
    for back in range(most):
        last = gather(tokens, (row, jnp.maximum(lens - 1 - back, 0)), 0)
        goes_on &= before[:, most - back : most - back + size] == last[:, None]
        matched += goes_on.astype(jnp.int32)
    best = jnp.max(matched, axis=1)
    end = jnp.max(jnp.where(matched == best[:, None], position, -1), axis=1)
    period = jnp.maximum(lens - 1 - end, 1)
    place = jnp.arange(sizes.num_tokens, dtype=jnp.int32)[None, :]
    draft = jnp.take_along_axis(tokens, (end + 1)[:, None] + place % period[:, None], axis=1, mode="clip")
    return jnp.where(best >= sizes.lookup_min, best, 0), draft


def row_states(state: DecodeState, slots: Array, ahead: Array | None, shapes: Shapes) -> Array | None:
    """The state of the automaton that constrains each row, i32[row]: that of its slot, moved on by the draft tokens
    before the row. None: no request is constrained.

    Args: slots, ahead: i32[row], as in `StepPlan`.
    """
    constraints, table, sizes = state.constraints, state.sequences, shapes.speculation
    if constraints is None:
        return None
    states, lens = gather(constraints.states, slots, 0), gather(table.seq_lens, slots, 0)
    if sizes is None or ahead is None:
        return states

    def behind_drafts(states: Array) -> Array:
        for place in range(sizes.num_tokens):
            token = gather(table.tokens, (slots, lens + place), 0)
            states = jnp.where(ahead > place, constraints.following(slots, states, token), states)
        return states

    has_automaton = constraints.automata < constraints.num_automata
    moves = (ahead > 0) & gather(has_automaton, slots, False)
    return run_if(jnp.any(moves), behind_drafts, states)


def reached(agrees: Array, ahead: Array) -> Array:
    """The rows whose draft is accepted up to them, bool[row].

    Args:
        agrees: bool[row], whether the sampled token is the next one of the draft, and does not end the sequence.
        ahead: i32[row], draft tokens before the row's token; the rows of a sequence follow one another.
    """
    differs = (~agrees).astype(jnp.int32)
    before = cumsum(differs) - differs
    first = jnp.arange(ahead.shape[0], dtype=jnp.int32) - ahead
    return before == gather(before, first, 0)
