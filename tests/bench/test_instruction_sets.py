"""Reports of the benches on instruction sets that were measured in turn."""

import json
import re

import pytest

from levanter_infer.bench import matmul, throughput
from levanter_infer.bench.__main__ import main
from levanter_infer.bench.instruction_sets import compared, isas_in_turn
from levanter_infer.engine.instructions import usable_isas
from levanter_infer.kernels.cpu import bindings as cpu


def test_the_chosen_one_is_compared_with_the_best_turn_by_turn():
    found = compared({"slow": [2.0, 20.0, 2.2], "fast": [1.0, 10.0, 1.0], "other": [3.0, 3.0, 3.0]}, "slow")
    assert (found["chosen"], found["best"], found["chosen_over_best"]) == ("slow", "fast", 2.0)
    assert found["by_isa"]["slow"] == {"median": 2.2, "min": 2.0, "max": 20.0, "sd": 10.3351, "runs": 3}
    assert compared({"slow": [2.0], "fast": [1.0]}, "fast")["chosen_over_best"] == 1.0


def test_which_ones_are_measured():
    assert isas_in_turn("auto", "bfloat16") is None and isas_in_turn("avx2", "bfloat16") is None
    assert isas_in_turn("avx512,avx2", "bfloat16") == ["avx512", "avx2"]


SMALL = ["--shape", "tiny", "--repeats", "2", "--cpu-isa", "each"]


@pytest.mark.skipif(not cpu.available() or len(usable_isas("float32")) < 3, reason="there is nothing to choose from")
@pytest.mark.parametrize(
    ("bench", "options", "cells"),
    [
        (matmul, ["matmul", "--rows", "1,8", "--milliseconds", "1"], ["step_ms"]),
        (
            throughput,
            ["throughput", "--batch", "2", "--prompt", "8", "--output", "4", "--modes", "greedy"],
            ["prefill_s"],
        ),
    ],
)
def test_a_bench_runs_each_and_names_the_chosen_one(bench, options, cells, capsys):
    assert main([*options, *SMALL, "--dtype", "float32"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == (2 if bench is matmul else 1)
    for line in lines:
        for cell in cells:
            assert set(line[cell]["by_isa"]) == set(usable_isas("float32")[:-1])
            assert line[cell]["chosen"] in line[cell]["by_isa"] and line[cell]["chosen_over_best"] > 0


@pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
def test_the_chosen_one_must_be_among_them(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["matmul", "--shape", "tiny", "--rows", "1", "--cpu-isa", "nothing,else"])
    assert ended.value.code == 2 and re.search("error: .*auto chooses .*; name it too", capsys.readouterr().err)
