"""Configurations of several processes."""

import threading

import pytest

from levanter_infer.runtime.multihost import MultihostConfig, _wait_for_verdict, bind_address
from tests.runtime.key_value_stores import several

ADDRESS = "10.0.0.1:8476"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"processes": 2}, "multihost.processes without multihost.coordinator"),
        ({"layout": "one_mesh"}, "multihost.layout without multihost.coordinator"),
        (
            {"coordinator": "auto", "process_id": 0},
            "multihost.process_id and multihost.coordinator=auto are both given",
        ),
        ({"coordinator": ADDRESS, "processes": 2}, "multihost.process_id is missing"),
        ({"coordinator": ADDRESS, "process_id": 1}, "multihost.processes is missing"),
        ({"coordinator": ADDRESS, "processes": 2, "process_id": 2}, "multihost.process_id=2: expected 0 to 1"),
        ({"coordinator": ADDRESS, "processes": 0, "process_id": 0}, "multihost.processes=0: expected at least 1"),
        ({"coordinator": "10.0.0.1", "processes": 2, "process_id": 0}, "multihost.coordinator='10.0.0.1': expected ho"),
        ({"coordinator": "auto", "bind": "x:y"}, "multihost.bind='x:y': expected host:port"),
        ({"coordinator": "auto", "layout": "both"}, "multihost.layout='both': expected per_host or one_mesh"),
        ({"coordinator": "auto", "heartbeat_s": 0}, "multihost.heartbeat_s=0: expected at least 1 second"),
        ({"coordinator": "auto", "heartbeat_s": float("inf")}, "multihost.heartbeat_s=inf: .* and at most 604800"),
        ({"coordinator": "auto", "heartbeat_s": float("nan")}, "multihost.heartbeat_s=nan: expected at least 1"),
        ({"coordinator": "auto", "heartbeat_s": -5}, "multihost.heartbeat_s=-5: expected at least 1"),
        ({"coordinator": "auto", "start_timeout_s": float("inf")}, "multihost.start_timeout_s=inf: expected"),
        ({"coordinator": "auto", "stall_s": 1e30}, "multihost.stall_s=1e.30: expected"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        MultihostConfig(**given)


def test_a_failed_call_waits_for_the_watchdog_longer_than_a_heartbeat():
    (hosts,) = several(1, heartbeat_s=0.2)
    named = threading.Timer(0.3, lambda: setattr(hosts, "failure", "host 1 is lost"))
    named.start()
    _wait_for_verdict(hosts)
    assert hosts.failure == "host 1 is lost"


def test_nothing_is_one_process():
    assert not MultihostConfig().is_on and MultihostConfig("auto").is_on


def test_process_0_listens_where_the_others_look_for_it():
    config = MultihostConfig(ADDRESS, 2, 0)
    assert bind_address(config, ADDRESS) == ADDRESS
    assert bind_address(config, "localhost:99") in ("127.0.0.1:99", "[::1]:99")
    assert bind_address(config, "[::1]:99") == "[::1]:99"
    assert bind_address(MultihostConfig(ADDRESS, 2, 0, bind="0.0.0.0:1"), ADDRESS) == "0.0.0.0:1"


def test_a_name_that_is_this_machine_alone_is_refused(monkeypatch):
    found = [(None, None, None, None, ("127.0.1.1", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    with pytest.raises(
        ValueError, match="here node7 is 127.0.1.1, which other machines cannot reach; give multihost.b"
    ):
        bind_address(MultihostConfig("node7:8476", 2, 0), "node7:8476")
