"""`bench memory` and `bench page-size` on sizes that take seconds."""

import json

import jax
import numpy as np
import pytest

from levanter_infer.bench import memory
from levanter_infer.bench.__main__ import main as bench
from levanter_infer.bench.report import measured
from levanter_infer.engine.memory_audit import MemoryAudit

SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "kv-heads": 2, "mlp": 64, "vocab": 61, "dtype": "float32"}
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, K and V, kv heads, head size, f32


def run(capsys, *command, **options) -> list[dict]:
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in {**SHAPE, **options}.items()]
    assert bench([*command, *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_the_peak_is_that_of_new_processes_that_load_and_sample(capsys, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("JAX_PLATFORMS", jax.default_backend())
    cold, cached = run(capsys, "memory", cases="peak", batch=2, prompt=5, output=3)
    assert (cold["start"], cached["start"]) == ("cold", "cached")
    for case in (cold, cached):
        peaks = case["peak_after_bytes"]
        assert 0 < peaks["load"] <= peaks["compile"] <= peaks["run"] == case["peak_memory_bytes"]
        assert case["limit_bytes"] == case["weights_bytes"] + case["pool_bytes"] + 400_000_000
        assert case["within_limit"] == (case["peak_memory_bytes"] <= case["limit_bytes"])
        assert case["pool_bytes"] == 2 * 16 * TOKEN_BYTES
    # Compiling takes most of what a tiny model needs, and the second process finds the programs of the first.
    assert cached["compile_s"] < cold["compile_s"] and cached["within_limit"]


@pytest.mark.slow
def test_mixes_count_every_page_and_token(capsys, monkeypatch, tmp_path):
    """Three prompts, two samples each of one that is shared: by hand, in pages of 8."""
    small = {
        "short": memory.Mix((5, 9), max_seqs=2),
        "samples": memory.Mix((20,), max_seqs=3, n=3),
        "chat": memory.Mix((4, 12), max_seqs=1, in_turn=True),
    }
    monkeypatch.setattr(memory, "mixes", lambda output: small)
    plot = tmp_path / "memory.png"
    short, samples, chat = run(capsys, "memory", cases="short,samples,chat", page_size=8, output=4, plot=plot)
    assert plot.stat().st_size > 1000
    # 5 + 3 and 9 + 3 stored tokens at the end, in 1 and 2 pages; the first time that 3 are held is with 5 and 9.
    assert (short["reserved_bytes"], short["live_bytes"]) == (3 * 8 * TOKEN_BYTES, (5 + 9) * TOKEN_BYTES)
    # That leaves 10 places empty, of 8 allowed and a hundredth of 6 pages; no later step leaves as many.
    assert (short["sequences"], short["audits_within_wasted_limit"]) == (2, short["audits"] - 1)
    # Two full pages are shared; the third and its copies hold 4 tokens, 3 of the two that began as forks.
    assert samples["reserved_bytes"] == (2 + 3) * 8 * TOKEN_BYTES
    assert samples["unshared_bytes"] == 9 * 8 * TOKEN_BYTES > samples["reserved_bytes"]
    assert chat["reserved_bytes"] == 2 * 8 * TOKEN_BYTES and chat["prompt_tokens"] == 16
    for case in (short, samples, chat):
        minimum = case["weights_bytes"] + case["live_bytes"]
        used = case["weights_bytes"] + case["reserved_bytes"] + case["table_bytes"]
        assert case["memory_overhead"] == pytest.approx(used / minimum - 1, abs=1e-4)
        assert case["wasted_bytes"] == case["reserved_bytes"] - case["live_bytes"] and case["preemptions"] == 0


def test_limits_are_half_a_page_a_sequence_and_a_hundredth_of_the_pool():
    class Engine:
        class shapes:  # noqa: N801
            page_size, num_pages, max_seq_len = 8, 100, 80

        @staticmethod
        def stats():
            return {"preemptions": 0}

    def within(wasted: int, table_bytes: int = 0) -> bool:
        found = MemoryAudit(8, 10, 80 - wasted, table_bytes, {}, {0: 5, 1: 5}, {})
        return memory.summary([found], Engine, page_bytes=8, weights_bytes=1000)["within_limits"]  # type: ignore

    assert within(8 + 8) and not within(8 + 8 + 1)
    assert within(0, table_bytes=50) and not within(0, table_bytes=60)


@pytest.mark.slow
def test_page_sizes_give_one_line_each_with_equal_outputs(capsys, tmp_path):
    plot = tmp_path / "page-size.png"
    cases = run(capsys, "page-size", page_size="8,32", batch=3, prompt=6, output=5, repeats=1, plot=plot)
    assert [case["page_size"] for case in cases] == [8, 32] and plot.stat().st_size > 1000
    assert len({case["output_hash"] for case in cases}) == 1
    lens = np.random.default_rng(3).integers(3, 10, 3)
    for case in cases:
        assert 0 < case["decode_tick_ms_p50"] <= case["decode_tick_ms_p95"] and case["prefill_chunk_ms"] > 0
        assert case["decode_ticks"] == 4 and case["one_step_rounds_cost"] > 0
        stored = [lens + done for done in range(4)]  # after the prompts, and after each of three decode steps
        size = case["page_size"]
        capacity = sum((-(-each // size) * size).sum() for each in stored)
        assert case["wasted_percent"] == pytest.approx(100 * (1 - sum(map(sum, stored)) / capacity), abs=0.01)


def test_measurements_carry_declared_names():
    assert measured(gather_ms=1.0) == {"gather_ms": 1.0}
    with pytest.raises(AssertionError, match="gather_msec"):
        measured(gather_msec=1.0)
