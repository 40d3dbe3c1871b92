"""Clients of an engine: requests with given arrival times, in continuous batching or in static batches."""

import time
from collections.abc import Sequence

from levanter_infer.bench.machine import others_seconds
from levanter_infer.bench.timeline import Round, Timeline
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.request import Request
from levanter_infer.engine.request_state import RequestState


def run_continuous(
    engine: InferenceEngine,
    requests: Sequence[Request],
    arrivals: Sequence[float],
    *,
    max_steps: int | None = None,
    late_launch: bool = True,
) -> Timeline:
    """Submit each request at its arrival; the next request takes a free slot at once.

    Args:
        arrivals: seconds after the start, ascending; all 0 for a closed loop that keeps every slot busy.
        max_steps: steps of a round; None leaves it to the engine.
        late_launch: launch each round as late as possible while requests are still to come
            (`InferenceEngine.wait_for_launch_window`).
    """
    run = _Run(engine, requests, arrivals, max_steps)
    while not run.is_done:
        if not run.running:
            run.wait_for(arrivals[run.num_submitted])
        elif late_launch and run.num_submitted < len(requests):
            engine.wait_for_launch_window()
        run.submit_arrived(limit=len(requests))
        run.round()
    return run.finish()


def run_static(
    engine: InferenceEngine,
    requests: Sequence[Request],
    arrivals: Sequence[float],
    *,
    batch: int,
    max_steps: int | None = None,
) -> Timeline:
    """Static batching, the classical baseline: a request that arrives while a batch runs waits for its last sequence.

    Slots of finished sequences stay empty, but cost nothing: the engine does not compute them.

    Args:
        batch: largest number of sequences of a batch, which starts with the requests that have arrived.
    """
    run = _Run(engine, requests, arrivals, max_steps)
    while not run.is_done:
        if not run.running:
            run.wait_for(arrivals[run.num_submitted])
            run.submit_arrived(limit=run.num_submitted + batch)
        run.round()
    return run.finish()


class _Run:
    """One run: submits requests in order, and records when tokens are seen."""

    def __init__(self, engine: InferenceEngine, requests: Sequence[Request], arrivals: Sequence[float], max_steps):
        engine.warmup()
        self._engine, self._requests, self._arrivals, self._max_steps = engine, requests, arrivals, max_steps
        self.num_submitted = 0
        self.running: dict[int, RequestState] = {}
        self._states: list[RequestState] = []
        self._token_times: list[list[float]] = [[] for _ in requests]
        self._rounds: list[Round] = []
        self._start = time.perf_counter()
        self._busy_since = 0.0
        self._totals = engine.stats()
        self._others = others_seconds()

    @property
    def is_done(self) -> bool:
        return self.num_submitted == len(self._requests) and not self.running

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_for(self, moment: float) -> None:
        """Sleep until a moment while no request is running."""
        time.sleep(max(0.0, moment - self.now()))
        self._busy_since = self.now()

    def submit_arrived(self, limit: int) -> None:
        """Submit the requests that have arrived, up to `limit` requests in all."""
        now = self.now()
        while self.num_submitted < min(limit, len(self._requests)) and self._arrivals[self.num_submitted] <= now:
            state = self._engine.submit(self._requests[self.num_submitted])
            self.running[self.num_submitted] = state
            self._states.append(state)
            self.num_submitted += 1

    def round(self) -> None:
        self._engine.step_round(max_steps=self._max_steps)
        now, others, totals = self.now(), others_seconds(), self._engine.stats()
        tokens = 0
        for i, state in list(self.running.items()):
            times = self._token_times[i]
            new = len(state.sequences[0].token_ids) - len(times)
            times += [now] * new
            tokens += new
            if state.is_done:
                del self.running[i]
        steps, prompt_steps = (totals[name] - self._totals[name] for name in ("steps", "prompt_steps"))
        if steps:
            self._rounds.append(
                Round(
                    end=now,
                    seconds=now - self._busy_since,
                    steps=steps,
                    prompt_steps=prompt_steps,
                    tokens=tokens,
                    decoding=sum(bool(self._token_times[i]) for i in self.running),
                    others_s=None if others is None or self._others is None else others - self._others,
                )
            )
            self._busy_since, self._others = now, others
        self._totals = totals

    def finish(self) -> Timeline:
        self._engine.drain()
        return Timeline(
            arrivals=list(self._arrivals),
            token_times=self._token_times,
            token_ids=[state.sequences[0].token_ids for state in self._states],
            rounds=self._rounds,
        )
