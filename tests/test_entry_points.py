"""Every entry point runs: names that only some option reaches would otherwise fail in a user's hands."""

import dataclasses
import importlib
import importlib.metadata
import json
import os
import pkgutil
import re
import runpy
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import levanter_infer
from levanter_infer import cli, fingerprint, keys
from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.bench.__main__ import COMMANDS
from levanter_infer.bench.__main__ import main as bench
from levanter_infer.cli import common
from levanter_infer.config import RunConfig
from levanter_infer.plan.__main__ import PlanRunConfig

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"levanter_infer.kernels.cpu._native"}  # loaded by kernels/cpu/bindings.py; no Python in it
ADAPTERS = {"levanter_infer.trainers.tunix"}  # implements a class of Tunix; tests/test_tunix.py imports it with that
MODULES = sorted(
    {module.name for module in pkgutil.walk_packages(levanter_infer.__path__, "levanter_infer.")} - LIBRARIES - ADAPTERS
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
@pytest.mark.parametrize("name", ["sample", "batch", "score", "check", "audit", "doctor", "bench", "plan", "serve"])
def test_command_explains_itself(name, monkeypatch, capsys):
    explains_itself(lambda: runpy.run_module(f"levanter_infer.{name}", run_name="__main__"), monkeypatch, capsys)


@pytest.mark.parametrize("name", ["sample", "batch", "score", "check", "audit", "doctor", "plan", "serve"])
def test_an_interrupt_while_a_command_is_imported_leaves_no_traceback(name, tmp_path):
    """A package that every command imports interrupts the process, as the keyboard could at that moment."""
    (tmp_path / "yaml.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    heeding = "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{heeding}runpy.run_module('levanter_infer.{name}', run_name='__main__')",
            "--model",
            "m",
        ],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_console_script_is_the_command_in_front_of_the_others():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = project["project"]["scripts"]["levanter-infer"].partition(":")
    assert getattr(importlib.import_module(module), name) is cli.run
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["levanter_infer"]
    assert (ROOT / "src" / "levanter_infer" / "py.typed").is_file()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_package_explains_itself(monkeypatch, capsys):
    explains_itself(lambda: runpy.run_module("levanter_infer", run_name="__main__"), monkeypatch, capsys)


def test_versions_are_known_where_the_package_is_not_installed(monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name == "levanter-infer":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert fingerprint.version_fingerprint()["levanter_infer"].startswith("0+unknown+")


def test_overview_names_every_command_and_section(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in [*cli.COMMANDS, *keys.SECTIONS]:
        assert f"\n  {name} " in out


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "bench"])
def test_help_is_the_same_from_source_and_from_the_command_itself(name, capsys):
    assert cli.main([name, "--help"]) == 0
    from_source = capsys.readouterr().out
    assert from_source.split()[:3] == ["usage:", "levanter-infer", name] and "\n  engine.max_seqs (64)\n" in from_source
    assert importlib.import_module(f"levanter_infer.{cli.COMMANDS[name][0]}").main(["--help"]) == 0
    assert capsys.readouterr().out == from_source


@pytest.mark.parametrize("place", [keys.RUN, *keys.SECTIONS.values()], ids=lambda place: place[1])
def test_keys_read_from_source_are_those_of_the_dataclass(place):
    module, name = place
    fields = dataclasses.fields(getattr(importlib.import_module(f"levanter_infer.{module}"), name))
    read = keys.read_section(place)
    assert read.doc and read.names == [field.name for field in fields]
    for key, field in zip(read.keys, fields, strict=True):
        plain = field.default is not dataclasses.MISSING and field.default not in (None, ())
        assert key.default == (str(field.default) if plain else None), key.name
        assert key.doc or key.name == "mesh", key.name


def test_sections_of_each_command_are_those_that_it_reads():
    for name, kind in (("sample", RunConfig), ("batch", BatchRunConfig), ("plan", PlanRunConfig)):
        read = {field.name for field in dataclasses.fields(kind)} & set(keys.SECTIONS)
        assert set(keys.sections_for(name)) == read - ({"batch"} if name == "plan" else set())


VALUES = {
    "prompts": "a", "prompts_file": "a.jsonl", "chat": "true", "multihost": "auto", "output": "out.jsonl",
}  # fmt: skip


@pytest.mark.parametrize("command, key", [(name, key) for name, refused in keys.REFUSED.items() for key in refused])
def test_what_a_command_refuses_is_not_in_its_help(command, key, capsys):
    assert not re.search(rf"^  {key}[ .\n]", cli.command_help(command), re.MULTILINE)
    assert re.search(rf"^  {key}[ .\n]", cli.command_help("sample"), re.MULTILINE)
    needed = {"batch": ["prompts_file", "output"], "serve": []}.get(command, ["prompts"])
    options = [word for name in {*needed, key} for word in (f"--{name}", VALUES[name])]
    options += ["--level", "numerics"] if command == "check" else []
    assert cli.main([command, "--model", str(ROOT / "models" / "tiny"), *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and key in said


def test_every_name_of_another_engine_leads_to_a_key():
    known = set(keys.read_section(keys.RUN).names)
    known |= {f"{name}.{key}" for name, place in keys.SECTIONS.items() for key in keys.read_section(place).names}
    assert set(keys.OTHER_NAMES.values()) <= known
    leaves = {key.rpartition(".")[2] for key in known}
    assert not leaves & {*keys.OTHER_NAMES, *keys.REMARKS}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "error: no command; commands: sample, batch"),
        (["sampel"], "error: unknown command 'sampel'; did you mean sample?"),
        (["--model", "x"], "error: --model before a command; the command comes first: levanter-infer sample --model"),
        (["train"], "error: unknown command 'train'; commands: sample, batch"),
        (["sample", "--max_tokens", "5"], "did you mean --sampling.max_tokens?"),
    ],
)
def test_mistake_in_front_of_a_command_is_named(arguments, message, capsys):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


HEAVY = ("jax", "jaxlib", "haliax", "equinox", "numpy", "yaml", "rich", "huggingface_hub")
QUICK = [["--help"], ["--version"], ["sample", "--help"], ["plan", "-h"]]


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_help_and_version_import_nothing_heavy(arguments):
    code = (
        "import sys; from levanter_infer import cli; status = cli.main(sys.argv[1:])\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]; assert not heavy, heavy; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("usage: levanter-infer", "levanter-infer 0"))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_help_and_version_take_less_than_a_third_of_a_second(arguments):
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "levanter_infer", *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begin)
    assert statistics.median(times) < 0.3, times


@pytest.mark.parametrize("target, status", [("/dev/full", 2), ("&-", 0)])
def test_help_says_when_nobody_can_read_it(target, status):
    if target == "/dev/full" and not Path(target).exists():
        pytest.skip("this system has no /dev/full")
    line = f"{sys.executable} -m levanter_infer --help >{target}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == status
    assert done.stderr == ("error: No space left on device\n" if status else "")


def test_no_hint_installs_a_package_of_our_name_from_the_index():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    wrong = re.compile(r"pip install[^\n]*[\s'\"]levanter[-_]infer\b")
    assert wrong.search("run pip install 'levanter_infer[ray]'")
    assert not [path.name for path in files if wrong.search(path.read_text())]


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


@pytest.mark.slow
def test_bench_control_prints_one_line_per_case(capsys):
    assert bench(["control", "--slots", "8,16", "--pages", "64", "--steps", "3", "--repeats", "2"]) == 0
    cases = lines(capsys)
    assert [(case["slots"], case["pages"]) for case in cases] == [(8, 64), (16, 64)]
    for case in cases:
        assert case["bench"] == "control" and case["step_ms"] > 0 and case["per_step"]["generated"] > 0
        assert {"commit", "machine", "versions", "step_ms_spread"} <= set(case)


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "words, says",
    [
        ("control --slots 0", "--slots: '0' is no whole number above 0"),
        ("control --repeats -1", "--repeats: '-1' is no whole number above 0"),
        ("attention --page-size 16,x", "--page-size: 'x' is no whole number above 0"),
        ("throughput --layers 0", "--layers: '0' is no whole number above 0"),
        ("open-loop --load nan", "--load: 'nan' is no number above 0"),
        ("open-loop --rate -1", "--rate: '-1' is no number above 0"),
        ("open-loop --prompt 5", "--prompt: '5' is no SHORTEST,LONGEST"),
        ("open-loop --output 5,3", "--output: '5,3' is no SHORTEST,LONGEST"),
    ],
)
def test_bench_names_an_argument_that_is_no_such_number(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        bench(words.split())
    assert ended.value.code == 2 and f"error: argument {says}" in capsys.readouterr().err


def test_bench_without_a_command_says_what_there_is(capsys):
    with pytest.raises(SystemExit) as exit_:
        bench([])
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_a_command_limits_its_threads_before_it_runs(monkeypatch, capsys):
    events = []
    monkeypatch.setattr(common, "limit_threads", lambda: events.append("threads") or 2)
    assert common.guarded(lambda: events.append("run") or 0) == 0
    assert events == ["threads", "run"] and "PJRT_NPROC=2, the CPU quota" in capsys.readouterr().err
