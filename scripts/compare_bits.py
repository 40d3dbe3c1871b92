"""Compare many requests bit by bit: alone, and in random company, chunk sizes, page sizes, pools and cache states.

    python scripts/compare_bits.py --comparisons 10000

Prints one JSON line, and exits with 1 if any comparison fails.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engine.test_batch_invariant import bits, make_engine, random_requests  # noqa: E402

CONFIGS = (
    dict(max_seqs=8, page_size=4, max_step_tokens=16, max_pages=26),
    dict(max_seqs=16, page_size=16, max_step_tokens=64, max_pages=9, max_round_steps=7),
    dict(max_seqs=4, page_size=8, max_step_tokens=5, max_pages=13),
    dict(max_seqs=32, page_size=8, max_step_tokens=300),
    dict(max_seqs=12, page_size=4, max_step_tokens=33, prefix_cache=False, max_pages=36),
)
_COLD = 0.4
"""How often an engine has forgotten all pages before a round of comparisons."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=10000)
    parser.add_argument("--requests", type=int, default=250, help="in each round of comparisons; default 250")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start, compared, differing, rounds = time.time(), 0, 0, 0
    alone = make_engine(args.dtype, max_seqs=3, page_size=8, max_step_tokens=256, prefix_cache=False)
    engines = [make_engine(args.dtype, **config) for config in CONFIGS]
    rng = np.random.default_rng(args.seed)
    while compared < args.comparisons:
        requests = random_requests(args.requests, seed=args.seed + rounds)
        expected = [bits(alone.generate([request]))[0] for request in requests]
        for engine in engines:
            if rng.random() < _COLD:
                engine.reset()
            order = rng.permutation(len(requests))
            found = bits(engine.generate([requests[i] for i in order]))
            differing += sum(one != expected[i] for one, i in zip(found, order, strict=True))
            compared += len(requests)
        rounds += 1
    totals = {name: sum(engine.stats()[name] for engine in engines) for name in ("preemptions", "prefix_hits", "forks")}
    line = {"compared": compared, "differing": differing, **totals, "dtype": args.dtype}
    print(json.dumps({**line, "seconds": round(time.time() - start)}))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
