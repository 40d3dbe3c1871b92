"""A small share of `scripts/fuzz_prefix.py`: hits, misses and evictions equal those of the plain simulation."""

import collections

import numpy as np

from tests.decode.driver import Driver
from tests.decode.workloads import run_workload


def test_workloads_with_shared_beginnings_have_the_hits_and_misses_of_the_model():
    driver = Driver()
    totals: collections.Counter[str] = collections.Counter()
    for number in range(60):
        totals += run_workload(driver, np.random.default_rng([7, number]))
    assert min(totals[name] for name in ("hits", "misses", "evictions", "forks")) > 50 and totals["preemptions"] > 10
