"""Every entry point runs: names that only some option reaches would otherwise fail in a user's hands."""

import importlib
import json
import pkgutil
import runpy
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


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", ["sample", "batch", "score", "audit", "doctor", "bench", "plan"])
def test_command_explains_itself(name, monkeypatch, capsys):
    explains_itself(lambda: runpy.run_module(f"levanter_infer.{name}", run_name="__main__"), monkeypatch, capsys)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_explains_itself(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend((ROOT / script).parent)  # as Python does for a script
    explains_itself(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), monkeypatch, capsys)


def explains_itself(run, monkeypatch, capsys) -> None:
    """Run here and not in a process of its own, which would import JAX for seconds."""
    monkeypatch.setattr(sys, "argv", ["it", "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_:
        run()
    assert not exit_.value.code
    assert "usage" in capsys.readouterr().out


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
