"""`KvOffload`: who gives way when pages run short, where its pages are meanwhile, and who comes back next."""

import dataclasses
import logging
import time
from collections.abc import Sequence as Many

import jax
import numpy as np

from levanter_infer.cache.page_math import pages_for
from levanter_infer.decode.codes import FINISHED, FREE, LOADING, RUNNING, SWAPPED, WAITING
from levanter_infer.decode.kv_offload import NO_CALL, SHORT, HostTerms
from levanter_infer.decode.programs import OffloadPrograms
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import GenState
from levanter_infer.engine.metrics import Registry
from levanter_infer.engine.sequence import Group, Sequence
from levanter_infer.runtime.memory import default_host_bytes

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Member:
    """One sequence of a record."""

    sequence: Sequence
    slot: int
    places: np.ndarray
    """Which of the record's pages it holds, in logical order."""
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
        return self.computed >= len(self.sequence.group.prompt_token_ids)


@dataclasses.dataclass(eq=False)
class _Record:
    """Sequences of one group that left the pool together. Pages that several of them hold are there once."""

    members: list[_Member]
    contents: list[jax.Array]
    """What `read_pages` gave, in the host's memory; nothing if they are to be computed again."""
    stays: bool
    """Whether it comes back only when somebody asks for it."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.contents)

    def remaining(self) -> list[_Member]:
        return [member for member in self.members if member.is_there]

    def used(self) -> np.ndarray:
        """Which of the pages anybody will want again, in order."""
        return np.unique(np.concatenate([member.places for member in self.remaining()]))

    def order(self) -> tuple[int, int]:
        """Smallest first: as the device orders sequences."""
        return min((member.sequence.group.priority, member.sequence.arrival) for member in self.remaining())

    def return_pages(self) -> int:
        """Pages that it needs to come back and go on."""
        return len(self.used()) + sum(member.growth for member in self.remaining())


class _Tables:
    """The tables as they are between two rounds, on the host; kept up with what is moved."""

    def __init__(self, programs: OffloadPrograms, state: GenState):
        snapshot = programs.snapshot(state.decode)
        for name, array in jax.device_get(dataclasses.asdict(snapshot)).items():
            setattr(self, name, np.array(array))
        self.page_size = state.decode.page_table.page_size
        self.free = int((self.ref_counts == 0).sum())

    status: np.ndarray
    rank: np.ndarray
    is_ready: np.ndarray
    goes_on: np.ndarray
    computed: np.ndarray
    growth: np.ndarray
    page_indices: np.ndarray
    ref_counts: np.ndarray

    @property
    def spare(self) -> int:
        """Free pages beyond those that everybody who goes on will need; below zero if they do not suffice."""
        return self.free - int(self.growth[self.goes_on].sum())

    @property
    def num_running(self) -> int:
        return int((self.status == RUNNING).sum())

    def pages_of(self, slot: int) -> np.ndarray:
        return self.page_indices[slot, : pages_for(int(self.computed[slot]), self.page_size)]

    def release(self, slots: list[int], status: int) -> None:
        for slot in slots:
            pages = self.pages_of(slot)
            self.ref_counts[pages] -= 1
            self.free += int((self.ref_counts[pages] == 0).sum())
        self.computed[slots], self.goes_on[slots], self.status[slots] = 0, False, status

    def fits(self, record: _Record, max_seqs: int) -> bool:
        """Whether a record can come back and go on; if nobody else goes on, it may be without room to grow."""
        if self.num_running == 0:
            return len(record.used()) <= self.free
        return record.return_pages() <= self.spare and self.num_running < max_seqs


class KvOffload:
    """Moves pages between the pool and the host's memory, between rounds and with none under way.

    The youngest group gives way as a whole, and the first that left comes back first. Each operation takes the programs
    and the state, and returns the new state.
    """

    def __init__(self, shapes: Shapes, registry: Registry, max_bytes: int | None):
        self._shapes, self._registry, self._max_bytes = shapes, registry, max_bytes
        self._records: list[_Record] = []
        self._call = NO_CALL
        self._yields = True
        self._count()

    # What the device says, and is told

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

    def move(self, programs: OffloadPrograms, state: GenState, sequences: Many[Sequence]) -> GenState:
        """Do what the device asked for. If nothing can be done, the next round gets on by itself."""
        start, short = time.perf_counter(), self._call == SHORT
        self._call = NO_CALL
        tables = _Tables(programs, state)
        before = len(self._records)
        state = (
            self._make_room(programs, state, tables, sequences) if short else self._let_back(programs, state, tables)
        )
        self._yields = len(self._records) != before
        self._registry.add("offload_s" if short else "prefetch_s", time.perf_counter() - start)
        return state

    def _make_room(
        self, programs: OffloadPrograms, state: GenState, tables: _Tables, sequences: Many[Sequence]
    ) -> GenState:
        """Spill groups, the last in order first, until the others have room to grow.

        If only the first group is left, its last sequences give way one by one; its first one never does.
        """
        holders = [s for s in sequences if s.slot is not None and tables.computed[s.slot] > 0]
        holders.sort(key=lambda sequence: tables.rank[sequence.slot])
        by_group: dict[Group, list[Sequence]] = {}
        for sequence in holders:
            by_group.setdefault(sequence.group, []).append(sequence)
        groups = list(by_group.values())
        rest = [[sequence] for group in groups[:1] for sequence in reversed(group[1:]) if group[0].group.is_loose]
        for leaving in [*reversed(groups[1:]), *rest]:
            if tables.spare >= 0:
                break
            leaving = [sequence for sequence in leaving if sequence.finish_reason is None]
            swapped = self._move_out(programs, state, tables, leaving, stays=False) if leaving else state
            if swapped is None:
                break
            state = swapped
        return state

    def _let_back(self, programs: OffloadPrograms, state: GenState, tables: _Tables) -> GenState:
        """Bring records back in order while they fit. What nobody makes room for any more is computed again."""
        while (first := self._first()) is not None:
            rank = tables.rank[[member.slot for member in first.remaining()]].min()
            if (tables.is_ready & (tables.rank < rank)).any():
                break
            if tables.fits(first, self._shapes.max_seqs):
                state = self._move_in(programs, state, tables, first)
            elif tables.num_running == 0:
                state = self._give_up(programs, state, tables, first)
            else:
                break
        return state

    # By hand

    def swap_out(self, programs: OffloadPrograms, state: GenState, sequence: Sequence) -> tuple[GenState, int]:
        """`InferenceEngine.spill_to_host`."""
        if not sequence.group.is_loose:
            raise ValueError(
                "the beams of a search stay together, and one of them cannot be moved to the host's memory"
            )
        start, tables = time.perf_counter(), _Tables(programs, state)
        slot = sequence.slot
        record = self._record_of(sequence)
        if record is not None:
            record.stays = True
            slots = [member.slot for member in record.remaining()]
            return self._mark_swapped(programs, state, slots, LOADING), len(record.used())
        if slot is None or sequence.finish_reason is not None or tables.computed[slot] == 0:
            return state, 0
        if not FREE < tables.status[slot] < FINISHED:
            return state, 0
        pages = len(tables.pages_of(slot))
        swapped = self._move_out(programs, state, tables, [sequence], stays=True)
        if swapped is None:
            raise ValueError(
                f"{pages} pages do not fit into the host's memory for pages: {self._used_bytes()} of "
                f"{self._max_bytes} bytes are in use; bring sequences back, or raise engine.host_bytes"
            )
        self._registry.add("offload_s", time.perf_counter() - start)
        return swapped, pages

    def prefetch(self, programs: OffloadPrograms, state: GenState, sequence: Sequence) -> GenState:
        """`InferenceEngine.prefetch`."""
        record = self._record_of(sequence)
        if record is None:
            raise ValueError("the sequence is not in the host's memory; spill_to_host brings it there")
        return self._recall(programs, state, record)

    def begin_anew(self, programs: OffloadPrograms, state: GenState, group: Group) -> GenState:
        """Let a group's sequences that are here compute themselves again: their texts are about to change."""
        tables = _Tables(programs, state) if self._records else None
        for record in list(self._records):
            if tables is not None and any(member.sequence.group is group for member in record.remaining()):
                state = self._give_up(programs, state, tables, record)
        return state

    def swapped_slots(self) -> list[int]:
        """Slots whose pages are here."""
        return [member.slot for record in self._records for member in record.remaining() if record.contents]

    def recall(self, programs: OffloadPrograms, state: GenState) -> GenState:
        """Let everybody come back who left by hand."""
        for record in [record for record in self._records if record.stays]:
            state = self._recall(programs, state, record)
        return state

    def _recall(self, programs: OffloadPrograms, state: GenState, record: _Record) -> GenState:
        start, tables = time.perf_counter(), _Tables(programs, state)
        record.stays = False
        if tables.fits(record, self._shapes.max_seqs):
            state = self._move_in(programs, state, tables, record)
        elif self._shapes.offload:
            state = self._mark_swapped(programs, state, [member.slot for member in record.remaining()], SWAPPED)
        else:
            state = self._give_up(programs, state, tables, record)
        self._registry.add("prefetch_s", time.perf_counter() - start)
        return state

    def _record_of(self, sequence: Sequence) -> _Record | None:
        return next((r for r in self._records if any(m.sequence is sequence for m in r.remaining())), None)

    # Moving

    def _move_out(
        self, programs: OffloadPrograms, state: GenState, tables: _Tables, sequences: list[Sequence], *, stays: bool
    ) -> GenState | None:
        """Copy the pages of sequences of one group to the host's memory and give them back; None if it is full."""
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        held = [tables.pages_of(slot) for slot in slots]
        pages, places = np.unique(np.concatenate(held), return_inverse=True)
        ends = np.cumsum([len(own) for own in held])
        members = [
            _Member(sequence, slot, own, int(tables.computed[slot]), int(tables.growth[slot]))
            for sequence, slot, own in zip(sequences, slots, np.split(places.reshape(-1), ends[:-1]), strict=True)
        ]
        # Scores stay behind, so a prompt that is scored begins anew
        anew = any(member.sequence.group.awaits_scores and not member.has_prompt for member in members)
        contents = [] if anew else self._read(programs, state, pages)
        if contents is None:
            return None
        self._records.append(_Record(members, contents, stays))
        status = LOADING if stays else SWAPPED
        tables.release(slots, status)
        self._registry.add("offloaded_pages", 0 if anew else len(pages))
        self._count()
        return self._mark_swapped(programs, state, slots, status)

    def _read(self, programs: OffloadPrograms, state: GenState, pages: np.ndarray) -> list[jax.Array] | None:
        """The contents of `pages` in the host's memory; None if they do not fit there."""
        if self._max_bytes is None:
            self._max_bytes = default_host_bytes()
        kv, width = state.kv, self._shapes.transfer_pages
        page_bytes = kv.pages.array.nbytes // kv.num_pages
        chunks = _chunks(pages, width, kv.num_pages)
        if self._used_bytes() + len(chunks) * width * page_bytes > self._max_bytes:
            return None
        try:
            return [programs.read_pages(kv, jax.device_put(chunk)) for chunk in chunks]
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._max_bytes = self._used_bytes()
            logger.warning("the host's memory for pages ends at %d bytes: %s", self._max_bytes, error)
            return None

    def _move_in(self, programs: OffloadPrograms, state: GenState, tables: _Tables, record: _Record) -> GenState:
        """Bring a record back. Requires: as many pages are free as it uses."""
        if not record.contents:
            return self._give_up(programs, state, tables, record)
        none, used = self._shapes.num_pages, record.used()
        new = np.full(len(record.contents) * self._shapes.transfer_pages, none, np.int32)
        new[used] = np.arange(len(used), dtype=np.int32)
        state, pages = self._swap_in_tables(programs, state, record.remaining(), new, len(used))
        kv = state.kv
        for contents, chunk in zip(record.contents, _chunks(new, self._shapes.transfer_pages, none), strict=True):
            kv = programs.write_pages(kv, contents, pages, jax.device_put(chunk))
        self._drop(tables, record, RUNNING)
        tables.free -= len(used)
        self._registry.add("prefetched_pages", len(used))
        return dataclasses.replace(state, kv=kv)

    def _give_up(self, programs: OffloadPrograms, state: GenState, tables: _Tables, record: _Record) -> GenState:
        """Let a record's sequences compute themselves again."""
        self._registry.add("recomputed_tokens", sum(member.computed for member in record.remaining()))
        self._drop(tables, record, WAITING)
        return self._swap_in_tables(programs, state, record.remaining(), None, 0)[0]

    def _drop(self, tables: _Tables, record: _Record, status: int) -> None:
        """Forget a record; for what is decided next, its sequences have `status`."""
        for member in record.remaining():
            tables.status[member.slot], tables.goes_on[member.slot] = status, status == RUNNING
            tables.growth[member.slot], tables.is_ready[member.slot] = member.growth, status == WAITING
        self._records.remove(record)
        self._count()

    def _swap_in_tables(
        self, programs: OffloadPrograms, state: GenState, members: list[_Member], new: np.ndarray | None, count: int
    ) -> tuple[GenState, jax.Array]:
        """Args: new: for each of the record's pages, which of the `count` ones it becomes; None: they begin anew."""
        shapes = self._shapes
        table = state.decode.sequences.page_indices
        mask, computed = np.zeros(shapes.num_slots, bool), np.zeros(shapes.num_slots, np.int32)
        places = np.full(table.shape, shapes.num_pages, np.int32)
        for member in members:
            mask[member.slot] = True
            if new is not None:
                computed[member.slot] = member.computed
                places[member.slot, : len(member.places)] = new[member.places]
        arguments = jax.device_put((mask, places, computed, np.asarray(count, np.int32)))
        decode, pages = programs.swap_in(state.decode, *arguments)
        return dataclasses.replace(state, decode=decode), pages

    def _mark_swapped(self, programs: OffloadPrograms, state: GenState, slots: list[int], status: int) -> GenState:
        mask = np.zeros(self._shapes.num_slots, bool)
        mask[slots] = True
        arguments = jax.device_put((mask, np.asarray(status, np.int32)))
        return dataclasses.replace(state, decode=programs.mark_swapped(state.decode, *arguments))

    def _used_bytes(self) -> int:
        return sum(record.nbytes for record in self._records)

    def _count(self) -> None:
        self._registry.set("offloaded_sequences", sum(len(record.remaining()) for record in self._records))
        self._registry.set("offloaded_bytes", self._used_bytes())


def host_terms(*, yields: bool = True, return_pages: int = 0) -> HostTerms:
    return HostTerms(np.asarray(yields), np.asarray(return_pages, np.int32))  # type: ignore[arg-type]


def _chunks(values: np.ndarray, size: int, none: int) -> list[np.ndarray]:
    """`values` in arrays of `size`, the last one filled up with `none`."""
    padded = np.full(-(-len(values) // size) * size, none, np.int32)
    padded[: len(values)] = values
    return list(padded.reshape(-1, size))
