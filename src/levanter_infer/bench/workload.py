"""Workloads of the benches: random models of known shapes and random prompts, from seeds."""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.engine.request import RequestOutput
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.llama import LLAMA
from levanter_infer.policies import WeightDtype

SHAPES = {
    "tiny": dict(hidden=64, layers=2, heads=4, kv_heads=2, mlp=128, vocab=257),
    "S": dict(hidden=576, layers=30, heads=9, kv_heads=3, mlp=1536, vocab=49152),
    "M": dict(hidden=2048, layers=16, heads=32, kv_heads=8, mlp=8192, vocab=128256),
}
"""Model shapes: S is SmolLM2-135M, M is Llama-3.2-1B."""
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "top_k": 50},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "logprobs": {"temperature": 0.0, "logprobs": 0},
    "top_logprobs": {"temperature": 0.0, "logprobs": 5},
    "scored": {"temperature": 0.0, "prompt_logprobs": 1},
}

ARRIVALS = ("poisson", "constant")


def count(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """`1,2,3` as whole numbers above 0, for argparse."""
    return tuple(count(part) for part in text.split(","))


def names(choices: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """`one,other`, each one of `choices`, for argparse."""
    known = tuple(choices)

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return found

    return parse


def span(text: str) -> tuple[int, int]:
    """`SHORTEST,LONGEST`, two of `numbers` in order, for argparse."""
    found = numbers(text)
    if len(found) != 2 or found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no SHORTEST,LONGEST")
    return found[0], found[1]


def amount(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def add_model_arguments(parser: argparse.ArgumentParser, shape: str = "S") -> None:
    """Add `--shape`, an option for each of its sizes, and `--dtype`."""
    group = parser.add_argument_group("model")
    group.add_argument("--shape", choices=SHAPES, default=shape, help=f"default {shape}")
    for name in SHAPES["S"]:
        group.add_argument(f"--{name.replace('_', '-')}", type=count, help="default: the shape's")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")


def add_weight_dtype(parser: argparse.ArgumentParser) -> None:
    """Add `--weight-dtype`."""
    help = "engine.weight_dtype; default that of the model"
    parser.add_argument("--weight-dtype", choices=[each.value for each in WeightDtype], help=help)


def model_sizes(args: argparse.Namespace) -> dict[str, int]:
    """The sizes from the options of `add_model_arguments`."""
    sizes = SHAPES[args.shape]
    return {name: size if getattr(args, name) is None else getattr(args, name) for name, size in sizes.items()}


def hf_config(sizes: dict[str, int], max_positions: int = 8192) -> dict[str, Any]:
    """config.json of a Llama of the given sizes with a tied head."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "intermediate_size": sizes["mlp"],
        "vocab_size": sizes["vocab"],
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    }


def model_config(sizes: dict[str, int], max_positions: int = 8192) -> DecoderConfig:
    """The configuration of `hf_config`."""
    return LLAMA.config_from_hf(hf_config(sizes, max_positions))


def random_model(sizes: dict[str, int], dtype: str, *, max_positions: int = 8192) -> DecoderModel:
    """A model of that configuration with random weights."""
    return DecoderModel.init(model_config(sizes, max_positions), key=jax.random.key(0), dtype=jnp.dtype(dtype))


def random_prompts(vocab: int, lens: list[int], seed: int) -> list[list[int]]:
    """Token ids, one prompt per length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lens]


def mixed_lens(shortest: int, longest: int, count: int, seed: int) -> list[int]:
    """Log-uniform lengths between two bounds: many short ones, few long ones."""
    rng = np.random.default_rng(seed)
    lens = np.exp(rng.uniform(np.log(shortest), np.log(longest + 1), count))
    return np.clip(lens.astype(int), shortest, longest).tolist()


def arrival_times(kind: str, count: int, rate: float, seed: int) -> list[float]:
    """Arrival times of requests in seconds, ascending: `rate` per second, of one of the `ARRIVALS` processes.

    One seed gives the same pattern at every rate, scaled.
    """
    if kind == "constant":
        gaps = np.ones(count)
    elif kind == "poisson":
        gaps = np.random.default_rng(seed).exponential(1.0, count)
    else:
        raise ValueError(f"arrivals {kind!r}: expected one of {', '.join(ARRIVALS)}")
    return (np.cumsum(gaps) / rate).tolist()


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The tokens of every completion, in order."""
    return [completion.token_ids for output in outputs for completion in output.completions]
