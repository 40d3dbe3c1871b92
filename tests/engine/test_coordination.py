"""Words of a clock, a signal or one caller reach all processes of a mesh before the same round."""

import numpy as np

from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.coordination import IN_A_ROUND, LeaderCoordinator, LocalCoordinator
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.runtime.hosts import HostsDiffer
from tests.runtime.key_value_stores import at_once, several
from tests.tiny_models import tiny_model


class Clock:
    """Seconds that begin anywhere and go at any speed."""

    def __init__(self, start: float, speed: float):
        self.seconds, self.speed = start, speed

    def __call__(self) -> float:
        self.seconds += self.speed
        return self.seconds


def councils(count: int = 2) -> list[LeaderCoordinator]:
    clocks = [Clock(1000.0 * i, 1 + 10 * i) for i in range(count)]
    pairs = zip(several(count), clocks, strict=True)
    return at_once(*(lambda hosts=hosts, clock=clock: LeaderCoordinator(hosts, clock) for hosts, clock in pairs))


def group() -> RequestState:
    made = RequestState(id="g", prompt=None, prompt_token_ids=[1], params=SamplingParams(), seed=0, max_len=4)
    made.sequences.append(SampleState(request=made, index=0))
    return made


def rounds(councils: list[LeaderCoordinator], *, steps=(8, 3), round_id: int = 0) -> list:
    calls = zip(councils, steps, strict=True)
    return at_once(*(lambda each=each, own=own: each.terms(round_id, own) for each, own in calls))


def test_skewed_clocks_and_speeds_give_the_same_terms():
    made = councils()
    for i in range(20):
        first, second = rounds(made, round_id=i)
        assert first == second and first.max_steps == 8 and first.now == 1.0 + i
        assert all((c._hosts.status.doing, c._hosts.status.round_id) == (IN_A_ROUND, i) for c in made)
    begun = at_once(made[0].now, made[1].now)
    assert begun == [21.0, 21.0]


def test_a_cancellation_on_one_process_ends_the_group_on_all_before_the_same_round():
    made = councils()
    groups = [[group() for _ in range(3)] for _ in made]
    for coordinator, own in zip(made, groups, strict=True):
        for each in own:
            coordinator.enter(each)
    rounds(made)
    assert made[1].cancel(groups[1][2]) is False  # not now
    first, second = rounds(made)
    assert (first.cancelled, second.cancelled) == ((groups[0][2],), (groups[1][2],))
    for own in groups:
        own[2].sequences[0].finish("abort")
    made[0].cancel(groups[0][2])  # which has ended
    assert [terms.cancelled for terms in rounds(made)] == [(), ()]


def test_a_wish_to_stop_holds_from_one_round_on():
    made = councils(3)
    rounds(made, steps=(8, 8, 8))
    assert not any(coordinator.stopping for coordinator in made)
    made[2]._hosts.request("stop")
    rounds(made, steps=(8, 8, 8))
    assert all(coordinator.stopping for coordinator in made)


def test_other_requests_are_noticed_before_the_next_round():
    made = councils()
    tokens = np.arange(5, dtype=np.int32)
    for i, coordinator in enumerate(made):
        coordinator.on_input({"tokens": tokens, "cancel": np.asarray([i == 2])})
    first, second = rounds(made)
    assert first == second
    for i, coordinator in enumerate(made):
        coordinator.on_input({"tokens": tokens + i})
    first, second = rounds(made, round_id=5)
    assert first.max_steps == 8
    assert isinstance(second, RuntimeError)
    assert "host 1 (m1) has been given other requests or calls than host 0 (m0)" in str(second)


def test_one_process_decides_at_once():
    coordinator = LocalCoordinator(clock=lambda: 4.0)
    assert coordinator.cancel(group()) is True
    terms = coordinator.terms(0, 5)
    assert (terms.now, terms.max_steps, terms.cancelled, coordinator.stopping) == (4.0, 5, (), False)


def test_processes_whose_engines_have_other_sizes_fail_by_their_names_before_anything_is_compiled():
    made = several(2, heartbeat_s=60)
    differ = at_once(
        *(
            lambda each=each, seqs=seqs: InferenceEngine(
                tiny_model(), config=EngineConfig(max_seqs=seqs, max_seq_len=32, max_pages=64), hosts=each
            )
            for each, seqs in zip(made, (2, 4), strict=True)
        )
    )
    assert all(isinstance(error, HostsDiffer) for error in differ), differ
    assert all("sizes: on host 1 (m1) max_seqs is 4 and elsewhere 2" in str(error) for error in differ), differ
