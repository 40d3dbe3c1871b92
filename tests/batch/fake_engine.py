"""An engine without a model: what it samples depends on the request alone, and when it is done on the request too."""

import zlib

import numpy as np

from levanter_infer.engine.request import NOT_FINITE, Completion, Request, RequestOutput


class FakeGroup:
    def __init__(self, request: Request, rounds: int):
        self.request, self.left = request, rounds

    @property
    def is_done(self) -> bool:
        return self.left <= 0

    def output(self) -> RequestOutput:
        assert self.is_done
        request, digest = self.request, zlib.crc32(repr((self.request.id, self.request.prompt)).encode())
        completions = [
            Completion(
                index=index,
                token_ids=[(digest + index) % 97, digest % 89],
                text=f"text {digest} {index} \N{SNOWMAN}",
                finish_reason="error" if request.prompt == "nan" else "stop",
                logprobs=np.asarray([-0.1, -digest % 7 / 3], np.float32),
                processed_logprobs=np.zeros(2, np.float32),
                top_logprobs=[{5: -0.25}, {6: float("-inf")}] if request.sampling.logprobs else None,
                seed=digest,
                error=NOT_FINITE if request.prompt == "nan" else None,
            )
            for index in range(request.sampling.n)
        ]
        assert request.id is not None
        return RequestOutput(request.id, request.prompt, [1, 2, 3], completions)


class FakeEngine:
    """Requests take one to five rounds. `max_running`: sequences submitted and not done, at most, so far."""

    def __init__(self):
        self.submitted: list[str] = []
        self.rounds = self.flushed = self.max_running = 0
        self._running: list[FakeGroup] = []

    def submit(self, request: Request) -> FakeGroup:
        if request.prompt == "refuse":
            raise ValueError("refused")
        group = FakeGroup(request, 1 + zlib.crc32(str(request.id).encode()) % 5)
        self.submitted.append(str(request.id))
        self._running.append(group)
        self.max_running = max(self.max_running, sum(g.request.sampling.n for g in self._running))
        return group

    def step_round(self) -> None:
        self.rounds += 1
        self._advance()

    def flush(self) -> None:
        self.flushed += 1
        self._advance()

    def _advance(self) -> None:
        for group in self._running:
            group.left -= 1
        self._running = [group for group in self._running if not group.is_done]
