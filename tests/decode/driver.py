"""Drives the device's tables and `AllocatorModel` through the same operations and compares them after each."""

import dataclasses
import functools

import jax
import numpy as np

from levanter_infer.decode.admission import admit
from levanter_infer.decode.invariants import violations
from levanter_infer.decode.outputs import OutputRing
from levanter_infer.decode.sampling import SamplingLimits
from levanter_infer.decode.sequence_table import by_arrival
from levanter_infer.decode.shapes import Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.decode.step import append, empty_sample, schedule
from levanter_infer.engine.encode_sampling import SamplingColumns
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.slots import empty_admission
from tests.decode.allocator_model import AllocatorModel

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
    limits=SamplingLimits(vocab_size=VOCAB, max_logprobs=1, max_logit_bias=1, max_stop_sequences=2, max_stop_tokens=2),
)


@functools.lru_cache
def programs():
    """The three operations, compiled once for all examples."""

    def step(state, tokens, finite):
        state, plan, source, target = schedule(state, SHAPES)
        sampled = dataclasses.replace(empty_sample(SHAPES), tokens=tokens, finite=finite)
        ring = OutputRing.init(SHAPES.ring_size, 1)
        state, _ = append(state, ring, plan, sampled, SHAPES)
        return state, (plan.slot_ids, source, target)

    return {
        "init": jax.jit(lambda: DecodeState.init(SHAPES)),
        "admit": jax.jit(admit),
        "step": jax.jit(step),
        "observe": jax.jit(lambda state: (state, by_arrival(state.sequences), violations(state))),
    }


class Driver:
    def __init__(self):
        self.arrivals = 0
        self.reset()

    def reset(self) -> None:
        self.state = programs()["init"]()
        shapes = SHAPES
        self.model = AllocatorModel(
            shapes.num_slots, shapes.max_seqs, shapes.num_pages, shapes.page_size, shapes.max_step_tokens
        )

    def free_slots(self) -> list[int]:
        return [i for i, slot in enumerate(self.model.slots) if not slot.is_live]

    def live_slots(self) -> list[int]:
        return [i for i, slot in enumerate(self.model.slots) if slot.is_live]

    def admit(self, prompt: list[int], max_tokens: int, n: int, stop: int | None) -> None:
        """Admit one request with `n` samples into the first free slots; as many as there are, if fewer."""
        slots = self.free_slots()[:n]
        if not slots:
            return
        max_len = min(len(prompt) + max_tokens, SHAPES.max_seq_len)
        columns = SamplingColumns(SHAPES.num_slots, SHAPES.limits)
        params = SamplingParams(stop_token_ids=[] if stop is None else [stop])
        fields = {name: np.zeros(SHAPES.num_slots, np.int32) for name in ("lens", "starts", "prompt_lens", "max_lens")}
        fields["arrival"] = np.zeros(SHAPES.num_slots, np.int32)
        fields["slot_ids"] = np.full(SHAPES.num_slots, SHAPES.num_slots, np.int32)
        fields["fork_source"] = np.full(SHAPES.num_slots, SHAPES.num_slots, np.int32)
        fields["complete"] = np.ones(SHAPES.num_slots, bool)
        tokens = np.zeros(SHAPES.upload_tokens, np.int32)
        tokens[: len(prompt)] = prompt
        for row, slot in enumerate(slots):
            self.arrivals += 1
            fields["slot_ids"][row] = slot
            fields["lens"][row] = len(prompt) if row == 0 else 0
            fields["prompt_lens"][row] = len(prompt)
            fields["max_lens"][row] = max_len
            fields["arrival"][row] = self.arrivals
            fields["fork_source"][row] = SHAPES.num_slots if row == 0 else slots[0]
            columns.set(row, params, seed=0, sample_index=row, eos_token_ids=())
            self.model.admit(slot, prompt, max_len, self.arrivals, None if row == 0 else slots[0], stop)
        self._apply({**fields, "tokens": tokens, "sampling": columns.table(), "has_pieces": np.asarray(True)})

    def cancel(self, slots: list[int]) -> None:
        mask = np.zeros(SHAPES.num_slots, bool)
        mask[slots] = True
        self.model.cancel(slots)
        self._apply({"cancel": mask, "has_cancellations": np.asarray(True)})

    def step(self, seed: int, failure_rate: float = 0.05) -> None:
        rng = np.random.default_rng(seed)
        sampled = rng.integers(0, VOCAB, SHAPES.max_rows).astype(np.int32)
        finite = rng.random(SHAPES.max_rows) >= failure_rate
        self.state, (rows, source, target) = programs()["step"](self.state, sampled, finite)
        expected = self.model.step(sampled, finite)
        rows = [int(slot) for slot in rows if slot < SHAPES.num_slots]
        assert rows == expected, f"rows {rows}, the model says {expected}"
        copies = [(int(s), int(t)) for s, t in zip(source, target, strict=True) if t < SHAPES.num_pages]
        assert copies == self.model.copies, f"copies {copies}, the model says {self.model.copies}"

    def _apply(self, fields) -> None:
        admission = empty_admission(SHAPES)
        changes = {
            name: value if name == "sampling" else dataclasses.replace(getattr(admission, name), array=value)
            for name, value in fields.items()
        }
        self.state = programs()["admit"](self.state, dataclasses.replace(admission, **changes))

    def check(self) -> None:
        """Compare everything, and check the invariants."""
        state, _, bad = jax.device_get(programs()["observe"](self.state))
        bad = {name: int(count) for name, count in bad.items() if count}
        assert not bad, f"violated invariants: {bad}"
        table, pages, model = state.sequences, state.page_table, self.model
        assert pages.ref_counts.array.tolist() == model.refs
        ring, head, count = pages.free_ring.array, int(pages.ring_head.array), int(pages.num_free.array)
        assert [int(ring[(head + i) % len(ring)]) for i in range(count)] == model.free
        for i, slot in enumerate(model.slots):
            assert table.status.array[i] == slot.status, f"slot {i}"
            assert table.page_indices.array[i, : len(slot.pages)].tolist() == slot.pages, f"slot {i}"
            assert (table.page_indices.array[i, len(slot.pages) :] == SHAPES.num_pages).all(), f"slot {i}"
            assert table.num_computed.array[i] == slot.computed, f"slot {i}"
            assert table.finish_reason.array[i] == slot.reason, f"slot {i}"
            assert table.tokens.array[i, : len(slot.tokens)].tolist() == slot.tokens, f"slot {i}"
        counters = state.counters
        assert int(counters.preemptions.array) == model.preemptions
        assert int(counters.copied_pages.array) == model.copied
        assert int(counters.forks.array) == model.forks

    def finish(self) -> None:
        """Run until everything has ended; then every page is free."""
        for seed in range(1000):
            if not self.live_slots():
                break
            self.step(seed, failure_rate=0.0)
        assert not self.live_slots(), "sequences never end"
        self.check()
        assert len(self.model.free) == SHAPES.num_pages


def random_operation(driver: Driver, rng: np.random.Generator) -> str:
    """Apply one random operation; returns its name."""
    kind = rng.choice(["admit", "step", "cancel", "reset"], p=[0.25, 0.7, 0.045, 0.005])
    if kind == "admit":
        length = int(rng.integers(1, 10))
        stop = int(rng.integers(0, VOCAB)) if rng.random() < 0.3 else None
        prompt = rng.integers(0, VOCAB, length).tolist()
        driver.admit(prompt, int(rng.integers(1, 12)), int(rng.integers(1, 4)), stop)
    elif kind == "step":
        driver.step(int(rng.integers(0, 2**31)))
    elif kind == "cancel":
        live = driver.live_slots()
        driver.cancel([i for i in live if rng.random() < 0.5])
    else:
        driver.reset()
    return str(kind)
