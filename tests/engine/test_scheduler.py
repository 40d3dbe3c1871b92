"""The host's scheduler alone, with made-up outputs: no JAX, no model, milliseconds."""

import dataclasses
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from levanter_infer.decode.codes import ABORT, EARLY, ERROR, FINISHED, LENGTH, NOT_FINISHED, RUNNING, STOP
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.engine.request_state import PromptScores, RequestState, SampleState
from levanter_infer.engine.round_length import RoundLengthController
from levanter_infer.engine.routing import expected_tokens, route
from levanter_infer.engine.scheduler import RequestQueue, Scheduler
from levanter_infer.engine.validation import RequestLimits, validate, validate_sampling

SHAPES = Shapes(
    num_slots=4,
    max_seqs=2,
    max_seq_len=96,
    num_pages=12,
    page_size=16,
    max_step_tokens=16,
    max_round_steps=8,
    upload_tokens=32,
    limits=SamplingLimits(vocab_size=100, max_logprobs=2, max_logit_bias=3, max_stop_sequences=3, max_stop_tokens=16),
    max_beams=4,
)
LIMITS = RequestLimits(
    vocab_size=100,
    max_seqs=4,
    num_slots=8,
    max_seq_len=64,
    num_pages=6,
    page_size=16,
    max_logprobs=20,
    max_prompt_logprobs=1,
    max_logit_bias=3,
    max_stop_sequences=2,
    has_tokenizer=True,
)


def request(length: int = 3, generated: int = 4, *, first: int = 0, rank: int | None = None, priority: int = 0,
            timeout_s: float | None = None, **params) -> RequestState:  # fmt: skip
    sampling = SamplingParams(max_tokens=max(1, generated), **params)
    made = RequestState(str(length), None, [first] * length, sampling, seed=5 << 32 | 7, max_len=length + generated)
    made.rank, made.priority, made.timeout_s = rank, priority, timeout_s
    made.sequences = [SampleState(request=made, index=i) for i in range(sampling.num_sequences)]
    return made


@dataclasses.dataclass
class Outputs:
    """A round on one rank: `sampled` tokens as (slot, token), and slots that have `finished`, with their reasons."""

    sampled: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    finished: dict[int, int] = dataclasses.field(default_factory=dict)
    cached: dict[int, int] = dataclasses.field(default_factory=dict)
    lens: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        def per_slot(default: int, values: dict[int, int]) -> np.ndarray:
            return np.asarray([values.get(slot, default) for slot in range(SHAPES.num_slots)], np.int32)

        self.status = per_slot(RUNNING, dict.fromkeys(self.finished, FINISHED))
        self.finish_reason = per_slot(NOT_FINISHED, self.finished)
        self.seq_lens, self.num_cached = per_slot(0, self.lens), per_slot(0, self.cached)
        self.slot_ids = np.asarray([slot for slot, _ in self.sampled], np.int32)
        self.tokens = np.asarray([token for _, token in self.sampled], np.int32)
        self.logprobs = -np.arange(len(self.sampled), dtype=np.float32)
        self.processed_logprobs = self.logprobs / 2

    def top(self) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([self.tokens, self.tokens + 1], 1), np.stack([self.logprobs, self.logprobs - 1], 1)


def admitted(scheduler: Scheduler, round_id: int = 0) -> dict[str, Any]:
    return scheduler.next_admission(round_id, 4).arrays()


# Without JAX

DRIVE_WITHOUT_JAX = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "haliax", "equinox"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import levanter_infer.engine.scheduler
from tests.engine.test_scheduler import test_a_request_gets_a_slot_its_tokens_and_leaves_the_slot_free
test_a_request_gets_a_slot_its_tokens_and_leaves_the_slot_free()
assert not {"jax", "jaxlib", "haliax", "equinox"} & set(sys.modules)
print("served")
"""


def test_the_scheduler_works_where_jax_is_not_installed():
    done = subprocess.run([sys.executable, "-c", DRIVE_WITHOUT_JAX], capture_output=True, text=True, timeout=60)
    assert done.stdout == "served\n", done.stderr[-2000:]


# One request


def test_a_request_gets_a_slot_its_tokens_and_leaves_the_slot_free():
    scheduler = Scheduler(SHAPES, eos_token_ids=(9,))
    made = request(3, 2, first=6, logprobs=1)
    assert not scheduler.has_work
    scheduler.submit([made], now=0.0)
    assert scheduler.has_work and scheduler.has_backlog and scheduler.has_prompts and scheduler.active == []
    fields = admitted(scheduler)
    assert fields["has_pieces"].tolist() == [True] and fields["max_steps"].tolist() == [4]
    assert fields["tokens"][0, :4].tolist() == [6, 6, 6, 0]
    row = {name: fields[name][0, 0] for name in ("lens", "starts", "slot_ids", "prompt_lens", "max_lens", "arrival")}
    assert row == dict(lens=3, starts=0, slot_ids=0, prompt_lens=3, max_lens=5, arrival=1)
    assert fields["complete"][0].tolist() == [True, False, False, False]
    assert fields["slot_ids"][0].tolist() == [0, 4, 4, 4] and "cancel" not in fields
    assert fields["sampling"]["seed"][0, 0].tolist() == [5, 7]
    assert fields["sampling"]["stop_ids"][0, 0, 15] == 9
    assert fields["sampling"]["stop_lens"][0, 0].tolist() == [1, 0, 0]
    assert scheduler.active == made.sequences and not scheduler.has_backlog

    assert scheduler.collect([Outputs([(0, 11)], cached={0: 2})], 0, version=3) == [] and not scheduler.has_prompts
    assert scheduler.collect([Outputs([(0, 12)], {0: LENGTH}, cached={0: 1})], 1, version=4) == made.sequences
    sample = made.sequences[0]
    assert (sample.token_ids, sample.versions, sample.finish_reason) == ([11, 12], [3, 4], "length")
    assert sample.top_logprobs == [{11: 0.0}, {12: 0.0}] and made.num_cached_tokens == 2
    assert made.is_done and sample.slot is None and not scheduler.has_work


def test_an_idle_round_makes_four_numbers_only():
    fields = Scheduler(SHAPES, num_ranks=2).next_admission(0, 3).arrays()
    assert {name: value.tolist() for name, value in fields.items()} == {
        "max_steps": [3, 3],
        "min_free_slots": [5, 5],
        "has_pieces": [False, False],
        "has_cancellations": [False, False],
    }


def test_a_long_prompt_is_uploaded_in_several_rounds_and_its_samples_fork_with_the_last():
    scheduler, made, next_one = Scheduler(SHAPES), request(70, n=2), request(5, first=8)
    scheduler.submit([made, next_one], now=0.0)
    seen = []
    for round_id in range(3):
        fields = admitted(scheduler, round_id)
        seen.append([fields[name][0, :3].tolist() for name in ("lens", "starts", "complete")])
        wanted = 0 if round_id < 2 else SHAPES.num_slots + 1  # while a prompt is loading, the round ends for the host
        assert fields["min_free_slots"].tolist() == [wanted]
    assert seen == [
        [[32, 0, 0], [0, 0, 0], [False] * 3],
        [[32, 0, 0], [32, 0, 0], [False] * 3],
        [[6, 0, 5], [64, 0, 0], [True, True, True]],
    ]
    assert fields["fork_source"][0].tolist() == [4, 0, 4, 4] and fields["tokens"][0, 5:12].tolist() == [0] + [8] * 5 + [
        0
    ]
    assert [sample.first_round for sample in made.sequences] == [0, 2]
    # What an earlier round brings of the slot that the fork has now is not the fork's
    scheduler.collect([Outputs([(1, 30)], {1: LENGTH})], 1, 0)
    assert made.sequences[1].token_ids == [] and made.sequences[1].finish_reason is None


def test_a_request_waits_until_all_of_its_samples_have_slots():
    scheduler = Scheduler(SHAPES)
    three, two = request(n=3), request(n=2)
    scheduler.submit([three, two], now=0.0)
    assert admitted(scheduler)["min_free_slots"].tolist() == [2]
    assert [s.slot for s in two.sequences] == [None, None] and scheduler.has_backlog
    scheduler.collect([Outputs(finished={0: ERROR})], 0, 0)
    assert three.sequences[0].finish_reason == "error"
    admitted(scheduler, 1)
    assert [s.slot for s in two.sequences] == [3, 0]


def test_requests_of_a_smaller_number_get_slots_first_and_equals_in_order():
    scheduler = Scheduler(SHAPES)
    made = [request(priority=priority) for priority in (1, 0, 1, -1, 0)]
    scheduler.submit(made, now=0.0)
    admitted(scheduler)
    assert [r.sequences[0].slot for r in made] == [3, 1, None, 0, 2]


def test_requests_leave_a_long_queue_in_any_order_without_a_search():
    """Twenty thousand searches through half the queue each would take seconds."""
    queue, made = RequestQueue(), [request() for _ in range(20_000)]
    for each in made:
        queue.push(each)
    begin = time.process_time()
    for each in reversed(made[1:]):
        queue.discard(each)
        queue.discard(each)
    assert queue.first is made[0] and queue.num_samples == 1
    assert time.process_time() - begin < 1


def test_a_queue_drops_what_is_discarded_wherever_it_stands():
    queue, made = RequestQueue(), [request(priority=i % 3, n=1 + i % 2) for i in range(9)]
    for each in made:
        queue.push(each)
    assert queue.num_samples == 13 and list(queue) == [made[i] for i in (0, 3, 6, 1, 4, 7, 2, 5, 8)]
    for i in (0, 3, 6, 4, 4, 8):
        queue.discard(made[i])
    left = [queue.pop() for _ in range(4)]
    assert left == [made[i] for i in (1, 7, 2, 5)] and not queue and queue.num_samples == 0


# Ends


def test_a_sample_that_ends_by_its_text_is_cancelled_and_drops_the_rest():
    class Matcher:
        found = "x"

        def push(self, piece, num_tokens):
            return 0 if num_tokens == 2 else None

    class Decoder:
        def push(self, token):
            return "x"

    scheduler, made = Scheduler(SHAPES), request(generated=9)
    made.sequences[0].decoder, made.sequences[0].matcher = Decoder(), Matcher()  # type: ignore[assignment]
    scheduler.submit([made], now=0.0)
    admitted(scheduler)
    assert scheduler.collect([Outputs([(0, 1), (0, 2), (0, 3)])], 0, 0) == made.sequences
    assert made.sequences[0].token_ids == [1, 2] and made.sequences[0].finish_reason == "stop"
    fields = admitted(scheduler, 1)
    assert fields["cancel"].tolist() == [[True, False, False, False]] and fields["has_cancellations"].tolist() == [True]
    assert scheduler.collect([Outputs([(0, 4)])], 1, 0) == [] and made.sequences[0].slot == 0
    assert scheduler.collect([Outputs(finished={0: ABORT})], 2, 0) == [] and not scheduler.has_work
    assert made.sequences[0].finish_reason == "stop"


def test_a_cancelled_request_leaves_the_queue_its_upload_or_its_slots():
    scheduler = Scheduler(SHAPES)
    running, loading, waiting = request(n=2), request(70, n=2), request()
    scheduler.submit([running, loading, waiting], now=0.0)
    admitted(scheduler)
    assert [s.slot for s in loading.sequences] == [2, 3] and waiting.sequences[0].slot is None
    for each in (loading, waiting, running, running):
        scheduler.cancel(each)
    assert loading.sequences[1].slot is None and not scheduler.has_backlog  # the fork was not on the device yet
    assert all(s.finish_reason == "abort" for each in (running, loading, waiting) for s in each.sequences)
    fields = admitted(scheduler, 1)
    assert fields["cancel"].tolist() == [[True, True, True, False]] and not fields["has_pieces"].any()
    assert scheduler.collect([Outputs([(0, 1)], dict.fromkeys(range(3), ABORT))], 1, 0) == []
    assert not scheduler.has_work and scheduler.slots_of(running).num_free == 4


def test_a_request_that_was_never_routed_can_be_cancelled():
    made = request()
    Scheduler(SHAPES, num_ranks=2).cancel(made)
    assert made.is_done


def test_deadlines_end_requests_in_their_order_and_finished_ones_not_again():
    scheduler = Scheduler(SHAPES)
    made = [request(timeout_s=timeout) for timeout in (3.0, 1.0, None, 2.0)]
    scheduler.submit(made, now=10.0)
    admitted(scheduler)
    scheduler.collect([Outputs(finished={3: STOP})], 0, 0)
    assert scheduler.expire(10.9) == []
    assert scheduler.expire(13.0) == [made[1].sequences[0], made[0].sequences[0]]
    assert [each.sequences[0].finish_reason for each in made] == ["abort", "abort", None, "stop"]
    assert scheduler.expire(99.0) == []


def test_after_an_abort_of_all_the_scheduler_starts_anew():
    scheduler = Scheduler(SHAPES)
    running, scored, waiting = request(n=2), request(prompt_logprobs=0), request(n=4, timeout_s=1.0)
    scheduler.submit([running, scored, waiting], now=0.0)
    admitted(scheduler)
    scored.sequences[0].finish("stop")
    scheduler.round_length.on_round(True, 2, 0.1)
    scheduler.abort_all()
    assert {s.finish_reason for each in (running, scored, waiting) for s in each.sequences} == {"abort"}
    assert all(s.slot is None for each in (running, waiting) for s in each.sequences)
    assert not scheduler.has_work and scheduler.expire(99.0) == [] and scheduler.steps() == 8  # what was learnt stays
    after = request()
    scheduler.submit([after], now=0.0)
    assert admitted(scheduler)["arrival"][0, 0] == 1 and after.sequences[0].slot == 0


def test_no_request_starts_while_admission_is_off():
    scheduler = Scheduler(SHAPES)
    scheduler.admits = False
    scheduler.submit([request()], now=0.0)
    fields = admitted(scheduler)
    assert not fields["has_pieces"].any() and fields["min_free_slots"].tolist() == [5] and not scheduler.has_backlog
    scheduler.admits = True
    assert admitted(scheduler)["has_pieces"].all()


def test_a_scored_prompt_is_done_once_its_scores_are_read():
    scheduler, made = Scheduler(SHAPES), request(prompt_logprobs=0)
    scheduler.submit([made], now=0.0)
    admitted(scheduler)
    scheduler.collect([Outputs([(0, 1)], {0: STOP})], 0, 0)
    assert scheduler.pop_scored() == [(made, 0)] and scheduler.pop_scored() == [] and not made.is_done
    made.prompt_scores = PromptScores(np.zeros(2), np.zeros((2, 0)), np.zeros((2, 0)))
    assert made.is_done and not scheduler.has_work


def test_a_search_is_reported_when_the_device_has_finished_it_and_carries_its_versions():
    scheduler = Scheduler(SHAPES)
    made = request(3, 4, num_beams=3, n=2, temperature=0.0, length_penalty=0.5, early_stopping=True)
    scheduler.submit([made], now=0.0)
    beams = {name: column[0, :4].tolist() for name, column in admitted(scheduler)["beams"].items()}
    assert beams == dict(
        places=[0, 1, 2, 0], widths=[3, 3, 3, 0], early_stopping=[EARLY] * 3 + [0], leaders=[0, 0, 0, 4],
        length_penalty=[0.5] * 3 + [0.0],
    )  # fmt: skip
    assert scheduler.finished_searches([Outputs(lens={0: 5})], 0, version=7) == []
    ended = Outputs(finished=dict.fromkeys(range(3), LENGTH), lens={0: 6})
    assert scheduler.finished_searches([ended], 1, version=8) == [made]
    assert made.search_versions == [7, 7, 8, 8]


# Ranks


def test_requests_with_a_common_prefix_go_to_one_rank_and_ranks_get_equal_work():
    made = [request(20, 10, first=i % 8) for i in range(64)]
    ranks = route(made, [0, 0, 0, 0], page_size=16)
    for first in range(8):
        assert len({ranks[i] for i in range(64) if i % 8 == first}) == 1
    assert [ranks.count(rank) for rank in range(4)] == [16] * 4
    assert ranks == route(made, [0, 0, 0, 0], page_size=16)
    assert len(set(route([request(4, 10) for _ in range(8)], [0] * 4, page_size=16))) == 4  # shorter than a page


def test_one_prefix_for_all_is_cut_and_loads_count():
    alike = [request(20, 10) for _ in range(64)]
    ranks = route(alike, [0] * 4, page_size=16)
    assert max(ranks.count(rank) for rank in range(4)) <= 17
    ranks = route([request(4, 10) for _ in range(10)], [10_000, 0], page_size=16)
    assert set(ranks) == {1}


def test_expected_tokens_are_those_of_all_samples_and_one_prompt():
    assert expected_tokens(request(20, 10, n=3)) == 20 + 3 * 10


def test_mixed_lengths_leave_ranks_at_most_a_twentieth_apart():
    rng = np.random.default_rng(0)
    made = [request(int(rng.integers(1, 300)), int(rng.integers(1, 500)), first=i) for i in range(200)]
    loads = np.zeros(4)
    for each, rank in zip(made, route(made, [0] * 4, page_size=16), strict=True):
        loads[rank] += expected_tokens(each)
    assert loads.min() > 0.95 * loads.max()


def test_what_is_submitted_later_is_routed_beside_what_has_not_finished():
    scheduler = Scheduler(SHAPES, num_ranks=2)
    first = request(40, 40)
    scheduler.submit([first], now=0.0)
    later = [request(4, 4) for _ in range(3)]
    for each in later:
        scheduler.submit([each], now=0.0)
    assert (first.rank, [each.rank for each in later]) == (0, [1] * 3)
    first.sequences[0].finish("stop")
    last = request(4, 4)
    scheduler.submit([last], now=0.0)
    assert last.rank == 0


def test_a_rank_with_spare_slots_takes_over_what_waits_elsewhere_and_deadlines_follow():
    scheduler = Scheduler(SHAPES, num_ranks=2)
    alike = [request(20, 10, first=1, rank=0, timeout_s=100.0 + i) for i in range(12)]
    scheduler.submit([*alike, request(3, 4, rank=1)], now=0.0)
    wide = dataclasses.replace(SHAPES, upload_tokens=4096)
    scheduler.shapes = wide
    admitted(scheduler)
    assert [made.rank for made in alike] == [1] * 3 + [0] * 9  # four slots there, one of them taken
    admitted(scheduler, 1)
    assert [made.rank for made in alike] == [1] * 3 + [0] * 9  # no spare slots left
    assert [made.sequences[0].slot is not None for made in alike] == [True] * 7 + [False] * 5
    assert scheduler.expire(104.5) == [made.sequences[0] for made in alike[:5]]
    cancelled = admitted(scheduler, 2)["cancel"]
    assert cancelled.sum(axis=1).tolist() == [2, 3]
    assert scheduler.slots_of(alike[4]) is not scheduler.slots_of(alike[0])


def test_spare_slots_are_counted_in_samples_and_shared_out_evenly():
    scheduler = Scheduler(dataclasses.replace(SHAPES, upload_tokens=4096), num_ranks=4)
    many = [request(5 + i, 4, n=2, rank=0) for i in range(6)]
    scheduler.submit([*many, request(30, 4, n=4, rank=0, priority=-1)], now=0.0)
    admitted(scheduler)
    assert sorted(len(rank.active) for rank in scheduler._ranks) == [4, 4, 4, 4]
    assert not scheduler.has_backlog and scheduler._ranks[0].num_spare == 0


def test_outputs_go_to_the_slots_of_their_own_rank():
    scheduler = Scheduler(SHAPES, num_ranks=2)
    made = [request(rank=0), request(rank=1)]
    scheduler.submit(made, now=0.0)
    fields = admitted(scheduler)
    assert fields["slot_ids"].tolist() == [[0, 4, 4, 4]] * 2 and scheduler.roots().tolist() == [[-1] * 4] * 2
    scheduler.collect([Outputs([(0, 1)]), Outputs([(0, 2)], {0: STOP})], 0, 0)
    assert [each.sequences[0].token_ids for each in made] == [[1], [2]]
    assert scheduler.active == made[0].sequences and scheduler.requests() == made[:1]


# Round length


def test_rounds_double_until_they_take_their_time():
    controller, lens = RoundLengthController(max_steps=64, max_seconds=0.5), []
    for _ in range(5):
        lens.append(controller.steps(False))
        controller.on_round(False, steps=controller.steps(False), seconds=0.01 * controller.steps(False))
    assert lens == [8, 16, 32, 50, 50]
    assert controller.seconds(False, 50) == pytest.approx(0.5)
    controller.on_round(False, steps=50, seconds=5.0)
    assert controller.steps(False) == 5
    controller.on_round(False, steps=1, seconds=7.0)
    assert controller.steps(False) == 1


def test_rounds_are_limited_for_a_while_and_grow_again():
    controller = RoundLengthController(max_steps=64, max_seconds=0.5)

    def run() -> int:
        steps = controller.steps(False)
        controller.on_round(False, steps=steps, seconds=0.01 * steps)
        return steps

    assert [run() for _ in range(4)] == [8, 16, 32, 50]
    with controller.limited(0.05):
        assert [run() for _ in range(3)] == [5, 5, 5] and controller.steps(True) == 2
    assert [run() for _ in range(2)] == [50, 50]
    with controller.limited(2.0):  # no rounds longer than without it
        assert run() == 50


def test_rounds_with_prompts_do_not_become_as_long_as_those_without():
    controller = RoundLengthController(max_steps=64, max_seconds=0.5)
    for _ in range(9):
        controller.on_round(False, steps=controller.steps(False), seconds=0.001 * controller.steps(False))
        controller.on_round(True, steps=controller.steps(True), seconds=0.1 * controller.steps(True))
    assert (controller.steps(False), controller.steps(True)) == (64, 5)
    controller.on_round(False, steps=0, seconds=3.0)
    assert controller.steps(False) == 64


def test_rounds_that_could_compute_prompts_and_do_not_grow_within_bounds():
    controller = RoundLengthController(max_steps=64, max_seconds=0.05)
    controller.on_round(True, steps=2, seconds=0.1)  # a step with a prompt chunk takes 50 ms
    assert controller.steps(True) == 1
    lens = []
    for _ in range(5):
        lens.append(controller.steps(True))
        controller.on_round(False, steps=lens[-1], seconds=0.003 * lens[-1], expected_prompts=True)
    assert lens == [1, 2, 4, 8, 8]  # eight would take 0.4 s if all of them computed prompts
    controller.on_round(True, steps=8, seconds=0.1 + 6 * 0.003, expected_prompts=True)
    assert controller.steps(True) == 3
    controller.on_round(False, steps=3, seconds=0.09, expected_prompts=True)  # as slow as those with prompts
    assert controller.steps(True) == 3


def test_rounds_of_several_ranks_get_as_long_as_their_requests_suffice():
    controller = RoundLengthController(max_steps=64, max_seconds=100.0)
    for _ in range(5):
        controller.on_round(False, 64, 0.1)
        controller.on_round(True, 64, 0.1)
    controller.on_ranks(False, [64, 63, 62, 61])  # a few steps are nothing
    assert controller.steps(False) == 64
    controller.on_ranks(False, [40, 12, 40, 40])
    assert controller.steps(False) == 20 and controller.steps(True) == 64
    for _ in range(30):
        controller.on_ranks(False, [20, 20, 20, 20])
    assert 40 < controller.steps(False) < 64
    controller.on_ranks(False, [2, 0])
    controller.on_ranks(False, [1, 0])
    assert controller.steps(False) == 1 and controller.steps(False, wanted=3) == 1
    for _ in range(4):
        controller.on_ranks(False, [1, 1])
    assert controller.steps(False) == 2
    controller.on_ranks(True, [])  # no request waits any more
    assert controller.steps(False) == 64


@pytest.mark.parametrize("is_waiting", [False, True])
def test_idle_ranks_shorten_rounds_only_while_a_request_waits(is_waiting):
    scheduler = Scheduler(SHAPES, num_ranks=2)
    for _ in range(3):
        scheduler.on_round(steps=8, prompt_steps=0, seconds=0.01, rank_steps=[8, 8])
    if is_waiting:
        scheduler.submit([request(n=4, rank=0) for _ in range(3)], now=0.0)
        admitted(scheduler)
        assert scheduler.has_backlog
    scheduler.on_round(steps=8, prompt_steps=0, seconds=0.01, rank_steps=[8, 2])
    assert scheduler.round_length.steps(False) == (4 if is_waiting else 8)


# Limits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": 30}, "logprobs=30 but engine.max_logprobs=20; raise engine.max_logprobs"),
        ({"prompt_logprobs": 2}, "prompt_logprobs=2 but engine.max_prompt_logprobs=1; raise"),
        ({"logit_bias": dict.fromkeys(range(4), 1.0)}, "logit_bias has 4 entries but engine.max_logit_bias=3; raise"),
        ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids has 3 entries but engine.max_stop_sequences=2"),
        ({"stop": ["a", "b", "c"]}, "stop has 3 entries but engine.max_stop_sequences=2"),
        ({"stop_token_ids": [list(range(17))]}, r"stop_token_ids\[0\] has 17 tokens; .* at most 16"),
        ({"stop_token_ids": [1, [2, 100]]}, r"stop_token_ids\[1\] holds token id 100, outside the vocabulary of 100"),
        ({"logit_bias": {100: 1.0}}, "logit_bias holds token id 100, outside the vocabulary of 100 tokens"),
    ],
)
def test_request_beyond_a_static_limit_is_refused_with_the_config_key(changes, message):
    with pytest.raises(ValueError, match=message):
        validate_sampling(SamplingParams(**changes), LIMITS)
    with pytest.raises(ValueError, match=message):
        validate(Request(prompt_token_ids=[1], sampling=SamplingParams(**changes)), LIMITS)


def test_request_at_every_limit_is_accepted():
    params = SamplingParams(
        max_tokens=32,
        logprobs=20,
        logit_bias={0: 1.0, 98: 1.0, 99: 1.0},
        stop=["a", "b"],
        stop_token_ids=[list(range(16)), 99],
        n=8,
    )
    asked = Request(
        prompt_token_ids=np.asarray([99] * 63), sampling=params, id="i" * 4096, cache_salt="s" * 256,
        priority=np.int64(-(2**31)), timeout_s=10**9,  # type: ignore[arg-type]
    )  # fmt: skip
    made = validate(asked, LIMITS)
    assert made == dataclasses.replace(asked, prompt_token_ids=[99] * 63, priority=-(2**31), timeout_s=1e9)
    assert type(made.priority) is int and type(made.timeout_s) is float and type(made.prompt_token_ids[0]) is int


@pytest.mark.parametrize(
    ("changes", "params", "message"),
    [
        ({"id": "i" * 4097}, {}, "id='i.*expected a string of up to 4096 characters"),
        ({"sampling": {"n": 1}}, {}, "sampling is dict; expected SamplingParams"),
        ({"prompt_token_ids": []}, {}, "the prompt is empty; give at least one token"),
        ({"prompt_token_ids": "text"}, {}, "prompt_token_ids is str; expected a list of token ids"),
        (
            {"prompt_token_ids": [[1]]},
            {},
            r"prompt_token_ids\[0\]=\[1\] is not an integer; expected token ids from 0 to 99",
        ),
        ({"prompt_token_ids": [1, True]}, {}, r"prompt_token_ids\[1\]=True is not an integer"),
        ({"prompt_token_ids": [1, 100]}, {}, r"prompt_token_ids\[1\]=100 is outside the vocabulary of 100 tokens"),
        ({"prompt_token_ids": [-1]}, {}, r"prompt_token_ids\[0\]=-1 is outside the vocabulary"),
        ({"prompt_token_ids": np.zeros((1, 2), int)}, {}, r"shape \(1, 2\); expected one dimension"),
        ({"prompt_token_ids": range(10**12)}, {}, "the prompt has 1000000000000 tokens, which leaves no token to"),
        (
            {"prompt_token_ids": [1] * 65},
            {"max_tokens": 0, "prompt_logprobs": 0},
            "65 tokens, more than engine.max_seq",
        ),
        ({}, {"max_tokens": 65}, "max_tokens=65 exceeds engine.max_seq_len=64; lower it or raise"),
        ({}, {"n": 9}, "n=9 exceeds the 8 slots that engine.max_seqs=4 gives; raise engine.max_seqs"),
        ({}, {"best_of": 9}, "best_of=9 exceeds the 8 slots"),
        ({}, {"num_beams": 9}, "num_beams=9 exceeds the 8 slots"),
        ({}, {"num_beams": 5}, "num_beams=5 exceeds engine.max_seqs=4: beams run together"),
        ({}, {"num_beams": 4, "max_tokens": 17}, "num_beams=4 beams of up to 18 tokens, .* may need 8 pages"),
        ({"cache_salt": ""}, {}, "cache_salt='': expected 1 to 256 characters"),
        ({"priority": 2**31 - 1}, {}, "priority=2147483647: expected a whole number from"),
        ({"timeout_s": float("nan")}, {}, "timeout_s=nan: expected seconds above 0 and up to 1e9"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_says_why(changes, params, message):
    fields: dict[str, Any] = {"prompt_token_ids": [1], "sampling": SamplingParams(**{"max_tokens": 4, **params})}
    with pytest.raises(ValueError, match=message):
        validate(Request(**{**fields, **changes}), LIMITS)


def test_pages_are_counted_for_the_longest_sequence_and_for_beams_beyond_the_prompt():
    few = dataclasses.replace(LIMITS, num_pages=3)
    asked = Request(prompt_token_ids=[1] * 33, sampling=SamplingParams(max_tokens=15))
    assert validate(asked, few).sampling == asked.sampling
    with pytest.raises(ValueError, match=r"may need 4 pages \(33 prompt tokens and up to 16 more, 16 a page\)"):
        validate(dataclasses.replace(asked, sampling=SamplingParams(max_tokens=16)), few)
    beams = SamplingParams(max_tokens=15, num_beams=4, temperature=0.0)
    validate(dataclasses.replace(asked, sampling=beams), LIMITS)  # two pages shared, and one for each of four
    with pytest.raises(ValueError, match="may need 6 pages of 16 tokens and the pool has 5"):
        validate(dataclasses.replace(asked, sampling=beams), dataclasses.replace(LIMITS, num_pages=5))


def test_stop_strings_need_a_tokenizer():
    asked = Request(prompt_token_ids=[1], sampling=SamplingParams(stop="a"))
    with pytest.raises(ValueError, match="stop strings need a tokenizer and this engine has none"):
        validate(asked, dataclasses.replace(LIMITS, has_tokenizer=False))
