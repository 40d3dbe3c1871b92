"""Processes that do a job together, on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Processes:
    """Started with `module` and arguments each; ended when the context ends.

    Args:
        logs: directory for what they say.
        environments: what differs for each.
    """

    def __init__(self, logs: Path, module: str, arguments: Sequence[Sequence[str]], environments=None):
        self._logs = [logs / f"host-{i}.log" for i in range(len(arguments))]
        self.outputs = [logs / f"host-{i}.out" for i in range(len(arguments))]
        more: Sequence[Mapping[str, str]] = environments or [{}] * len(arguments)
        self.running = []
        for i, own in enumerate(arguments):
            with open(self._logs[i], "wb") as log, open(self.outputs[i], "wb") as out:
                command = [sys.executable, "-W", "ignore", "-m", module, *own]
                environment = {**os.environ, "JAX_PLATFORMS": "cpu", **more[i]}
                self.running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log, stdout=out))

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.wait()

    def wait(self, seconds: float) -> list[int]:
        """Exit statuses. Fails with what they said if one still runs."""
        until = time.monotonic() + seconds
        for process in self.running:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError("hangs:\n" + "\n--\n".join(self.said)) from None
        return [process.returncode for process in self.running]

    def wait_for(self, path: Path, pattern: str, seconds: float = 120) -> None:
        """Until files match, and all processes live."""
        until = time.monotonic() + seconds
        while not list(path.glob(pattern)):
            assert time.monotonic() < until and all(p.poll() is None for p in self.running), "\n--\n".join(self.said)
            time.sleep(0.02)

    def send(self, index: int, number: signal.Signals) -> None:
        self.running[index].send_signal(number)

    @property
    def said(self) -> list[str]:
        """The text of each on standard error."""
        return [log.read_text(errors="replace") for log in self._logs]
