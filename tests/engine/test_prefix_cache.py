"""Pages of common prefixes are computed once, and no tokens depend on it."""

import dataclasses

import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine import intake
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import SIZES, shared_engine, tiny_model, uncached_greedy

PAGE = SIZES["page_size"]


@pytest.fixture
def engine():
    return shared_engine()


@pytest.fixture
def small_engine():
    """An engine with five pages for each of its four sequences."""
    return shared_engine(max_pages=20)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 61, length).tolist()


def request(ids: list[int], max_tokens: int = 4, salt: str | None = None, **sampling) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampling)
    return Request(prompt_token_ids=ids, sampling=params, cache_salt=salt)


COUNTERS = "prefix_hits", "prefix_misses", "prefix_evictions", "computed_prompt_tokens", "preemptions"


def run(engine: InferenceEngine, *requests: Request) -> dict[str, float]:
    """Sample the requests; checks their tokens against the uncached forward, and that nothing is held afterwards.

    Returns: what the engine counted meanwhile.
    """
    before = engine.stats()
    outputs = engine.generate(list(requests))
    for asked, output in zip(requests, outputs, strict=True):
        expected = uncached_greedy(tiny_model(), list(asked.prompt_token_ids), asked.sampling.max_tokens)
        assert [c.token_ids for c in output.completions] == [expected] * asked.sampling.n
    check_invariants(engine.state.decode)
    after = engine.stats()
    assert after["pages_free"] == engine.shapes.num_pages
    return {name: after[name] - before[name] for name in COUNTERS}


def test_a_prompt_is_computed_once(engine):
    first = run(engine, request(text(18)))
    assert first["prefix_hits"] == 0 and first["prefix_misses"] == 4
    again = run(engine, request(text(18)))
    assert again["prefix_hits"] == 4 and again["computed_prompt_tokens"] == 18 - 16
    longer = run(engine, request(text(18)[:10] + text(9, seed=1)))
    assert longer["prefix_hits"] == 2


def test_the_second_turn_of_a_chat_computes_what_is_new(engine):
    first = text(13)
    (output,) = engine.generate([request(first, max_tokens=12)])
    history = first + output.completions[0].token_ids
    turn = run(engine, request(history + text(7, seed=1)))
    stored = (len(history) - 1) // PAGE * PAGE  # the last token was sampled and not computed
    assert turn["computed_prompt_tokens"] == len(history) + 7 - stored


def test_equal_prompts_that_come_together_compute_their_beginning_once(engine):
    prompts = [text(33) + [i] * 3 for i in range(4)]
    counts = run(engine, *(request(ids) for ids in prompts))
    assert counts["prefix_hits"] == 3 * 8 and counts["computed_prompt_tokens"] == 36 + 3 * 4


def test_when_the_one_who_computes_is_cancelled_the_next_takes_over(engine):
    engine.warmup()
    groups = [engine.submit(request(text(49))) for _ in range(3)]
    engine.step_round(max_steps=2)
    engine.cancel(groups[0])
    while not all(group.is_done for group in groups):
        engine.step_round()
    engine.drain()
    expected = uncached_greedy(tiny_model(), text(49), 4)
    assert [sequence.token_ids for group in groups[1:] for sequence in group.sequences] == [expected] * 2
    check_invariants(engine.state.decode)
    assert engine.stats()["pages_free"] == engine.shapes.num_pages


def cached(engine: InferenceEngine, *requests: Request) -> list[int | None]:
    return [output.num_cached_tokens for output in engine.generate(list(requests))]


def test_outputs_say_how_much_of_their_prompt_was_found(engine):
    assert cached(engine, request(text(50))) == [0]
    assert cached(engine, request(text(50))) == [48]  # the rest of the last page is computed
    assert cached(engine, request(text(50), n=3), request(text(50)[:21] + text(20, seed=1))) == [48, 20]
    assert cached(engine, request(text(50), salt="a"), request(text(3))) == [0, 0]
    longer = text(50) + text(13, seed=2)  # computed in chunks of 16 behind what is found
    assert cached(engine, request(longer, max_tokens=1)) == [48]
    assert cached(engine, request(longer, max_tokens=1)) == [60]


def test_who_waits_for_a_beginning_that_another_computes_has_found_it(engine):
    prompts = [text(33) + [i] * 3 for i in range(4)]
    assert sorted(cached(engine, *map(request, prompts))) == [0, 32, 32, 32]


def test_a_page_that_another_has_begun_is_waited_for_also_by_who_goes_first():
    """A page of 16 tokens takes two steps of 8. The second request goes first, and stands before a page that the first
    one is within: it waits for that one, and is waited for at the next."""
    engine = shared_engine(page_size=16, max_step_tokens=8)
    engine.warmup()
    hits, misses = (engine.stats()[name] for name in ("prefix_hits", "prefix_misses"))
    first = engine.submit(request(text(35)))
    engine.step_round(max_steps=1)
    second = engine.submit(dataclasses.replace(request(text(35)), priority=-1))
    engine.drain()
    assert engine.stats()["prefix_hits"] - hits == engine.stats()["prefix_misses"] - misses == 2
    assert [group.output().num_cached_tokens for group in (first, second)] == [16, 16]


@pytest.mark.slow
def test_what_is_found_again_after_a_preemption_does_not_count_as_cached(small_engine):
    requests = [request(text(9, seed=i), max_tokens=24) for i in range(4)]
    before = small_engine.stats()
    assert cached(small_engine, *requests) == [0] * 4
    assert all(small_engine.stats()[name] > before[name] for name in ("preemptions", "prefix_hits"))
    assert cached(shared_engine(prefix_cache=False), *requests[:1] * 2) == [0, 0]


def test_samples_that_change_slots_keep_what_their_prompt_has_found(engine):
    engine.generate([request(text(18))])
    group = engine.submit(request(text(18), max_tokens=30, n=2))
    while not all(sample.token_ids for sample in group.sequences):
        engine.step_round(max_steps=1)
    engine.fork(group, 0, 2)
    engine.resample(group, [3, 2, 1, 0])
    engine.drain()
    assert group.output().num_cached_tokens == 16


def test_only_requests_of_one_salt_share(engine):
    assert run(engine, request(text(18), salt="a"))["prefix_hits"] == 0
    assert run(engine, request(text(18), salt="b"), request(text(18)))["prefix_hits"] == 0
    assert run(engine, request(text(18), salt="a"))["prefix_hits"] == 4


def root_of(engine: InferenceEngine, salt: str | None) -> int:
    return engine._intake.root(engine.prepare(dataclasses.replace(request(text(3), salt=salt), id="0")))


def test_a_salt_that_is_forgotten_finds_no_pages_and_neither_do_others(engine, monkeypatch):
    monkeypatch.setattr(intake, "_KEPT_ROOTS", 3)
    assert run(engine, request(text(18)), request(text(18), salt="a"))["prefix_hits"] == 0
    roots = [root_of(engine, salt) for salt in (None, "a", "b", "a", "c", "d", "b", "a", None)]
    plain, a, b, again, c, d, b_anew, a_anew, still_plain = roots
    assert (again, still_plain) == (a, plain)
    assert len({plain, a, b, c, d, b_anew, a_anew}) == 7
    assert len(engine._intake._roots) == 3
    assert run(engine, request(text(18), salt="a"))["prefix_hits"] == 0
    assert run(engine, request(text(18)))["prefix_hits"] == 4


def test_salts_beyond_the_last_number_share_nothing(engine, monkeypatch):
    monkeypatch.setattr(intake, "_FIRST_OWN_ROOT", 2)
    for salt, hits in (("a", 0), ("b", 0), ("c", 0), ("c", 0), ("a", 4)):
        assert run(engine, request(text(18), salt=salt))["prefix_hits"] == hits


@pytest.mark.parametrize("salt", ["", 5, "x" * 257])
def test_a_salt_that_is_none_is_refused(engine, salt):
    (output,) = engine.generate([request(text(3), salt=salt)])
    assert "cache_salt" in output.error


def test_samples_of_one_prompt_leave_pages_that_are_found(engine):
    run(engine, request(text(18), n=3))
    assert run(engine, request(text(18), n=2))["prefix_hits"] == 4


def test_pages_are_found_until_others_need_them_the_least_recently_released_first(small_engine):
    run(small_engine, request(text(25, seed=1)))
    run(small_engine, request(text(25, seed=2)))
    assert run(small_engine, request(text(25, seed=2)))["prefix_hits"] == 6
    assert run(small_engine, request(text(25, seed=3)))["prefix_evictions"] > 0
    assert run(small_engine, request(text(25, seed=2)))["prefix_hits"] == 6
    assert run(small_engine, request(text(25, seed=1)))["prefix_hits"] < 6


def test_a_preempted_sequence_finds_its_pages_again(small_engine):
    counted = run(small_engine, *(request(text(9, seed=i), max_tokens=24) for i in range(4)))
    assert counted["preemptions"] > 0 and counted["prefix_hits"] > 0


def test_who_waits_to_start_needs_room_only_for_what_nobody_holds(small_engine):
    """Four sequences of ten pages, eight of them common, in a pool that holds 20."""
    preempted = small_engine.stats()["preemptions"]
    requests = [request(text(33) + [i] * 3, max_tokens=4) for i in range(4)]
    groups = [small_engine.submit(asked) for asked in requests]
    running = 0
    while not all(group.is_done for group in groups):
        small_engine.step_round(max_steps=1)
        running = max(running, small_engine.stats()["running"])
    small_engine.drain()
    check_invariants(small_engine.state.decode)
    assert running == 4 and small_engine.stats()["preemptions"] == preempted
    for asked, group in zip(requests, groups, strict=True):
        assert group.sequences[0].token_ids == uncached_greedy(tiny_model(), list(asked.prompt_token_ids), 4)


@pytest.mark.slow
def test_without_the_cache_nothing_is_shared():
    engine = shared_engine(prefix_cache=False)
    run(engine, request(text(18)))
    assert run(engine, request(text(18)))["prefix_hits"] == 0
