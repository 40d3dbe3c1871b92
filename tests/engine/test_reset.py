"""`reset` forgets sequences and leaves the pool alone; `zero_cache` wipes it and leaves the tables alone."""

import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import SIZES, tiny_model, uncached_greedy

REQUEST = Request(prompt_token_ids=[5, 6, 7, 8, 9], sampling=SamplingParams(max_tokens=6, temperature=0.0))


@pytest.fixture(scope="module")
def engine():
    return InferenceEngine(tiny_model(), config=EngineConfig(**SIZES, max_pages=20), scoring=True)


def pool(engine: InferenceEngine) -> np.ndarray:
    return np.array(engine.state.cache.pools[0].pages.array)


def test_reset_empties_the_tables_and_writes_nothing_to_the_pool(engine):
    group = engine.submit(Request(prompt_token_ids=[1] * 9, sampling=SamplingParams(max_tokens=20)))
    engine.step_round()
    stored = pool(engine)
    assert stored.any() and int(engine.state.decode.page_table.num_free) < engine.shapes.num_pages
    engine.reset()
    assert np.array_equal(pool(engine), stored)
    decode = engine.state.decode
    check_invariants(decode)
    assert int(decode.page_table.num_free) == engine.shapes.num_pages and not decode.page_table.ref_counts.any()
    assert (decode.sequences.page_indices == engine.shapes.num_pages).all() and not decode.sequences.seq_lens.any()
    assert not decode.sequences.status.any()
    assert group.sequences[0].finish_reason == "abort"


def test_results_after_a_reset_do_not_depend_on_what_the_pool_still_holds(engine):
    engine.reset()
    engine.zero_cache()
    clean = engine.generate([REQUEST])[0].completions[0].token_ids
    engine.generate([Request(prompt_token_ids=[1] * 9, sampling=SamplingParams(max_tokens=20))] * 3)
    engine.reset()
    assert pool(engine).any()
    assert engine.generate([REQUEST])[0].completions[0].token_ids == clean


def test_prompts_one_after_another_need_neither_reset_nor_wipe(engine):
    engine.reset()
    before = engine.stats()["programs"]["reset"], engine.stats()["programs"]["zero_cache"]
    outputs = [engine.generate([REQUEST])[0].completions[0].token_ids for _ in range(20)]
    assert outputs == [outputs[0]] * 20
    stats = engine.stats()
    assert stats["pages_free"] == engine.shapes.num_pages and stats["preemptions"] == 0
    assert (stats["programs"]["reset"], stats["programs"]["zero_cache"]) == before


def test_generate_calls_neither_reset_nor_wipe(engine, monkeypatch):
    """A wipe of the pool at each call would give the same results, and compile nothing."""
    engine.reset()
    engine.score([[1, 2, 3]])  # what reads scores is compiled by the first call
    called = []
    for name in ("reset", "zero_cache", "init"):
        program = getattr(engine.programs, name)
        monkeypatch.setattr(
            engine.programs, name, lambda *state, name=name, program=program: (called.append(name), program(*state))[1]
        )
    for _ in range(3):
        assert engine.generate([REQUEST])[0].error is None
        engine.score([[1, 2, 3]])
    assert called == []
    engine.zero_cache()
    engine.reset()
    assert called == ["zero_cache", "reset"]


def test_zero_cache_clears_every_byte_and_keeps_the_tables(engine):
    engine.generate([REQUEST])
    assert pool(engine).any()
    tokens = np.array(engine.state.decode.sequences.tokens)
    engine.zero_cache()
    assert not pool(engine).any()
    assert np.array_equal(engine.state.decode.sequences.tokens, tokens)


def test_zero_cache_while_requests_run_is_refused(engine):
    engine.reset()
    engine.submit(REQUEST)
    engine.step_round()
    with pytest.raises(ValueError, match="in progress"):
        engine.zero_cache()
    engine.drain()
    engine.zero_cache()


@pytest.mark.parametrize("ends", ["cancelled", "resampled", "forked"])
def test_what_a_reset_has_ended_does_not_harm_who_got_its_slots(engine, ends):
    engine.reset()
    old = engine.submit(Request(prompt_token_ids=[1] * 3, sampling=SamplingParams(max_tokens=20, n=2)))
    while not all(sample.token_ids for sample in old.sequences):
        engine.step_round(max_steps=1)
    engine.reset()
    sampling = SamplingParams(max_tokens=20, n=2, temperature=0.0)
    new = engine.submit(Request(prompt_token_ids=[4, 5, 6], sampling=sampling))
    while not all(sample.token_ids for sample in new.sequences):
        engine.step_round(max_steps=1)
    if ends == "cancelled":
        engine.cancel(old)
    elif ends == "resampled":
        engine.resample(old, [1, 0])
    else:
        assert [sample.finish_reason for sample in engine.fork(old, 0, 2)] == ["abort"] * 2
    engine.drain()
    alone = uncached_greedy(tiny_model(), [4, 5, 6], 20)
    assert [(s.finish_reason, s.token_ids) for s in new.sequences] == [("length", alone)] * 2
    check_invariants(engine.state.decode)
    assert engine.stats()["pages_free"] == engine.shapes.num_pages
