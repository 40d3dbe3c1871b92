"""What a caller asks for, and what comes back."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from levanter_infer.engine.params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt, given in one of three ways, and how to continue it."""

    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    """A chat, rendered with the model's chat template."""
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    cache_salt: str | None = None
    """Requests share stored beginnings of prompts only with those of the same salt; 1 to 256 characters."""
    id: str | None = None
    """Names the request in outputs, and its random numbers if it has no seed; default: its place in the list."""


@dataclasses.dataclass
class Completion:
    """One sampled continuation of a request."""

    index: int
    """Which of the request's `n` samples."""
    token_ids: list[int]
    text: str | None
    """Decoded tokens without special ones, cut before a stop string; None in an engine without a tokenizer."""
    finish_reason: str
    """"stop", "length", "abort" or "error"."""
    logprobs: np.ndarray
    """f32, one per generated token: log probability under the model, before temperature and any other processing."""
    processed_logprobs: np.ndarray
    """f32, one per generated token: log probability under the distribution that was sampled from."""
    top_logprobs: list[dict[int, float]] | None
    """Per generated token the likeliest tokens and their log probability under the model, when asked for."""
    seed: int
    """The seed that was used; with `index` it reproduces the sample."""


@dataclasses.dataclass
class RequestOutput:
    """What became of a request."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    error: str | None = None
    """Why the request was refused; then there are no completions."""
