"""The open-loop bench: what it says of constructed runs, and one run of a tiny engine."""

import contextlib
import io
import json
import re

import numpy as np
import pytest

from levanter_infer.bench.__main__ import main as bench
from levanter_infer.bench.clients import run_continuous, run_static
from levanter_infer.bench.machine import jitter, others_seconds
from levanter_infer.bench.open_loop import compare_static, phase_lines
from levanter_infer.bench.report import percentiles
from levanter_infer.bench.timeline import Round, Timeline, bounds, in_steady, phases, spikes
from levanter_infer.bench.workload import arrival_times, mixed_lens
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import tiny_model, uncached_greedy


def constructed() -> Timeline:
    """Three requests, one begins in every second; each gives a token a second, three of them."""
    token_times = [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0], [3.0, 4.0, 5.0]]
    decoding = {1.0: 1, 2.0: 2, 3.0: 2, 4.0: 1, 5.0: 0}
    rounds = [
        Round(end=end, seconds=1.0, steps=1, prompt_steps=int(end <= 3), tokens=2, decoding=n)
        for end, n in decoding.items()
    ]
    return Timeline([0.0, 1.0, 2.5], token_times, [[7] * 3] * 3, rounds)


def test_a_run_is_split_into_ramp_steady_and_tail():
    subject = constructed()
    found = phases(subject)
    # The median moment has one sequence decoding, the last request begins at 3.
    assert bounds(subject) == (1.0, 3.0)
    assert {name: (p.rounds, p.seconds, p.tokens) for name, p in found.items()} == {
        "ramp": (1, 1.0, 1),
        "steady": (2, 2.0, 5),
        "tail": (2, 2.0, 3),
    }
    assert sum(p.tokens for p in found.values()) == subject.tokens == 9
    assert found["steady"].tokens_per_s == 2.5 and subject.tokens_per_s == 9 / 5
    assert [r.end for r in in_steady(subject)] == [2.0, 3.0]


def test_ramp_lasts_until_as_many_decode_as_in_the_median_moment():
    times = [[float(t) for t in range(first, 40)] for first in (1, 2, 3, 30)]
    rounds = [Round(float(t), 1.0, 1, 0, 1, decoding=min(t, 3)) for t in range(1, 40)]
    assert bounds(Timeline([0.0] * 4, times, [], rounds)) == (3.0, 30.0)


def test_a_run_whose_requests_all_begin_together_has_no_steady_phase():
    rounds = [Round(float(t), 1.0, 1, 0, 2, decoding=2 if t < 3 else 0) for t in (1, 2, 3)]
    together = Timeline([0.0, 0.0], [[1.0, 2.0, 3.0]] * 2, [], rounds)
    assert phases(together)["steady"].tokens_per_s is None


def test_waiting_times_are_those_of_the_clients():
    subject = constructed()
    assert subject.first_token_s() == [1.0, 1.0, 0.5]
    assert subject.inter_token_s() == [1.0] * 6
    several_at_once = Timeline([0.0], [[2.0, 2.0, 2.0, 5.0]], [[1, 2, 3, 4]], [])
    assert several_at_once.inter_token_s() == [0.0, 0.0, 3.0]


def test_spikes_are_steps_over_a_threshold_or_over_twice_the_median():
    def one(seconds: float, steps: int = 1) -> Round:
        return Round(end=0.0, seconds=seconds, steps=steps, prompt_steps=0, tokens=1, decoding=1)

    usual = [one(0.1)] * 5
    found, threshold = spikes([*usual, one(0.19), one(0.21), one(0.8, steps=8)])
    assert threshold == pytest.approx(0.2) and [r.seconds for r in found] == [0.21]
    assert [r.seconds for r in spikes([*usual, one(0.3)], 0.05)[0]] == [0.1] * 5 + [0.3]
    assert spikes([]) == ([], 0.0)


def test_phases_are_logged_with_count_time_and_threshold():
    assert phase_lines(constructed(), 0.2) == [
        "[phase ramp] count=1 time=1.00s tokens=1",
        "[phase steady] count=2 time=2.00s tokens=5",
        "[phase tail] count=2 time=2.00s tokens=3",
        "[phase spikes] count=5 time=5.00s threshold=0.200s",
    ]


def test_percentiles_are_the_spread_over_runs():
    found = percentiles([list(range(101)), [2 * i for i in range(101)], [0] * 101])
    medians = [found[name]["median"] for name in ("mean", "p50", "p95", "p99", "max")]
    assert medians == [50, 50, 95, 99, 100]
    assert found["p99"] == {"median": 99, "min": 0, "max": 198, "sd": 99, "runs": 3}
    assert percentiles([[1.0], []]) == {}


def test_constant_arrivals_are_evenly_spaced():
    assert arrival_times("constant", 4, rate=2.0, seed=0) == [0.5, 1.0, 1.5, 2.0]


def test_poisson_arrivals_have_the_rate_and_come_from_the_seed():
    times = np.array(arrival_times("poisson", 20000, rate=5.0, seed=1))
    gaps = np.diff(times, prepend=0)
    assert (
        (gaps > 0).all() and gaps.mean() == pytest.approx(0.2, rel=0.03) and gaps.std() == pytest.approx(0.2, rel=0.05)
    )
    again, other = (arrival_times("poisson", 20000, rate=10.0, seed=seed) for seed in (1, 2))
    np.testing.assert_allclose(times, 2 * np.array(again))
    assert other[:3] != again[:3]
    with pytest.raises(ValueError, match="'uniform': expected one of poisson, constant"):
        arrival_times("uniform", 3, 1.0, 0)


def test_mixed_lengths_are_within_bounds_and_mostly_short():
    lens = mixed_lens(8, 256, 5000, seed=0)
    assert min(lens) == 8 and max(lens) == 256 and np.median(lens) < np.mean(lens) < 128
    assert mixed_lens(8, 256, 10, seed=0) == lens[:10]
    assert set(mixed_lens(5, 5, 20, seed=0)) == {5}


def test_ratios_are_refused_where_the_outputs_differ(capsys):
    same, other = constructed(), constructed()
    other.token_ids = [[7, 7, 8]] * 3
    assert compare_static({"static": [same], "continuous": [same]})["continuous_over_static"]["median"] == 1
    assert compare_static({"static": [same], "continuous": [other]})["continuous_over_static"] is None
    assert "different tokens" in capsys.readouterr().err


def test_the_machine_is_probed():
    probe = jitter(0.02)
    assert probe["gaps"] >= 0 and probe["longest_ms"] <= probe["gaps_ms"] + 0.1
    others = others_seconds()
    assert others is None or others >= 0


LENS = (3, 12, 1, 7, 5, 4)
PROMPTS = [[1 + i, 2, 3 + i] for i in range(len(LENS))]
REQUESTS = [
    Request(prompt_token_ids=ids, sampling=SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0))
    for ids, length in zip(PROMPTS, LENS, strict=True)
]


@pytest.fixture(scope="module")
def engine():
    subject = InferenceEngine(
        tiny_model(), config=EngineConfig(max_seqs=2, max_seq_len=32, page_size=4, max_round_steps=3)
    )
    subject.warmup()
    return subject


def assert_served(subject: InferenceEngine, timeline: Timeline) -> None:
    expected = [uncached_greedy(tiny_model(), ids, length) for ids, length in zip(PROMPTS, LENS, strict=True)]
    assert timeline.token_ids == expected
    assert [len(times) for times in timeline.token_times] == list(LENS)
    assert all(times == sorted(times) for times in timeline.token_times)
    assert sum(r.tokens for r in timeline.rounds) == sum(LENS)
    assert subject.stats()["pages_free"] == subject.shapes.num_pages


@pytest.mark.slow
def test_a_closed_loop_keeps_every_place_taken(engine):
    timeline = run_continuous(engine, REQUESTS, [0.0] * 6, max_steps=1)
    assert_served(engine, timeline)
    assert {r.steps for r in timeline.rounds} == {1}
    # 32 tokens at two places: the longest request begins at once, and no request waits for it.
    assert len(timeline.rounds) < 22


@pytest.mark.slow
def test_requests_that_come_later_are_not_served_before(engine):
    arrivals = [0.0, 0.0, 0.1, 0.3, 0.3, 0.3]
    for late_launch in (True, False):
        timeline = run_continuous(engine, REQUESTS, arrivals, max_steps=1, late_launch=late_launch)
        assert_served(engine, timeline)
        assert all(wait > 0 for wait in timeline.first_token_s())
        # Time without work belongs to no round.
        assert sum(r.seconds for r in timeline.rounds) < timeline.seconds


@pytest.mark.slow
def test_a_static_batch_waits_for_its_last_sequence(engine):
    timeline = run_static(engine, REQUESTS, [0.0] * 6, batch=2)
    assert_served(engine, timeline)
    ends = [max(times[-1] for times in timeline.token_times[i : i + 2]) for i in (0, 2, 4)]
    firsts = [times[0] for times in timeline.token_times]
    assert firsts[2] > ends[0] and firsts[3] > ends[0] and firsts[4] > ends[1]
    steps = sum(r.steps for r in timeline.rounds)
    assert steps == 12 + 7 + 5


@pytest.mark.slow
def test_the_command_prints_a_line_per_case(tmp_path):
    shape = {"hidden": 32, "layers": 2, "heads": 4, "kv-heads": 2, "mlp": 64, "vocab": 61, "dtype": "float32"}
    options = {"max-seqs": 2, "tokens-target": 120, "prompt": "3,8", "output": "2,12", "repeats": 1, **shape}
    options |= {"kv-block-size": 4, "prefill-chunk": 16, "plot": tmp_path / "curve.png"}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        bench(["open-loop", *(part for key, value in options.items() for part in (f"--{key}", str(value)))])
    closed, saturated, opened = (json.loads(line) for line in out.getvalue().splitlines())
    assert (closed["case"], saturated["case"], opened["case"]) == ("closed", "saturated", "open")
    assert saturated["tokens"] == opened["tokens"] and saturated["output_hash"] == opened["output_hash"]
    assert closed["outputs_are_equal"] and closed["continuous_over_static"]["median"] > 0
    for name in ("static_tokens_per_sec", "continuous_tokens_per_sec", "continuous_steady_tokens_per_sec"):
        assert closed[name]["median"] > 0
    assert opened["tokens"] >= 120 and opened["load"] == 0.8 and opened["one_step_a_round"]
    for name in ("ttft_ms", "inter_token_ms", "step_ms"):
        assert 0 < opened[name]["p50"]["median"] <= opened[name]["p99"]["median"]
    assert 0 < closed["wall_over_steady"]["median"] <= 1 and 0 < saturated["wall_over_steady"]["median"] <= 1
    assert {"commit", "machine", "versions", "config", "workload_hash", "output_hash"} <= set(opened)
    assert opened["compilations"] == 4  # round, init, reset and zero_cache, each once
    assert re.findall(r"\[phase (\w+)\] count=\d+ time=\S+s ", err.getvalue()) == 2 * [
        "ramp",
        "steady",
        "tail",
        "spikes",
    ]
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
