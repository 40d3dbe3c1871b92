"""The host's side of `resample` and `fork`: samples of one request that go on from one another."""

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from levanter_infer.decode.programs import Programs
from levanter_infer.engine.backend import Backend
from levanter_infer.engine.coordination import RoundCoordinator
from levanter_infer.engine.kv_offload import KvOffload
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.engine.scheduler import RankSlots, Scheduler
from levanter_infer.engine.turns import Turns, exclusive
from levanter_infer.engine.uploads import without_ranks


class Forks(abc.ABC):
    """What `InferenceEngine` can do with the samples of a request while they run."""

    state: Any
    backend: Backend
    programs: Programs
    _scheduler: Scheduler
    _offload: KvOffload
    _rounds: int
    _coordinator: RoundCoordinator
    _known: list[SampleState]
    _turns: Turns

    @abc.abstractmethod
    def _is_in_progress(self) -> bool: ...

    @abc.abstractmethod
    def _flush(self) -> list[SampleState]:
        """Read the round in flight, if there is one."""

    @exclusive
    def resample(self, group: RequestState, ancestors: Sequence[int]) -> None:
        """Let sample i of a submitted request go on from where sample `ancestors[i]` stands, for all i at once.

        The round in flight is read first; who weighs samples calls `flush` before. Pages are shared and not copied, and
        every sample keeps its own random numbers, so that descendants of one sample diverge. Finished samples take
        part: who descends from one is finished like it, and a finished one that goes on from one that runs takes a
        free slot. What ends or begins here is not reported by `step_round`: the caller knows of it. On a mesh over
        several processes all of them call this, with the same ancestors.
        Raises: ValueError if `ancestors` does not name a sample for each, the prompt is not yet on the device, or no
            slot is free.
        """
        self._known += self._flush()
        chosen = checked_ancestors(group, ancestors)
        self._go_on(group, group.sequences, chosen)

    @exclusive
    def fork(self, group: RequestState, index: int, count: int = 1) -> list[SampleState]:
        """Let sample `index` of a submitted request go on as itself and as `count` further samples, which join the
        group, each in a slot of its own. Otherwise like `resample`.
        """
        self._known += self._flush()
        added = further_samples(group, index, count)
        self._go_on(group, [*group.sequences, *added], [*range(len(group.sequences)), *[index] * count])
        group.sequences += added
        return added

    def _go_on(self, group: RequestState, sequences: list[SampleState], ancestors: list[int]) -> None:
        self._coordinator.on_input({"ancestors": np.asarray([sequences[0].arrival, *ancestors])})
        self.state = self._offload.begin_anew(self.programs.tier, self.state, group)
        fields = go_on_from(self._scheduler.slots_of(group), sequences, ancestors, self._rounds)
        if fields is not None:
            num_ranks = self.backend.num_shards
            of_ranks = tuple(np.stack([field * (rank == group.rank) for rank in range(num_ranks)]) for field in fields)
            self.state = self.programs.resample(self.state, *self.backend.put(without_ranks(of_ranks, num_ranks)))


def checked_ancestors(group: RequestState, ancestors: Sequence[int]) -> list[int]:
    """Raises: ValueError unless there is a sample's index for each sample of the group, which has started."""
    num = len(group.sequences)
    if isinstance(ancestors, (str, bytes)) or not isinstance(ancestors, (Sequence, np.ndarray)):
        raise ValueError(f"ancestors is {type(ancestors).__name__}; expected a list of {num} sample indices")
    if len(ancestors) != num:
        raise ValueError(f"ancestors has {len(ancestors)} entries and the request {num} samples; name one for each")
    for i, ancestor in enumerate(ancestors):
        _check_index(f"ancestors[{i}]", ancestor, num)
    _check_started(group)
    return [int(ancestor) for ancestor in ancestors]


def further_samples(group: RequestState, index: int, count: int) -> list[SampleState]:
    """`count` more samples for a group that has started, without a slot."""
    _check_index("index", index, len(group.sequences))
    if not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(f"count={count!r}: expected a whole number of at least 1")
    _check_started(group)
    first = len(group.sequences)
    return [SampleState(request=group, index=first + i) for i in range(count)]


def go_on_from(
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
        source[slot], sample_index[slot], arrival[slot] = ancestor.slot, sequence.index, sequence.arrival
    return (mask, source, sample_index, arrival) if mask.any() else None


def _check_index(name: str, value, num: int) -> None:
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or not 0 <= value < num:
        raise ValueError(f"{name}={value!r}: expected the index of a sample, from 0 to {num - 1}")


def _check_started(group: RequestState) -> None:
    if group.params.num_beams > 1:
        raise ValueError(
            f"request {group.id!r} has num_beams={group.params.num_beams}: a beam search resamples its beams itself"
        )
    if not group.is_done and group.sequences[0].uploaded < len(group.prompt_token_ids):
        raise ValueError(
            f"request {group.id!r} has not started: call step_round until its prompt is on the device, which the "
            "first tokens of its samples show"
        )
