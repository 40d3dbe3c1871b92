"""Figures that the benches make of times: clocks, engines and runs that are constructed, so that each is known."""

import argparse
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.bench import attention, control, machine, memory, open_loop, page_size, scenarios
from levanter_infer.bench.attention import Case, Clock, gather, gathered_pages, inputs
from levanter_infer.bench.machine import Peaks, device_peaks
from levanter_infer.bench.progress import Progress
from levanter_infer.bench.report import summarize, utilisation
from levanter_infer.bench.timeline import Round, Timeline
from levanter_infer.decode.state import DecodeState
from levanter_infer.engine.memory_audit import MemoryAudit
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request, RequestOutput
from tests.bench.test_open_loop import constructed
from tests.jaxprs import equations

CASE = Case("decode", 2, 12, 1, page_size=4, heads=4, kv_heads=2, head_dim=8, dtype="float32")


class FakeTime:
    """`time` of a module, whose clock goes only when something says so."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = FakeTime()
    for module in (attention, control, page_size, scenarios):
        if hasattr(module, "time"):
            monkeypatch.setattr(module, "time", fake)
    return fake


# Statistics, shares


def test_a_summary_has_the_sample_deviation_of_its_runs():
    assert summarize([1.0, 2.0, 6.0]) == {"median": 2.0, "min": 1.0, "max": 6.0, "sd": 2.6458, "runs": 3}
    assert summarize([3.0])["sd"] == 0.0


def test_utilisation_is_the_share_of_what_the_device_could_do():
    found = utilisation(5e9, 2e11, Peaks(memory_gbps=20.0, tflops=0.8))
    assert found == {"bandwidth_utilisation": 0.25, "compute_utilisation": 0.25}
    assert set(utilisation(1.0, 1.0, None).values()) == {None}


def test_peaks_are_measured_on_a_cpu_and_known_by_name_elsewhere(monkeypatch):
    monkeypatch.setattr(machine.probe, "memory_gbps", lambda: 20.0)
    monkeypatch.setattr(machine.probe, "tflops", {"float32": 0.4, "bfloat16": 0.1}.__getitem__)

    def peaks(platform: str, kind: str) -> Peaks | None:
        device = types.SimpleNamespace(platform=platform, device_kind=kind)
        monkeypatch.setattr(machine.jax, "devices", lambda: [device])
        return device_peaks("bfloat16")

    assert peaks("cpu", "cpu") == Peaks(20.0, 0.4)
    assert peaks("tpu", "TPU v5 lite") == Peaks(820, 197) and peaks("tpu", "TPU v5p") == Peaks(2765, 459)
    assert peaks("gpu", "NVIDIA H100 80GB HBM3") == Peaks(3350, 989) and peaks("gpu", "NVIDIA H200") == Peaks(4800, 989)
    assert peaks("tpu", "TPU v9") is None and peaks("gpu", "Quadro") is None


# bench attention: M54, M66, M69, M67


def test_a_trip_takes_what_all_trips_take_divided_by_their_number(clock, monkeypatch):
    def compiled(function, donate=()):
        def run(trips, first, *rest):
            clock.now += 0.004 * int(trips)
            return first

        return run

    monkeypatch.setattr(attention, "compile_program", compiled)
    times, _ = Clock(repeats=3, milliseconds=20).per_trip(lambda: None, 0)
    assert times == {"median": 4.0, "min": 4.0, "max": 4.0, "sd": 0.0, "runs": 3}


def test_each_part_of_attention_stands_under_its_name(monkeypatch):
    """Fetching, computing and writing are distinguished, and rates are those of the whole call."""
    milliseconds = {"gather": 3.0, "attend_to_gathered": 5.0, "write": 7.0, "copy": 11.0, "attend": 2.0}

    def per_trip(self, function, first, *rest, donate=False):
        name = getattr(function, "__name__", None) or function.func.__name__
        return summarize([milliseconds[name]]), first

    monkeypatch.setattr(Clock, "per_trip", per_trip)
    (line,) = attention.measure(CASE, ["xla"], Clock(1, 1.0), Peaks(1.0, 1e-3))
    names = ("gather_ms", "softmax_ms", "kv_write_ms", "copy_page_ms", "total_ms")
    assert [line[name]["median"] for name in names] == [3.0, 5.0, 7.0, 11.0, 2.0]
    live = 2 * 12 * 2 * 2 * 8 * 4  # rows, tokens, K and V, heads, head size, f32
    assert (line["pages_touched"], line["paged_kv_bytes_read"]) == (6, live)
    assert line["gb_per_s"] == round(live / 2e-3 / 1e9, 3)
    flops = 2 * 12 * 4 * 4 * 8
    assert line["gflop_per_s"] == round(flops / 2e-3 / 1e9, 3)
    assert line["bandwidth_utilisation"] == round(live / 2e-3 / 1e9, 4)
    assert line["compute_utilisation"] == round(flops / 2e-3 / 1e9, 4)


def test_each_trip_of_the_gather_waits_for_the_one_before():
    """A gather depends on the one before: without that, trips could be left out or overlap."""
    kv, batch, *_ = inputs(CASE)
    last = np.zeros_like(gathered_pages(kv, batch, 0))
    bits = []
    for trip in range(6):
        bits.append(int(np.asarray(last).view(np.uint32).reshape(-1)[0] & 1))
        table = jnp.roll(batch.page_indices.array, bits[-1], axis=1)
        last = np.asarray(kv.pages.array[trip % 2, table]).reshape(last.shape)
        np.testing.assert_array_equal(gather(trip + 1, kv, batch), last)
    assert 1 in bits, "no trip was turned: another seed would show more"


# bench page-size: M67, M73


def test_steps_with_a_chunk_of_a_prompt_are_told_from_those_without():
    seconds = [0.5, 0.3, *(i / 1000 for i in range(1, 102))]
    found = page_size.step_times({"seconds": seconds, "prompts": [1, 1] + [0] * 101})
    assert found == {
        "decode_tick_ms_p50": 51.0, "decode_tick_ms_p95": 96.0, "prefill_chunk_ms": 400.0, "decode_ticks": 101,
    }  # fmt: skip


def test_rate_and_waste_of_a_page_size(clock, monkeypatch):
    """Calls of two seconds; two steps that hold 30 and 50 tokens in 64 places each."""

    class Engine:
        def __init__(self, model, config):
            pass

        def generate(self, requests):
            clock.now += 2.0
            return [output([1, 2, 3]) for _ in requests]

        def describe(self):
            return {}

    steps = {"seconds": [2.0, 1.0], "prompts": [1, 0], "stored": [30, 50], "capacity": [64, 64]}
    monkeypatch.setattr(page_size, "InferenceEngine", Engine)
    monkeypatch.setattr(page_size, "step_by_step", lambda *_: {**steps, "token_ids": [[1, 2, 3]] * 4})
    args = options(page_size, output=3, prompt=8, repeats=2)
    model = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=61))
    case = page_size.measure(model, args, batch=4, page_size=8)
    assert case["generated_tokens_per_s"]["median"] == 4 * 3 / 2.0
    assert case["one_step_rounds_cost"] == 1.5 and case["wasted_percent"] == 37.5
    assert (case["decode_tick_ms_p50"], case["prefill_chunk_ms"]) == (1000.0, 2000.0)


# bench control: I7, I11


def test_a_step_of_the_control_path_is_its_share_of_a_launch(clock, monkeypatch):
    def compiled(function, donate=()):
        def run(state):
            clock.now += 0.3
            return state

        return run

    monkeypatch.setattr(control, "compile_program", compiled)
    case = control.measure(4, 32, options(control, steps=200, repeats=3))
    assert case["step_ms"] == 1.5 == case["step_ms_spread"]["max"]
    assert set(case["per_step"].values()) == {0.0}
    assert 0 < case["free_pages"] <= 2 + 4  # 97 % of 32 pages are held, and what rounding leaves


def test_a_step_allocates_with_as_many_operations_for_any_number_of_sequences_and_pages():
    """I7: whatever is done for each sequence or page is done by whole arrays."""

    def operations(slots: int, pages: int) -> list[str]:
        shapes = control.control_shapes(slots, pages)
        program = jax.make_jaxpr(lambda state: control.schedule(state, shapes))(DecodeState.init(shapes))
        return [eqn.primitive.name for eqn in equations(program.jaxpr)]

    few, many = operations(64, 256), operations(1024, 4096)
    assert len(few) > 100 and few == many


# bench memory: I26, I27, I33, I42


def test_what_audits_say_of_live_reserved_and_wasted_bytes():
    engine = types.SimpleNamespace(
        shapes=types.SimpleNamespace(page_size=8, num_pages=100, max_seq_len=80), stats=lambda: {"preemptions": 3}
    )
    before = MemoryAudit(8, 4, 30, 40, {}, {0: 4}, {0: 30})
    top = MemoryAudit(8, 10, 70, 40, {}, {0: 5, 1: 6}, {0: 40, 1: 40})
    found = memory.summary([before, top], engine, page_bytes=80, weights_bytes=1000)  # type: ignore[arg-type]
    assert (found["reserved_bytes"], found["live_bytes"], found["wasted_bytes"]) == (800, 700, 100)
    assert (found["sequences"], found["unshared_bytes"], found["contiguous_bytes"]) == (2, 880, 1600)
    overheads = [(1000 + 40 + 320) / (1000 + 300) - 1, (1000 + 40 + 800) / (1000 + 700) - 1]
    assert found["memory_overhead"] == round(overheads[1], 4)
    assert found["largest_overhead"] == round(max(overheads), 4)
    assert found["wasted_percent"] == round(100 * (2 + 10) / (32 + 80), 2)
    assert not found["within_limits"] and found["preemptions"] == 3


@pytest.mark.parametrize("on_device", [False, True])
def test_the_peak_is_that_of_the_device_or_what_the_process_took_since_it_began(monkeypatch, on_device):
    peaks = iter([150, 500, 400])

    class Engine:
        model = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=61))

        def __init__(self, model, config):
            pass

        def warmup(self):
            pass

        def generate(self, requests):
            return []

        def stats(self):
            return {"weights_bytes": 20, "pool_bytes": 10, "compile_s": 1.0}

        def memory(self):
            return {"table_bytes": 5}

        def describe(self):
            return {}

    device = types.SimpleNamespace(memory_stats=lambda: {} if on_device else None)
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(memory.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(memory, "process_bytes", lambda: (100, 0))
    monkeypatch.setattr(memory, "peak_bytes", lambda: next(peaks))
    monkeypatch.setattr(memory, "InferenceEngine", Engine)
    monkeypatch.setattr(memory, "open_model", lambda _: None)
    monkeypatch.setattr(memory, "resolve_source", lambda _: None)
    monkeypatch.setattr(memory, "_PEAK_ALLOWANCE", 300)
    case = memory._run_checkpoint("nowhere", options(memory))
    base = 0 if on_device else 100
    assert case["peak_after_bytes"] == {"load": 150 - base, "compile": 500 - base, "run": 400 - base}
    assert case["peak_memory_bytes"] == 400 - base
    assert case["limit_bytes"] == 330 and case["within_limit"] == (not on_device)


# bench scenarios: I28, I34 to I40


def options(bench, **changed) -> argparse.Namespace:
    """The defaults of a bench, and what a test wants otherwise."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **changed})


def output(ids: list[int]) -> RequestOutput:
    completion = types.SimpleNamespace(token_ids=ids)
    return types.SimpleNamespace(completions=[completion], error=None)  # type: ignore[return-value]


class FakeEngine:
    """The answers of an engine that the scenarios ask for: 10 bytes a token, 5 pages of 16 at most."""

    shapes = types.SimpleNamespace(page_size=16, prefix_cache=True)

    def __init__(self):
        self.computed = 0

    def stats(self) -> dict:
        sizes = {"page_bytes": 160, "pages_peak": 5, "pool_bytes": 1600, "weights_bytes": 1000}
        return {**sizes, "computed_prompt_tokens": self.computed}


@pytest.fixture
def steady_engine(monkeypatch):
    """Runs in which prompts take 2 ms a token, the first half of them 1, and generation 50 ms a token, the last 4 of
    each sequence 100."""
    engine = FakeEngine()

    def record(_, prompts, max_tokens):
        prompt, rows = sum(map(len, prompts)), len(prompts)
        engine.computed += prompt - 3
        seconds, generated, computed, now = [0.0], [0], [0], 0.0
        for i in range(prompt):
            now += 0.001 if i < prompt / 2 else 0.003
            seconds.append(now), generated.append(0), computed.append(i + 1)
        first = now
        for i in range(max_tokens):
            now += 0.05 if i < max_tokens - 4 else 0.1
            seconds.append(now), generated.append(rows * (i + 1)), computed.append(prompt)
        return Progress([output([7] * max_tokens)] * rows, seconds, generated, computed, first)

    model = types.SimpleNamespace(
        config=types.SimpleNamespace(vocab_size=61, num_parameters=100, num_heads=2, head_dim=8, num_layers=3)
    )
    monkeypatch.setattr(scenarios, "record", record)
    monkeypatch.setattr(scenarios, "make_model", lambda *_, **__: model)
    monkeypatch.setattr(scenarios, "make_engine", lambda *_, **__: engine)
    monkeypatch.setattr(scenarios, "peak_bytes", lambda: 4096)
    monkeypatch.setattr(scenarios, "device_peaks", lambda _: Peaks(memory_gbps=1e-3, tflops=1e-3))
    return engine


def test_one_long_sequence_is_timed_to_its_first_token_and_over_its_last_ones(steady_engine):
    (line,) = scenarios.single(options(scenarios, tokens=80, generate=16, window=4))
    assert line["time_to_first_token_s"] == pytest.approx(32 * 0.001 + 32 * 0.003)
    assert line["prefill_tokens_per_s"] == pytest.approx(64 / 0.128, abs=0.1)
    assert line["prefill_tokens_per_s_first_eighth"] == 1000 and line["prefill_tokens_per_s_last_eighth"] == 333.3
    assert (line["inter_token_ms"], line["final_tokens_per_s"]) == (100.0, 10.0)
    assert (line["live_kv_bytes"], line["held_kv_bytes"]) == (790, 800)
    assert line["kv_overhead"] == round(80 / 79 - 1, 5) and line["peak_memory_bytes"] == 4096


def test_rates_of_a_batch_count_all_its_sequences(steady_engine):
    (line,) = scenarios.mixed(options(scenarios, mixed=(10, 30), generate=16, window=4))
    assert line["time_to_first_token_s"] == pytest.approx(20 * 0.001 + 20 * 0.003)
    assert line["final_tokens_per_s"] == 20.0  # two sequences, a token each in 0.1 s
    total = 0.08 + 12 * 0.05 + 4 * 0.1
    assert line["total_s"] == pytest.approx(total) and line["tokens_per_s"] == pytest.approx((40 + 32) / total, abs=0.1)
    assert line["unpaged_kv_overhead"] == round(2 * 47 / (40 + 2 * 15) - 1, 5)


def test_each_turn_of_a_chat_is_timed_by_itself(steady_engine):
    first, second = scenarios.chat(options(scenarios, chat=(10, 40), generate=16, window=4))
    assert (first["history"], second["history"]) == (10, 40)
    assert first["time_to_first_token_s"] == pytest.approx(0.02)
    assert second["time_to_first_token_s"] == pytest.approx(0.08)
    assert second["prompt_tokens_computed"] == 37 and second["note"] == "pages were reused"
    assert (second["inter_token_ms"], second["final_tokens_per_s"]) == (100.0, 10.0)


def test_the_last_tokens_of_a_long_generation_are_compared_with_the_first(steady_engine):
    (line,) = scenarios.long(options(scenarios, long=20, batch=2, window=4))
    first, last = line["first"], line["last"]
    assert (first["ms_per_step"], last["ms_per_step"]) == (50.0, 100.0)
    assert (first["tokens_per_s"], last["tokens_per_s"]) == (40.0, 20.0)
    # Weights, and of two sequences the prompt, what came before and half of the window.
    assert first["bytes_per_step"] == 1000 + 2 * (16 + 1 + 2) * 10
    assert last["bytes_per_step"] == 1000 + 2 * (16 + 16 + 2) * 10
    assert line["last_to_first_gb_per_s"] == round(last["bytes_per_step"] / first["bytes_per_step"] / 2, 3)
    assert last["bandwidth_utilisation"] == round(last["bytes_per_step"] / 0.1 / 1e6, 4)
    flops = 2 * 2 * 100 + 4 * 2 * (16 + 16 + 2) * 2 * 8 * 3
    assert last["compute_utilisation"] == round(flops / 0.1 / 1e9, 4)


def test_growth_over_the_context_is_an_exponent_of_measured_times(clock, monkeypatch, steady_engine):
    """I48: a cost that is quadratic without a cache is reported as 2, and with one as what it is."""

    def forward(model, tokens, length):
        clock.now += 1e-6 * len(tokens) ** 2
        return jnp.int32(0)

    monkeypatch.setattr(scenarios, "compile_program", lambda _: forward)
    cached, uncached = scenarios.lengths(
        options(scenarios, lengths=(16, 32, 64), uncached=(16, 32, 64, 128), window=8, repeats=1)
    )
    assert (uncached["form"], uncached["exponent"]) == ("uncached", 2.0)
    assert uncached["next_to_last"] == [4.0, 4.0, 4.0] and uncached["exponent_of_growing_part"] == pytest.approx(
        2, abs=0.02
    )
    # Eight tokens after the first: four of 50 ms, four of 100.
    assert [entry["median"] for entry in cached["ms_per_token"]] == [75.0] * 3 and cached["exponent"] == 0.0


# bench open-loop: M1, M68, M71, M92, I29, I30


def closed_run() -> Timeline:
    """Two requests at a time, a token each a second; six seconds, of which the last is the tail."""
    times = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0], [4.0, 5.0, 6.0]]
    rounds = [Round(float(end), 1.0, 1, int(end in (1, 4)), 2, decoding=2 if end < 5 else 1) for end in range(1, 7)]
    return Timeline([0.0] * 3, times, [[1] * 3, [2] * 5, [3] * 3], rounds)


def requests(*counts: int) -> list[Request]:
    return [
        Request(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0))
        for n in counts
    ]


def test_the_whole_run_at_saturation_is_held_against_its_steady_phase(monkeypatch, capsys):
    monkeypatch.setattr(open_loop, "run_continuous", lambda *_, **__: closed_run())
    line = open_loop.measure_saturated(None, requests(3, 5, 3), options(open_loop, repeats=2))  # type: ignore[arg-type]
    # Steady from 1 to 4: 7 tokens after the first two, in 3 seconds; 11 tokens in 6 seconds altogether.
    assert line["continuous_tokens_per_sec"]["median"] == round(11 / 6, 1)
    steady = sum(1.0 < t <= 4.0 for times in closed_run().token_times for t in times) / 3
    assert line["continuous_steady_tokens_per_sec"]["median"] == round(steady, 1)
    assert line["wall_over_steady"]["median"] == round(11 / 6 / steady, 3)
    assert "[phase steady] count=3 time=3.00s" in capsys.readouterr().err
    assert line["phases"][0]["steady"] == {"count": 3, "time_s": 3.0, "tokens": round(3 * steady)}


def test_waiting_times_rates_and_load_of_an_open_loop(monkeypatch, capsys):
    seen = {}

    def run(engine, given, arrivals, **options):
        seen.update(arrivals=arrivals, **options)
        return constructed()

    monkeypatch.setattr(open_loop, "run_continuous", run)
    monkeypatch.setattr(open_loop, "jitter", lambda: {})
    args = options(open_loop, repeats=1, load=0.5, arrivals="constant", spike_threshold=0.2)
    line = open_loop.measure_open(None, requests(3, 3, 3), 6.0, args)  # type: ignore[arg-type]
    # Half of 6 tokens a second, 3 of a request: one request a second.
    assert (line["requests_per_s"], line["load"]) == (1.0, 0.5) and seen["arrivals"] == [1.0, 2.0, 3.0]
    assert seen["max_steps"] == 1 and seen["late_launch"]
    assert line["ttft_ms"]["p50"]["median"] == 1000 and line["ttft_ms"]["mean"]["median"] == pytest.approx(833.33)
    assert {entry["median"] for entry in line["inter_token_ms"].values()} == {1000.0}
    assert line["continuous_tokens_per_sec"]["median"] == 1.8
    assert line["continuous_steady_tokens_per_sec"]["median"] == 2.5
    assert line["phases"][0]["spikes"] == {"count": 5, "time_s": 5.0, "threshold_s": 0.2}
    assert "wall_over_steady" not in line, "below the capacity both sides are the rate of arrival"


def test_a_closed_loop_gives_the_capacity_and_three_ratios(monkeypatch):
    def run(slower: int):
        fast = closed_run()
        return Timeline(
            fast.arrivals,
            [[slower * t for t in times] for times in fast.token_times],
            fast.token_ids,
            [Round(slower * r.end, slower * r.seconds, 1, r.prompt_steps, r.tokens, r.decoding) for r in fast.rounds],
        )

    monkeypatch.setattr(open_loop, "run_static", lambda *_, **__: run(4))
    monkeypatch.setattr(open_loop, "run_continuous", lambda *_, max_steps=None: run(1 if max_steps is None else 2))
    case, capacity = open_loop.measure_closed(None, requests(3, 5, 3), options(open_loop, repeats=1))  # type: ignore[arg-type]
    steady = sum(1.0 < t <= 4.0 for times in closed_run().token_times for t in times) / 3
    assert capacity == pytest.approx(steady / 2)
    assert case["continuous_over_static"]["median"] == 4.0 and case["short_rounds_over_continuous"]["median"] == 0.5
    assert case["static_tokens_per_sec"]["median"] == round(11 / 24, 1)
    assert case["wall_over_steady"]["median"] == round(11 / 6 / steady, 3)
