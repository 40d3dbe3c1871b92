"""Requests of all kinds in a pool that is far too small, each compared to the bit with itself alone in a roomy one.

    python scripts/stress_pool.py --requests 1000

Random lengths, samples, prefixes, seeds, priorities and stop rules. The pool holds a tenth of what the sequences
that may run at once would hold at their ends. Prints one JSON line, and exits with 1 if a request differs or does
not end, if a page is still held, or if fewer than 30 % of the requests were preempted.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.comparisons import bits, make_engine, random_requests  # noqa: E402

from levanter_infer.cache.page_math import pages_for  # noqa: E402
from levanter_infer.decode.codes import FINISHED  # noqa: E402
from levanter_infer.decode.invariants import check_invariants  # noqa: E402

PAGE_SIZE = 4


def with_stop_rules(requests, seed: int):
    """The requests, some of them with stop tokens, stop sequences, priorities and higher max_tokens."""
    rng = np.random.default_rng(seed)
    changed = []
    for request in requests:
        rules: dict = {"max_tokens": int(rng.integers(1, 64))}
        if rng.random() < 0.3:
            rules["stop_token_ids"] = [int(rng.integers(61)), rng.integers(0, 61, 2).tolist()]
            rules["min_tokens"] = int(rng.integers(0, rules["max_tokens"]))
        sampling = dataclasses.replace(request.sampling, **rules)
        changed.append(dataclasses.replace(request, sampling=sampling, priority=int(rng.integers(-1, 2))))
    return changed


def serve(engine, requests) -> tuple[list, set[str]]:
    """Run all requests, a step at a time; returns their states and the ids of those that lost their pages meanwhile."""
    states = [engine.submit(request) for request in requests]
    preempted: set[str] = set()
    computed = np.zeros(engine.shapes.num_slots, int)
    owners: dict = {}
    left = states
    while not all(state.is_done for state in states):
        engine.step_round(max_steps=1)
        table = engine.state.decode.sequences
        now, status = np.asarray(table.num_computed), np.asarray(table.status)
        left = [state for state in left if not state.is_done or any(s.slot is not None for s in state.sequences)]
        before, owners = owners, {s.slot: s for state in left for s in state.sequences if s.slot is not None}
        for slot in np.flatnonzero((computed > 0) & (now < computed) & (status < FINISHED)):
            if owners.get(slot) is not None and owners[slot] is before.get(slot):
                preempted.add(owners[slot].request.id)
        computed = now.copy()
    engine.drain()
    return states, preempted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--max-seqs", type=int, default=64, help="sequences that run at once; default 64")
    parser.add_argument("--too-small", type=float, default=10, help="the pool is this many times too small; default 10")
    parser.add_argument("--admission", default="optimistic")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.time()
    requests = with_stop_rules(random_requests(args.requests, args.seed), args.seed)
    alone = make_engine(max_seqs=3, page_size=8, max_step_tokens=256, prefix_cache=False)
    expected = [bits(alone.generate([request]))[0] for request in requests]
    lens = [len(r.prompt_token_ids) + len(c[0]) for r, output in zip(requests, expected, strict=True) for c in output]
    load = args.max_seqs * np.mean([pages_for(length, PAGE_SIZE) for length in lens])
    engine = make_engine(
        max_seqs=args.max_seqs,
        page_size=PAGE_SIZE,
        max_pages=max(int(load / args.too_small), 96 // PAGE_SIZE),
        admission=args.admission,
    )
    states, preempted = serve(engine, requests)
    found = bits([state.output() for state in states])
    check_invariants(engine.state.decode)
    stats = engine.stats()
    differing = sum(one != other for one, other in zip(found, expected, strict=True))
    again = bits(engine.generate(requests[:8])) == expected[:8]
    line = {
        "requests": len(requests),
        "sequences": len(lens),
        "pages": engine.shapes.num_pages,
        "pages_of_the_load": round(float(load), 1),
        "differing": differing,
        "preempted_requests": len(preempted),
        "pages_held": engine.shapes.num_pages - stats["pages_free"],
        "usable_afterwards": again,
        **{
            name: stats[name]
            for name in ("preemptions", "generated_tokens", "recomputed_tokens", "prefix_hits", "steps")
        },
        "recomputed_per_token": round(stats["recomputed_per_token"], 3),
        "seconds": round(time.time() - start),
    }
    print(json.dumps(line))
    good = differing == 0 and line["pages_held"] == 0 and again and len(preempted) > 0.3 * len(requests)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
