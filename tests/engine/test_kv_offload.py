"""Pages that move to host memory and back: results, reference counts, and nothing left behind."""

import dataclasses
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.cache.arrays import replace
from levanter_infer.cache.page_math import pages_for
from levanter_infer.decode.codes import RUNNING, SWAPPED
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.decode.kv_offload import swap_in
from levanter_infer.decode.state import DecodeState
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.kv_offload import KvOffload, _Member, _Record, _Tables
from levanter_infer.engine.metrics import Registry
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.pure import generate
from levanter_infer.engine.request import Request
from levanter_infer.engine.runner import empty_admission
from levanter_infer.engine.sizes import resolve_shapes
from levanter_infer.kernels.cpu import bindings as cpu
from tests.hlo import pool_copies
from tests.tiny_models import tiny_model

PAGES = 20


@pytest.fixture(scope="module")
def shared_engine():
    numerics = "batch_invariant" if cpu.available() else "default"
    sizes = dict(max_seqs=4, max_seq_len=64, page_size=4, max_pages=PAGES, max_step_tokens=16)
    config = EngineConfig(**sizes, preempt="offload", numerics=numerics)
    return InferenceEngine(tiny_model(), config=config, scoring=True)  # as in test_turns.py: compiled once for both


@pytest.fixture
def engine(shared_engine, monkeypatch):
    """With nothing in it, and invariants that are checked whenever pages have moved."""
    shared_engine.reset()
    for name in ("_mark_swapped", "_swap_in_tables"):
        operation = getattr(KvOffload, name)

        def checked(self, *arguments, operation=operation):
            result = operation(self, *arguments)
            check_invariants(self._runner.state.decode)
            return result

        monkeypatch.setattr(KvOffload, name, checked)
    return shared_engine


def request(seed: int, prompt: int = 9, max_tokens: int = 20, n: int = 1) -> Request:
    ids = np.random.default_rng(seed).integers(0, 61, prompt).tolist()
    sampling = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    return Request(prompt_token_ids=ids, sampling=sampling, id=str(seed))


def bits(completions) -> list:
    """Tokens of every completion, and the bits of its logprobs where they do not depend on the batch."""
    return [(c.token_ids, c.logprobs.tobytes() if cpu.available() else None) for c in completions]


def completions(group) -> list:
    return [sequence.completion() for sequence in group.sequences]


def alone(engine: InferenceEngine, *requests: Request) -> list[list]:
    return [bits(engine.generate([request])[0].completions) for request in requests]


def grown(engine: InferenceEngine, before: dict, *names: str) -> list:
    return [engine.stats()[name] - before[name] for name in names]


def started(engine: InferenceEngine, request: Request, steps: int):
    """The group of a request that has run a few steps."""
    group = engine.submit(request)
    for _ in range(steps):
        engine.step_round(max_steps=1)
    return group


def free_pages(engine: InferenceEngine) -> int:
    return int(engine.state.decode.page_table.num_free)


def flush_known(engine: InferenceEngine) -> None:
    """Read the round in flight, so that what the tables say is the last word."""
    engine._rounds.pause()


def check_idle(engine: InferenceEngine) -> None:
    engine.drain()
    check_invariants(engine.state.decode)
    stats = engine.stats()
    assert stats["pages_free"] == free_pages(engine) == PAGES
    assert stats["offloaded_bytes"] == stats["offloaded_sequences"] == 0


REQUESTS = [request(i, prompt=5 + 3 * i, max_tokens=30 - i, n=1 + 2 * (i == 3)) for i in range(7)]


@pytest.mark.parametrize("host", ["roomy", "full", "exhausted"])
def test_bits_in_a_pool_that_is_too_small_are_those_of_each_alone(engine, host, monkeypatch, caplog):
    expected = alone(engine, *REQUESTS)
    before = engine.stats()
    if host == "full":
        monkeypatch.setattr(engine._rounds.offload, "_max_bytes", 0)
    elif host == "exhausted":

        def nothing_left(kv, pages):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8192 bytes.")

        monkeypatch.setattr(engine.programs.tier, "read_pages", nothing_left)
    assert [bits(output.completions) for output in engine.generate(REQUESTS)] == expected
    offloaded, prefetched, recomputed, preemptions = grown(
        engine, before, "offloaded_pages", "prefetched_pages", "recomputed_tokens", "preemptions"
    )
    if host == "roomy":
        assert offloaded == prefetched > 0 and recomputed == preemptions == 0
    else:
        assert offloaded == prefetched == 0 and recomputed > 0 and preemptions > 0
    assert ("uses 0 bytes of host memory and no more" in caplog.text) == (host == "exhausted")
    check_idle(engine)


class ARecord:
    """As `_Record`: it uses 5 pages, and needs 3 more to go on."""

    def used(self):
        return np.arange(5)

    def return_pages(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("free", "statuses", "max_seqs", "fits"),
    [
        (10, [RUNNING], 4, True),  # 8 pages, and the 2 that the running one will need
        (9, [RUNNING], 4, False),
        (12, [RUNNING, RUNNING], 4, True),
        (11, [RUNNING, RUNNING], 4, False),
        (12, [RUNNING, RUNNING], 2, False),  # no place
        (5, [SWAPPED], 4, True),  # no sequence runs: it may come back without free pages
        (4, [SWAPPED], 4, False),
    ],
)
def test_a_group_comes_back_when_those_who_run_keep_the_room_that_they_need(free, statuses, max_seqs, fits):
    tables = object.__new__(_Tables)
    tables.free, tables.free_of_windows, tables.status = free, [], np.asarray(statuses)
    tables.goes_on, tables.growth = tables.status == RUNNING, np.full(len(statuses), 2)
    assert tables.fits(ARecord(), max_seqs) == fits  # type: ignore[arg-type]


def test_the_youngest_group_leaves_first(engine):
    """Not the one that has been used least recently: all that run are used in every step."""
    engine.warmup()
    groups = [engine.submit(request(20 + i, prompt=9, max_tokens=30)) for i in range(3)]
    left: list[str] = []
    while not all(group.is_done for group in groups):
        engine.step_round(max_steps=1)
        gone = [m.sequence.request.id for record in engine._rounds.offload._records for m in record.remaining()]
        left += [name for name in gone if name not in left]
    assert left[0] == "22" and "20" not in left
    check_idle(engine)


def test_a_sequence_moved_by_hand_waits_holds_nothing_and_goes_on_as_if_nothing_had_been(engine):
    subject, other = request(11), request(12)
    expected = alone(engine, subject, other)
    group = started(engine, subject, 5)
    (sequence,) = group.sequences
    pages = engine.spill_to_host(sequence)
    stats, known = engine.stats(), len(sequence.token_ids)
    assert pages == pages_for(9 + known - 1, 4) and free_pages(engine) == PAGES
    assert stats["offloaded_sequences"] == 1 and stats["offloaded_bytes"] >= pages * stats["page_bytes"]
    contents = [record.contents for record in engine._rounds.offload._records]
    assert {array.sharding.memory_kind for array in jax.tree.leaves(contents)} == {"pinned_host"}
    other_group = engine.submit(other)
    while not other_group.is_done:
        engine.step_round()
    assert len(sequence.token_ids) == known
    engine.prefetch(sequence)
    assert free_pages(engine) == PAGES - pages and engine.stats()["offloaded_bytes"] == 0
    check_idle(engine)
    assert [bits(completions(group)), bits(completions(other_group))] == expected


def test_draining_brings_back_whom_nobody_asked_for(engine):
    expected = alone(engine, request(13))
    group = started(engine, request(13), 4)
    engine.spill_to_host(group.sequences[0])
    check_idle(engine)
    assert bits(completions(group)) == expected[0]


def test_one_of_several_that_share_takes_copies_and_comes_back_with_pages_of_its_own(engine):
    subject = request(14, prompt=13, n=3)
    expected = alone(engine, subject)
    group = started(engine, subject, 4)
    first, second, _ = group.sequences
    flush_known(engine)
    before = free_pages(engine)
    held = engine.spill_to_host(second)
    assert held == pages_for(13 + len(second.token_ids) - 1, 4)
    assert free_pages(engine) == before + held - 3  # the full pages of the prompt stay with the others
    engine.prefetch(second)
    assert free_pages(engine) == before - 3
    engine.spill_to_host(first)
    check_idle(engine)
    assert bits(completions(group)) == expected[0]


def test_a_group_that_leaves_together_shares_again_what_it_shared(engine):
    group = started(engine, request(15, prompt=26, max_tokens=9, n=3), 5)
    flush_known(engine)
    indices = np.array(engine.state.decode.sequences.page_indices)
    counts = np.sort(np.array(engine.state.decode.page_table.ref_counts))
    tables = _Tables(engine.runner)
    assert engine._rounds.offload._move_out(tables, group.sequences, stays=True)
    (record,) = engine._rounds.offload._records
    assert len(record.used()) == (counts > 0).sum() < (indices < PAGES).sum()
    assert free_pages(engine) == PAGES == tables.free
    engine.prefetch(group.sequences[1])
    assert np.array_equal(np.sort(np.array(engine.state.decode.page_table.ref_counts)), counts)
    check_idle(engine)


def test_cancelled_sequences_leave_nothing_with_the_host(engine):
    group = started(engine, request(16, prompt=13, n=3), 4)
    for sequence in group.sequences[:2]:
        engine.spill_to_host(sequence)
    other = started(engine, request(17), 1)
    assert engine.stats()["offloaded_sequences"] == 2
    engine.cancel(group)
    assert engine.stats()["offloaded_bytes"] == 0
    with pytest.raises(ValueError, match="not in host memory"):
        engine.prefetch(group.sequences[0])
    check_idle(engine)
    assert bits(completions(other)) == alone(engine, request(17))[0]


def test_a_deadline_ends_who_is_in_the_memory_of_the_host_and_nobody_else(engine, monkeypatch):
    """Also where it passes while nothing is under way, and the host has learned it from nothing else."""
    kept, late = request(24, prompt=30, max_tokens=34), request(25, prompt=20, max_tokens=40)
    first = engine.submit(kept)
    group = engine.submit(dataclasses.replace(late, timeout_s=1000))
    while not engine.stats()["offloaded_sequences"]:
        engine.step_round(max_steps=1)
    assert [member.sequence.request for member in engine._rounds.offload._records[0].members] == [group]
    now = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now() + 2000)
    assert group.sequences[0] in engine.step_round(max_steps=1)
    assert group.sequences[0].finish_reason == "abort"
    check_idle(engine)
    assert bits(completions(first)) == alone(engine, kept)[0]


def test_one_that_ended_meanwhile_does_not_come_back_with_its_group(engine):
    expected = alone(engine, request(18, prompt=13, n=3))[0]
    group = started(engine, request(18, prompt=13, n=3), 4)
    flush_known(engine)
    tables = _Tables(engine.runner)
    assert engine._rounds.offload._move_out(tables, group.sequences, stays=True)
    ended = group.sequences[1]
    ended.finish("stop")
    engine._scheduler.slots_of(group).cancel_slot(ended)
    before = engine.stats()
    engine.prefetch(group.sequences[0])
    assert grown(engine, before, "prefetched_pages") < grown(engine, dict.fromkeys(before, 0), "offloaded_pages")
    check_idle(engine)
    found = bits(completions(group))
    assert (found[0], found[2]) == (expected[0], expected[2])


def test_reset_forgets_what_the_host_has(engine):
    group = started(engine, request(19), 4)
    engine.spill_to_host(group.sequences[0])
    engine.reset()
    assert engine.stats()["offloaded_bytes"] == 0 and free_pages(engine) == PAGES
    with pytest.raises(ValueError, match="not in host memory"):
        engine.prefetch(group.sequences[0])
    assert completions(group)[0].finish_reason == "abort"


@pytest.mark.parametrize("policy", ["offload", "recompute"])
def test_without_room_it_comes_back_when_there_is_or_computes_again(engine, policy, monkeypatch):
    """`preempt` decides; the older sequence fills the pool meanwhile."""
    long, short = request(20, prompt=50, max_tokens=14), request(21, prompt=30, max_tokens=9)
    expected = alone(engine, long, short)
    group = started(engine, short, 4)
    engine.spill_to_host(group.sequences[0])
    filling = started(engine, long, 5)
    if policy == "recompute":
        monkeypatch.setattr(engine._rounds.offload, "_shapes", dataclasses.replace(engine.shapes, offload=False))
    before = engine.stats()
    engine.prefetch(group.sequences[0])
    flush_known(engine)
    recomputed, prefetched = grown(engine, before, "recomputed_tokens", "prefetched_pages")
    assert (recomputed > 0) == (policy == "recompute") and prefetched == 0
    slot = group.sequences[0].slot
    assert (engine.state.decode.sequences.status[slot] == SWAPPED) == (policy == "offload")
    check_idle(engine)
    assert (grown(engine, before, "prefetched_pages")[0] > 0) == (policy == "offload")
    assert [bits(completions(filling)), bits(completions(group))] == expected


def test_what_cannot_be_moved_is_said(engine, monkeypatch):
    waiting = engine.submit(request(22))
    assert engine.spill_to_host(waiting.sequences[0]) == 0  # it holds nothing yet
    engine.drain()
    assert engine.spill_to_host(waiting.sequences[0]) == 0
    with pytest.raises(ValueError, match="not in host memory"):
        engine.prefetch(waiting.sequences[0])
    group = started(engine, request(23), 4)
    monkeypatch.setattr(engine._rounds.offload, "_max_bytes", 100)
    with pytest.raises(ValueError, match=r"0 of its 100 bytes are in use; .* raise engine\.host_bytes"):
        engine.spill_to_host(group.sequences[0])
    check_idle(engine)


def test_what_a_scored_prompt_has_computed_itself_is_not_found_when_it_computes_itself_again(engine):
    """Its scores are not moved, so it starts again, and finds its own pages."""
    asked = request(40, prompt=27, max_tokens=2)
    asked = dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, prompt_logprobs=0))
    group = started(engine, asked, 1)
    flush_known(engine)
    (sequence,) = group.sequences
    assert engine.state.decode.sequences.num_computed[sequence.slot] == 16
    assert engine.spill_to_host(sequence) == 4
    engine.prefetch(sequence)
    check_idle(engine)
    assert group.is_done and group.output().num_cached_tokens == 0


def test_beams_that_compute_themselves_again_share_their_prompt(engine):
    """Without that a pool that holds a search might not hold it any more."""
    state = DecodeState.init(dataclasses.replace(engine.shapes, max_beams=4))
    num_slots = engine.shapes.num_slots
    column, beams = np.arange(num_slots), np.isin(np.arange(num_slots), [1, 2, 3])
    params = replace(
        state.beams.params,
        leaders=jnp.asarray(np.where(beams, 1, num_slots), jnp.int32),
        places=jnp.asarray(np.where(beams, column - 1, 0), jnp.int32),
        widths=jnp.asarray(3 * beams, jnp.int32),
    )
    status = jnp.asarray(np.where(beams, SWAPPED, 0), jnp.int32)
    state = dataclasses.replace(
        state, beams=replace(state.beams, params=params), sequences=replace(state.sequences, status=status)
    )
    nothing = jnp.full(state.sequences.page_indices.shape, PAGES, jnp.int32)
    computed = jnp.zeros(num_slots, jnp.int32)
    state, _ = swap_in(state, jnp.asarray(beams), nothing, computed, jnp.int32(0))
    assert state.sequences.fork_source.tolist() == [num_slots, num_slots, 1, 1, *[num_slots] * (num_slots - 4)]


def test_the_tables_are_read_without_a_copy_on_the_device(engine, monkeypatch):
    """A copy of an array is a computation of its own, which a mesh that the caller has set refuses."""
    monkeypatch.setattr(type(engine.state.decode.sequences.status), "__deepcopy__", None)
    tables = engine.runner.table_snapshot()
    assert tables["status"].shape == (engine.shapes.num_slots,) and tables["ref_counts"].shape == (PAGES,)


def test_moving_pages_copies_no_pool(engine, optimized):
    cache, shapes = engine.state.cache, engine.shapes
    pages = jax.ShapeDtypeStruct((shapes.transfer_pages,), np.int32)
    contents = jax.eval_shape(engine.programs.tier.read_pages.jitted, cache, pages)
    pool = cache.pools[0].pages.array
    for program, arguments in (
        (engine.programs.tier.read_pages, (cache, pages)),
        (engine.programs.tier.write_pages, (cache, contents, jax.ShapeDtypeStruct((PAGES,), np.int32), pages)),
    ):
        compiled = program.jitted.lower(*arguments).compile()
        assert pool_copies(compiled.as_text(), pool.shape, pool.dtype) == []


def test_the_default_policy_knows_nothing_of_it():
    engine = SimpleNamespace(shapes=resolve_shapes(EngineConfig(max_seqs=2, max_pages=9), tiny_model(), 0))
    assert empty_admission(engine.shapes).host is None
    tier = KvOffload(engine, Registry(), None)
    assert tier.terms() == {} and not tier.is_called


def test_a_pure_function_has_no_host():
    config = EngineConfig(preempt="offload")
    with pytest.raises(ValueError, match="needs a host"):
        generate(tiny_model(), [[1, 2]], [2], config=config)


def test_of_those_that_left_the_first_in_order_comes_back_next():
    """By priority, then by arrival, whenever they left; not records that stay until asked for, nor empty ones."""

    def record(priority: int, arrival: int, *, stays: bool = False, reason: str | None = None) -> _Record:
        request = SimpleNamespace(priority=priority)
        sequence = SimpleNamespace(request=request, arrival=arrival, slot=0, finish_reason=reason)
        return _Record([_Member(sequence, 0, np.zeros(1, np.int32), 0, 0)], [], stays)  # type: ignore[arg-type]

    tier = KvOffload.__new__(KvOffload)
    young, old, urgent = record(1, 9), record(1, 4), record(0, 7)
    tier._records = [record(0, 1, stays=True), young, old, urgent, record(0, 2, reason="stop")]
    for expected in (urgent, old, young):
        assert tier._first() is expected
        tier._records.remove(expected)
    assert tier._first() is None
