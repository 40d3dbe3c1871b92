"""Beam search on the host: the size of its tables, and the hypotheses that the device has found."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request_state import RequestState


def beams_for(asked: Iterable[SamplingParams], shapes: Shapes) -> int:
    """`Shapes.max_beams` that suits requests with these parameters: a power of two, so that it rarely changes.

    Requires: each search fits (`validate`).
    """
    most = max((params.num_beams for params in asked), default=1)
    if most <= max(1, shapes.max_beams):
        return shapes.max_beams
    return min(1 << (most - 1).bit_length(), shapes.max_seqs)


def enter_hypotheses(read: Callable[..., Any], requests: list[RequestState]) -> None:
    """Fetch what searches have found and enter it into their samples, the best first.

    Waits for the round in flight: the slots are as they were left, because no other sequence has got them yet.

    Args:
        read: `Runner.read_hypotheses`, which gives `Hypotheses` in numpy.
    """
    if not requests:
        return
    sequences = [s for request in requests for s in request.sequences[: request.params.n]]
    found = read([s.request.rank or 0 for s in sequences], [s.slot for s in sequences])
    for row, sequence in enumerate(sequences):
        generated = slice(len(sequence.request.prompt_token_ids), int(found.lens[row]))
        logprobs = found.logprobs[row, generated]
        versions = sequence.request.search_versions
        sequence.extend(found.tokens[row, generated], logprobs, np.zeros_like(logprobs), None, versions)
        sequence.score = float(found.scores[row])
