"""Starts in processes of their own."""

import json

import pytest

from levanter_infer.bench.__main__ import main as bench
from levanter_infer.bench.one_start import PARTS


@pytest.mark.slow
def test_a_second_start_computes_the_same_without_compiling(capsys):
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv-heads": 1, "mlp": 16, "vocab": 31}
    options = [part for key, value in sizes.items() for part in (f"--{key}", str(value))]
    assert bench(["startup", "--cases", "start", "--repeats", "1", *options]) == 0
    cold, warm = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (cold["case"], warm["case"]) == ("start cold", "start warm")
    assert cold["outputs_equal"] and warm["outputs_equal"]
    assert warm["compile_s"]["median"] < cold["compile_s"]["median"]
    for line in (cold, warm):
        parts = sum(line[part]["median"] for part in PARTS)
        assert abs(parts - line["total_s"]["median"]) < 0.01
