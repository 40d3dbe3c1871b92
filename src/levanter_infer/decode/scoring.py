"""Log probabilities of prompts: each step scores the prompt tokens that it computes.

The score of a token is made of the hidden state of the one before it, which the same step has computed, or which was
kept with its page (`ScorePages.ends`). So scores are complete when keys and values are, however the prompt was cut into
chunks, found, copied or computed again.
"""

import haliax as hax
import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.axes import ROW
from levanter_infer.cache.named import replace
from levanter_infer.cache.page_math import pages_for
from levanter_infer.cache.page_table import ragged_index, run_if
from levanter_infer.cache.score_pages import ScorePages, pack_scores
from levanter_infer.decode.codes import is_scored_root
from levanter_infer.decode.packing import StepPlan
from levanter_infer.decode.paging import page_at
from levanter_infer.decode.sampling import LogitStats, likeliest, logprobs_of
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState

_TOKENS = 64
"""Tokens whose logits are there at once: 16 to 128 take a CPU equally long for each."""
_PAGES = 256
"""Pages whose scores are copied per trip: usually there is one trip."""


READ_PAGES = 256
"""Pages of scores that the host reads at once."""


def scored_slots(state: DecodeState) -> Array:
    """Whose prompts are scored, bool[seq]: of the samples of one request, the first one's."""
    return is_scored_root(state.sequences.roots.array) & (state.sampling.sample_index.array == 0)


def registers(state: DecodeState) -> Array:
    """Who may register the pages that it fills, bool[seq]: under a root of scored prompts, scored ones only."""
    table = state.sequences
    scored = scored_slots(state) & (table.num_computed.array <= table.prompt_lens.array)
    return scored | ~is_scored_root(table.roots.array)


def score_prompts(
    model, state: DecodeState, scores: ScorePages, hidden: Array, plan: StepPlan, shapes: Shapes
) -> ScorePages:
    """Score the prompt tokens of a step, and set aside the scores of prompts that it completes.

    Args:
        state: before the step's tokens count as computed.
        hidden: [token, embed] of the step's tokens.
    """
    rows = _Rows(state, plan)
    scores = _score_tokens(model, state, scores, hidden, plan, rows, shapes)
    scores = run_if(jnp.any(rows.active), lambda scores: _keep_ends(state, scores, hidden, plan, rows, shapes), scores)
    return _set_aside(state, scores, plan, rows)


class _Rows:
    """The step's rows with a prompt that is scored; i32[row] each, 0 for others."""

    def __init__(self, state: DecodeState, plan: StepPlan):
        table = state.sequences
        slots = plan.slot_ids

        def column(values: Array) -> Array:
            return values.at[slots].get(mode="fill", fill_value=0)

        self.begin = column(table.num_computed.array)
        """First position that the step computes."""
        self.prompt_lens = column(table.prompt_lens.array)
        end = self.begin + column(plan.take)
        scored = scored_slots(state).at[slots].get(mode="fill", fill_value=False)
        self.active = scored & (self.begin < self.prompt_lens) & (end > self.begin)
        self.end = jnp.where(self.active, jnp.minimum(end, self.prompt_lens), 0)
        """Behind the last position of the prompt that it computes."""


def _score_tokens(
    model, state: DecodeState, scores: ScorePages, hidden: Array, plan: StepPlan, rows: _Rows, shapes: Shapes
) -> ScorePages:
    """A few tokens at a time: there is never an array of all tokens and the vocabulary."""
    table, size = state.sequences, shapes.page_size
    first = jnp.maximum(rows.begin, 1)  # nothing stands before the first token of all
    counts = jnp.maximum(rows.end - first, 0)
    total = jnp.sum(counts, dtype=jnp.int32)
    ends = scores.ends.array

    def body(carry):
        start, stored = carry
        row, item, valid = ragged_index(counts, start, _TOKENS)

        def of_row(values: Array, fill: int = 0) -> Array:
            return values.at[row].get(mode="fill", fill_value=fill)

        slots, position = of_row(plan.slot_ids, shapes.num_slots), of_row(first) + item
        place = of_row(plan.cu_q_lens) + position - of_row(rows.begin) - 1
        kept = ends.at[page_at(table, slots, (position - 1) // size)].get(mode="fill", fill_value=0)
        own = hidden.at[place].get(mode="clip")
        before = jnp.where((position > of_row(rows.begin))[:, None], own, kept.astype(own.dtype))
        num_valid = jnp.minimum(total - start, _TOKENS)
        logits = model.logits(hax.named(before, (ROW, model.embed)), num_valid).rearrange((ROW, ...)).array
        stats = LogitStats.of_kernel(model.backend, logits, num_valid) or LogitStats.of(logits, model.vocab)
        tokens = table.tokens.array.at[slots, position].get(mode="fill", fill_value=0)
        logprobs = logprobs_of(logits, tokens, stats, model.vocab)
        new = pack_scores(logprobs, *likeliest(logits, stats, scores.num_top, model.vocab))
        page = jnp.where(valid, page_at(table, slots, position // size), shapes.num_pages)
        return start + _TOKENS, stored.at[page, position % size].set(new, mode="drop")

    carry = (jnp.int32(0), scores.scores.array)
    return replace(scores, scores=jax.lax.while_loop(lambda carry: carry[0] < total, body, carry)[1])


def _keep_ends(
    state: DecodeState, scores: ScorePages, hidden: Array, plan: StepPlan, rows: _Rows, shapes: Shapes
) -> ScorePages:
    size = shapes.page_size
    begin = rows.begin // size
    counts = jnp.where(rows.active, pages_for(rows.end, size) - begin, 0)
    row, item, valid = ragged_index(counts, jnp.int32(0), shapes.max_new_pages)

    def of_row(values: Array) -> Array:
        return values.at[row].get(mode="fill", fill_value=0)

    column = of_row(begin) + item
    last = jnp.minimum((column + 1) * size, of_row(rows.end)) - 1
    slots = plan.slot_ids.at[row].get(mode="fill", fill_value=shapes.num_slots)
    page = jnp.where(valid, page_at(state.sequences, slots, column), shapes.num_pages)
    values = hidden.at[of_row(plan.cu_q_lens) + last - of_row(rows.begin)].get(mode="clip")
    return replace(scores, ends=scores.ends.array.at[page].set(values.astype(jnp.float32), mode="drop"))


def _set_aside(state: DecodeState, scores: ScorePages, plan: StepPlan, rows: _Rows) -> ScorePages:
    table, size = state.sequences, state.page_table.page_size
    counts = jnp.where(rows.active & (rows.end == rows.prompt_lens), pages_for(rows.prompt_lens, size), 0)
    total = jnp.sum(counts, dtype=jnp.int32)
    stored = scores.scores.array

    def body(carry):
        start, complete = carry
        row, column, _ = ragged_index(counts, start, _PAGES)
        slots = plan.slot_ids.at[row].get(mode="fill", fill_value=table.num_slots)
        values = stored.at[page_at(table, slots, column)].get(mode="fill", fill_value=0)
        return start + _PAGES, complete.at[slots, column].set(values, mode="drop")

    carry = (jnp.int32(0), scores.complete.array)
    return replace(scores, complete=jax.lax.while_loop(lambda carry: carry[0] < total, body, carry)[1])


def read_scores(scores: ScorePages, slots: Array, columns: Array) -> Array:
    """The scores in page `columns` i32[n] of the complete prompts of `slots` i32[n], i32[n, page_offset, score]."""
    return scores.complete.array.at[slots, columns].get(mode="fill", fill_value=0)
