"""Recomputation after preemption is bounded, however bad the load."""

import numpy as np
import pytest

from tests.decode.recomputation import CAPACITY, Asked, bound, random_load, work_of


def test_no_load_makes_it_compute_more_again_than_the_bound():
    works = []
    for number in range(30):
        load = random_load(np.random.default_rng([5, number]))
        work = work_of(load)
        assert work.recomputed <= bound(load, work) and work.twice == 0, load
        works.append(work)
    assert sum(work.preemptions for work in works) > 150
    assert max(work.recomputed / work.generated for work in works) > 1  # these loads are bad


@pytest.mark.parametrize("n", [1, 5])
def test_sequences_that_grow_into_the_whole_pool_are_computed_about_twice(n):
    work = work_of([Asked(4, CAPACITY - 4, n)] * (20 // n))
    assert work.preemptions > 10 and work.recomputed < 1.5 * work.generated
