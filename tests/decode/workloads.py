"""Random workloads whose prompts share prefixes, on the device's tables and on the model of them."""

import collections

import numpy as np

from tests.decode.driver import SHAPES, VOCAB, Driver

_LONGEST = SHAPES.max_seq_len - 2


def prompts(rng: np.random.Generator) -> list[list[int]]:
    """Texts that branch off each other at random places: turns of chats, templates, repeated prompts."""
    texts: list[list[int]] = []
    for _ in range(rng.integers(2, 9)):
        begin = texts[rng.integers(len(texts))] if texts and rng.random() < 0.8 else []
        begin = begin[: rng.integers(len(begin) + 1)] if rng.random() < 0.6 else begin
        texts.append((begin + rng.integers(0, VOCAB, rng.integers(0, 7)).tolist())[:_LONGEST] or [0])
    return texts


def run_workload(driver: Driver, rng: np.random.Generator) -> collections.Counter[str]:
    """One workload, from empty tables until all sequences have ended. Raises: AssertionError if the model differs."""
    driver.reset()
    waiting, total = prompts(rng), 0
    root = -1 - int(rng.random() < 0.2)
    while waiting or driver.live_slots():
        if waiting and driver.free_slots() and rng.random() < 0.5:
            n = int(rng.choice([1, 1, 1, 2, 3]))
            total += 1
            driver.admit(waiting.pop(0), int(rng.integers(1, 9)), n, stop=None, root=root if rng.random() < 0.9 else -3)
        elif driver.live_slots() and rng.random() < 0.02:
            driver.cancel([int(rng.choice(driver.live_slots()))])
        else:
            driver.step(int(rng.integers(2**31)), failure_rate=0.01)
    driver.check()
    model = driver.model
    counts = {name: getattr(model, name) for name in ("hits", "misses", "evictions", "preemptions", "forks")}
    return collections.Counter({"requests": total, **counts})
