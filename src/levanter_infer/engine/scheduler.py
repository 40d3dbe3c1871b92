"""`Scheduler`: all decisions that the host takes about requests. NumPy only; imports no JAX.

A request goes this way:

    submit          a rank is chosen for it (`routing.py`), and it waits in that rank's `RequestQueue`
    next_admission  it gets a slot for each of its samples, and its prompt goes into the round's `HostAdmission`, in
                    several rounds if it is long; the device's own scheduler (`decode/schedule.py`) decides which slots
                    run in each step
    collect         the tokens of a round go to its samples, and slots of finished samples are free again
    cancel, expire  end it earlier, by its caller or by its deadline

The engine launches a round before it reads the one before, so what is known of the slots is one round old.
"""

import collections
import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from levanter_infer.decode.codes import ABORT, ERROR, FINISHED, IMPOSSIBLE, LENGTH, STOP
from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.admission import HostAdmission
from levanter_infer.engine.constraints import AutomatonTable
from levanter_infer.engine.request import NO_TOKEN, NOT_FINITE
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.engine.round_length import RoundLengthController
from levanter_infer.engine.routing import expected_tokens, route
from levanter_infer.policies import FinishReason

_REASONS = {
    STOP: (FinishReason.STOP, None),
    LENGTH: (FinishReason.LENGTH, None),
    ERROR: (FinishReason.ERROR, NOT_FINITE),
    ABORT: (FinishReason.ABORT, None),
    IMPOSSIBLE: (FinishReason.ERROR, NO_TOKEN),
}
"""The reason and the error that a result has for each `codes.FinishReason`."""
_MAX_ARRIVAL = 2**31 - 2
_FEW_DEADLINES = 256
"""Deadlines that are kept without a look at whether their requests have ended."""


class RankOutputs(Protocol):
    """The outputs of a round on one rank that the scheduler reads, in NumPy; `decode.outputs.HostOutputs` is one."""

    status: np.ndarray
    """i32[slot], `codes.Status`."""
    finish_reason: np.ndarray
    """i32[slot], `codes.FinishReason`."""
    seq_lens: np.ndarray
    """i32[slot], tokens of prompt and generation."""
    num_cached: np.ndarray
    """i32[slot], prompt tokens found by prefix caching."""
    slot_ids: np.ndarray
    """i32[sampled], slot of each sampled token, in the order of sampling."""
    tokens: np.ndarray
    """i32[sampled]"""
    logprobs: np.ndarray
    """f32[sampled], under the model."""
    processed_logprobs: np.ndarray
    """f32[sampled], under the distribution that was sampled from."""

    def top(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids i32, logprobs f32) of the likeliest tokens, [sampled, top]; costs a download."""
        ...


class Scheduler:
    """Queue, slots, deadlines and round length for the data-parallel ranks of an engine, one or several.

    Args:
        shapes: sizes of the tables of each rank.
        eos_token_ids: end-of-sequence ids of the model.
        num_ranks: data-parallel ranks.
        max_round_seconds: what a round should take, at most.
    """

    def __init__(
        self,
        shapes: Shapes,
        eos_token_ids: tuple[int, ...] = (),
        num_ranks: int = 1,
        *,
        max_round_seconds: float = 0.5,
    ):
        self._shapes = shapes
        self._eos, self._num_ranks = eos_token_ids, num_ranks
        self.round_length = RoundLengthController(shapes.max_round_steps, max_round_seconds)
        self._forget_all()

    # Requests

    def submit(self, requests: Sequence[RequestState], now: float) -> None:
        """Queue requests; the time of those that have a deadline starts `now`.

        Requests that are submitted together are routed together, which balances ranks better than one by one.
        """
        self._route([request for request in requests if request.rank is None])
        self._guided |= {request for request in requests if request.is_guided}
        for request in requests:
            request.scheduler = self
            self.slots_of(request).queue.push(request)
            if request.timeout_s is not None:
                self._add_deadline(now + request.timeout_s, request)

    def _add_deadline(self, deadline: float, request: RequestState) -> None:
        """Note it, and forget those of finished requests once they may be half of all: they may be hours away."""
        if len(self._deadlines) >= self._most_deadlines:
            self._deadlines = [entry for entry in self._deadlines if not entry[-1].is_done]
            heapq.heapify(self._deadlines)
            self._most_deadlines = max(_FEW_DEADLINES, 2 * len(self._deadlines))
        self._num_deadlines += 1
        heapq.heappush(self._deadlines, (deadline, self._num_deadlines, request))

    def next_deadline(self) -> float | None:
        """The first deadline of the requests that have not ended; None without one."""
        while self._deadlines and self._deadlines[0][-1].is_done:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def cancel(self, request: RequestState) -> None:
        """End a request with reason "abort": samples without a slot at once, others by the next admission."""
        for sample in request.sequences:
            sample.finish(FinishReason.ABORT)
        if request.rank is not None:
            self.slots_of(request).cancel(request)

    def expire(self, now: float) -> list[SampleState]:
        """Cancel the requests whose deadline has passed; returns their samples that had not finished."""
        ended: list[SampleState] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[-1]
            ended += [sample for sample in request.sequences if sample.finish_reason is None]
            if not request.is_done:
                self.cancel(request)
        return ended

    def abort_all(self) -> None:
        """End all requests with reason "abort" and forget them, because the device has forgotten them."""
        for request in self.requests():
            for sample in request.sequences:
                sample.finish(FinishReason.ABORT)
                sample.slot = None
            # What had finished and was yet to be read will never be
            if request.awaits_scores:
                request.sequences[0].finish_reason = FinishReason.ABORT
            for sample in request.sequences:
                if sample.awaits_routes:
                    sample.finish_reason = FinishReason.ABORT
        self._forget_all()

    @property
    def shapes(self) -> Shapes:
        """Sizes of the tables; may be replaced between rounds by those with further tables."""
        return self._shapes

    @shapes.setter
    def shapes(self, shapes: Shapes) -> None:
        self._shapes, self.automata.shapes = shapes, shapes.constraints

    def _forget_all(self) -> None:
        num_slots = self._shapes.num_slots
        self.automata = AutomatonTable(self._shapes.constraints, num_slots)
        """The automata in the device's tables."""
        self._guided: set[RequestState] = set()
        self._ranks = [RankSlots(rank, num_slots, self.automata) for rank in range(self._num_ranks)]
        self._routed: list[RequestState] = []
        self._deadlines: list[tuple[float, int, RequestState]] = []  # a heap
        self._num_deadlines, self._most_deadlines = 0, _FEW_DEADLINES

    def _route(self, requests: list[RequestState]) -> None:
        """Choose the ranks of requests from what they and unfinished ones may compute."""
        if self._num_ranks == 1:
            for request in requests:
                request.rank = 0
            return
        self._routed = [request for request in self._routed if not request.is_done]
        loads = [0] * self._num_ranks
        for request in self._routed:
            assert request.rank is not None
            loads[request.rank] += expected_tokens(request)
        for request, rank in zip(requests, route(requests, loads, self.shapes.page_size), strict=True):
            request.rank = rank
        self._routed += requests

    # Rounds

    def steps(self, wanted: int | None = None) -> int:
        """Steps of the next round, at most `wanted`. Raises: ValueError for other than a positive whole number."""
        return self.round_length.steps(self.has_prompts, 1 if self.is_guided else wanted)

    def next_admission(self, round_id: int, max_steps: int) -> HostAdmission:
        """The requests that the next round admits and cancels; those that it admits have their slots then.

        Args:
            round_id: its number, larger than those before.
            max_steps: steps after which it ends.
        """
        self._rebalance()
        admission = HostAdmission(self.shapes, self._num_ranks, max_steps)
        for rank in self._ranks:
            rank.admit(admission, round_id, self._eos)
        return admission

    def _rebalance(self) -> None:
        """Move waiting requests from ranks with a backlog to the rank with most spare slots, one by one.

        Decided from what the rounds have brought, and so alike on every host.
        """
        while True:
            taker = max(self._ranks, key=lambda rank: rank.num_spare)
            firsts = [(rank, rank.first_waiting) for rank in self._ranks if rank.num_spare < 0]
            fitting = [(r, first) for r, first in firsts if first and len(first.sequences) <= taker.num_spare]
            if not fitting:
                return
            giver, request = min(fitting, key=lambda pair: (pair[1].priority, pair[0].num_spare))
            giver.queue.discard(request)
            taker.queue.push(request)
            request.rank = taker.index

    def finished_searches(self, outputs: Sequence[RankOutputs], round_id: int, version: int) -> list[RequestState]:
        """Beam searches that ended in a round. Their hypotheses are to be read from the device before `collect`, which
        frees their slots. Args: as in `collect`."""
        return [
            request
            for rank, of_rank in zip(self._ranks, outputs, strict=True)
            for request in rank.finished_searches(of_rank, round_id, version)
        ]

    def collect(self, outputs: Sequence[RankOutputs], round_id: int, version: int) -> list[SampleState]:
        """Take the outputs of a round; returns the samples whose result became known.

        Args:
            outputs: of each rank.
            round_id: as in `next_admission`.
            version: of the weights that the round used.
        """
        return [
            sample
            for rank, of_rank in zip(self._ranks, outputs, strict=True)
            for sample in rank.collect(of_rank, round_id, version)
        ]

    def on_round(
        self,
        *,
        steps: int,
        prompt_steps: int,
        seconds: float,
        rank_steps: Sequence[int],
        expected_prompts: bool = False,
    ) -> None:
        """Learn from a round how long the next ones may be. Before `collect`.

        Args:
            steps, prompt_steps: its steps, and those that computed prompt tokens.
            seconds: what it took.
            rank_steps: steps of each rank; empty if there is one.
            expected_prompts: `has_prompts` when it was launched.
        """
        self.round_length.on_round(prompt_steps > 0, steps, seconds, expected_prompts=expected_prompts)
        self.round_length.on_ranks(prompt_steps > 0, rank_steps if self.has_backlog else [])

    def pop_recorded(self) -> list[tuple[SampleState, int]]:
        """Samples that want their routed experts, and the slots that they had: freed since the last call."""
        return [pair for rank in self._ranks for pair in rank.pop_recorded()]

    def pop_scored(self) -> list[tuple[RequestState, int]]:
        """Requests whose prompts were scored, and the slots that held them: freed since the last call."""
        return [pair for rank in self._ranks for pair in rank.pop_scored()]

    # What there is

    @property
    def admits(self) -> bool:
        """Whether waiting requests get slots; may be set."""
        return all(rank.admits for rank in self._ranks)

    @admits.setter
    def admits(self, value: bool) -> None:
        for rank in self._ranks:
            rank.admits = value

    @property
    def has_work(self) -> bool:
        """Whether a request waits or has a slot."""
        return any(rank.active or rank.queue for rank in self._ranks)

    @property
    def has_backlog(self) -> bool:
        """Whether a request waits that gets a slot as soon as one is free."""
        return any(rank.first_waiting for rank in self._ranks)

    @property
    def has_prompts(self) -> bool:
        """Whether the next round may compute prompts: an active sample, or a waiting one, has no token yet."""
        return any(rank.queue or any(not s.token_ids for s in rank.active.values()) for rank in self._ranks)

    @property
    def is_guided(self) -> bool:
        """Whether the host says which tokens may follow in some sample, so that a round has one step."""
        self._guided = {request for request in self._guided if not request.is_done}
        return bool(self._guided)

    def stale_guides(self) -> list[SampleState]:
        """Samples with slots whose guide knows of tokens that the device's mask does not; it is to get their masks."""
        samples = [sample for request in self._guided for sample in request.sequences]
        running = [s for s in samples if s.slot is not None and s.finish_reason is None]
        return [sample for sample in running if sample.guide is not None and sample.guide.is_stale]

    @property
    def active(self) -> list[SampleState]:
        """Samples that have a slot."""
        return [sample for rank in self._ranks for sample in rank.active.values()]

    def requests(self) -> list[RequestState]:
        """Requests that have slots, and those that wait."""
        of_ranks = ([*(s.request for s in rank.active.values()), *rank.queue] for rank in self._ranks)
        return list(dict.fromkeys(request for of_rank in of_ranks for request in of_rank))

    def slots_of(self, request: RequestState) -> "RankSlots":
        """The slots of the rank that serves a request. Requires: it was submitted."""
        assert request.rank is not None, "the request was never submitted"
        return self._ranks[request.rank]

    def roots(self) -> np.ndarray:
        """Root of the sequence in each slot, i32[rank, slot]; -1 for free slots."""
        roots = np.full((self._num_ranks, self.shapes.num_slots), -1, np.int32)
        for rank in self._ranks:
            for slot, sample in rank.active.items():
                roots[rank.index, slot] = sample.request.root
        return roots


class RankSlots:
    """The slots of one data-parallel rank, and the requests that wait for them.

    A slot is assigned in `admit`, and free again when a round's outputs show that its sample has finished. On the
    device it may be empty one round earlier; until then another sample that waits there runs in its stead.
    """

    def __init__(self, index: int, num_slots: int, automata: AutomatonTable | None = None):
        self.index, self.num_slots = index, num_slots
        self._automata = AutomatonTable(None, num_slots) if automata is None else automata
        self.admits = True
        self.queue = RequestQueue()
        self.active: dict[int, SampleState] = {}
        """Samples by slot."""
        self._free = collections.deque(range(num_slots))
        self._loading: RequestState | None = None
        """The request whose prompt is uploaded in part."""
        self._cancelled: set[int] = set()
        """Slots that the next admission cancels."""
        self._scored: list[tuple[RequestState, int]] = []
        self._recorded: list[tuple[SampleState, int]] = []
        self._arrivals = 0

    @property
    def num_free(self) -> int:
        """Free slots."""
        return len(self._free)

    @property
    def num_spare(self) -> int:
        """Free slots minus waiting samples; negative: the backlog. Never above 0 while no request may be admitted."""
        spare = len(self._free) - self.queue.num_samples
        return spare if self.admits and self._loading is None else min(spare, 0)

    @property
    def first_waiting(self) -> RequestState | None:
        """The request that gets the next free slots."""
        return self.queue.first if self.queue and self.admits else None

    # Slots

    def assign_slot(self, sample: SampleState) -> None:
        """Give a sample a slot. Requires: `num_free` is not 0."""
        self._arrivals += 1
        assert self._arrivals <= _MAX_ARRIVAL, "arrivals are numbered from 0 again when no sample is active"
        sample.slot, sample.arrival = self._free.popleft(), self._arrivals
        self.active[sample.slot] = sample
        if sample.request.automaton is not None:
            self._automata.hold(sample.request.automaton)

    def cancel_slot(self, sample: SampleState) -> None:
        """Stop computing a sample whose result is known."""
        assert sample.slot is not None
        self._cancelled.add(sample.slot)

    def keep_slot(self, sample: SampleState) -> None:
        """Undo `cancel_slot`, if no admission has cancelled the slot yet."""
        assert sample.slot is not None
        self._cancelled.discard(sample.slot)

    def cancel(self, request: RequestState) -> None:
        """Take a request from the queue, and cancel or free its slots."""
        self.queue.discard(request)
        for sample in request.sequences:
            if sample.slot is not None and sample.first_round is None:
                self._free_slot(sample)
            elif sample.slot is not None:
                self._cancelled.add(sample.slot)
        if self._loading is request:
            self._loading = None

    def _free_slot(self, sample: SampleState) -> None:
        assert sample.slot is not None
        if sample.index == 0 and sample.request.awaits_scores:
            self._scored.append((sample.request, sample.slot))
        if sample.awaits_routes:
            self._recorded.append((sample, sample.slot))
        if sample.request.automaton is not None:
            self._automata.release(sample.request.automaton)
        del self.active[sample.slot]
        self._cancelled.discard(sample.slot)
        self._free.append(sample.slot)
        sample.slot = None

    def pop_recorded(self) -> list[tuple[SampleState, int]]:
        """This rank's share of `Scheduler.pop_recorded`."""
        recorded, self._recorded = self._recorded, []
        return recorded

    def pop_scored(self) -> list[tuple[RequestState, int]]:
        """This rank's share of `Scheduler.pop_scored`."""
        scored, self._scored = self._scored, []
        return scored

    # Admission

    def admit(self, admission: HostAdmission, round_id: int, eos_token_ids: tuple[int, ...]) -> None:
        """Write what fits into an admission: the next prompt chunk of the loading request, then new requests."""
        while (capacity := admission.capacity(self.index)) > 0:
            if self._loading is None:
                self._loading = self._start_next()
            if self._loading is None:
                break
            leader, *others = self._loading.sequences
            if leader.first_round is None:
                leader.first_round = round_id
            prompt_len = len(self._loading.prompt_token_ids)
            length = min(capacity, prompt_len - leader.uploaded)
            automaton = self._loading.automaton
            number = None if automaton is None else self._automata.number(automaton)
            admission.add(self.index, leader, leader.uploaded, length, eos_token_ids, number)
            leader.uploaded += length
            if leader.uploaded == prompt_len:
                for sample in others:
                    sample.first_round = round_id
                    admission.add(self.index, sample, 0, 0, eos_token_ids, number)
                self._loading = None
        if self._cancelled:
            admission.cancel(self.index, self._cancelled)
            self._cancelled = set()
        admission.min_free_slots[self.index] = self._min_free_slots()

    def _start_next(self) -> RequestState | None:
        """Assign slots to the request that waits first, if there are enough; else None."""
        first = self.first_waiting
        if first is None or len(self._free) < len(first.sequences) or not self._fits(first):
            return None
        request = self.queue.pop()
        for sample in request.sequences:
            self.assign_slot(sample)
        return request

    def _fits(self, request: RequestState) -> bool:
        """Whether the tables of automata hold the one of a request, from now on."""
        return request.automaton is None or self._automata.enter(request.automaton) is not None

    def _min_free_slots(self) -> int:
        if self._loading is not None:
            return 0
        first = self.first_waiting
        if first is None or not self._fits(first):  # a slot would not suffice: the round goes on
            return self.num_slots + 1
        return len(first.sequences)

    # Outputs

    def collect(self, outputs: RankOutputs, round_id: int, version: int) -> list[SampleState]:
        """This rank's share of `Scheduler.collect`."""
        self._note_cached(outputs, round_id)
        wants_top = any(sample.request.params.logprobs for sample in self.active.values())
        order, spans = _entries_by_slot(outputs.slot_ids)
        tokens, logprobs = outputs.tokens[order], outputs.logprobs[order]
        processed = outputs.processed_logprobs[order]
        top = tuple(side[order] for side in outputs.top()) if wants_top else None
        known: list[SampleState] = []
        for slot, span in spans:
            sample = self.active.get(slot)
            if sample is None or not _was_admitted_by(sample, round_id) or sample.finish_reason is not None:
                continue
            own_top = None if top is None else (top[0][span], top[1][span])
            versions = [version] * (span.stop - span.start)
            sample.extend(tokens[span], logprobs[span], processed[span], own_top, versions)
            if sample.finish_reason is not None:
                known.append(sample)
                if outputs.status[slot] != FINISHED:
                    self.cancel_slot(sample)
        for slot, sample in list(self.active.items()):
            if outputs.status[slot] == FINISHED and _was_admitted_by(sample, round_id):
                if sample.finish_reason is None:
                    reason = int(outputs.finish_reason[slot])
                    if not sample.request.params.max_tokens and reason in (ERROR, IMPOSSIBLE):
                        reason = LENGTH  # it samples nothing; its scores say whether they are finite
                    sample.finish(*_REASONS[reason])
                    known.append(sample)
                self._free_slot(sample)
        if not self.active:
            self._arrivals = 0
        return known

    def _note_cached(self, outputs: RankOutputs, round_id: int) -> None:
        """Keep the cached tokens of prompts whose first sample had no token before this round. Later it may have
        another slot."""
        for slot, sample in self.active.items():
            request = sample.request
            is_new = not sample.token_ids or request.params.num_beams > 1
            if sample.index == 0 and is_new and _was_admitted_by(sample, round_id):
                request.num_cached_tokens = int(outputs.num_cached[slot])

    def finished_searches(self, outputs: RankOutputs, round_id: int, version: int) -> list[RequestState]:
        """This rank's share of `Scheduler.finished_searches`."""
        ended = []
        for slot, sample in self.active.items():
            request = sample.request
            if sample.index > 0 or request.params.num_beams == 1:
                continue
            if not _was_admitted_by(sample, round_id) or sample.finish_reason is not None:
                continue
            length = int(outputs.seq_lens[slot]) - len(request.prompt_token_ids)
            request.search_versions += [version] * (length - len(request.search_versions))
            if outputs.status[slot] == FINISHED and outputs.finish_reason[slot] in (STOP, LENGTH):
                request.search_versions.append(version)  # a hypothesis may be one token longer than the beams
                ended.append(request)
        return ended


class RequestQueue:
    """Requests without slots, by priority, smallest number first, and within one priority in the order of arrival. One
    is pushed, popped or discarded in a time that does not depend on how many wait."""

    def __init__(self):
        self._by_priority: dict[int, collections.OrderedDict[RequestState, None]] = {}
        self._priorities: list[int] = []  # a heap of the keys
        self.num_samples = 0
        """Samples of all requests."""

    def push(self, request: RequestState) -> None:
        """Append a request behind those of its priority."""
        if request.priority not in self._by_priority:
            self._by_priority[request.priority] = collections.OrderedDict()
            heapq.heappush(self._priorities, request.priority)
        self._by_priority[request.priority][request] = None
        self.num_samples += len(request.sequences)

    @property
    def first(self) -> RequestState:
        """The request that is served next. Requires: the queue is not empty."""
        return next(iter(self._by_priority[self._priorities[0]]))

    def pop(self) -> RequestState:
        """Remove the first request. Requires: the queue is not empty."""
        request = self.first
        self.discard(request)
        return request

    def discard(self, request: RequestState) -> None:
        """Remove a request, if it is in the queue."""
        requests = self._by_priority.get(request.priority)
        if requests is None or request not in requests:
            return
        del requests[request]
        self.num_samples -= len(request.sequences)
        while self._priorities and not self._by_priority[self._priorities[0]]:
            del self._by_priority[heapq.heappop(self._priorities)]

    def __iter__(self) -> Iterator[RequestState]:
        for priority in sorted(self._priorities):
            yield from self._by_priority[priority]

    def __bool__(self) -> bool:
        return self.num_samples > 0


def _was_admitted_by(sample: SampleState, round_id: int) -> bool:
    """Whether a round computed with the sample in its slot."""
    return sample.first_round is not None and sample.first_round <= round_id


def _entries_by_slot(slot_ids: np.ndarray) -> tuple[np.ndarray, list[tuple[int, slice]]]:
    """The order of the entries by slot, and within one in the order of sampling; and where the entries of each slot
    are in that order."""
    order = np.argsort(slot_ids, kind="stable")
    slots, starts = np.unique(slot_ids[order], return_index=True)
    ends = [*starts.tolist(), len(order)][1:]
    spans = zip(slots.tolist(), map(slice, starts.tolist(), ends), strict=True)
    return order, list(spans)
