"""Other weights for an engine that goes on: which requests sample with which, and what may be shared."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.checkpoints.load import StoredModel
from levanter_infer.checkpoints.save import save_model
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.engine.weight_updates import _differing, new_weights
from levanter_infer.models.uncached import next_token
from tests.tiny_models import SIZES, tiny_model, uncached_greedy

PAGE, VOCAB, LENGTH = SIZES["page_size"], 61, SIZES["max_seq_len"]
ORACLE = jax.jit(next_token)


def make_engine(model=None, **config) -> InferenceEngine:
    return InferenceEngine(model or tiny_model(), config=EngineConfig(**{**SIZES, **config}))


@pytest.fixture(scope="module")
def shared():
    engine = make_engine()
    engine.warmup()
    return engine


@pytest.fixture
def engine(shared):
    shared.reset()
    shared.swap_weights(tiny_model(), version=shared.version + 1000)
    yield shared
    shared.drain()
    check_invariants(shared.state.decode)
    assert shared.stats()["pages_free"] == shared.shapes.num_pages


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def request(ids: list[int], max_tokens: int = 8, **sampling) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampling)
    return Request(prompt_token_ids=ids, sampling=params)


def same_but_for_the_head(turn: int):
    """A model with the keys and values of `tiny_model()`, and other tokens."""
    model = tiny_model()
    return eqx.tree_at(lambda m: m.lm_head.weight.array, model, jnp.roll(model.lm_head.weight.array, turn, axis=0))


def likeliest(model, tokens: list[int]) -> int:
    padded = jnp.asarray(tokens + [0] * (LENGTH - len(tokens)), jnp.int32)
    return int(ORACLE(model, padded, jnp.int32(len(tokens))))


def assert_sampled_by(models, sequence) -> None:
    """Each token is the likeliest one under the weights of the version that it claims, after all before it."""
    assert len(sequence.versions) == len(sequence.token_ids) > 0
    tokens = list(sequence.request.prompt_token_ids)
    for token, version in zip(sequence.token_ids, sequence.versions, strict=True):
        assert token == likeliest(models(version), tokens), (len(tokens), version)
        tokens.append(token)


def finish(engine, groups, max_steps=None) -> None:
    while not all(group.is_done for group in groups):
        engine.step_round(max_steps=max_steps)
        check_invariants(engine.state.decode)
    engine.drain()


def hits_of(engine, *requests: Request) -> int:
    before = engine.stats()["prefix_hits"]
    engine.generate(list(requests))
    return engine.stats()["prefix_hits"] - before


@pytest.mark.slow
def test_a_hundred_rounds_each_with_weights_of_its_own(engine):
    def model(version: int):
        return tiny_model(version % 3)

    first = engine.version
    engine.swap_weights(model(first + 1))
    programs, swaps = dict(engine.stats()["programs"]), engine.stats()["weight_swaps"]
    places, groups, done = set(), [], []
    before = engine.stats()["prefix_hits"]
    for turn in range(100):
        while sum(not group.is_done for group in groups) < 4:
            groups.append(engine.submit(request(text(18, seed=len(groups) // 4), max_tokens=9, n=1 + turn % 2)))
        engine.step_round(max_steps=3)
        engine.swap_weights(model(engine.version + 1), policy="recompute")
        if turn % 8 == 0:
            check_invariants(engine.state.decode)
        pool = engine.state.cache.pools[0].pages.array
        places.add((pool.unsafe_buffer_pointer(), pool.nbytes))
        done += [group for group in groups if group.is_done and group not in done]
    assert len(places) == 1
    assert engine.stats()["programs"] == programs and engine.stats()["programs"]["on_weight_update"] == 1
    assert engine.stats()["weight_swaps"] - swaps == 100 == engine.version - first - 1
    finish(engine, groups)
    assert len(done) > 20
    for sequence in (sequence for group in groups for sequence in group.sequences):
        assert_sampled_by(model, sequence)
        completion = sequence.completion()
        assert completion.version_range == (sequence.versions[0], sequence.versions[-1])
    assert sum(len(set(sequence.versions)) > 1 for group in done for sequence in group.sequences) > 20
    assert engine.stats()["prefix_hits"] > before  # equal prompts of one version


def test_who_keeps_its_keys_and_values_goes_on_with_the_new_head_and_shares_nothing(engine):
    old, new = engine.version, engine.version + 1
    group = engine.submit(request(text(18), max_tokens=16, n=2))
    while len(group.sequences[1].token_ids) < 5:
        engine.step_round(max_steps=1)
    computed = engine.stats()["computed_prompt_tokens"]
    engine.swap_weights(same_but_for_the_head(7), policy="keep_kv")
    finish(engine, [group])
    assert engine.stats()["computed_prompt_tokens"] == computed  # nothing was computed again
    for sequence in group.sequences:
        assert set(sequence.versions) == {old, new}
        assert_sampled_by(lambda version: same_but_for_the_head(7 * (version - old)), sequence)
    whole = text(18) + group.sequences[0].token_ids
    assert hits_of(engine, request(whole, max_tokens=1)) == 0
    assert hits_of(engine, request(whole, max_tokens=1)) == (len(whole) - 1) // PAGE
    # A request that comes back to the old weights finds the pages that they have filled alone, and no further ones
    engine.swap_weights(tiny_model(), version=old)
    filled = len(text(18)) + group.sequences[0].versions.count(old) - 1
    assert hits_of(engine, request(whole, max_tokens=1)) in ((filled - 1) // PAGE, filled // PAGE)


def test_samples_do_not_share_a_prompt_that_two_versions_have_computed(engine):
    """The first sample has begun the prompt with other weights than those that the second one has for all of it."""
    group = engine.submit(request(text(40), max_tokens=4, n=2))
    engine.step_round(max_steps=1)
    engine.flush()
    assert not group.sequences[0].token_ids and engine.stats()["stored_tokens"] == 16
    engine.swap_weights(tiny_model(1), policy="keep_kv")
    finish(engine, [group], max_steps=1)
    assert group.sequences[1].token_ids == uncached_greedy(tiny_model(1), text(40), 4)
    assert group.sequences[0].token_ids != group.sequences[1].token_ids


def test_a_model_whose_arrays_are_not_there_is_refused_before_anything_changes(engine):
    def embeddings(change):
        return eqx.tree_at(lambda m: m.embeddings.weight.array, tiny_model(1), replace_fn=change)

    deleted = embeddings(lambda array: array + 0)
    deleted.embeddings.weight.array.delete()
    types = jax.eval_shape(lambda: tiny_model(1))
    version = engine.version
    for model, says in ((deleted, "is deleted, or donated"), (types, "is ShapeDtypeStruct; expected arrays in memory")):
        with pytest.raises(ValueError, match=f"a model whose [a-z_.]+ {says}"):
            engine.swap_weights(model)
    assert engine.version == version
    assert engine.generate([request(text(5))])[0].completions[0].token_ids == uncached_greedy(tiny_model(), text(5), 8)


def test_drained_sequences_end_with_the_old_weights_and_waiting_ones_begin_with_the_new(engine):
    groups = [engine.submit(request(text(9, seed=i), max_tokens=12)) for i in range(12)]
    engine.step_round(max_steps=2)
    engine.swap_weights(tiny_model(1))
    ended = sum(group.is_done for group in groups)
    assert 0 < ended <= engine.shapes.num_slots
    known = engine.step_round()
    assert {id(sequence.request) for sequence in known} >= {id(group) for group in groups[:ended]}
    finish(engine, groups)
    for i, group in enumerate(groups):
        model = tiny_model(0 if i < ended else 1)
        assert group.sequences[0].token_ids == uncached_greedy(model, text(9, seed=i), 12)
        assert len(set(group.sequences[0].versions)) == 1


@pytest.mark.parametrize("policy", ["keep_kv", "recompute"])
def test_pages_in_the_memory_of_the_host_keep_their_version_or_are_given_up(engine, policy):
    first = engine.version
    group = engine.submit(request(text(18), max_tokens=12))
    while len(group.sequences[0].token_ids) < 3:
        engine.step_round(max_steps=1)
    assert engine.spill_to_host(group.sequences[0]) > 0
    engine.swap_weights(same_but_for_the_head(5), policy=policy)
    if policy == "keep_kv":  # else it has begun anew by itself
        engine.prefetch(group.sequences[0])
    finish(engine, [group])
    assert_sampled_by(lambda version: same_but_for_the_head(5 * (version - first)), group.sequences[0])
    assert hits_of(engine, request(text(18), max_tokens=1)) == (0 if policy == "keep_kv" else 4)


@pytest.mark.slow
def test_arrays_that_are_shared_may_be_donated_once_nobody_runs_with_them():
    def copy(model):
        return jax.tree.map(lambda leaf: leaf + 0, model)

    mine = copy(tiny_model())
    engine = make_engine(mine, matmul="xla")
    group = engine.submit(request(text(9), max_tokens=6))
    engine.step_round(max_steps=3)
    engine.flush()
    trained = jax.jit(lambda model: jax.tree.map(lambda leaf: leaf * 0.5, model), donate_argnums=0)(mine)
    with pytest.raises(ValueError, match="needs the weights in use, and they have been deleted"):
        engine.swap_weights(trained, policy="drain")
    engine.swap_weights(trained, policy="recompute")
    finish(engine, [group])
    kept = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trained)}
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.model)} == kept
    reference = jax.tree.map(lambda leaf: leaf * 0.5, tiny_model())
    assert_sampled_by(lambda version: (tiny_model(), reference)[version], group.sequences[0])


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (dict(), dict(policy="now"), "policy='now': expected one of drain, keep_kv, recompute"),
        (dict(), dict(version=-1), "version=-1: expected a whole number from 0"),
        (dict(), dict(version=True), "version=True: expected a whole number"),
        (dict(dtype="bfloat16"), dict(), r"embeddings.weight was float32\[61, 32\] and is bfloat16"),
        (dict(rope_theta=5.0), dict(), r"blocks\[0\].mixer.rope.theta was 10000.0 and is 5.0"),
        (dict(tie_word_embeddings=True), dict(), "tie_word_embeddings was False and is True"),
    ],
)
def test_what_is_no_new_version_of_the_model_is_refused(shared, model, arguments, message):
    before = shared.model
    with pytest.raises(ValueError, match=message):
        shared.swap_weights(tiny_model(**model), **arguments)
    with pytest.raises(ValueError, match="names the weights in use"):
        shared.swap_weights(tiny_model(), version=shared.version)
    with pytest.raises(ValueError, match=r"weight was .* and is absent|not in the form in which it was loaded"):
        shared.swap_weights(shared.model)
    assert shared.model is before


def test_an_engine_whose_swap_was_interrupted_says_so_and_takes_the_next(engine, monkeypatch):
    """The old weights were given up, and the new ones are not there."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.backend), "prepare", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.swap_weights(tiny_model(1))
    with pytest.raises(RuntimeError, match="has no weights: the last swap_weights failed .*; call swap_weights again"):
        engine.generate([request(text(5))])
    engine.swap_weights(tiny_model(1))
    assert engine.generate([request(text(5))])[0].completions[0].token_ids == uncached_greedy(tiny_model(1), text(5), 8)


@pytest.mark.slow
def test_a_beam_search_goes_on_and_knows_the_versions_of_its_hypotheses(engine):
    first = engine.version
    asked = dataclasses.replace(request(text(9), max_tokens=8).sampling, num_beams=2, n=2)
    group = engine.submit(Request(prompt_token_ids=text(9), sampling=asked))
    engine.step_round(max_steps=4)
    engine.swap_weights(tiny_model(1), policy="keep_kv")
    finish(engine, [group])
    for completion in group.completions():
        assert completion.version_range == (first, first + 1) and len(completion.token_versions) == 8


def test_a_parameter_that_only_one_of_two_models_has_is_named():
    weight, bias = np.zeros((2, 3), np.float32), np.zeros(3, np.float32)
    assert _differing({"w": weight}, {"w": weight, "b": bias}) == ["b was absent and is float32[3]"]
    assert _differing({"w": weight, "b": bias}, {"w": bias}) == [
        "b was float32[3] and is absent", "w was float32[2, 3] and is float32[3]",
    ]  # fmt: skip


def test_a_checkpoint_is_read_in_any_dtype_that_an_engine_has(tmp_path):
    save_model(tiny_model(1, dtype="float32"), tmp_path)
    for dtype in ("float16", "bfloat16", "float32"):
        types = jax.eval_shape(lambda model: model, tiny_model(dtype=dtype))
        stored = new_weights(types, tmp_path)
        assert isinstance(stored, StoredModel) and stored.read().dtype == jnp.dtype(dtype)
