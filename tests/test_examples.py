"""The worked examples of scripts/examples: their first steps."""

import asyncio
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts.examples import grpo_async, grpo_sums
from scripts.examples.grpo_sums import Settings, init, make_step

SMALL = Settings(num_prompts=16, group=8, learning_rate=3e-3)


@pytest.fixture(autouse=True)
def optax_promotes_as_it_likes():
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # in the trainer's thread too
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


@pytest.mark.slow
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


@pytest.mark.slow
def test_rollouts_that_are_sampled_while_the_trainer_updates_are_paid_more_after_a_few_steps():
    rewards, lags = [], []

    def on_step(step: int, reward: float, lag: int) -> bool:
        rewards.append(reward)
        lags.append(lag)
        return False

    asyncio.run(grpo_async.train(SMALL, 50, 0, on_step))
    first, last = np.mean(rewards[:10]), np.mean(rewards[-10:])
    assert 0.0 < first < 0.3 and last > first + 0.15, (first, last)
    assert set(lags) <= {0, 1} and 1 in lags  # one step off policy, and never more


def test_importance_weights_are_those_of_the_policy_that_sampled_and_are_truncated():
    """Truncation takes hold where the sampling policy found an answer unlikely, and there only."""
    settings = dataclasses.replace(SMALL, num_prompts=2, group=2, entropy=0.0)
    state = init(settings, seed=1)
    prompts, answers = grpo_sums.draw_prompts(jax.random.key(3), 2)
    sampled = jnp.stack([answers, (answers + 1) % 10], axis=1)
    rewards = jnp.asarray([1.0, 0.0], jnp.float32)[None, :, None] * jnp.ones((2, 1, 1), jnp.float32)
    rows, flat = jnp.repeat(prompts, 2, axis=0), sampled.reshape(-1, 1)
    now = grpo_sums.logprobs_of(state.policy, rows, flat)[0].reshape(2, 2, 1)

    def policy_after(sampled_with):
        after = grpo_async.make_update(settings)(state, prompts, sampled, sampled_with, rewards)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(after.policy)]

    capped, far = policy_after(now - np.log(2.0)), policy_after(now - 5.0)
    for one, other in zip(capped, far, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_the_commands_of_the_page_about_reinforcement_learning_run():
    root = Path(__file__).resolve().parents[1]
    commands = re.findall(r"`python -m (scripts\.[\w.]+)`", (root / "docs" / "rl.md").read_text())
    assert commands
    for module in commands:
        command = [sys.executable, "-m", module, "--steps", "3", "--every", "2", "--goal", "0"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "step    2" in done.stdout, done.stderr[-2000:]
