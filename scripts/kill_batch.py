"""Kill a batch job again and again, and compare what it leaves in the end with an undisturbed run.

One JSON line a case: how often it was killed and where, rows lost, rows duplicated, and which files have other bytes. A
process is killed with SIGKILL after a random time; with several workers, one of them at a time, and with several hosts
one, whereupon the others have to end by themselves. Exit status 1 if anything was lost, duplicated or different.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.pairs import free_port  # noqa: E402

from levanter_infer.runtime.aborts import LOST  # noqa: E402

HEARTBEAT_S = 5
DONE = (0, 1)
"""Statuses of a job that has ended: all rows are good, or some are errors."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kill_batch.py", description="Kill a batch job, and compare.")
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs of each case, over as many jobs as it takes")
    parser.add_argument("--workers", default="1,2", help="processes that work on a job at once, a case each")
    parser.add_argument("--hosts", default="", help="the same as processes of one `multihost` job, a case each")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--rows-per-shard", type=int, default=50)
    parser.add_argument("--model", default=str(ROOT / "models" / "tiny"))
    parser.add_argument("--format", default="jsonl", choices=("jsonl", "parquet"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_rows(directory / "in.jsonl", arguments.rows, chance)
        command = job_command(arguments, directory / "in.jsonl")
        undisturbed(command, directory / "first", 1)  # compiles
        one = undisturbed(command, directory / "whole", 1)
        expected = contents(directory / "whole")
        cases = [(kill_until_done, "workers", count) for count in arguments.workers.split(",") if count]
        cases += [(kill_hosts_until_done, "hosts", count) for count in arguments.hosts.split(",") if count]
        for kill, kind, count in cases:
            startup_s, work_s = one if kind == "workers" else undisturbed(command, directory / "hosts", int(count))
            begin, sums = time.monotonic(), collections.Counter()
            where: collections.Counter[str] = collections.Counter()
            while sums["kills"] < arguments.kills:
                output = directory / f"killed-{kind}-{count}-{sums['jobs']}"
                most = arguments.kills - sums["kills"]
                found = kill(command, output, int(count), most, startup_s, work_s, chance)
                where += found
                sums += collections.Counter(jobs=1, kills=found.total())
                sums += compare(expected, contents(output), arguments.rows, arguments.format)
                shutil.rmtree(output)
            case = {key: sums[key] for key in ("jobs", "kills", "lost", "duplicated", "different_files")}
            more = {"rows": arguments.rows, "where": dict(where), "seconds": round(time.monotonic() - begin)}
            print(
                json.dumps({"kill_batch": kind, "count": int(count), "format": arguments.format, **case, **more}),
                flush=True,
            )
            wrong = wrong or any(sums[key] for key in ("lost", "duplicated", "different_files"))
    return 1 if wrong else 0


def write_rows(path: Path, count: int, chance: random.Random) -> None:
    """Sums, stories, several samples, and now and then a row that fails."""
    with open(path, "w") as file:
        for i in range(count):
            row: dict = {"prompt": f"{chance.randrange(100)}+{chance.randrange(100)}="}
            if i % 7 == 0:
                row = {"prompt": "Once upon a time", "sampling": {"n": 1 + i % 3, "logprobs": i % 2}}
            if i % 101 == 100:
                row = {"prompt": "x", "sampling": {"temprature": 1}}
            file.write(json.dumps(row) + "\n")


def job_command(arguments, prompts: Path) -> list[str]:
    values = {
        "model": arguments.model,
        "prompts_file": str(prompts),
        "sampling.max_tokens": arguments.max_tokens,
        "sampling.ignore_eos": "true",
        "engine.max_seqs": 16,
        "engine.max_seq_len": 128,
        "batch.rows_per_shard": arguments.rows_per_shard,
        "batch.format": arguments.format,
        "output.include": "[logprobs, top_logprobs]",
    }
    options = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    return [sys.executable, "-m", "levanter_infer.batch", *options]


def start(command: list[str], output: Path, worker: str) -> subprocess.Popen:
    return launch([*command, "--worker", worker], output, worker.replace("/", "-of-"))


def start_hosts(command: list[str], output: Path, count: int) -> list[subprocess.Popen]:
    values = {
        "coordinator": f"127.0.0.1:{free_port()}",
        "processes": count,
        "heartbeat_s": HEARTBEAT_S,
        "start_timeout_s": 40,
    }
    options = [part for key, value in values.items() for part in (f"--multihost.{key}", str(value))]
    return [
        launch([*command, *options, "--multihost.process_id", str(i)], output, f"host-{i}-of-{count}")
        for i in range(count)
    ]


def launch(command: list[str], output: Path, name: str) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    with open(f"{output}-{name}.log", "a") as log:
        return subprocess.Popen([*command, "--output", str(output)], cwd=ROOT, env=environment, stderr=log)


def undisturbed(command: list[str], output: Path, hosts: int) -> tuple[float, float]:
    """Run the job. Returns: seconds until it began to write, and from there on."""
    shutil.rmtree(output, ignore_errors=True)
    begin = time.monotonic()
    running = [start(command, output, "0/1")] if hosts == 1 else start_hosts(command, output, hosts)
    while running[0].poll() is None and not (output / "_journal").exists():
        time.sleep(0.01)
    written = time.monotonic()
    statuses = [process.wait() for process in running]
    assert all(status in DONE for status in statuses), f"{statuses}; see {output}-*.log"
    return written - begin, time.monotonic() - written


def kill_until_done(command, output: Path, workers: int, kills: int, startup_s: float, work_s: float, chance):
    """Start the workers of a job again and again, and kill one at random, until the job has ended.

    Args:
        kills: at most.
    Returns: what the job was doing, as seen from outside, for each kill.
    """
    where: collections.Counter[str] = collections.Counter()
    running: dict[int, subprocess.Popen] = {}
    while True:
        for worker in range(workers):
            status = running[worker].poll() if worker in running else -signal.SIGKILL
            assert status in (None, *DONE, -signal.SIGKILL), f"a worker ended with {status}; see {output}-*.log"
            if status == -signal.SIGKILL:
                running[worker] = start(command, output, f"{worker}/{workers}")
        if where.total() == kills or all(process.poll() is not None for process in running.values()):
            break
        wait_for_a_kill(list(running.values()), startup_s, work_s, chance)
        victims = [process for process in running.values() if process.poll() is None]
        if victims:
            where[state(output)] += 1
            victim = chance.choice(victims)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
    for process in running.values():
        process.wait()
    if not (output / "manifest.json").exists():  # what a killed worker has left is done by any that comes after it
        status = start(command, output, f"0/{workers}").wait()
        assert status in DONE, f"the job ended with {status}; see {output}-*.log"
    return where


def wait_for_a_kill(running: list[subprocess.Popen], startup_s: float, work_s: float, chance) -> None:
    """Some kills fall into loading, most into the work; a job lives through several."""
    pause = chance.uniform(0, startup_s) if chance.random() < 0.25 else startup_s + chance.uniform(0, work_s / 3)
    until = time.monotonic() + pause
    while time.monotonic() < until and any(process.poll() is None for process in running):
        time.sleep(0.005)


def kill_hosts_until_done(command, output: Path, count: int, kills: int, startup_s: float, work_s: float, chance):
    """As `kill_until_done`, with the processes of one job: the remaining one has to notice the loss, and end."""
    where: collections.Counter[str] = collections.Counter()
    while True:
        running = start_hosts(command, output, count)
        if where.total() < kills:
            wait_for_a_kill(running, startup_s, work_s, chance)
            victims = [process for process in running if process.poll() is None]
            if len(victims) == count:
                where[state(output)] += 1
                chance.choice(victims).send_signal(signal.SIGKILL)
        statuses = [process.wait(300) for process in running]
        assert all(status in (*DONE, LOST, -signal.SIGKILL) for status in statuses), f"{statuses}; see {output}-*.log"
        if all(status in DONE for status in statuses):
            return where


def state(output: Path) -> str:
    """Progress of the job, read from its directory."""
    if (output / "manifest.json").exists():
        return "complete"
    if not (output / "job.json").exists():
        return "not begun"
    journals = list(output.glob("_journal/*"))
    try:
        return "rows finished" if any(path.read_bytes().count(b"\n") > 1 for path in journals) else "between"
    except FileNotFoundError:
        return "committing"


def contents(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}


def compare(expected: dict[str, bytes], found: dict[str, bytes], rows: int, kind: str) -> collections.Counter[str]:
    """Rows lost and duplicated, by id, and files that are missing, too many or different."""
    ids: collections.Counter[tuple[str, int | None]] = collections.Counter()
    for name, data in found.items():
        if name.startswith("part-"):
            ids.update((row["id"], row["index"]) for row in read(data, kind))
    have = {name for name, _ in ids}
    return collections.Counter(
        lost=sum(str(i) not in have for i in range(rows)),
        duplicated=sum(count - 1 for count in ids.values()),
        different_files=sum(expected.get(name) != found.get(name) for name in {*expected, *found}),
    )


def read(data: bytes, kind: str) -> list[dict]:
    if kind == "jsonl":
        return [json.loads(line) for line in data.splitlines()]
    import io

    import pyarrow.parquet

    return pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()


if __name__ == "__main__":
    sys.exit(main())
