"""Whether two sides of `run.py` did the same work, and by how much one was faster. README.md says what that means."""

import statistics
from collections.abc import Mapping, Sequence

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.axes import POSITION
from levanter_infer.models.decoder import DecoderModel

MAX_SHORTFALL = 0.05
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Bytes of a weight. With int8 each side quantizes the bfloat16 weights as it does."""
KINDS = ("prefill", "decode")

Tokens = Sequence[Sequence[int]]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def spaced(total: int, count: int) -> list[int]:
    """At most `count` of the numbers below `total`, evenly spaced, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, total - 1, min(count, total))})


def largest_shortfall(model: DecoderModel, prompts: Tokens, outputs: Tokens) -> float:
    """Largest shortfall of an output token's log probability behind the model's own choice.

    Args:
        model: in float32. It reads each prompt with its output, without a cache.
    Returns: the largest (best logit - the token's logit) / (best logit - mean logit). 0: every token is the model's
        choice; 1: some token is no better than a random one.
    """
    worst = [
        _shortfalls(model, jnp.asarray([*prompt, *output[:-1]]), jnp.asarray(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return float(jnp.max(jnp.stack(worst)))


@jax.jit
def _shortfalls(model: DecoderModel, tokens: jax.Array, output: jax.Array) -> jax.Array:
    logits = model(hax.named(tokens, (POSITION,))).array[-output.size :]
    best, chosen = logits.max(axis=1), jnp.take_along_axis(logits, output[:, None], axis=1)[:, 0]
    return ((best - chosen) / (best - logits.mean(axis=1))).max()


def differs(ours: Tokens, theirs: Tokens, shortfalls: Mapping[str, float]) -> str | None:
    """Why the outputs of two sides are not those of the same work; None if they are.

    Args:
        shortfalls: `largest_shortfall` of either side by name, in 8 and 16 bits; empty in float32, where tokens are
            equal.
    """
    if refusal := differs_in_length(ours, theirs):
        return refusal
    if shortfalls:
        late = {name: round(value, 3) for name, value in shortfalls.items() if not value <= MAX_SHORTFALL}
        return f"outputs that the model would not choose: shortfall {late}, at most {MAX_SHORTFALL}" if late else None
    agreed = min(common_prefix(a, b) for a, b in zip(ours, theirs, strict=True))
    return None if agreed == len(ours[0]) else f"the outputs differ: only {agreed} of {len(ours[0])} tokens agree"


def differs_in_length(ours: Tokens, theirs: Tokens) -> str | None:
    """Why sampled outputs, which no two sides have in common, are not of the same work; None if they are."""
    same = [len(row) for row in ours] == [len(row) for row in theirs]
    return None if same else "the outputs differ in length"


def ratio(ours: Mapping, peer: Mapping) -> dict[str, float]:
    """Ours to theirs, by medians of `prefill` and `decode`."""
    return {kind: round(statistics.median(ours[kind]) / statistics.median(peer[kind]), 2) for kind in KINDS}


def to_best(ratios: Mapping[str, Mapping[str, float]]) -> dict[str, dict]:
    """The smallest ratio of each kind, and whose it is."""
    best = {kind: min(ratios, key=lambda name: ratios[name][kind]) for kind in KINDS}
    return {kind: {"peer": name, "ratio": ratios[name][kind]} for kind, name in best.items()}
