"""`SlotManager`: which sequence has which slot, and what to tell the device next."""

import collections
import collections.abc
import heapq
from typing import Any

import numpy as np

from levanter_infer.decode.admission import Admission
from levanter_infer.decode.codes import ABORT, DEFAULT_ROOT, ERROR, FINISHED, LENGTH, STOP
from levanter_infer.decode.outputs import HostOutputs
from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.beams import beam_params
from levanter_infer.engine.encode_sampling import SamplingColumns
from levanter_infer.engine.kv_offload import host_terms
from levanter_infer.engine.pending import PendingQueue
from levanter_infer.engine.sequence import Group, Sequence

REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error", ABORT: "abort"}
_INT32 = 2**31


class SlotManager:
    """Host mirror of the slots: an upper bound of what is in use, exact as of the last round that was read.

    A slot is given to a sequence in `next_admission`, and taken back when a round's outputs show that its sequence
    has finished. Rounds are read one behind, so a slot may stand empty on the device for a round; waiting slots fill
    its place there meanwhile.
    """

    def __init__(self, shapes: Shapes, eos_token_ids: tuple[int, ...]):
        self.shapes = shapes
        self._eos = eos_token_ids
        self._free = collections.deque(range(shapes.num_slots))
        self._occupants: dict[int, Sequence] = {}
        self._pending = PendingQueue()
        self._loading: collections.deque[Group] = collections.deque()
        self._cancel: set[int] = set()
        self._deadlines: list[tuple[float, int, Group]] = []
        self._leaving: list[tuple[Group, int]] = []
        self._arrivals = self._added = 0
        self.admits = True
        """Whether groups that wait here may get slots."""

    def route(self, groups: collections.abc.Sequence[Group]) -> None:
        """Told of all that will be added, before they are; with one shard there is nothing to decide."""

    def of(self, group: Group) -> "SlotManager":
        """Whose slots serve this group: with one shard these."""
        return self

    def add(self, group: Group, now: float) -> None:
        """Queue a group; its time, if it has a limit, begins `now`."""
        self._pending.push(group)
        if group.timeout_s is not None:
            self._added += 1
            heapq.heappush(self._deadlines, (now + group.timeout_s, self._added, group))

    def discard(self, group: Group) -> None:
        """End the group's unfinished sequences: at once if they wait here, else by the next admission."""
        self._pending.discard(group)
        for sequence in group.sequences:
            if sequence.finish_reason is None:
                sequence.finish("abort")
            if sequence.slot is not None and sequence.first_round is None:
                self._vacate(sequence)
            elif sequence.slot is not None:
                self._cancel.add(sequence.slot)
        if group in self._loading:
            self._loading.remove(group)

    def expire(self, now: float) -> list[Sequence]:
        """End the groups whose deadline has passed; returns their sequences that had not finished."""
        return [sequence for group in self.take_due(now) for sequence in self.end(group)]

    def take_due(self, now: float) -> list[Group]:
        """Groups that were added here and whose deadline has passed since the last call."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            due.append(heapq.heappop(self._deadlines)[-1])
        return due

    def end(self, group: Group) -> list[Sequence]:
        """`discard`, for who wants to know which sequences had not finished."""
        ended = [sequence for sequence in group.sequences if sequence.finish_reason is None]
        if not group.is_done:
            self.discard(group)
        return ended

    @property
    def room(self) -> int:
        """Slots for which nobody waits here; where it is negative, so many wait for whom there is none."""
        room = len(self._free) - self._pending.num_sequences
        return room if self.admits and not self._loading else min(room, 0)

    @property
    def first_waiting(self) -> Group | None:
        """Who would get slots next, if anybody waits and may."""
        return self._pending.first if self._pending and self.admits else None

    def hand_over(self, other: "SlotManager") -> Group:
        """Let who waits first here wait there, behind its equals. The deadline stays here."""
        group = self._pending.pop()
        other._pending.push(group)
        return group

    def abandon(self) -> None:
        """End everything that has not finished; the device has forgotten it, and its slots will be others'."""
        waiting = [sequence for group in self._pending.groups() for sequence in group.sequences]
        for sequence in [*self._occupants.values(), *waiting]:
            sequence.finish("abort")
            sequence.slot = None
            if sequence.index == 0 and sequence.group.awaits_scores:
                sequence.finish_reason = "abort"  # it had ended, and its scores will never come

    def cancel_slot(self, sequence: Sequence) -> None:
        """Stop computing a sequence whose result is known already."""
        assert sequence.slot is not None
        self._cancel.add(sequence.slot)

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def seat(self, sequence: Sequence) -> None:
        """Give a sequence a slot. Requires: there is a free one."""
        sequence.slot = self._free.popleft()
        sequence.arrival = self._next_arrival()
        self._occupants[sequence.slot] = sequence

    def keep_slot(self, sequence: Sequence) -> None:
        """Go on computing a sequence after all, if the device does not know better yet."""
        assert sequence.slot is not None
        self._cancel.discard(sequence.slot)

    def next_admission(self, round_id: int, max_steps: int) -> dict[str, np.ndarray | object]:
        """The arrays of the next `Admission`, by field: only scalars where nothing is admitted or cancelled."""
        fields: dict[str, np.ndarray | object] = {}
        pieces = self._next_pieces(round_id)
        if pieces:
            fields |= self._encode(pieces)
        if self._cancel:
            mask = np.zeros(self.shapes.num_slots, bool)
            mask[list(self._cancel)] = True
            fields["cancel"] = mask
        fields["has_pieces"] = np.asarray(bool(pieces))
        fields["has_cancellations"] = np.asarray(bool(self._cancel))
        fields["max_steps"] = np.asarray(max_steps, np.int32)
        fields["min_free_slots"] = np.asarray(self._min_free_slots(), np.int32)
        self._cancel = set()
        return fields

    @property
    def occupants(self) -> list[Sequence]:
        """Those that have a slot."""
        return list(self._occupants.values())

    def groups(self) -> list[Group]:
        """All that have not ended: with slots, and those that wait here."""
        return list(dict.fromkeys([*(s.group for s in self._occupants.values()), *self._pending.groups()]))

    def roots(self) -> np.ndarray:
        """Of each slot i32[seq], -1 for those that nobody has."""
        roots = np.full(self.shapes.num_slots, -1, np.int32)
        for slot, sequence in self._occupants.items():
            roots[slot] = sequence.group.root
        return roots

    @property
    def has_prompts(self) -> bool:
        """Whether the next round may compute prompts: a sequence that is there, or waits, has no token yet."""
        return bool(self._pending) or any(not s.token_ids for s in self._occupants.values())

    def _min_free_slots(self) -> int:
        if self._loading:
            return 0
        first = self.first_waiting
        return self.shapes.num_slots + 1 if first is None else len(first.sequences)

    def _next_pieces(self, round_id: int) -> list[tuple[Sequence, int, int]]:
        """(sequence, start, length) of what fits into one upload: pieces of long prompts first, then new groups."""
        room = self.shapes.upload_tokens
        pieces: list[tuple[Sequence, int, int]] = []
        while room > 0 and (self._loading or self._can_start_next()):
            if not self._loading:
                group = self._pending.pop()
                for sequence in group.sequences:
                    self.seat(sequence)
                self._loading.append(group)
            group = self._loading[0]
            leader = group.sequences[0]
            leader.first_round = round_id if leader.first_round is None else leader.first_round
            length = min(room, len(group.prompt_token_ids) - leader.uploaded)
            pieces.append((leader, leader.uploaded, length))
            leader.uploaded += length
            room -= length
            if leader.uploaded == len(group.prompt_token_ids):
                for child in group.sequences[1:]:
                    child.first_round = round_id
                    pieces.append((child, 0, 0))
                self._loading.popleft()
        return pieces

    def _can_start_next(self) -> bool:
        first = self.first_waiting
        return first is not None and len(self._free) >= len(first.sequences)

    def _encode(self, pieces: list[tuple[Sequence, int, int]]) -> dict[str, np.ndarray | object]:
        shapes = self.shapes
        names = ("lens", "starts", "slot_ids", "prompt_lens", "max_lens", "arrival", "priority", "roots", "fork_source")
        columns = {name: np.zeros(shapes.num_slots, np.int32) for name in names}
        columns["slot_ids"][:] = shapes.num_slots
        columns["fork_source"][:] = shapes.num_slots
        complete = np.zeros(shapes.num_slots, bool)
        tokens = np.zeros(shapes.upload_tokens, np.int32)
        sampling = SamplingColumns(shapes.num_slots, shapes.limits)
        used = 0
        for row, (sequence, start, length) in enumerate(pieces):
            group = sequence.group
            tokens[used : used + length] = group.prompt_token_ids[start : start + length]
            used += length
            values = {
                "lens": length,
                "starts": start,
                "slot_ids": sequence.slot,
                "prompt_lens": len(group.prompt_token_ids),
                "max_lens": group.max_len,
                "arrival": sequence.arrival,
                "priority": group.priority,
                "roots": group.root,
                "fork_source": shapes.num_slots if sequence.index == 0 else group.sequences[0].slot,
            }
            for name, value in values.items():
                columns[name][row] = value
            complete[row] = sequence.index > 0 or start + length == len(group.prompt_token_ids)
            sampling.set(row, group.params, seed=group.seed, sample_index=sequence.index, eos_token_ids=self._eos)
        beams = {"beams": beam_params(pieces, shapes)} if shapes.max_beams else {}
        return {**columns, **beams, "complete": complete, "tokens": tokens, "sampling": sampling.table()}

    def _next_arrival(self) -> int:
        self._arrivals += 1
        assert self._arrivals < _INT32 - 1, "arrivals are renumbered when the engine is idle"
        return self._arrivals

    def collect(self, outputs: HostOutputs, round_id: int, version: int) -> list[Sequence]:
        """Take a round's outputs; returns the sequences whose result became known. `version`: of its weights."""
        self._note_cached(outputs, round_id)
        wants_top = any(s.group.params.logprobs for s in self._occupants.values())
        top = outputs.top() if wants_top else None
        known: list[Sequence] = []
        for slot, entries in _entries_by_slot(outputs.slot_ids):
            sequence = self._occupants.get(slot)
            if sequence is None or not _is_told(sequence, round_id) or sequence.finish_reason is not None:
                continue
            own_top = (top[0][entries], top[1][entries]) if top is not None else None
            sequence.extend(
                outputs.tokens[entries],
                outputs.logprobs[entries],
                outputs.processed_logprobs[entries],
                own_top,
                [version] * len(entries),
            )
            if sequence.finish_reason is not None:
                known.append(sequence)
                if outputs.status[slot] != FINISHED:
                    self.cancel_slot(sequence)
        for slot, sequence in list(self._occupants.items()):
            if outputs.status[slot] == FINISHED and _is_told(sequence, round_id):
                if sequence.finish_reason is None:
                    sequence.finish(REASONS[int(outputs.finish_reason[slot])])
                    known.append(sequence)
                self._vacate(sequence)
        if not self._occupants:
            self._arrivals = 0
        return known

    def _note_cached(self, outputs: HostOutputs, round_id: int) -> None:
        """Take what is known of cached prompts, of those that had no token before this round. Later the leader may
        have another slot."""
        for slot, sequence in self._occupants.items():
            group = sequence.group
            is_new = not sequence.token_ids or group.params.num_beams > 1
            if sequence.index == 0 and is_new and _is_told(sequence, round_id):
                group.num_cached_tokens = int(outputs.num_cached[slot])

    def take_leaving(self) -> list[tuple[Group, int]]:
        """Groups whose prompts were scored, and the slots that held them: given back since the last call."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        if sequence.index == 0 and sequence.group.awaits_scores:
            self._leaving.append((sequence.group, sequence.slot))
        del self._occupants[sequence.slot]
        self._cancel.discard(sequence.slot)
        self._free.append(sequence.slot)
        sequence.slot = None

    def searches(self, outputs: HostOutputs, round_id: int, version: int) -> list[Group]:
        """Beam searches that have found their hypotheses, as this round says; to be asked before `collect`."""
        found = (STOP, LENGTH)
        leaders = [s for s in self._occupants.values() if s.index == 0 and s.group.params.num_beams > 1]
        told = [s for s in leaders if _is_told(s, round_id) and s.finish_reason is None]
        for s in told:
            length = int(outputs.seq_lens[s.slot]) - len(s.group.prompt_token_ids)
            s.group.search_versions += [version] * (length - len(s.group.search_versions))
        ended = [s for s in told if outputs.status[s.slot] == FINISHED and outputs.finish_reason[s.slot] in found]
        for s in ended:
            s.group.search_versions.append(version)  # a hypothesis may be one token longer than the beams
        return [s.group for s in ended]

    @property
    def is_short(self) -> bool:
        """Whether somebody waits here who may get a slot when there is one."""
        return self.first_waiting is not None

    @property
    def is_idle(self) -> bool:
        return not (self._occupants or self._pending)


def _is_told(sequence: Sequence, round_id: int) -> bool:
    """Whether the device knew of the sequence in that round."""
    return sequence.first_round is not None and sequence.first_round <= round_id


def _entries_by_slot(slot_ids: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(slot, its entries in the order of sampling) for each slot among the entries."""
    order = np.argsort(slot_ids, kind="stable")
    slots, begins = np.unique(slot_ids[order], return_index=True)
    ends = np.append(begins, len(order))[1:]
    return [(int(slot), order[begin:end]) for slot, begin, end in zip(slots, begins, ends, strict=True)]


def empty_admission(shapes: Shapes) -> Admission:
    """An admission that admits nothing; its arrays stand in for those that a round does not need to upload."""

    def full(size: int | tuple[()], value=0, dtype: type = np.int32) -> Any:
        return np.full(size, value, dtype)

    admitted = none = shapes.num_slots
    return Admission(
        tokens=full(shapes.upload_tokens),
        lens=full(admitted),
        starts=full(admitted),
        slot_ids=full(admitted, none),
        complete=full(admitted, False, np.bool_),
        prompt_lens=full(admitted),
        max_lens=full(admitted),
        arrival=full(admitted),
        priority=full(admitted),
        roots=full(admitted, DEFAULT_ROOT),
        fork_source=full(admitted, none),
        sampling=SamplingColumns(shapes.num_slots, shapes.limits).table(),
        beams=beam_params([], shapes) if shapes.max_beams else None,
        cancel=full(shapes.num_slots, False, np.bool_),
        max_steps=full((), 0),
        min_free_slots=full((), shapes.num_slots + 1),
        has_pieces=full((), False, np.bool_),
        has_cancellations=full((), False, np.bool_),
        host=host_terms() if shapes.offload else None,
    )
