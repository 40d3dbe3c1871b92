"""Teach a tiny policy to add by sampling from it and updating it inside one jitted step.

    pip install -e .[train]
    python scripts/examples/grpo_sums.py

Each step draws prompts like `3+4=`, samples a group of answers to each (`levanter_infer.generate`, with the parameters
that are being trained), pays for every digit that is right, and follows the gradient of the digits' log
probabilities, weighted by how much better than in the rest of its group a digit is. Nothing leaves the device
within a step.
Sources: REINFORCE, Williams 1992; the group's mean as baseline, GRPO, arXiv:2402.03300.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax

from levanter_infer import EngineConfig, SamplingParams, generate
from levanter_infer.axes import POSITION, ROW
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import family_for

PLUS, EQUALS, VOCAB = 10, 11, 12
"""Tokens 0 to 9 are the digits."""
DIGITS = 1
"""Digits of an answer."""
MAX_OPERAND = 4
"""Largest operand, so that an answer has one digit."""
POLICY = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Settings:
    """Settings of a training run."""

    num_prompts: int = 64
    """Prompts per step."""
    group: int = 8
    """Answers sampled for each prompt."""
    learning_rate: float = 1e-3
    entropy: float = 0.01
    """Weight of the answers' entropy, which keeps the policy trying."""


class TrainState(eqx.Module):
    """State that one step passes to the next."""

    policy: DecoderModel
    optimizer: Any
    key: jax.Array


def optimizer_for(settings: Settings) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.learning_rate))


def init(settings: Settings, seed: int) -> TrainState:
    policy = DecoderModel.init(family_for(POLICY).config_from_hf(POLICY), key=jax.random.key(seed))
    return TrainState(policy, optimizer_for(settings).init(policy), jax.random.key(seed + 1))


def draw_prompts(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Prompts i32[count, 4], and the digits of their answers i32[count, DIGITS]."""
    first, second = jax.random.randint(key, (2, count), 0, MAX_OPERAND + 1)
    prompts = jnp.stack([first, jnp.full_like(first, PLUS), second, jnp.full_like(first, EQUALS)], axis=1)
    return prompts, (first + second)[:, None]


def logprobs_of(policy: DecoderModel, prompts: jax.Array, answers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log probability of each token of the answers f32[row, DIGITS], and the entropy where it was drawn."""
    tokens = jnp.concatenate([prompts, answers], axis=1)
    logits = policy(hax.named(tokens[:, :-1], (ROW, POSITION))).rearrange((ROW, POSITION, ...)).array
    all_of_them = jax.nn.log_softmax(logits[:, prompts.shape[1] - 1 :], axis=-1)
    chosen = jnp.take_along_axis(all_of_them, answers[:, :, None], axis=2)[:, :, 0]
    return chosen, -jnp.sum(jnp.exp(all_of_them) * all_of_them, axis=-1)


def train_step(state: TrainState, settings: Settings) -> tuple[TrainState, jax.Array]:
    """Sample, reward, update. Pure; returns the new state, and the share of right digits f32[]."""
    key, draw, seed = jax.random.split(state.key, 3)
    prompts, expected = draw_prompts(draw, settings.num_prompts)
    sampled = generate(
        state.policy,
        prompts,
        jnp.full(settings.num_prompts, prompts.shape[1], jnp.int32),
        SamplingParams(max_tokens=DIGITS, n=settings.group),
        config=EngineConfig(max_seqs=settings.num_prompts * settings.group, page_size=8, prefix_cache=False),
        seeds=jax.random.bits(seed, (settings.num_prompts, 2), jnp.uint32),
    )
    rewards = (sampled.token_ids == expected[:, None, :]).astype(jnp.float32)
    advantages = rewards - jnp.mean(rewards, axis=1, keepdims=True)

    def loss(policy: DecoderModel) -> jax.Array:
        answers = sampled.token_ids.reshape(-1, DIGITS)
        logprobs, entropy = logprobs_of(policy, jnp.repeat(prompts, settings.group, axis=0), answers)
        gained = jnp.mean(advantages.reshape(-1, DIGITS) * logprobs)
        return -gained - jnp.float32(settings.entropy) * jnp.mean(entropy)

    gradients = jax.grad(loss)(state.policy)
    updates, optimizer = optimizer_for(settings).update(gradients, state.optimizer, state.policy)
    return TrainState(optax.apply_updates(state.policy, updates), optimizer, key), jnp.mean(rewards)


def make_step(settings: Settings):
    """`train_step` as one program; the state is donated."""
    return jax.jit(lambda state: train_step(state, settings), donate_argnums=0)


def read_arguments(description: str | None) -> argparse.Namespace:
    """The options of a training run."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=50, help="steps between two lines of progress")
    parser.add_argument("--goal", type=float, default=0.9, help="share of right digits at which it stops")
    return parser.parse_args()


def main() -> int:
    args = read_arguments(__doc__)
    settings = Settings()
    state, step = init(settings, args.seed), make_step(settings)
    start, rewards = time.monotonic(), []
    for number in range(1, args.steps + 1):
        state, reward = step(state)
        rewards.append(reward)
        if number % args.every == 0:
            recent = float(jnp.mean(jnp.stack(rewards[-args.every :])))
            elapsed = time.monotonic() - start
            print(f"step {number:4d}  {elapsed:5.0f} s  right digits {recent:.1%}", flush=True)
            if recent >= args.goal:
                return 0
    print(f"the share of right digits did not reach {args.goal:.0%}; train for more --steps")
    return 1


if __name__ == "__main__":
    sys.exit(main())
