"""Random requests from the server's own description, by schemathesis, against `levanter-infer serve` on a tiny model.

python scripts/fuzz_server.py --requests 10000 --seed 0
"""

import argparse
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
"""All of schemathesis that are about a description like ours, except that valid bodies are accepted: a description
cannot say which parameters exclude each other, nor the limits of the engine."""


@contextlib.contextmanager
def server(*options: str, model: str = "models/tiny") -> Iterator[tuple[str, int]]:
    """(URL, process id) of a server, until the block ends."""
    command = [sys.executable, "-m", "levanter_infer", "serve", "--model", model, "--port", "0", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.match(r"serving +(http\S+)", line):
                    break
            else:
                raise SystemExit("".join(said))
            threading.Thread(target=_copy, args=(process.stderr,), daemon=True).start()
            yield found[1], process.pid
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def _copy(lines) -> None:
    for line in lines:
        print(f"server: {line}", end="", file=sys.stderr)


def metrics(url: str) -> dict[str, float]:
    """The samples of /metrics without labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", "\n".join(lines), flags=re.MULTILINE)}


def free_pages(url: str) -> tuple[float, float]:
    """(free, all) pages, once no request is left or ten seconds have passed."""
    for _ in range(100):
        found = metrics(url)
        free, total = found["levanter_infer_pages_free"], found["levanter_infer_pages_total"]
        if free == total:
            break
        time.sleep(0.1)
    return free, total


def statuses(report: Path) -> collections.Counter[str]:
    """Requests by path and status, from schemathesis' report."""
    counts: collections.Counter[str] = collections.Counter()
    for entry in json.loads(report.read_text())["log"]["entries"]:
        path = "/" + entry["request"]["url"].split("/", 3)[3].split("?")[0]
        counts[f"{path} {entry['response']['status']}"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="generated requests, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--schemathesis", default=sys.executable, help="the Python that has schemathesis")
    args = parser.parse_args()
    options = ("--engine.max_seqs", "16", "--engine.max_seq_len", "64", "--sampling.max_tokens", "8")
    more = ("--engine.max_logprobs", "4", "--engine.max_step_tokens", "64")
    with server(*options, *more, "--tool_call_parser", "hermes") as (url, _), tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(args.schemathesis, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--continue-on-failure"),
            *("--max-examples", str(args.requests // 2), "--seed", str(args.seed), "--workers", str(args.workers)),
            *("--request-timeout", "60", "--suppress-health-check", "all", "--generation-database", "none"),
            *("--report", "har", "--report-har-path", str(report)),
        ]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "fuzz_server_hooks", "PYTHONPATH": str(ROOT / "scripts")}
        done = subprocess.run(command, cwd=folder, env=environment)
        counts = statuses(report)
        free, total = free_pages(url)
        print(f"{sum(counts.values())} requests: {dict(sorted(counts.items()))}")
        print(
            f"{free:.0f} of {total:.0f} pages free, {metrics(url)['levanter_infer_generated_tokens_total']:.0f} tokens"
        )
        return done.returncode or int(free != total)


if __name__ == "__main__":
    sys.exit(main())
