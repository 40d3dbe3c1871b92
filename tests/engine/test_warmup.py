"""`warmup` compiles all that requests need, and leaves no trace in the state."""

import pytest

from levanter_infer.decode import programs as programs_module
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import tiny_model, uncached_greedy

REQUEST = Request(prompt_token_ids=[3, 1, 4], sampling=SamplingParams(max_tokens=5, temperature=0.0))


class MemoryStore(dict):
    """Keeps programs as a directory would."""

    def load(self, description: str) -> bytes | None:
        return self.get(description)

    def save(self, description: str, program: bytes) -> None:
        self[description] = program


def make_engine(store, **changes) -> InferenceEngine:
    sizes = dict(max_seqs=2, max_seq_len=32, page_size=4)
    return InferenceEngine(tiny_model(), config=EngineConfig(**sizes | changes), store=store)


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return MemoryStore()


def test_requests_after_the_warmup_compile_nothing(store):
    engine = make_engine(store)
    engine.warmup()
    programs, seconds = engine.stats()["programs"], engine.stats()["compile_s"]
    assert programs["round"] == 1 and seconds > 0
    assert engine.stats()["steps"] == engine.stats()["rounds"] == 0
    check_invariants(engine.state.decode)
    (output,) = engine.generate([REQUEST])
    assert output.completions[0].token_ids == uncached_greedy(tiny_model(), [3, 1, 4], 5)
    engine.warmup()
    assert engine.stats()["programs"] == programs and engine.stats()["compile_s"] == seconds
    assert engine.stats()["time_to_first_token_s"] < seconds


def test_a_start_that_finds_its_programs_traces_nothing_and_gives_the_same(store, monkeypatch):
    assert len(store) == 2, "the test before saves init and round"

    def traced(*_):
        raise AssertionError("the round was traced")

    monkeypatch.setattr(programs_module, "run_round", traced)
    engine = make_engine(store)
    for _ in range(2):
        (output,) = engine.generate([REQUEST])
        assert output.completions[0].token_ids == uncached_greedy(tiny_model(), [3, 1, 4], 5)
    assert engine.stats()["programs"]["round"] == 1
    check_invariants(engine.state.decode)


@pytest.mark.parametrize("changes", [{"max_seq_len": 36}, {"max_round_steps": 7}, {"attention": "reference"}])
def test_a_program_of_other_sizes_is_not_found(store, changes, monkeypatch):
    monkeypatch.setattr(programs_module, "run_round", lambda *_: pytest.fail("traced, as it should be"))
    with pytest.raises(pytest.fail.Exception, match="as it should be"):
        make_engine(store, **changes).warmup()


def test_a_users_function_keeps_the_programs_out_of_the_store(store):
    before = len(store)
    model, config = tiny_model(), EngineConfig(max_seqs=2, max_seq_len=32, page_size=4)
    InferenceEngine(model, config=config, score_mod=lambda score, q, k, head: score, store=store)
    assert len(store) == before
