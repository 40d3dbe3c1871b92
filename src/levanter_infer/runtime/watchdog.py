"""`Watchdog`: publishes the heartbeat of this process, and notices when that of another process stops.

Each process writes a few bytes several times in a heartbeat, and reads those of all others. Clocks of different
machines are never compared: a process is lost when nothing new has come from it for a heartbeat of the reader's own
clock.

Calls to the store have no time limit, and block for as long as process 0 hangs. So one thread calls the store, and a
second thread, which never calls it, checks that the first gets answers.
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
from collections.abc import Callable

from levanter_infer.runtime.aborts import clear_abort_message, end_now, on_abort
from levanter_infer.runtime.hosts import Hosts

_BEATS, _MAX_INTERVAL_S = 8, 0.25
"""Beats in a heartbeat, and the largest interval between two, in seconds."""
_STACK_S, _STACK_FRAMES = 1.0, 8
_GRACE_S = 0.8
"""Seconds for the main thread to end in order after another process was lost."""
_LEAD_S = 0.5
"""Time limit of a last call of the store, in seconds: the store is gone when process 0 ends."""
_MAX_TICKS = 4
"""Most intervals that one check counts: a process that was itself held up, by a debugger or by its own interpreter,
must not take that for silence of the store."""
DONE, FAILED = "done", "failed"
"""The two ways in which a process ends, as it publishes them."""


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Watchdog:
    """Two threads beside the work: one calls the store, and one checks that the store answers.

    When a process is lost or has failed, every other process reports it together with the last round of all, gives its
    main thread a moment (`Hosts.failure`), and ends with status `aborts.LOST`.

    Args:
        stall_s: seconds without progress after which each process reports its status, and goes on.
        coordinator: host:port of the store; None: the store is in this process.
    """

    def __init__(self, hosts: Hosts, *, stall_s: float, coordinator: str | None = None):
        self._hosts, self._stall_s, self._coordinator = hosts, stall_s, coordinator
        self._interval = min(_MAX_INTERVAL_S, hosts.heartbeat_s / _BEATS)
        self._main = threading.main_thread().ident
        self._count = 0
        now = time.monotonic()
        self._seen: dict[int, tuple[float, list]] = {i: (now, [0, None, "starting", 0.0]) for i in hosts.others}
        self._reached, self._last_stack = now, 0.0
        self._beats = self._beats_seen = 0
        self._last_look, self._unanswered = now, 0.0
        """Seconds for which the store has not answered, as `check_store` counts them."""
        self._published_stop = self._passed_stop = False
        self._reported_stall: tuple = ()
        self._ended: set[int] = set()
        self._why: str | None = None
        self._failing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.exit, self.stop = end_now, stop_this_process
        """Functions that end the process, at once and in order; tests replace them."""

    def start(self) -> None:
        on_abort(self._explain_abort)
        actions = {"watchdog": self.check_store, "watchdog-store": self.beat}
        self._threads = [
            threading.Thread(target=self._repeat, args=(action,), name=name, daemon=True)
            for name, action in actions.items()
        ]
        for thread in self._threads:
            thread.start()

    def _repeat(self, action: Callable[[], None]) -> None:
        while not self._hosts.ended.is_set():
            action()
            self._hosts.ended.wait(self._interval)

    def beat(self) -> None:
        """Publish the status of this process and read that of the others. Blocks while the store does not answer."""
        try:
            self._publish()
            self._read_others()
            self._reached = time.monotonic()
        except ConnectionError as e:
            if time.monotonic() - self._reached > self._hosts.heartbeat_s - self._interval:
                self._lose_store(f" ({e})")
        self._beats += 1
        if self._hosts.failure is None:
            self._find_lost()

    def check_store(self) -> None:
        """Check that the store answers. Never blocks."""
        now = time.monotonic()
        if self._beats != self._beats_seen:
            self._beats_seen, self._unanswered = self._beats, 0.0
        else:
            self._unanswered += min(now - self._last_look, _MAX_TICKS * self._interval)
        self._last_look = now
        if self._unanswered > self._hosts.heartbeat_s - self._interval and self._hosts.failure is None:
            self._lose_store()

    def _lose_store(self, reason: str = "") -> None:
        """End this process: the store is gone, or process 0, which holds it, hangs."""
        lead = self._hosts.names[0]
        self._lose(f"{lead} is lost: its store has not answered for a heartbeat{reason}", store_answers=False)

    def _publish(self) -> None:
        hosts, now = self._hosts, time.monotonic()
        standing = hosts.status
        self._count += 1
        beat = [self._count, standing.round_id, standing.doing, round(now - standing.since, 1)]
        hosts.store.set(f"beat/{hosts.index}", json.dumps(beat))
        if now - self._last_stack > _STACK_S:
            self._last_stack = now
            hosts.store.set(f"stack/{hosts.index}", self._stack())
        if hosts.stop_wanted and not self._published_stop:
            self._published_stop = True
            hosts.store.set(f"stop/{hosts.index}", "")
            hosts.request("stop")

    def _read_others(self) -> None:
        hosts, now = self._hosts, time.monotonic()
        for key, text in hosts.store.all("beat").items():
            beat = json.loads(text)
            if int(key) != hosts.index and beat[0] != self._seen[int(key)][1][0]:
                self._seen[int(key)] = now, beat
        if not (hosts.stop_wanted or self._passed_stop) and hosts.store.all("stop"):
            self._passed_stop = True
            self.stop()  # a stop of one process is a stop of all
        ends = {int(key): json.loads(text) for key, text in hosts.store.all("end").items()}
        self._ended = set(ends)
        for i, (how, why) in ends.items():
            if i != hosts.index and how == FAILED and hosts.failure is None and not hosts.ended.is_set():
                self._lose(f"{hosts.names[i]} has failed: {why}", with_report=hosts.status.round_id is not None)
        self._look_for_stall(now)

    def _find_lost(self) -> None:
        now = time.monotonic()
        for i, (seen, _) in self._seen.items():
            silent = now - seen
            if i not in self._ended and silent > self._hosts.heartbeat_s - self._interval:
                self._lose(f"{self._hosts.names[i]} is lost: no heartbeat for {silent:.1f} s")
                return

    def _lose(self, text: str, *, with_report: bool = True, store_answers: bool = True) -> None:
        """End this process because of another one. Args: store_answers: False: do not call the store."""
        hosts = self._hosts
        self._fail(text, with_report=with_report, read_store=store_answers)
        if not hosts.ended.wait(_GRACE_S):
            if store_answers:
                run_within(_LEAD_S, lambda: hosts.store.set(f"end/{hosts.index}", json.dumps([FAILED, text])))
            self.exit(hosts.exit_message)

    def _fail(self, text: str, *, with_report: bool = True, read_store: bool) -> None:
        """Set the reason why this process ends, once, after the report: other threads may end the process then."""
        with self._failing:
            if self._hosts.failure is None:
                if with_report:
                    self.report(text, read_store=read_store)
                self._hosts.failure = text

    # Reports

    def report(self, reason: str, *, read_store: bool = True) -> None:
        """Write the status of every process, with its stack where that is known. Args: read_store: read the stacks."""
        hosts, now = self._hosts, time.monotonic()
        lines = [f"watchdog  {reason}"]
        stacks: dict[str, str] = {}
        if read_store:
            run_within(_LEAD_S, lambda: stacks.update(hosts.store.all("stack")))
        stacks[str(hosts.index)] = self._stack()
        for i in range(hosts.count):
            if i == hosts.index:
                round_id, doing, for_s, ago = hosts.status.round_id, hosts.status.doing, now, 0.0
                for_s -= hosts.status.since
            else:
                seen, (_, round_id, doing, for_s) = self._seen[i]
                ago = now - seen
            last = "no round yet" if round_id is None else f"last round {round_id}"
            lines.append(
                f"watchdog  {hosts.names[i]}: {last}, {doing} for {for_s:.1f} s, last heartbeat {ago:.1f} s ago, at"
            )
            lines += [f"watchdog      {line}" for line in stacks.get(str(i), "(its stack is not known)").splitlines()]
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()

    def _look_for_stall(self, now: float) -> None:
        """Report once when no round has ended for `stall_s`."""
        standing = self._hosts.status
        stalled = standing.doing == "in a round" and now - standing.since > self._stall_s
        if not stalled:
            self._reported_stall = ()
        elif self._reported_stall != (standing.round_id,):
            self._reported_stall = (standing.round_id,)
            self.report(f"no round has ended for {now - standing.since:.0f} s")

    def _stack(self) -> str:
        """Stack of the main thread, the innermost call last."""
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return "(no main thread)"
        frames = traceback.extract_stack(frame)[-_STACK_FRAMES:]
        return "\n".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in frames)

    def _explain_abort(self) -> str | None:
        """Explain an abort of JAX's runtime: when its service is gone with process 0, it aborts all others at once."""
        if self._why is not None:
            return self._why
        silent = self._unanswered > _MAX_TICKS * self._interval
        if not self._hosts.is_lead and (silent or not self._lead_answers()):
            what = "store does not answer" if silent else "connections are closed"
            # The aborting thread may hold locks of the store's client
            self._fail(f"{self._hosts.names[0]} is lost: its {what}", read_store=False)
        return None if self._hosts.failure is None else self._hosts.exit_message

    def _lead_answers(self) -> bool:
        host, _, port = (self._coordinator or "").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1).close()
        except (OSError, ValueError):
            return False
        return True

    # The end

    def end(self, how: str, why: str = "") -> bool:
        """Publish that this process ends, and wait for the others: with `DONE` as long as they live, with `FAILED` for
        a heartbeat.

        Returns: whether all processes have published that they end.
        Raises: HostLost if `how` is `DONE` and another process is lost or fails.
        """
        hosts = self._hosts
        hosts.set_status("waiting for the others to end")
        if how == FAILED:
            self._why = why
            hosts.ended.set()
            limit = _LEAD_S if hosts.failure is not None else hosts.heartbeat_s + 1
            all_ended = run_within(limit, lambda: self._publish_end(how, why, lambda: None))
        else:  # `check_store` goes on until all have ended, so nothing hangs
            all_ended = False
            with contextlib.suppress(ConnectionError):
                self._publish_end(how, why, hosts.check)
                all_ended = True
        if not all_ended:
            return False
        hosts.ended.set()
        # A daemon thread that Python ends within a call of JAX's client aborts the process at its exit.
        for thread in self._threads:
            thread.join(hosts.heartbeat_s)
        if how == DONE:
            clear_abort_message()
        return True

    def _publish_end(self, how: str, why: str, check: Callable[[], None]) -> None:
        hosts = self._hosts
        hosts.store.set(f"end/{hosts.index}", json.dumps([how, why]))
        while len(hosts.store.all("end")) < hosts.count:
            check()
            time.sleep(self._interval)


def run_within(seconds: float, action: Callable[[], None]) -> bool:
    """Run an action in a thread, for at most `seconds`; returns whether it returned in time and without an error.

    A thread that takes longer is left running.
    """
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):  # JaxRuntimeError too
            action()
            done.set()

    thread = threading.Thread(target=run, name="watchdog-call", daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()
