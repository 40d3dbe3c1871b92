"""`KvOffload`: which request is preempted when pages run short, where its pages are meanwhile, and which comes back."""

import dataclasses
import logging
import time
from collections.abc import Sequence

import jax
import numpy as np

from levanter_infer.cache.page_math import page_of, pages_for
from levanter_infer.decode.codes import FINISHED, FREE, LOADING, RUNNING, SWAPPED, WAITING
from levanter_infer.decode.kv_offload import NO_CALL, SHORT, HostTerms, WindowSnapshot
from levanter_infer.engine.metrics import Registry
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.engine.runner import Runner, host_terms
from levanter_infer.runtime.memory import default_host_bytes

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Member:
    """One sequence of a record."""

    sequence: SampleState
    slot: int
    places: np.ndarray
    """Indices of its pages among the record's, in logical order."""
    computed: int
    growth: int
    """Pages that it will need beyond these."""

    @property
    def is_there(self) -> bool:
        """Whether it still has something to come back for."""
        return self.sequence.slot == self.slot and self.sequence.finish_reason is None

    @property
    def has_prompt(self) -> bool:
        """Whether all of its prompt was computed."""
        return self.computed >= len(self.sequence.request.prompt_token_ids)


@dataclasses.dataclass
class _WindowContents:
    """Pages of a record in the layers with one sliding window."""

    places: np.ndarray
    """Indices among the record's pages, of those that the windows of its sequences reach into."""
    contents: list[tuple[jax.Array, ...]]
    """Window pages of these, from `read_window_pages`, in host memory."""


@dataclasses.dataclass(eq=False)
class _Record:
    """Sequences of one request that left the pool together. Pages that several of them hold are there once."""

    members: list[_Member]
    contents: list[tuple[jax.Array, ...]]
    """Pages from `read_pages`, in host memory; empty if the pages are to be recomputed."""
    stays: bool
    """Whether it comes back only when the caller asks for it."""
    windows: list["_WindowContents"] = dataclasses.field(default_factory=list)
    """As `Shapes.windows`."""

    @property
    def nbytes(self) -> int:
        arrays = [self.contents, [each.contents for each in self.windows]]
        return sum(array.nbytes for array in jax.tree.leaves(arrays))

    def remaining(self) -> list[_Member]:
        return [member for member in self.members if member.is_there]

    def used(self) -> np.ndarray:
        """The pages that its remaining sequences need, in order."""
        return np.unique(np.concatenate([member.places for member in self.remaining()]))

    def order(self) -> tuple[int, int]:
        """Smallest first: as the device orders sequences."""
        return min((member.sequence.request.priority, member.sequence.arrival) for member in self.remaining())

    def return_pages(self) -> int:
        """Pages that it needs to come back and go on."""
        return len(self.used()) + sum(member.growth for member in self.remaining())


class _Tables:
    """The tables as they are between two rounds, on the host; kept up with what is moved."""

    def __init__(self, runner: Runner):
        for name, array in runner.table_snapshot().items():
            setattr(self, name, array)
        self.shapes = runner.shapes
        self.page_size = runner.shapes.page_size
        self.free = int((self.ref_counts == 0).sum())
        self.free_of_windows = [int((each.ref_counts == 0).sum()) for each in self.windows]

    status: np.ndarray
    rank: np.ndarray
    is_ready: np.ndarray
    goes_on: np.ndarray
    computed: np.ndarray
    growth: np.ndarray
    page_indices: np.ndarray
    ref_counts: np.ndarray
    windows: tuple[WindowSnapshot, ...]
    """With NumPy arrays."""

    @property
    def spare(self) -> int:
        """Free pages beyond those that running sequences will need; below zero if they do not suffice."""
        return self.free - int(self.growth[self.goes_on].sum())

    @property
    def num_running(self) -> int:
        return int((self.status == RUNNING).sum())

    def pages_of(self, slot: int) -> np.ndarray:
        return self.page_indices[slot, : pages_for(int(self.computed[slot]), self.page_size)]

    def seen(self, number: int, computed: int) -> int:
        """The first column that the window of this number reaches into, of a sequence with `computed` tokens."""
        return page_of(max(computed - (self.shapes.windows[number].window - 1), 0), self.page_size)

    def release(self, slots: list[int], status: int) -> None:
        for slot in slots:
            pages = self.pages_of(slot)
            self.ref_counts[pages] -= 1
            self.free += int((self.ref_counts[pages] == 0).sum())
            for number, each in enumerate(self.windows):
                own = each.attached[pages[self.seen(number, int(self.computed[slot])) :]]
                each.ref_counts[own] -= 1
                self.free_of_windows[number] += int((each.ref_counts[own] == 0).sum())
        self.computed[slots], self.goes_on[slots], self.status[slots] = 0, False, status

    def fits(self, record: _Record, max_seqs: int) -> bool:
        """Whether a record can come back and go on; if no other sequence runs, it may be without pages to grow."""
        for number, free in enumerate(self.free_of_windows):
            if record.contents and len(self.window_places(record.remaining(), number)) > free:
                return False
        if self.num_running == 0:
            return len(record.used()) <= self.free
        return record.return_pages() <= self.spare and self.num_running < max_seqs

    def window_places(self, members: list[_Member], number: int) -> np.ndarray:
        """Indices among a record's pages of those that the windows of `members` reach into, in order."""
        return np.unique(np.concatenate([each.places[self.seen(number, each.computed) :] for each in members]))


class KvOffload:
    """Moves pages between the pool and host memory, between rounds and with none in flight.

    The youngest request is preempted as a whole, and the first that was preempted comes back first.
    """

    def __init__(self, runner: Runner, registry: Registry, max_bytes: int | None):
        self._runner, self._registry, self._max_bytes = runner, registry, max_bytes
        self._shapes = runner.shapes
        self._records: list[_Record] = []
        self._call = NO_CALL
        self._yields = True
        self._count()

    # Signals from the device and to it

    def on_round(self, call: int) -> None:
        """Args: call: what the round asks for, see `decode.kv_offload.host_call`."""
        self._call = call
        self.forget_finished()

    @property
    def is_called(self) -> bool:
        return self._call != NO_CALL

    def terms(self) -> dict[str, HostTerms]:
        """The field of the next `Admission`; nothing where it is as in `empty_admission`."""
        first = self._first()
        if not self._shapes.offload or (self._yields and first is None):
            return {}
        yields, self._yields = self._yields, True
        return {"host": host_terms(yields=yields, return_pages=first.return_pages() if first is not None else 0)}

    def _first(self) -> _Record | None:
        """The one that comes back next. Deadlines may have ended others since the last round was read."""
        returning = (record for record in self._records if not record.stays and record.remaining())
        return min(returning, key=_Record.order, default=None)

    def forget_finished(self) -> None:
        """Give back the memory of those that were cancelled."""
        self._records = [record for record in self._records if record.remaining()]
        self._count()

    # Policy

    def move(self, sequences: Sequence[SampleState]) -> None:
        """Do what the device asked for. If nothing can be done, the next round gets on by itself."""
        start, short = time.perf_counter(), self._call == SHORT
        self._call = NO_CALL
        tables = _Tables(self._runner)
        before = len(self._records)
        if short:
            self._make_room(tables, sequences)
        else:
            self._let_back(tables)
        self._yields = len(self._records) != before
        self._registry.add("offload_s" if short else "prefetch_s", time.perf_counter() - start)

    def _make_room(self, tables: _Tables, sequences: Sequence[SampleState]) -> None:
        """Swap requests out, the last in order first, until the others have free pages to grow.

        If only the first request is left, its last sequences are preempted one by one, and its first one never is.
        """
        holders = [s for s in sequences if s.slot is not None and tables.computed[s.slot] > 0]
        holders.sort(key=lambda sequence: tables.rank[sequence.slot])
        by_request: dict[RequestState, list[SampleState]] = {}
        for sequence in holders:
            by_request.setdefault(sequence.request, []).append(sequence)
        requests = list(by_request.values())
        rest = [[sequence] for own in requests[:1] for sequence in reversed(own[1:]) if own[0].request.is_loose]
        for leaving in [*reversed(requests[1:]), *rest]:
            if tables.spare >= 0:
                break
            leaving = [sequence for sequence in leaving if sequence.finish_reason is None]
            if leaving and not self._move_out(tables, leaving, stays=False):
                break

    def _let_back(self, tables: _Tables) -> None:
        """Bring records back in order while they fit. If no running sequence will free pages, recompute the first."""
        while (first := self._first()) is not None:
            rank = tables.rank[[member.slot for member in first.remaining()]].min()
            if (tables.is_ready & (tables.rank < rank)).any():
                break
            if tables.fits(first, self._shapes.max_seqs):
                self._move_in(tables, first)
            elif tables.num_running == 0:
                self._give_up(tables, first)
            else:
                break

    # By hand

    def swap_out(self, sequence: SampleState) -> int:
        """`InferenceEngine.spill_to_host`."""
        if not sequence.request.is_loose:
            raise ValueError(
                "the beams of a search stay together, and one of them cannot be swapped out to host memory"
            )
        start, tables = time.perf_counter(), _Tables(self._runner)
        slot = sequence.slot
        record = self._record_of(sequence)
        if record is not None:
            record.stays = True
            slots = [member.slot for member in record.remaining()]
            self._mark_swapped(slots, LOADING)
            return len(record.used())
        if slot is None or sequence.finish_reason is not None or tables.computed[slot] == 0:
            return 0
        if not FREE < tables.status[slot] < FINISHED:
            return 0
        pages = len(tables.pages_of(slot))
        if not self._move_out(tables, [sequence], stays=True):
            raise ValueError(
                f"{pages} pages do not fit into the host memory for KV offload: {self._used_bytes()} of its "
                f"{self._max_bytes} bytes are in use; bring sequences back, or raise engine.host_bytes"
            )
        self._registry.add("offload_s", time.perf_counter() - start)
        return pages

    def prefetch(self, sequence: SampleState) -> None:
        """`InferenceEngine.prefetch`."""
        record = self._record_of(sequence)
        if record is None:
            raise ValueError("the sequence is not in host memory; spill_to_host brings it there")
        self._recall(record)

    def begin_anew(self, request: RequestState) -> None:
        """Let a request's sequences that are here compute themselves again: their texts are about to change."""
        tables = _Tables(self._runner) if self._records else None
        for record in list(self._records):
            if tables is not None and any(member.sequence.request is request for member in record.remaining()):
                self._give_up(tables, record)

    def swapped_slots(self) -> list[int]:
        """Slots whose pages are here."""
        return [member.slot for record in self._records for member in record.remaining() if record.contents]

    def recall(self) -> None:
        """Bring back the sequences that the caller swapped out."""
        for record in [record for record in self._records if record.stays]:
            self._recall(record)

    def _recall(self, record: _Record) -> None:
        start, tables = time.perf_counter(), _Tables(self._runner)
        record.stays = False
        if tables.fits(record, self._shapes.max_seqs):
            self._move_in(tables, record)
        elif self._shapes.offload:
            self._mark_swapped([member.slot for member in record.remaining()], SWAPPED)
        else:
            self._give_up(tables, record)
        self._registry.add("prefetch_s", time.perf_counter() - start)

    def _record_of(self, sequence: SampleState) -> _Record | None:
        return next((r for r in self._records if any(m.sequence is sequence for m in r.remaining())), None)

    # Moving

    def _move_out(self, tables: _Tables, sequences: list[SampleState], *, stays: bool) -> bool:
        """Copy the pages of samples of one request to host memory and free them; False if host memory is full."""
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        held = [tables.pages_of(slot) for slot in slots]
        pages, places = np.unique(np.concatenate(held), return_inverse=True)
        ends = np.cumsum([len(own) for own in held])
        members = [
            _Member(sequence, slot, own, int(tables.computed[slot]), int(tables.growth[slot]))
            for sequence, slot, own in zip(sequences, slots, np.split(places.reshape(-1), ends[:-1]), strict=True)
        ]
        # Scores are not moved, so a prompt that is scored is recomputed
        anew = any(member.sequence.request.awaits_scores and not member.has_prompt for member in members)
        of_windows = [tables.window_places(members, number) for number in range(len(tables.windows))]
        found = ([], []) if anew else self._read(pages, of_windows)
        if found is None:
            return False
        self._records.append(_Record(members, found[0], stays, found[1]))
        status = LOADING if stays else SWAPPED
        tables.release(slots, status)
        self._registry.add("offloaded_pages", 0 if anew else len(pages))
        self._count()
        self._mark_swapped(slots, status)
        return True

    def _read(
        self, pages: np.ndarray, of_windows: list[np.ndarray]
    ) -> tuple[list[tuple[jax.Array, ...]], list[_WindowContents]] | None:
        """The contents of `pages` in host memory, and of those at `of_windows` in the layers of each window; None if
        they do not fit there."""
        if self._max_bytes is None:
            self._max_bytes = default_host_bytes()
        width, none = self._shapes.transfer_pages, self._shapes.num_pages
        parts = [_chunks(part, width, none) for part in (pages, *(pages[places] for places in of_windows))]
        sizes = zip(parts, self._runner.page_bytes, strict=True)
        if self._used_bytes() + sum(len(chunks) * width * each for chunks, each in sizes) > self._max_bytes:
            return None
        try:
            contents = [[self._runner.read_pages(chunk, group) for chunk in part] for group, part in enumerate(parts)]
            windows = [_WindowContents(*pair) for pair in zip(of_windows, contents[1:], strict=True)]
            return contents[0], windows
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._max_bytes = self._used_bytes()
            logger.warning("KV offload uses %d bytes of host memory and no more: %s", self._max_bytes, error)
            return None

    def _move_in(self, tables: _Tables, record: _Record) -> None:
        """Bring a record back. Requires: as many pages are free as it uses."""
        if not record.contents:
            self._give_up(tables, record)
            return
        none, used = self._shapes.num_pages, record.used()
        new = np.full(len(record.contents) * self._shapes.transfer_pages, none, np.int32)
        new[used] = np.arange(len(used), dtype=np.int32)
        pages = self._swap_in_tables(tables, record.remaining(), new, len(used))
        width = self._shapes.transfer_pages
        for contents, chunk in zip(record.contents, _chunks(new, width, none), strict=True):
            self._runner.write_pages(contents, pages, chunk)
        for number, window in enumerate(record.windows):
            seen = tables.window_places(record.remaining(), number)
            # What only sequences that have ended meanwhile could see stays behind.
            places = np.where(np.isin(window.places, seen), new[window.places], none)
            for contents, chunk in zip(window.contents, _chunks(places, width, none), strict=True):
                self._runner.write_pages(contents, pages, chunk, number + 1)
            tables.free_of_windows[number] -= len(seen)
        self._drop(tables, record, RUNNING)
        tables.free -= len(used)
        self._registry.add("prefetched_pages", len(used))

    def _give_up(self, tables: _Tables, record: _Record) -> None:
        """Let a record's sequences compute themselves again."""
        self._registry.add("recomputed_tokens", sum(member.computed for member in record.remaining()))
        self._drop(tables, record, WAITING)
        self._swap_in_tables(tables, record.remaining(), None, 0)

    def _drop(self, tables: _Tables, record: _Record, status: int) -> None:
        """Forget a record; for what is decided next, its sequences have `status`."""
        for member in record.remaining():
            tables.status[member.slot], tables.goes_on[member.slot] = status, status == RUNNING
            tables.growth[member.slot], tables.is_ready[member.slot] = member.growth, status == WAITING
        self._records.remove(record)
        self._count()

    def _swap_in_tables(self, tables: _Tables, members: list[_Member], new: np.ndarray | None, count: int) -> jax.Array:
        """Args: new: for each page of the record, which of the `count` ones it becomes; None: they are recomputed."""
        shapes = self._shapes
        mask, computed = np.zeros(shapes.num_slots, bool), np.zeros(shapes.num_slots, np.int32)
        places = np.full(tables.page_indices.shape, shapes.num_pages, np.int32)
        for member in members:
            mask[member.slot] = True
            if new is not None:
                computed[member.slot] = member.computed
                places[member.slot, : len(member.places)] = new[member.places]
        return self._runner.swap_in(mask, places, computed, count)

    def _mark_swapped(self, slots: list[int], status: int) -> None:
        mask = np.zeros(self._shapes.num_slots, bool)
        mask[slots] = True
        self._runner.mark_swapped(mask, status)

    def _used_bytes(self) -> int:
        return sum(record.nbytes for record in self._records)

    def _count(self) -> None:
        self._registry.set("offloaded_sequences", sum(len(record.remaining()) for record in self._records))
        self._registry.set("offloaded_bytes", self._used_bytes())


def _chunks(values: np.ndarray, size: int, none: int) -> list[np.ndarray]:
    """`values` in arrays of `size`, the last one filled up with `none`."""
    padded = np.full(-(-len(values) // size) * size, none, np.int32)
    padded[: len(values)] = values
    return list(padded.reshape(-1, size))
