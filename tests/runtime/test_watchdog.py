"""A process that stops is noticed, named, and ends the others."""

import time

import pytest

from levanter_infer.runtime import watchdog as module
from levanter_infer.runtime.hosts import HostLost
from levanter_infer.runtime.watchdog import DONE, FAILED, Watchdog
from tests.runtime.key_value_stores import at_once, several


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    monkeypatch.setattr(module, "_LEAD_S", 0.05)
    monkeypatch.setattr(module, "clear_abort_message", lambda: None)
    monkeypatch.setattr(module, "on_abort", lambda _: None)


def watched(count: int, heartbeat_s: float = 0.4, stall_s: float = 100):
    hosts = several(count, heartbeat_s=heartbeat_s)
    dogs = [Watchdog(each, stall_s=stall_s) for each in hosts]
    for dog in dogs:
        dog.ends = []
        dog.exit, dog.stop = dog.ends.append, lambda dog=dog: dog.ends.append("stop")
    return hosts, dogs


def beat(dogs, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for dog in dogs:
            dog.beat()
            dog.check_store()
        time.sleep(0.02)


def test_a_silent_process_is_lost_within_a_heartbeat_and_its_last_round_reported(capsys):
    hosts, dogs = watched(3)
    hosts[2].set_status("in a round", 41)
    hosts[0].set_status("in a round", 42)
    beat(dogs, 0.2)
    assert not any(dog.ends for dog in dogs)
    begin = time.monotonic()
    while not dogs[0].ends and time.monotonic() < begin + 5:
        beat(dogs[:2], 0.02)
    assert 0.2 < time.monotonic() - begin < 0.4 + 0.3
    assert dogs[0].ends[0].startswith("host 2 (m2) is lost: no heartbeat for 0.")
    said = capsys.readouterr().err
    assert "host 2 (m2): last round 41, in a round for 0." in said and "host 0 (m0): last round 42" in said
    assert "test_watchdog.py:" in said  # where the main thread is
    with pytest.raises(HostLost, match="host 2"):
        hosts[0].check()
    assert not dogs[2].ends


def test_a_process_without_a_store_loses_process_0():
    hosts, dogs = watched(2)
    beat(dogs, 0.1)
    hosts[1].store.is_reachable = False
    begin = time.monotonic()
    while not dogs[1].ends and time.monotonic() < begin + 5:
        beat(dogs[1:], 0.02)
    assert time.monotonic() - begin < 0.7
    assert dogs[1].ends[0].startswith("host 0 (m0) is lost: its store has not answered for a heartbeat")


def test_a_store_that_hangs_loses_process_0_within_two_heartbeats(capsys):
    """Calls to it do not come back, and the process ends all the same."""
    hosts, dogs = watched(2, heartbeat_s=1)
    hosts[1].set_status("in a round", 7)
    dogs[1].start()
    beat(dogs[:1], 1.2)
    assert not dogs[1].ends
    hosts[1].store.answers.clear()
    begin = time.monotonic()
    while not dogs[1].ends and time.monotonic() < begin + 5:
        time.sleep(0.01)
    seconds = time.monotonic() - begin
    hosts[1].ended.set()
    hosts[1].store.answers.set()
    assert 0.5 < seconds < 2
    assert dogs[1].ends[0].startswith("host 0 (m0) is lost: its store has not answered for a heartbeat")
    said = capsys.readouterr().err
    assert "host 1 (m1): last round 7" in said and "host 0 (m0): no round yet" in said


def test_a_process_that_was_held_up_itself_does_not_blame_the_store():
    _, dogs = watched(2)
    beat(dogs, 0.1)
    for _ in range(3):
        time.sleep(0.5)  # more than a heartbeat, in which this process does nothing at all
        dogs[1].check_store()
        dogs[0].beat()
        dogs[1].beat()
        dogs[1].check_store()
    assert not dogs[1].ends


@pytest.mark.parametrize("known", [True, False])
def test_a_process_that_fails_while_the_store_hangs_ends_alone_in_time(known):
    hosts, dogs = watched(2)
    beat(dogs, 0.05)
    hosts[1].failure = "host 0 is lost" if known else None
    hosts[1].store.answers.clear()
    begin = time.monotonic()
    [ended] = at_once(lambda: dogs[1].end(FAILED, "why"))
    assert ended is False and time.monotonic() - begin < (0.5 if known else 2)
    hosts[1].store.answers.set()


def test_who_is_lost_is_reported_once_and_before_other_threads_may_end_the_process():
    hosts, (_, dog) = watched(2)
    known = []
    dog.report = lambda text, **_: known.append((text, hosts[1].failure))
    dog._coordinator = "127.0.0.1:1"  # where nothing listens
    assert "connections are closed" in dog._explain_abort()
    dog._lose_store()
    assert known == [("host 0 (m0) is lost: its connections are closed", None)]
    assert "connections are closed" in dog.ends[0]


def test_a_failure_is_told_to_all_and_ends_them():
    hosts, dogs = watched(2, heartbeat_s=5)
    beat(dogs, 0.05)

    def fail() -> bool:
        return dogs[1].end(FAILED, "ValueError: no such model")

    def notice() -> bool:
        while not dogs[0].ends:
            beat(dogs[:1], 0.02)
        return dogs[0].end(FAILED, "the other one")

    both = at_once(fail, notice)
    assert dogs[0].ends[0].startswith("host 1 (m1) has failed: ValueError: no such model; this process ends too")
    assert both == [True, True] and not dogs[1].ends


def test_who_is_done_waits_for_the_others_as_long_as_they_live():
    hosts, dogs = watched(2)
    beat(dogs, 0.05)

    def later() -> bool:
        beat(dogs, 0.7)  # longer than a heartbeat
        return dogs[1].end(DONE)

    assert at_once(lambda: dogs[0].end(DONE), later) == [True, True]
    assert not dogs[0].ends and not dogs[1].ends


def test_who_is_done_does_not_wait_for_the_dead():
    hosts, dogs = watched(2)
    beat(dogs, 0.05)

    def others_die() -> None:
        while hosts[0].failure is None:
            beat(dogs[:1], 0.02)

    waited, _ = at_once(lambda: dogs[0].end(DONE), others_die)
    assert isinstance(waited, HostLost) and "host 1 (m1) is lost" in str(waited)


def test_a_wish_to_stop_reaches_all():
    hosts, dogs = watched(3)
    hosts[1].stop_wanted = True
    beat(dogs, 0.1)
    assert dogs[0].ends == dogs[2].ends == ["stop"] and dogs[1].ends == []
    assert hosts[0].pop_requests() == [("stop", None)] and hosts[0].pop_requests() == []


def test_a_round_that_does_not_end_is_reported_once(capsys):
    hosts, dogs = watched(2, heartbeat_s=30, stall_s=0.1)
    hosts[1].set_status("in a round", 7)
    beat(dogs, 0.3)
    said = capsys.readouterr().err
    assert said.count("no round has ended for 0 s") == 1 and "host 1 (m1): last round 7" in said
    hosts[1].set_status("in a round", 8)
    beat(dogs, 0.3)
    assert capsys.readouterr().err.count("no round has ended") == 1
    assert not dogs[0].ends and not dogs[1].ends


def test_no_thread_of_a_watchdog_outlives_the_end():
    """Python aborts a process at its exit if a daemon thread is then within a call of JAX's client."""
    hosts, dogs = watched(2, heartbeat_s=5)
    for dog in dogs:
        dog.start()
    assert at_once(*(lambda dog=dog: dog.end(DONE) for dog in dogs)) == [True, True]
    assert len(dogs[0]._threads) == 2 and not any(thread.is_alive() for dog in dogs for thread in dog._threads)
