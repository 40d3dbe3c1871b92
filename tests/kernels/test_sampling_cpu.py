"""Sampling's kernels in C++, in every instruction set, beside XLA's code and a sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.decode import sampling_draw
from levanter_infer.kernels.backend import DrawKey, DrawRules, RowKernels
from levanter_infer.kernels.cpu import bindings
from levanter_infer.kernels.cpu.backend import CpuBackend, CpuSampling
from tests.kernels.logit_changes import changed_by_numpy, changes_of
from tests.kernels.test_cpu import built, each_isa
from tests.kernels.test_sampling_gpu import drawn_by_xla, rules_of
from tests.kernels.test_sampling_tpu import (
    CASES,
    ROWS,
    VOCAB,
    check_beside_xla,
    hard_logits,
    kept_by_sorting,
    terms_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("optimized")  # bits of what users run

RNG = np.random.default_rng(17)


def thresholds(logits, rules: DrawRules, isa: str | None = None) -> np.ndarray:
    return np.asarray(bindings.thresholds(jnp.asarray(logits), rules, isa_name=isa))


@each_isa
def test_thresholds_choose_what_sorting_chooses(isa):
    """With ties, -inf, equal logits, zeros of both signs, and filters that few and that nearly all tokens pass."""
    rows = [row for row in range(ROWS) if row not in (4, 5, 6)]
    logits = hard_logits()[rows]
    terms = terms_of(logits, 1.0)
    weights = np.asarray(weights_of(jnp.asarray(logits), jnp.asarray(terms)))
    for case in range(len(CASES)):
        own = [CASES[(case + row) % len(CASES)] for row in range(len(rows))]
        top_k, top_p = (np.array(column) for column in zip(*own, strict=True))
        found = thresholds(logits, rules_of(terms, np.where(top_k >= VOCAB, 0, top_k), top_p), isa)
        for row, (k, p) in enumerate(own):
            wanted = kept_by_sorting(logits[row], weights[row], k, np.float32(p))
            np.testing.assert_array_equal(np.flatnonzero(logits[row] >= found[row]), wanted, f"{rows[row]} {k} {p}")


@each_isa
@pytest.mark.parametrize("vocab", [1, 3, 16, 17, 63, 64, 65, 1000, 20_011])
def test_thresholds_of_vocabularies_of_any_size(isa, vocab):
    """Where the likeliest 256 groups' logits hold the nucleus, and where all of the row is searched."""
    logits = (RNG.normal(size=(4, vocab)) * np.array([[0.1], [1], [4], [9]])).astype(np.float32)
    terms = terms_of(logits, 0.9)
    weights = np.asarray(weights_of(jnp.asarray(logits), jnp.asarray(terms)))
    for k, p in [(1, 1.0), (min(vocab, 9), 0.6), (vocab - 1, 1.0), (0, 0.4), (0, 0.97), (vocab // 2, 0.9), (0, 1.0)]:
        found = thresholds(logits, rules_of(terms, np.full(4, k), np.full(4, p)), isa)
        for row in range(4):
            wanted = kept_by_sorting(logits[row], weights[row], k or vocab, np.float32(p))
            np.testing.assert_array_equal(np.flatnonzero(logits[row] >= found[row]), wanted, f"{row} {k} {p}")


@built
def test_rows_with_nan_get_some_threshold_and_others_keep_theirs():
    logits = RNG.normal(size=(3, VOCAB)).astype(np.float32)
    rules = rules_of(terms_of(logits, 1.0), [20, 0, 9], [1.0, 0.7, 0.8])
    before = thresholds(logits, rules)
    logits[1, ::3] = np.nan
    np.testing.assert_array_equal(thresholds(logits, rules)[[0, 2]], before[[0, 2]])
    logits[1] = np.nan
    np.testing.assert_array_equal(thresholds(logits, rules)[[0, 2]], before[[0, 2]])


def key_of(rows: int) -> DrawKey:
    seeds = jnp.asarray(np.random.default_rng(3).integers(2**32, size=(rows, 2), dtype=np.uint32))
    return DrawKey(seeds, jnp.arange(rows, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32) * 1000)


def drawn(logits, rules: DrawRules, threshold, key: DrawKey, isa: str | None = None) -> list[np.ndarray]:
    call = jax.jit(functools.partial(sampling_draw.draw_rows, CpuSampling(isa)))
    return [np.asarray(each) for each in call(jnp.asarray(logits), rules, jnp.asarray(threshold), key)]


@each_isa
@pytest.mark.parametrize("vocab", [1, 5, 16, 17, 257, VOCAB, 3001, 70_001])
def test_draws_are_those_of_the_tree(isa, vocab):
    """Trees of one to five levels; a token that has 2^-22 of the weight to spare is drawn by both exponentials."""
    rows = 40
    logits = (RNG.normal(size=(rows, vocab)) * 3).astype(np.float32)
    logits[2] = 1.5
    logits[3, 40:] = -np.inf
    terms, draws, key = terms_of(logits, 0.7), np.arange(rows) != 5, key_of(rows)
    terms[7, 2], terms[8, 3] = np.median(logits[7]), -2.0
    wanted, logprobs = drawn_by_xla(jnp.asarray(logits), jnp.asarray(terms), key)
    token, logprob = drawn(logits, rules_of(terms, draws=draws), terms[:, 2], key, isa)
    np.testing.assert_array_equal(token, np.where(draws, wanted, 0))
    np.testing.assert_allclose(logprob, np.where(draws, logprobs, 0), atol=2e-6)


@each_isa
@pytest.mark.parametrize("vocab", [1, 7, 64, 1000, 4097])
def test_the_likeliest_are_the_first_of_a_stable_sort(isa, vocab):
    """With ties, -inf, NaN, which is passed over, and counts that all groups together do not reach."""
    logits = np.round(RNG.normal(size=(9, vocab)), 1).astype(np.float32)
    logits[1] = -np.inf
    logits[2, ::2] = -np.inf
    logits[3] = 2.0
    if vocab > 64:
        logits[4, [3, 40]] = np.nan
    most = min(vocab, 70)
    counts = np.minimum([most, 3, most, 5, most, 1, 0, most, 20], most)
    call = jax.jit(functools.partial(bindings.likeliest, most=most, isa_name=isa))
    values, tokens = (np.asarray(a) for a in call(jnp.asarray(logits), jnp.asarray(counts)))
    for row, count in enumerate(counts):
        order = np.argsort(-np.nan_to_num(logits[row], nan=-np.inf, neginf=-1e38), kind="stable")[:count]
        np.testing.assert_array_equal(tokens[row, :count], order)
        np.testing.assert_array_equal(values[row, :count], logits[row][order])
        assert not tokens[row, count:].any() and not values[row, count:].any()


@each_isa
@pytest.mark.parametrize("vocab", [1, 7, 67, 1000, 4096, 5003])
def test_logits_change_by_bias_penalties_bans_and_masks(isa, vocab):
    """In this order, with each token penalised once, and twice with the same result."""
    logits, changes, allowed = changes_of(vocab)
    call = jax.jit(functools.partial(bindings.changed_logits, isa_name=isa))
    wanted = changed_by_numpy(logits, changes, allowed)
    for _ in range(2):
        found = np.asarray(call(jnp.asarray(logits), changes, jnp.int32(9)))[:9]
        np.testing.assert_allclose(found, wanted[:9], rtol=1e-6, atol=1e-6)
    for row in range(9):
        tokens = changes.tokens
        one = jax.tree.map(lambda array, row=row: array[row : row + 1], changes._replace(tokens=np.zeros(10)))
        alone = call(jnp.asarray(logits[row : row + 1]), one._replace(tokens=tokens), jnp.int32(1))
        assert np.asarray(alone)[0].tobytes() == np.asarray(found)[row].tobytes()
    few = changes._replace(changed=np.arange(10) % 3 == 1)
    assert np.asarray(call(jnp.asarray(logits), few, jnp.int32(9)))[[1, 4, 7]].tobytes() == found[[1, 4, 7]].tobytes()
    without = changes._replace(masks=np.zeros((10, 0), np.uint32))
    no_mask = changes._replace(masked=np.zeros(10, bool))
    wanted = changed_by_numpy(logits, no_mask, allowed)
    for own in (without, no_mask):
        np.testing.assert_allclose(call(jnp.asarray(logits), own, jnp.int32(10)), wanted, rtol=1e-6, atol=1e-6)


@built
def test_a_row_has_the_same_bits_alone_and_in_any_company():
    logits = (RNG.normal(size=(5, VOCAB)) * 2).astype(np.float32)
    terms, key = terms_of(logits, 1.0), key_of(5)
    rules = rules_of(terms, [0, 7, 0, 900, 0], [1.0, 1.0, 0.9, 0.95, 0.9999])

    def sampled(rows: list[int]) -> list[np.ndarray]:
        own, at = jax.tree.map(lambda array: array[np.array(rows)], (rules, key)), np.array(rows)
        least = thresholds(logits[at], own[0])
        return [least, *drawn(logits[at], own[0], least, own[1])]

    together, reordered = sampled([0, 1, 2, 3, 4]), sampled([3, 0, 4, 1])
    for row in range(5):
        for alone, all_rows in zip(sampled([row]), together, strict=True):
            assert alone[0].tobytes() == all_rows[row].tobytes()
    for place, row in enumerate([3, 0, 4, 1]):
        assert [each[place] for each in reordered] == [each[row] for each in together]


@built
@pytest.mark.parametrize("changed", [False, True])
def test_kernels_sample_what_xla_samples(changed):
    backend = CpuBackend()
    assert isinstance(backend.sampling_kernels(jnp.asarray(hard_logits())), RowKernels)
    slots = np.where(np.arange(ROWS) == ROWS - 1, ROWS, np.arange(ROWS))  # the last is padding
    check_beside_xla(backend, changed, slots, 2e-6)


@built
def test_arguments_of_other_shapes_are_refused():
    logits, rules, key = jnp.zeros((3, 20)), rules_of(np.zeros((3, 4), np.float32)), key_of(3)
    short = rules._replace(top_p=jnp.ones(2))
    raw, changes, _ = changes_of(20)
    for wrong, refusal in [
        (dict(presence=np.zeros(2, np.float32)), "changed_logits: penalties, slots, lengths or changed"),
        (dict(changed=np.zeros(2, bool)), "changed_logits: penalties, slots, lengths or changed"),
        (dict(bias_values=np.zeros((10, 3), np.float32)), "changed_logits: bias and banned ids"),
        (dict(banned_ids=np.zeros((2, 3), np.int32)), "changed_logits: bias and banned ids"),
        (dict(tokens=np.zeros(9, np.int32)), "tokens not"),
        (dict(masks=np.zeros((6, 128), np.uint32)), "changed_logits: masks are not"),
        (dict(masks=np.zeros((10, 64), np.uint32)), "changed_logits: masks have no multiple"),
        (dict(masked=np.zeros(6, bool)), "changed_logits: masked is not"),
    ]:
        with pytest.raises(Exception, match=refusal):
            jax.block_until_ready(bindings.changed_logits(jnp.asarray(raw), changes._replace(**wrong), jnp.int32(7)))
    with pytest.raises(Exception, match="likeliest: counts are not"):
        jax.block_until_ready(bindings.likeliest(logits, jnp.ones(2, jnp.int32), 4))
    with pytest.raises(Exception, match=r"thresholds: rules are not \[rows\]"):
        thresholds(logits, short)
    with pytest.raises(Exception, match=r"draw: seeds are not \[rows, 2\]"):
        drawn(logits, rules, np.zeros(3, np.float32), key._replace(seed=jnp.zeros((3, 3), jnp.uint32)))
    for sizes, refusal in [
        ((19, 2), "first level"),
        ((20, 3), "no 16th"),
        ((20,), "more than 16"),
        ((), "first level"),
    ]:
        with pytest.raises(Exception, match=refusal):
            jax.block_until_ready(bindings.draw(logits, rules, jnp.zeros(3), key, sizes))
