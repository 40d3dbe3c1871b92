"""Round coordination: this process alone, or all processes of a mesh, agree on what depends on a clock, a signal or a
caller.

The program of a round is one for all devices of a mesh, so all processes that have some of them must launch it with
the same contents. They compute the same from the same requests and the same outputs. Whatever else enters a round is
decided by process 0, and broadcast to the others before it: time, number of steps, cancellations, and whether to stop.
"""

import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from levanter_infer.engine.request_state import RequestState
from levanter_infer.runtime.hosts import Hosts

_KEPT_TERMS = 8
"""Rounds whose terms stay readable. All processes have read older ones: none can be two rounds ahead of another."""
IN_A_ROUND = "in a round"


@dataclasses.dataclass(frozen=True)
class RoundTerms:
    """The terms of a round, beside requests and the state."""

    now: float
    """Seconds of a clock that all share; deadlines are compared with it."""
    max_steps: int
    cancelled: tuple[RequestState, ...] = ()


class RoundCoordinator(Protocol):
    """Decides, for this process or with the others."""

    stopping: bool
    """Whether it has been decided that the work stops."""

    def terms(self, round_id: int, max_steps: int) -> RoundTerms:
        """The terms of the next round. `max_steps`: the number that this process would choose."""
        ...

    def now(self) -> float:
        """The time of `RoundTerms.now`, to begin a deadline with."""
        ...

    def enter(self, request: RequestState) -> None:
        """A request was submitted."""
        ...

    def cancel(self, request: RequestState) -> bool:
        """Whether to end a request now; if not, it is among the `cancelled` of a coming round."""
        ...

    def on_input(self, fields: Mapping[str, Any]) -> None:
        """Contents were put into the state from outside: a round's admission, or a caller's change."""
        ...


def _seconds() -> float:
    """Seconds of this process's clock, looked up at every call."""
    return time.perf_counter()


class LocalCoordinator(RoundCoordinator):
    """This process decides.

    Args:
        hosts: that look on.
        clock: in seconds.
    """

    def __init__(self, hosts: Hosts | None = None, clock: Callable[[], float] = _seconds):
        self._hosts, self.now = hosts, clock
        self.stopping = False

    def terms(self, round_id: int, max_steps: int) -> RoundTerms:
        if self._hosts is not None:
            self._hosts.check()
            self._hosts.set_status(IN_A_ROUND, round_id)
        return RoundTerms(self.now(), max_steps)

    def enter(self, request: RequestState) -> None:
        pass

    def cancel(self, request: RequestState) -> bool:
        return True

    def on_input(self, fields: Mapping[str, Any]) -> None:
        pass


class LeaderCoordinator(RoundCoordinator):
    """Process 0 decides for all. Every process makes the same calls in the same order, but for `cancel`, which any one
    may make at any time.

    Raises, in all methods: `HostLost` when another process is gone.
    """

    def __init__(self, hosts: Hosts, clock: Callable[[], float] = _seconds):
        self._hosts, self._clock = hosts, clock
        self._place = f"terms/{hosts.broadcast('coordinator', hosts.next_number('coordinator'))}"
        self._numbers: dict[RequestState, int] = {}
        self._by_number: dict[int, RequestState] = {}
        self._entered = self._rounds = self._digest = 0
        self.stopping = False

    def terms(self, round_id: int, max_steps: int) -> RoundTerms:
        hosts, key = self._hosts, f"{self._place}/{self._rounds}"
        hosts.check()
        if hosts.is_lead:
            requests = hosts.pop_requests()
            content = {
                "now": self._clock(),
                "steps": max_steps,
                "cancel": sorted({number for kind, number in requests if kind == "cancel"}),
                "stop": any(kind == "stop" for kind, _ in requests),
                "digest": self._digest,
            }
            hosts.publish(key, content)
            hosts.forget(f"{self._place}/{self._rounds - _KEPT_TERMS}")
        else:
            content = hosts.wait_for(key, math.inf)
        if content["digest"] != self._digest:
            raise RuntimeError(
                f"{hosts.names[hosts.index]} has been given other requests or calls than {hosts.names[0]} before round "
                f"{round_id}; all processes of a mesh must make the same calls in the same order"
            )
        self._rounds += 1
        self.stopping = self.stopping or content["stop"]
        hosts.set_status(IN_A_ROUND, round_id)
        cancelled = [self._by_number[number] for number in content["cancel"] if number in self._by_number]
        self._forget_finished()
        return RoundTerms(content["now"], content["steps"], tuple(r for r in cancelled if not r.is_done))

    def now(self) -> float:
        return self._hosts.broadcast("now", self._clock() if self._hosts.is_lead else None)

    def enter(self, request: RequestState) -> None:
        self._numbers[request] = self._entered
        self._by_number[self._entered] = request
        self._entered += 1

    def cancel(self, request: RequestState) -> bool:
        if request in self._numbers:
            self._hosts.request("cancel", self._numbers[request])
        return False

    def on_input(self, fields: Mapping[str, Any]) -> None:
        for name in sorted(fields):
            for leaf in jax.tree.leaves(fields[name]):
                self._digest = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), self._digest)

    def _forget_finished(self) -> None:
        for request in [request for request in self._numbers if request.is_done]:
            del self._by_number[self._numbers.pop(request)]
