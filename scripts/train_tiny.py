"""Train the tiny Llama of this repository and write it as a HF checkpoint directory.

    pip install -e .[train]
    python scripts/train_tiny.py --output models/tiny

One seed gives one stream of examples; on the same machine and versions it gives the same weights. What the model
learns, its formats and its accuracy: docs/tiny-model.md.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from levanter_infer.checkpoints.save import save_model
from levanter_infer.models.decoder import DecoderModel
from tiny.data import batches, sum_pairs
from tiny.evaluate import chat_prompt, greedy, share_of_requests, share_of_sorts, share_of_stories, share_of_sums
from tiny.tokenizer import EOS_ID, build_tokenizer, save_tokenizer
from tiny.training import make_optimizer, make_step, model_config

REQUIRED_ACCURACY = 0.98  # of the held-out sums, with the weights as stored
HELD_OUT = sum_pairs(held_out=True)


def cast(model: DecoderModel, dtype) -> DecoderModel:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), model)


def report(model: DecoderModel, tokenizer: Tokenizer) -> dict[str, float]:
    """The shares that docs/tiny-model.md quotes."""
    return {
        "held_out_sums": share_of_sums(model, tokenizer, HELD_OUT),
        "held_out_sums_in_chat": share_of_sums(model, tokenizer, HELD_OUT, as_chat=True),
        "trained_sums": share_of_sums(model, tokenizer, sum_pairs(held_out=False)[::5]),
        "held_out_sorts": share_of_sorts(model, tokenizer, count=500),
        "held_out_sorts_in_chat": share_of_sorts(model, tokenizer, count=250, as_chat=True),
        "stories": share_of_stories(model, tokenizer, count=200),
        "stories_wished_for": share_of_requests(model, tokenizer),
    }


def train(tokenizer: Tokenizer, *, num_steps: int, peak: float, seed: int, every: int) -> DecoderModel:
    """The trained model in float32; prints progress every `every` steps."""
    model = DecoderModel.init(model_config(), key=jax.random.key(seed))
    optimizer = make_optimizer(num_steps, peak)
    state, step = optimizer.init(model), make_step(optimizer)
    stream = batches(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, seed)
    start = time.monotonic()
    for number in range(1, num_steps + 1):
        model, state, loss = step(model, state, next(stream))
        if number % every == 0 or number == num_steps:
            sums = share_of_sums(model, tokenizer, HELD_OUT[::4])
            elapsed = time.monotonic() - start
            print(f"step {number:5d}  {elapsed:5.0f} s  loss {float(loss):.4f}  held-out sums {sums:.1%}", flush=True)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to write; made if absent")
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps; about 1 s of processor time each")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the examples")
    parser.add_argument("--every", type=int, default=100, help="steps between two lines of progress")
    args = parser.parse_args()

    start = time.monotonic()
    tokenizer = build_tokenizer()
    model = train(tokenizer, num_steps=args.steps, peak=args.learning_rate, seed=args.seed, every=args.every)
    times = {"train_s": round(time.monotonic() - start), "train_cpu_s": round(time.process_time())}
    stored = cast(model, jnp.bfloat16)
    save_model(stored, args.output, hf_config={"eos_token_id": EOS_ID, "pad_token_id": EOS_ID})
    save_tokenizer(tokenizer, args.output)

    shares = report(cast(stored, jnp.float32), tokenizer)
    in_bf16 = share_of_sums(stored, tokenizer, HELD_OUT)
    print(json.dumps({**times, **{k: round(v, 4) for k, v in shares.items()}}))
    print(f"held-out sums computed in bfloat16 throughout: {in_bf16:.2%}")
    for prompt in ("Once upon a time", chat_prompt("Tell me a story about an owl.")):
        print(repr(prompt + greedy(stored, tokenizer, [prompt], 80)[0]))
    worst = min(shares["held_out_sums"], in_bf16)
    if worst < REQUIRED_ACCURACY:
        print(f"held-out sums right: {worst:.2%}, expected {REQUIRED_ACCURACY:.0%}; train for more --steps")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
