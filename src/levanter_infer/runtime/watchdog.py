"""`Watchdog`: tells the others that this process lives, and notices when one of them does not.

Each process writes a few bytes several times in a heartbeat, and reads those of all others. Clocks of different
machines are never compared: one is lost when nothing new has come from it for a heartbeat of the reader's own clock.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback

from levanter_infer.runtime.aborts import end_now, no_words, on_abort
from levanter_infer.runtime.hosts import Hosts

_BEATS, _MAX_INTERVAL_S = 8, 0.25
"""In a heartbeat; and at least one in so many seconds."""
_STACK_S, _STACK_FRAMES = 1.0, 8
_GRACE_S = 0.8
"""For the main thread to come to an end in order, after it was told that another process is lost."""
_LEAD_S = 0.5
"""For others to say that they end too; when process 0 ends, the store is gone."""
DONE, FAILED = "done", "failed"
"""How a process ends."""


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Watchdog:
    """A thread beside the work.

    When a process is lost or has failed, every other one reports it together with the last round of all, gives its main
    thread a moment (`Hosts.failure`), and ends with status `aborts.LOST`.

    Args:
        stall_s: without progress, after which all processes report where they stand, and go on.
        coordinator: host:port of the store; None: it is in this process.
    """

    def __init__(self, hosts: Hosts, *, stall_s: float, coordinator: str | None = None):
        self._hosts, self._stall_s, self._coordinator = hosts, stall_s, coordinator
        self._interval = min(_MAX_INTERVAL_S, hosts.heartbeat_s / _BEATS)
        self._main = threading.main_thread().ident
        self._count = 0
        now = time.monotonic()
        self._seen: dict[int, tuple[float, list]] = {i: (now, [0, None, "starting", 0.0]) for i in hosts.others}
        self._reached, self._last_stack = now, 0.0
        self._told_stop = self._passed_stop = False
        self._reported_stall: tuple = ()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._ended: set[int] = set()
        self._why: str | None = None
        self.exit, self.stop = end_now, stop_this_process
        """What ends the process, at once and in order; tests put something else here."""

    def start(self) -> None:
        on_abort(self._words)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over():
            self.beat()
            time.sleep(self._interval)

    def _is_over(self) -> bool:
        return self._hosts.ended.is_set()

    def beat(self) -> None:
        """Tell and listen once."""
        try:
            self._tell()
            self._listen()
            self._reached = time.monotonic()
        except ConnectionError as e:
            if time.monotonic() - self._reached > self._hosts.heartbeat_s - self._interval:
                self._lose(f"{self._hosts.names[0]} is lost: its store has not answered for a heartbeat ({e})")
        if self._hosts.failure is None:
            self._find_lost()

    def _tell(self) -> None:
        hosts, now = self._hosts, time.monotonic()
        standing = hosts.standing
        self._count += 1
        beat = [self._count, standing.round_id, standing.doing, round(now - standing.since, 1)]
        hosts.board.set(f"beat/{hosts.index}", json.dumps(beat))
        if now - self._last_stack > _STACK_S:
            self._last_stack = now
            hosts.board.set(f"stack/{hosts.index}", self._stack())
        if hosts.stop_wanted and not self._told_stop:
            self._told_stop = True
            hosts.board.set(f"stop/{hosts.index}", "")
            hosts.ask("stop")

    def _listen(self) -> None:
        hosts, now = self._hosts, time.monotonic()
        for key, text in hosts.board.all("beat").items():
            beat = json.loads(text)
            if int(key) != hosts.index and beat[0] != self._seen[int(key)][1][0]:
                self._seen[int(key)] = now, beat
        if not (hosts.stop_wanted or self._passed_stop) and hosts.board.all("stop"):
            self._passed_stop = True
            self.stop()  # what one is asked to do, all are
        ends = {int(key): json.loads(text) for key, text in hosts.board.all("end").items()}
        self._ended = set(ends)
        for i, (how, why) in ends.items():
            if i != hosts.index and how == FAILED and hosts.failure is None and not hosts.ended.is_set():
                self._lose(f"{hosts.names[i]} has failed: {why}", with_report=hosts.standing.round_id is not None)
        self._look_for_stall(now)

    def _find_lost(self) -> None:
        now = time.monotonic()
        for i, (seen, _) in self._seen.items():
            silent = now - seen
            if i not in self._ended and silent > self._hosts.heartbeat_s - self._interval:
                self._lose(f"{self._hosts.names[i]} is lost: not heard of for {silent:.1f} s")
                return

    def _lose(self, text: str, *, with_report: bool = True) -> None:
        """End this process because of another one."""
        hosts = self._hosts
        hosts.failure = text
        if with_report:
            self.report(text)
        if not hosts.ended.wait(_GRACE_S):
            with contextlib.suppress(ConnectionError):
                hosts.board.set(f"end/{hosts.index}", json.dumps([FAILED, text]))
            self.exit(hosts.farewell)

    # Reports

    def report(self, reason: str, *, ask: bool = True) -> None:
        """Say where every process stands, and show what can be had of their stacks. `ask`: the store, too."""
        hosts, now = self._hosts, time.monotonic()
        lines = [f"watchdog  {reason}"]
        stacks: dict[str, str] = {}
        with contextlib.suppress(ConnectionError):
            stacks = hosts.board.all("stack") if ask else {}
        stacks[str(hosts.index)] = self._stack()
        for i in range(hosts.count):
            if i == hosts.index:
                round_id, doing, for_s, ago = hosts.standing.round_id, hosts.standing.doing, now, 0.0
                for_s -= hosts.standing.since
            else:
                seen, (_, round_id, doing, for_s) = self._seen[i]
                ago = now - seen
            last = "no round yet" if round_id is None else f"last round {round_id}"
            lines.append(f"watchdog  {hosts.names[i]}: {last}, {doing} for {for_s:.1f} s, heard {ago:.1f} s ago, at")
            lines += [f"watchdog      {line}" for line in stacks.get(str(i), "(its stack is not known)").splitlines()]
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()

    def _look_for_stall(self, now: float) -> None:
        """Report once when no process has got on for long in its rounds."""
        standing = self._hosts.standing
        stalled = standing.doing == "in a round" and now - standing.since > self._stall_s
        if not stalled:
            self._reported_stall = ()
        elif self._reported_stall != (standing.round_id,):
            self._reported_stall = (standing.round_id,)
            self.report(f"no round has ended for {now - standing.since:.0f} s")

    def _stack(self) -> str:
        """Of the main thread, the innermost call last."""
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return "(no main thread)"
        frames = traceback.extract_stack(frame)[-_STACK_FRAMES:]
        return "\n".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in frames)

    def _words(self) -> str | None:
        """What an abort of JAX's runtime means: with process 0 its service is gone, and it ends all others at once."""
        if self._why is not None:
            return self._why
        if not self._hosts.is_lead and not self._lead_answers():
            text = f"{self._hosts.names[0]} is lost: its connections are closed"
            self._hosts.failure = self._hosts.failure or text
            self.report(text, ask=False)  # this thread is within the store's client, which would wait for itself
        return None if self._hosts.failure is None else self._hosts.farewell

    def _lead_answers(self) -> bool:
        host, _, port = (self._coordinator or "").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1).close()
        except (OSError, ValueError):
            return False
        return True

    # The end

    def end(self, how: str, why: str = "") -> bool:
        """Say that this process ends, and wait for the others: as long as they live where all is well (`DONE`), else
        for a heartbeat.

        Returns: whether all have said so.
        Raises: HostLost if all is well here, and another one is lost or fails.
        """
        hosts, begin = self._hosts, time.monotonic()
        hosts.note("waiting for the others to end")
        if how == FAILED:
            self._why = why
            hosts.ended.set()
        try:
            hosts.board.set(f"end/{hosts.index}", json.dumps([how, why]))
            while len(hosts.board.all("end")) < hosts.count:
                if how == DONE:
                    hosts.check()
                elif time.monotonic() - begin > (_LEAD_S if hosts.failure is not None else hosts.heartbeat_s + 1):
                    return False
                time.sleep(self._interval)
        except ConnectionError:
            return False
        hosts.ended.set()
        no_words()
        return True
