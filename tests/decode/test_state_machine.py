"""Random operations on the tables, against the plain Python model of them."""

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from levanter_infer.cache import by_pairs
from levanter_infer.kernels import loops
from tests.decode.driver import SHAPES, VOCAB, WINDOWED, Driver, programs, random_operation
from tests.tiers import nightly_but


class Tables(RuleBasedStateMachine):
    shapes = SHAPES

    def __init__(self):
        super().__init__()
        self.driver = Driver(self.shapes)

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        stop=st.none() | st.integers(0, VOCAB - 1),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def admit(self, prompt, max_tokens, n, stop, priority):
        self.driver.admit(prompt, max_tokens, n, stop, priority=priority)

    @rule(seed=st.integers(0, 2**20))
    def step(self, seed):
        self.driver.step(seed)

    @precondition(lambda self: self.driver.live_slots())
    @rule(seed=st.integers(0, 2**20))
    def three_steps(self, seed):
        for i in range(3):
            self.driver.step(seed + i)

    @precondition(lambda self: self.driver.live_slots())
    @rule(which=st.lists(st.integers(0, SHAPES.num_slots - 1), min_size=1, max_size=3))
    def cancel(self, which):
        self.driver.cancel([slot for slot in which if slot in self.driver.live_slots()])

    @precondition(lambda self: self.driver.live_slots())
    @rule(which=st.lists(st.integers(0, SHAPES.num_slots - 1), min_size=1, max_size=3))
    def swap_out(self, which):
        self.driver.swap_out(sorted(set(which)))

    @precondition(lambda self: self.driver.offloaded)
    @rule()
    def bring_back(self):
        self.driver.bring_back()

    @precondition(lambda self: self.driver.live_slots())
    @rule(ancestors=st.dictionaries(*[st.integers(0, SHAPES.num_slots - 1)] * 2, max_size=SHAPES.num_slots))
    def resample(self, ancestors):
        self.driver.resample(ancestors)

    @precondition(lambda self: self.driver.live_slots())
    @rule()
    def reset(self):
        self.driver.reset()

    @invariant()
    def device_equals_model(self):
        self.driver.check()

    def teardown(self):
        self.driver.finish()


class WindowedTables(Tables):
    shapes = WINDOWED


@pytest.mark.parametrize(
    "tables, examples",
    nightly_but(
        [(Tables, 100), (WindowedTables, 25)],
        [(Tables, 100), (Tables, 400), (WindowedTables, 25), (WindowedTables, 100)],
    ),
)
def test_device_tables_equal_the_model_under_random_operations(tables, examples):
    run_state_machine_as_test(
        tables,
        settings=settings(
            max_examples=examples,
            stateful_step_count=8,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("shapes", nightly_but([SHAPES], [SHAPES, WINDOWED]), ids=["", "windows"])
def test_random_operations_reach_preemption_forks_and_copies(shapes):
    """The comparison above means little if the interesting cases are not reached."""
    driver, rng = Driver(shapes), np.random.default_rng(0)
    reached = np.zeros(3, int)
    for _ in range(2000):
        before = np.array([driver.model.preemptions, driver.model.copied, driver.model.forks])
        random_operation(driver, rng)
        after = np.array([driver.model.preemptions, driver.model.copied, driver.model.forks])
        reached += np.maximum(after - before, 0)
    driver.finish()
    assert (reached > 10).all(), f"preemptions, copies, forks: {reached}"


@pytest.fixture
def as_a_tpu(monkeypatch):
    """Programs with what a TPU runs where platforms differ: comparisons of all pairs, and tables that are written
    whole."""
    programs.cache_clear()
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *args, default, tpu=None, **_: (default if tpu is None else tpu)(*args)
    )
    with by_pairs.traced(True):
        yield
    programs.cache_clear()


@pytest.fixture
def as_a_gpu():
    """Programs whose optional work is a branch, and whose tables are changed in one turn."""
    programs.cache_clear()
    with loops.branching(True):
        yield
    programs.cache_clear()


@pytest.mark.parametrize(
    "platform, shapes", nightly_but([("tpu", SHAPES)], [("tpu", SHAPES), ("gpu", SHAPES), ("gpu", WINDOWED)])
)
def test_the_tables_of_other_platforms_equal_the_model_too(request, platform, shapes):
    request.getfixturevalue(f"as_a_{platform}")
    driver, rng = Driver(shapes), np.random.default_rng(1)
    for _ in range(400):
        random_operation(driver, rng)
        driver.check()
    driver.finish()
    assert driver.model.preemptions > 3 and driver.model.copied > 3 and driver.model.forks > 3
