"""Rollouts that were stopped, and go on in a later request, possibly with other weights."""

import dataclasses

import numpy as np

from levanter_infer.engine.params import SamplingParams, brief
from levanter_infer.engine.request import Completion, Request, RequestOutput


def continuation(output: RequestOutput, index: int, sampling: SamplingParams, **fields) -> Request:
    """The request that goes on with sample `index` of `output` where it was stopped (by "abort" or "length").

    Its prompt is the prompt and the tokens so far, and it draws the random numbers that the sample would have drawn
    had it not been stopped. `sampling.max_tokens` and `min_tokens` count from the first token of the whole sample. The
    output may itself be that of a continuation.

    Args:
        sampling: that of the first request.
        fields: further ones of `Request`, such as `id` and `cache_salt`.
    Raises: ValueError for a sample that has ended by itself, has no tokens left, or was sampled with a parameter that
        looks back at the sample's own tokens (penalties, stops of several tokens, beams), which a prompt is not.
    """
    done = _sample(output, index)
    if done.finish_reason not in ("abort", "length"):
        raise ValueError(
            f'sample {index} has ended by itself ("{done.finish_reason}"); only "abort" and "length" go on'
        )
    _check_goes_on(sampling)
    count = output.num_continued_tokens + len(done.token_ids)
    if count >= sampling.max_tokens:
        raise ValueError(f"sample {index} has {count} tokens, and max_tokens={sampling.max_tokens}; raise it to go on")
    sampling = dataclasses.replace(
        sampling,
        n=1,
        best_of=None,
        seed=done.seed,
        max_tokens=sampling.max_tokens - count,
        min_tokens=max(sampling.min_tokens - count, 0),
    )
    ids = [*output.prompt_token_ids, *done.token_ids]
    first = output.first_sample + done.index
    return Request(prompt_token_ids=ids, sampling=sampling, first_sample=first, num_continued_tokens=count, **fields)


def joined(before: Completion, after: Completion) -> Completion:
    """One sample of its two parts: token ids, log probabilities and versions one after the other.

    The text is to be decoded from all tokens, and is None here. `routed_experts` are those of `after`, which has
    computed all tokens.
    """
    tops = None
    if before.top_logprobs is not None and after.top_logprobs is not None:
        tops = before.top_logprobs + after.top_logprobs
    return dataclasses.replace(
        after,
        index=before.index,
        token_ids=before.token_ids + after.token_ids,
        text=None,
        logprobs=np.concatenate([before.logprobs, after.logprobs]),
        processed_logprobs=np.concatenate([before.processed_logprobs, after.processed_logprobs]),
        top_logprobs=tops,
        token_versions=np.concatenate([before.token_versions, after.token_versions]),
    )


def _sample(output: RequestOutput, index: int) -> Completion:
    found = next((each for each in output.completions if each.index == index), None)
    if found is None:
        raise ValueError(f"index={brief(index)}: the output has no such sample")
    return found


def _check_goes_on(sampling: SamplingParams) -> None:
    looks_back = {
        "frequency_penalty": sampling.frequency_penalty != 0,
        "presence_penalty": sampling.presence_penalty != 0,
        "stop": bool(sampling.stop),
        "stop_token_ids": any(not isinstance(entry, int) and len(entry) > 1 for entry in sampling.stop_token_ids),
        "num_beams": sampling.num_beams > 1,
        "a constraint": sampling.is_constrained,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
    }
    names = [name for name, is_set in looks_back.items() if is_set]
    if names:
        raise ValueError(
            f"a continuation cannot have {', '.join(names)}: they tell the sample's own tokens from its prompt, which "
            "holds the first part of them; leave them out"
        )
