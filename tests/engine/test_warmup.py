"""`warmup` compiles all that requests need, and leaves no trace in the state."""

import dataclasses

from levanter_infer.checkpoints.load import open_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.decode.programs import Programs
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


def test_a_stored_model_is_read_while_the_round_is_compiled(tmp_path, monkeypatch):
    save_model(tiny_model(), tmp_path)
    stored, happened = open_model(resolve_source(tmp_path)), []
    compile_all = Programs.compile_all

    def compile_first(*arguments):
        compile_all(*arguments)
        happened.append("compilation begun")

    def read():
        happened.append("read")
        return stored.read()

    monkeypatch.setattr(Programs, "compile_all", compile_first)
    config = EngineConfig(max_seqs=2, max_seq_len=32, page_size=4)
    engine = InferenceEngine(dataclasses.replace(stored, read=read), config=config)
    assert happened == ["compilation begun", "read"]
    (output,) = engine.generate([REQUEST])
    assert output.completions[0].token_ids == uncached_greedy(tiny_model(), [3, 1, 4], 5)
    assert engine.stats()["programs"]["round"] == 1
