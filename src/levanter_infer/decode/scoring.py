"""Prompt scoring (prompt logprobs): each step scores the prompt tokens that it computes.

The score of a token is computed from the hidden state of the token before it, which the same step has computed, or
which is stored with its page (`ScorePages.ends`). So scores are complete when keys and values are, whether the prompt
was computed in chunks, found by prefix caching, copied or recomputed.

The seam to the step is `num_hidden`, `keep_hidden`, `copy_scores`, `score_prompts` and `may_insert`: without scoring a
step keeps the hidden states of the rows' last tokens, and nothing else of scoring is in its program.
"""

import haliax as hax
import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.axes import ROW
from levanter_infer.cache.arrays import gather, replace, scatter
from levanter_infer.cache.page_math import pages_for
from levanter_infer.cache.page_table import ragged_index
from levanter_infer.cache.score_pages import ScorePages, pack_scores
from levanter_infer.decode.blocks import logits_in_blocks
from levanter_infer.decode.codes import is_scored_root
from levanter_infer.decode.paging import page_at
from levanter_infer.decode.sampling import LogitStats, likeliest, logprobs_of
from levanter_infer.decode.schedule import StepPlan, last_tokens
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.kernels.loops import run_if

_TOKENS = 64
"""Tokens whose logits are in memory at once: 16 to 128 take a CPU equally long for each token."""
_PAGES = 256
"""Pages whose scores are copied per trip: usually there is one trip."""
READ_PAGES = 256
"""Pages of scores that the host reads at once."""


def num_hidden(shapes: Shapes) -> int:
    """Hidden states that a step keeps: those of all its tokens where prompts are scored, else one per row."""
    return shapes.max_rows if shapes.scoring is None else shapes.buckets[-1]


def keep_hidden(states: Array, cu_q_lens: Array, shapes: Shapes) -> Array:
    """The hidden states to keep, [n, embed] with n <= `num_hidden`, of those of a step's tokens [token, embed]."""
    return states[last_tokens(cu_q_lens)] if shapes.scoring is None else states


def copy_scores(scores: ScorePages | None, source: Array, target: Array) -> ScorePages | None:
    """Copy pages of scores as `Cache.copy_pages` copies keys and values."""
    return None if scores is None else scores.copy_pages(source, target)


def scored_slots(state: DecodeState) -> Array:
    """Slots whose prompts are scored, bool[seq]: of the samples of one request, the first one's."""
    sampling = state.sampling
    return is_scored_root(state.sequences.roots) & (sampling.sample_index == sampling.first_sample)


def may_insert(state: DecodeState, filled: Array, shapes: Shapes) -> Array:
    """Pages of each slot that may be entered into the prefix cache, i32[seq], of the `filled` ones, i32[seq]: under a
    root of scored prompts only those that have scores."""
    if shapes.scoring is None:
        return filled
    table = state.sequences
    scored = scored_slots(state) & (table.num_computed <= table.prompt_lens)
    return jnp.where(scored | ~is_scored_root(table.roots), filled, 0)


def score_prompts(
    model, state: DecodeState, scores: ScorePages | None, hidden: Array, plan: StepPlan, shapes: Shapes
) -> tuple[ScorePages | None, Array]:
    """Score the prompt tokens of a step, and set aside the scores of prompts that it completes.

    Args:
        state: before the step's tokens count as computed.
        hidden: the states that `keep_hidden` has kept.
    Returns: the new scores, and the hidden states [row, embed] of the rows' last tokens.
    """
    if scores is None:
        return None, hidden
    rows = _Rows(state, plan)
    scores = _score_tokens(model, state, scores, hidden, plan, rows, shapes.block_tokens)
    scores = run_if(jnp.any(rows.active), lambda scores: _keep_ends(state, scores, hidden, plan, rows, shapes), scores)
    return _set_aside(state, scores, plan, rows), hidden[last_tokens(plan.cu_q_lens)]


class _Rows:
    """The prompt positions that the step scores in each row; i32[row], 0 for rows without a scored prompt."""

    def __init__(self, state: DecodeState, plan: StepPlan):
        table = state.sequences
        slots = plan.slot_ids

        def column(values: Array) -> Array:
            return gather(values, slots, 0)

        self.begin = plan.of_rows(table.num_computed)
        """First position that the step computes, scored or not."""
        self.prompt_lens = column(table.prompt_lens)
        end = self.begin + plan.cu_q_lens[1:] - plan.cu_q_lens[:-1]
        scored = gather(scored_slots(state), slots, False)
        self.active = scored & (self.begin < self.prompt_lens) & (end > self.begin)
        self.end = jnp.where(self.active, jnp.minimum(end, self.prompt_lens), 0)
        """One past the last prompt position that it computes."""


def _score_tokens(
    model, state: DecodeState, scores: ScorePages, hidden: Array, plan: StepPlan, rows: _Rows, block: int | None
) -> ScorePages:
    """Score a few tokens at a time, so that logits of all tokens are never in memory at once. Args: block: as of
    `Shapes.block_tokens`."""
    size = _TOKENS if block is None else block
    table, page_size = state.sequences, state.page_table.page_size
    first = jnp.maximum(rows.begin, 1)  # the first token of a prompt has no score
    counts = jnp.maximum(rows.end - first, 0)
    total = jnp.sum(counts, dtype=jnp.int32)
    ends = scores.ends

    def body(carry):
        start, stored = carry
        row, item, valid = ragged_index(counts, start, size)

        def of_row(values: Array, fill: int = 0) -> Array:
            return gather(values, row, fill)

        slots, position = of_row(plan.slot_ids, table.num_slots), of_row(first) + item
        place = of_row(plan.cu_q_lens) + position - of_row(rows.begin) - 1
        kept = gather(ends, page_at(table, slots, (position - 1) // page_size), 0)
        own = hidden.at[place].get(mode="clip")
        before = jnp.where((position > of_row(rows.begin))[:, None], own, kept.astype(own.dtype))
        num_valid = jnp.minimum(total - start, size)
        if block is None:
            logits = model.logits(hax.named(before, (ROW, model.embed)), num_valid).rearrange((ROW, ...)).array
        else:
            logits = logits_in_blocks(model, before, num_valid, block)
        stats = LogitStats.of_kernel(model.backend, logits, num_valid, model.vocab)
        stats = stats or LogitStats.of(logits, model.vocab)
        tokens = gather(table.tokens, (slots, position), 0)
        logprobs = logprobs_of(logits, tokens, stats, model.vocab)
        new = pack_scores(logprobs, *likeliest(logits, stats, scores.num_top, model.vocab))
        page = jnp.where(valid, page_at(table, slots, position // page_size), state.page_table.num_pages)
        return start + size, scatter(stored, (page, position % page_size), new)

    carry = (jnp.int32(0), scores.scores)
    return replace(scores, scores=jax.lax.while_loop(lambda carry: carry[0] < total, body, carry)[1])


def _keep_ends(
    state: DecodeState, scores: ScorePages, hidden: Array, plan: StepPlan, rows: _Rows, shapes: Shapes
) -> ScorePages:
    size = shapes.page_size
    begin = rows.begin // size
    counts = jnp.where(rows.active, pages_for(rows.end, size) - begin, 0)
    row, item, valid = ragged_index(counts, jnp.int32(0), shapes.max_new_pages)

    def of_row(values: Array) -> Array:
        return gather(values, row, 0)

    column = of_row(begin) + item
    last = jnp.minimum((column + 1) * size, of_row(rows.end)) - 1
    slots = gather(plan.slot_ids, row, shapes.num_slots)
    page = jnp.where(valid, page_at(state.sequences, slots, column), shapes.num_pages)
    values = hidden.at[of_row(plan.cu_q_lens) + last - of_row(rows.begin)].get(mode="clip")
    return replace(scores, ends=scatter(scores.ends, page, values.astype(jnp.float32)))


def _set_aside(state: DecodeState, scores: ScorePages, plan: StepPlan, rows: _Rows) -> ScorePages:
    table, size = state.sequences, state.page_table.page_size
    counts = jnp.where(rows.active & (rows.end == rows.prompt_lens), pages_for(rows.prompt_lens, size), 0)
    total = jnp.sum(counts, dtype=jnp.int32)
    stored = scores.scores

    def body(carry):
        start, complete = carry
        row, column, _ = ragged_index(counts, start, _PAGES)
        slots = gather(plan.slot_ids, row, table.num_slots)
        values = gather(stored, page_at(table, slots, column), 0)
        return start + _PAGES, scatter(complete, (slots, column), values)

    carry = (jnp.int32(0), scores.complete)
    return replace(scores, complete=jax.lax.while_loop(lambda carry: carry[0] < total, body, carry)[1])


def read_scores(scores: ScorePages, slots: Array, columns: Array) -> Array:
    """Scores of complete prompts, i32[n, page_offset, score]: pages `columns`, i32[n], of the prompts of `slots`."""
    return gather(scores.complete, (slots, columns), 0)
