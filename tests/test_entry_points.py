"""Every entry point runs: names that only some option reaches would otherwise fail in a user's hands."""

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import levanter_infer
from levanter_infer.bench.__main__ import COMMANDS
from levanter_infer.bench.__main__ import main as bench

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"levanter_infer.kernels._native"}  # loaded by kernels/cpu.py; no Python in it
MODULES = sorted(
    {module.name for module in pkgutil.walk_packages(levanter_infer.__path__, "levanter_infer.")} - LIBRARIES
)
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "scripts").glob("*.py")
    if "__main__" in path.read_text() and path.name != "__init__.py"
)


@pytest.mark.parametrize("name", MODULES)
def test_module_imports(name):
    importlib.import_module(name)


@pytest.mark.parametrize(
    "command",
    [
        *(["-m", f"levanter_infer.{name}"] for name in ("sample", "batch", "score", "audit", "doctor", "bench")),
        *([script] for script in SCRIPTS),
    ],
)
def test_command_explains_itself(command):
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage" in done.stdout


def lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_bench_control_prints_one_line_per_case(capsys):
    assert bench(["control", "--slots", "8,16", "--pages", "64", "--steps", "3", "--repeats", "2"]) == 0
    cases = lines(capsys)
    assert [(case["slots"], case["pages"]) for case in cases] == [(8, 64), (16, 64)]
    for case in cases:
        assert case["bench"] == "control" and case["step_ms"] > 0 and case["per_step"]["generated"] > 0
        assert {"commit", "machine", "versions", "step_ms_spread"} <= set(case)


def test_bench_throughput_prints_one_line_per_mode_and_batch(capsys):
    shape = {"hidden": 32, "layers": 2, "heads": 4, "kv-heads": 2, "mlp": 64, "vocab": 61}
    options = {"batch": 2, "prompt": 5, "output": 3, "repeats": 1, "dtype": "float32", **shape}
    assert bench(["throughput", *(part for key, value in options.items() for part in (f"--{key}", str(value)))]) == 0
    cases = lines(capsys)
    assert [(case["batch"], case["mode"]) for case in cases] == [(2, "greedy"), (2, "sampled")]
    for case in cases:
        assert "decode_tokens_per_s" in case and case["prefill_tokens_per_s"]["median"] > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_bench_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench([command, "--help"])
    assert exit_.value.code == 0
    assert f"bench {command}" in capsys.readouterr().out


def test_bench_without_a_command_says_what_there_is(capsys):
    with pytest.raises(SystemExit) as exit_:
        bench([])
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
