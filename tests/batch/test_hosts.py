"""A job of two processes: one that differs is named, one that dies is missed, one that stops ends all; nothing is lost.

Slow: each test starts two processes that load and compile, some of them twice.
"""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from levanter_infer.runtime.aborts import LOST
from tests.pairs import ROOT, Processes, free_port

pytestmark = pytest.mark.slow
HEARTBEAT_S = 10
ROWS, FEW, MANY = 400, 60, 9000
"""Rows of a job; few of one on one mesh, whose every step waits for messages between the processes; many of one that a
process must not finish alone before it misses the other."""
LOST_LIMIT_S = HEARTBEAT_S + 1


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Path of a file of so many rows."""

    def path(count: int) -> Path:
        path = directory / f"{count}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{i}+{2 * i}="}) + "\n" for i in range(count)))
        return path

    directory = tmp_path_factory.mktemp("in")
    return path


@pytest.fixture(scope="module")
def start(prompts, tmp_path_factory):
    """Starts the processes of a job; `more`: arguments of each process."""

    def begin(
        output: Path,
        *arguments: str,
        count: int = 2,
        rows: int = ROWS,
        more=None,
        environments=None,
        module="levanter_infer.batch",
    ):
        port = free_port()
        common = [
            *("--model", str(ROOT / "models" / "tiny"), "--prompts_file", str(prompts(rows)), "--output", str(output)),
            *("--sampling.max_tokens", "40", "--sampling.ignore_eos", "true", "--engine.max_seqs", "4"),
            *("--engine.max_seq_len", "64", "--engine.max_pages", "32"),
        ]
        if module == "levanter_infer.batch":
            common += ["--batch.rows_per_shard", "20", "--engine.max_round_seconds", "0.05"]
        if count > 1:
            common += [
                *("--multihost.coordinator", f"127.0.0.1:{port}", "--multihost.processes", str(count)),
                *("--multihost.heartbeat_s", str(HEARTBEAT_S)),
            ]
        own = [["--multihost.process_id", str(i)] if count > 1 else [] for i in range(count)]
        lines = [[*common, *arguments, *own[i], *(more[i] if more else [])] for i in range(count)]
        return Processes(tmp_path_factory.mktemp("logs"), module, lines, environments)

    return begin


ONE_MESH = (
    "--multihost.layout",
    "one_mesh",
    "--mesh.model",
    "2",
    "--engine.numerics",
    "default",
    "--model.dtype",
    "float32",
)


def rows_of(output: Path) -> list[dict]:
    return [json.loads(line) for path in sorted(output.glob("part-*.jsonl")) for line in path.read_text().splitlines()]


def contents(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}


def finished(output: Path) -> int:
    """Rows that are safe on disk."""
    journals = sum(max(path.read_bytes().count(b"\n") - 1, 0) for path in output.glob("_journal/*"))  # less the header
    return journals + sum(json.loads(path.read_text())["rows"] for path in output.glob("_commits/*"))


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The output of one process."""
    output = tmp_path_factory.mktemp("whole") / "out"
    with start(output, count=1) as processes:
        assert processes.wait(200) == [0], processes.said
    return contents(output)


def damaged_model(tmp_path: Path) -> str:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "tiny", model)
    weights = next(model.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return str(model)


def other_version(tmp_path: Path) -> dict[str, str]:
    """An environment in which jaxlib says that it is another one."""
    import os

    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nreal = m.version\n"
        "m.version = lambda name: '0.0.1' if name == 'jaxlib' else real(name)\n"
    )
    return {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', ROOT / 'src')}"}


@pytest.mark.parametrize("what", ["configuration", "flag", "xla", "version", "weights"])
def test_the_host_that_differs_is_named_before_anything_is_launched(start, tmp_path, what):
    more, environment, expected = [], {}, ""
    if what == "configuration":
        more, expected = ["--sampling.temperature", "0.5"], "config.sampling.temperature is 0.5 and elsewhere 1.0"
    elif what == "flag":
        environment, expected = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, "jax_default_matmul_precision is highest"
    elif what == "xla":
        environment, expected = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, "XLA_FLAGS is --xla_cpu_enable_fast"
    elif what == "version":
        environment, expected = other_version(tmp_path), "jaxlib is 0.0.1 and elsewhere 0."
    else:
        more, expected = ["--model", damaged_model(tmp_path)], "model.weights_sha256 is "
    with start(tmp_path / "out", more=[[], more], environments=[{}, environment]) as processes:
        assert processes.wait(60) == [2, 2], processes.said
    for said in processes.said:
        assert "differ in their" in said and "on host 1 (" in said and expected in said, said
        assert "engine    " not in said and not list((tmp_path / "out").glob("*"))


def test_one_engine_for_each_process_writes_the_bytes_of_one_process(start, tmp_path, whole):
    with start(tmp_path / "out") as processes:
        assert processes.wait(200) == [0, 0], processes.said
    assert contents(tmp_path / "out") == whole
    assert sum("job       complete" in said for said in processes.said) >= 1
    shares = [int(said.split("done      ")[1].split()[0]) for said in processes.said]
    assert sum(shares) == ROWS and min(shares) > 0


def test_the_smallest_budget_wins(start, tmp_path):
    more = [["--engine.max_pages", "64"], ["--engine.max_pages", "48"]]
    with start(tmp_path / "out", more=more) as processes:
        statuses = processes.wait(60)
    assert statuses == [2, 2]  # asked for by name, and different: that is another configuration
    assert all("config.engine.max_pages is 48 and elsewhere 64" in said for said in processes.said)


@pytest.mark.parametrize("layout", ["per_host", "one_mesh"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_and_ends_the_job_and_the_job_goes_on(start, tmp_path, layout, victim):
    arguments, rows = (ONE_MESH, FEW) if layout == "one_mesh" else ((), MANY)
    output = tmp_path / "out"
    with start(output, *arguments, rows=rows) as processes:
        processes.wait_for(output, "_commits/*")
        name = f"host {victim} ("
        processes.send(victim, signal.SIGKILL)
        begin = time.monotonic()
        statuses, seconds = processes.wait(30), time.monotonic() - begin
        assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] == LOST, processes.said
        said = processes.said[1 - victim]
        assert f"error: {name}" in said and "is lost" in said and "the same command goes on" in said, said
        assert f"watchdog  {name}" in said and "last round" in said and ".py:" in said
        assert seconds < LOST_LIMIT_S
    safe = finished(output)
    assert 0 < safe < rows
    with start(output, *arguments, rows=rows) as processes:
        assert processes.wait(200) == [0, 0], processes.said
    assert sorted(int(row["id"]) for row in rows_of(output)) == list(range(rows))
    assert (output / "manifest.json").exists()


@pytest.mark.parametrize("layout", ["per_host", "one_mesh"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_hangs_is_named_within_two_heartbeats(start, tmp_path, layout, victim):
    """SIGSTOP: its connections stay open, and whatever it is asked is not answered."""
    heartbeat_s = 5
    arguments, rows = (ONE_MESH, FEW) if layout == "one_mesh" else ((), MANY)
    arguments = (*arguments, "--multihost.heartbeat_s", str(heartbeat_s))
    output = tmp_path / "out"
    with start(output, *arguments, rows=rows) as processes:
        processes.wait_for(output, "_commits/*")
        processes.send(victim, signal.SIGSTOP)
        begin = time.monotonic()
        status = processes.running[1 - victim].wait(60)
        seconds = time.monotonic() - begin
        said = processes.said[1 - victim]
        assert status == LOST, said
        assert f"error: host {victim} (" in said and "is lost" in said and "the same command goes on" in said, said
        assert f"watchdog  host {victim} (" in said and "last round" in said and ".py:" in said
        assert seconds < 2 * heartbeat_s
        processes.send(victim, signal.SIGCONT)
        assert processes.wait(2 * heartbeat_s)[victim] == LOST, processes.said  # it finds itself alone


@pytest.mark.parametrize("counts", [(2, 3), (3, 2)])
def test_a_differing_number_of_processes_is_an_error_at_once(start, tmp_path, counts):
    more = [["--multihost.processes", str(count)] for count in counts]
    begin = time.monotonic()
    with start(tmp_path / "out", more=more) as processes:
        assert processes.wait(60) == [2, 2], processes.said
    assert time.monotonic() - begin < 20
    expected = f"multihost.processes is {counts[1]} and elsewhere {counts[0]}"
    assert all("on host 1 (" in said and expected in said for said in processes.said)


@pytest.mark.parametrize("layout", ["per_host", "one_mesh"])
@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_on_one_process_stops_all_in_order(start, tmp_path, whole, layout, asked):
    arguments, rows = (ONE_MESH, FEW) if layout == "one_mesh" else ((), ROWS)
    output = tmp_path / "out"
    with start(output, *arguments, rows=rows) as processes:
        processes.wait_for(output, "_commits/*")
        processes.send(asked, signal.SIGTERM)
        begin = time.monotonic()
        assert processes.wait(30) == [0, 0], processes.said
        assert time.monotonic() - begin < 5
    assert all("stopped   " in said and "all of it is safe" in said for said in processes.said)
    if layout == "one_mesh":  # at the same round: what they did is the same
        first, second = (said.split("stopped   ")[1].split(" in ")[0] for said in processes.said)
        assert first == second
    assert 0 < finished(output) < rows
    with start(output, *arguments, rows=rows) as processes:
        assert processes.wait(200) == [0, 0], processes.said
    assert sorted(int(row["id"]) for row in rows_of(output)) == list(range(rows))
    if layout == "per_host":
        assert contents(output) == whole


def test_sigterm_while_they_start_stops_all(start, tmp_path):
    with start(tmp_path / "out") as processes:
        until = time.monotonic() + 60
        while "hosts     2" not in processes.said[0] and time.monotonic() < until:
            time.sleep(0.02)
        processes.send(0, signal.SIGTERM)
        assert processes.wait(60) == [0, 0], processes.said
    assert all("stopped   " in said for said in processes.said)


def test_a_process_that_fails_ends_the_others_with_its_reason(start, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "job.json").mkdir()  # cannot be read
    with start(output) as processes:
        statuses = processes.wait(60)
    assert all(status != 0 for status in statuses), processes.said


def test_processes_that_do_not_find_each_other_say_so(start, tmp_path):
    more = ["--multihost.start_timeout_s", "4", "--multihost.process_id", "1"]
    with start(tmp_path / "out", count=2, more=[more, more]) as processes:  # there is no process 0
        assert processes.wait(60) == [LOST, LOST], processes.said
    assert all("host 1 of 2 and host 0 at 127.0.0.1:" in said and "within 4 s" in said for said in processes.said)


def test_sample_on_one_mesh_writes_the_rows_of_one_process(start, tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    numerics = ("--engine.attention", "xla", "--engine.matmul", "xla", "--model.dtype", "float32")
    with start(one, *numerics, count=1, rows=FEW, module="levanter_infer.sample") as processes:
        assert processes.wait(200) == [0], processes.said
    with start(two, *numerics, *ONE_MESH, rows=FEW, module="levanter_infer.sample") as processes:
        assert processes.wait(200) == [0, 0], processes.said
    tokens = [[json.loads(line)["token_ids"] for line in path.read_text().splitlines()] for path in (one, two)]
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    assert same >= 0.98 * FEW  # float32 sums in another order: a token differs where rounding decides
