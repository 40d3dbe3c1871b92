"""Recomputed tokens under adverse loads, against the bound of docs/invariants.md.

    python scripts/fuzz_recomputation.py --loads 5000

Random loads of requests near the size of the pool, of long prompts and of samples that diverge, on the device's tables
alone. Prints one JSON line, and exits with 1 if a load is above the bound, or if a sequence is preempted twice without
another one having ended in between.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.decode.recomputation import bound, random_load, work_of  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start, above, twice, generated, recomputed, preemptions = time.time(), 0, 0, 0, 0, 0
    worst = {"share_of_bound": 0.0, "per_generated_token": 0.0}
    for number in range(args.loads):
        load = random_load(np.random.default_rng([args.seed, number]))
        work = work_of(load)
        most = bound(load, work)
        above, twice = above + (work.recomputed > most), twice + work.twice
        generated, recomputed = generated + work.generated, recomputed + work.recomputed
        preemptions += work.preemptions
        worst["share_of_bound"] = max(worst["share_of_bound"], round(work.recomputed / most, 3))
        worst["per_generated_token"] = max(worst["per_generated_token"], round(work.recomputed / work.generated, 2))
    line = {
        "loads": args.loads,
        "above_the_bound": above,
        "gave_way_twice": twice,
        "generated": generated,
        "recomputed": recomputed,
        "preemptions": preemptions,
        "worst": worst,
        "seconds": round(time.time() - start),
    }
    print(json.dumps(line))
    return 1 if above or twice else 0


if __name__ == "__main__":
    sys.exit(main())
