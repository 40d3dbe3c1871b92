"""Sleep: the pool's memory goes back, nothing is lost, and nothing is compiled again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.checkpoints.save import save_model
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.models.uncached import next_token
from levanter_infer.runtime.memory import process_bytes
from tests.tiny_models import tiny_model, uncached_greedy

SIZES = dict(max_seqs=4, max_seq_len=64, page_size=16, max_pages=25_000, max_step_tokens=16)
ORACLE = jax.jit(next_token)


@pytest.fixture(scope="module")
def shared():
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES))
    engine.warmup(weight_updates=True)
    return engine


@pytest.fixture
def engine(shared):
    shared.wake()
    shared.reset()
    shared.swap_weights(tiny_model(), version=shared.version + 1000)
    yield shared
    shared.drain()
    check_invariants(shared.state.decode)
    assert shared.stats()["pages_free"] == shared.shapes.num_pages


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 61, length).tolist()


def request(ids: list[int], **sampling) -> Request:
    return Request(prompt_token_ids=ids, sampling=SamplingParams(ignore_eos=True, **{"max_tokens": 12, **sampling}))


def sampled(groups) -> list:
    return [sequence.token_ids for group in groups for sequence in group.sequences]


def likeliest(model, tokens: list[int]) -> int:
    padded = jnp.asarray(tokens + [0] * (64 - len(tokens)), jnp.int32)
    return int(ORACLE(model, padded, jnp.int32(len(tokens))))


def test_the_pool_goes_back_to_the_system_and_the_weights_stay_bit_by_bit(engine):
    pool = engine.state.cache.nbytes
    before = [np.array(leaf) for leaf in jax.tree.leaves(engine.model)]
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.model)]
    engine.zero_cache()  # touches every page of the pool, so that it is resident
    engine.generate([request(text(9))])
    live, resident = sum(leaf.nbytes for leaf in jax.live_arrays()), process_bytes()[0]
    engine.sleep()
    asleep = sum(leaf.nbytes for leaf in jax.live_arrays())
    assert pool > 50 << 20 and live - asleep == pool
    assert resident - process_bytes()[0] > 0.95 * pool
    assert engine.describe()["pool_mb"] == round(pool / 2**20, 1)
    programs = engine.stats()["programs"]
    engine.wake()
    assert sum(leaf.nbytes for leaf in jax.live_arrays()) == live
    for old, place, new in zip(before, places, jax.tree.leaves(engine.model), strict=True):
        assert new.unsafe_buffer_pointer() == place and (np.asarray(new).view(np.uint8) == old.view(np.uint8)).all()
    engine.generate([request(text(9))])
    assert engine.stats()["programs"] == programs


def test_requests_in_progress_and_waiting_ones_go_on_as_if_the_engine_had_never_slept(engine):
    asked = [request(text(9 + i, seed=i // 2), n=1 + i % 2, seed=i) for i in range(6)]
    expected = [[c.token_ids for c in output.completions] for output in engine.generate(asked)]
    engine.reset()
    programs = engine.stats()["programs"]
    groups = [engine.submit(each) for each in asked]
    for turn in range(3):
        for _ in range(turn + 1):
            engine.step_round(max_steps=1)
        engine.sleep()
        check_invariants(engine.state.decode)
        engine.wake()
    assert any(group.sequences[0].token_ids for group in groups) and not all(group.is_done for group in groups)
    assert engine.stats()["recomputed_tokens"] > 0
    while not all(group.is_done for group in groups):
        engine.step_round()
        check_invariants(engine.state.decode)
    assert sampled(groups) == [tokens for tokens_of in expected for tokens in tokens_of]
    assert engine.stats()["programs"] == programs


def test_no_prefix_is_found_after_waking_and_those_computed_since_are(engine):
    ids = text(40)
    engine.generate([request(ids)])
    engine.sleep()
    engine.wake()
    found = [engine.generate([request(ids, max_tokens=3)])[0].num_cached_tokens for _ in range(2)]
    assert found == [0, 32]


def test_calls_while_asleep_say_so_by_name_and_cancel_works(engine):
    group, waiting = engine.submit(request(text(9))), [engine.submit(request(text(5, seed=i))) for i in range(6)]
    engine.step_round(max_steps=1)
    engine.sleep()
    engine.sleep()  # stays asleep
    assert engine.is_asleep
    calls = {
        "generate": lambda: engine.generate([request(text(5))]),
        "score": lambda: engine.score([text(5)]),
        "warmup": engine.warmup,
        "reset": engine.reset,
        "drain": engine.drain,
        "step_round": engine.step_round,
        "zero_cache": engine.zero_cache,
        "memory": engine.memory,
        "fork": lambda: engine.fork(group, 0),
        "resample": lambda: engine.resample(group, [0]),
        "spill_to_host": lambda: engine.spill_to_host(group.sequences[0]),
        "prefetch": lambda: engine.prefetch(group.sequences[0]),
        "wait_for_launch_window": engine.wait_for_launch_window,
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"{name}\(\) was called while the engine sleeps.*call wake\(\)"):
            call()
    waiting.append(engine.submit(request(text(7))))
    with pytest.raises(RuntimeError, match=r"compiled for scoring, and the engine sleeps; call wake\(\) first"):
        engine.submit(request(text(5), prompt_logprobs=1))
    engine.cancel(waiting[0])
    engine.cancel(group)
    assert waiting[0].sequences[0].finish_reason == group.sequences[0].finish_reason == "abort"
    engine.wake()
    engine.wake()  # is awake
    engine.drain()
    assert all(len(each.sequences[0].token_ids) == 12 for each in waiting[1:])


def test_an_update_that_sends_the_engine_to_sleep_ends_its_call_and_no_other(engine):
    (output,) = engine.generate([request(text(6), max_tokens=2)], on_update=lambda *_: engine.sleep())
    assert output.completions[0].finish_reason == "length"  # sleep reads the round in flight
    engine.wake()
    other = engine.submit(request(text(5), temperature=0.0))
    several = [request(text(6), max_tokens=40) for _ in range(9)]
    with pytest.raises(RuntimeError, match=r"step_round\(\) was called while the engine sleeps.*call wake\(\)"):
        engine.generate(several, on_update=lambda *_: engine.sleep())
    engine.wake()
    engine.drain()
    assert sampled([other]) == [uncached_greedy(tiny_model(), text(5), 12)]
    assert other.sequences[0].finish_reason == "length"


@pytest.mark.parametrize("ends", ["next", "close"])
def test_an_iterator_over_results_that_meets_a_sleeping_engine_cancels_the_rest(engine, ends):
    prompts = [request(text(5), max_tokens=1), *(request(text(9, seed=i), max_tokens=40) for i in range(9))]
    results = engine.as_completed(prompts)  # more than slots
    assert next(results).completions[0].finish_reason == "length"
    engine.sleep()
    if ends == "close":
        results.close()
    else:
        with pytest.raises(RuntimeError, match=r"step_round\(\) was called while the engine sleeps.*call wake\(\)"):
            list(results)  # some may have ended in the same round
    engine.wake()
    assert list(results) == [] and not engine._is_in_progress()
    assert len(engine.generate([request(text(9))])[0].completions[0].token_ids) == 12


def test_an_engine_that_admits_nothing_refuses_calls_that_would_wait_for_ever(engine):
    waiting = engine.submit(request(text(9)))
    engine.set_admits(False)
    for call in (
        lambda: engine.generate([request(text(5))]),
        lambda: engine.score([text(5)]),
        lambda: next(engine.as_completed([request(text(5))])),
        engine.drain,
    ):
        with pytest.raises(RuntimeError, match=r"admits no request.*set_admits\(True\)"):
            call()
    engine.set_admits(True)
    engine.drain()
    assert len(waiting.sequences[0].token_ids) == 12


def test_dropped_weights_may_come_back_under_their_number_and_scoring_waits_for_waking(engine):
    version, ids = engine.version, text(9)
    (before,) = engine.generate([request(ids, temperature=0.0)])
    with pytest.raises(ValueError, match="names the weights in use"):
        engine.swap_weights(tiny_model(1), version=version)
    engine.sleep(drop_weights=True)
    with pytest.raises(RuntimeError, match=r"compiled .*the engine sleeps; call wake\(\) first"):
        engine.submit(request(ids, max_tokens=0, prompt_logprobs=0))
    engine.swap_weights(tiny_model(), version=version)
    engine.wake()
    (after,) = engine.generate([request(ids, temperature=0.0)])
    assert after.completions[0].token_ids == before.completions[0].token_ids and engine.version == version


def test_weights_are_dropped_and_others_brought_before_or_after_waking(engine):
    group = engine.submit(request(text(9), temperature=0.0))
    while len(group.sequences[0].token_ids) < 4:
        engine.step_round(max_steps=1)
    for model, early in ((tiny_model(1), True), (tiny_model(2), False)):
        engine.sleep(drop_weights=True)
        assert engine.model is None
        if early:
            engine.swap_weights(model)
        engine.wake()
        if not early:
            with pytest.raises(RuntimeError, match=r"no weights: sleep\(drop_weights=True\) .*call swap_weights"):
                engine.generate([request(text(5))])
            with pytest.raises(RuntimeError, match="no weights"):
                engine.step_round()
            engine.swap_weights(model, policy="recompute")
        for _ in range(2):
            engine.step_round(max_steps=1)
        engine.flush()
    engine.drain()
    sequence, tokens = group.sequences[0], text(9)
    assert len(set(sequence.versions)) == 3
    for token, version in zip(sequence.token_ids, sequence.versions, strict=True):
        model = tiny_model(version - sequence.versions[0])
        assert token == likeliest(model, tokens)
        tokens.append(token)


def test_weights_from_a_checkpoint_directory(engine, tmp_path):
    save_model(tiny_model(3), tmp_path / "trained")
    programs = engine.stats()["programs"]
    engine.swap_weights(tmp_path / "trained", version=engine.version + 7)
    found = engine.generate([request(text(9), temperature=0.0)])[0].completions[0]
    assert found.token_ids == uncached_greedy(tiny_model(3), text(9), 12)
    assert engine.stats()["programs"] == programs
    save_model(tiny_model(hidden_size=48), tmp_path / "another")
    with pytest.raises(ValueError, match="swap_weights was given another model: hidden_size|embed"):
        engine.swap_weights(str(tmp_path / "another"))
    with pytest.raises(ValueError, match="no_such"):
        engine.swap_weights(str(tmp_path / "no_such"))
    assert engine.generate([request(text(9), temperature=0.0)])[0].completions[0].token_ids == found.token_ids


def test_a_swap_after_warming_up_compiles_nothing(engine, tmp_path):
    compiled = []

    def note(name, *_, **__):
        if "backend_compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    jnp.arange(1234) + 1  # what is compiled is counted
    assert compiled
    compiled.clear()
    models = [tiny_model(seed) for seed in (1, 2)]
    save_model(tiny_model(3), tmp_path)
    compiled.clear()
    for model, policy in zip((*models, tmp_path), ("keep_kv", "recompute", "drain"), strict=True):
        engine.swap_weights(model, policy=policy)
        engine.generate([request(text(9))])
    engine.sleep()
    engine.wake()
    jax.monitoring.unregister_event_duration_listener(note)
    assert compiled == []
