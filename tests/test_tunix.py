"""The rollout worker for Tunix, with the real package; skipped where google-tunix is not installed."""

import functools
import inspect
import types

import jax
import numpy as np
import pytest

base_rollout = pytest.importorskip("tunix.rl.rollout.base_rollout")
from tunix.generate.tokenizer_adapter import TokenizerAdapter  # noqa: E402  # pyright: ignore[reportMissingImports]

from levanter_infer import EngineConfig, InferenceEngine, load_model  # noqa: E402
from levanter_infer.trainers.tunix import TunixRollout  # noqa: E402

PROMPTS = ["17+25=", "17+25=", "3+4="]


@pytest.fixture(scope="module")
def rollout():
    model, tokenizer = load_model("models/tiny")
    assert tokenizer is not None
    engine = InferenceEngine(model, tokenizer, EngineConfig(max_seqs=8, max_seq_len=64, page_size=8, matmul="xla"))
    own = types.SimpleNamespace(
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        bos_id=lambda: 0,
        eos_id=lambda: tokenizer.eos_token_ids[0],
        pad_id=lambda: 0,
    )
    made = functools.partial(TunixRollout, engine=engine, to_model=lambda params: params)
    return made(rollout_actor=model, tokenizer=TokenizerAdapter(own), mesh=None, rollout_config=None)


def config(**changes):
    sizes = dict(max_tokens_to_generate=6, max_prompt_length=12, temperature=1.0, return_logprobs=True)
    return base_rollout.RolloutConfig(**{**sizes, **changes})


def test_it_is_a_rollout_worker_and_makes_no_argument_of_its_own():
    assert issubclass(TunixRollout, base_rollout.BaseRollout) and not inspect.isabstract(TunixRollout)


def test_samples_of_equal_prompts_differ_and_their_log_probabilities_are_those_of_the_model(rollout):
    output = rollout.generate(PROMPTS * 2, config(temperature=50.0, seed=jax.numpy.int32(7)))
    assert len(output.text) == len(output.tokens) == len(output.logprobs) == 6
    same_prompt = {tuple(output.tokens[i].tolist()) for i in (0, 1, 3, 4)}
    assert len(same_prompt) > 1
    again = rollout.generate(PROMPTS * 2, config(temperature=50.0, seed=jax.numpy.int32(7)))
    assert [t.tolist() for t in again.tokens] == [t.tolist() for t in output.tokens]
    assert output.left_padded_prompt_tokens.shape == (6, 12)
    raw = rollout.generate(PROMPTS, config(temperature=0.0, rollout_vllm_logprobs_mode="raw_logprobs"))
    length = max(map(len, raw.tokens))
    completions = np.stack([np.pad(tokens, (0, length - len(tokens))) for tokens in raw.tokens])
    scored = np.asarray(rollout.get_per_token_logps(raw.left_padded_prompt_tokens, completions))
    assert scored.shape == completions.shape
    for row, logprobs in zip(scored, raw.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(logprobs)], logprobs, atol=2e-4)


def test_new_parameters_are_sampled_with(rollout):
    engine, version = rollout._engine, rollout._engine.version
    rollout.update_params(rollout.model())
    assert engine.version == version + 1

    class LoRAParam:
        pass

    with pytest.raises(ValueError, match="whole weights, and Tunix gives LoRAParam; merge"):
        rollout.update_params(rollout.model(), (LoRAParam,))


def test_what_is_not_known_is_refused_by_name(rollout):
    with pytest.raises(ValueError, match="was given images, which this engine"):
        rollout.generate(PROMPTS, config(), images=[])
    with pytest.raises(ValueError, match="max_prompt_length=3; raise it"):
        rollout.generate(PROMPTS, config(max_prompt_length=3))
    with pytest.raises(ValueError, match="rollout_vllm_logprobs_mode='x'"):
        rollout.generate(PROMPTS, config(rollout_vllm_logprobs_mode="x"))
