"""Every model family gives the logits and greedy tokens of HF transformers (tests/golden, float32)."""

import dataclasses
import hashlib
import json

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams
from levanter_infer.axes import POSITION
from levanter_infer.checkpoints.load import load_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.models.registry import FAMILIES, family_for
from levanter_infer.models.tensors import get_parameter, parameters, set_parameter
from tests.golden_cases import (
    NUM_GREEDY,
    GoldenCase,
    GoldenPrompt,
    case_names,
    checkpoint_weights,
    load_case,
    make_weights,
    unit_noise,
    weights_sha256,
    write_checkpoint,
)
from tests.tiers import nightly_but

CASES = case_names()
LONG_ROPE_CASES = ("llama_longrope", "phi3_tied", "phimoe_tied")
"""Ropes that take their frequencies from the engine's max_seq_len. Of every family tests/engine/test_families.py has a
case."""


def one_per_family() -> list:
    """All cases; those of CI are the first of each model type."""
    first: dict[str, str] = {}
    for name in CASES:
        first.setdefault(load_case(name).config["model_type"], name)
    return nightly_but(first.values(), CASES)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """`load(case)`: the case's model, from a checkpoint directory on disk, once per module."""
    models = {}

    def load(case: GoldenCase):
        if case.name not in models:
            directory = write_checkpoint(tmp_path_factory.mktemp(case.name), case)
            models[case.name], _ = load_model(directory, dtype="float32")
        return models[case.name]

    return load


@eqx.filter_jit
def _forward(model, tokens):
    return model(tokens).array


def uncached_logits(model, case: GoldenCase) -> list[np.ndarray]:
    """Per prompt, f32[P + greedy - 1, vocab] of the uncached forward over prompt and golden continuation."""
    sequences = case.sequences
    if case.depends_on_length:
        return [np.asarray(_forward(model, hax.named(tokens, POSITION))) for tokens in sequences]
    longest = max(len(tokens) for tokens in sequences)
    padded = np.stack([np.pad(tokens, (0, longest - len(tokens))) for tokens in sequences])
    logits = np.asarray(_forward(model, hax.named(padded, ("batch", POSITION))))
    return [row[: len(tokens)] for row, tokens in zip(logits, sequences, strict=True)]


def _assert_close(got: np.ndarray, want: np.ndarray, bound: float, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape}, HF gave {want.shape}"
    error = np.abs(got - want)
    assert error.max(initial=0.0) <= bound, f"{what}: off by {error.max():.3g}, bound {bound:.3g}, at {error.argmax()}"


def _assert_greedy(tokens: list[int], prompt: GoldenPrompt, what: str) -> None:
    """Equal to HF's, up to the first step at which HF's two best logits are closer than the bound."""
    assert len(tokens) == len(prompt.greedy), f"{what}: {len(tokens)} tokens, HF gave {len(prompt.greedy)}"
    for step, (got, want) in enumerate(zip(tokens, prompt.greedy.tolist(), strict=True)):
        if got != want:
            gap = prompt.greedy_gaps[step]
            assert gap < prompt.bound, f"{what}: step {step} gave {got}, HF gave {want}, ahead by {gap:.3g}"
            return


@pytest.mark.parametrize("name", one_per_family())
def test_logits_equal_hf(name, load):
    case = load_case(name)
    for prompt, logits in zip(case.prompts, uncached_logits(load(case), case), strict=True):
        what = f"{name}, prompt of {len(prompt.tokens)}"
        _assert_close(logits[prompt.positions], prompt.logits, prompt.bound, what)
        logprobs = np.asarray(jax.nn.log_softmax(logits.astype(np.float32), axis=-1))
        given = logprobs[np.arange(len(prompt.tokens) - 1), prompt.tokens[1:]]
        # A logprob is a logit less a log-sum of logits: twice the bound.
        _assert_close(given, prompt.prompt_logprobs, 2 * prompt.bound, f"{what}, prompt logprobs")
        steps = np.arange(len(prompt.greedy)) + len(prompt.tokens) - 1
        _assert_close(logprobs[steps, prompt.greedy], prompt.greedy_logprobs, 2 * prompt.bound, f"{what}, logprobs")
        # Fed with HF's tokens, the forward's choice at every step is the uncached greedy continuation.
        _assert_greedy(logits[steps].argmax(axis=-1).tolist(), prompt, f"{what}, greedy")


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_ROPE_CASES)
def test_engine_greedy_equals_hf(name, load):
    case = load_case(name)
    # An engine whose sequences may grow beyond the original length has the long frequencies for all
    original_len = case.config["original_max_position_embeddings"]
    prompts = [p for p in case.prompts if len(p.greedy) and len(p.tokens) > original_len]
    # Chunks smaller than the longer prompts, pages smaller than the windows.
    config = EngineConfig(page_size=4, max_pages=96, max_seqs=4, max_seq_len=160, max_step_tokens=24)
    engine = InferenceEngine(load(case), config=config)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=0)
    outputs = engine.generate([Request(prompt_token_ids=p.tokens.tolist(), sampling=sampling) for p in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        what = f"{name}, prompt of {len(prompt.tokens)}"
        assert output.error is None, f"{what}: {output.error}"
        (completion,) = output.completions
        _assert_greedy(list(completion.token_ids), prompt, what)
        if list(completion.token_ids) == prompt.greedy.tolist():
            logprobs = np.asarray(completion.logprobs)
            _assert_close(logprobs, prompt.greedy_logprobs, 2 * prompt.bound, f"{what}, logprobs")


@pytest.mark.slow  # looks at the golden cases more than at the code
@pytest.mark.parametrize("name", [name for name in CASES if load_case(name).changes])
def test_every_option_moves_the_logits(name, load):
    """Each is off its neutral value in the case, and makeshift goldens would not notice one that is ignored."""
    case = load_case(name)
    model, prompt = load(case), case.prompts[-1]
    tokens = hax.named(prompt.tokens, POSITION)
    for change in case.changes:
        config = family_for(case.config).config_from_hf({**case.config, **change})
        logits = np.asarray(_forward(dataclasses.replace(model, config=config), tokens))[prompt.positions]
        assert np.abs(logits - prompt.logits).max() > 1e-2 * prompt.scale, f"{name}: {change} changes nothing"


@pytest.mark.slow  # looks at the golden cases more than at the code
@pytest.mark.parametrize("name", [name for name in CASES if load_case(name).zeroed])
def test_every_tensor_that_is_an_option_moves_the_logits(name, load):
    """As above, for options that no key of config.json switches off."""
    case = load_case(name)
    prompt, tensors = case.prompts[-1], family_for(case.config).tensors
    for end in case.zeroed:
        model = load(case)
        found = [each for each in parameters(model, tensors) if each.names[0].endswith(end)]
        for path in [each.path for each in found]:
            model = set_parameter(model, path, hax.zeros_like(get_parameter(model, path)))
        logits = np.asarray(_forward(model, hax.named(prompt.tokens, POSITION)))[prompt.positions]
        assert found and np.abs(logits - prompt.logits).max() > 1e-2 * prompt.scale, f"{name}: {end} changes nothing"


@pytest.mark.parametrize("name", one_per_family())
def test_a_checkpoint_saved_again_has_the_same_tensors_and_mathematics(name, load, tmp_path):
    case = load_case(name)
    save_model(load(case), tmp_path)
    weights, saved = checkpoint_weights(case), load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(weights)
    assert all(saved[key].tobytes() == weights[key].tobytes() for key in weights)
    config = json.loads((tmp_path / "config.json").read_text())
    assert family_for(config).config_from_hf(config) == load(case).config


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_hf_was_given(name):
    case = load_case(name)
    assert weights_sha256(make_weights(name, case.config)) == case.weights_sha256


def test_weight_generator_is_pinned():
    noise = unit_noise("llama1", "model.embed_tokens.weight", (256, 64))
    assert (
        hashlib.sha256(noise.tobytes()).hexdigest()
        == "c73796bf41dfb8f58536433ba146df10e840adb6471b64677af3cff6730405e2"
    )
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1.0) < 0.02


def test_goldens_cover_every_family_and_rope_scaling():
    cases = [load_case(name) for name in CASES]
    assert {c.config["model_type"] for c in cases} == set(FAMILIES)
    scalings = [c.config.get("rope_scaling") or {} for c in cases]
    assert {s.get("rope_type", s.get("type")) for s in scalings} == {
        None,
        "llama3",
        "linear",
        "dynamic",
        "yarn",
        "longrope",
    }
    assert all(any(len(p.greedy) == NUM_GREEDY for p in c.prompts) for c in cases)
