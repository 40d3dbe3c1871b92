"""`MultihostConfig`: the processes of one job; `joined`: the one place that starts `jax.distributed`.

This module imports JAX only when it starts: a configuration is read without it.
"""

import contextlib
import dataclasses
import ipaddress
import os
import socket
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

from levanter_infer.runtime.aborts import LOST, abort_message, clear_abort_message, end_now
from levanter_infer.runtime.handshake import handshake
from levanter_infer.runtime.hosts import HostLost, Hosts, JaxKeyValueStore
from levanter_infer.runtime.watchdog import DONE, FAILED, Watchdog, run_within

AUTO = "auto"
_MAX_SECONDS = 7 * 24 * 3600
PER_HOST, ONE_MESH = "per_host", "one_mesh"
_VARIABLES = {"JAX_COORDINATOR_ADDRESS": "coordinator", "JAX_COORDINATOR_BIND_ADDRESS": "bind"}
"""Environment variables that JAX reads, and the key with the same meaning."""
_SLACK_S = 60
"""Seconds by which JAX's own heartbeat limit is longer: JAX ends a process at once, without naming the lost peer."""


@dataclasses.dataclass(frozen=True)
class MultihostConfig:
    """The processes of one job, usually one on each machine."""

    coordinator: str | None = None
    """host:port of process 0; or `auto`: this, `processes` and `process_id` come from the environment (TPU pods, GKE,
    Slurm, Open MPI). Default: a job of one process."""
    processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, from 0."""
    bind: str | None = None
    """address:port at which process 0 listens. Default: the address of `coordinator` alone."""
    layout: str = PER_HOST
    """`per_host`: each process has an engine of its own on its own devices, and they share the shards of a batch job.
    `one_mesh`: one engine over the devices of all."""
    heartbeat_s: float = 20
    """Seconds without a heartbeat after which a process counts as lost, which ends the job."""
    start_timeout_s: float = 300
    """Seconds for which processes wait for each other before the first launch: to connect, load and compile."""
    shutdown_timeout_s: float = 60
    """Seconds for which processes wait for each other at the end."""
    stall_s: float = 120
    """Seconds without the end of a round after which every process reports its status."""

    def __post_init__(self):
        if self.layout not in (PER_HOST, ONE_MESH):
            raise ValueError(f"multihost.layout={self.layout!r}: expected {PER_HOST} or {ONE_MESH}")
        for name in ("heartbeat_s", "start_timeout_s", "shutdown_timeout_s", "stall_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 1 <= value <= _MAX_SECONDS:
                raise ValueError(f"multihost.{name}={value!r}: expected at least 1 second and at most {_MAX_SECONDS}")
        given = [name for name in ("processes", "process_id", "bind") if getattr(self, name) is not None]
        if self.coordinator is None:
            given += ["layout"] * (self.layout != PER_HOST)
            if given:
                raise ValueError(
                    f"multihost.{given[0]} without multihost.coordinator; give host:port of process 0, or {AUTO}"
                )
        elif self.coordinator == AUTO:
            given = [name for name in given if name != "bind"]
            if given:
                raise ValueError(
                    f"multihost.{given[0]} and multihost.coordinator={AUTO} are both given; expected {AUTO} alone, or "
                    "coordinator, processes and process_id"
                )
        else:
            self._check_numbers()
            _check_address("coordinator", self.coordinator)
        if self.bind is not None:
            _check_address("bind", self.bind)

    def _check_numbers(self) -> None:
        for name in ("processes", "process_id"):
            if getattr(self, name) is None:
                raise ValueError(f"multihost.{name} is missing; give it, or multihost.coordinator={AUTO}")
        assert self.processes is not None and self.process_id is not None
        if self.processes < 1:
            raise ValueError(f"multihost.processes={self.processes}: expected at least 1")
        if not 0 <= self.process_id < self.processes:
            raise ValueError(
                f"multihost.process_id={self.process_id}: expected 0 to {self.processes - 1}, one for each of the "
                f"{self.processes} processes"
            )

    @property
    def is_on(self) -> bool:
        return self.coordinator is not None


def _check_address(key: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"multihost.{key}={address!r}: expected host:port, such as 10.0.0.1:8476")


@contextlib.contextmanager
def joined(config: MultihostConfig, orderly: tuple[type[BaseException], ...] = ()) -> Iterator[Hosts | None]:
    """The processes of the job, with a watchdog; None for a configuration of one process.

    All processes end together: an exception within the context is published to the others, which then end too. This
    process ends here, without returning, if the others do not answer or one of them is the cause.

    Args:
        orderly: exceptions that stand for a stop of the work, here or in another process.
    Requires: JAX has not been used.
    Raises: ValueError if the environment contradicts the configuration; HostLost if another process fails.
    """
    if not config.is_on:
        yield None
        return
    import jax

    hosts, watchdog = _start(config)
    stopped: BaseException | None = None
    try:
        try:
            hosts.exchange_names()
            yield hosts
        except orderly as e:
            stopped, hosts.stop_wanted = e, True
        watchdog.end(DONE)
    except BaseException as e:
        if isinstance(e, jax.errors.JaxRuntimeError) or isinstance(e.__cause__, ConnectionError):
            _wait_for_verdict(hosts)
        reason = e if hosts.failure is None or isinstance(e, ValueError) else HostLost(hosts.exit_message)
        # A process that has published its end may be gone, and JAX would wait for it for long.
        if not (
            watchdog.end(FAILED, f"{type(e).__name__}: {e}")
            and run_within(config.heartbeat_s, jax.distributed.shutdown)
        ):
            _end_alone(reason)
        clear_abort_message()
        raise
    jax.distributed.shutdown()
    if stopped is not None:
        raise stopped


def _wait_for_verdict(hosts: Hosts) -> None:
    """Wait until the watchdog names the lost process, or JAX ends this one and `_explain_abort` names it.

    Most collectives that fail do so because a process is gone, and so does the store of process 0.
    """
    until = time.monotonic() + hosts.heartbeat_s + 1
    while hosts.failure is None and time.monotonic() < until:
        time.sleep(0.05)


def _end_alone(error: BaseException) -> NoReturn:
    """End without the others: `jax.distributed.shutdown` would hang."""
    if isinstance(error, ValueError | HostLost):
        end_now(str(error), 2 if isinstance(error, ValueError) else LOST)
    traceback.print_exception(error)
    end_now("this process has failed, and the others do not answer", 1)


def _start(config: MultihostConfig) -> tuple[Hosts, Watchdog]:
    import jax

    if jax.distributed.is_initialized():
        raise ValueError("multihost: jax.distributed has been started already in this process; leave multihost out")
    for variable, key in _VARIABLES.items():
        value = os.environ.get(variable)
        if value is not None and value != getattr(config, key):
            raise ValueError(
                f"{variable}={value} in the environment contradicts multihost.{key}={getattr(config, key)}; unset it"
            )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # its handler would swallow SIGTERM
    address, count, index, local_devices = _from_environment(config) if config.coordinator == AUTO else _given(config)
    bind = bind_address(config, address) if index == 0 else None
    settings = {"layout": config.layout, "heartbeat_s": float(config.heartbeat_s)}
    token = handshake(address, bind, index, count, settings, config.start_timeout_s)
    with abort_message(
        f"host {index} of {count} has met the others, and JAX's service at {address} was not reached by all of them "
        f"within {config.start_timeout_s:g} s; see the outputs of the others, or give multihost.coordinator another "
        "port"
    ):
        jax.distributed.initialize(
            address,
            count,
            index,
            local_device_ids=local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=round(config.start_timeout_s),
            heartbeat_timeout_seconds=round(config.heartbeat_s + _SLACK_S),
            shutdown_timeout_seconds=round(config.shutdown_timeout_s),
            coordinator_bind_address=bind,
        )
    board = JaxKeyValueStore(_client(), token)
    hosts = Hosts(board, index, count, start_timeout_s=config.start_timeout_s, heartbeat_s=config.heartbeat_s)
    watchdog = Watchdog(hosts, stall_s=config.stall_s, coordinator=address)
    watchdog.start()
    return hosts, watchdog


def _given(config: MultihostConfig) -> tuple[str, int, int, None]:
    assert config.coordinator is not None and config.processes is not None and config.process_id is not None
    return config.coordinator, config.processes, config.process_id, None


def _from_environment(config: MultihostConfig) -> tuple[str, int, int, list[int] | None]:
    """(address, processes, id, devices) as JAX finds them in the environment; process 0 needs them to listen."""
    from jax._src.clusters import ClusterEnv

    try:
        address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, round(config.start_timeout_s)
        )
    except Exception as e:  # a metadata server may answer anything, or nothing
        raise ValueError(f"multihost.coordinator={AUTO}: the environment could not be read: {e}") from e
    if address is None or count is None or index is None:
        raise ValueError(
            f"multihost.coordinator={AUTO}: no TPU pod, GKE, Slurm or Open MPI in the environment; give "
            "multihost.coordinator, multihost.processes and multihost.process_id"
        )
    return address, count, index, None if devices is None else list(devices)


def bind_address(config: MultihostConfig, coordinator: str) -> str:
    """Address at which process 0 listens: the one that the other processes connect to, not every one of the machine.

    Raises: ValueError if other machines cannot reach that address.
    """
    if config.bind is not None:
        return config.bind
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as e:
        raise ValueError(
            f"multihost.coordinator={coordinator}: {host} is not known here ({e}); give its address"
        ) from e
    address = ipaddress.ip_address(found)
    if address.is_loopback and not (host == "localhost" or _is_address(host)):
        raise ValueError(
            f"multihost.coordinator={coordinator}: here {host} is {address}, which other machines cannot reach; give "
            "multihost.bind, the address of this machine on their network"
        )
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _client():
    from jax._src import distributed  # what jax.experimental.multihost_utils uses too; there is no public name for it

    client = distributed.global_state.client
    assert client is not None
    return client


def hosts_of_this_process() -> Hosts:
    """The processes for which the caller has started `jax.distributed`; they have no watchdog.

    Raises: ValueError if the caller has not started it.
    """
    import jax

    if not jax.distributed.is_initialized():
        raise ValueError("the mesh has devices of several processes, and jax.distributed was not started")
    return Hosts(JaxKeyValueStore(_client()), jax.process_index(), jax.process_count())
