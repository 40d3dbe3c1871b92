"""`reset` forgets sequences and leaves the pool alone; `zero_cache` wipes it and leaves the tables alone."""

import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import tiny_model

REQUEST = Request(prompt_token_ids=[5, 6, 7, 8, 9], sampling=SamplingParams(max_tokens=6, temperature=0.0))


@pytest.fixture(scope="module")
def engine():
    return InferenceEngine(tiny_model(), config=EngineConfig(max_seqs=2, max_seq_len=32, page_size=4, max_pages=16))


def pool(engine: InferenceEngine) -> np.ndarray:
    return np.array(engine.state.kv.pages.array)


def test_reset_empties_the_tables_and_writes_nothing_to_the_pool(engine):
    group = engine.submit(Request(prompt_token_ids=[1] * 9, sampling=SamplingParams(max_tokens=20)))
    engine.step_round()
    stored = pool(engine)
    assert stored.any() and int(engine.state.decode.page_table.num_free.array) < 16
    engine.reset()
    assert np.array_equal(pool(engine), stored)
    decode = engine.state.decode
    check_invariants(decode)
    assert int(decode.page_table.num_free.array) == 16 and not decode.page_table.ref_counts.array.any()
    assert (decode.sequences.page_indices.array == 16).all() and not decode.sequences.seq_lens.array.any()
    assert not decode.sequences.status.array.any()
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
    assert stats["pages_free"] == 16 and stats["preemptions"] == 0
    assert (stats["programs"]["reset"], stats["programs"]["zero_cache"]) == before


def test_zero_cache_clears_every_byte_and_keeps_the_tables(engine):
    engine.generate([REQUEST])
    assert pool(engine).any()
    tokens = np.array(engine.state.decode.sequences.tokens.array)
    engine.zero_cache()
    assert not pool(engine).any()
    assert np.array_equal(engine.state.decode.sequences.tokens.array, tokens)


def test_zero_cache_while_requests_run_is_refused(engine):
    engine.reset()
    engine.submit(REQUEST)
    engine.step_round()
    with pytest.raises(ValueError, match="in progress"):
        engine.zero_cache()
    engine.drain()
    engine.zero_cache()
