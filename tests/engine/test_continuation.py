"""Rollouts that were stopped go on in a later request, with the tokens that they would have had."""

import dataclasses
import functools

import numpy as np
import pytest

from levanter_infer.engine.continuation import continuation, joined
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import shared_engine, tiny_model

WHOLE = SamplingParams(max_tokens=20, n=3, seed=2**40 + 7, temperature=1.3, top_k=30, min_tokens=4)
IDS = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def engine():
    return shared_engine()


@pytest.fixture(scope="module")
def undisturbed(engine):
    return engine.generate(Request(prompt_token_ids=IDS, sampling=WHOLE))[0].completions


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_sample_that_was_cut_draws_what_it_would_have_drawn(engine, undisturbed, cut):
    first = dataclasses.replace(WHOLE, max_tokens=cut, min_tokens=min(4, cut))
    output = engine.generate(Request(prompt_token_ids=IDS, sampling=first))[0]
    rest = engine.generate([continuation(output, i, WHOLE) for i in range(3)])
    assert len({tuple(sample.token_ids) for sample in undisturbed}) == 3
    for whole, part, more in zip(undisturbed, output.completions, rest, strict=True):
        assert more.error is None
        found = joined(part, more.completions[0])
        assert (found.index, found.seed, found.finish_reason) == (whole.index, whole.seed, whole.finish_reason)
        assert found.token_ids == whole.token_ids
        for name in ("logprobs", "processed_logprobs"):
            np.testing.assert_allclose(getattr(found, name), getattr(whole, name), atol=2e-5)


def test_a_sample_may_be_cut_again_and_again(engine, undisturbed):
    first = dataclasses.replace(WHOLE, max_tokens=4, min_tokens=4)
    (output,) = engine.generate(Request(prompt_token_ids=IDS, sampling=first))
    parts, index = [output.completions[2]], 2
    for cut in (9, 13, 20):
        request = continuation(output, index, WHOLE)
        left = dataclasses.replace(request.sampling, max_tokens=cut - sum(len(part.token_ids) for part in parts))
        assert request.sampling.max_tokens == 20 - sum(len(part.token_ids) for part in parts)
        (output,) = engine.generate(dataclasses.replace(request, sampling=left))
        parts, index = [*parts, output.completions[0]], 0
    assert [len(part.token_ids) for part in parts] == [4, 5, 4, 7]
    assert [token for part in parts for token in part.token_ids] == undisturbed[2].token_ids
    assert functools.reduce(joined, parts).token_ids == undisturbed[2].token_ids
    with pytest.raises(ValueError, match="sample 0 has 20 tokens, and max_tokens=20"):
        continuation(output, 0, WHOLE)


def test_a_rollout_that_was_aborted_goes_on_with_other_weights_and_names_both_versions(engine, undisturbed):
    group = engine.submit(Request(prompt_token_ids=IDS, sampling=WHOLE))
    while len(group.sequences[2].token_ids) < 6:
        engine.step_round(max_steps=1)
    engine.flush()
    engine.cancel(group)
    engine.drain()
    output, old = group.output(), engine.version
    part = output.completions[2]
    try:
        engine.swap_weights(tiny_model(1))
        more = engine.generate(continuation(output, 2, WHOLE))[0].completions[0]
    finally:  # other files share the engine
        engine.swap_weights(tiny_model())
    found, cut = joined(part, more), len(part.token_ids)
    assert cut >= 6 and part.finish_reason == "abort" and found.token_ids[:cut] == undisturbed[2].token_ids[:cut]
    assert len(found.token_ids) == len(found.logprobs) == len(found.token_versions) == 20
    assert found.token_versions.tolist() == [old] * cut + [old + 1] * (20 - cut)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(presence_penalty=0.5), "cannot have presence_penalty: "),
        (dict(stop=["x"], frequency_penalty=1.0), "cannot have frequency_penalty, stop: "),
        (dict(stop_token_ids=[[1, 2]]), "cannot have stop_token_ids: "),
        (dict(max_tokens=5), "sample 1 has 5 tokens, and max_tokens=5; raise it"),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(engine, changes, message):
    output = engine.generate(Request(prompt_token_ids=IDS, sampling=dataclasses.replace(WHOLE, max_tokens=5)))[0]
    with pytest.raises(ValueError, match=message):
        continuation(output, 1, dataclasses.replace(WHOLE, **changes))
    with pytest.raises(ValueError, match="no such sample"):
        continuation(output, 3, WHOLE)
    ended = dataclasses.replace(output.completions[1], finish_reason="stop")
    with pytest.raises(ValueError, match="has ended by itself"):
        continuation(dataclasses.replace(output, completions=[ended]), 1, WHOLE)


@pytest.mark.parametrize("given", [-1, True, 2**31, "1", 1.0])
def test_a_first_sample_that_is_none_is_refused(engine, given):
    (output,) = engine.generate(Request(prompt_token_ids=IDS, sampling=WHOLE, first_sample=given))
    assert output.error is not None and "first_sample=" in output.error
