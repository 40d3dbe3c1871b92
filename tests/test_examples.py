"""The worked examples of scripts/examples: their first steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts.examples import grpo_sums
from scripts.examples.grpo_sums import Settings, init, make_step

SMALL = Settings(num_prompts=16, group=8, learning_rate=3e-3)


@pytest.fixture(autouse=True)
def optax_promotes_as_it_likes():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_a_policy_that_samples_and_learns_in_one_step_is_paid_more_after_a_few_of_them():
    state, step = init(SMALL, seed=0), make_step(SMALL)
    rewards = []
    for _ in range(50):
        state, reward = step(state)
        rewards.append(float(reward))
    assert step._cache_size() == 1
    first, last = np.mean(rewards[:10]), np.mean(rewards[-10:])
    assert 0.0 < first < 0.3 and last > first + 0.15, (first, last)


def test_an_answer_is_paid_by_its_digits_and_a_better_one_becomes_likelier(monkeypatch):
    state = init(dataclasses.replace(SMALL, num_prompts=2, group=2), seed=1)
    prompts, answers = grpo_sums.draw_prompts(jax.random.key(3), 2)
    assert (prompts[:, 1] == grpo_sums.PLUS).all() and (prompts[:, 3] == grpo_sums.EQUALS).all()
    assert (answers[:, 0] == prompts[:, 0] + prompts[:, 2]).all() and answers.shape == (2, grpo_sums.DIGITS)
    wrong = (answers + 1) % 10
    sampled = jnp.stack([answers, wrong], axis=1)

    class Sampled:
        token_ids = sampled

    monkeypatch.setattr(grpo_sums, "draw_prompts", lambda key, count: (prompts, answers))
    monkeypatch.setattr(grpo_sums, "generate", lambda *arguments, **keywords: Sampled)

    @jax.jit
    def gap(policy):
        right, bad = (grpo_sums.logprobs_of(policy, prompts, digits)[0].sum() for digits in (answers, wrong))
        return right - bad

    before = float(gap(state.policy))
    after, reward = make_step(Settings(num_prompts=2, group=2))(state)
    assert float(reward) == pytest.approx(0.5) and float(gap(after.policy)) > before
