"""Models that remember a state of fixed size per sequence: forks and descendants take it along.

Tokens and logprobs are compared with the uncached forward, the latter with a tolerance: a chunk of tokens is computed
by matmuls, a token alone by sums, which round differently. test_families.py has chunks, batches, preemption, offload.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer import generate
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.models import periods
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import family_for
from tests.golden_cases import load_case
from tests.hlo import pool_copies
from tests.tiers import nightly_but
from tests.tiny_models import uncached_greedy, uncached_logprobs

LENGTH = 96
TOLERANCE = 1e-3


@functools.cache
def model_of(name: str):
    raw = {**load_case(name).config, "vocab_size": 61}
    model = DecoderModel.init(family_for(raw).config_from_hf(raw), key=jax.random.key(0))
    model = jax.tree.map(lambda leaf: 3 * leaf, model)
    rng = np.random.default_rng(1)  # decays and skips other than one

    def moved(leaf):
        return leaf + jnp.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype) if leaf.ndim == 2 else leaf

    return jax.tree.map(moved, model)


def make_engine(name: str, *, scoring: bool = False, **config) -> InferenceEngine:
    sizes = dict(max_seqs=4, max_seq_len=LENGTH, page_size=4, max_pages=60, max_step_tokens=16)
    return InferenceEngine(model_of(name), config=EngineConfig(**{**sizes, **config}), scoring=scoring)


@functools.cache
def shared_engine(name: str) -> InferenceEngine:
    """Its round is compiled once, for scoring too, and for test_state_snapshots.py."""
    return make_engine(name, scoring=True)


@pytest.fixture(params=nightly_but([], ["lfm2", "qwen3_5"]))
def name(request) -> str:
    return request.param


@pytest.fixture
def engine(name):
    engine = shared_engine(name)
    engine.reset()
    return engine


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 61, length).tolist()


def request(ids: list[int], max_tokens: int = 8, temperature: float = 0.0, **sampling) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True, logprobs=0, **sampling)
    return Request(prompt_token_ids=ids, sampling=params)


def check_logprobs(name: str, prompt: list[int], completion) -> None:
    """Those of its tokens are the uncached forward's."""
    tokens = [*prompt, *completion.token_ids]
    expected = uncached_logprobs(model_of(name), tokens, LENGTH)
    steps = np.arange(len(prompt) - 1, len(tokens) - 1)
    np.testing.assert_allclose(completion.logprobs, expected[steps, completion.token_ids], atol=TOLERANCE)


def run(name: str, engine: InferenceEngine, *requests: Request) -> dict[str, float]:
    """Sample the requests greedily, compare them with the uncached forward, and give what the engine counted."""
    before = engine.stats()
    outputs = engine.generate(list(requests))
    for asked, output in zip(requests, outputs, strict=True):
        assert output.error is None, output.error
        prompt = list(asked.prompt_token_ids)
        expected = uncached_greedy(model_of(name), prompt, asked.sampling.max_tokens)
        assert [list(c.token_ids) for c in output.completions] == [expected] * asked.sampling.n
        for completion in output.completions:
            check_logprobs(name, prompt, completion)
    check_invariants(engine.state.decode)
    after = engine.stats()
    return {key: after[key] - before[key] for key in ("preemptions", "forks", "recomputed_tokens") if key in after}


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_samples_of_one_prompt_fork_with_the_state(name, engine, length):
    """The prompt's last chunk stops where the forks start; with one token there is nothing to share."""
    counted = run(name, engine, request(text(length), n=3))
    assert counted["forks"] == (2 if length > 1 else 0)


def test_forks_of_a_parent_that_went_on_compute_the_prompt(name, engine):
    """Fewer sequences run at once than there are samples, and they diverge."""
    asked = request(text(17), max_tokens=6, temperature=1.0, n=engine.shapes.max_seqs + 2, seed=3)
    (output,) = engine.generate([asked])
    assert len({tuple(c.token_ids) for c in output.completions}) > 1
    for completion in output.completions:
        check_logprobs(name, list(asked.prompt_token_ids), completion)


def test_resampled_sequences_take_the_state_along(name, engine):
    asked = request(text(15), max_tokens=20, temperature=1.0, n=3, seed=5)
    state = engine.submit(asked)
    for _ in range(6):
        engine.step_round(max_steps=1)
    engine.resample(state, [1, 2, 1])  # 1 is source and target
    for _ in range(3):
        engine.step_round(max_steps=1)
    engine.fork(state, 0)
    engine.drain()
    output = state.output()
    assert len(output.completions) == 4
    for completion in output.completions:
        check_logprobs(name, list(asked.prompt_token_ids), completion)


def test_prompt_logprobs_are_those_of_the_uncached_forward(name, engine):
    prompt = text(31)
    (output,) = engine.generate([request(prompt, max_tokens=2, prompt_logprobs=0)])
    expected = uncached_logprobs(model_of(name), prompt, LENGTH)
    got = [float(entry) for entry in output.prompt_logprobs]
    np.testing.assert_allclose(got, expected[np.arange(30), prompt[1:]], atol=TOLERANCE)


@pytest.mark.slow
def test_the_pure_function_forks_and_samples(name):
    prompts = np.zeros((2, 9), np.int32)
    prompts[0], prompts[1, :4] = text(9), text(4, seed=1)
    sampling = SamplingParams(max_tokens=5, temperature=0.0, n=2, ignore_eos=True)
    made = generate(model_of(name), prompts, np.asarray([9, 4]), sampling=sampling, config=EngineConfig(page_size=4))
    for row, length in enumerate((9, 4)):
        expected = uncached_greedy(model_of(name), prompts[row, :length].tolist(), 5)
        assert made.token_ids[row].tolist() == [expected] * 2


@pytest.mark.parametrize(
    "attends, counts",
    [
        pytest.param([3, 7], [(3, 3), (1, 1)], marks=pytest.mark.slow),  # Granite 4: Mamba-2 between attention
        pytest.param([1, 2, 5, 7], [(1, 2, 1), (2, 1, 1)], marks=pytest.mark.slow),  # it does not repeat
        pytest.param([2, 5, 6], [(2, 2, 1), (1, 2, 0)], marks=pytest.mark.slow),
    ],
)
def test_equal_neighbours_that_share_a_body_are_all_computed(monkeypatch, attends, counts):
    """Where the bodies are too many."""
    monkeypatch.setattr(periods, "MAX_BODIES", 2)
    raw = {**load_case("lfm2").config, "vocab_size": 61, "num_hidden_layers": 8, "full_attn_idxs": attends}
    config = family_for(raw).config_from_hf(raw)
    assert [body.counts for group in config.groups for body in group.bodies] == counts
    model = jax.tree.map(lambda leaf: 3 * leaf, DecoderModel.init(config, key=jax.random.key(2)))
    engine = InferenceEngine(model, config=EngineConfig(max_seqs=2, max_seq_len=48, page_size=4, max_step_tokens=4))
    (output,) = engine.generate([request(text(20))])
    assert list(output.completions[0].token_ids) == uncached_greedy(model, text(20), 8)


@pytest.mark.slow
def test_layers_without_a_mixer_or_a_feed_forward_block_are_served():
    """Nemotron-H, in a pattern that repeats too little: bodies that some trips skip."""
    case = load_case("nemotron_h_dense")
    config = family_for(case.config).config_from_hf(case.config)
    (group,) = config.groups
    assert group.cycle is not None and {len(block.parts) for block in group.cycle} == {1, 2}
    assert any(block.mixer is None for block in group.cycle) and any(0 in body.counts for body in group.bodies)
    model = jax.tree.map(lambda leaf: 2 * leaf, DecoderModel.init(config, key=jax.random.key(2)))
    engine = InferenceEngine(model, config=EngineConfig(max_seqs=2, max_seq_len=48, page_size=4, max_step_tokens=4))
    (output,) = engine.generate([request(text(20))])
    assert list(output.completions[0].token_ids) == uncached_greedy(model, text(20), 8)


@pytest.mark.slow
def test_the_round_makes_no_copy_of_the_states():
    """But of one layer where forks start, which copy the states of their parents."""
    engine = shared_engine("qwen3_5")
    engine.warmup()
    compiled = engine.programs.compiled_round
    (pool,) = (pool for pool in engine.state.cache.pools if not pool.is_paged)
    for named in [*pool.arrays.values(), *engine.state.cache.snapshots[0].arrays.values()]:
        assert pool_copies(compiled.as_text(), (1, named.array.size), named.array.dtype) == []
