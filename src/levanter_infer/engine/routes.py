"""Routed experts on the host: what they need of the engine, and how they come back from the device."""

from collections.abc import Callable

import numpy as np

from levanter_infer.cache.page_math import pages_for
from levanter_infer.decode.shapes import RoutingShapes
from levanter_infer.engine.request_state import SampleState
from levanter_infer.engine.scoring import Fetched
from levanter_infer.policies import FinishReason


def routing_shapes(config) -> RoutingShapes:
    """Sizes for a model.

    Args:
        config: of the model.
    Raises: ValueError if it has no experts, or layers choose different numbers of them.
    """
    blocks = config.expert_blocks
    chosen = {block.num_chosen for block in blocks}
    if len(chosen) != 1:
        had = f"layers choose {' or '.join(map(str, sorted(chosen)))} experts" if chosen else "the model has no experts"
        raise ValueError(f"return_routed_experts: {had}; leave it out")
    return RoutingShapes(num_layers=len(blocks), num_chosen=chosen.pop(), num_experts=blocks[0].num_experts)


class RouteReader:
    """Fetches the routed experts of samples that have ended.

    They are asked for when the sample gives its slot back, and taken when the next round is read, as scores are.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._asked: list[tuple[list[SampleState], Fetched]] = []

    def ask(self, read: Callable[..., Fetched], leaving: list[tuple[SampleState, int]]) -> None:
        """Begin to fetch.

        Args:
            read: `Runner.read_routes`.
            leaving: samples, and the slots that they had and that no other sample has been given yet.
        """
        if not leaving:
            return
        samples, held = zip(*leaving, strict=True)
        counts = [self._num_pages(sample) for sample in samples]
        columns = np.concatenate([np.arange(count) for count in counts])
        ranks = np.repeat([sample.request.rank or 0 for sample in samples], counts)
        self._asked.append((list(samples), read(ranks, np.repeat(held, counts), columns)))

    def take(self) -> None:
        """Give the samples what was asked for."""
        asked, self._asked = self._asked, []
        for samples, fetched in asked:
            pages, begin = fetched.rows(), 0
            for sample in samples:
                end = begin + self._num_pages(sample)
                tokens = pages[begin:end].reshape(-1, *pages.shape[2:])
                sample.routes, begin = tokens[: sample.num_routed].astype(np.int16), end

    def _num_pages(self, sample: SampleState) -> int:
        return max(1, pages_for(sample.num_routed, self._page_size))

    def abandon(self) -> None:
        """End the samples whose experts are on their way with reason "abort": they will not be taken."""
        for samples, _ in self._asked:
            for sample in samples:
                sample.finish_reason = FinishReason.ABORT
        self._asked = []
