"""One golden case for each family of the registry, and requests to serve it with."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from levanter_infer.checkpoints.load import load_model
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import FAMILIES, family_for
from tests.golden_cases import GOLDEN_DIR, NUM_GREEDY, GoldenCase, GoldenPrompt, write_checkpoint

SIZES: dict[str, Any] = {"page_size": 4, "max_pages": 40, "max_seqs": 4, "max_seq_len": 160, "max_step_tokens": 24}
"""Chunks smaller than the longer prompts, pages smaller than the windows, a pool too small for all requests at once."""


@functools.cache
def _configs() -> dict[str, DecoderConfig]:
    """The configurations of all golden cases."""
    entries = json.loads((GOLDEN_DIR / "cases.json").read_text())
    return {name: family_for(entry["config"]).config_from_hf(entry["config"]) for name, entry in entries.items()}


OTHERS = ("grug_moe_hero",)
"""Golden cases that are served beside those of `case_of`, where a family has models of several kinds."""


def served_names() -> list[str]:
    """Names that tests of all families run over: families, and cases of `OTHERS`."""
    return sorted({*FAMILIES, *OTHERS})


def case_of(model_type: str) -> str:
    """The golden case of a family whose layers differ most; of several the first."""
    if model_type in OTHERS:
        return model_type
    configs = {name: config for name, config in _configs().items() if config.model_type == model_type}
    if not configs:
        raise ValueError(f"family {model_type} has no golden case; add one to scripts/golden/cases")
    return max(configs, key=lambda name: len(set(configs[name].blocks)))


def load_config(name: str) -> DecoderConfig:
    """The configuration of a golden case."""
    return _configs()[name]


def load(case: GoldenCase, directory: Path) -> DecoderModel:
    model, _ = load_model(write_checkpoint(directory, case), dtype="float32")
    return model


def sizes_for(config: DecoderConfig) -> dict[str, Any]:
    """`SIZES`, and sequences that LongRoPE has the short frequencies for, as transformers has for these prompts."""
    limits = [rope.original_len for rope in config.ropes if rope.kind == "longrope"]
    return {**SIZES, "max_seq_len": min([SIZES["max_seq_len"], *limits])}


def make_engine(model: DecoderModel, *, mesh=None, scoring: bool = False, **config) -> InferenceEngine:
    """An engine that is batch invariant if the model can be served so, and leaves rounding to XLA otherwise."""
    sizes = {**sizes_for(model.config), **config}
    try:
        invariant = EngineConfig(**sizes, numerics="batch_invariant")
        return InferenceEngine(model, config=invariant, mesh=mesh, scoring=scoring)
    except ValueError as error:
        if "batch_invariant" not in str(error):
            raise
    return InferenceEngine(model, config=EngineConfig(**sizes), mesh=mesh, scoring=scoring)


def golden_prompts(case: GoldenCase) -> list[GoldenPrompt]:
    """Prompts with a greedy continuation."""
    return [prompt for prompt in case.prompts if len(prompt.greedy)]


def golden_requests(case: GoldenCase) -> list[Request]:
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=0)
    return [Request(prompt_token_ids=prompt.tokens.tolist(), sampling=greedy) for prompt in golden_prompts(case)]


def sampled_requests(vocab_size: int) -> list[Request]:
    """Prompts of which some begin alike, some shorter than a step and some longer, sampled."""
    rng = np.random.default_rng(20)
    common = rng.integers(0, vocab_size, 21).tolist()
    made = []
    for i, own in enumerate((5, 30, 9, 2, 17)):
        ids = (common if i % 2 == 0 else []) + rng.integers(0, vocab_size, own).tolist()
        sampling = SamplingParams(max_tokens=24 - 2 * i, n=1 + (i == 2), seed=i, temperature=1.0, logprobs=0)
        made.append(Request(prompt_token_ids=ids, sampling=sampling))
    return made


def requests_for(case: GoldenCase, vocab_size: int) -> list[Request]:
    """The golden prompts, and sampled requests."""
    return golden_requests(case) + sampled_requests(vocab_size)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Tokens of one completion and their log probabilities."""

    tokens: list[int]
    logprobs: np.ndarray

    def __getitem__(self, part: slice) -> "Sample":
        return Sample(self.tokens[part], self.logprobs[part])


def samples(output) -> list[Sample]:
    """The completions of a result. Fails if it is an error."""
    assert output.error is None, output.error
    return [Sample(list(c.token_ids), np.asarray(c.logprobs, np.float32)) for c in output.completions]
