"""Sixty-four requests that begin with the same 2,000 tokens, admitted together, compute them once."""

import functools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiny_models import tiny_model, uncached_greedy

pytestmark = pytest.mark.slow  # a minute; test_prefix_cache.py does it with four requests

REQUESTS, COMMON, OWN, NEW, PAGE, STEP = 64, 2000, 3, 2, 16, 256
SOME = (1, 2, 17, 40, REQUESTS - 1)
"""Those that are compared with the uncached forward, which takes a second for each token."""
BAD = 60
"""A token whose keys, values and logits are NaN."""


@pytest.fixture(scope="module")
def engine():
    model = tiny_model(max_position_embeddings=4096)
    table = model.embeddings.weight.array.at[BAD].set(jnp.nan)
    model = eqx.tree_at(lambda m: m.embeddings.weight.array, model, table)
    pages = REQUESTS * (COMMON // PAGE + 3)  # so that no sequence waits for pages
    sizes = dict(max_seqs=REQUESTS, max_seq_len=COMMON + 16, page_size=PAGE, max_pages=pages, max_step_tokens=STEP)
    with pytest.MonkeyPatch.context() as patch:  # all prompts in one upload
        patch.setattr("levanter_infer.engine.sizes.MIN_UPLOAD_TOKENS", REQUESTS * (COMMON + OWN))
        return InferenceEngine(model, config=EngineConfig(**sizes))


@functools.cache
def uncached(i: int) -> list[int]:
    return uncached_greedy(tiny_model(max_position_embeddings=4096), prompts()[i], NEW)


def prompts(first_own: list[int] | None = None) -> list[list[int]]:
    rng = np.random.default_rng(4)
    common = rng.integers(0, BAD, COMMON).tolist()
    made = [[*common, *rng.integers(0, BAD, OWN).tolist()] for _ in range(REQUESTS)]
    return made if first_own is None else [[*common, *first_own], *made[1:]]


@pytest.mark.parametrize("first", ["healthy", "cancelled", "poisoned"])
def test_the_common_beginning_is_computed_once(engine, first):
    """Whatever becomes of the request that computes it while the others wait for its pages."""
    engine.reset()
    asked = prompts([0, BAD, 1] if first == "poisoned" else None)
    before = engine.stats()
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    groups = [engine.submit(Request(prompt_token_ids=ids, sampling=sampling)) for ids in asked]
    if first == "cancelled":
        while not 0 < int(engine.state.decode.sequences.num_computed[0]) < COMMON:
            engine.step_round(max_steps=2)
        engine.cancel(groups[0])
    while not all(group.is_done for group in groups):
        engine.step_round()
    engine.drain()
    check_invariants(engine.state.decode)
    stats = engine.stats()
    counted = {name: stats[name] - before[name] for name in ("computed_prompt_tokens", "prefix_hits", "preemptions")}
    computed = COMMON + OWN * (REQUESTS - (first == "cancelled"))
    hits = COMMON // PAGE * (REQUESTS - 1)
    if first == "poisoned":  # no sequence has got the last pages yet when it fails, in the step that fills them
        lost = COMMON % STEP // PAGE
        computed, hits = computed + lost * PAGE, hits - lost
    if first == "cancelled":  # its successor goes on with what is there
        taken_over = counted["prefix_hits"] - COMMON // PAGE * (REQUESTS - 2)
        assert 0 < taken_over < COMMON // PAGE
        hits = COMMON // PAGE * (REQUESTS - 2) + taken_over
    assert counted == {"computed_prompt_tokens": computed, "prefix_hits": hits, "preemptions": 0}
    assert stats["pages_free"] == engine.shapes.num_pages
    reasons = {"healthy": "length", "cancelled": "abort", "poisoned": "error"}
    assert [group.sequences[0].finish_reason for group in groups] == [reasons[first]] + ["length"] * (REQUESTS - 1)
    for i in SOME:
        assert groups[i].sequences[0].token_ids == uncached(i)
