"""The host's side of `resample` and `fork`: samples of one request that go on from one another."""

from collections.abc import Sequence

import numpy as np

from levanter_infer.engine.params import brief
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.engine.scheduler import RankSlots


def checked_ancestors(request: RequestState, ancestors: Sequence[int]) -> list[int]:
    """Raises: ValueError unless there is a sample's index for each sample of the request, which has started."""
    num = len(request.sequences)
    if isinstance(ancestors, (str, bytes)) or not isinstance(ancestors, (Sequence, np.ndarray)):
        raise ValueError(f"ancestors is {type(ancestors).__name__}; expected a list of {num} sample indices")
    if len(ancestors) != num:
        raise ValueError(f"ancestors has {len(ancestors)} entries and the request {num} samples; name one for each")
    for i, ancestor in enumerate(ancestors):
        _check_index(f"ancestors[{i}]", ancestor, num)
    _check_started(request)
    first = request.sequences[int(ancestors[0])]
    if request.awaits_scores and first.index > 0 and not first.token_ids:
        raise ValueError(
            f"ancestors[0]={first.index}: sample 0 scores the prompt of request {brief(request.id)}, and sample "
            f"{first.index} has no token yet; call step_round until it has one"
        )
    return [int(ancestor) for ancestor in ancestors]


def further_samples(request: RequestState, index: int, count: int) -> list[SampleState]:
    """`count` more samples for a request that has started, without a slot."""
    _check_index("index", index, len(request.sequences))
    if not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(f"count={count!r}: expected a whole number of at least 1")
    _check_started(request)
    first = len(request.sequences)
    return [SampleState(request=request, index=first + i) for i in range(count)]


def continue_from(
    slots: RankSlots, sequences: list[SampleState], ancestors: list[int], next_round: int
) -> tuple[np.ndarray, ...] | None:
    """Let each sequence go on from its ancestor on the host, and say what the device has to do for it.

    Returns: mask, ancestors, sample indices and arrivals of `resample_samples`, over slots; None if nothing moves.
    Raises: ValueError if more slots are needed than are free; nothing has changed then.
    Requires: no round is in flight.
    """
    before = {i: sequences[i].snapshot() for i in set(ancestors)}
    pairs = [(s, before[a]) for i, (s, a) in enumerate(zip(sequences, ancestors, strict=True)) if i != a]
    wanted = sum(s.slot is None and ancestor.finish_reason is None for s, ancestor in pairs)
    if wanted > slots.num_free:
        raise ValueError(
            f"{wanted} samples need a slot to go on and {slots.num_free} are free; wait until others have finished, "
            "submit fewer, or raise engine.max_seqs"
        )
    num_slots = slots.num_slots
    mask = np.zeros(num_slots, np.bool_)
    source, sample_index, arrival = np.arange(num_slots, dtype=np.int32), *np.zeros((2, num_slots), np.int32)
    for sequence, ancestor in pairs:
        sequence.take_over(ancestor)
        if ancestor.finish_reason is not None:
            if sequence.slot is not None:
                slots.cancel_slot(sequence)
            continue
        if sequence.slot is None:
            slots.assign_slot(sequence)
            sequence.first_round = next_round
        slots.keep_slot(sequence)
        slot = sequence.slot
        assert slot is not None and ancestor.slot is not None
        mask[slot] = True
        source[slot], sample_index[slot], arrival[slot] = ancestor.slot, sequence.number, sequence.arrival
    return (mask, source, sample_index, arrival) if mask.any() else None


def _check_index(name: str, value, num: int) -> None:
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or not 0 <= value < num:
        raise ValueError(f"{name}={value!r}: expected the index of a sample, from 0 to {num - 1}")


def _check_started(request: RequestState) -> None:
    if request.params.return_routed_experts:
        raise ValueError(
            f"request {request.id!r} has return_routed_experts, which are those of samples that go on by themselves; "
            "leave it out"
        )
    if request.params.is_constrained:
        raise ValueError(
            f"request {request.id!r} is constrained (regex, json_schema, choice, grammar or a list of tokens), and "
            "samples that go on from others take no constraint with them; leave it out"
        )
    if request.params.num_beams > 1:
        raise ValueError(
            f"request {request.id!r} has num_beams={request.params.num_beams}: a beam search resamples its beams itself"
        )
    if not request.is_done and request.sequences[0].uploaded < len(request.prompt_token_ids):
        raise ValueError(
            f"request {request.id!r} has not started: call step_round until its prompt is on the device, which the "
            "first tokens of its samples show"
        )
