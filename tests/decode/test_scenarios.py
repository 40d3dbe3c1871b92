"""Single steps of a few sequences, with the metadata that the model receives written out by hand.

No model: a step schedules, builds its `PageBatchInfo`, and appends tokens that the test chooses.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.decode.admission import admit
from levanter_infer.decode.codes import FINISHED, LENGTH, RUNNING, STOP, WAITING
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.decode.loop import has_work
from levanter_infer.decode.outputs import OutputRing
from levanter_infer.decode.schedule import schedule
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.decode.state import DecodeState
from levanter_infer.decode.step import append, batch_info, empty_sample
from levanter_infer.engine.admission import SamplingColumns
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.runner import empty_admission
from tests.decode.sampling_oracle import sampling_table

SHAPES = Shapes(
    num_slots=6,
    max_seqs=3,
    max_seq_len=32,
    num_pages=24,
    page_size=4,
    max_step_tokens=8,
    max_round_steps=4,
    upload_tokens=64,
    limits=SamplingLimits(vocab_size=50, max_logprobs=1, max_logit_bias=1, max_stop_sequences=1, max_stop_tokens=2),
)
NO_SLOT, NO_PAGE, NOWHERE = SHAPES.num_slots, SHAPES.num_pages, SHAPES.num_pages * SHAPES.page_size


@functools.lru_cache
def programs():
    def step(state, tokens):
        state, plan, _, _ = schedule(state, SHAPES)
        batch = batch_info(state, plan, SHAPES)
        sampled = dataclasses.replace(empty_sample(SHAPES), tokens=tokens)
        state, _, _ = append(state, OutputRing.init(SHAPES.ring_size, 1), plan, sampled, SHAPES)
        return state, batch

    return jax.jit(step), jax.jit(admit), jax.jit(lambda state, wanted: has_work(state, SHAPES, wanted))


class Tables:
    """A `DecodeState` and the operations on it."""

    def __init__(self):
        self.state = DecodeState.init(SHAPES)
        self.arrivals = 0

    def add(self, slot: int, prompt: list[int], max_tokens: int = 8, stop: int | None = None) -> None:
        """Admit one sequence into a slot."""
        columns = SamplingColumns(SHAPES.num_slots, SHAPES.limits)
        columns.set(
            0,
            SamplingParams(stop_token_ids=[] if stop is None else [stop]),
            seed=0,
            sample_index=0,
            eos_token_ids=(),
        )
        self.arrivals += 1
        first = {
            "slot_ids": slot,
            "lens": len(prompt),
            "prompt_lens": len(prompt),
            "max_lens": len(prompt) + max_tokens,
            "arrival": self.arrivals,
            "complete": True,
        }
        admission = empty_admission(SHAPES)
        changes = {}
        for name, value in first.items():
            array = getattr(admission, name).copy()
            array[0] = value
            changes[name] = array
        tokens = np.zeros(SHAPES.upload_tokens, np.int32)
        tokens[: len(prompt)] = prompt
        changes |= {"tokens": tokens, "has_pieces": np.asarray(True)}
        self.state = programs()[1](
            self.state, dataclasses.replace(admission, **changes, sampling=sampling_table(columns))
        )
        check_invariants(self.state)

    def step(self, *sampled: int):
        """One step in which row i would sample `sampled[i]`; returns what the model would have been given."""
        tokens = np.zeros(SHAPES.max_rows, np.int32)
        tokens[: len(sampled)] = sampled
        self.state, batch = programs()[0](self.state, jnp.asarray(tokens))
        check_invariants(self.state)
        return batch

    def has_work(self, min_free_slots: int = SHAPES.num_slots + 1) -> bool:
        return bool(programs()[2](self.state, jnp.int32(min_free_slots)))

    def status(self, slot: int) -> int:
        return int(self.state.sequences.status[slot])

    def free_pages(self) -> int:
        return int(self.state.page_table.num_free)


def rows(batch) -> list[int]:
    return batch.slot_ids.array[: int(batch.num_seqs.array)].tolist()


def bounds(batch) -> list[int]:
    return batch.cu_q_lens.array[: int(batch.num_seqs.array) + 1].tolist()


def lens(batch) -> list[int]:
    return batch.seq_lens.array[: int(batch.num_seqs.array)].tolist()


def test_one_prompt_has_bounds_0_n_and_length_n():
    tables = Tables()
    tables.add(2, [7, 8, 9, 10, 11, 12])
    batch = tables.step(1)
    assert (rows(batch), bounds(batch), lens(batch)) == ([2], [0, 6], [6])
    assert batch.tokens.array.tolist() == [7, 8, 9, 10, 11, 12, 0, 0]
    assert batch.positions.array.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


def test_step_i_of_decoding_has_bounds_0_1_and_length_n_plus_i_plus_1():
    tables = Tables()
    tables.add(0, [7, 8, 9])
    tables.step(20)
    for i in range(6):
        batch = tables.step(21 + i)
        assert (rows(batch), bounds(batch), lens(batch)) == ([0], [0, 1], [3 + i + 1])
        assert int(batch.tokens.array[0]) == 20 + i and int(batch.positions.array[0]) == 3 + i


def test_a_decode_token_stands_before_another_sequences_prompt_chunk():
    tables = Tables()
    tables.add(4, [1, 2, 3])
    tables.step(30)
    tables.add(1, list(range(10, 22)))
    batch = tables.step(31)
    chunk = SHAPES.max_step_tokens - 1
    assert (rows(batch), bounds(batch), lens(batch)) == ([4, 1], [0, 1, 1 + chunk], [4, chunk])
    assert batch.tokens.array.tolist() == [30, *range(10, 10 + chunk)]
    batch = tables.step(32, 40)
    assert (rows(batch), bounds(batch), lens(batch)) == ([4, 1], [0, 1, 1 + 12 - chunk], [5, 12])
    assert batch.positions.array[1:6].tolist() == [7, 8, 9, 10, 11]
    batch = tables.step(33, 41)
    assert (bounds(batch), lens(batch)) == ([0, 1, 2], [6, 13])
    assert batch.tokens.array[:2].tolist() == [32, 40]


def test_metadata_is_int32_padded_on_the_right_with_none():
    tables = Tables()
    tables.add(5, [1, 2, 3, 4, 5])
    batch = tables.step(1)
    for name in ("tokens", "positions", "slot_ids", "cu_q_lens", "seq_lens", "page_indices", "new_token_dests"):
        assert getattr(batch, name).array.dtype == jnp.int32, name
    assert batch.slot_ids.array.tolist() == [5, NO_SLOT, NO_SLOT, NO_SLOT]
    assert batch.cu_q_lens.array.tolist() == [0, 5, 5, 5, 5]
    assert batch.seq_lens.array.tolist() == [5, 0, 0, 0]
    pages = batch.page_indices.array
    assert (pages[0, :2] < NO_PAGE).all() and (pages[0, 2:] == NO_PAGE).all() and (pages[1:] == NO_PAGE).all()
    assert batch.new_token_dests.array[5:].tolist() == [NOWHERE] * 3


def test_destinations_follow_the_page_table_and_cross_pages():
    tables = Tables()
    tables.add(0, [1, 2, 3])  # page 0
    tables.step(9)
    tables.add(1, [4, 5, 6])  # page 1
    batch = tables.step(9, 9)
    assert batch.new_token_dests.array[:4].tolist() == [3, 4, 5, 6]
    batch = tables.step(9, 9)  # slot 0 enters its second page, which is page 2; slot 1 fills page 1
    assert batch.new_token_dests.array[:2].tolist() == [2 * 4 + 0, 1 * 4 + 3]
    assert batch.page_indices.array[0, :3].tolist() == [0, 2, NO_PAGE]
    page, offset = batch.pages_and_offsets()
    assert page[:2].tolist() == [2, 1] and offset[:2].tolist() == [0, 3] and int(page[2]) == NO_PAGE


def test_a_page_is_taken_only_when_a_boundary_is_crossed():
    tables = Tables()
    tables.add(0, [1, 2, 3], max_tokens=20)
    taken = []
    for _ in range(12):
        tables.step(9)
        taken.append(SHAPES.num_pages - tables.free_pages())
    stored = range(3, 15)
    assert taken == [-(-count // SHAPES.page_size) for count in stored]


def test_decoding_never_waits_for_prompts_and_prompts_never_starve():
    tables = Tables()
    tables.add(0, [1, 2], max_tokens=20)
    tables.add(1, [1, 2], max_tokens=20)
    tables.step(9, 9)
    tables.add(2, [5] * 20, max_tokens=4)
    computed = []
    for _ in range(4):
        batch = tables.step(9, 9, 9)
        assert rows(batch)[:2] == [0, 1] and bounds(batch)[:3] == [0, 1, 2]  # both decode in every step
        computed.append(int(tables.state.sequences.num_computed[2]))
    assert computed == [6, 12, 18, 20]  # and the prompt gets the rest of the budget of 8


def test_a_freed_place_is_taken_in_the_next_step():
    tables = Tables()
    for slot in range(4):
        tables.add(slot, [1, 2], max_tokens=1 if slot == 1 else 9)
    batch = tables.step(9, 9, 9)
    assert rows(batch) == [0, 1, 2] and tables.status(3) == WAITING
    assert tables.status(1) == FINISHED
    assert set(rows(tables.step(9, 9, 9))) == {0, 2, 3} and tables.status(3) == RUNNING


def test_a_sequence_of_one_token_ends_in_the_step_of_its_prompt():
    tables = Tables()
    tables.add(0, [1, 2, 3], max_tokens=1)
    tables.step(9)
    assert tables.status(0) == FINISHED and int(tables.state.sequences.finish_reason[0]) == LENGTH
    assert tables.free_pages() == SHAPES.num_pages
    assert not tables.has_work()


def test_pages_of_a_stopped_sequence_are_free_after_the_same_step():
    tables = Tables()
    tables.add(0, [1, 2, 3], stop=42)
    tables.add(1, [1, 2], max_tokens=20)
    tables.step(9, 9)
    before = tables.free_pages()
    tables.step(42, 42)
    table = tables.state.sequences
    assert tables.status(0) == FINISHED and int(table.finish_reason[0]) == STOP
    assert tables.status(1) == RUNNING
    assert tables.free_pages() == before + 1
    assert (table.page_indices[0] == NO_PAGE).all()


def test_the_round_goes_on_while_there_is_work_unless_the_host_could_fill_empty_places():
    tables = Tables()
    assert not tables.has_work()
    tables.add(0, [1, 2])
    assert tables.has_work()  # it waits
    tables.step(9)
    assert tables.has_work()
    empty = SHAPES.num_slots - 1
    assert not tables.has_work(min_free_slots=empty)  # enough free slots, fewer than max_seqs run, none waits
    assert tables.has_work(min_free_slots=empty + 1)
    for slot in (1, 2):
        tables.add(slot, [1, 2])
    assert tables.has_work(min_free_slots=1)  # a sequence waits
    tables.step(9, 9, 9)
    assert tables.status(1) == tables.status(2) == RUNNING
    assert tables.has_work(min_free_slots=1)  # max_seqs run, and none waits
    tables.add(3, [1, 2])
    assert tables.has_work(min_free_slots=1)
