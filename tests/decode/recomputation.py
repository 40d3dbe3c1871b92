"""Loads that are bad for preemption, on the device's tables alone, and how much of them is computed again.

A load runs from its admission to its end in one loop on the device: `schedule` and `append` without a model.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.decode.admission import admit
from levanter_infer.decode.codes import FINISHED
from levanter_infer.decode.outputs import OutputRing
from levanter_infer.decode.schedule import schedule
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.decode.step import append, empty_sample
from levanter_infer.engine.admission import SamplingColumns
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.runner import empty_admission
from tests.decode.sampling_oracle import sampling_table

SHAPES = Shapes(
    num_slots=20,
    max_seqs=6,
    max_seq_len=96,
    num_pages=24,
    page_size=4,
    max_step_tokens=12,
    max_round_steps=4,
    upload_tokens=20 * 96,
    limits=SamplingLimits(vocab_size=5, max_logprobs=0, max_logit_bias=1, max_stop_sequences=1, max_stop_tokens=1),
)
CAPACITY = SHAPES.num_pages * SHAPES.page_size
"""Tokens that the pool holds."""
_MAX_STEPS = 20_000


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: tokens of its prompt, tokens that each of its samples generates, and how many these are."""

    prompt: int
    generates: int
    n: int = 1

    @property
    def fits(self) -> bool:
        """Whether it is admitted; samples that do not fit together take turns."""
        return self.prompt + self.generates <= min(SHAPES.max_seq_len, CAPACITY)


@dataclasses.dataclass(frozen=True)
class Work:
    """The outcome of a load."""

    steps: int
    generated: int
    recomputed: int
    ended: int
    preemptions: int
    twice: int
    """Sequences that were preempted twice without an end of any in between; there should be none."""


def bound(load: list[Asked], work: Work) -> int:
    """Tokens that are computed again, at most: docs/invariants.md says why."""
    forked = [asked.prompt for asked in load if asked.n > 1]
    shared = max(forked, default=0) * (SHAPES.num_slots - 1)
    return work.generated + (work.ended + len(forked)) * (CAPACITY + shared)


@functools.lru_cache
def _program():
    def run(admission):
        state = admit(DecodeState.init(SHAPES), admission)
        sampled = empty_sample(SHAPES)

        def body(carry):
            steps, state, gave_way, twice = carry
            before, ended = state.sequences.num_computed, state.sequences.is_status(FINISHED)
            state, plan, _, _ = schedule(state, SHAPES)
            loses = state.sequences.num_computed < before
            twice += jnp.sum(loses & gave_way, dtype=jnp.int32)
            state, _, _ = append(state, OutputRing.init(SHAPES.ring_size, 0), plan, sampled, SHAPES)
            some_end = jnp.any(state.sequences.is_status(FINISHED) & ~ended)
            return steps + 1, state, (gave_way | loses) & ~some_end, twice

        def goes_on(carry):
            table = carry[1].sequences
            live = (table.status > 0) & ~table.is_status(FINISHED)
            return jnp.any(live) & (carry[0] < _MAX_STEPS)

        none = jnp.zeros(SHAPES.num_slots, jnp.bool_)
        steps, state, _, twice = jax.lax.while_loop(goes_on, body, (jnp.int32(0), state, none, jnp.int32(0)))
        counters = state.counters
        ended = jnp.sum(state.sequences.is_status(FINISHED), dtype=jnp.int32)
        numbers = (steps, counters.generated, counters.recomputed, ended, counters.preemptions, twice)
        return jnp.stack([*numbers, state.page_table.num_free])

    return jax.jit(run)


def work_of(load: list[Asked]) -> Work:
    """Run a load whose requests come together. Raises: AssertionError if it does not end, or keeps pages."""
    size = SHAPES.num_slots
    names = ("lens", "starts", "prompt_lens", "max_lens", "arrival", "slot_ids", "fork_source")
    fields = {name: np.zeros(size, np.int32) for name in names}
    fields["slot_ids"][:] = fields["fork_source"][:] = size
    columns, row = SamplingColumns(size, SHAPES.limits), 0
    for asked in load:
        leader = row
        for sample in range(asked.n):
            values = dict(
                lens=asked.prompt if sample == 0 else 0, prompt_lens=asked.prompt,
                max_lens=asked.prompt + asked.generates, arrival=row + 1, slot_ids=row,
                fork_source=size if sample == 0 else leader,
            )  # fmt: skip
            for name, value in values.items():
                fields[name][row] = value
            columns.set(row, SamplingParams(), seed=0, sample_index=sample, eos_token_ids=())
            row += 1
    admission = empty_admission(SHAPES)
    arrays = {**fields, "complete": np.arange(size) < row, "has_pieces": np.asarray(True)}
    *numbers, free = np.asarray(
        _program()(dataclasses.replace(admission, **arrays, sampling=sampling_table(columns)))
    ).tolist()
    work = Work(*numbers)
    assert work.ended == row, f"{row - work.ended} of {row} sequences never end"
    assert free == SHAPES.num_pages
    return work


def random_load(rng: np.random.Generator) -> list[Asked]:
    """Requests near the size of the pool, long prompts, samples that diverge, or a mixture."""
    kind, load, free_slots = rng.integers(5), [], SHAPES.num_slots
    while free_slots > 0:
        total = int(rng.integers(CAPACITY // 2, CAPACITY + 1)) if kind != 4 else int(rng.integers(2, CAPACITY + 1))
        generates = int(rng.integers(1, total)) if kind in (0, 4) else int(rng.integers(1, 5))
        if kind == 1:  # short prompts that grow into the whole pool
            generates = total - int(rng.integers(1, 9))
        if kind == 3:  # prompts of half the pool, which end soon: a sequence restarts at every end
            total = int(rng.integers(CAPACITY // 4, CAPACITY // 2))
        n = int(rng.integers(1, SHAPES.max_seqs + 1)) if kind == 2 or (kind == 4 and rng.random() < 0.5) else 1
        if kind == 2:
            generates = int(rng.integers(1, total))
        asked = Asked(total - generates, generates, min(n, free_slots))
        assert asked.fits
        load.append(asked)
        free_slots -= asked.n
    return load
