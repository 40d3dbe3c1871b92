"""`Hosts`: the processes of one job, the messages between them, and the comparison of their settings.

Processes communicate through the key-value store of JAX's coordination service, which process 0 runs: small texts, and
no collective. Every wait is a loop over short waits, so that signals and failures are noticed.
"""

import collections
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

POLL_S = 0.25
"""Poll interval of every wait, in seconds."""
_MAX_SHOWN, _MAX_VALUE = 6, 60
_ABSENT = "nothing"


class HostLost(RuntimeError):
    """Another process was lost, or has failed."""


class HostsDiffer(ValueError):
    """Processes of one job differ in a setting that must be equal in all of them."""


class KeyValueStore(Protocol):
    """A store of texts that all processes see. Methods raise ConnectionError if it cannot be reached."""

    def set(self, key: str, text: str) -> None:
        """Write a text, and replace an older one."""
        ...

    def wait(self, key: str, seconds: float) -> str | None:
        """The text of a key as soon as it is set; None after `seconds` without it."""
        ...

    def all(self, folder: str) -> dict[str, str]:
        """Texts of the keys that begin with `folder/`, by the rest of the key."""
        ...

    def remove(self, key: str) -> None: ...


class JaxKeyValueStore(KeyValueStore):
    """The store of `jax.distributed`'s client.

    Args:
        token: prefix of every key. A process that is left over from an earlier start, and whose connection reaches the
            new process 0 at the old address, writes keys that no process reads. The token is no protection from an
            attacker: a client that reaches the port can list the keys.
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
class HostStatus:
    """Status of a process, as its watchdog publishes it."""

    doing: str = "starting"
    round_id: int | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)


class Hosts:
    """This process among the `count` processes of a job.

    Every process makes the same calls of `all_gather` and `broadcast` in the same order.

    Args:
        index: number of this process, from 0.
        start_timeout_s: default time limit of a wait for another process.
        heartbeat_s: seconds after which a silent process counts as lost (`Watchdog`).
    """

    def __init__(
        self, store: KeyValueStore, index: int, count: int, *, start_timeout_s: float = 300, heartbeat_s: float = 20
    ):
        self.store, self.index, self.count = store, index, count
        self.start_timeout_s, self.heartbeat_s = start_timeout_s, heartbeat_s
        self.names = [f"host {i}" for i in range(count)]
        """Names of the processes in messages."""
        self.status = HostStatus()
        self.failure: str | None = None
        self.advice = ""
        """Said after `failure` when this process ends because of it."""
        """Failure of another process; set by the watchdog."""
        self.ended = threading.Event()
        """Set once this process has published that it ends."""
        self.stop_wanted = False
        """This process was asked to stop; its watchdog passes that on to the others."""
        self._times: collections.Counter[str] = collections.Counter()
        self._num_requests = 0

    @property
    def is_lead(self) -> bool:
        """Whether this is process 0, which decides, and writes the output that exists once."""
        return self.index == 0

    @property
    def others(self) -> list[int]:
        return [i for i in range(self.count) if i != self.index]

    def exchange_names(self) -> None:
        """Exchange the names of machines and processes, for messages."""
        names = self.all_gather("name", f"{socket.gethostname()}, process {os.getpid()}")
        self.names = [f"host {i} ({name})" for i, name in enumerate(names)]

    def set_status(self, doing: str, round_id: int | None = None) -> None:
        """Set what this process does from now on, for the watchdog's reports."""
        self.status = HostStatus(doing, self.status.round_id if round_id is None else round_id)

    # Collectives of small JSON values

    def all_gather(self, name: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """The value of each process, by process number; values are what JSON holds.

        Raises: HostLost naming a process that has published nothing in time.
        """
        prefix = self._prefix(name)
        self.store.set(f"{prefix}/{self.index}", json.dumps(value))
        until = time.monotonic() + (timeout_s or self.start_timeout_s)
        found = [self._take(f"{prefix}/{i}", i, until, name) for i in range(self.count)]
        # All have come to this call, so all have read the values of the one before.
        self.store.remove(f"{name}/{self._times[name] - 1}/{self.index}")
        return found

    def broadcast(self, name: str, value: Any = None) -> Any:
        """The value of process 0, in every process."""
        key = self._prefix(name)
        if self.is_lead:
            self.store.set(key, json.dumps(value))
        return self._take(key, 0, time.monotonic() + self.start_timeout_s, name)

    def publish(self, key: str, value: Any) -> None:
        """Set a value for which other processes wait (`wait_for`)."""
        self.store.set(key, json.dumps(value))

    def wait_for(self, key: str, timeout_s: float | None = None) -> Any:
        """The value that process 0 publishes under a key. Raises: HostLost if it publishes none in time."""
        return self._take(key, 0, time.monotonic() + (timeout_s or self.start_timeout_s), key)

    def forget(self, key: str) -> None:
        """Remove a published value."""
        self.store.remove(key)

    def next_number(self, name: str) -> int:
        """A counter of this process for `name`: 1 at the first call."""
        self._times[f"fresh {name}"] += 1
        return self._times[f"fresh {name}"]

    def _prefix(self, name: str) -> str:
        self._times[name] += 1
        return f"{name}/{self._times[name]}"

    def _take(self, key: str, host: int, until: float, what: str) -> Any:
        begin = time.monotonic()
        while True:
            self.check()
            try:
                text = self.store.wait(key, max(0.001, min(POLL_S, until - time.monotonic())))
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
            raise HostLost(self.exit_message)

    @property
    def exit_message(self) -> str:
        """The message with which this process ends because of `failure`."""
        return f"{self.failure}; this process ends too{self.advice and '. '}{self.advice}"

    # Requests to process 0, which the next round takes into account

    def request(self, kind: str, value: Any = None) -> None:
        """Send a request, such as "stop", to process 0."""
        self._num_requests += 1
        self.store.set(f"request/{self.index}-{self._num_requests}", json.dumps([kind, value]))

    def pop_requests(self) -> list[tuple[str, Any]]:
        """Requests of all processes since the last call. Requires: this is process 0."""
        found = self.store.all("request")
        for key in found:
            self.store.remove(f"request/{key}")
        return [tuple(json.loads(found[key])) for key in sorted(found)]


def agree(hosts: Hosts, name: str, settings: Mapping[str, str]) -> None:
    """Compare `settings` of all processes.

    Raises: HostsDiffer in every process, naming the processes and the fields that differ.
    """
    hosts.set_status(f"comparing {name}")
    differences = describe_differences(hosts.all_gather(name, dict(settings)), hosts.names)
    if differences:
        raise HostsDiffer(
            f"the processes of this job differ in their {name}: {'; '.join(differences)}. Start all with the same"
        )


def agree_min(hosts: Hosts, name: str, values: Mapping[str, int]) -> dict[str, int]:
    """The minimum of each value over all processes."""
    hosts.set_status(f"comparing {name}")
    given = hosts.all_gather(name, dict(values))
    return {key: min(each[key] for each in given) for key in values}


def describe_differences(settings: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """A text for each process that differs from the majority, or without one from process 0: its name and fields."""
    differing: dict[int, list[str]] = collections.defaultdict(list)
    for field in sorted({field for each in settings for field in each}):
        values = [str(each.get(field, _ABSENT)) for each in settings]
        counts = collections.Counter(values)
        most = max(counts.values())
        usual = next(value for value in values if counts[value] == most)
        for i, value in enumerate(values):
            if value != usual:
                differing[i].append(f"{field} is {_short(value)} and elsewhere {_short(usual)}")
    found = []
    for i in sorted(differing):
        fields = differing[i]
        more = f" and {len(fields) - _MAX_SHOWN} more fields" if len(fields) > _MAX_SHOWN else ""
        found.append(f"on {names[i]} {', '.join(fields[:_MAX_SHOWN])}{more}")
    return found


def _short(value: str) -> str:
    return value if len(value) <= _MAX_VALUE else value[: _MAX_VALUE - 3] + "..."
