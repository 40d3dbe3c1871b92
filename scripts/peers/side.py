"""One engine in its own process, as `run.py` holds it. For Linux."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
"""Clock ticks of all processors per second."""


class SideError(Exception):
    """A side could not start, or ended."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One task as a side did it."""

    seconds: float
    tokens: list[list[int]]
    disturbed: float
    """Share of the machine's processors that others used meanwhile."""


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

    def measure(self, prompts: list[list[int]], count: int) -> Measurement:
        """Let it generate `count` tokens after each prompt."""
        begin, used = time.monotonic(), self._others()
        answer = self._ask({"prompts": prompts, "count": count})
        share = (self._others() - used) / (TICKS * (time.monotonic() - begin))
        return Measurement(answer["seconds"], answer["tokens"], max(0.0, share))

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

    def _others(self) -> int:
        return machine_ticks() - group_ticks(self.process.pid)


def machine_ticks() -> int:
    """Processor time that has been used since the machine started, by anything."""
    line = Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, _, _, interrupts, soft, stolen, *_ = map(int, line.split()[1:])
    return user + nice + system + interrupts + soft + stolen


def group_ticks(group: int) -> int:
    """Processor time that the living processes of a group have used."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return ticks
