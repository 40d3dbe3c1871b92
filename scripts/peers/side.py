"""One engine in its own process, as `run.py` holds it."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


class SideError(Exception):
    """A side could not start, or ended."""


class Side:
    """A process that answers as `protocol.serve` says. While it is not asked it is stopped, its children too."""

    def __init__(self, command: Sequence[str | Path], setup: dict, log: Path):
        """Start it and wait until it is ready; what it prints goes to `log`."""
        self.log = log
        with log.open("wb") as stderr:
            # A group of its own, to stop and continue; in our session, so that the kernel ends it if we are killed.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, process_group=0
            )
        self.versions = self._ask(setup)["versions"]

    def measure(self, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        """Seconds and tokens of `count` tokens after each prompt."""
        answer = self._ask({"prompts": prompts, "count": count})
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _ask(self, message: dict) -> dict:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self._signal(signal.SIGKILL)  # children that it left
            last = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise SideError(f"ended with status {status}: {last[-500:]}")
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
