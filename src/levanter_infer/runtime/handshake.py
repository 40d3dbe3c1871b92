"""`handshake`: the processes of a job connect and compare their settings, before JAX's service is started.

JAX's service waits for the number of processes that process 0 was given, and ends every process with SIGABRT when they
do not come: it names neither a missing process nor one that was given another number. So process 0 first listens at the
same address itself, for one line of JSON from each other process, and answers all of them once all have connected.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from levanter_infer.runtime.hosts import POLL_S, HostLost, HostsDiffer, describe_differences

_MAX_LINE = 1 << 16
_CONNECT_S, _READ_S = 1.0, 2.0
"""Time limits of a connection and of its line, in seconds: a silent one must not hold the others up."""
_ERROR, _TOKEN = "error", "token"


def handshake(
    address: str, bind: str | None, index: int, count: int, settings: Mapping[str, Any], timeout_s: float
) -> str:
    """Connect to the other processes, and compare `settings` with those of process 0.

    Args:
        address: host:port of process 0.
        bind: address:port at which process 0 listens; None in the others.
        settings: must be equal in all processes; values are what JSON holds.
        timeout_s: seconds to wait for the others.
    Returns: a random token that process 0 has drawn for this start of the job, equal in all processes.
    Raises: HostsDiffer naming a process with other settings; HostLost naming the missing processes; ValueError if
        process 0 cannot listen.
    """
    until = time.monotonic() + timeout_s
    mine = {"processes": count, **settings}
    if count == 1:
        assert bind is not None
        _listen(bind).close()  # as JAX will, which ends the process where it cannot
        return secrets.token_hex(8)
    name = f"{socket.gethostname()}, process {os.getpid()}"
    if index == 0:
        assert bind is not None
        with _listen(bind) as server:
            return _Lead(server, name, mine, timeout_s, until).gather()
    return _follow(address, {"index": index, "name": name, "settings": mine}, timeout_s, until)


class _Lead:
    """Process 0, to which all others connect."""

    def __init__(self, server: socket.socket, name: str, settings: Mapping[str, Any], timeout_s: float, until: float):
        self._server, self._name, self._settings = server, name, settings
        self._timeout_s, self._until = timeout_s, until
        self._count: int = settings["processes"]
        self._connected: dict[int, tuple[socket.socket, str]] = {}

    def gather(self) -> str:
        """Wait for all processes, and answer them."""
        try:
            while True:
                self._drop_gone()
                if len(self._connected) == self._count - 1:
                    token = secrets.token_hex(8)
                    self._answer({_TOKEN: token})
                    return token
                if time.monotonic() > self._until:
                    raise HostLost(self._missing())
                self._accept_one()
        except BaseException as e:
            said = str(e) if isinstance(e, HostsDiffer | HostLost) else f"host 0 ({self._name}) has ended"
            self._answer({_ERROR: said, "differ": isinstance(e, HostsDiffer)})
            raise
        finally:
            for connection, _ in self._connected.values():
                connection.close()

    def _accept_one(self) -> None:
        self._server.settimeout(POLL_S)
        try:
            connection, _ = self._server.accept()
        except TimeoutError:
            return
        try:
            said = _read_line(connection, time.monotonic() + _READ_S)
            index, name, settings = int(said["index"]), str(said["name"]), dict(said["settings"])
            if index < 1:
                raise ValueError(index)
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):  # not one of ours
            connection.close()
            return
        self._drop_gone()
        before = self._connected.get(index)
        self._connected[index if before is None else -1] = connection, name  # it gets the answer, too
        if before is not None:
            raise HostsDiffer(
                f"two processes have multihost.process_id={index}: {before[1]} and {name}; each needs its own"
            )
        given = [{f"multihost.{key}": str(value) for key, value in s.items()} for s in (self._settings, settings)]
        odd = describe_differences(given, ["host 0", f"host {index} ({name})"])
        if odd:
            raise HostsDiffer(f"the processes of this job were started differently: {odd[0]}. Start all with the same")
        if index >= self._count:  # of equal settings, so not one of ours
            self._connected.pop(index)[0].close()

    def _drop_gone(self) -> None:
        """Forget processes that connected and ended: they may connect again."""
        for index, (connection, _) in list(self._connected.items()):
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                try:
                    gone = connection.recv(1) == b""
                except ConnectionError:
                    gone = True
                if gone:
                    connection.close()
                    del self._connected[index]

    def _answer(self, content: Mapping[str, Any]) -> None:
        for connection, _ in self._connected.values():
            with contextlib.suppress(OSError):
                connection.settimeout(_READ_S)
                connection.sendall(json.dumps(content).encode() + b"\n")

    def _missing(self) -> str:
        absent = [str(i) for i in range(1, self._count) if i not in self._connected]
        return (
            f"host 0 of {self._count} ({self._name}) has waited {self._timeout_s:g} s for host {', '.join(absent)}; "
            "see that all processes run, that multihost.processes is right, that multihost.coordinator is the address "
            "of process 0, and that nothing blocks its port"
        )


def _follow(address: str, mine: Mapping[str, Any], timeout_s: float, until: float) -> str:
    """Send the settings to process 0, and wait for its answer."""
    while time.monotonic() < until:
        answer = _send(address, mine, until)
        if answer is not None and _TOKEN in answer:
            return str(answer[_TOKEN])
        if answer is not None and _ERROR in answer:
            raise (HostsDiffer if answer.get("differ") else HostLost)(str(answer[_ERROR]))
        time.sleep(POLL_S)
    raise HostLost(
        f"host {mine['index']} of {mine['settings']['processes']} and host 0 at {address} have not found each other "
        f"within {timeout_s:g} s; see that all processes run, that multihost.coordinator is the address of process 0, "
        "and that nothing blocks its port"
    )


def _send(address: str, mine: Mapping[str, Any], until: float) -> dict[str, Any] | None:
    """The answer of process 0; None if it does not listen yet, or another program does."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection:
            connection.sendall(json.dumps(mine).encode() + b"\n")
            answer = _read_line(connection, until)
        return answer if isinstance(answer, dict) else None
    return None


def _read_line(connection: socket.socket, until: float) -> Any:
    """One line of JSON. Raises: OSError if it does not come in time; ValueError if it is no JSON."""
    data = b""
    while not data.endswith(b"\n"):
        if data and time.monotonic() > until:  # a byte now and then would hold the others up, too
            raise TimeoutError("the line was not complete in time")
        connection.settimeout(POLL_S)
        try:
            piece = connection.recv(_MAX_LINE)
        except TimeoutError:
            if time.monotonic() > until:
                raise
            continue
        data += piece
        if not piece or len(data) > _MAX_LINE:
            raise ValueError("the connection ended before the line did, or the line is too long")
    return json.loads(data)


def _listen(bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    try:
        family, *_, bound = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        return socket.create_server(bound[:2], family=family)
    except OSError as e:
        raise ValueError(
            f"multihost: process 0 cannot listen at {bind}: {e.strerror or e}; give another port to "
            "multihost.coordinator, or multihost.bind"
        ) from e
