"""Processes agree before the first launch, or each of them ends with the name of the odd one."""

from levanter_infer.runtime.hosts import HostLost, HostsDiffer, agree, agree_min, describe_differences
from tests.runtime.key_value_stores import at_once, several


def test_the_odd_one_and_its_fields_are_named():
    names = ["a", "b", "c"]
    usual = {"jax": "0.10.2", "seed": "1", "weights": "x" * 64}
    assert describe_differences([usual, usual, usual], names) == []
    odd = {**usual, "jax": "0.11.0", "weights": "y" * 64, "more": "1"}
    found = describe_differences([odd, usual, usual], names)
    assert len(found) == 1 and found[0].startswith(
        "on a jax is 0.11.0 and elsewhere 0.10.2, more is 1 and elsewhere no"
    )
    assert f"weights is {'y' * 57}... and elsewhere {'x' * 57}..." in found[0]
    without = {key: value for key, value in usual.items() if key != "seed"}
    assert describe_differences([usual, without, odd], names)[0] == "on b seed is nothing and elsewhere 1"


def test_of_two_the_first_is_the_measure():
    assert describe_differences([{"a": "1"}, {"a": "2"}], ["host 0", "host 1"]) == ["on host 1 a is 2 and elsewhere 1"]


def test_many_fields_are_counted():
    found = describe_differences([{}, {str(i): "1" for i in range(9)}], ["p", "q"])
    assert found[0].endswith(" and 3 more fields")


def test_every_process_hears_of_the_odd_one():
    first, second, third = several(3)
    same = {"config.seed": "0"}
    results = at_once(
        lambda: agree(first, "job", same),
        lambda: agree(second, "job", {"config.seed": "7"}),
        lambda: agree(third, "job", same),
    )
    assert all(isinstance(result, HostsDiffer) for result in results)
    assert {str(result) for result in results} == {
        "the processes of this job differ in their job: on host 1 (m1) config.seed is 7 and elsewhere 0. "
        "Start all with the same"
    }
    assert at_once(*(lambda h=h: agree(h, "job", same) for h in (first, second, third))) == [None] * 3


def test_the_smallest_budget_wins():
    first, second = several(2)
    results = at_once(
        lambda: agree_min(first, "sizes", {"max_pages": 70, "other": 1}),
        lambda: agree_min(second, "sizes", {"max_pages": 50, "other": 2}),
    )
    assert results == [{"max_pages": 50, "other": 1}] * 2


def test_who_does_not_come_is_named_and_nobody_waits_for_ever():
    first, _ = several(2, start_timeout_s=0.3)
    [result] = at_once(lambda: agree(first, "job", {}))
    assert isinstance(result, HostLost) and "host 1 (m1) has not answered for 0 s, about 'job'" in str(result)


def test_what_one_decides_is_what_all_do():
    first, second = several(2)
    assert at_once(lambda: first.broadcast("n", 3), lambda: second.broadcast("n", 5)) == [3, 3]
    assert at_once(lambda: first.broadcast("n", {"a": [1]}), lambda: second.broadcast("n")) == [{"a": [1]}] * 2


def test_values_that_all_have_read_are_removed_from_the_store():
    """An engine that gets weights from another process compares them at every swap, as long as it lives."""
    hosts = several(3)
    for i in range(4):
        assert (
            at_once(*(lambda h=h, i=i: h.all_gather("n", [h.index, i]) for h in hosts))
            == [[[0, i], [1, i], [2, i]]] * 3
        )
        assert len(hosts[0].store.all("n")) == 3
    assert at_once(*(lambda h=h: h.all_gather("other", h.index) for h in hosts)) == [[0, 1, 2]] * 3
    assert len(hosts[0].store.all("n")) == 3


def test_a_failure_elsewhere_ends_the_waiting():
    first, second = several(2)
    second.failure = "host 0 is lost"
    [result] = at_once(lambda: second.broadcast("n"))
    assert isinstance(result, HostLost) and str(result).startswith("host 0 is lost; ")
    first.store.is_reachable = False
    [result] = at_once(lambda: first.wait_for("n"))
    assert isinstance(result, (HostLost, ConnectionError)) and "host 0 (m0) cannot be reached" in str(result)
