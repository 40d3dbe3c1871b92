"""`generate` as a pure function: the same tokens as the engine, inside other people's programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer import EngineConfig, Request, SamplingParams, generate
from levanter_infer.decode import generate as decode_generate
from levanter_infer.engine.backend_choice import BackendChoice
from tests.tiny_models import shared_engine, tiny_model, uncached_greedy

LENGTHS = (5, 9, 2)


@pytest.fixture(autouse=True, scope="module")
def _model_made_outside_of_any_trace():
    tiny_model()


def batch():
    rng = np.random.default_rng(3)
    padded = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, length in enumerate(LENGTHS):
        padded[row, :length] = rng.integers(0, 61, length)
    return padded, np.asarray(LENGTHS, np.int32)


def test_inside_jit_it_gives_the_tokens_of_the_uncached_forward_and_shares_pages(monkeypatch):
    prompts, lens = batch()
    prompts[1, :4] = prompts[0, :4]
    hits: list[int] = []
    collect = decode_generate._collect

    def counting(state, *arguments, **sizes):
        jax.debug.callback(lambda count: hits.append(int(count)), state.decode.counters.prefix_hits)
        return collect(state, *arguments, **sizes)

    monkeypatch.setattr(decode_generate, "_collect", counting)
    sampling = SamplingParams(max_tokens=7, temperature=0.0, n=2)
    config = EngineConfig(max_seqs=3, page_size=4, max_step_tokens=8)
    output = jax.jit(lambda model: generate(model, prompts, lens, sampling, config=config))(tiny_model())
    assert output.token_ids.shape == (3, 2, 7) and output.num_tokens.tolist() == [[7, 7]] * 3
    for row, length in enumerate(LENGTHS):
        expected = uncached_greedy(tiny_model(), prompts[row, :length].tolist(), 7)
        assert output.token_ids[row].tolist() == [expected] * 2
    assert output.finish_reason.tolist() == [[2, 2]] * 3
    jax.effects_barrier()
    assert hits == [1]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit])
def test_its_loop_is_of_32_bits_where_the_caller_has_enabled_64(wrap):
    prompts, lens = batch()
    sampling = SamplingParams(max_tokens=7, temperature=0.0)
    config = EngineConfig(max_seqs=3, page_size=4, max_step_tokens=8)
    with jax.enable_x64(True):
        call = wrap(lambda prompts, lens: generate(tiny_model(), prompts, lens, sampling, config=config))
        output = call(jnp.asarray(prompts, jnp.int64), jnp.asarray(lens, jnp.int64))
    assert output.token_ids.dtype == jnp.int32 and output.logprobs.dtype == jnp.float32
    for row, length in enumerate(LENGTHS):
        expected = uncached_greedy(tiny_model(), prompts[row, :length].tolist(), 7)
        assert output.token_ids[row].tolist() == [expected]


SAMPLED = SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9, n=2)
POOL_FOR_ONE = EngineConfig(max_seqs=3, page_size=4, max_pages=4, max_step_tokens=8)


def sampled(prompts, lens, seeds):
    return generate(tiny_model(), prompts, lens, SAMPLED, config=POOL_FOR_ONE, seeds=seeds)


@functools.lru_cache
def compiled():
    return jax.jit(sampled)


@pytest.mark.slow
def test_it_samples_what_the_engine_samples_with_the_same_seeds_in_a_pool_for_one():
    prompts, lens = batch()
    seeds = np.asarray([[0, 5], [1, 6], [0, 2**32 - 1]], np.uint32)
    output = compiled()(prompts, lens, seeds)
    compiled()(prompts, np.asarray([0, 99, 2], np.int32), seeds)  # lengths out of range end, too
    engine = shared_engine()
    requests = [
        Request(
            prompt_token_ids=prompts[row, :length].tolist(),
            sampling=dataclasses.replace(SAMPLED, seed=(int(seeds[row, 0]) << 32) + int(seeds[row, 1])),
        )
        for row, length in enumerate(LENGTHS)
    ]
    for row, expected in enumerate(engine.generate(requests)):
        assert output.token_ids[row].tolist() == [c.token_ids for c in expected.completions]
        for index, completion in enumerate(expected.completions):
            np.testing.assert_allclose(output.logprobs[row, index], completion.logprobs, atol=1e-4)


@pytest.mark.slow
def test_it_works_inside_scan_with_traced_prompts_and_seeds():
    prompts, lens = batch()

    def turn(prompts, step):
        seeds = jnp.stack([jnp.zeros(3, jnp.uint32), jnp.full(3, step, jnp.uint32)], axis=1)
        tokens = sampled(prompts, lens, seeds).token_ids
        return prompts.at[:, 0].set(tokens[:, 0, 0]), tokens

    _, tokens = jax.jit(lambda p: jax.lax.scan(turn, p, jnp.arange(3, dtype=jnp.uint32)))(jnp.asarray(prompts))
    first = compiled()(prompts, lens, np.asarray([[0, 0]] * 3, np.uint32))
    assert tokens[0].tolist() == first.token_ids.tolist()
    assert tokens[0].tolist() != tokens[1].tolist()


@pytest.mark.slow
def test_eos_ends_a_sequence_and_padding_follows():
    prompts, lens = batch()
    free = uncached_greedy(tiny_model(), prompts[0, : LENGTHS[0]].tolist(), 7)
    length = free.index(free[2]) + 1
    sampling = SamplingParams(max_tokens=7, temperature=0.0)
    stopped = jax.jit(lambda p: generate(tiny_model(), p, lens, sampling, eos_token_ids=(free[2],)))(prompts)
    assert int(stopped.num_tokens[0, 0]) == length and int(stopped.finish_reason[0, 0]) == 1
    assert stopped.token_ids[0, 0].tolist() == free[:length] + [0] * (7 - length)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": SamplingParams(stop="x")}, "stop strings need a host"),
        ({"prompt_lens": np.asarray([1, 2], np.int32)}, r"expected \[batch, length\]"),
        ({"seeds": np.zeros((3,), np.uint32)}, r"expected \[batch, 2\]"),
        ({"config": EngineConfig(max_pages=1, page_size=4)}, "max_pages=1"),
        ({"config": EngineConfig(max_seq_len=10)}, "max_seq_len=10"),
        ({"sampling": SamplingParams(logprobs=3)}, "logprobs=3: the likeliest tokens come from InferenceEngine only"),
        ({"eos_token_ids": (1000,)}, r"eos_token_ids=\(1000,\): expected token ids below .* size of 61"),
        ({"eos_token_ids": (-1,)}, r"eos_token_ids=\(-1,\): expected token ids"),
        ({"eos_token_ids": True}, "eos_token_ids=True: expected token ids"),
    ],
)
def test_what_it_cannot_do_is_refused(change, message):
    prompts, lens = batch()
    arguments = {"prompt_lens": lens, "sampling": SamplingParams(max_tokens=8), **change}
    with pytest.raises(ValueError, match=message):
        generate(tiny_model(), prompts, **arguments)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_a_batch_without_tokens_is_refused(shape):
    with pytest.raises(ValueError, match="expected prompts, of at least one token each"):
        generate(tiny_model(), np.zeros(shape, np.int32), np.zeros(shape[0], np.int32), SamplingParams(max_tokens=8))


def test_bits_that_depend_on_how_xla_compiles_are_not_promised():
    """The caller's `jit` compiles, and not the engine."""
    prompts, lens = batch()
    config, sampling = EngineConfig(numerics="batch_invariant"), SamplingParams(max_tokens=2)
    backend = BackendChoice.choose(config, tiny_model(), has_mods=False)
    assert not backend.required_options  # kernels compute all of it
    model = tiny_model(model_type="granite", residual_multiplier=0.5)
    with pytest.raises(ValueError, match="batch_invariant.* of granite depends on how XLA compiles.*InferenceEngine"):
        generate(model, prompts, lens, sampling, config=config)
