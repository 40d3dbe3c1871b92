"""`validate`: whether an engine of given sizes can serve a request. Imports no JAX."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from levanter_infer.cache.page_math import pages_for
from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.params import MAX_STOP_TOKENS, SamplingParams, brief, stop_sequences
from levanter_infer.engine.request import MAX_ID_CHARS, Request

if TYPE_CHECKING:
    from levanter_infer.engine.config import EngineConfig

_MAX_SALT = 256
"""Characters of a request's `cache_salt`, at most."""
_MAX_SECONDS = 1e9

_MOST_BEFORE = 2**30
"""Largest `Request.first_sample`; with the samples of a request, indices stay below 2^31."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Sizes of an engine that a request has to fit."""

    vocab_size: int
    max_seqs: int
    """Sequences that run at once."""
    num_slots: int
    """Sequences that one data-parallel rank holds, running or waiting."""
    max_seq_len: int
    num_pages: int
    page_size: int
    max_logprobs: int
    max_prompt_logprobs: int
    max_logit_bias: int
    max_stop_sequences: int
    """Entries of `stop_token_ids` and of `stop`, without end-of-sequence ids."""
    has_tokenizer: bool = False
    has_experts: bool = False
    has_logits_mod: bool = False

    @classmethod
    def of(cls, shapes: Shapes, config: "EngineConfig", **has: bool) -> "RequestLimits":
        """The limits of an engine with this configuration and the sizes that followed from it. Args: has: fields."""
        sizes = ("max_seqs", "num_slots", "max_seq_len", "num_pages", "page_size")
        options = ("max_logprobs", "max_prompt_logprobs", "max_logit_bias", "max_stop_sequences")
        return cls(
            vocab_size=shapes.limits.vocab_size,
            **{name: getattr(shapes, name) for name in sizes},
            **{name: getattr(config, name) for name in options},
            **has,
        )

    def max_len(self, prompt_len: int, max_tokens: int) -> int:
        """Tokens, prompt included, at which a sequence ends."""
        return min(prompt_len + max_tokens, self.max_seq_len)


def validate(request: Request, limits: RequestLimits) -> Request:
    """Check a request whose prompt is given as token ids against the sizes of an engine.

    Returns: the request in its normal form: token ids are a list of Python's integers, `sampling` is given, `priority`
        is an integer, `timeout_s` a float or None.
    Raises: ValueError saying what was got, what was expected and what to do.
    """
    validate_id(request.id)
    params = sampling_of(request)
    ids = _token_ids(request.prompt_token_ids, params.max_tokens, limits)
    validate_sampling(params, limits)
    _check_capacity(params, len(ids), limits)
    _check_salt(request.cache_salt)
    _check_whole("first_sample", request.first_sample, _MOST_BEFORE)
    _check_whole("num_continued_tokens", request.num_continued_tokens, len(ids) - 1)
    if limits.has_logits_mod and request.num_continued_tokens:
        raise ValueError(
            f"num_continued_tokens={request.num_continued_tokens}: the engine's logits_mod tells a sample's own tokens "
            "from its prompt, which holds the first part of them, and its memory of them is gone; sample anew"
        )
    return dataclasses.replace(
        request,
        prompt_token_ids=ids,
        sampling=params,
        priority=_priority(request.priority),
        timeout_s=_timeout(request.timeout_s),
    )


def validate_id(given) -> None:
    """Raises: ValueError for an id that is not None and not a string of up to `MAX_ID_CHARS` characters."""
    if given is not None and (not isinstance(given, str) or len(given) > MAX_ID_CHARS):
        raise ValueError(f"id={brief(given)}: expected a string of up to {MAX_ID_CHARS} characters")


def _check_whole(name: str, given, most: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= most:
        raise ValueError(f"{name}={brief(given)}: expected a whole number from 0 to {most}")


def sampling_of(request: Request) -> SamplingParams:
    """The parameters of a request, or the defaults. Raises: ValueError for another type."""
    params = SamplingParams() if request.sampling is None else request.sampling
    if not isinstance(params, SamplingParams):
        raise ValueError(
            f"sampling is {type(params).__name__}; expected SamplingParams (of a mapping, "
            "SamplingParams.from_dict makes them)"
        )
    return params


def validate_prompt_len(prompt_len: int, max_tokens: int, limits: RequestLimits, how: str = "") -> None:
    """Check the number of prompt tokens, before anything is done with the tokens themselves.

    Args:
        how: "at least " where `prompt_len` is a lower bound.
    Raises: ValueError for a prompt that leaves no position to generate at.
    """
    if prompt_len + min(max_tokens, 1) > limits.max_seq_len:
        excess = "which leaves no token to generate within" if max_tokens else "more than"
        raise ValueError(
            f"the prompt has {how}{prompt_len} tokens, {excess} "
            f"engine.max_seq_len={limits.max_seq_len}; shorten it or raise engine.max_seq_len"
        )


def validate_sampling(params: SamplingParams, limits: RequestLimits) -> None:
    """Check sampling parameters against the sizes that the engine's programs were compiled for.

    Raises: ValueError naming the parameter and the config key to raise.
    """
    stops = max(("stop", params.stop), ("stop_token_ids", params.stop_token_ids), key=lambda entry: len(entry[1]))
    wanted = {
        "max_logprobs": (f"logprobs={params.logprobs}", params.logprobs or 0),
        "max_prompt_logprobs": (f"prompt_logprobs={params.prompt_logprobs}", params.prompt_logprobs or 0),
        "max_logit_bias": _counted("logit_bias", params.logit_bias or ()),
        "max_stop_sequences": _counted(*stops),
    }
    for key, (got, number) in wanted.items():
        limit = getattr(limits, key)
        if number > limit:
            raise ValueError(f"{got} but engine.{key}={limit}; raise engine.{key} or ask for less")
    for i, sequence in enumerate(stop_sequences(params)):
        if len(sequence) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids[{i}] has {len(sequence)} tokens; a stop token sequence has at most {MAX_STOP_TOKENS}"
            )
        _check_vocabulary(f"stop_token_ids[{i}]", sequence, limits.vocab_size)
    _check_vocabulary("logit_bias", params.logit_bias or (), limits.vocab_size)
    if limits.has_logits_mod and params.num_beams > 1:
        raise ValueError(f"num_beams={params.num_beams}: a search does not apply the engine's logits_mod; sample")
    if params.return_routed_experts and not limits.has_experts:
        raise ValueError("return_routed_experts: the model has no experts; leave it out")


def _counted(name: str, entries: Sequence | Mapping) -> tuple[str, int]:
    return f"{name} has {len(entries)} entries", len(entries)


def _check_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise ValueError(f"{name} holds token id {token}, outside the vocabulary of {vocab_size} tokens")


# Prompt


def _token_ids(given, max_tokens: int, limits: RequestLimits) -> list[int]:
    """The ids as Python's integers. A prompt that is too long is refused before its ids are looked at."""
    ids = _entries(given, max_tokens, limits)
    vocab_size = limits.vocab_size
    if set(map(type, ids)) - {int}:
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise ValueError(
                    f"prompt_token_ids[{i}]={brief(token)} is not an integer; expected token ids from 0 to "
                    f"{vocab_size - 1} (text is given as prompt)"
                )
        ids = [int(token) for token in ids]
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        i, token = next((i, token) for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise ValueError(
            f"prompt_token_ids[{i}]={brief(token)} is outside the vocabulary of {vocab_size} tokens; expected 0 to "
            f"{vocab_size - 1}"
        )
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    return ids


def _entries(token_ids, max_tokens: int, limits: RequestLimits) -> list:
    """The entries of a list of token ids, of any type, after a check of their number."""
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1:
            raise ValueError(f"prompt_token_ids has shape {token_ids.shape}; expected one dimension, [tokens]")
        validate_prompt_len(len(token_ids), max_tokens, limits)
        return token_ids.tolist()
    if isinstance(token_ids, (str, bytes, bytearray, memoryview)) or not isinstance(token_ids, Sequence):
        raise ValueError(f"prompt_token_ids is {type(token_ids).__name__}; expected a list of token ids")
    try:
        validate_prompt_len(len(token_ids), max_tokens, limits)
        return list(token_ids)
    except ValueError:
        raise
    except Exception as error:  # a sequence of the caller's own making
        raise ValueError(f"prompt_token_ids cannot be read: {type(error).__name__}: {brief(str(error))}") from error


# Slots, positions and pages


def _check_capacity(params: SamplingParams, prompt_len: int, limits: RequestLimits) -> None:
    """Raises: ValueError unless the request fits alone into slots, positions and pages."""
    if params.stop and not limits.has_tokenizer:
        raise ValueError("stop strings need a tokenizer and this engine has none; use stop_token_ids")
    if params.num_sequences > limits.num_slots:
        name = "num_beams" if params.num_beams > 1 else "n" if params.best_of is None else "best_of"
        raise ValueError(
            f"{name}={params.num_sequences} exceeds the {limits.num_slots} slots that "
            f"engine.max_seqs={limits.max_seqs} gives; raise engine.max_seqs"
        )
    if params.max_tokens > limits.max_seq_len:
        raise ValueError(
            f"max_tokens={params.max_tokens} exceeds engine.max_seq_len={limits.max_seq_len}; lower it or raise "
            "engine.max_seq_len"
        )
    max_len = limits.max_len(prompt_len, params.max_tokens)
    needed = pages_for(max_len, limits.page_size)
    if needed > limits.num_pages:
        raise ValueError(
            f"the sequence may need {needed} pages ({prompt_len} prompt tokens and up to {max_len - prompt_len} "
            f"more, {limits.page_size} a page) and the pool has {limits.num_pages}; raise engine.max_pages or "
            "lower max_tokens"
        )
    if params.num_beams > 1:
        _check_beams(params.num_beams, prompt_len, max_len, limits)


def _check_beams(num_beams: int, prompt_len: int, max_len: int, limits: RequestLimits) -> None:
    """Raises: ValueError unless a search fits alone: its beams run together, and may share the prompt's pages only."""
    if num_beams > limits.max_seqs:
        raise ValueError(
            f"num_beams={num_beams} exceeds engine.max_seqs={limits.max_seqs}: beams run together; raise "
            "engine.max_seqs or lower num_beams"
        )
    if num_beams > limits.vocab_size:
        raise ValueError(f"num_beams={num_beams} exceeds the vocabulary of {limits.vocab_size} tokens; lower it")
    shared = (prompt_len - 1) // limits.page_size
    needed = shared + num_beams * (pages_for(max_len, limits.page_size) - shared)
    if needed > limits.num_pages:
        raise ValueError(
            f"num_beams={num_beams} beams of up to {max_len} tokens, of which {prompt_len} are the prompt, may need "
            f"{needed} pages of {limits.page_size} tokens and the pool has {limits.num_pages}; raise engine.max_pages, "
            "or lower num_beams or max_tokens"
        )


# Other fields


def _check_salt(salt) -> None:
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= _MAX_SALT):
        raise ValueError(f"cache_salt={brief(salt)}: expected 1 to {_MAX_SALT} characters")


def _priority(value) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not -(2**31) <= value < 2**31 - 1:
        raise ValueError(f"priority={brief(value)}: expected a whole number from -2^31 to 2^31 - 2; smaller goes first")
    return int(value)


def _timeout(timeout_s) -> float | None:
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, (int, float, np.integer, np.floating)) and not isinstance(timeout_s, bool)
    if not (is_number and 0 < timeout_s <= _MAX_SECONDS):  # also false for NaN
        raise ValueError(f"timeout_s={brief(timeout_s)}: expected seconds above 0 and up to 1e9; leave it out for none")
    return float(timeout_s)
