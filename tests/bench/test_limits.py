"""Bounds of the processor's memory and arithmetic, and the shares of them that the benches print."""

import json

import pytest

from levanter_infer.bench.__main__ import main
from levanter_infer.bench.instruction_sets import multiplying_isa
from levanter_infer.bench.limits import ARITHMETIC, MEMORY, MEMORY_BYTES, Bound, Probe, share_of_bound
from levanter_infer.bench.step import BETWEEN
from levanter_infer.engine.instructions import usable_isas
from levanter_infer.kernels.cpu import bindings as cpu

built = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
MEGABYTE = 2**20


def test_the_bound_is_the_longer_of_reading_and_computing():
    reads = Bound.of(60e6, 60e6, gbps=60, gflops=600)
    assert (reads.side, reads.ms, reads.arithmetic_ms) == (MEMORY, 1.0, 0.1)
    computes = Bound.of(60e6, 1200e6, gbps=60, gflops=600)
    assert (computes.side, computes.ms) == (ARITHMETIC, 2.0)


def test_a_share_compares_each_time_with_the_bound_next_to_it():
    quick, slow = Bound(1.0, 0.5), Bound(4.0, 0.5)  # memory is slow for a moment, and the matmul with it
    found = share_of_bound([2.0, 8.0, 2.0], [quick, slow, quick])
    assert found["share"] == {"median": 0.5, "min": 0.5, "max": 0.5, "sd": 0.0, "runs": 3}
    assert (found["bound"], found["bound_ms"]) == (MEMORY, 1.0)


@built
@pytest.mark.parametrize("isa", usable_isas() if cpu.available() else ())
def test_rates_are_of_this_processor(isa):
    probe = Probe(8 * MEGABYTE)
    rates = [probe.gflops(isa, threads=1) for _ in range(5)]
    # No core has as many as 8 GHz, or four vectors a cycle.
    lanes = {"generic": 4, "avx2": 8, "avx512": 16, "avx512_bf16": 32, "amx_bf16": 128}[isa]
    assert 0.1 < max(rates) < 8 * 2 * 4 * lanes
    assert max(probe.gbps(threads=1) for _ in range(3)) > 0.1
    measured = probe.measured()
    assert measured["gflop_per_s"][f"{isa}, 1"]["runs"] == 5 and measured["memory_gb_per_s"]["1"]["runs"] == 3


@built
def test_more_bytes_than_the_probe_has_are_read_as_memory():
    probe = Probe(4 * MEGABYTE)
    assert probe.gbps(2**40) > 0 and probe.gbps(1) > 0
    assert list(probe.measured()["memory_gb_per_s"]) == [str(probe.threads)]  # not the one from a cache


@pytest.mark.skipif(not cpu.available() or len(usable_isas("float32")) < 2, reason="there is one instruction set")
def test_weights_of_32_bits_are_multiplied_as_such():
    widest = usable_isas("float32")[0]
    assert multiplying_isa("avx512_bf16", "float32") == widest
    assert multiplying_isa(usable_isas("bfloat16")[0], "bfloat16") == usable_isas("bfloat16")[0]


def cells_of(dtype: str, capsys) -> list[dict]:
    """The lines of one row and of 512, a cell each."""
    sizes = ["--hidden", "512", "--layers", "2", "--heads", "8", "--kv-heads", "8", "--mlp", "1024", "--vocab", "8192"]
    options = ["--rows", "1,512", "--dtype", dtype, "--repeats", "5", "--milliseconds", "3", "--limits"]
    assert main(["matmul", *options, *sizes]) == 0
    *cells, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(cell["rows"], cell["matmul"]) for cell in cells] == [
        (rows, name) for rows in (1, 512) for name in ("qkv", "out", "mlp", "head")
    ]
    for cell in cells:
        assert cell["flops"] == cell["rows"] * cell["weights_bytes"] * (1 if dtype == "bfloat16" else 0.5)
    assert set(last["limits"]["memory_gb_per_s"]) == {"1", str(last["limits"]["threads"])}
    assert len(last["limits"]["gflop_per_s"]) == len({1, last["limits"]["threads"]})
    return cells


@built
@pytest.mark.slow  # measures each for a while
def test_every_cell_has_a_bound(capsys):
    for cell in cells_of("bfloat16", capsys):
        assert cell["bound"] in (MEMORY, ARITHMETIC) and cell["share"]["median"] > 0, cell


@built
@pytest.mark.slow  # on a machine that does nothing else
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_is_faster_than_its_bound(dtype, capsys):
    """One row is bound by memory and 512 by arithmetic; nothing is faster than its bound but for noise."""
    for cell in cells_of(dtype, capsys):
        assert cell["bound"] == (MEMORY if cell["rows"] == 1 else ARITHMETIC), cell
        assert cell["share"]["median"] < 1.1, cell


@built
@pytest.mark.slow
def test_a_step_is_divided_into_its_parts(capsys):
    assert main(["step", "--shape", "tiny", "--batch", "2", "--prompt", "8", "--output", "16", "--repeats", "2"]) == 0
    line, limits = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    parts = line["parts_ms"]
    matmuls = {f"linear: {name}" for name in ("qkv", "out", "mlp", "head")}
    assert matmuls | {"attention", "place_tokens", "logit_stats"} < set(parts)
    assert BETWEEN in parts and sum(parts[name] for name in matmuls) > 0
    # 2 layers of (64 · (64 + 2 · 32) + 64² + 3 · 64 · 128) and the head, of 16 bits
    assert line["weights_bytes"] == 2 * (2 * (64 * 128 + 64 * 64 + 3 * 64 * 128) + 64 * 257)
    assert line["kv_bytes"] == 2 * 16 * 2 * 2 * 2 * 16 * 2 and line["flops"] == 2 * line["weights_bytes"]
    assert limits["limits"]["memory_bytes"] == MEMORY_BYTES
