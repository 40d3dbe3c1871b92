"""Scores of prompts on the host: what they need of the engine, and how they come back from the device."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from levanter_infer.cache.page_math import pages_for
from levanter_infer.cache.score_pages import unpack_scores
from levanter_infer.decode.shapes import ScoreShapes
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.metrics import Registry
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import NOT_FINITE
from levanter_infer.engine.request_state import PromptScores, RequestState
from levanter_infer.policies import FinishReason

SCORE_ONLY = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
"""The prompt's log probabilities, and no continuation."""


def score_shapes(config: EngineConfig, model) -> ScoreShapes:
    arch = model.config
    return ScoreShapes(num_top=min(config.max_prompt_logprobs, arch.vocab_size), hidden_size=arch.hidden_size)


class Fetched(Protocol):
    """Arrays on their way from the device (`runner.Gather`)."""

    def rows(self) -> np.ndarray:
        """The entries in the order in which they were asked for. Waits for the device."""
        ...


class ScoreReader:
    """Fetches the scores of complete prompts.

    They are asked for when their sequence gives its slot back, and taken when the next round is read: by then they are
    there, and the device has not waited.
    """

    def __init__(self, registry: Registry, page_size: int):
        self._registry, self._page_size = registry, page_size
        self._asked: list[tuple[list[tuple[RequestState, int]], Fetched]] = []

    def ask(self, read: Callable[..., "Fetched"], leaving: list[tuple[RequestState, int]]) -> None:
        """Begin to fetch.

        Args:
            read: `Runner.read_scores`.
            leaving: requests, and the slots that held their prompts and that no other sequence has been given yet.
        """
        # A sample that ended and goes on from another one (`resample`) leaves twice, the second time without scores
        leaving = [(request, slot) for request, slot in leaving if request.awaits_scores]
        if not leaving:
            return
        requests, held = zip(*leaving, strict=True)
        counts = [pages_for(len(request.prompt_token_ids), self._page_size) for request in requests]
        columns = np.concatenate([np.arange(count) for count in counts])
        fetched = read(np.repeat([r.rank or 0 for r in requests], counts), np.repeat(held, counts), columns)
        self._asked.append((list(zip(requests, counts, strict=True)), fetched))

    def take(self) -> None:
        """Give the requests what was asked for."""
        asked, self._asked = self._asked, []
        for requests, fetched in asked:
            pages = fetched.rows()
            begin = 0
            for request, count in requests:
                self._give(request, pages[begin : begin + count])
                begin += count

    def _give(self, request: RequestState, pages: np.ndarray) -> None:
        scores = pages.reshape(-1, pages.shape[-1])[1 : len(request.prompt_token_ids)]
        request.prompt_scores = PromptScores(*unpack_scores(scores))
        self._registry.add("scored_tokens", len(scores))
        if np.isnan(request.prompt_scores.logprobs).any():
            first = request.sequences[0]
            first.finish_reason, first.error = FinishReason.ERROR, NOT_FINITE

    def abandon(self) -> None:
        """End the requests whose scores are on their way with reason "abort": the scores will not be taken."""
        for requests, _ in self._asked:
            for request, _ in requests:
                request.sequences[0].finish_reason = FinishReason.ABORT
        self._asked = []
