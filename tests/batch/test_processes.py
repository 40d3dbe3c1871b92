"""Real processes of a job are killed and stopped by the system, at random moments."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.batch.test_drive import begin, files, prompts, rows_of, undisturbed, work  # noqa: F401

ROOT = Path(__file__).parents[2]


@pytest.fixture
def process(prompts, tmp_path):  # noqa: F811
    """Starts a process at work on `tmp_path/out`."""
    started = []

    def start(*options: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.batch.fake_job", str(prompts), str(tmp_path / "out"), *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()
        each.stderr.close()


def wait_for(running: subprocess.Popen, output: Path, pattern: str) -> None:
    until = time.monotonic() + 60
    while not list(output.glob(pattern)):
        assert time.monotonic() < until and running.poll() is None, running.communicate()
        time.sleep(0.001)


def test_a_process_that_the_system_kills_loses_nothing_and_the_bytes_are_the_same(process, prompts, tmp_path):  # noqa: F811
    """SIGKILL, somewhere in a shard; the next process finds rows in records and in journals."""
    output = tmp_path / "out"
    victim = process("--round-s", "0.02")
    wait_for(victim, output, "_commits/*.json")
    time.sleep(random.uniform(0, 0.03))
    victim.kill()
    _, said = victim.communicate()
    assert victim.returncode == -signal.SIGKILL, said
    assert (output / "job.json").exists() and not (output / "manifest.json").exists()
    safe = files(str(output))
    source, job = begin(prompts, str(output))
    committed = job.committed()
    complete, totals = work(source, job)
    assert complete and committed and totals.rows + totals.found + 5 * len(committed) >= job.input.rows > totals.rows
    assert job.finish() is not None
    there = files(str(output))
    assert there == undisturbed(prompts, tmp_path)
    assert all(there[name] == data for name, data in safe.items() if name.startswith(("/part-", "/_commits")))


@pytest.mark.parametrize("how", ["the output", "job.json alone"])
def test_a_process_that_was_held_does_not_write_into_the_job_that_began_meanwhile(process, prompts, tmp_path, how):  # noqa: F811
    """SIGSTOP; what it worked on is deleted; a job of other settings begins there; SIGCONT."""
    output = tmp_path / "out"
    old = process("--round-s", "0.02")
    wait_for(old, output, "_commits/*.json")
    old.send_signal(signal.SIGSTOP)
    if how == "the output":
        shutil.rmtree(output)
        new = process("--numerics", "default", "--round-s", "0.01")
        wait_for(new, output, "_commits/*.json")
        old.send_signal(signal.SIGCONT)
        assert new.wait(60) == 0, new.communicate()
    else:
        (output / "job.json").unlink()
        new = process("--numerics", "default")
        assert new.wait(60) == 2
        assert "the output holds _commits and _journal of a job, and no job.json" in new.communicate()[1]
        old.send_signal(signal.SIGCONT)
    assert old.wait(60) == 2
    assert "error: job.json of the output is " in old.communicate()[1]
    if how == "the output":  # all of it is the new job's
        assert files(str(output)) == undisturbed(prompts, tmp_path, numerics="default")
        assert len(rows_of(str(output))) > 0
