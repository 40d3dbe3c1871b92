"""Protocol of a side of `run.py`: one JSON line in, one out. Needs the standard library alone."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata

Generate = Callable[[list[list[int]], int], list[list[int]]]
_untimed_s = 0.0


@contextlib.contextmanager
def untimed() -> Iterator[None]:
    """Within a `Generate`: what a side does in Python where its engine's users would not counts for nothing."""
    global _untimed_s
    begin = time.perf_counter()
    try:
        yield
    finally:
        _untimed_s += time.perf_counter() - begin


def serve(start: Callable[[dict], Generate], packages: tuple[str, ...]) -> None:
    """Answer measurements until the input ends.

    The first line is the setup: checkpoint, dtype, batch, prompt, output, threads, and prefix_cache where pages are to
    be found again; `run.py` does not ask for that, since the same prompts come again. It is answered by the versions of
    `packages` when the side is ready. Each further line is `{"prompts": [[token ids]], "count": n}` and is answered by
    `{"seconds": s, "tokens": [[token ids]]}`; the seconds are those of `generate` less what it spent in `untimed`.
    """
    # Libraries print; the answers have a stream of their own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(message: dict) -> None:
        print(json.dumps(message), file=answers, flush=True)

    generate = start(json.loads(sys.stdin.readline()))
    answer({"versions": {name: metadata.version(name) for name in packages}})
    for line in sys.stdin:
        task = json.loads(line)
        begin, before = time.perf_counter(), _untimed_s
        tokens = generate(task["prompts"], task["count"])
        answer({"seconds": time.perf_counter() - begin - (_untimed_s - before), "tokens": tokens})
