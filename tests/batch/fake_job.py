"""A process that works on a job with the engine without a model: `python -m tests.batch.fake_job PROMPTS OUTPUT …`.

Everything else is real: files, locks, journals, commits. Ends with status 0, or with 2 and what is wrong.
"""

import argparse
import sys
import time

from tests.batch.fake_engine import FakeEngine
from tests.batch.test_drive import begin, work


class Slow(FakeEngine):
    """Rounds take so many seconds."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def step_round(self) -> None:
        time.sleep(self.seconds)
        super().step_round()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts")
    parser.add_argument("output")
    parser.add_argument("--numerics", default="batch_invariant")
    parser.add_argument("--round-s", type=float, default=0.0)
    arguments = parser.parse_args()
    try:
        source, job = begin(arguments.prompts, arguments.output, numerics=arguments.numerics)
        work(source, job, engine=Slow(arguments.round_s))
        return 0 if job.finish() is not None else 1
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
