"""The distribution that is sampled from is the exact one, for every parameter and for mixtures.

By XLA's code and by the C++ kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.decode.sampling import History, LogitStats, SampleOutput, SamplingTable, choose
from levanter_infer.engine.params import SamplingParams
from levanter_infer.kernels.backend import Backend
from levanter_infer.kernels.registry import make_backend
from tests.decode.sampling_oracle import EOS, chi_square_p, distribution, limits_for, table_of

pytestmark = pytest.mark.usefixtures("optimized")  # bits and distributions of what users run

VOCAB, DRAWS, MAX_LEN = 200, 24_000, 64
PROMPT = [5, 9, 9, 17, 60, 150, EOS]
OUTPUT = [9, 21, 21, 21, 40, 41, 199]
SHARDED = np.random.default_rng(7).normal(size=VOCAB).astype(np.float32) * 1.3
TIED = np.round(SHARDED * 2) / 2


@pytest.fixture(params=[None, "cpu"], ids=["xla", "kernels"])
def backend(request) -> Backend | None:
    return None if request.param is None else make_backend(request.param)


@functools.partial(jax.jit, static_argnums=3)
def many(logits, table: SamplingTable, tokens, backend: Backend | None) -> SampleOutput:
    """DRAWS draws of slot 0, which differ in position only."""
    slots = jnp.zeros(DRAWS, jnp.int32)
    logits = jnp.broadcast_to(logits, (DRAWS, VOCAB))
    return choose(
        logits,
        table.rows(slots),
        History(
            positions=jnp.arange(DRAWS, dtype=jnp.int32),
            tokens=tokens,
            slot_ids=slots,
            prompt_lens=slots + len(PROMPT),
            seq_lens=slots + len(PROMPT) + len(OUTPUT),
        ),
        max_top=0,
        stats=None if backend is None else LogitStats.of_kernel(backend, logits, jnp.int32(DRAWS)),
        backend=backend,
    ).sampled()


def draws_of(logits, params: SamplingParams, seed: int, backend: Backend | None) -> SampleOutput:
    history = PROMPT + OUTPUT
    tokens = jnp.asarray([history + [0] * (MAX_LEN - len(history))], jnp.int32)
    return many(jnp.asarray(logits, jnp.float32)[None], table_of([params], VOCAB, seeds=[seed]), tokens, backend)


CASES = {
    "plain": {},
    "temperature_low": {"temperature": 0.4},
    "temperature_high": {"temperature": 3.0},
    "top_k_1": {"top_k": 1},
    "top_k_few": {"top_k": 5},
    "top_k_beyond_the_candidates": {"top_k": 110},
    "top_k_all": {"top_k": 5000},
    "top_p_small": {"top_p": 0.4},
    "top_p_tiny": {"top_p": 1e-6},
    "top_p_beyond_the_candidates": {"top_p": 0.97},
    "min_p": {"min_p": 0.1},
    "min_p_1": {"min_p": 1.0},
    "top_k_and_top_p": {"top_k": 20, "top_p": 0.7},
    "top_k_and_top_p_beyond_the_candidates": {"top_k": 150, "top_p": 0.9},
    "all_filters": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition_reward": {"repetition_penalty": 0.6},
    "frequency_penalty": {"frequency_penalty": 1.1},
    "frequency_reward": {"frequency_penalty": -0.6},
    "presence_penalty": {"presence_penalty": 1.5},
    "logit_bias": {"logit_bias": {0: 2.5, 199: -1.0, 21: 3.0, 7: -100}},
    "min_tokens": {"min_tokens": len(OUTPUT) + 1, "stop_token_ids": [21, [5, 6]]},
    "min_tokens_reached": {"min_tokens": len(OUTPUT), "stop_token_ids": [21, [5, 6]]},
    "ignore_eos": {"min_tokens": 60, "ignore_eos": True},
    "everything": {
        "temperature": 0.8,
        "top_k": 120,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "logit_bias": {0: 2.0, 30: 1.0},
        "min_tokens": 20,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_sampled_distribution_is_the_exact_one(name, backend):
    params = SamplingParams(**CASES[name])
    logits = SHARDED.copy()
    logits[EOS] = 2.0
    out = draws_of(logits, params, seed=11, backend=backend)
    exact = distribution(logits, params, PROMPT, OUTPUT)
    counts = np.bincount(np.asarray(out.tokens), minlength=VOCAB)
    assert counts[exact == 0].sum() == 0
    assert chi_square_p(counts, exact) > 1e-4
    np.testing.assert_allclose(out.processed_logprobs, np.log(exact[np.asarray(out.tokens)]), atol=2e-5)
    assert np.asarray(out.finite).all()


def test_chi_square_notices_a_neighbouring_distribution(backend):
    out = draws_of(SHARDED, SamplingParams(temperature=1.0), seed=11, backend=backend)
    counts = np.bincount(np.asarray(out.tokens), minlength=VOCAB)
    assert chi_square_p(counts, distribution(SHARDED, SamplingParams(temperature=1.1), PROMPT, OUTPUT)) < 1e-4


@pytest.mark.parametrize(
    "changes", [{"top_k": 7}, {"top_p": 0.3}, {"top_k": 70, "top_p": 0.8}, {"top_k": 3, "top_p": 0.5}]
)
def test_filters_keep_all_tokens_that_tie_with_the_threshold(changes, backend):
    params = SamplingParams(**changes)
    exact = distribution(TIED, params, PROMPT, OUTPUT)
    weakest = TIED[exact > 0].min()
    assert (TIED == weakest).sum() > 1 and (exact[TIED == weakest] > 0).all()
    out = draws_of(TIED, params, seed=5, backend=backend)
    counts = np.bincount(np.asarray(out.tokens), minlength=VOCAB)
    assert counts[exact == 0].sum() == 0
    assert chi_square_p(counts, exact) > 1e-4


def test_tokens_without_probability_are_never_drawn(backend):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[0, 15, 16, 77, 198]] = [0.0, -3e38, 1e-30, -200.0, -9.0]
    out = draws_of(logits, SamplingParams(), seed=3, backend=backend)
    assert set(np.asarray(out.tokens).tolist()) <= {0, 16, 198}
    assert np.asarray(out.finite).all()


def test_a_uniform_row_of_any_size_is_drawn_uniformly(backend):
    out = draws_of(np.zeros(VOCAB), SamplingParams(temperature=1.7), seed=2**64 - 1, backend=backend)
    counts = np.bincount(np.asarray(out.tokens), minlength=VOCAB)
    assert chi_square_p(counts, np.full(VOCAB, 1 / VOCAB)) > 1e-4


def test_bias_comes_before_the_repetition_penalty_as_in_hf_transformers():
    """Bias that changes the sign of a logit changes whether the penalty divides or multiplies it.

    The expected values are written out here, in the order of `_get_logits_processor` of transformers and of
    `apply_logits_processors` of vLLM, so that the oracle of the other tests is not asked about itself.
    """
    logits = np.asarray([1.0, -1.0, 2.0, -2.0, 3.0, 0.5, -0.5, 1.5, -3.0, 0.0, 2.5])
    bias, penalty, seen = {0: -4.0, 1: 4.0, 2: 4.0, 3: -4.0, 9: 4.0, 10: -4.0}, 1.9, [0, 1, 2, 3, 4, 9, 10]
    z = logits.copy()
    for token, value in bias.items():
        z[token] += value
    for token in seen:
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    expected = z - np.log(np.exp(z).sum())
    params = SamplingParams(repetition_penalty=penalty, logit_bias=bias, ignore_eos=True)
    rows = jnp.zeros(4000, jnp.int32)
    out = jax.jit(choose, static_argnames="max_top")(
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (4000, 11)),
        table_of([params], 11, limits=limits_for(11, max_logit_bias=6)).rows(rows),
        History(
            positions=jnp.arange(4000, dtype=jnp.int32),
            tokens=jnp.asarray([seen], jnp.int32),
            slot_ids=rows,
            prompt_lens=rows + 3,
            seq_lens=rows + len(seen),
        ),
        max_top=0,
    ).sampled()
    drawn = np.asarray(out.tokens)
    np.testing.assert_allclose(np.asarray(out.processed_logprobs), expected[drawn], atol=2e-5)
    counts = np.bincount(drawn, minlength=11)
    assert chi_square_p(counts, np.exp(expected)) > 1e-4
    assert np.abs(counts / 4000 - np.exp(distribution_of_other_order(logits, bias, penalty, seen))).sum() / 2 > 0.1


def distribution_of_other_order(logits, bias, penalty, seen) -> np.ndarray:
    z = logits.copy()
    for token in seen:
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    for token, value in bias.items():
        z[token] += value
    return z - np.log(np.exp(z).sum())
