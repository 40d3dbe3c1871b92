"""Random beam searches on the device's tables, compared with a plain Python search. Run by hand.

python scripts/fuzz_beams.py --searches 10000 --seed 0
"""

import argparse
import collections
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.decode.beam_driver import random_logits, random_search, run  # noqa: E402

_TOGETHER = 25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    counted: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    for part in range(-(-args.searches // _TOGETHER)):
        rng = np.random.default_rng((args.seed, part))
        searches = [random_search(rng) for _ in range(_TOGETHER)]
        counted.update(run(searches, random_logits(rng), cancel_rate=0.02 * (part % 2), seed=part))
    what = {name: counted[name] for name in ("steps", "preemptions", "copied_pages", "forks", "prefix_hits")}
    print(f"{args.searches} searches found what a plain search finds; {what}; {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
