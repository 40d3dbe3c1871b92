"""Priorities, deadlines and admission policies, as a caller sees them."""

import functools
import time

import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import tiny_model, uncached_greedy


@functools.lru_cache
def shared_engine(admission: str = "optimistic") -> InferenceEngine:
    sizes = dict(max_seqs=2, max_seq_len=48, page_size=4, max_step_tokens=16, max_pages=12)
    return InferenceEngine(tiny_model(), config=EngineConfig(**sizes, admission=admission))


@pytest.fixture
def engine():
    engine = shared_engine()
    engine.reset()
    return engine


def request(seed: int, max_tokens: int = 6, **fields) -> Request:
    ids = np.random.default_rng(seed).integers(0, 61, 9).tolist()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(prompt_token_ids=ids, sampling=params, id=str(seed), **fields)


def check_idle(engine: InferenceEngine) -> None:
    engine.drain()
    check_invariants(engine.state.decode)
    assert engine.stats()["pages_free"] == engine.shapes.num_pages


def test_requests_of_a_smaller_number_go_first(engine):
    engine.warmup()
    groups = [engine.submit(request(i, priority=-(i // 3))) for i in range(9)]
    ended = []
    while not all(group.is_done for group in groups):
        ended += [int(sequence.request.id) for sequence in engine.step_round(max_steps=1)]
    assert [i // 3 for i in ended] == [2] * 3 + [1] * 3 + [0] * 3
    for group in groups:
        ids = group.prompt_token_ids
        assert group.sequences[0].token_ids == uncached_greedy(tiny_model(), ids, 6)
    check_idle(engine)


@pytest.mark.parametrize("priorities", [(0, 0), (1, 0)])
def test_the_youngest_of_the_least_urgent_loses_its_pages_first(engine, priorities):
    """Not the one that has been used least recently: both are used in every step."""
    engine.warmup()
    groups = [engine.submit(request(i, max_tokens=30, priority=priority)) for i, priority in enumerate(priorities)]
    computed: dict[str, int] = {}
    lost = []
    while not all(group.is_done for group in groups):
        engine.step_round(max_steps=1)
        now = np.asarray(engine.state.decode.sequences.num_computed)
        for sequence in (group.sequences[0] for group in groups):
            if sequence.slot is not None and sequence.finish_reason is None:
                name, stored = sequence.request.id, int(now[sequence.slot])
                lost += [name] if stored < computed.get(name, 0) else []
                computed[name] = stored
    expected = "1" if priorities == (0, 0) else "0"
    assert lost and lost[0] == expected
    check_idle(engine)


@pytest.mark.parametrize("fields", [dict(priority=1.5), dict(priority=2**31), dict(priority=True), dict(timeout_s=0),
                                    dict(timeout_s=float("nan")), dict(timeout_s="soon")])  # fmt: skip
def test_what_is_no_priority_or_time_is_refused_and_the_others_run(engine, fields):
    bad, good = engine.generate([request(0, **fields), request(1)])
    assert next(iter(fields)) in bad.error and not bad.completions
    assert good.completions[0].finish_reason == "length"


def test_a_deadline_ends_what_runs_and_what_waits_and_gives_all_pages_back(engine, monkeypatch):
    engine.warmup()
    late = [engine.submit(request(i, max_tokens=30, timeout_s=1000.0)) for i in range(3)]  # two run, one waits
    other = engine.submit(request(3, max_tokens=30))
    for _ in range(4):
        assert engine.step_round(max_steps=2) == []
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 1000.0)
    ended = engine.step_round(max_steps=1)
    assert sorted(int(sequence.request.id) for sequence in ended) == [0, 1, 2]
    assert [group.sequences[0].finish_reason for group in late] == ["abort"] * 3
    begun = late[0].sequences[0].token_ids
    assert begun == uncached_greedy(tiny_model(), late[0].prompt_token_ids, 30)[: len(begun)] and len(begun) > 2
    engine.step_round(max_steps=1)  # reads the round that admitted it
    held = engine.state.decode.sequences.num_held(engine.shapes.page_size)
    assert np.flatnonzero(held).tolist() in ([], [other.sequences[0].slot])
    assert int(held.sum()) == engine.shapes.num_pages - int(engine.state.decode.page_table.num_free)
    while not other.is_done:
        engine.step_round()
    assert other.sequences[0].token_ids == uncached_greedy(tiny_model(), other.prompt_token_ids, 30)
    check_idle(engine)


@pytest.mark.slow
def test_with_worst_case_admission_nobody_is_preempted():
    requests = [request(i, max_tokens=30) for i in range(6)]
    counts = {}
    for admission in ("optimistic", "worst_case"):
        engine = shared_engine(admission)
        engine.reset()
        before = engine.stats()["preemptions"]
        outputs = engine.generate(requests)
        for asked, output in zip(requests, outputs, strict=True):
            assert output.completions[0].token_ids == uncached_greedy(tiny_model(), list(asked.prompt_token_ids), 30)
        counts[admission] = engine.stats()["preemptions"] - before
        check_idle(engine)
    assert counts["optimistic"] > 0 and counts["worst_case"] == 0
