"""Random workloads with shared prefixes: hits, misses and evictions of the device's tables equal the model's in each.

    python scripts/fuzz_prefix.py --workloads 10000

The model (tests/decode/allocator_model.py) is a plain simulation of pages that are found by whole texts. Every workload
begins with empty tables. Prints one JSON line, and exits with 1 at the first workload that differs.
"""

import argparse
import collections
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.decode.driver import Driver  # noqa: E402
from tests.decode.workloads import run_workload  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    driver, start = Driver(), time.perf_counter()
    totals: collections.Counter[str] = collections.Counter()
    for number in range(args.workloads):
        try:
            totals += run_workload(driver, np.random.default_rng([args.seed, number]))
        except AssertionError as e:
            print(json.dumps({"workload": number, "seed": args.seed, "differs": str(e)}))
            return 1
    seconds = round(time.perf_counter() - start)
    print(json.dumps({"workloads": args.workloads, "differing": 0, **totals, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
