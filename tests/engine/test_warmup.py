"""`warmup` compiles all that requests need, and leaves no trace in the state."""

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import tiny_model, uncached_greedy

REQUEST = Request(prompt_token_ids=[3, 1, 4], sampling=SamplingParams(max_tokens=5, temperature=0.0))


def test_requests_after_the_warmup_compile_nothing():
    engine = InferenceEngine(tiny_model(), config=EngineConfig(max_seqs=2, max_seq_len=32, page_size=4))
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
