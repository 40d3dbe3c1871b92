"""NaN in free pages, in a neighbour's pages or in one row of logits changes no bit of anybody else.

Each test runs the same requests twice, healthy and poisoned, so that every step has the same rows; sequences that are
poisoned have companions in the healthy run that end in the same steps.
"""

import dataclasses
import functools
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.cache.arrays import replace
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.kernels.cpu import bindings as cpu
from tests.tiny_models import tiny_model

BAD, HEALTHY = 60, 59
"""Tokens: all keys and values of one and after it are NaN, and so are logits; and one like any other."""
SIZES = {"max_seq_len": 64, "page_size": 4, "max_step_tokens": 16}
CPU = {**SIZES, "attention": "cpu", "matmul": "cpu", "max_seqs": 4, "max_pages": 12}
XLA = {**SIZES, "attention": "xla", "matmul": "xla", "max_seqs": 8, "max_pages": 24, "max_round_steps": 1}
BACKENDS = {
    "cpu, prefix cache": {**CPU, "prefix_cache": True},  # as in test_prefix_cache.py: compiled once for both
    "xla": XLA,  # as in test_ladder.py
    "cpu": CPU,
    "xla, prefix cache": {**XLA, "prefix_cache": True},
}
FAST = 1
"""Engines that CI compiles; the rest are run with -m slow."""


@functools.lru_cache
def make_engine(backend: str) -> InferenceEngine:
    model = tiny_model()
    table = model.embeddings.weight.array.at[BAD].set(jnp.nan)
    model = eqx.tree_at(lambda m: m.embeddings.weight.array, model, table)
    return InferenceEngine(model, config=EngineConfig(**BACKENDS[backend]))


@pytest.fixture(params=[pytest.param(b, marks=[pytest.mark.slow] * (i >= FAST)) for i, b in enumerate(BACKENDS)])
def engine(request):
    if request.param.startswith("cpu") and not cpu.available():
        pytest.skip("the C++ kernels were not built")
    engine = make_engine(request.param)
    engine.reset()
    return engine


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, HEALTHY, length).tolist()


def request(ids: list[int], seed: int, max_tokens: int = 14, n: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, n=n, logit_bias={BAD: -1e9})
    return Request(prompt_token_ids=ids, sampling=sampling)


def with_nan_logits(request: Request) -> Request:
    """The request with a bias of NaN, which no request can have."""
    sampling = dataclasses.replace(request.sampling)
    object.__setattr__(sampling, "logit_bias", {0: math.nan})
    return dataclasses.replace(request, sampling=sampling)


def batch() -> list[Request]:
    """Samples of one prompt, common prefixes, and more tokens than the pool holds."""
    common = text(9, 100)
    return [request((common if i % 2 else []) + text(3 + i, i), seed=i, n=1 + (i % 3 == 0)) for i in range(6)]


def run(engine: InferenceEngine, requests: list[Request], meddle=None) -> list[list]:
    """The outcome of every completion, to the bit; `meddle(engine)` is called after every step."""
    before = engine.stats()["preemptions"]
    groups = [engine.submit(request) for request in requests]
    while not all(group.is_done for group in groups):
        engine.step_round(max_steps=1)
        if meddle is not None:
            meddle(engine)
    engine.drain()
    check_invariants(engine.state.decode)
    assert engine.stats()["pages_free"] == engine.shapes.num_pages
    assert engine.stats()["preemptions"] > before or len(requests) == 1
    completions = [[sequence.completion() for sequence in group.sequences] for group in groups]
    return [
        [(c.token_ids, c.finish_reason, c.logprobs.tobytes(), c.processed_logprobs.tobytes()) for c in of_request]
        for of_request in completions
    ]


def poison(engine: InferenceEngine, places: np.ndarray) -> None:
    """NaN in all keys and values at these places, bool[page, page_offset]."""
    (pool,) = engine.state.cache.pools
    pages = jnp.where(jnp.asarray(places)[None, :, :, None, None], jnp.float32(jnp.nan), pool.pages.array)
    cache = engine.state.cache.with_pool(0, replace(pool, pages=pages))
    engine.runner.state = dataclasses.replace(engine.state, cache=cache)


def places_of(engine: InferenceEngine, slots) -> np.ndarray:
    """Where the keys and values of these slots are stored, bool[page, page_offset]."""
    table, size = engine.state.decode.sequences, engine.shapes.page_size
    places = np.zeros((engine.shapes.num_pages, size), bool)
    pages, computed = np.asarray(table.page_indices), np.asarray(table.num_computed)
    for slot in slots:
        position = np.arange(computed[slot])
        places[pages[slot, position // size], position % size] = True
    return places


def test_nan_wherever_nothing_is_stored_changes_no_bit(engine):
    """Free pages, and the offsets of every page beyond the length of its holders."""

    def fill(engine):
        kept = places_of(engine, range(engine.shapes.num_slots))
        if engine.state.decode.prefix is not None:
            kept |= np.asarray(engine.state.decode.prefix.findable(jnp.arange(len(kept))))[:, None]
        poison(engine, ~kept)
        filled.append(int((~kept).sum()))

    healthy = run(engine, batch())
    assert {reason for completions in healthy for _, reason, *_ in completions} == {"length"}
    engine.reset()
    poison(engine, np.ones((engine.shapes.num_pages, engine.shapes.page_size), bool))
    filled: list[int] = []
    assert run(engine, batch(), fill) == healthy
    assert sum(filled) > 100


@pytest.mark.parametrize("where", ["keys and values", "logits"])
def test_nan_that_a_sequence_computes_itself_changes_no_bit_of_others(engine, where):
    """Its keys and values from early in its prompt on, over several chunks; or nothing but its row of logits."""

    def mixed(is_sick: bool) -> list[Request]:
        if where == "logits":
            others = [request(text(6, 50 + i), 9, max_tokens=1) for i in range(3)]
            others = [with_nan_logits(other) for other in others] if is_sick else others
        else:
            prompts = [[*text(2, 50 + i), BAD if is_sick else HEALTHY, *text(24, 60 + i)] for i in range(3)]
            others = [request(prompt, 9, max_tokens=1) for prompt in prompts]
        return [request for pair in zip(batch()[:3], others, strict=True) for request in pair] + batch()[3:]

    healthy = run(engine, mixed(False))
    engine.reset()
    poisoned = run(engine, mixed(True))
    assert [completions[0][:2] for completions in poisoned[1:6:2]] == [([], "error")] * 3
    assert poisoned[0:6:2] + poisoned[6:] == healthy[0:6:2] + healthy[6:]


def strike(engine: InferenceEngine, struck: list[int]) -> None:
    """Once the sequence in slot 0 has stored 13 tokens: NaN wherever it alone looks."""
    computed = int(engine.state.decode.sequences.num_computed[0])
    if not struck and computed == 13:
        struck.append(computed)
        others = places_of(engine, range(1, engine.shapes.num_slots))
        poison(engine, places_of(engine, [0]) & ~others)


VICTIM = request(text(10, 77), seed=7)


def test_nan_within_a_sequence_ends_it_alone(engine):
    struck: list[int] = []
    poisoned = run(engine, [VICTIM, *batch()], lambda engine: strike(engine, struck))
    ((tokens, reason, *_),) = poisoned[0]
    assert struck and reason == "error" and 0 < len(tokens) < 14
    engine.reset()
    shorter = dataclasses.replace(VICTIM.sampling, max_tokens=len(tokens) + 1)
    healthy = run(engine, [dataclasses.replace(VICTIM, sampling=shorter), *batch()])
    assert healthy[0][0][0][:-1] == tokens
    assert poisoned[1:] == healthy[1:]


def test_pages_of_a_sequence_that_ended_in_error_are_not_found_again(engine):
    def hits_of_a_second_run(meddle=None) -> tuple[list, int, list]:
        engine.reset()
        (first,) = run(engine, [VICTIM], meddle)
        before = engine.stats()["prefix_hits"]
        (second,) = run(engine, [VICTIM])
        return first, engine.stats()["prefix_hits"] - before, second

    struck: list[int] = []
    ((_, reason, *_),), hits, again = hits_of_a_second_run(lambda engine: strike(engine, struck))
    assert (reason, hits) == ("error", 0)
    healthy, hits, _ = hits_of_a_second_run()
    assert again == healthy
    assert hits > 0 or engine.state.decode.prefix is None
