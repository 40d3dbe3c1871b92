"""Samples that go on from one another: `resample`, `fork`, and the best of several."""

import dataclasses

import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import shared_engine

PROMPT = list(range(3, 12))
SAMPLING = SamplingParams(max_tokens=24, n=4, seed=5, temperature=1.0)


@pytest.fixture(scope="module")
def shared():
    return shared_engine()


@pytest.fixture
def engine(shared):
    yield shared
    check_invariants(shared.state.decode)
    assert shared.stats()["pages_free"] == shared.shapes.num_pages and not shared._scheduler.has_work


def begun(engine, **changes):
    """A request whose samples have five tokens each, or have finished."""
    group = engine.submit(Request(prompt_token_ids=PROMPT, sampling=dataclasses.replace(SAMPLING, **changes)))
    while any(len(s.token_ids) < 5 and s.finish_reason is None for s in group.sequences):
        engine.step_round(max_steps=1)
        engine.flush()
    return group


def tokens(group):
    return [list(s.token_ids) for s in group.sequences]


def continuation(engine, prefix, index):
    """The completion of sample `index` after prompt and `prefix`: its random numbers know the position only."""
    sampling = dataclasses.replace(SAMPLING, max_tokens=SAMPLING.max_tokens - len(prefix), n=index + 1)
    return engine.generate([Request(prompt_token_ids=PROMPT + prefix, sampling=sampling)])[0].completions[index]


def test_descendants_go_on_from_their_ancestor_with_random_numbers_of_their_own(engine):
    group = begun(engine)
    before = tokens(group)
    engine.resample(group, [2, 2, 2, 0])
    check_invariants(engine.state.decode)
    assert tokens(group) == [before[2], before[2], before[2], before[0]]
    assert group.sequences[0].logprobs == group.sequences[1].logprobs
    engine.step_round(max_steps=1)
    engine.resample(group, np.asarray([3, 1, 0, 2]))  # a round is in flight, and read first
    middle = tokens(group)
    assert [len(t) for t in before] == [6, 5, 5, 5] and [len(t) for t in middle] == [7, 6, 6, 6]
    engine.drain()
    for i, sequence in enumerate(group.sequences):
        alone = continuation(engine, middle[i], i)
        assert sequence.token_ids == middle[i] + alone.token_ids
        assert np.allclose(sequence.logprobs[len(middle[i]) :], alone.logprobs, atol=1e-4)
    assert len({tuple(t) for t in tokens(group)}) == 4


def test_a_request_of_one_sample_goes_on_from_itself(engine):
    group = begun(engine, n=1)
    before = tokens(group)
    engine.resample(group, [0])
    assert tokens(group) == before
    engine.drain()
    assert group.sequences[0].token_ids == continuation(engine, [], 0).token_ids


def test_finished_samples_are_inherited_and_replaced(engine):
    stops = tokens(begun(engine))
    engine.drain()
    others = {token for i in (0, 2, 3) for token in stops[i]}
    ends = next(token for token in stops[1] if token not in others)
    group = begun(engine, stop_token_ids=[ends])
    assert [s.finish_reason for s in group.sequences] == [None, "stop", None, None]
    before = tokens(group)
    engine.resample(group, [1, 2, 2, 3])  # 0 is finished like 1, and 1 goes on from 2
    assert [s.finish_reason for s in group.sequences] == ["stop", None, None, None]
    assert tokens(group) == [before[1], before[2], before[2], before[3]]
    known = engine.step_round(max_steps=1)
    engine.drain()
    assert known == [] and group.is_done
    assert group.sequences[0].token_ids == before[1]
    assert group.sequences[1].token_ids[: len(before[2])] == before[2]
    engine.resample(group, [3, 3, 3, 3])  # nothing is left to compute
    assert tokens(group) == [tokens(group)[3]] * 4


def test_a_sample_forks_into_further_ones(engine):
    group = begun(engine, n=1)
    before = tokens(group)[0]
    added = engine.fork(group, 0, 2)
    assert group.sequences[1:] == added and [s.index for s in added] == [1, 2]
    engine.drain()
    for i, sequence in enumerate(group.sequences):
        assert sequence.token_ids == before + continuation(engine, before, i).token_ids
    assert engine.stats()["copies_per_token"] > 0


def test_what_cannot_be_resampled_is_refused_and_changes_nothing(engine):
    group = engine.submit(Request(prompt_token_ids=PROMPT, sampling=SAMPLING))
    with pytest.raises(ValueError, match="has not started"):
        engine.resample(group, [0, 1, 2, 3])
    engine.step_round(max_steps=4)
    with pytest.raises(ValueError, match="ancestors has 3 entries and the request 4 samples"):
        engine.resample(group, [0, 1, 2])
    with pytest.raises(ValueError, match=r"ancestors\[1\]=4: expected the index of a sample, from 0 to 3"):
        engine.resample(group, [0, 4, 2, 3])
    with pytest.raises(ValueError, match="ancestors is str"):
        engine.resample(group, "0123")
    with pytest.raises(ValueError, match="index=-1: expected"):
        engine.fork(group, -1)
    with pytest.raises(ValueError, match="9 samples need a slot to go on and 4 are free"):
        engine.fork(group, 0, 9)
    assert len(group.sequences) == 4
    engine.drain()


def test_the_best_of_several_samples_are_returned_best_first_with_their_indices(engine):
    every, best = (
        engine.generate([Request(prompt_token_ids=PROMPT, sampling=dataclasses.replace(SAMPLING, **changes))])[0]
        for changes in ({}, {"n": 2, "best_of": 4})
    )
    means = [c.logprobs.mean() for c in every.completions]
    order = np.argsort(means)[::-1][:2].tolist()
    assert [c.index for c in best.completions] == order
    assert [c.token_ids for c in best.completions] == [every.completions[i].token_ids for i in order]
    refused = engine.generate([Request(prompt_token_ids=PROMPT, sampling=SamplingParams(n=1, best_of=9))])[0]
    assert refused.error is not None and "best_of=9 exceeds the 8 slots" in refused.error
