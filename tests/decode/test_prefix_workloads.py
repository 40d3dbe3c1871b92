"""A small share of `scripts/fuzz_prefix.py`: hits, misses and evictions equal those of the plain simulation."""

import collections
import dataclasses

import numpy as np
import pytest

from levanter_infer.decode import prefix
from levanter_infer.kernels import loops
from tests.decode.driver import SHAPES, Driver
from tests.decode.workloads import run_workload
from tests.tiers import nightly_but


@pytest.mark.parametrize(
    "inserted, window, seekers, branches",
    nightly_but([(24, 1, 2, True)], [(24, 32, 4, False), (2, 1, 1, False), (24, 1, 2, True)]),
)
def test_workloads_with_shared_beginnings_have_the_hits_and_misses_of_the_model(
    monkeypatch, inserted, window, seekers, branches
):
    """Also where the pages of a step are inserted in several parts, and looked up one by one; and as a GPU does it."""
    monkeypatch.setattr(prefix, "_INSERTED", inserted)
    monkeypatch.setattr(prefix, "_WINDOW", window)
    monkeypatch.setattr(prefix, "_SEEKERS", seekers)
    # Other shapes, whose programs are compiled with these numbers, and in this form.
    own = SHAPES.upload_tokens + inserted + 100 * branches
    driver = Driver(dataclasses.replace(SHAPES, upload_tokens=own))
    totals: collections.Counter[str] = collections.Counter()
    with loops.branching(branches):
        # In the last one two sequences follow the same text in two pages, of which one had been forgotten.
        for seed in (*([7, number] for number in range(60)), [13, 775]):
            totals += run_workload(driver, np.random.default_rng(seed))
    assert min(totals[name] for name in ("hits", "misses", "evictions", "forks")) > 50 and totals["preemptions"] > 10
