"""Prefix caching where layers remember a state of fixed size per sequence: states are kept at the ends of prefixes.

Everything is compared with the uncached forward (test_slot_state.py says within which tolerance). test_families.py has
the families of the registry, cached and cold.
"""

import functools

import jax
import numpy as np
import pytest

from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.models.registry import family_for
from tests.engine.test_slot_state import LENGTH, make_engine, model_of, request, run, shared_engine, text
from tests.golden_cases import load_case
from tests.tiny_models import uncached_greedy

PAGE = 4
NAME = "qwen3_5"


@functools.cache
def engine_of(**config) -> InferenceEngine:
    return make_engine(NAME, **config)


@pytest.fixture
def engine():
    engine = shared_engine(NAME)
    engine.reset()
    return engine


def counted(engine: InferenceEngine, *requests) -> dict[str, float]:
    """Run the requests (`run`) and give what the engine counted of prefix caching."""
    before = engine.stats()
    run(NAME, engine, *requests)
    after = engine.stats()
    names = ("prefix_hits", "computed_prompt_tokens", "snapshots_kept", "snapshots_restored", "snapshot_evictions")
    return {name: after[name] - before[name] for name in names}


def test_what_requests_share_is_computed_once(engine):
    """Few-shot prompts that come together: the first one stops where the next ones part from it."""
    prompts = [text(33) + [i] * 3 for i in range(4)]
    counts = counted(engine, *(request(ids) for ids in prompts))
    assert counts["prefix_hits"] == 3 * 8 and counts["computed_prompt_tokens"] == 36 + 3 * 4
    later = counted(engine, request(text(33) + [7] * 3))
    assert later["prefix_hits"] == 8 and later["computed_prompt_tokens"] == 4
    assert later["snapshots_restored"] == 1


def test_sequences_part_at_different_pages(engine):
    """Each prefix that some of them share is computed once."""
    common = text(40)
    prompts = [common[:cut] + text(9, seed=cut) for cut in (40, 9, 21, 33)]
    counts = counted(engine, *(request(ids) for ids in prompts))
    assert counts["prefix_hits"] == 2 + 5 + 8
    assert counts["computed_prompt_tokens"] == sum(map(len, prompts)) - (8 + 20 + 32) - lone_tokens(prompts)


def lone_tokens(prompts: list[list[int]]) -> int:
    """Prompts whose part behind the last page bound is one token, which is no chunk."""
    return sum((len(prompt) - 1) % PAGE == 0 for prompt in prompts)


def test_a_prompt_is_computed_once(engine):
    first = counted(engine, request(text(18)))
    assert first["prefix_hits"] == 0
    again = counted(engine, request(text(18)))
    assert again["prefix_hits"] == 4 and again["computed_prompt_tokens"] == 2


def test_a_state_is_kept_where_a_prompt_parts_from_a_cached_one(engine):
    """Its pages are found, and no state at their end: it is computed again, once."""
    counted(engine, request(text(30), max_tokens=2))
    hits = [counted(engine, request(text(30)[:22] + text(5, seed=i), max_tokens=2))["prefix_hits"] for i in (1, 2, 3)]
    assert hits == [4, 5, 5]  # the end of the first chunk, and then where they part


def test_the_second_turn_of_a_chat_computes_what_is_new(engine):
    first = text(13)
    (output,) = engine.generate([request(first, max_tokens=12)])
    history = first + list(output.completions[0].token_ids)
    turn = counted(engine, request(history + text(7, seed=1)))
    stored = (len(history) - 1) // PAGE * PAGE  # the last token was sampled and not computed
    assert turn["computed_prompt_tokens"] == len(history) + 7 - stored


def test_samples_that_start_later_go_on_from_the_prompt(engine):
    """More samples than run at once: those that start when the others are past the prompt."""
    counts = counted(engine, request(text(23), n=7))
    assert counts["computed_prompt_tokens"] <= 23 + 7 * 3


@pytest.mark.slow
def test_a_prompt_seen_once_does_not_push_out_what_is_shared():
    """With as few snapshots as sequences, and many prompts."""
    engine = engine_of(state_snapshots=4, max_pages=160)
    engine.reset()
    common = text(32)
    for i in range(2):
        counted(engine, request(common + text(3, seed=i)))
    evictions = 0
    for i in range(8):
        counts = counted(engine, request(text(30, seed=50 + i)))
        evictions += counts["snapshot_evictions"]
    assert evictions >= 6
    assert counted(engine, request(common + text(3, seed=99)))["prefix_hits"] == 8


@pytest.mark.slow
def test_one_snapshot_serves(engine):
    engine = engine_of(state_snapshots=1)
    engine.reset()
    prompts = [request(text(32) + text(3, seed=i)) for i in range(6)]
    counts = counted(engine, *prompts)
    assert counts["prefix_hits"] >= 3 * 8


def test_snapshots_are_free_when_their_pages_are_gone(engine):
    counted(engine, request(text(30)))
    decode = engine.state.decode
    assert np.asarray(decode.snapshots.is_used(decode.prefix)).any()
    pages = np.asarray(decode.snapshots.owner)
    for i in range(4):  # fills the pool of 60 pages once
        counted(engine, request(text(60, seed=i + 1), max_tokens=12))
    decode = engine.state.decode
    used = np.asarray(decode.snapshots.is_used(decode.prefix))
    assert used.any() and (np.asarray(decode.prefix.findable(decode.snapshots.owner)) == used).all()
    assert not np.isin(np.asarray(decode.snapshots.owner)[used], pages[pages < 60]).all()
    counts = counted(engine, request(text(30)))
    assert counts["prefix_hits"] == 0 and counts["snapshots_restored"] == 0


def test_reset_forgets_snapshots_and_touches_no_state(engine):
    counted(engine, request(text(30)))
    before = jax.tree.map(np.array, engine.state.cache.snapshots)
    assert any(array.any() for array in jax.tree.leaves(before))
    engine.reset()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(engine.state.cache.snapshots), strict=True):
        assert (old == np.asarray(new)).all()
    counts = counted(engine, request(text(30)))
    assert counts["prefix_hits"] == 0 and counts["snapshots_restored"] == 0
    engine.zero_cache()
    assert not any(np.asarray(array).any() for array in jax.tree.leaves(engine.state.cache.snapshots))
    assert counted(engine, request(text(30)))["snapshots_restored"] == 0


def test_preempted_sequences_go_on_from_their_last_snapshot(engine):
    """Four of them together grow to 84 pages, of 60."""
    before = engine.stats()
    counts = counted(engine, *(request(text(24, seed=i), max_tokens=60) for i in range(6)))
    assert engine.stats()["preemptions"] > before["preemptions"] and counts["snapshots_restored"] > 0


def test_states_of_other_weights_are_not_used(engine):
    counted(engine, request(text(30)))
    other = jax.tree.map(lambda leaf: 0.7 * leaf, model_of(NAME))
    try:
        engine.swap_weights(other)
        before = engine.stats()["snapshots_restored"]
        for restored in (0, 1):
            (output,) = engine.generate([request(text(30))])
            assert list(output.completions[0].token_ids) == uncached_greedy(other, text(30), 8)
            assert engine.stats()["snapshots_restored"] - before == restored
    finally:
        engine.swap_weights(model_of(NAME))


@pytest.mark.slow
def test_without_prefix_caching_no_state_is_kept():
    engine = make_engine(NAME, prefix_cache=False)
    assert engine.state.cache.snapshots == () and engine.describe()["state_snapshots"] == 0
    run(NAME, engine, request(text(20)))


def test_the_number_of_snapshots_is_configured_and_counted():
    engine = make_engine(NAME, state_snapshots=5)
    (kept,), (slots,) = engine.state.cache.snapshots, [p for p in engine.state.cache.pools if not p.is_paged]
    assert kept.num_entries == 5 and kept.nbytes * slots.num_entries == slots.nbytes * 5
    plain = make_engine(NAME, prefix_cache=False)
    assert engine.state.cache.nbytes == plain.state.cache.nbytes + kept.nbytes
    with pytest.raises(ValueError, match="engine.state_snapshots=5: prefix_cache is false, so that no states are kept"):
        make_engine(NAME, state_snapshots=5, prefix_cache=False)
    raw = load_case("llama_tied").config
    model = jax.eval_shape(
        lambda: type(model_of(NAME)).init(family_for(raw).config_from_hf(raw), key=jax.random.key(0))
    )
    with pytest.raises(ValueError, match="engine.state_snapshots=5: no layer of this model remembers a state"):
        InferenceEngine(model, config=EngineConfig(max_seqs=2, max_seq_len=LENGTH, state_snapshots=5))


def test_greedy_continuations_of_cached_pages_are_those_of_the_uncached_forward(engine):
    """Generated pages too: each request begins with all that the one before it has become."""
    ids = text(9)
    for seed in range(4):
        (output,) = engine.generate([request(ids, max_tokens=9)])
        assert list(output.completions[0].token_ids) == uncached_greedy(model_of(NAME), ids, 9)
        ids = ids + list(output.completions[0].token_ids) + text(3, seed=seed)
