"""Scores of prompts on the host: what they need of the engine, and how they come back from the device."""

import jax
import numpy as np

from levanter_infer.cache.page_math import pages_for
from levanter_infer.cache.score_pages import unpack_scores
from levanter_infer.decode.programs import Programs
from levanter_infer.decode.scoring import READ_PAGES
from levanter_infer.decode.shapes import ScoreShapes
from levanter_infer.decode.state import GenState
from levanter_infer.engine.backend import Backend
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.metrics import Registry
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request_state import PromptScores, RequestState
from levanter_infer.engine.row_reads import RowReads
from levanter_infer.policies import FinishReason

SCORE_ONLY = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
"""The prompt's log probabilities, and no continuation."""


def score_shapes(config: EngineConfig, model) -> ScoreShapes:
    arch = model.config
    return ScoreShapes(num_top=min(config.max_prompt_logprobs, arch.vocab_size), hidden_size=arch.hidden_size)


class ScoreReader:
    """Fetches the scores of complete prompts.

    They are asked for when their sequence gives its slot back, and taken when the next round is read: by then they are
    there, and the device has not waited for anybody.
    """

    def __init__(self, registry: Registry, backend: Backend):
        self._registry, self._backend = registry, backend
        self._asked: list[tuple[list[tuple[RequestState, int]], RowReads, list[jax.Array]]] = []

    def ask(self, programs: Programs, state: GenState, leaving: list[tuple[RequestState, int]]) -> None:
        """Begin to fetch.

        Args:
            leaving: groups, and the slots that held their prompts and that nobody else has been given yet.
        """
        if not leaving:
            return
        size, none = state.decode.page_table.page_size, state.decode.sequences.num_slots
        groups, held = zip(*leaving, strict=True)
        counts = [pages_for(len(group.prompt_token_ids), size) for group in groups]
        reads = RowReads(np.repeat([group.rank or 0 for group in groups], counts), self._backend.num_shards, READ_PAGES)
        slots = reads.arguments(np.repeat(held, counts), fill=none)
        columns = reads.arguments(np.concatenate([np.arange(count) for count in counts]), fill=0)
        put = self._backend.put
        arrays = [programs.read_scores(state.scores, *put(places)) for places in zip(slots, columns, strict=True)]
        self._asked.append((list(zip(groups, counts, strict=True)), reads, arrays))

    def take(self) -> None:
        """Give the groups what was asked for."""
        asked, self._asked = self._asked, []
        for groups, reads, arrays in asked:
            pages = reads.rows(arrays)
            begin = 0
            for group, count in groups:
                self._give(group, pages[begin : begin + count])
                begin += count

    def _give(self, group: RequestState, pages: np.ndarray) -> None:
        scores = pages.reshape(-1, pages.shape[-1])[1 : len(group.prompt_token_ids)]
        group.prompt_scores = PromptScores(*unpack_scores(scores))
        self._registry.add("scored_tokens", len(scores))
        if np.isnan(group.prompt_scores.logprobs).any():
            group.sequences[0].finish_reason = FinishReason.ERROR

    def abandon(self) -> None:
        """Nobody will read what was asked for."""
        for groups, *_ in self._asked:
            for group, _ in groups:
                group.sequences[0].finish_reason = FinishReason.ABORT
        self._asked = []
