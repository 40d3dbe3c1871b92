"""When rounds are launched and how long they are: `step_round(max_steps)` and `wait_for_launch_window`."""

import time
from types import SimpleNamespace

import jax
import pytest

from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import tiny_model, uncached_greedy


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(max_seqs=2, max_seq_len=32, page_size=4, max_round_steps=3)
    subject = InferenceEngine(tiny_model(), config=config)
    subject.warmup()
    return subject


def request(max_tokens: int) -> Request:
    return Request(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0))


def test_rounds_of_one_step_show_every_token_in_the_next_call(engine):
    group = engine.submit(request(11))
    seen = []
    while not group.is_done:
        engine.step_round(max_steps=1)
        seen.append(len(group.sequences[0].token_ids))
    assert seen == list(range(12))
    assert group.sequences[0].token_ids == uncached_greedy(tiny_model(), [1, 2], 11)
    engine.drain()


def test_a_round_that_admits_nothing_uploads_nothing(engine):
    group = engine.submit(request(9))
    for _ in range(3):
        engine.step_round(max_steps=1)
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        for _ in range(3):
            engine.step_round(max_steps=1)
    assert len(group.sequences[0].token_ids) == 5
    engine.drain()


def test_more_steps_than_the_engine_would_choose_are_not_taken(engine):
    group = engine.submit(request(7))
    chosen = engine._scheduler.round_length.steps(with_prompts=True)
    engine.step_round(max_steps=10)
    engine.step_round(max_steps=10)
    assert len(group.sequences[0].token_ids) == chosen <= 3
    engine.drain()


def test_a_call_leaves_no_round_in_flight(engine):
    engine.generate([request(7), request(3)])
    assert engine._rounds.in_flight is None
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_steps_that_are_no_positive_number_are_refused_and_nothing_is_lost(engine, steps):
    group = engine.submit(request(3))
    with pytest.raises(ValueError, match="max_steps: expected a positive whole number"):
        engine.step_round(max_steps=steps)
    engine.drain()
    assert len(group.sequences[0].token_ids) == 3


def test_the_wait_for_the_launch_window_ends_with_the_round_however_long_it_was_expected_to_be(engine, monkeypatch):
    start = time.perf_counter()
    engine.wait_for_launch_window()  # nothing runs
    engine.submit(request(5))
    engine.step_round(max_steps=1)
    monkeypatch.setattr(engine._rounds.in_flight, "expected_s", 60.0)
    engine.wait_for_launch_window()
    assert time.perf_counter() - start < 30
    assert engine._rounds.in_flight.outputs.packed.is_ready()
    engine.drain()


def test_the_wait_for_the_launch_window_ends_when_the_next_round_has_to_be_launched(engine, monkeypatch):
    unfinished = SimpleNamespace(packed=SimpleNamespace(is_ready=lambda: False))
    begun = time.perf_counter()
    running = SimpleNamespace(outputs=unfinished, started=begun, launch_s=0.02, expected_s=0.3)
    monkeypatch.setattr(engine._rounds, "in_flight", running)
    engine.wait_for_launch_window()
    assert 0.3 - 2 * 0.02 <= time.perf_counter() - begun < 5


def test_the_host_knows_when_a_round_may_compute_prompts(engine):
    group = engine.submit(request(4))
    assert engine._scheduler.has_prompts
    engine.step_round(max_steps=1)
    assert engine._scheduler.has_prompts
    while not group.sequences[0].token_ids:
        engine.step_round(max_steps=1)
    assert not engine._scheduler.has_prompts
    engine.drain()
