"""Small random models for tests: every family feature that the engine has to carry, in a few kilobytes."""

import dataclasses
import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer import EngineConfig, InferenceEngine
from levanter_infer.axes import POSITION
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import family_for
from levanter_infer.models.uncached import next_token

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 61,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

SIZES = dict(max_seqs=4, max_seq_len=64, page_size=4, max_step_tokens=16)
"""Engine sizes for tests that need no others: the rounds of all such engines of `tiny_model` are compiled once."""


@functools.lru_cache
def tiny_model(seed: int = 0, dtype: str = "float32", **changes) -> DecoderModel:
    """A random model whose logits are far enough apart for greedy decoding to be well defined."""
    config = family_for({**LLAMA, **changes}).config_from_hf({**LLAMA, **changes})
    model = DecoderModel.init(config, key=jax.random.key(seed), dtype=jnp.dtype(dtype))
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(3, leaf.dtype), model)


def shared_engine(**config) -> InferenceEngine:
    """The engine of `tiny_model` with `SIZES` and `config` that the tests of a process share, empty.

    Its counters are totals of all these tests. Not for tests that add tables to an engine, as `score` does.
    """
    engine = _kept_engine(**config)
    engine.reset()
    return engine


@functools.lru_cache
def _kept_engine(**config) -> InferenceEngine:
    return InferenceEngine(tiny_model(), config=EngineConfig(**{**SIZES, **config}))


def with_mixers(config: DecoderConfig, **changes) -> DecoderConfig:
    """`config` with other fields of the mixer in every layer."""
    blocks = tuple(
        dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, **changes)) for block in config.blocks
    )
    return dataclasses.replace(config, blocks=blocks)


@functools.lru_cache
def windowed_model(windows: tuple[int | None, ...], dtype: str = "float32") -> DecoderModel:
    """`tiny_model` with a layer for each of `windows`: tokens that it sees, or None for all."""
    model = tiny_model(dtype=dtype, num_hidden_layers=len(windows))
    blocks = tuple(
        dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, window=window))
        for block, window in zip(model.config.blocks, windows, strict=True)
    )
    return dataclasses.replace(model, config=dataclasses.replace(model.config, blocks=blocks))


def uncached_logprobs(model: DecoderModel, tokens: list[int], length: int) -> np.ndarray:
    """The oracle: log probability of everything that may follow each token, f64[tokens, vocab].

    Args:
        length: to which the tokens are padded, so that one program serves many.
    """
    padded = jnp.asarray(tokens + [0] * (length - len(tokens)), jnp.int32)
    logits = np.asarray(_logits()(model, padded), np.float64)[: len(tokens)]
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def uncached_greedy(model: DecoderModel, prompt: list[int], steps: int) -> list[int]:
    """The oracle: the whole sequence through the plain forward for every token."""
    length = -(-(len(prompt) + steps) // 32) * 32  # so that one program serves many
    forward = _forward()
    tokens = list(prompt)
    for _ in range(steps):
        padded = jnp.asarray(tokens + [0] * (length - len(tokens)), jnp.int32)
        tokens.append(int(forward(model, padded, jnp.int32(len(tokens)))))
    return tokens[len(prompt) :]


@functools.lru_cache
def _logits():
    return jax.jit(lambda model, tokens: model(hax.named(tokens, (POSITION,))).array)


@functools.lru_cache
def _forward():
    return jax.jit(next_token)
