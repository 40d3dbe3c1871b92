"""Random beam searches on the device's tables against a plain Python search."""

import collections

import numpy as np

from tests.decode.beam_driver import random_logits, random_search, run


def test_random_searches_served_together_find_what_a_plain_search_finds():
    counted = collections.Counter()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        searches = [random_search(rng) for _ in range(25)]
        counted.update(run(searches, random_logits(rng), cancel_rate=0.02 * (seed % 2), seed=seed))
    reached = {name: counted[name] for name in ("preemptions", "copied_pages", "forks", "prefix_hits")}
    assert min(reached.values()) > 10, reached
