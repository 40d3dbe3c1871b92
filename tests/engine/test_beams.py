"""Beam search through the engine: HF transformers' hypotheses and scores, in any batch and through preemption."""

import dataclasses

import equinox as eqx
import numpy as np
import pytest

from levanter_infer.checkpoints.load import load_model
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.extension import needed_changes
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.beam_cases import (
    CASES,
    MAX_TOKENS,
    MODEL,
    PROMPT_LENS,
    STATE_CASES,
    STATE_MODELS,
    BeamCase,
    answers,
    prompt,
    state_answers,
)
from tests.golden_cases import load_case, write_checkpoint
from tests.tiny_models import tiny_model

PAGES = 20
"""Pages that the largest of the searches may need, alone."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("model"), load_case(MODEL)), dtype="float32")[0]


def engine_of(model) -> InferenceEngine:
    config = EngineConfig(max_seqs=6, max_seq_len=32, page_size=4, max_pages=PAGES, max_step_tokens=16)
    return InferenceEngine(model, config=config)


@pytest.fixture(scope="module")
def shared(model):
    return engine_of(model)


@pytest.fixture
def engine(shared):
    yield shared
    check_invariants(shared.state.decode)
    assert shared.stats()["pages_free"] == PAGES and not shared._scheduler.has_work


def request(name: str, length: int, **changes) -> Request:
    return request_of(CASES[name], length, **changes)


def request_of(case: BeamCase, length: int, **changes) -> Request:
    params = {
        "num_beams": case.num_beams, "n": case.num_beams, "length_penalty": case.length_penalty,
        "early_stopping": case.early_stopping, "repetition_penalty": case.repetition_penalty,
        "min_tokens": case.min_tokens, "stop_token_ids": case.ends, "max_tokens": MAX_TOKENS,
    }  # fmt: skip
    return Request(prompt_token_ids=prompt(length), sampling=SamplingParams(**{**params, **changes}))


def assert_found(completions, expected, ends):
    assert [c.token_ids for c in completions] == [found["tokens"] for found in expected]
    scores = np.asarray([found["score"] for found in expected])
    assert np.allclose([c.score for c in completions], scores, rtol=1e-4, atol=1e-5)
    assert [c.finish_reason for c in completions] == [
        "stop" if c.token_ids[-1] in ends else "length" for c in completions
    ]


def test_hypotheses_and_scores_are_those_of_hf_for_all_searches_together(engine):
    asked = [(name, i) for name in CASES for i in range(len(PROMPT_LENS))]
    searches = [request(name, PROMPT_LENS[i]) for name, i in asked]
    greedy = Request(prompt_token_ids=prompt(6), sampling=SamplingParams(max_tokens=24, temperature=0.0))
    outputs = engine.generate([r for search in searches for r in (search, greedy)])
    expected = answers()
    for (name, i), output in zip(asked, outputs[::2], strict=True):
        assert output.error is None, output.error
        assert_found(output.completions, expected[name][i], CASES[name].ends)
    assert len({tuple(output.completions[0].token_ids) for output in outputs[1::2]}) == 1
    stats = engine.stats()
    assert stats["preemptions"] > 5 and stats["copied_pages"] > 5


def test_outputs_say_how_much_of_the_prompt_of_a_search_was_found(engine):
    engine.reset()
    found = [engine.generate([request("plain", 17)])[0].num_cached_tokens for _ in range(2)]
    assert found == [0, 16]


def test_a_search_alone_keeps_its_invariants_at_every_step_and_returns_its_best_n(engine):
    group = engine.submit(request("wide_early", 17, n=2))
    while not group.is_done:
        engine.step_round(max_steps=1)
        engine.flush()
        check_invariants(engine.state.decode)
    expected = answers()["wide_early"][PROMPT_LENS.index(17)][:2]
    assert_found(group.completions(), expected, CASES["wide_early"].ends)
    for completion in group.completions():  # the score is made of these
        assert len(completion.logprobs) == len(completion.token_ids)
        assert np.isclose(completion.logprobs.mean(), completion.score, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATE_MODELS)
def test_beams_go_on_with_the_state_of_those_that_they_continue(name, tmp_path):
    """Layers that remember a state of fixed size per sequence: all searches together, preempted too."""
    model, _ = load_model(write_checkpoint(tmp_path, load_case(name)), dtype="float32")
    sizes = dict(max_seqs=6, max_seq_len=32, page_size=4, max_pages=PAGES, max_step_tokens=16)
    engine = InferenceEngine(model, config=EngineConfig(**sizes, max_stop_sequences=40))
    asked = [(case, i) for case in STATE_CASES for i in range(len(PROMPT_LENS))]
    outputs = engine.generate([request_of(STATE_CASES[case], PROMPT_LENS[i]) for case, i in asked])
    expected = state_answers()[name]
    for (case, i), output in zip(asked, outputs, strict=True):
        assert output.error is None, output.error
        assert_found(output.completions, expected[case][i], STATE_CASES[case].ends)
    check_invariants(engine.state.decode)
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["pages_free"] == PAGES


def in_mid_search(engine):
    """A search of three beams after a few steps, beside another one."""
    groups = engine.submit(request("at_least", 6)), engine.submit(request("plain", 6))
    steps = 0
    while steps < 4:
        engine.step_round(max_steps=1)
        engine.flush()
        lens = np.asarray(engine.state.decode.sequences.seq_lens)
        steps = min(lens[sequence.slot] - 6 for group in groups for sequence in group.sequences)
    return groups


def test_an_engine_can_be_compiled_for_searches_at_once():
    config = EngineConfig(max_seqs=6, max_seq_len=32, page_size=4)
    for asked, expected in ((1, 0), (2, 2), (3, 4), (5, 6)):
        engine = InferenceEngine(tiny_model(), config=config, num_beams=asked)
        params = [SamplingParams(num_beams=beams, max_tokens=4) for beams in range(1, asked + 1)]
        searches = [engine.prepare(Request(prompt_token_ids=[3], sampling=each, id="a")) for each in params]
        assert engine.shapes.max_beams == expected
        assert not needed_changes(searches, engine.shapes, engine.config, engine.model)
    for wrong in (7, 0, None, 2.0):
        with pytest.raises(ValueError, match=f"num_beams={wrong}: expected 1 to engine.max_seqs=6: beams run together"):
            InferenceEngine(tiny_model(), config=config, num_beams=wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_search_with_more_beams_than_any_before_is_served(model):
    small = engine_of(model)
    for name in ("plain", "wide", "plain"):
        (output,) = small.generate([request(name, PROMPT_LENS[0])])
        assert_found(output.completions, answers()[name][0], CASES[name].ends)


def test_hypotheses_differ_whatever_the_bias_of_a_token(engine):
    output = engine.generate([request("plain", PROMPT_LENS[0], logit_bias={5: 1e30}, stop_token_ids=None)])[0]
    first, second = (c.token_ids for c in output.completions)
    assert set(first) == {5} and first != second


def test_a_search_that_is_cancelled_gives_all_its_pages_back(engine):
    first, second = in_mid_search(engine)
    histogram = engine.memory()["refcount_histogram"]
    assert max(map(int, histogram)) == 5  # the prompt of both searches is stored once
    engine.cancel(first)
    engine.drain()
    assert [c.finish_reason for c in first.completions()] == ["abort"] * 3
    assert all(c.token_ids == [] and c.score is None for c in first.completions())
    assert_found(second.completions(), answers()["plain"][1], CASES["plain"].ends)


def test_a_search_that_loses_its_pages_amid_its_prompt_starts_again_as_a_whole(engine):
    """Beams that ran on while their leader waited kept the free pages that it needed to start again."""
    asked = request("plain", 17, max_tokens=2, num_beams=4, n=4)
    asked = dataclasses.replace(asked, prompt_token_ids=(asked.prompt_token_ids * 2)[:28])
    engine.reset()
    (expected,) = engine.generate([asked])
    engine.reset()
    group = engine.submit(asked)
    engine.step_round(max_steps=1)
    engine.flush()
    computed = np.asarray(engine.state.decode.sequences.num_computed)[[s.slot for s in group.sequences]]
    assert computed.tolist() == [16, 0, 0, 0]
    engine.sleep()
    engine.wake()
    for _ in range(20):
        engine.step_round(max_steps=1)
    engine.flush()
    assert group.is_done
    assert [c.token_ids for c in group.completions()] == [c.token_ids for c in expected.completions]


def test_a_beam_that_is_not_finite_ends_its_search_and_harms_nobody(engine):
    first, second = in_mid_search(engine)
    table = engine.state.decode.sequences
    refs = np.asarray(engine.state.decode.page_table.ref_counts)
    pages = np.asarray(table.page_indices)[[s.slot for s in first.sequences]]
    own = next(page for page in pages.ravel() if page < PAGES and refs[page] == 1)
    pool = engine.state.cache.pools[0].pages
    poisoned = eqx.tree_at(lambda p: p.array, pool, pool.array.at[:, own].set(np.nan))
    engine.runner.state = eqx.tree_at(lambda s: s.cache.pools[0].pages, engine.state, poisoned)
    engine.drain()
    assert [c.finish_reason for c in first.completions()] == ["error"] * 3
    assert_found(second.completions(), answers()["plain"][1], CASES["plain"].ends)
    assert_found(
        engine.generate([request("at_least", 6)])[0].completions, answers()["at_least"][1], CASES["at_least"].ends
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_beams": 7, "n": 1}, "num_beams=7 exceeds engine.max_seqs=6: beams run together"),
        ({"max_tokens": 31}, "num_beams=4 beams of up to 32 tokens, of which 1 are the prompt, may need 32 pages"),
    ],
)
def test_a_search_that_does_not_fit_is_refused_with_the_numbers(engine, changes, message):
    error = engine.generate([request("wide", 1, **changes)])[0].error
    assert error is not None and message in error


def test_searches_and_samples_do_not_mix(engine):
    first, _ = in_mid_search(engine)
    with pytest.raises(ValueError, match="a beam search resamples its beams itself"):
        engine.resample(first, [0, 1, 2])
    with pytest.raises(ValueError, match="a beam search resamples its beams itself"):
        engine.fork(first, 0)
    engine.drain()
