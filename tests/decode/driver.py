"""Drives the device's tables and `AllocatorModel` through the same operations and compares them after each."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.decode import kv_offload
from levanter_infer.decode.admission import admit
from levanter_infer.decode.invariants import violations
from levanter_infer.decode.kv_offload import HostTerms
from levanter_infer.decode.outputs import OutputRing
from levanter_infer.decode.resampling import resample_samples
from levanter_infer.decode.schedule import schedule
from levanter_infer.decode.shapes import SamplingLimits, Shapes, WindowShape
from levanter_infer.decode.state import DecodeState
from levanter_infer.decode.step import append, empty_sample
from levanter_infer.engine.admission import SamplingColumns
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.runner import empty_admission
from tests.decode.allocator_model import SWAPPED, AllocatorModel
from tests.decode.sampling_oracle import sampling_table

VOCAB = 5
SHAPES = Shapes(
    num_slots=6,
    max_seqs=3,
    max_seq_len=14,
    num_pages=9,
    page_size=2,
    max_step_tokens=6,
    max_round_steps=4,
    upload_tokens=64,
    prefix_cache=True,
    offload=True,
    limits=SamplingLimits(vocab_size=VOCAB, max_logprobs=1, max_logit_bias=1, max_stop_sequences=2, max_stop_tokens=2),
)

RETURN_PAGES = 3
"""The needs that the host states in every call of `host_call`."""


WINDOWED = dataclasses.replace(SHAPES, windows=(WindowShape(window=3, num_pages=7), WindowShape(6, 8)))
"""As `SHAPES`, with two sliding windows whose pages run short before those of the tables do."""


@functools.lru_cache
def programs(shapes: Shapes = SHAPES):
    """The operations, compiled once for all examples."""

    def state_of(leaves):
        return whole(leaves, shapes)

    def step(leaves, tokens, finite):
        state, plan, source, target = schedule(state_of(leaves), shapes)
        sampled = dataclasses.replace(empty_sample(shapes), tokens=tokens, finite=finite, possible=finite)
        ring = OutputRing.init(shapes.ring_size, 1)
        state, _, _ = append(state, ring, plan, sampled, shapes)
        # One array, because every array that leaves the device costs more than all that it holds.
        return jax.tree.leaves(state), jnp.concatenate([plan.slot_ids, source, target, flat(seen(state, shapes))])

    admission_structure = jax.tree.structure(empty_admission(shapes))
    return {
        "init": jax.jit(lambda: jax.tree.leaves(DecodeState.init(shapes))),
        "admit": jax.jit(
            lambda leaves, admission: jax.tree.leaves(
                admit(state_of(leaves), jax.tree.unflatten(admission_structure, admission))
            )
        ),
        "resample": jax.jit(lambda leaves, *fields: jax.tree.leaves(resample_samples(state_of(leaves), *fields))),
        "step": jax.jit(step),
        "mark_swapped": jax.jit(
            lambda leaves, slots: jax.tree.leaves(kv_offload.mark_swapped(state_of(leaves), slots, jnp.int32(SWAPPED)))
        ),
        "swap_in": jax.jit(
            lambda leaves, *arguments: jax.tree.leaves(kv_offload.swap_in(state_of(leaves), *arguments)[0])
        ),
        "observe": jax.jit(lambda leaves: flat(seen(state_of(leaves), shapes))),
    }


def flat(parts: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([part.ravel().astype(jnp.int32) for part in parts])


def whole(leaves: list[jax.Array], shapes: Shapes = SHAPES) -> DecodeState:
    """The state of its arrays. Between calls they stay apart: putting the tables together takes longer than a step."""
    return jax.tree.unflatten(state_structure(shapes), leaves)


@functools.lru_cache
def state_structure(shapes: Shapes):
    return jax.tree.structure(jax.eval_shape(lambda: DecodeState.init(shapes)))


def seen(state: DecodeState, shapes: Shapes) -> list[jax.Array]:
    """The arrays that are compared with the model, in the order of `Seen`."""
    table, pages, counters = state.sequences, state.page_table, state.counters
    named = [
        pages.ref_counts, pages.free_ring, pages.ring_head, pages.num_free, table.status, table.page_indices,
        table.num_computed, table.finish_reason, table.tokens, counters.preemptions, counters.copied_pages,
        counters.forks, counters.prefix_hits, counters.prefix_misses, counters.prefix_evictions,
    ]  # fmt: skip
    bad = violations(state)
    terms = HostTerms(yields=jnp.asarray(True), return_pages=jnp.int32(RETURN_PAGES))
    call = kv_offload.host_call(state, shapes, terms)
    of_windows = [
        array
        for each in state.windows
        for array in (each.attached, each.table.ref_counts, each.table.free_ring, each.table.ring_head, each.num_free)
    ]
    return [*named, call, jnp.stack([bad[name] for name in sorted(bad)]), *of_windows]


@functools.lru_cache
def nothing_admitted(shapes: Shapes) -> dict:
    """The fields of an admission that admits nothing, in their order, as arrays and tables of them."""
    admission = empty_admission(shapes)
    fields = {field.name: getattr(admission, field.name) for field in dataclasses.fields(admission)}
    return fields


@functools.lru_cache
def layout(shapes: Shapes) -> tuple[list[tuple[int, ...]], list[str]]:
    """Shapes of what `seen` returns, and the names of the invariants in it."""
    state = jax.eval_shape(lambda: DecodeState.init(shapes))
    parts = jax.eval_shape(lambda state: seen(state, shapes), state)
    return [part.shape for part in parts], sorted(jax.eval_shape(violations, state))


class Seen(NamedTuple):
    ref_counts: np.ndarray
    free_ring: np.ndarray
    ring_head: np.ndarray
    num_free: np.ndarray
    status: np.ndarray
    page_indices: np.ndarray
    num_computed: np.ndarray
    finish_reason: np.ndarray
    tokens: np.ndarray
    preemptions: np.ndarray
    copied_pages: np.ndarray
    forks: np.ndarray
    prefix_hits: np.ndarray
    prefix_misses: np.ndarray
    prefix_evictions: np.ndarray
    host_call: np.ndarray
    violations: np.ndarray


class Driver:
    def __init__(self, shapes: Shapes = SHAPES):
        self.shapes, self.programs = shapes, programs(shapes)
        self.arrivals = 0
        self.reset()

    def reset(self) -> None:
        self.leaves = self.programs["init"]()
        self._seen: tuple = (None, None)
        self.offloaded: list[dict[int, tuple[int, list[int], int]]] = []
        self.sample_index = [0] * self.shapes.num_slots
        shapes = self.shapes
        self.model = AllocatorModel(
            shapes.num_slots,
            shapes.max_seqs,
            shapes.num_pages,
            shapes.page_size,
            shapes.max_step_tokens,
            shapes.prefix_cache,
            [(each.window, each.num_pages) for each in shapes.windows],
        )

    def free_slots(self) -> list[int]:
        return [i for i, slot in enumerate(self.model.slots) if not slot.is_live]

    def live_slots(self) -> list[int]:
        return [i for i, slot in enumerate(self.model.slots) if slot.is_live]

    def admit(
        self, prompt: list[int], max_tokens: int, n: int, stop: int | None, root: int = -1, priority: int = 0
    ) -> None:
        """Admit one request with `n` samples into the first free slots; as many as there are, if fewer."""
        slots = self.free_slots()[:n]
        if not slots:
            return
        max_len = min(len(prompt) + max_tokens, self.shapes.max_seq_len)
        columns = SamplingColumns(self.shapes.num_slots, self.shapes.limits)
        params = SamplingParams(stop_token_ids=[] if stop is None else [stop])
        fields = {
            name: np.zeros(self.shapes.num_slots, np.int32) for name in ("lens", "starts", "prompt_lens", "max_lens")
        }
        fields["arrival"] = np.zeros(self.shapes.num_slots, np.int32)
        fields["slot_ids"] = np.full(self.shapes.num_slots, self.shapes.num_slots, np.int32)
        fields["fork_source"] = np.full(self.shapes.num_slots, self.shapes.num_slots, np.int32)
        fields["roots"] = np.full(self.shapes.num_slots, root, np.int32)
        fields["priority"] = np.full(self.shapes.num_slots, priority, np.int32)
        fields["complete"] = np.ones(self.shapes.num_slots, bool)
        tokens = np.zeros(self.shapes.upload_tokens, np.int32)
        tokens[: len(prompt)] = prompt
        for row, slot in enumerate(slots):
            self.arrivals += 1
            fields["slot_ids"][row] = slot
            self.sample_index[slot] = row
            fields["lens"][row] = len(prompt) if row == 0 else 0
            fields["prompt_lens"][row] = len(prompt)
            fields["max_lens"][row] = max_len
            fields["arrival"][row] = self.arrivals
            fields["fork_source"][row] = self.shapes.num_slots if row == 0 else slots[0]
            columns.set(row, params, seed=0, sample_index=row, eos_token_ids=())
            source = None if row == 0 else slots[0]
            self.model.admit(slot, prompt, max_len, self.arrivals, source, stop, root, priority)
        self._apply({**fields, "tokens": tokens, "sampling": sampling_table(columns), "has_pieces": np.asarray(True)})

    def cancel(self, slots: list[int]) -> None:
        mask = np.zeros(self.shapes.num_slots, bool)
        mask[slots] = True
        self.model.cancel(slots)
        self._apply({"cancel": mask, "has_cancellations": np.asarray(True)})

    def resample(self, ancestors: dict[int, int]) -> None:
        """Slots go on from their ancestors; others stay, whatever stands in their entries, and those of the host."""
        swapped = [i for i, slot in enumerate(self.model.slots) if slot.status == SWAPPED]
        ancestors = {i: a for i, a in ancestors.items() if i not in swapped and a not in swapped}
        mask = np.zeros(self.shapes.num_slots, bool)
        mask[list(ancestors)] = True
        entries = [ancestors.get(slot, (slot + 1) % self.shapes.num_slots) for slot in range(self.shapes.num_slots)]
        arrivals = [slot.arrival for slot in self.model.slots]
        for i in ancestors:
            if not self.model.slots[i].is_live:
                self.arrivals += 1
                arrivals[i] = self.arrivals
        self.model.resample(ancestors, arrivals)
        fields = (entries, self.sample_index, arrivals)
        self.leaves = self.programs["resample"](self.leaves, mask, *(np.asarray(field, np.int32) for field in fields))

    def step(self, seed: int, failure_rate: float = 0.05) -> None:
        rng = np.random.default_rng(seed)
        sampled = rng.integers(0, VOCAB, self.shapes.max_rows).astype(np.int32)
        finite = rng.random(self.shapes.max_rows) >= failure_rate
        self.leaves, packed = self.programs["step"](self.leaves, sampled, finite)
        ends = np.cumsum([self.shapes.max_rows, self.shapes.num_slots, self.shapes.num_slots])
        rows, source, target, seen = np.split(np.asarray(packed), ends)
        self._seen = self.leaves, seen
        expected = self.model.step(sampled, finite)
        rows = [int(slot) for slot in rows if slot < self.shapes.num_slots]
        assert rows == expected, f"rows {rows}, the model says {expected}"
        copies = [(int(s), int(t)) for s, t in zip(source, target, strict=True) if t < self.shapes.num_pages]
        assert copies == self.model.copies, f"copies {copies}, the model says {self.model.copies}"

    def swap_out(self, slots: list[int]) -> None:
        """Park those of `slots` that hold pages, together."""
        holders = {i: self.model.slots[i] for i in slots if self.model.slots[i].pages}
        if holders:
            self.offloaded.append({i: (slot.arrival, slot.pages, slot.computed) for i, slot in holders.items()})
            self.model.mark_swapped(list(holders))
            mask = np.isin(np.arange(self.shapes.num_slots), list(holders))
            self.leaves = self.programs["mark_swapped"](self.leaves, mask)

    def bring_back(self) -> None:
        """Swap in the sequences that were offloaded first; without free pages they start anew."""
        if not self.offloaded:
            return
        members = {}
        for i, (arrival, held, computed) in self.offloaded.pop(0).items():
            slot = self.model.slots[i]
            if slot.status == SWAPPED and slot.arrival == arrival:  # and not another one that has the slot now
                members[i] = held, computed
        pages = sorted({page for held, _ in members.values() for page in held})
        fits = len(pages) <= len(self.model.free) and self.model.fits_windows(members.values())
        places = {i: [pages.index(page) for page in held] if fits else [] for i, (held, _) in members.items()}
        computed = {i: count if fits else 0 for i, (_, count) in members.items()}
        count = len(pages) if fits else 0
        self.model.swap_in(places, computed, count)
        num_slots, shapes = self.shapes.num_slots, self.shapes
        mask, lens = np.isin(np.arange(num_slots), list(members)), np.zeros(num_slots, np.int32)
        columns = np.full((num_slots, -(-shapes.max_seq_len // shapes.page_size)), shapes.num_pages, np.int32)
        for i, own in places.items():
            columns[i, : len(own)], lens[i] = own, computed[i]
        self.leaves = self.programs["swap_in"](self.leaves, mask, columns, lens, np.int32(count))

    def _apply(self, fields) -> None:
        nothing = nothing_admitted(self.shapes)
        parts = [fields.get(name, value) for name, value in nothing.items()]
        self.leaves = self.programs["admit"](self.leaves, jax.tree.leaves(parts))

    def check(self) -> None:
        """Compare everything, and check the invariants."""
        leaves, rest = self._seen
        if leaves is not self.leaves:  # a step tells of itself
            rest = np.asarray(self.programs["observe"](self.leaves))
            self._seen = self.leaves, rest
        parts, (shapes, names) = [], layout(self.shapes)
        for shape in shapes:
            size = math.prod(shape)
            parts.append(rest[:size].reshape(shape))
            rest = rest[size:]
        device, model = Seen(*parts[: len(Seen._fields)]), self.model
        bad = {name: int(count) for name, count in zip(names, device.violations, strict=True) if count}
        assert not bad, f"violated invariants: {bad}"
        assert device.ref_counts.tolist() == model.refs
        ring, first, count = device.free_ring.tolist(), int(device.ring_head), int(device.num_free)
        assert [ring[(first + i) % len(ring)] for i in range(count)] == model.free
        of_windows = [parts[i : i + 5] for i in range(len(Seen._fields), len(parts), 5)]
        for window, (attached, refs, *free) in zip(model.windows, of_windows, strict=True):
            assert {page: own for page, own in enumerate(attached.tolist()) if own < len(refs)} == window.attached
            assert refs.tolist() == window.refs
            ring, first, count = free[0].tolist(), int(free[1]), int(free[2])
            assert [ring[(first + i) % len(ring)] for i in range(count)] == window.free
        pages, tokens = device.page_indices.tolist(), device.tokens.tolist()
        for i, slot in enumerate(model.slots):
            none = [self.shapes.num_pages] * (len(pages[i]) - len(slot.pages))
            assert device.status[i] == slot.status, f"slot {i}"
            assert pages[i] == slot.pages + none, f"slot {i}"
            assert device.num_computed[i] == slot.computed, f"slot {i}"
            assert device.finish_reason[i] == slot.reason, f"slot {i}"
            assert tokens[i][: len(slot.tokens)] == slot.tokens, f"slot {i}"
        assert device.preemptions == model.preemptions
        assert device.copied_pages == model.copied
        assert device.forks == model.forks
        assert device.prefix_hits == model.hits
        assert device.prefix_misses == model.misses
        assert device.prefix_evictions == model.evictions
        assert device.host_call == model.host_call(RETURN_PAGES, self.shapes.max_new_pages)

    def finish(self) -> None:
        """Run until everything has ended; then every page is free."""
        for seed in range(1000):
            if not self.live_slots():
                break
            self.bring_back()
            self.step(seed, failure_rate=0.0)
        assert not self.live_slots(), "sequences never end"
        self.check()
        assert len(self.model.free) == self.shapes.num_pages
        assert all(len(window.free) == len(window.refs) for window in self.model.windows)


def random_operation(driver: Driver, rng: np.random.Generator) -> str:
    """Apply one random operation; returns its name."""
    kinds = ["admit", "step", "cancel", "swap_out", "bring_back", "resample", "reset"]
    kind = rng.choice(kinds, p=[0.25, 0.6, 0.045, 0.025, 0.025, 0.05, 0.005])
    if kind == "admit":
        length = int(rng.integers(1, 10))
        stop = int(rng.integers(0, VOCAB)) if rng.random() < 0.3 else None
        prompt = rng.integers(0, VOCAB, length).tolist()
        if rng.random() < 0.7:  # a prefix that others share
            prompt = ([3, 1, 4, 1, 2] if rng.random() < 0.7 else [3, 1, 0, 1, 2])[: rng.integers(6)] + prompt
        root = -1 if rng.random() < 0.8 else -2
        priority = int(rng.integers(-1, 2)) if rng.random() < 0.3 else 0
        driver.admit(prompt[:12], int(rng.integers(1, 12)), int(rng.integers(1, 4)), stop, root, priority)
    elif kind == "step":
        driver.step(int(rng.integers(0, 2**31)))
    elif kind == "cancel":
        live = driver.live_slots()
        driver.cancel([i for i in live if rng.random() < 0.5])
    elif kind == "swap_out":
        driver.swap_out([i for i in driver.live_slots() if rng.random() < 0.5])
    elif kind == "bring_back":
        driver.bring_back()
    elif kind == "resample":
        slots = driver.live_slots() if rng.random() < 0.8 else list(range(SHAPES.num_slots))
        descendants = [slot for slot in slots if rng.random() < 0.7]
        driver.resample({slot: int(rng.choice(slots)) for slot in descendants})
    else:
        driver.reset()
    return str(kind)
