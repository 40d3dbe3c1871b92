"""Prompt lookup and the acceptance of drafts, against loops over tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.cache.arrays import replace
from levanter_infer.decode.beam_table import BeamParams
from levanter_infer.decode.codes import RUNNING
from levanter_infer.decode.schedule import pack
from levanter_infer.decode.sequence_table import in_order
from levanter_infer.decode.shapes import SamplingLimits, Shapes, SpeculationShapes
from levanter_infer.decode.speculation import lookup, propose, reached
from levanter_infer.decode.state import DecodeState

SIZES = SpeculationShapes(num_tokens=5, lookup_max=5, lookup_min=2, rows=20)
SHAPES = Shapes(
    num_slots=6,
    max_seqs=4,
    max_seq_len=40,
    num_pages=40,
    page_size=8,
    max_step_tokens=12,
    max_round_steps=4,
    upload_tokens=64,
    speculation=SIZES,
    limits=SamplingLimits(vocab_size=5, max_logprobs=0, max_logit_bias=1, max_stop_sequences=1, max_stop_tokens=1),
)
TEXT = [1, 2, 3, 1, 2, 3, 1, 2]
"""Its last five tokens are its first too, with 3, 1, 2, 3, 1 behind them."""


def looked_up(tokens: list[int], sizes: SpeculationShapes) -> tuple[int, list[int] | None]:
    """Tokens that have occurred before, and the draft."""
    for length in range(sizes.lookup_max, sizes.lookup_min - 1, -1):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if length < len(tokens) and tokens[begin : begin + length] == tokens[-length:]:
                known = list(tokens)
                while len(known) < len(tokens) + sizes.num_tokens:
                    known.append(known[begin + length + len(known) - len(tokens)])
                return length, known[len(tokens) :]
    return 0, None


@pytest.mark.parametrize("sizes", [SIZES, SpeculationShapes(3, 2, 2, 4), SpeculationShapes(9, 6, 1, 4)])
def test_a_draft_is_what_followed_the_longest_and_latest_match(sizes):
    rng, width, hits = np.random.default_rng(0), 24, 0
    find = jax.jit(lambda tokens, lens: lookup(tokens, lens, sizes))
    for vocab in (2, 3, 9):
        lens = rng.integers(1, width + 1, 200)
        texts = rng.integers(0, vocab, (200, width))
        matched, drafts = map(np.asarray, find(texts.astype(np.int32), lens.astype(np.int32)))
        for text, length, found, draft in zip(texts.tolist(), lens, matched, drafts.tolist(), strict=True):
            count, expected = looked_up(text[:length], sizes)
            assert found == count
            if expected is not None:
                assert draft == expected
                hits += 1
    assert hits > 200


def test_drafts_are_accepted_up_to_the_first_that_differs():
    rng = np.random.default_rng(1)
    for _ in range(50):
        groups = rng.integers(1, 6, 8)
        agrees = rng.random(groups.sum()) < 0.7
        ahead = np.concatenate([np.arange(size) for size in groups]).astype(np.int32)
        expected = [
            all(group[:place])
            for group in np.split(agrees, np.cumsum(groups)[:-1])
            for place in range(len(group))
        ]  # fmt: skip
        assert reached(jnp.asarray(agrees), jnp.asarray(ahead)).tolist() == expected


def state_of(texts: list[list[int]], max_lens: list[int], computed: list[int] | None = None) -> DecodeState:
    """Running sequences with these known tokens, of which all but the last are computed."""
    state = DecodeState.init(SHAPES)
    missing = SHAPES.num_slots - len(texts)

    def column(values: list[int]) -> jax.Array:
        return jnp.asarray([*values, *[0] * missing], jnp.int32)

    tokens = jnp.asarray([text + [0] * (SHAPES.max_seq_len - len(text)) for text in [*texts, *[[]] * missing]])
    lens = [len(text) for text in texts]
    computed = [length - 1 for length in lens] if computed is None else computed
    table = replace(
        state.sequences,
        tokens=tokens.astype(jnp.int32),
        seq_lens=column(lens),
        num_computed=column(computed),
        max_lens=column(max_lens),
        arrival=column(list(range(len(texts)))),
        status=column([RUNNING] * len(texts)),
    )
    return replace(state, sequences=table)


def drafts_of(state: DecodeState, take: list[int], shapes: Shapes = SHAPES) -> list[list[int]]:
    """The draft tokens of each slot."""
    taken = jnp.asarray(take + [0] * (shapes.num_slots - len(take)), jnp.int32)
    after, drafts = propose(state, shapes, taken)
    lens, tokens = state.sequences.seq_lens, after.sequences.tokens
    assert drafts is not None
    made = [tokens[i, lens[i] : lens[i] + drafts[i]].tolist() for i in range(len(take))]
    behind = np.arange(shapes.max_seq_len)[None, :] < np.asarray(lens)[:, None]
    assert (np.where(behind, tokens, 0) == np.where(behind, state.sequences.tokens, 0)).all()
    return made


def test_drafts_end_with_their_page_and_before_the_last_token():
    texts = [TEXT, [4, 0, *TEXT]]
    assert drafts_of(state_of(texts[:1], [40]), [1]) == [[]]  # the next token is the first of a page
    assert drafts_of(state_of(texts[1:], [40]), [1]) == [[3, 1, 2, 3, 1]]  # rows for one and five more
    long = [[3] * 2 + TEXT]
    for left, expected in ((1, []), (2, [3]), (4, [3, 1, 2]), (30, [3, 1, 2, 3, 1])):
        assert drafts_of(state_of(long, [len(long[0]) + left]), [1]) == [expected]
    for extra in range(8):
        (draft,) = drafts_of(state_of([[3] * extra + TEXT], [40]), [1])
        assert len(draft) == min(5, 7 - (7 + extra) % 8)


def test_drafts_are_no_longer_than_what_has_occurred():
    for known in range(1, 6):
        text = [4, *range(known), 3, *range(known)]
        expected = [] if known < 2 else [3, 0, 1, 2, 3][:known]
        (draft,) = drafts_of(state_of([[4] * (-len(text) % 8 + 1) + text], [40]), [1])
        assert draft == expected


def test_rows_are_shared_by_those_that_have_a_draft():
    text = [4, 4, *TEXT]
    state = state_of([text] * 3 + [[0, 1, 2, 3, 4]], [40] * 4)
    assert SHAPES.max_rows == 8 and SHAPES.buckets == (4, 8, 12)
    assert drafts_of(state, [1, 1, 1, 1]) == [[3, 1], [3], [3], []]
    assert drafts_of(state, [0, 1, 1, 1]) == [[], [3, 1, 2], [3, 1], []]
    assert drafts_of(state, [1, 1, 0, 0]) == [[3, 1, 2], [3, 1, 2], [], []]
    assert drafts_of(state, [1, 0, 0, 9]) == [[3, 1], [], [], []]  # twelve tokens of a step
    assert drafts_of(state, [1, 1, 0, 5]) == [[3], [], [], []]  # a bucket of eight, which prompts do not leave
    for rows, expected in ((4, [[], [], [], []]), (5, [[3], [], [], []])):
        few = dataclasses.replace(SHAPES, speculation=dataclasses.replace(SIZES, rows=rows))
        assert drafts_of(state, [1, 1, 1, 1], few) == expected


def test_prompts_and_beams_have_no_drafts():
    text = [4, 4, *TEXT]
    assert drafts_of(state_of([text, text], [40, 40], [9, 8]), [1, 2]) == [[3, 1, 2, 3, 1], []]
    assert drafts_of(state_of([text], [40], [5]), [1]) == [[]]  # a prompt chunk of one token
    shapes = dataclasses.replace(SHAPES, max_beams=2)
    state = state_of([text, text], [40, 40])
    beams = DecodeState.init(shapes).beams
    params = BeamParams.empty(SHAPES.num_slots, SHAPES.num_slots)
    params = replace(params, leaders=params.leaders.at[0].set(0), widths=params.widths.at[0].set(1))
    state = replace(state, beams=replace(beams, params=params))
    assert drafts_of(state, [1, 1], shapes) == [[], [3, 1, 2, 3, 1]]


def test_every_draft_token_is_a_row():
    """Behind that of its sequence; decode tokens come first, then what has several tokens."""
    text = [4, 4, *TEXT]
    state = state_of([text, [0, 1, 2, 3], text, [1] * 9], [40] * 4, [9, 3, 9, 6])
    shapes = dataclasses.replace(SHAPES, max_seqs=8, num_slots=8)
    order, take = in_order(state.sequences), jnp.asarray([1, 1, 1, 3, 0, 0], jnp.int32)
    plain = pack(state, shapes, order, take, None)
    plan = pack(state, shapes, order, take, jnp.asarray([2, 0, 1, 0, 0, 0], jnp.int32))
    assert plain.slot_ids.tolist()[:5] == [0, 1, 2, 3, 6] and plan.slot_ids.tolist() == [0, 0, 0, 1, 2, 2, 3, 6]
    assert plan.ahead is not None and plan.ahead.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert plan.cu_q_lens.tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 9]
    assert (int(plan.num_rows), int(plan.num_tokens)) == (7, 9)
    assert plan.take.tolist() == [3, 1, 2, 3, 0, 0] and plan.known.tolist() == plain.take.tolist()
    assert plan.of_rows(state.sequences.seq_lens).tolist() == [10, 11, 12, 4, 10, 11, 9, 0]
