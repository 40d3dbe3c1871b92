"""Processes find each other, or name the one that is missing or was started differently."""

import contextlib
import json
import socket
import threading
import time

import pytest

from levanter_infer.runtime.handshake import handshake
from levanter_infer.runtime.hosts import HostLost, HostsDiffer
from tests.pairs import free_port
from tests.runtime.key_value_stores import at_once

SAME = {"layout": "per_host", "heartbeat_s": 20.0}


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def caller(address, index, count, settings=SAME, timeout_s=10.0):
    return lambda: handshake(address, address if index == 0 else None, index, count, settings, timeout_s)


def connected(address) -> socket.socket:
    """A connection to process 0, once it listens."""
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection(address.split(":"), 1)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_all_get_one_token_and_another_one_at_the_next_start(address):
    tokens = []
    for _ in range(2):
        found = at_once(*(caller(address, i, 3) for i in (2, 1, 0)))
        assert len(set(found)) == 1 and len(found[0]) == 16
        tokens.append(found[0])
    assert tokens[0] != tokens[1]
    assert len(handshake(address, address, 0, 1, SAME, 1)) == 16  # a single process waits for none


def test_a_single_process_says_that_its_port_is_in_use(address):
    host, port = address.rsplit(":", 1)
    with socket.create_server((host, int(port))), pytest.raises(ValueError, match="process 0 cannot listen at"):
        handshake(address, address, 0, 1, SAME, 1)


@pytest.mark.parametrize(("lead", "other"), [(2, 3), (3, 2)])
def test_a_differing_number_of_processes_is_said_at_once(address, lead, other):
    begin = time.monotonic()
    found = at_once(caller(address, 0, lead, timeout_s=60), caller(address, 1, other, timeout_s=60))
    assert time.monotonic() - begin < 5
    for error in found:
        assert isinstance(error, HostsDiffer), error
        assert "on host 1 (" in str(error) and f"multihost.processes is {other} and elsewhere {lead}" in str(error)


@pytest.mark.parametrize(("key", "value"), [("heartbeat_s", 5.0), ("layout", "one_mesh")])
def test_a_differing_setting_is_named(address, key, value):
    found = at_once(caller(address, 0, 2), caller(address, 1, 2, {**SAME, key: value}))
    for error in found:
        assert isinstance(error, HostsDiffer) and f"multihost.{key} is {value} and elsewhere {SAME[key]}" in str(error)


def test_two_processes_of_one_number_are_named(address):
    found = at_once(caller(address, 0, 3), caller(address, 1, 3), caller(address, 1, 3))
    assert all(isinstance(error, HostsDiffer) for error in found), found
    assert "two processes have multihost.process_id=1" in str(found[0]) and len({str(error) for error in found}) == 1


def test_who_does_not_come_is_named(address):
    lead, other = at_once(caller(address, 0, 3, timeout_s=1), caller(address, 2, 3, timeout_s=5))
    assert isinstance(lead, HostLost) and isinstance(other, HostLost) and str(lead) == str(other)
    assert "waited 1 s for host 1; see that all processes run" in str(lead)


def test_who_finds_no_process_0_says_where_it_looked(address):
    [error] = at_once(caller(address, 1, 2, timeout_s=0.5))
    assert isinstance(error, HostLost) and f"host 1 of 2 and host 0 at {address} have not found each" in str(error)


def test_strangers_and_processes_that_have_gone_do_not_count(address):
    """A web browser, a silent connection, and a process that was killed after it had come."""

    def strangers():
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"index": [1], "name": 1, "settings": 3}\n', b""):
            with connected(address) as connection:
                connection.sendall(said)
        gone = {"index": 1, "name": "gone", "settings": {"processes": 3, **SAME}}
        with socket.create_connection(address.split(":"), 1) as connection:
            connection.sendall(json.dumps(gone).encode() + b"\n")
            time.sleep(0.1)
        return at_once(caller(address, 1, 3), caller(address, 2, 3))

    lead, others = at_once(caller(address, 0, 3), strangers)
    assert others == [lead, lead] and len(lead) == 16


@pytest.mark.parametrize(
    "said",
    [
        b'{"index": Infinity, "name": "x", "settings": {}}\n',
        b"[" * 30_000 + b"\n",
        json.dumps({"index": 7, "name": "x", "settings": {"processes": 2, **SAME}}).encode() + b"\n",
    ],
    ids=["infinity", "nested", "too large an index"],
)
def test_what_strangers_say_neither_ends_process_0_nor_counts(address, said):
    def stranger():
        with connected(address) as connection:
            connection.sendall(said)
            time.sleep(0.2)
            return handshake(address, None, 1, 2, SAME, 10)

    lead, other = at_once(caller(address, 0, 2), stranger)
    assert lead == other and len(str(lead)) == 16


def test_a_stranger_that_sends_a_byte_now_and_then_holds_nobody_up(address):
    done = threading.Event()

    def stranger():
        with connected(address) as connection, contextlib.suppress(OSError):
            while not done.is_set():
                connection.sendall(b"x")
                time.sleep(0.02)

    def other():
        time.sleep(0.3)
        try:
            return handshake(address, None, 1, 2, SAME, 10)
        finally:
            done.set()

    lead, _, token = at_once(caller(address, 0, 2), stranger, other)
    assert lead == token and len(str(lead)) == 16


def test_a_port_that_is_taken_is_said(address):
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))):
        with pytest.raises(ValueError, match=f"process 0 cannot listen at {address}: .*give another port"):
            handshake(address, address, 0, 2, SAME, 1)
