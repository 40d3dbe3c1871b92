"""Which sequences start: order, priorities and the free pages that each policy asks for."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.cache.arrays import replace
from levanter_infer.decode import paging
from levanter_infer.decode.admission_policy import update_length_estimate
from levanter_infer.decode.codes import FINISHED, FREE, LENGTH, RUNNING, WAITING
from levanter_infer.decode.schedule import start_waiting
from levanter_infer.decode.sequence_table import in_order
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.decode.state import DecodeState

SHAPES = Shapes(
    num_slots=6,
    max_seqs=3,
    max_seq_len=64,
    num_pages=20,
    page_size=4,
    max_step_tokens=8,
    max_round_steps=4,
    upload_tokens=64,
    limits=SamplingLimits(vocab_size=5, max_logprobs=0, max_logit_bias=1, max_stop_sequences=1, max_stop_tokens=1),
)


def state_of(free_pages: int = 20, **columns: list[int]) -> DecodeState:
    """A state with these columns of the sequence table; no slot holds a page."""
    state = DecodeState.init(SHAPES)
    filled = {name: jnp.asarray(values + [0] * (6 - len(values)), jnp.int32) for name, values in columns.items()}
    table = replace(state.sequences, **filled)
    pages = replace(state.page_table, num_free=jnp.int32(free_pages))
    return eqx.tree_at(lambda s: (s.sequences, s.page_table), state, (table, pages))


def started(state: DecodeState, admission: str = "optimistic") -> list[int]:
    """The slots that run after `start_waiting`."""
    shapes = dataclasses.replace(SHAPES, admission=admission)
    state = start_waiting(state, shapes, in_order(state.sequences))
    return np.flatnonzero(state.sequences.status == RUNNING).tolist()


def test_the_order_is_priority_then_arrival_and_the_dead_come_last():
    state = state_of(
        status=[WAITING, RUNNING, FINISHED, WAITING, FREE, RUNNING],
        arrival=[4, 3, 1, 2, 0, 5],
        priority=[0, 0, -9, 7, 0, -1],
    )
    assert in_order(state.sequences).tolist()[:4] == [5, 1, 0, 3]


def test_places_go_to_the_first_and_are_not_taken_from_who_runs():
    waiting = dict(
        status=[RUNNING, WAITING, WAITING, WAITING], seq_lens=[3] * 4, max_lens=[8] * 4, arrival=[1, 2, 3, 4]
    )
    assert started(state_of(**waiting)) == [0, 1, 2]
    assert started(state_of(**waiting, priority=[5, 0, 0, -1])) == [0, 1, 3]


# Three sequences of 3 tokens, which may grow to 31: one page each at once, eight at worst; one more for a copy.
GROWING = dict(status=[WAITING] * 3, seq_lens=[3] * 3, prompt_lens=[3] * 3, max_lens=[31] * 3, arrival=[1, 2, 3])


@pytest.mark.parametrize(
    ("admission", "share", "free_pages", "slots"),
    [
        ("optimistic", 1.0, 6, [0, 1, 2]),
        ("optimistic", 1.0, 5, [0, 1]),
        ("worst_case", 0.0, 27, [0, 1, 2]),
        ("worst_case", 0.0, 26, [0, 1]),
        ("worst_case", 0.0, 2, [0]),  # none runs: the first starts in any case
        ("expected", 1.0, 26, [0, 1]),
        ("expected", 0.5, 18, [0, 1, 2]),  # 3 + 14 tokens are five pages
        ("expected", 0.5, 17, [0, 1]),
        ("expected", 0.0, 6, [0, 1, 2]),
    ],
)
def test_free_pages_to_start(admission, share, free_pages, slots):
    state = replace(state_of(free_pages, **GROWING), generated_share=jnp.float32(share))
    assert started(state, admission) == slots


def test_the_expected_share_follows_what_sequences_generate():
    state = state_of(seq_lens=[3 + 7, 3 + 14, 3 + 28], prompt_lens=[3] * 3, max_lens=[31] * 3)
    assert float(state.generated_share) == 1.0
    none, two = jnp.zeros(6, bool), jnp.asarray([True, True] + [False] * 4)

    def learn(state, finished):
        shapes = dataclasses.replace(SHAPES, admission="expected")
        return update_length_estimate(state, shapes, finished, jnp.full(6, LENGTH, jnp.int32))

    assert float(learn(state, none).generated_share) == 1.0
    kept = (1 - 1 / 32) ** 2
    assert float(learn(state, two).generated_share) == pytest.approx(kept + (1 - kept) * (0.25 + 0.5) / 2)
    for _ in range(200):
        state = learn(state, two)
    assert float(state.generated_share) == pytest.approx(0.375, abs=1e-3)


@pytest.mark.parametrize("most", [1, 5, 60])
def test_a_tpu_enters_pages_into_the_table_as_others_do(most):
    rng, (slots, columns), num_pages = np.random.default_rng(most), (9, 80), 1000
    for _ in range(4):
        begin = rng.integers(0, columns - most, slots)
        counts = np.where(rng.random(slots) < 0.7, rng.integers(0, most + 1, slots), 0)
        pages = np.full(slots * most + 3, num_pages)
        pages[: counts.sum()] = rng.permutation(num_pages)[: counts.sum()]
        table = rng.integers(0, num_pages, (slots, columns))
        arguments = [jnp.asarray(array, jnp.int32) for array in (table, begin, counts, pages)]
        np.testing.assert_array_equal(paging._entered_by_row(*arguments), paging._entered_by_page(*arguments))
