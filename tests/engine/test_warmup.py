"""`warmup` compiles all that requests need, and leaves no trace in the state."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from levanter_infer.checkpoints.load import open_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.decode.programs import Programs
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import SIZES, tiny_model, uncached_greedy

REQUEST = Request(prompt_token_ids=[3, 1, 4], sampling=SamplingParams(max_tokens=5, temperature=0.0))


def test_requests_after_the_warmup_compile_nothing():
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES))
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


@pytest.mark.slow
def test_a_stored_model_is_read_while_the_round_is_compiled(tmp_path, monkeypatch):
    save_model(tiny_model(), tmp_path)
    stored, happened = open_model(resolve_source(tmp_path)), []
    compile_all = Programs.compile_all

    def compile_first(*arguments):
        compile_all(*arguments)
        happened.append("compilation begun")

    def read(layout):
        happened.append("read")
        if jax.default_backend() == "cpu":  # the compiler's memory is given back before the weights need it
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]
        return stored.read(layout)

    monkeypatch.setattr(Programs, "compile_all", compile_first)
    engine = InferenceEngine(dataclasses.replace(stored, read=read), config=EngineConfig(**SIZES))
    assert happened == ["compilation begun", "read"]
    (output,) = engine.generate([REQUEST])
    assert output.completions[0].token_ids == uncached_greedy(tiny_model(), [3, 1, 4], 5)
    assert engine.stats()["programs"]["round"] == 1


def test_what_is_refused_compiles_nothing_and_compiling_takes_nobodys_time(monkeypatch):
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES))
    compile_all, clock, compiled = Programs.compile_all, time.perf_counter, []
    monkeypatch.setattr(Programs, "compile_all", lambda *arguments: compiled.append(compile_all(*arguments)))
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 2000.0 * len(compiled))
    refused = [
        Request(prompt_token_ids=[3] * 65, sampling=SamplingParams(num_beams=2)),
        Request(prompt_token_ids=[3], sampling=SamplingParams(prompt_logprobs=0, max_tokens=99)),
        Request(prompt_token_ids=[], timeout_s=1.0),
    ]
    assert all(output.error for output in engine.generate(refused)) and engine.generate([]) == []
    for request in refused:
        with pytest.raises(ValueError):
            engine.submit(request)
    with pytest.raises(ValueError, match="sequences\\[1\\]"):
        engine.score([[1, 2], [-4]])
    assert not compiled and engine.shapes.scoring is None and not engine.shapes.max_beams
    (output,) = engine.generate([dataclasses.replace(REQUEST, timeout_s=1000.0)])
    assert len(compiled) == 1 and output.completions[0].finish_reason == "length"


@pytest.mark.slow
def test_an_engine_is_made_and_called_where_its_caller_has_enabled_64_bits():
    config = EngineConfig(**SIZES, max_pages=20)
    expected = uncached_greedy(tiny_model(), [3, 1, 4], 20)
    with jax.enable_x64(True):
        engine = InferenceEngine(tiny_model(), config=config, scoring=True)
        group = engine.submit(dataclasses.replace(REQUEST, sampling=SamplingParams(max_tokens=20, temperature=0.0)))
        engine.step_round(max_steps=2)
        engine.step_round(max_steps=2)
        engine.fork(group, 0)
        engine.spill_to_host(group.sequences[0])
        engine.drain()
        assert engine.score([[3, 1, 4]])[0].shape == (2,)
        engine.swap_weights(tiny_model())
        engine.reset()
        check_invariants(engine.state.decode)
        (output,) = engine.generate([REQUEST])
    assert [sequence.token_ids for sequence in group.sequences] == [expected, expected]
    assert output.completions[0].token_ids == expected[:5]
    assert engine.generate([REQUEST])[0].completions[0].token_ids == expected[:5]


@pytest.mark.slow
def test_an_engine_is_made_and_called_where_its_caller_has_disabled_jit():
    with jax.disable_jit():
        engine = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES))
        (output,) = engine.generate([REQUEST])
    assert output.completions[0].token_ids == uncached_greedy(tiny_model(), [3, 1, 4], 5)


@pytest.mark.slow
def test_an_engine_is_made_and_called_within_a_mesh_that_its_caller_has_set():
    config = EngineConfig(max_seqs=4, max_seq_len=32, page_size=4, max_step_tokens=4)
    search = Request(prompt_token_ids=[3, 1, 4], sampling=SamplingParams(max_tokens=4, num_beams=2))
    expected = InferenceEngine(tiny_model(), config=config).generate([REQUEST, search])
    trainers = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("replica", "model"))
    with jax.set_mesh(trainers):
        engine = InferenceEngine(tiny_model(), config=config, scoring=True)
        found = engine.generate([REQUEST, search])
        engine.swap_weights(tiny_model())
        (scores,) = engine.score([[3, 1, 4]])
    assert [o.completions[0].token_ids for o in found] == [o.completions[0].token_ids for o in expected]
    assert scores.shape == (2,) and engine.generate([REQUEST])[0].completions[0].token_ids == uncached_greedy(
        tiny_model(), [3, 1, 4], 5
    )
