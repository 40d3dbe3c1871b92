"""`Hosts`: the processes that do a job together, and what they tell each other.

They talk through the key-value store of JAX's coordination service, which process 0 runs: small texts, and no
collective. All waiting is done in short pieces, so that signals and failures are noticed.
"""

import collections
import dataclasses
import json
import os
import socket
import threading
import time
from typing import Any, Protocol

PIECE_S = 0.25
"""Of waiting, between two looks at what has happened meanwhile."""


class HostLost(RuntimeError):
    """Another process was lost, or has failed."""


class Board(Protocol):
    """A store of texts that all processes see. Methods raise ConnectionError if it cannot be reached."""

    def set(self, key: str, text: str) -> None:
        """Write, in place of what is there."""
        ...

    def wait(self, key: str, seconds: float) -> str | None:
        """The text at a key, as soon as it is there; None if that takes longer."""
        ...

    def all(self, folder: str) -> dict[str, str]:
        """Texts by the rest of their keys, behind `folder/`."""
        ...

    def remove(self, key: str) -> None: ...


class JaxBoard(Board):
    """The store of `jax.distributed`'s client.

    Args:
        token: stands in every key. A process that is left over from an earlier start, and whose connection finds the
            new process 0 at the old address, writes where nobody reads. It keeps no stranger out: who reaches the port
            can list the keys.
    """

    def __init__(self, client, token: str = ""):
        self._client, self._root = client, f"levanter_infer/{token}" if token else "levanter_infer"

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def set(self, key: str, text: str) -> None:
        self._call(self._client.key_value_set, self._key(key), text, True)

    def wait(self, key: str, seconds: float) -> str | None:
        return self._call(self._client.blocking_key_value_get, self._key(key), max(1, round(seconds * 1000)))

    def all(self, folder: str) -> dict[str, str]:
        found = self._call(self._client.key_value_dir_get, self._key(folder))
        return {key.removeprefix(self._key(folder) + "/"): text for key, text in found or ()}

    def remove(self, key: str) -> None:
        self._call(self._client.key_value_delete, self._key(key))

    def _call(self, function, *arguments):
        import jax

        try:
            return function(*arguments)
        except jax.errors.JaxRuntimeError as e:
            if str(e).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                return None
            raise ConnectionError(str(e).splitlines()[0]) from e


@dataclasses.dataclass
class Standing:
    """Where this process stands, for the others to see."""

    doing: str = "starting"
    round_id: int | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)


class Hosts:
    """This process among `count`.

    Every process makes the same calls of `exchange` and `decide` in the same order.

    Args:
        index: which one this is, from 0.
        start_timeout_s: how long to wait for what others have to say, where nothing else is said.
        heartbeat_s: after which a silent one counts as lost (`Watchdog`).
    """

    def __init__(self, board: Board, index: int, count: int, *, start_timeout_s: float = 300, heartbeat_s: float = 20):
        self.board, self.index, self.count = board, index, count
        self.start_timeout_s, self.heartbeat_s = start_timeout_s, heartbeat_s
        self.names = [f"host {i}" for i in range(count)]
        """As messages call them."""
        self.standing = Standing()
        self.failure: str | None = None
        """What has happened to another process; set by the watchdog."""
        self.ended = threading.Event()
        """This process has said that it ends."""
        self.stop_wanted = False
        """This process was asked to stop; the watchdog tells the others."""
        self._times: collections.Counter[str] = collections.Counter()
        self._asked = 0

    @property
    def is_lead(self) -> bool:
        """Whether this is the one that decides, and writes what is written once."""
        return self.index == 0

    @property
    def others(self) -> list[int]:
        return [i for i in range(self.count) if i != self.index]

    def meet(self) -> None:
        """Learn what the others are called."""
        names = self.exchange("name", f"{socket.gethostname()}, process {os.getpid()}")
        self.names = [f"host {i} ({name})" for i, name in enumerate(names)]

    def note(self, doing: str, round_id: int | None = None) -> None:
        """What this process does from now on, for the watchdog's reports."""
        self.standing = Standing(doing, self.standing.round_id if round_id is None else round_id)

    # What all say, and what one says

    def exchange(self, name: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """What each process has given, by their numbers; values are what JSON holds.

        Raises: HostLost naming those that have given nothing in time.
        """
        place = self._place(name)
        self.board.set(f"{place}/{self.index}", json.dumps(value))
        until = time.monotonic() + (timeout_s or self.start_timeout_s)
        return [self._take(f"{place}/{i}", i, until, name) for i in range(self.count)]

    def decide(self, name: str, value: Any = None) -> Any:
        """What process 0 has given."""
        place = self._place(name)
        if self.is_lead:
            self.board.set(place, json.dumps(value))
        return self._take(place, 0, time.monotonic() + self.start_timeout_s, name)

    def announce(self, key: str, value: Any) -> None:
        """Say something that others wait for (`hear`)."""
        self.board.set(key, json.dumps(value))

    def hear(self, key: str, timeout_s: float | None = None) -> Any:
        """What process 0 has announced. Raises: HostLost if it has not in time."""
        return self._take(key, 0, time.monotonic() + (timeout_s or self.start_timeout_s), key)

    def forget(self, key: str) -> None:
        """Remove what was announced."""
        self.board.remove(key)

    def fresh(self, name: str) -> int:
        """A number that this process has not been given for `name` before."""
        self._times[f"fresh {name}"] += 1
        return self._times[f"fresh {name}"]

    def _place(self, name: str) -> str:
        self._times[name] += 1
        return f"{name}/{self._times[name]}"

    def _take(self, key: str, host: int, until: float, what: str) -> Any:
        begin = time.monotonic()
        while True:
            self.check()
            try:
                text = self.board.wait(key, max(0.001, min(PIECE_S, until - time.monotonic())))
            except ConnectionError as e:
                raise HostLost(f"{self.names[0]} cannot be reached: {e}") from e
            if text is not None:
                return json.loads(text)
            if time.monotonic() >= until:
                raise HostLost(
                    f"{self.names[host]} has not answered for {time.monotonic() - begin:.0f} s, about {what!r}; see "
                    "its output, or raise multihost.start_timeout_s"
                )

    def check(self) -> None:
        """Raises: HostLost if another process was lost or has failed."""
        if self.failure is not None:
            raise HostLost(self.farewell)

    @property
    def farewell(self) -> str:
        """What this process says as it ends because of `failure`."""
        return f"{self.failure}; this process ends too. What was finished is kept: the same command goes on"

    # Wishes, which the lead takes into account when it decides about a round

    def ask(self, wish: str, value: Any = None) -> None:
        """Wish something of the process that decides."""
        self._asked += 1
        self.board.set(f"wish/{self.index}-{self._asked}", json.dumps([wish, value]))

    def take_wishes(self) -> list[tuple[str, Any]]:
        """Those of all processes that have come since the last call. Requires: this process decides."""
        found = self.board.all("wish")
        for key in found:
            self.board.remove(f"wish/{key}")
        return [tuple(json.loads(found[key])) for key in sorted(found)]
