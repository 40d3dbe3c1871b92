"""Which instruction set the kernels for CPUs use: by measurement, record or configuration; and what is said without
them."""

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams, generate
from levanter_infer.engine import backend_choice, instructions
from levanter_infer.engine.backend_choice import BackendChoice
from levanter_infer.engine.instructions import ROWS, choose, fastest, from_record, usable_isas
from levanter_infer.engine.runner import shapes_for
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu.backend import CpuBackend
from levanter_infer.runtime.compile_cache import VARIABLE, cache_directory
from tests.tiny_models import tiny_model

CANDIDATES = ("avx512_bf16", "avx512", "avx2")
built = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")


@pytest.fixture(autouse=True)
def own_records(monkeypatch, tmp_path):
    """No record but those of the test, in this process and on the disk."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    instructions._measured.cache_clear()
    yield
    instructions._measured.cache_clear()


class Timer:
    """Stands in for the measurement: given milliseconds for each number of rows."""

    def __init__(self, **times: Sequence[float]):
        self.times, self.calls = {isa: list(each) for isa, each in times.items()}, 0

    def __call__(self, dtype: str, candidates: Sequence[str]) -> dict[str, list[float]]:
        self.calls += 1
        return {isa: self.times[isa] for isa in candidates}


SLOW_PAIRS = Timer(avx512_bf16=[1.0, 1.3, 1.9, 1.5], avx512=[1.0, 1.0, 1.0, 1.0], avx2=[1.1, 2.0, 2.0, 2.0])
FAST_PAIRS = Timer(avx512_bf16=[1.0, 0.8, 0.5, 0.6], avx512=[1.0, 1.0, 1.0, 1.0], avx2=[1.1, 2.0, 2.0, 2.0])


def record_file():
    (path,) = cache_directory().glob("cpu_isa-*.json")
    return path


@built
@pytest.mark.parametrize(("timer", "isa"), [(SLOW_PAIRS, "avx512"), (FAST_PAIRS, "avx512_bf16")])
def test_what_the_processor_has_and_is_slower_is_not_taken(timer, isa):
    assert from_record("bfloat16", CANDIDATES, timer).isa == isa


def test_of_equally_fast_ones_the_one_that_does_not_round_inputs_is_taken():
    assert fastest({"avx512_bf16": [0.98, 1, 1, 1], "avx512": [1, 1, 1, 1], "avx2": [1, 1, 1, 0.99]}) == "avx512"
    assert fastest({"avx512_bf16": [0.98, 1, 1, 1], "avx2": [1, 1, 1, 1]}) == "avx2"
    assert fastest({"avx512_bf16": [0.9, 0.9, 0.9, 0.9], "avx512": [1, 1, 1, 1]}) == "avx512_bf16"


def test_all_numbers_of_rows_count_alike():
    # One cell in which it loses by a little does not outweigh two in which it wins by a lot.
    assert fastest({"avx512_bf16": [1.2, 1, 0.6, 0.6], "avx512": [1, 1, 1, 1]}) == "avx512_bf16"


@built
def test_a_second_process_goes_by_the_record():
    first, other = from_record("bfloat16", CANDIDATES, SLOW_PAIRS), Timer()
    second = from_record("bfloat16", CANDIDATES, other)
    assert second == first and second.times == SLOW_PAIRS.times and other.calls == 0
    assert record_file().stat().st_mode & 0o777 == 0o600


@built
@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_measure_at_once_go_by_what_the_first_has_kept(monkeypatch, damaged):
    if damaged:
        from_record("bfloat16", CANDIDATES, SLOW_PAIRS)
        record_file().write_text("{")
    both, make = threading.Barrier(2), tempfile.mkstemp

    def measure(timer):
        def call(*asked):
            both.wait(10)
            return timer(*asked)

        return call

    def together(*args, **kwargs):
        with contextlib.suppress(threading.BrokenBarrierError):  # the other is not let in
            both.wait(0.5)
        return make(*args, **kwargs)

    monkeypatch.setattr(tempfile, "mkstemp", together)
    with ThreadPoolExecutor(2) as pool:
        each = [pool.submit(from_record, "bfloat16", CANDIDATES, measure(timer)) for timer in (SLOW_PAIRS, FAST_PAIRS)]
        first, second = (one.result(20) for one in each)
    assert first == second == from_record("bfloat16", CANDIDATES, Timer())


@built
def test_another_dtype_and_other_candidates_are_measured_for_themselves():
    from_record("bfloat16", CANDIDATES, SLOW_PAIRS)
    timer = Timer(avx512=[1, 1, 1, 1], avx2=[2, 2, 2, 2])
    assert from_record("float32", CANDIDATES[1:], timer).isa == "avx512" and timer.calls == 1
    assert from_record("bfloat16", CANDIDATES[1:], timer).isa == "avx512" and timer.calls == 2


def altered(**changes):
    def alter(path):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return alter


def replaced_by_link(path):
    target = path.with_name("elsewhere.json")
    path.rename(target)
    path.symlink_to(target)


WRONG = {
    "no JSON": lambda path: path.write_text("{"),
    "deep": lambda path: path.write_text("[" * 60_000),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "a list": lambda path: path.write_text("[]"),
    "empty": lambda path: path.write_text(""),
    "long": lambda path: path.write_text(path.read_text() + " " * (1 << 16)),
    "another processor": altered(processor="x"),
    "other kernels": altered(kernels="x"),
    "other rows": altered(rows=[1, 2]),
    "no times": altered(ms=None),
    "times of others": altered(ms={"avx2": [1.0] * len(ROWS)}),
    "too few": altered(ms={isa: [1.0] for isa in CANDIDATES}),
    "no time": altered(ms={isa: [0.0] * len(ROWS) for isa in CANDIDATES}),
    "no number": altered(ms={isa: ["1"] * len(ROWS) for isa in CANDIDATES}),
    "not finite": altered(ms={isa: [float("nan")] * len(ROWS) for isa in CANDIDATES}),
    "others can write": lambda path: path.chmod(0o666),
    "a link": replaced_by_link,
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@built
@pytest.mark.parametrize("how", WRONG)
def test_a_record_that_cannot_be_trusted_is_measured_again(how):
    timer = Timer(**FAST_PAIRS.times)
    from_record("bfloat16", CANDIDATES, SLOW_PAIRS)
    WRONG[how](record_file())
    assert from_record("bfloat16", CANDIDATES, timer).isa == "avx512_bf16" and timer.calls == 1
    if how != "a link":
        assert from_record("bfloat16", CANDIDATES, Timer()).isa == "avx512_bf16"  # and is kept in its place


@built
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_record_of_another_user_is_measured_again():
    timer = Timer(**FAST_PAIRS.times)
    from_record("bfloat16", CANDIDATES, SLOW_PAIRS)
    os.chown(record_file(), 12345, 12345)
    assert from_record("bfloat16", CANDIDATES, timer).isa == "avx512_bf16" and timer.calls == 1


@built
@pytest.mark.parametrize("unsafe", [True, False])
def test_nothing_is_kept_in_an_unsafe_directory_or_without_one(monkeypatch, unsafe):
    directory = cache_directory()
    if unsafe:
        directory.chmod(0o777)
    else:
        monkeypatch.setenv(VARIABLE, "off")
    timer = Timer(**SLOW_PAIRS.times)
    for _ in range(2):
        assert from_record("bfloat16", CANDIDATES, timer).isa == "avx512"
    assert timer.calls == 2 and not list(directory.iterdir())


@built
def test_the_measurement_is_short_and_covers_every_candidate():
    candidates = usable_isas("bfloat16")[:-1] or ("generic",)
    times = instructions.measure("bfloat16", candidates)
    assert tuple(times) == candidates
    assert all(len(each) == len(ROWS) and min(each) > 0 for each in times.values())


# Configuration


@built
def test_the_names_of_the_configuration_are_those_of_the_kernels():
    assert usable_isas()[0] == cpu.isa() and usable_isas()[-1] == "generic"
    assert usable_isas("float32") == tuple(isa for isa in usable_isas("bfloat16") if not isa.endswith("_bf16"))


def test_an_unknown_name_is_refused_with_the_list():
    names = "auto, amx_bf16, avx512_bf16, avx512, avx2"
    with pytest.raises(ValueError, match=f"engine.cpu_isa='avx1024' is not .*; use .*{names}"):
        EngineConfig(cpu_isa="avx1024")


@built
def test_what_is_asked_for_is_taken_without_a_measurement(monkeypatch):
    monkeypatch.setattr(instructions, "measure", None)
    for isa in usable_isas("float32"):
        assert BackendChoice.choose(EngineConfig(cpu_isa=isa), tiny_model(), has_mods=False).isa == isa


@built
def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(cpu, "isa", lambda: "avx2")
    with pytest.raises(ValueError, match='engine.cpu_isa="avx512" is not possible.* have avx2, generic on this proc'):
        choose("avx512", jnp.float32)


@built
@pytest.mark.parametrize("isa", ["amx_bf16", "avx512_bf16"])
def test_pairs_of_sixteen_bits_are_refused_for_float32(isa):
    with pytest.raises(ValueError, match=f'engine.cpu_isa="{isa}" is not possible for weights of float32'):
        choose(isa, jnp.float32)


@built
def test_it_is_refused_where_the_kernels_compute_nothing():
    config = EngineConfig(cpu_isa="avx2", matmul="xla", attention="xla")
    with pytest.raises(ValueError, match='engine.cpu_isa="avx2" is for the kernels for CPUs'):
        BackendChoice.choose(config, tiny_model(), has_mods=False)
    alone = BackendChoice.choose(EngineConfig(matmul="xla", attention="xla"), tiny_model(), has_mods=False)
    assert alone.isa is None


@pytest.mark.parametrize(
    ("isa", "max_seq_len", "tokens"), [("avx2", 64, 256), ("amx_bf16", 64, 512), ("amx_bf16", 6, 384)]
)
def test_steps_of_the_matmuls_in_tiles_have_more_tokens(isa, max_seq_len, tokens):
    config, model = EngineConfig(max_seqs=64, max_seq_len=max_seq_len, page_size=2), tiny_model(dtype="bfloat16")
    choice = BackendChoice.choose(config, model, has_mods=False)
    choice = dataclasses.replace(choice, matmul_backend=CpuBackend(isa=isa))
    assert shapes_for(config, model, choice, num_eos=1, is_loaded=True).max_step_tokens == tokens


def sampled(isa: str, dtype: str):
    config = EngineConfig(cpu_isa=isa, max_seqs=2, page_size=8, max_step_tokens=4, max_seq_len=64)
    engine = InferenceEngine(tiny_model(dtype=dtype), config=config)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
    (output,) = engine.generate([Request(prompt_token_ids=[1, 2, 3], sampling=sampling)])
    return engine, output.completions[0]


@pytest.mark.slow
@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_computes_with_the_chosen_one_everywhere(dtype, monkeypatch):
    names = usable_isas()
    monkeypatch.setattr(cpu, "isa", lambda: pytest.fail("the choice did not reach a kernel"))
    for module in (instructions, backend_choice):
        monkeypatch.setattr(module, "usable_isas", lambda dtype=None: names)
    engine, completion = sampled("generic", dtype)
    assert engine.describe()["cpu_isa"] == "generic" and engine.model.backend == CpuBackend(isa="generic")
    assert len(completion.token_ids) == 8


@built
@pytest.mark.slow
def test_instruction_sets_agree_but_for_rounding():
    by_isa = {isa: sampled(isa, "float32")[1] for isa in usable_isas("float32")}
    for completion in by_isa.values():
        assert completion.token_ids == by_isa["generic"].token_ids
        assert abs(completion.logprobs - by_isa["generic"].logprobs).max() < 1e-4


@pytest.mark.slow
@built
def test_the_choice_can_be_made_while_something_is_traced():
    model, sampling = tiny_model(), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

    @jax.jit
    def run(prompts, lens):
        return generate(model, prompts, lens, sampling, config=EngineConfig(page_size=8)).token_ids

    prompts = jnp.asarray([[1, 2, 3]], jnp.int32)
    assert jax.block_until_ready(run(prompts, jnp.asarray([3], jnp.int32))) is not None
    if len(usable_isas("float32")[:-1]) > 1:
        assert record_file()


# Processes of one job


class Lead:
    """Process 0 has decided."""

    def __init__(self, decided):
        self.decided = decided

    def broadcast(self, name, value=None):
        return self.decided


@built
def test_processes_of_a_job_take_the_instruction_set_of_the_first():
    here = BackendChoice.choose(EngineConfig(cpu_isa="generic"), tiny_model(), has_mods=False)
    assert here.agreed(None) is here and here.agreed(Lead("generic")) is here  # type: ignore[arg-type]
    assert here.agreed(Lead(cpu.isa())).isa == cpu.isa()  # type: ignore[arg-type]


@built
def test_a_process_that_does_not_have_it_says_so(monkeypatch):
    monkeypatch.setattr(cpu, "isa", lambda: "avx2")
    here = BackendChoice.choose(EngineConfig(cpu_isa="generic"), tiny_model(), has_mods=False)
    with pytest.raises(ValueError, match="process 0 computes with engine.cpu_isa=avx512, and this processor has avx2"):
        here.agreed(Lead("avx512"))  # type: ignore[arg-type]


# Without the kernels


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("levanter_infer.kernels._there_is_none", "they were not built"),
        ("json", "they were built for another system or version"),
    ],
)
def test_missing_kernels_are_one_warning_with_reason_and_remedy(monkeypatch, caplog, library, reason):
    monkeypatch.setattr(cpu, "_LIBRARY", library)
    for cached in (cpu._load, backend_choice._warn_of_missing_kernels):
        cached.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                chosen = BackendChoice.choose(EngineConfig(), tiny_model(), has_mods=False)
                assert (chosen.matmul, chosen.attention, chosen.isa) == ("xla", "xla", None)
                assert reason in chosen.isa_reason and "C++17 compiler" in chosen.isa_reason  # what doctor prints
        (record,) = caplog.records
        said = record.getMessage()
        assert record.levelno == logging.WARNING and reason in said
        assert "slower" in said and "C++17 compiler" in said
        with pytest.raises(ValueError, match=reason):
            BackendChoice.choose(EngineConfig(matmul="cpu"), tiny_model(), has_mods=False)
        with pytest.raises(ValueError, match=reason):
            cpu.isa()
    finally:
        monkeypatch.undo()
        for cached in (cpu._load, backend_choice._warn_of_missing_kernels):
            cached.cache_clear()
