"""Random operations on the device's tables, compared with the plain Python model after each. Run by hand.

python scripts/fuzz_control.py --operations 1000000 --seed 0
"""

import argparse
import collections
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.decode.driver import Driver, random_operation  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=1, help="compare all tables after every so many operations")
    args = parser.parse_args()
    rng, driver = np.random.default_rng(args.seed), Driver()
    done: collections.Counter[str] = collections.Counter()
    preempted = copied = forked = 0
    start = time.perf_counter()
    for i in range(args.operations):
        model = driver.model
        kind = random_operation(driver, rng)
        done[kind] += 1
        if kind == "reset":
            preempted, copied, forked = preempted + model.preemptions, copied + model.copied, forked + model.forks
        if i % args.check_every == 0:
            driver.check()
        if (i + 1) % 50_000 == 0:
            print(f"{i + 1} operations, {time.perf_counter() - start:.0f} s, 0 violations", flush=True)
    driver.finish()
    model = driver.model
    print(
        f"{args.operations} operations {dict(done)}: 0 violations; {preempted + model.preemptions} preemptions, "
        f"{copied + model.copied} page copies, {forked + model.forks} forks; {time.perf_counter() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
