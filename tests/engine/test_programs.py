"""Compiled programs: how many, and whether any of them copies the pool."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from levanter_infer.decode.programs import RecompilationError
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.engine.runner import empty_admission
from tests.hlo import pool_copies
from tests.tiny_models import SIZES, tiny_model

ROOT = Path(__file__).resolve().parents[2]


def random_request(rng: np.random.Generator) -> Request:
    """A request of random shape and parameters, some of them refused."""
    length = int(rng.integers(0, 60))
    sampling = SamplingParams(
        max_tokens=int(rng.integers(1, 12)),
        temperature=float(rng.choice([0.0, 0.7, 1.3])),
        top_k=int(rng.choice([0, 5])),
        top_p=float(rng.choice([1.0, 0.9])),
        min_p=float(rng.choice([0.0, 0.05])),
        n=int(rng.integers(1, 4)),
        logprobs=rng.choice([None, 0, 3]),
        frequency_penalty=float(rng.choice([0.0, 0.5])),
        presence_penalty=float(rng.choice([0.0, 0.5])),
        repetition_penalty=float(rng.choice([1.0, 1.2])),
        logit_bias={3: 2.0} if rng.random() < 0.2 else None,
        stop_token_ids=[int(rng.integers(0, 61))] if rng.random() < 0.3 else [],
        min_tokens=int(rng.integers(0, 2)),
        ignore_eos=bool(rng.random() < 0.5),
    )
    return Request(prompt_token_ids=rng.integers(0, 61, length).tolist(), sampling=sampling)


@pytest.mark.slow
def test_a_second_compilation_of_the_round_is_an_error_or_a_warning_that_names_what_changed(caplog):
    def wider(engine):
        """An admission with a place for twice as many prompt tokens."""
        admission = empty_admission(engine.shapes)
        return dataclasses.replace(admission, tokens=np.zeros(2 * admission.tokens.size, np.int32))

    model = tiny_model()
    strict = InferenceEngine(model, config=EngineConfig(**SIZES))
    strict.warmup()
    with pytest.raises(RecompilationError, match=r"admission\.tokens\S* was int32\[4096\] and is int32\[8192\]$"):
        strict.programs.round(strict.model, strict.state, wider(strict))

    lenient = InferenceEngine(model, config=EngineConfig(**SIZES, recompilation="warn"))
    lenient.warmup()
    lenient.programs.round(lenient.model, lenient.state, wider(lenient))
    assert "was int32[4096] and is int32[8192]" in caplog.text


def test_two_hundred_mixed_requests_compile_nothing_new():
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES, max_pages=20))
    engine.generate([Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=2))])
    engine.reset()
    programs = engine.stats()["programs"]
    assert programs == {"init": 1, "round": 1, "reset": 1, "zero_cache": 1}
    rng = np.random.default_rng(0)
    served = preemptions = 0
    for _ in range(10):
        outputs = engine.generate([random_request(rng) for _ in range(20)])
        served += sum(not output.error for output in outputs)
        preemptions += engine.stats()["preemptions"]
        if rng.random() < 0.3:
            engine.reset()
    assert served > 150 and preemptions > 0
    assert engine.stats()["programs"] == programs


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_round_program_makes_no_pool_sized_copy_on_a_cpu(dtype):
    config = EngineConfig(max_seqs=8, max_seq_len=256, max_pages=4096, max_step_tokens=64)
    engine = InferenceEngine(tiny_model(dtype=dtype), config=config)
    assert len(engine.shapes.buckets) == 3
    pool = engine.state.cache.pools[0].pages.array
    compiled = engine.programs.trace_round(engine.model, engine.state, engine.runner.nothing).lower().compile()
    assert pool_copies(compiled.as_text(), pool.shape, pool.dtype) == []
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < pool.nbytes


@pytest.mark.slow  # a minute of the TPU's compiler; CI compiles kernels only, test_tile_search.py
@pytest.mark.parametrize("options", [("xla",), ("tpu",), ("tpu", "glm_moe_dsa")], ids="-".join)
def test_the_round_and_the_programs_that_move_pages_make_no_pool_sized_copy_on_v5e(options):
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.tpu_compile", "v5e", *options],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},  # it refuses those of a CPU
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["copies"] == []
    assert report["temp_bytes"] < report["pool_bytes"]
    assert set(report["kv_offload"]) == {"read_pages", "write_pages"}
    for moved in report["kv_offload"].values():
        assert moved["copies"] == [] and moved["host_bytes"] > 0
        assert moved["temp_bytes"] < 2 * moved["host_bytes"]  # what is moved, once


def test_a_round_uploads_nothing_but_its_admission():
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES))
    request = Request(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=30))
    engine.generate([request])
    with jax.transfer_guard_host_to_device("disallow"):
        with pytest.raises(Exception, match="transfer"):
            jax.numpy.ones(3) + np.ones(3, np.float32)  # the guard works on this platform
        assert not engine.generate([request])[0].error


def test_an_empty_round_uploads_only_scalars():
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES))
    fields = engine._scheduler.next_admission(0, 1).arrays()
    assert all(np.shape(value) == (1,) for value in fields.values())  # one rank
