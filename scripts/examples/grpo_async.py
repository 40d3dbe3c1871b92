"""Teach the policy of `grpo_sums.py` to add, with rollouts that an engine samples while the trainer updates.

    pip install -e .[train]
    python -m scripts.examples.grpo_async

A batch of rollouts is sampled by an `AsyncEngine` while the batch before it is trained on, so the policy that has
sampled a token is one update older than the one that learns from it, at most. Each token brings the log probability
with which it was sampled; its gradient is weighted by the ratio of the two policies, truncated from above.
Sources: as in `grpo_sums.py`; truncated importance sampling, IMPALA (arXiv:1802.01561) and, for rollouts of an
engine, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
"""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scripts.examples.grpo_sums import (
    DIGITS,
    Settings,
    TrainState,
    draw_prompts,
    init,
    logprobs_of,
    optimizer_for,
    read_arguments,
)

from levanter_infer import AsyncEngine, EngineConfig, InferenceEngine, Request, SamplingParams

MOST_WEIGHT = 2.0
"""Importance weights are truncated here."""


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """A batch of sampled answers."""

    prompts: np.ndarray
    """i32[prompt, 4]"""
    answers: np.ndarray
    """i32[prompt, sample, DIGITS]"""
    logprobs: np.ndarray
    """f32[prompt, sample, DIGITS], of the engine, under the distribution that was sampled from."""
    versions: np.ndarray
    """i32[prompt, sample, DIGITS], of the weights that sampled each token."""
    rewards: np.ndarray
    """f32[prompt, sample, DIGITS]"""


async def roll_out(engine: AsyncEngine, key: jax.Array, settings: Settings, batch: int) -> Rollouts:
    """Sample a group of answers to each of a batch of prompts."""
    prompts, expected = (np.asarray(each) for each in draw_prompts(key, settings.num_prompts))
    sampling = SamplingParams(max_tokens=DIGITS, n=settings.group)
    requests = [
        Request(prompt_token_ids=ids.tolist(), sampling=sampling, id=f"{batch}/{i}") for i, ids in enumerate(prompts)
    ]
    outputs = await asyncio.gather(*map(engine.generate, requests))

    def of_all(field: str) -> np.ndarray:
        return np.array([[getattr(sample, field) for sample in output.completions] for output in outputs])

    answers = of_all("token_ids")
    rewards = (answers == expected[:, None, :]).astype(np.float32)
    return Rollouts(prompts, answers, of_all("processed_logprobs"), of_all("token_versions"), rewards)


def make_update(settings: Settings) -> Callable[..., TrainState]:
    """A step on one batch, as one program. The policy is not donated: the engine samples with the same arrays."""

    def update(state: TrainState, prompts, answers, sampled_with, rewards) -> TrainState:
        advantages = (rewards - jnp.mean(rewards, axis=1, keepdims=True)).reshape(-1, DIGITS)

        def loss(policy):
            rows = jnp.repeat(prompts, settings.group, axis=0)
            logprobs, entropy = logprobs_of(policy, rows, answers.reshape(-1, DIGITS))
            ratio = jnp.exp(jax.lax.stop_gradient(logprobs) - sampled_with.reshape(-1, DIGITS))
            gained = jnp.mean(jnp.minimum(ratio, MOST_WEIGHT) * advantages * logprobs)
            return -gained - settings.entropy * jnp.mean(entropy)

        gradients = jax.grad(loss)(state.policy)
        updates, optimizer = optimizer_for(settings).update(gradients, state.optimizer, state.policy)
        return TrainState(optax.apply_updates(state.policy, updates), optimizer, state.key)

    return jax.jit(update)


async def train(
    settings: Settings, steps: int, seed: int, on_step: Callable[[int, float, int], bool] = lambda *_: False
) -> TrainState:
    """Train while the next batch is sampled.

    Args:
        on_step: called with the step, the share of right digits in its batch, and by how many updates the oldest
            policy of its tokens was behind; training stops when it returns True.
    """
    state, update = init(settings, seed), make_update(settings)
    sizes = EngineConfig(max_seqs=settings.num_prompts * settings.group, page_size=8, matmul="xla")
    engine = InferenceEngine(state.policy, config=sizes, seed=seed)
    engine.warmup(weight_updates=True)
    keys = jax.random.split(state.key, steps + 1)
    async with AsyncEngine(engine, max_waiting=2 * settings.num_prompts) as rollouts:
        coming = asyncio.create_task(roll_out(rollouts, keys[0], settings, 0))
        for step in range(steps):
            batch = await coming
            coming = asyncio.create_task(roll_out(rollouts, keys[step + 1], settings, step + 1))
            arrays = batch.prompts, batch.answers, batch.logprobs, batch.rewards
            state = await asyncio.to_thread(lambda: jax.block_until_ready(update(state, *arrays)))  # noqa: B023
            await rollouts.pause("step")
            await rollouts.swap_weights(state.policy, version=step + 1, policy="keep_kv")
            await rollouts.resume()
            if on_step(step, float(np.mean(batch.rewards)), step - int(batch.versions.min())):
                break
        await coming
    return state


def main() -> int:
    args = read_arguments(__doc__)
    start, rewards, lags = time.monotonic(), [], []

    def on_step(step: int, reward: float, lag: int) -> bool:
        rewards.append(reward)
        lags.append(lag)
        recent = float(np.mean(rewards[-args.every :]))
        if (step + 1) % args.every == 0:
            line = f"step {step + 1:4d}  {time.monotonic() - start:5.0f} s  right digits {recent:.1%}"
            print(f"{line}  behind by {np.mean(lags[-args.every :]):.2f} updates", flush=True)
        return (step + 1) % args.every == 0 and recent >= args.goal

    asyncio.run(train(Settings(), args.steps, args.seed, on_step))
    if len(rewards) < args.steps or np.mean(rewards[-args.every :]) >= args.goal:
        return 0
    print(f"the share of right digits did not reach {args.goal:.0%}; train for more --steps")
    return 1


if __name__ == "__main__":
    sys.exit(main())
