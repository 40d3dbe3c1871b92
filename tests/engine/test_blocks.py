"""`numerics: batch_invariant` as on a TPU, on a CPU: the forward in blocks of one size, attention by one path."""

import collections

import numpy as np

from levanter_infer.decode.invariants import check_invariants
from tests.engine.comparisons import Blocks, expected, make_engine, random_requests, serve
from tests.tiny_models import tiny_model

CONFIGS = (
    dict(max_seqs=8, page_size=4, max_step_tokens=16, max_pages=24),
    dict(max_seqs=24, page_size=16, max_step_tokens=48, max_pages=9),
)
"""Steps of one block in a pool that is too small, and of several, in which rows begin and end anywhere."""


def differing(dtype: str, blocks: Blocks, count: int, configs=CONFIGS, **family) -> tuple[int, collections.Counter]:
    """Requests whose bits are not those of the request alone, of `count` in two orders; and what has happened."""
    model = tiny_model(dtype=dtype, **family)
    cases = random_requests(count, seed=5)
    alone = make_engine(model=model, blocks=blocks, max_seqs=4, page_size=8, max_step_tokens=256, prefix_cache=False)
    plain = [expected(alone, case, None) for case in cases]
    done: collections.Counter[str] = collections.Counter()
    wrong = 0
    for config in configs:
        engine = make_engine(model=model, blocks=blocks, **config)
        for order in (range(count), np.random.default_rng(0).permutation(count)):
            served = serve(engine, [cases[i] for i in order])
            wrong += sum(found != plain[i] for i, (found, _) in zip(order, served, strict=True))
        check_invariants(engine.state.decode)
        done.update({name: engine.stats()[name] for name in ("preemptions", "prefix_hits", "forks")})
    return wrong, done


def test_bits_are_those_of_the_request_alone():
    """In a batch, in another order, in chunks of other sizes, preempted, cached and cold."""
    wrong, done = differing("bfloat16", Blocks(), 16)
    assert wrong == 0
    assert all(done[name] > 0 for name in ("preemptions", "prefix_hits", "forks"))
