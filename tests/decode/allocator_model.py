"""A plain Python model of tables, packing and paging: lists and loops, one sequence at a time.

It says what the vectorised device code must do, in the most obvious way, and is compared with it after every
operation by `test_state_machine.py` and `scripts/fuzz_control.py`.
"""

import collections
import dataclasses
import itertools

from levanter_infer.decode import prefix

FREE, LOADING, SWAPPED, WAITING, RUNNING, FINISHED = range(6)
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
    priority: int = 0
    source: int | None = None
    stop: int | None = None
    root: int = -1

    @property
    def is_live(self) -> bool:
        return self.status in (LOADING, SWAPPED, WAITING, RUNNING)


class PrefixModel:
    """Which page holds which text, by whole texts."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.pages: dict[tuple, int] = {}  # (root, tokens up to the page's end) -> the page that is found
        self.serials: dict[int, int] = {}  # of what a page holds
        self.parents: dict[int, int] = {}  # of pages that are found
        self.count = 0

    def text(self, slot: Slot, column: int) -> tuple:
        return slot.root, tuple(slot.tokens[: (column + 1) * self.page_size])

    def before(self, slot: Slot, column: int) -> int | None:
        return slot.root if column == 0 else self.serials.get(slot.pages[column - 1])

    def find(self, slot: Slot, column: int) -> int | None:
        page = self.pages.get(self.text(slot, column))
        before = self.before(slot, column)
        return page if page is not None and before is not None and self.parents[page] == before else None

    def forget(self, page: int) -> None:
        self.serials.pop(page, None)
        if self.parents.pop(page, None) is not None:
            self.pages = {text: other for text, other in self.pages.items() if other != page}

    def hide(self, page: int) -> None:
        """The page is not found any more; the sequences that hold it still know its contents."""
        if self.parents.pop(page, None) is not None:
            self.pages = {text: other for text, other in self.pages.items() if other != page}

    def register(self, rows: list[tuple[Slot, list[int]]]) -> None:
        """Register the columns that each slot has filled, `_INSERTED` pages at a time."""
        pages = [(slot, column) for slot, columns in rows for column in columns]
        for start in range(0, len(pages), prefix._INSERTED):
            part = pages[start : start + prefix._INSERTED]
            runs = [list(run) for _, run in itertools.groupby(part, key=lambda page: id(page[0]))]
            self._register_part([(run[0][0], [column for _, column in run]) for run in runs])

    def _register_part(self, rows: list[tuple[Slot, list[int]]]) -> None:
        entries, orphans = [], []
        for slot, columns in rows:
            start = self.before(slot, columns[0])
            serial = start
            for column in columns if start is not None else []:
                text = self.text(slot, column)
                page = self.pages.get(text)
                known = page is not None and serial is not None and self.parents[page] == serial
                serial = self.serials[page] if known else None  # type: ignore[index]
                if page is not None and not known:
                    orphans.append(page)
                entries.append((slot, column, text, serial, start if column == columns[0] else None))
        for page in orphans:  # one may precede a run that starts here, which then follows a page that is not found
            self.forget(page)
        added: dict[tuple, tuple[int, int]] = {}  # serial of the first entry with a text, and of the page before it
        number, follows = 0, True
        for slot, column, text, serial, start in entries:
            self.count += 1
            page, older = slot.pages[column], self.pages.get(text)
            before = number if start is None else start
            key = text, serial is None
            is_first = key not in added
            number, expected = added.setdefault(key, (self.count if serial is None else serial, before))
            # The same text after the same text with another serial, which was forgotten and registered again meanwhile:
            # neither this page nor those after it are shared.
            follows = before == expected and (follows or start is not None)
            if not follows or (serial is not None and older == page):  # or written again by its only holder
                continue
            self.serials[page] = number
            if is_first:
                if older is not None:
                    del self.parents[older]
                self.pages[text], self.parents[page] = page, before


class WindowModel:
    """The pages of layers with a sliding window: one for each page that a window reaches into."""

    def __init__(self, window: int, num_pages: int, page_size: int):
        self.window, self.page_size = window, page_size
        self.free = list(range(num_pages))
        self.refs = [0] * num_pages
        self.attached: dict[int, int] = {}  # page -> its window page

    def first(self, computed: int) -> int:
        return max(computed - self.window + 1, 0) // self.page_size

    def seen(self, slot: Slot) -> list[int]:
        """Pages whose window pages a slot holds."""
        return slot.pages[self.first(slot.computed) :]

    def attach(self, pages: list[int]) -> None:
        for page in pages:
            self.attached.pop(page, None)
        for page in pages:
            own = self.free.pop(0)
            assert self.refs[own] == 0
            self.attached = {other: each for other, each in self.attached.items() if each != own}
            self.attached[page], self.refs[own] = own, 1

    def share(self, pages: list[int]) -> None:
        for own in (self.attached[page] for page in pages):
            if self.refs[own] == 0:
                self.free.remove(own)
            self.refs[own] += 1

    def drop(self, pages: list[int]) -> None:
        for own in (self.attached[page] for page in pages):
            self.refs[own] -= 1
            assert self.refs[own] >= 0
            if self.refs[own] == 0:
                self.free.append(own)

    def has(self, pages: list[int]) -> bool:
        return all(page in self.attached for page in pages)

    def reaches(self, pages: list[int]) -> bool:
        """Whether a sequence of these full pages has all that it sees of them."""
        return self.has(pages[self.first(len(pages) * self.page_size) :])


class AllocatorModel:
    def __init__(
        self,
        num_slots: int,
        max_seqs: int,
        num_pages: int,
        page_size: int,
        budget: int,
        prefix_cache: bool = False,
        windows: list[tuple[int, int]] | None = None,
    ):
        self.windows = [WindowModel(*each, page_size) for each in windows or []]
        self.max_seqs, self.page_size, self.budget = max_seqs, page_size, budget
        self.slots = [Slot() for _ in range(num_slots)]
        self.free = list(range(num_pages))
        self.refs = [0] * num_pages
        self.preemptions = self.copied = self.forks = 0
        self.copies: list[tuple[int, int]] = []
        self.prefix = PrefixModel(page_size) if prefix_cache else None
        self.hits = self.misses = self.evictions = 0

    # Operations

    def admit(
        self,
        slot: int,
        tokens,
        max_len: int,
        arrival: int,
        source: int | None,
        stop: int | None,
        root: int = -1,
        priority: int = 0,
    ) -> None:
        assert not self.slots[slot].is_live
        self.slots[slot] = Slot(list(tokens), len(tokens), max_len, status=WAITING, arrival=arrival, source=source)
        self.slots[slot].stop, self.slots[slot].root, self.slots[slot].priority = stop, root, priority

    def cancel(self, slots) -> None:
        self._finish({slot: ABORT for slot in slots if self.slots[slot].is_live})

    def mark_swapped(self, slots: list[int]) -> None:
        """Their pages go to the host."""
        for i in sorted(slots):
            self._release(i)
            self.slots[i].status = SWAPPED

    def swap_in(self, places: dict[int, list[int]], computed: dict[int, int], count: int) -> None:
        """They get pages again: each those of `count` new ones that `places` says."""
        new = [self._pop() for _ in range(count)]
        for page in new:
            self.refs[page] = 0
        for i, own in places.items():
            self.slots[i].pages = [new[place] for place in own]
            self.slots[i].computed, self.slots[i].status = computed[i], WAITING
            for page in self.slots[i].pages:
                self.refs[page] += 1
        for window in self.windows:
            seen = [page for i in places for page in window.seen(self.slots[i])]
            window.attach(sorted(set(seen)))
            for page in seen:
                window.refs[window.attached[page]] += 1
            for page in set(seen):
                window.refs[window.attached[page]] -= 1

    def fits_windows(self, members) -> bool:
        """Whether there are window pages for slots that come back. Args: members: pages and computed tokens of each."""
        return all(
            len({page for held, computed in members for page in held[window.first(computed) :]}) <= len(window.free)
            for window in self.windows
        )

    @property
    def num_free(self) -> int:
        return min(len(each.free) for each in [self, *self.windows])

    def host_call(self, return_pages: int, max_new_pages: int) -> int:
        """0 nothing, 1 pages run short, 2 the first that was offloaded fits again or no other sequence runs."""
        running = [i for i, s in enumerate(self.slots) if s.status == RUNNING]
        need = [self._need(i, min(len(self.slots[i].tokens) - self.slots[i].computed, self.budget)) for i in running]
        if min(sum(need), max_new_pages) > self.num_free:
            return 1
        if not any(s.status == SWAPPED for s in self.slots) or self._starters():
            return 0
        goes_on = [s for s in self.slots if s.status == RUNNING or (s.status == WAITING and s.computed)]
        fits = return_pages <= len(self.free) - sum(self._growth(s) for s in goes_on) and len(running) < self.max_seqs
        return 2 if fits or not running else 0

    def resample(self, ancestors: dict[int, int], arrivals: list[int]) -> None:
        """Slots go on from their ancestors, in the order of `arrivals`, one a slot."""
        before = [dataclasses.replace(slot, pages=list(slot.pages)) for slot in self.slots]
        moves = {i: before[ancestor] for i, ancestor in sorted(ancestors.items()) if i != ancestor}
        given_back = []
        for i, ancestor in moves.items():
            slot, old = self.slots[i], before[i].pages
            same = [a == b for a, b in zip(old, ancestor.pages, strict=False)]
            first = same.index(False) if False in same else len(same)
            for page in ancestor.pages[first:]:
                self.refs[page] += 1
            given_back += reversed(old[first:])
            slot.tokens, slot.pages = list(ancestor.tokens), list(ancestor.pages)
            for name in ("prompt_len", "max_len", "computed", "root", "reason", "priority", "stop"):
                setattr(slot, name, getattr(ancestor, name))
            slot.status = slot.status if slot.is_live else WAITING
            slot.status = slot.status if ancestor.is_live else ancestor.status
        for i in ancestors:
            self.slots[i].arrival = arrivals[i]
        for page in given_back:
            self._drop(page)
        for window in self.windows:
            for i in moves:
                window.share(window.seen(moves[i]))
            for i in moves:
                window.drop(window.seen(before[i])[::-1])
        for i, slot in enumerate(self.slots):
            if i in moves or slot.source in moves:
                slot.source = None

    def step(self, sampled, finite) -> list[int]:
        """One step; `sampled[row]` is what row `row` would sample. Returns the slots in the order of their rows."""
        self._start_waiting()
        self._reuse_pages()
        take = self._choose_tokens(self._waits())
        take = self._preempt(take)
        self._take_pages(take)
        rows = self._rows(take)
        done = {}
        filled = self._compute(take)
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
        self._register(filled, {slot for slot, reason in done.items() if reason == ERROR})
        self._fork_when_ready()
        self._finish(done)
        return rows

    # The parts of a step

    def _order(self) -> list[int]:
        return sorted(
            (i for i, s in enumerate(self.slots) if s.is_live),
            key=lambda i: (self.slots[i].priority, self.slots[i].arrival),
        )

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _start_waiting(self) -> None:
        need = self._growth
        running = [s for s in self.slots if s.status == RUNNING]
        available = len(self.free) - sum(need(s) for s in running)
        places = self.max_seqs - len(running)
        for rank, i in enumerate(self._starters()):
            available -= need(self.slots[i])
            if rank < places and (available >= 0 or (not running and rank == 0)):
                self.slots[i].status = RUNNING

    def _growth(self, slot: Slot) -> int:
        return max(self._pages_for(len(slot.tokens) + 1) + 1 - len(slot.pages), 0)

    def _starters(self) -> list[int]:
        """Those that are ready and stand before the first that was offloaded."""
        before = itertools.takewhile(lambda i: self.slots[i].status != SWAPPED, self._order())
        return [i for i in before if i in self._ready()]

    def _ready(self) -> list[int]:
        return [i for i in self._order() if self.slots[i].status == WAITING and self.slots[i].source is None]

    def _shareable(self, slot: Slot) -> int:
        return (len(slot.tokens) - 1) // self.page_size - slot.computed // self.page_size

    def _reuse_pages(self) -> None:
        if self.prefix is None:
            return
        running = [i for i in self._order() if self.slots[i].status == RUNNING]
        ready = self._ready()[:1] if len(running) < self.max_seqs else []
        held = {page for page, count in enumerate(self.refs) if count}
        before = [(slot.computed, list(slot.pages)) for slot in self.slots]
        for slot in (self.slots[i] for i in self._order() if i in running + ready):
            while slot.computed % self.page_size == 0 and self._shareable(slot) > 0:
                page = self.prefix.find(slot, slot.computed // self.page_size)
                if page is None or (slot.status != RUNNING and page not in held):
                    break
                slot.pages.append(page)
                slot.computed += self.page_size
        moved = {i: old for i, old in enumerate(before) if self.slots[i].computed > old[0]}
        for i, (computed, pages) in list(moved.items()):
            slot = self.slots[i]
            while slot.computed > computed and not all(each.reaches(slot.pages) for each in self.windows):
                slot.pages.pop()
                slot.computed -= self.page_size
            for page in slot.pages[len(pages) :]:
                if page in self.free:
                    self.free.remove(page)
                self.refs[page] += 1
                self.hits += 1
            if slot.computed == computed:
                del moved[i]
        for window in self.windows:
            for i, (_, pages) in moved.items():
                window.share(self.slots[i].pages[max(window.first(self.slots[i].computed), len(pages)) :])
            for i, (computed, pages) in moved.items():
                window.drop(pages[window.first(computed) : window.first(self.slots[i].computed)][::-1])

    def _waits(self) -> set[int]:
        """Slots at the start of a page that another one has partly computed, or that an older one starts too."""
        groups = collections.defaultdict(list)
        for i in self._order() if self.prefix else []:
            slot = self.slots[i]
            column = slot.computed // self.page_size
            if slot.status == RUNNING and self._shareable(slot) > 0 and self.prefix.before(slot, column) is not None:
                groups[self.prefix.before(slot, column), self.prefix.text(slot, column)].append(i)
        waits = set()
        for slots in groups.values():
            begun = [i for i in slots if self.slots[i].computed % self.page_size]
            waits |= {i for i in slots if i not in begun and (begun or i != slots[0])}
        return waits

    def _compute(self, take: dict[int, int]) -> dict[int, list[int]]:
        """Returns: the columns of the pages that each slot has filled."""
        filled = {}
        for i in sorted(take):
            slot = self.slots[i]
            columns = list(range(slot.computed // self.page_size, (slot.computed + take[i]) // self.page_size))
            self.misses += len(columns) if take[i] > 1 else 0
            slot.computed += take[i]
            if columns:
                filled[i] = columns
        for window in self.windows:
            for i in sorted(take):
                first, end = (window.first(self.slots[i].computed - n) for n in (take[i], 0))
                window.drop(self.slots[i].pages[first:end][::-1])
        return filled

    def _register(self, filled: dict[int, list[int]], failed: set[int]) -> None:
        if self.prefix is not None:
            self.prefix.register([(self.slots[i], columns) for i, columns in filled.items() if i not in failed])
            for i in failed:
                for page in self.slots[i].pages:
                    self.prefix.hide(page)

    def _choose_tokens(self, waits: set[int]) -> dict[int, int]:
        running = [i for i in self._order() if self.slots[i].status == RUNNING and i not in waits]
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
        if sum(need.values()) <= self.num_free:
            return take

        def fits(k: int) -> bool:
            kept = {page for i in order[:k] for page in self.slots[i].pages}
            released = {page for i in order[k:] for page in self.slots[i].pages} - kept
            wanted = sum(need[i] for i in order[:k])
            for window in self.windows:
                seen = [{page for i in part for page in window.seen(self.slots[i])} for part in (order[:k], order[k:])]
                if wanted > len(window.free) + len(seen[1] - seen[0]):
                    return False
            return wanted <= len(self.free) + len(released)

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
        taken = []
        for i in sorted(take):
            state = self.slots[i]
            new = self._pages_for(state.computed + take[i]) - self._pages_for(state.computed)
            if i in copies:
                state.pages[-1] = self._pop()
                self.copies.append((copies[i], state.pages[-1]))
                taken.append(state.pages[-1])
            state.pages += [self._pop() for _ in range(new)]
            taken += state.pages[len(state.pages) - new :]
        for page in copies.values():
            self.refs[page] -= 1
        for window in self.windows:
            window.attach(taken)
            window.drop([copies[i] for i in sorted(copies)])
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
                held = parent.pages[: self._pages_for(lens)]
                (ready if all(each.has(held[each.first(lens) :]) for each in self.windows) else alone).append(i)
        for i in ready:
            state = self.slots[i]
            state.computed = state.prompt_len - 1
            state.pages = self.slots[state.source].pages[: self._pages_for(state.computed)]  # type: ignore[index]
            for page in state.pages:
                self.refs[page] += 1
            for window in self.windows:
                window.share(window.seen(state))
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
            self._drop(page)
        for window in self.windows:
            window.drop(window.seen(self.slots[i])[::-1])
        self.slots[i].pages, self.slots[i].computed = [], 0

    def _drop(self, page: int) -> None:
        self.refs[page] -= 1
        assert self.refs[page] >= 0
        if self.refs[page] == 0:
            self.free.append(page)

    def _pop(self) -> int:
        page = self.free.pop(0)
        assert self.refs[page] == 0
        self.refs[page] = 1
        if self.prefix is not None:
            self.evictions += page in self.prefix.parents
            self.prefix.forget(page)
        return page
