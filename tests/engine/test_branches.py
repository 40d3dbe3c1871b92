"""The form of the round for platforms that decide branches on the device (decision 0058), which a CPU runs too."""

import dataclasses

import jax
import numpy as np
import pytest

from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams
from levanter_infer.kernels import registry
from tests.tiny_models import SIZES, tiny_model

CONFIG = EngineConfig(**SIZES, max_pages=20)


def answers(monkeypatch, branches: bool):
    monkeypatch.setitem(registry.PLATFORMS, "cpu", dataclasses.replace(registry.PLATFORMS["cpu"], branches=branches))
    switches, real = [], jax.lax.switch
    monkeypatch.setattr(jax.lax, "switch", lambda *args: switches.append(args) or real(*args))
    engine = InferenceEngine(tiny_model(), config=CONFIG)
    shared = np.random.default_rng(0).integers(2, 60, 24).tolist()
    changed = dict(presence_penalty=0.5, repetition_penalty=1.2, logit_bias={7: 2.0})
    params = [
        SamplingParams(max_tokens=20, n=3, seed=1, logprobs=2),
        SamplingParams(max_tokens=24, temperature=0),
        SamplingParams(max_tokens=24, seed=2, **changed),
        SamplingParams(max_tokens=16, seed=3, top_k=5, top_p=0.8, min_p=0.01),
        SamplingParams(max_tokens=16, seed=4, stop_token_ids=[[5, 9], [11]], min_tokens=3),
    ]
    requests = [
        Request(prompt_token_ids=shared[: 24 - i] + [3 + i], sampling=sampling) for i, sampling in enumerate(params * 2)
    ]
    outputs = engine.generate(requests)
    assert bool(switches) == branches
    stats = engine.stats()
    return [[(each.token_ids, each.finish_reason) for each in output.completions] for output in outputs], stats


@pytest.mark.slow
def test_branches_give_the_tokens_of_loops(monkeypatch):
    tokens, stats = answers(monkeypatch, branches=True)
    expected, same = answers(monkeypatch, branches=False)
    assert tokens == expected
    reached = ("preemptions", "prefix_hits", "forks", "copied_pages", "prefix_evictions")
    assert {name: stats[name] for name in reached} == {name: same[name] for name in reached}
    assert all(stats[name] > 0 for name in reached), stats
