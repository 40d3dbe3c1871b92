"""The host's side of beam search: what the device is told, and what it has found."""

from collections.abc import Iterable

import jax
import numpy as np

from levanter_infer.cache.page_math import pages_for
from levanter_infer.decode.beam_table import EARLY, NEVER, PATIENT, BeamParams
from levanter_infer.decode.programs import Programs
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import GenState
from levanter_infer.engine.backend import Backend
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.row_reads import RowReads
from levanter_infer.engine.sequence import Group, Sequence

_READ = 8
"""Hypotheses that are fetched together."""
_STOPPING: dict[bool | str, int] = {False: PATIENT, True: EARLY, "never": NEVER}


def check_room(num_beams: int, prompt_len: int, max_len: int, shapes: Shapes) -> None:
    """Raises: ValueError unless a search fits alone: its beams run together, and may differ in all but the prompt."""
    if num_beams > shapes.max_seqs:
        raise ValueError(
            f"num_beams={num_beams} exceeds engine.max_seqs={shapes.max_seqs}: beams run together; raise "
            "engine.max_seqs or lower num_beams"
        )
    if num_beams > shapes.limits.vocab_size:
        raise ValueError(f"num_beams={num_beams} exceeds the vocabulary of {shapes.limits.vocab_size} tokens; lower it")
    shared = (prompt_len - 1) // shapes.page_size
    needed = shared + num_beams * (pages_for(max_len, shapes.page_size) - shared)
    if needed > shapes.num_pages:
        raise ValueError(
            f"num_beams={num_beams} beams of up to {max_len} tokens, of which {prompt_len} are the prompt, may need "
            f"{needed} pages of {shapes.page_size} tokens and the pool has {shapes.num_pages}; raise engine.max_pages, "
            "or lower num_beams or max_tokens"
        )


def beams_for(asked: Iterable[SamplingParams], shapes: Shapes) -> int:
    """`Shapes.max_beams` that suits requests with these parameters: a power of two, so that it rarely changes.

    Requires: each search fits (`check_room`).
    """
    most = max((params.num_beams for params in asked), default=1)
    if most <= max(1, shapes.max_beams):
        return shapes.max_beams
    return min(1 << (most - 1).bit_length(), shapes.max_seqs)


def beam_params(pieces: list[tuple[Sequence, int, int]], shapes: Shapes) -> BeamParams:
    """What the sequences of an admission are told about their searches, in numpy."""
    size = shapes.num_slots
    columns: dict[str, np.ndarray] = {name: np.zeros(size, np.int32) for name in ("places", "widths", "early_stopping")}
    columns |= {"leaders": np.full(size, size, np.int32), "length_penalty": np.zeros(size, np.float32)}
    for row, (sequence, _, _) in enumerate(pieces):
        params = sequence.group.params
        leader = sequence.group.sequences[0].slot
        if params.num_beams > 1:
            assert leader is not None
            columns["leaders"][row] = leader
            columns["places"][row] = sequence.index
            columns["widths"][row] = params.num_beams
            columns["length_penalty"][row] = params.length_penalty
            columns["early_stopping"][row] = _STOPPING[params.early_stopping]
    return BeamParams(**columns)  # type: ignore[arg-type]


def enter_hypotheses(programs: Programs, state: GenState, groups: list[Group], backend: Backend) -> None:
    """Fetch what searches have found and enter it into their sequences, the best first.

    Waits for the round in flight: the slots are as they were left, because nobody else has got them yet.
    """
    if not groups:
        return
    sequences = [s for group in groups for s in group.sequences[: group.params.n]]
    reads = RowReads([s.group.shard or 0 for s in sequences], backend.num_shards, _READ)
    slots = reads.arguments([s.slot for s in sequences], fill=0)  # type: ignore[misc]
    calls = [jax.device_get(programs.found(state, backend.put(of_call))) for of_call in slots]
    found = jax.tree.map(lambda *results: reads.rows(results), *calls)
    for row, sequence in enumerate(sequences):
        generated = slice(len(sequence.group.prompt_token_ids), int(found.lens[row]))
        logprobs = found.logprobs[row, generated]
        versions = sequence.group.search_versions
        sequence.extend(found.tokens[row, generated], logprobs, np.zeros_like(logprobs), None, versions)
        sequence.score = float(found.scores[row])
