"""What a side of `run.py` does: one JSON line in, one out. Needs the standard library alone."""

import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], list[list[int]]]


def serve(start: Callable[[dict], Generate]) -> None:
    """Answer measurements until the input ends.

    The first line is the setup: checkpoint, dtype, batch, prompt, output. Each further one is
    `{"prompts": [[token ids]], "count": n}` and is answered by `{"seconds": s, "tokens": [[token ids]]}`.
    """
    # Libraries print; the answers have a stream of their own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    generate = start(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        task = json.loads(line)
        begin = time.perf_counter()
        tokens = generate(task["prompts"], task["count"])
        print(json.dumps({"seconds": time.perf_counter() - begin, "tokens": tokens}), file=answers, flush=True)
