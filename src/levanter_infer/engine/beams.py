"""Beam search on the host: the size of its tables, and the hypotheses that the device has found."""

from collections.abc import Iterable

import jax
import numpy as np

from levanter_infer.decode.programs import Programs
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import GenState
from levanter_infer.engine.backend import Backend
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request_state import RequestState
from levanter_infer.engine.row_reads import RowReads

_READ = 8
"""Hypotheses that are fetched together."""


def beams_for(asked: Iterable[SamplingParams], shapes: Shapes) -> int:
    """`Shapes.max_beams` that suits requests with these parameters: a power of two, so that it rarely changes.

    Requires: each search fits (`validate`).
    """
    most = max((params.num_beams for params in asked), default=1)
    if most <= max(1, shapes.max_beams):
        return shapes.max_beams
    return min(1 << (most - 1).bit_length(), shapes.max_seqs)


def enter_hypotheses(programs: Programs, state: GenState, groups: list[RequestState], backend: Backend) -> None:
    """Fetch what searches have found and enter it into their sequences, the best first.

    Waits for the round in flight: the slots are as they were left, because nobody else has got them yet.
    """
    if not groups:
        return
    sequences = [s for group in groups for s in group.sequences[: group.params.n]]
    reads = RowReads([s.request.rank or 0 for s in sequences], backend.num_shards, _READ)
    slots = reads.arguments([s.slot for s in sequences], fill=0)  # type: ignore[misc]
    calls = [jax.device_get(programs.found(state, backend.put(of_call))) for of_call in slots]
    found = jax.tree.map(lambda *results: reads.rows(results), *calls)
    for row, sequence in enumerate(sequences):
        generated = slice(len(sequence.request.prompt_token_ids), int(found.lens[row]))
        logprobs = found.logprobs[row, generated]
        versions = sequence.request.search_versions
        sequence.extend(found.tokens[row, generated], logprobs, np.zeros_like(logprobs), None, versions)
        sequence.score = float(found.scores[row])
