"""A plain Python model of tables, packing and paging: lists and loops, one sequence at a time.

It says what the vectorised device code must do, in the most obvious way, and is compared with it after every
operation by `test_state_machine.py` and `scripts/fuzz_control.py`.
"""

import dataclasses

FREE, LOADING, WAITING, RUNNING, FINISHED = range(5)
NOT_FINISHED, STOP, LENGTH, ERROR, ABORT = range(5)


@dataclasses.dataclass
class Slot:
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompt_len: int = 0
    max_len: int = 0
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    status: int = FREE
    reason: int = NOT_FINISHED
    arrival: int = 0
    source: int | None = None
    stop: int | None = None

    @property
    def is_live(self) -> bool:
        return self.status in (LOADING, WAITING, RUNNING)


class AllocatorModel:
    def __init__(self, num_slots: int, max_seqs: int, num_pages: int, page_size: int, budget: int):
        self.max_seqs, self.page_size, self.budget = max_seqs, page_size, budget
        self.slots = [Slot() for _ in range(num_slots)]
        self.free = list(range(num_pages))
        self.refs = [0] * num_pages
        self.preemptions = self.copied = self.forks = 0
        self.copies: list[tuple[int, int]] = []

    # Operations

    def admit(self, slot: int, tokens, max_len: int, arrival: int, source: int | None, stop: int | None) -> None:
        assert not self.slots[slot].is_live
        self.slots[slot] = Slot(list(tokens), len(tokens), max_len, status=WAITING, arrival=arrival, source=source)
        self.slots[slot].stop = stop

    def cancel(self, slots) -> None:
        self._finish({slot: ABORT for slot in slots if self.slots[slot].is_live})

    def step(self, sampled, finite) -> list[int]:
        """One step; `sampled[row]` is what row `row` would sample. Returns the slots in the order of their rows."""
        self._start_waiting()
        take = self._choose_tokens()
        take = self._preempt(take)
        self._take_pages(take)
        rows = self._rows(take)
        done = {}
        for slot in take:
            self.slots[slot].computed += take[slot]
        for row, slot in enumerate(rows):
            state = self.slots[slot]
            if state.computed < len(state.tokens):
                continue
            if not finite[row]:
                done[slot] = ERROR
                continue
            state.tokens.append(int(sampled[row]))
            if state.stop is not None and state.tokens[-1] == state.stop:
                done[slot] = STOP
            elif len(state.tokens) >= state.max_len:
                done[slot] = LENGTH
        self._fork_when_ready()
        self._finish(done)
        return rows

    # The parts of a step

    def _order(self) -> list[int]:
        return sorted((i for i, s in enumerate(self.slots) if s.is_live), key=lambda i: self.slots[i].arrival)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _start_waiting(self) -> None:
        def need(s):
            return max(self._pages_for(len(s.tokens) + 1) + 1 - len(s.pages), 0)

        running = [s for s in self.slots if s.status == RUNNING]
        available = len(self.free) - sum(need(s) for s in running)
        places = self.max_seqs - len(running)
        ready = [i for i in self._order() if self.slots[i].status == WAITING and self.slots[i].source is None]
        for rank, i in enumerate(ready):
            available -= need(self.slots[i])
            if rank < places and (available >= 0 or (not running and rank == 0)):
                self.slots[i].status = RUNNING

    def _choose_tokens(self) -> dict[int, int]:
        running = [i for i in self._order() if self.slots[i].status == RUNNING]
        pending = {i: len(self.slots[i].tokens) - self.slots[i].computed for i in running}
        take = {i: 1 for i in running if pending[i] == 1}
        budget = self.budget - len(take)
        for i in running:
            if pending[i] > 1:
                take[i] = min(pending[i], budget)
                budget -= take[i]
        return {i: n for i, n in take.items() if n}

    def _need(self, i: int, n: int) -> int:
        state = self.slots[i]
        new = self._pages_for(state.computed + n) - self._pages_for(state.computed)
        return new + self._shares_tail(i, n)

    def _shares_tail(self, i: int, n: int) -> bool:
        state = self.slots[i]
        return n > 0 and state.computed % self.page_size != 0 and self.refs[state.pages[-1]] > 1

    def _preempt(self, take: dict[int, int]) -> dict[int, int]:
        order = self._order()
        need = {i: self._need(i, take.get(i, 0)) for i in order}
        if sum(need.values()) <= len(self.free):
            return take

        def fits(k: int) -> bool:
            kept = {page for i in order[:k] for page in self.slots[i].pages}
            released = {page for i in order[k:] for page in self.slots[i].pages} - kept
            return sum(need[i] for i in order[:k]) <= len(self.free) + len(released)

        survivors = max([k for k in range(1, len(order) + 1) if fits(k)], default=1)
        victims = sorted(i for i in order[survivors:] if self.slots[i].status in (WAITING, RUNNING))
        for i in victims:
            self.preemptions += self.slots[i].computed > 0
            self._release(i)
            self.slots[i].status = WAITING
        return {i: n for i, n in take.items() if i not in victims}

    def _take_pages(self, take: dict[int, int]) -> None:
        writers: dict[int, list[int]] = {}
        for i in sorted(take):
            if self._shares_tail(i, take[i]):
                writers.setdefault(self.slots[i].pages[-1], []).append(i)
        copies = {}
        for page, slots in writers.items():
            keeper = slots[0] if len(slots) == self.refs[page] else None
            copies |= {i: page for i in slots if i != keeper}
        self.copies = []
        for i in sorted(take):
            state = self.slots[i]
            new = self._pages_for(state.computed + take[i]) - self._pages_for(state.computed)
            if i in copies:
                state.pages[-1] = self._pop()
                self.copies.append((copies[i], state.pages[-1]))
            state.pages += [self._pop() for _ in range(new)]
        for page in copies.values():
            self.refs[page] -= 1
        self.copied += len(copies)

    def _rows(self, take: dict[int, int]) -> list[int]:
        order = [i for i in self._order() if i in take]
        decodes = [i for i in order if len(self.slots[i].tokens) - self.slots[i].computed == 1]
        return decodes + [i for i in order if i not in decodes]

    def _fork_when_ready(self) -> None:
        # All forks of one step see the tables as they were before any of them.
        ready, alone = [], []
        for i, state in enumerate(self.slots):
            if state.status != WAITING or state.source is None:
                continue
            parent, lens = self.slots[state.source], state.prompt_len - 1
            if lens == 0:
                alone.append(i)
            elif parent.status == RUNNING and parent.computed >= lens:
                ready.append(i)
        for i in ready:
            state = self.slots[i]
            state.computed = state.prompt_len - 1
            state.pages = self.slots[state.source].pages[: self._pages_for(state.computed)]  # type: ignore[index]
            for page in state.pages:
                self.refs[page] += 1
        for i in ready + alone:
            self.slots[i].source = None
        self.forks += len(ready)

    def _finish(self, reasons: dict[int, int]) -> None:
        for i in sorted(reasons):
            self._release(i)
            self.slots[i].status, self.slots[i].reason, self.slots[i].source = FINISHED, reasons[i], None
        for slot in self.slots:
            if slot.source in reasons:
                slot.source = None

    def _release(self, i: int) -> None:
        for page in reversed(self.slots[i].pages):
            self.refs[page] -= 1
            assert self.refs[page] >= 0
            if self.refs[page] == 0:
                self.free.append(page)
        self.slots[i].pages, self.slots[i].computed = [], 0

    def _pop(self) -> int:
        page = self.free.pop(0)
        assert self.refs[page] == 0
        self.refs[page] = 1
        return page
