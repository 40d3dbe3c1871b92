"""Each kind of disagreement, planted in numbers, gets its verdict."""

import dataclasses

import numpy as np
import pytest

from levanter_infer.diagnosis import Pair, Path, diagnose, where_stored_differs

PAGE, LENGTH, TOLERANCE = 8, 24, 1e-4
PROMPTS = (5, 9, 13, 18, 21, 30)


def pairs(change, noise: float = 1e-6) -> list[Pair]:
    """Samples on two equal paths; `change(prompt length, generated index)` is added to what the second one says."""
    rng = np.random.default_rng(0)
    found = []
    for number, prompt_len in enumerate(PROMPTS):
        prompt, tokens = rng.integers(0, 50, prompt_len).tolist(), rng.integers(0, 50, LENGTH).tolist()
        logprobs = -rng.exponential(1.0, LENGTH)
        other = logprobs + rng.normal(0, noise, LENGTH) + [change(prompt_len, i) for i in range(LENGTH)]
        one, other = (Path(prompt, tokens, values.tolist()) for values in (logprobs, other))
        found.append(Pair(str(number), 0, one, other))
    return found


def broken(prompt_len: int, i: int) -> float:
    """Something of the size of a log probability, from the first query in page 4 on."""
    return 0.3 + 0.1 * (i % 3) if prompt_len + i - 1 >= 4 * PAGE else 0.0


def test_rounding_below_the_tolerance_agrees():
    found = diagnose(pairs(lambda *_: 0.0), TOLERANCE, PAGE)
    assert found.verdict == "agree" and "largest" in found.text


@pytest.mark.parametrize("noise", [1e-6, 0.02])
def test_an_offset_from_the_first_token_on_is_the_prompt_path(noise):
    found = diagnose(pairs(lambda n, i: 0.4 + 0.2 * (i % 2), noise), TOLERANCE, PAGE)
    assert found.verdict == "prompt" and f"{len(PROMPTS)} of {len(PROMPTS)}" in found.text


def test_an_offset_in_long_prompts_only_says_from_which_length_on():
    found = diagnose(pairs(lambda n, i: 0.05 * (n > 16)), TOLERANCE, PAGE)
    assert found.verdict == "prompt"
    assert "prompts of up to 13 tokens are right and those of 18 and more are not (pages have 8 tokens)" in found.text


def test_other_prompt_tokens_are_the_prompt_path_whatever_else_is_wrong():
    (first, *rest) = pairs(broken)
    prompt = [*first.one.prompt_token_ids[:3], 99, *first.one.prompt_token_ids[4:]]
    found = diagnose(
        [dataclasses.replace(first, other=dataclasses.replace(first.other, prompt_token_ids=prompt)), *rest], 1
    )
    assert found.verdict == "prompt" and "from token 3 on, " in found.text and "chat template" in found.text


@pytest.mark.parametrize("noise", [1e-3, 0.02])
def test_noise_is_drift_whether_it_grows_or_is_there_from_the_first_token_on(noise):
    assert diagnose(pairs(lambda *_: 0.0, noise), TOLERANCE, PAGE).verdict == "drift"
    growing = diagnose(pairs(lambda n, i: noise * (1 + i) / LENGTH, noise / 50), TOLERANCE, PAGE)
    assert growing.verdict == "drift" and "first quarter" in growing.text


def test_an_error_from_a_page_boundary_on_is_a_scramble_and_names_the_page():
    found = diagnose(pairs(broken), TOLERANCE, PAGE)
    assert found.verdict == "scramble" and "a multiple of 8 (logical page 4)" in found.text
    assert "right up to generated token" in found.text


def test_an_error_from_the_first_decoded_token_on_names_the_decode_path():
    found = diagnose(pairs(lambda n, i: 0.5 * (i > 0)), TOLERANCE, PAGE)
    assert found.verdict == "scramble" and "the first one that is not computed with the prompt" in found.text


def test_an_error_at_a_position_that_is_no_page_boundary_names_the_position():
    found = diagnose(pairs(lambda n, i: 0.5 * (n + i - 1 >= 35)), TOLERANCE, PAGE)
    assert found.verdict == "scramble" and "position 35 everywhere" in found.text


def test_an_error_without_a_pattern_points_at_the_company_and_notices_that_it_passes():
    begin = {n: 3 + 5 * (n % 4) for n in PROMPTS}
    found = diagnose(pairs(lambda n, i: 0.5 * (begin[n] <= i < begin[n] + 2)), TOLERANCE, PAGE)
    assert found.verdict == "scramble" and "other sequences" in found.text and "right again" in found.text


def part(pair: Pair, at: int, token: int, top: dict[int, float] | None) -> Pair:
    """The second path chooses another token, and goes on with others."""
    tokens = [*pair.other.token_ids[:at], token, *([51] * (LENGTH - at - 1))]
    tops = [{int(t): v} for t, v in zip(pair.one.token_ids, pair.one.logprobs, strict=True)]
    other = dataclasses.replace(pair.other, token_ids=tokens)
    if top is not None:
        one_tops = [*tops[:at], {**tops[at], token: pair.one.logprobs[at] - 1e-5}, *tops[at + 1 :]]
        one = dataclasses.replace(pair.one, top_logprobs=one_tops)
        other = dataclasses.replace(other, top_logprobs=[*tops[:at], {**tops[at], **top}, *tops[at + 1 :]])
        return dataclasses.replace(pair, one=one, other=other)
    return dataclasses.replace(pair, other=other)


def test_another_token_between_two_that_were_nearly_as_likely_is_drift():
    (first, *rest) = pairs(lambda *_: 0.0)
    found = diagnose([part(first, 7, 52, {52: first.one.logprobs[7]}), *rest], TOLERANCE, PAGE)
    assert found.verdict == "drift" and "1 of 6 samples chose another token" in found.text
    assert len(part(first, 7, 52, None).deltas()) == 8  # what comes after has another context


def test_another_token_that_one_path_finds_far_likelier_is_a_scramble():
    (first, *rest) = pairs(lambda *_: 0.0)
    found = diagnose([part(first, 7, 52, {52: first.one.logprobs[7] + 2.0}), *rest], TOLERANCE, PAGE)
    assert found.verdict == "scramble" and "wrong at 7" in found.text


def test_nan_and_a_missing_end_are_never_equal():
    (first, *_) = pairs(lambda *_: 0.0)
    values = [*first.other.logprobs[:5], float("nan"), *first.other.logprobs[6:]]
    found = diagnose([dataclasses.replace(first, other=dataclasses.replace(first.other, logprobs=values))], TOLERANCE)
    assert found.verdict == "scramble" and "wrong at 5" in found.text
    shorter = Path(first.one.prompt_token_ids, first.one.token_ids[:4], first.one.logprobs[:4])
    assert diagnose([dataclasses.replace(first, other=shorter)], TOLERANCE).verdict == "scramble"
    infinite = dataclasses.replace(first.one, logprobs=[float("-inf")] * LENGTH)
    assert diagnose([Pair("0", 0, infinite, infinite)], TOLERANCE).verdict == "agree"


def test_stored_keys_and_values_name_the_first_wrong_layer_page_and_head():
    rng = np.random.default_rng(0)
    expected = {layer: rng.normal(0, 3, (20, 2, 2, size)) for layer, size in enumerate((8, 8, 16, 8))}
    stored = {layer: values + rng.normal(0, 0.02, values.shape) for layer, values in expected.items()}
    assert where_stored_differs(stored, expected, PAGE) is None
    for layer in (2, 3):
        stored[layer][9:, 1, 1] += 2
    text = where_stored_differs(stored, expected, PAGE)
    assert text and "layer 2 is the first" in text and "values of head 1, in logical page 1, 2, from position 9" in text
    copied = {layer: np.repeat(values, 2, axis=1) for layer, values in stored.items() if layer != 1}
    text = where_stored_differs(copied, {layer: expected[layer] for layer in copied}, PAGE)
    assert text and "layer 2" in text and "values of head 1, in" in text and "look at layers 0 to 1, and" in text
    stored[0][8:16] = expected[0][:8]
    text = where_stored_differs(stored, expected, PAGE)
    assert (
        text and "layer 0" in text and "all heads, in logical page 1, from position 8" in text and "page table" in text
    )
