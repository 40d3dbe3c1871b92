"""Optional work and work in turns, as loops and as branches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels import loops
from tests.tiers import nightly_but

pytestmark = pytest.mark.parametrize("branches", [False, True], ids=["loops", "branches"])


def compiled(function, branches: bool, *arguments):
    """The program, and how many loops it is written with."""
    with loops.branching(branches):
        lowered = jax.jit(function).lower(*arguments)
    return lowered.compile(), lowered.as_text().count("stablehlo.while")


def test_the_smallest_size_that_holds_the_count_changes_the_value(branches):
    def run(count, value):
        return loops.run_bucket(count, (2, 4, 9), "size_{}".format, lambda size, value: value * 10 + size, value)

    program, num_loops = compiled(run, branches, jnp.int32(0), jnp.int32(7))
    assert [int(program(count, 7)) for count in range(10)] == [7, 72, 72, 74, 74, 79, 79, 79, 79, 79]
    assert (num_loops == 0) == branches


@pytest.mark.parametrize("total", [5, 64, 200])
def test_entries_are_changed_once_each_and_no_others(branches, total):
    def add(value, entries, count):
        return loops.in_parts(lambda value, part: value.at[part].add(1, mode="drop"), value, entries, count, total)

    entries, zeros = np.random.default_rng(0).permutation(total).astype(np.int32), jnp.zeros(total, jnp.int32)
    program, num_loops = compiled(add, branches, zeros, jnp.asarray(entries), jnp.int32(0))
    for count in (0, 1, total // 2, total):
        used = np.where(np.arange(total) < count, entries, total).astype(np.int32)  # the others are none
        expected = np.zeros(total, np.int32)
        expected[entries[:count]] = 1
        np.testing.assert_array_equal(program(zeros, used, count), expected)
    assert (num_loops == 0) == (branches or total <= 64)


@pytest.mark.parametrize("count", nightly_but([0, 1], [0, 1, 40, 100]))
def test_rows_that_are_in_use_are_compared_with_all(branches, count):
    values = jnp.asarray(np.random.default_rng(1).integers(0, 20, 100), jnp.int32)

    def equal_before(count):
        def compute(rows):
            same = (values[rows][:, None] == values[None, :]) & (jnp.arange(100)[None, :] < rows[:, None])
            return [jnp.sum(same, axis=1, dtype=jnp.int32)]

        return loops.in_blocks(compute, count, 100, most=16)[0]

    program, num_loops = compiled(equal_before, branches, jnp.int32(0))
    expected = [int((values[:row] == values[row]).sum()) for row in range(count)]
    np.testing.assert_array_equal(program(count)[:count], expected)
    assert (num_loops == 0) == branches


def test_more_entries_than_one_turn_takes_are_a_loop_in_either_form(branches, monkeypatch):
    monkeypatch.setattr(loops, "_AT_ONCE", 32)

    def add(count):
        size = loops.turn_size(8, 100)

        def change(value, start):
            entries = start + jnp.arange(size, dtype=jnp.int32)
            return value.at[jnp.where(entries < count, entries, 100)].add(1)

        return loops.by_turns(change, jnp.zeros(100, jnp.int32), count, size, 100), size

    program, num_loops = compiled(add, branches, jnp.int32(0))
    for count in (0, 7, 33, 100):
        value, size = program(count)
        assert value.tolist() == [1] * count + [0] * (100 - count) and size == (32 if branches else 8)
    assert num_loops == 1
