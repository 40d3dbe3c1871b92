"""A sequence of any family is the same however it is computed: in chunks, in a batch, from cached pages, preempted.

One golden case per family (`tests/family_cases.py`) and one engine for all its tests, because compiling takes most of
their time. Everything is compared with each request alone in an empty engine, and that with HF transformers.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.policies import Numerics
from tests.conftest import drop_programs_if_many
from tests.family_cases import (
    SIZES,
    Sample,
    case_of,
    golden_prompts,
    load,
    make_engine,
    requests_for,
    samples,
    served_names,
)
from tests.golden_cases import load_case

pytestmark = pytest.mark.slow  # CI has other models with each kind of memory, in files of their own

MOST_LOGPROB_DIFFERENCE = 1e-4
"""Where XLA computes a part of the model, in an order that depends on the step. Otherwise bits are equal."""
MOST_MESH_DIFFERENCE = 2e-4
"""As tests/engine/test_mesh.py: sums of float32 in another order."""


ONE_PER_KIND = ("apertus", "cohere2", "deepseek_v2", "granitemoehybrid")
"""All keys and values, windows, latents, a state of fixed size: families whose rounds are compiled for scoring at
once."""


class Served:
    """A family's golden case and the engine that serves it."""

    def __init__(self, model_type: str, directory: Path):
        self.case = load_case(case_of(model_type))
        self.model = load(self.case, directory)
        # The one engine preempts in both ways: it recomputes what the host has no memory for
        self.engine = make_engine(self.model, preempt="offload", scoring=model_type in ONE_PER_KIND)
        self.requests = requests_for(self.case, self.model.config.vocab_size)
        self.expected = [self.alone(request) for request in self.requests]

    def alone(self, request: Request) -> list[Sample]:
        """The samples of a request in an empty engine."""
        self.engine.reset()
        return samples(self.engine.generate([request])[0])

    def serve(self, requests: Sequence[Request]) -> tuple[list[list[Sample]], dict[str, float]]:
        """The samples of requests that are served together, and what the engine counted meanwhile."""
        before = self.engine.stats()
        found = [samples(output) for output in self.engine.generate(list(requests))]
        after = self.engine.stats()
        return found, {name: after[name] - before[name] for name in before if isinstance(before[name], int)}

    def check(self, found: Sequence[Sequence[Sample]], expected: Sequence[Sequence[Sample]]) -> None:
        for group, own in zip(found, expected, strict=True):
            assert [sample.tokens for sample in group] == [sample.tokens for sample in own]
            for sample, other in zip(group, own, strict=True):
                if self.engine.config.numerics == Numerics.BATCH_INVARIANT:
                    assert sample.logprobs.tobytes() == other.logprobs.tobytes()
                else:
                    np.testing.assert_allclose(sample.logprobs, other.logprobs, atol=MOST_LOGPROB_DIFFERENCE)

    def check_empty(self) -> None:
        check_invariants(self.engine.state.decode)
        stats = self.engine.stats()
        assert stats["pages_free"] == stats["pages_total"] and stats["offloaded_bytes"] == 0


@pytest.fixture(scope="module", params=served_names())
def served(request, tmp_path_factory):
    yield Served(request.param, tmp_path_factory.mktemp(request.param))
    drop_programs_if_many()


@pytest.fixture(autouse=True)
def empty(served):
    served.engine.reset()
    yield
    served.check_empty()


def test_paged_and_chunked_is_hf(served):
    """Prompts longer than a step, sequences longer than three windows; HF computes each as a whole."""
    prompts = golden_prompts(served.case)
    longest = max(len(prompt.tokens) + len(prompt.greedy) for prompt in prompts)
    assert longest > 3 * max((window or 0 for window in served.model.config.windows), default=0)
    assert max(len(prompt.tokens) for prompt in prompts) > SIZES["max_step_tokens"]
    for prompt, (sample,) in zip(prompts, served.expected, strict=False):
        differing = [
            step for step, pair in enumerate(zip(sample.tokens, prompt.greedy, strict=True)) if len({*pair}) > 1
        ]
        if not differing:
            np.testing.assert_allclose(sample.logprobs, prompt.greedy_logprobs, rtol=0, atol=2 * prompt.bound)
        else:  # HF's two best logits are closer there than what counts as equal
            assert prompt.greedy_gaps[differing[0]] < prompt.bound


def test_batched_is_alone(served):
    """More requests than run at once, in pages that others have left. Prompts that fill one step alone are in chunks
    here, because they share steps."""
    found, counts = served.serve(served.requests)
    served.check(found, served.expected)
    lengths = [
        len(r.prompt_token_ids) + len(s.tokens) for r, group in zip(served.requests, found, strict=True) for s in group
    ]
    assert sum(lengths) > SIZES["max_pages"] * SIZES["page_size"]


def test_cached_is_cold(served):
    for request, expected in zip(served.requests[-5:], served.expected[-5:], strict=True):
        served.engine.reset()
        served.serve([request])
        found, counts = served.serve([request])
        served.check(found, [expected])
        pages = (len(request.prompt_token_ids) - 1) // SIZES["page_size"]
        assert counts["prefix_hits"] == pages
        assert (counts["snapshots_restored"] > 0) == (served.engine.shapes.slot_state and pages > 0)
    # What begins like another and goes on differently
    first, last = served.requests[-5], served.requests[-1]
    served.serve([first])
    for _ in range(1 + served.engine.shapes.slot_state):  # where it parts from the first, a state is kept only now
        found, counts = served.serve([last])
        served.check(found, served.expected[-1:])
    assert counts["prefix_hits"] > 0


def test_preempted_is_undisturbed(served, monkeypatch):
    monkeypatch.setattr(served.engine._rounds.offload, "_max_bytes", 0)  # nothing fits there: pages are computed again
    found, counts = served.serve(served.requests)
    served.check(found, served.expected)
    assert counts["preemptions"] > 0 and counts["recomputed_tokens"] > 0 and counts["offloaded_pages"] == 0


def test_offloaded_is_undisturbed(served):
    found, counts = served.serve(served.requests)
    served.check(found, served.expected)
    assert counts["offloaded_pages"] == counts["prefetched_pages"] > 0 and counts["preemptions"] == 0


def test_forked_is_alone(served):
    """Samples that go on from others are those of a prompt that ends there."""
    sampling = SamplingParams(max_tokens=20, n=2, seed=3, temperature=1.0, logprobs=0)
    request = dataclasses.replace(served.requests[-1], sampling=sampling)
    prompt, group = list(request.prompt_token_ids), served.engine.submit(request)
    begun(served.engine, group, 6)
    served.engine.resample(group, [1, 1])
    begun(served.engine, group, 9)
    served.engine.fork(group, 0, 1)
    prefixes = [Sample(list(s.token_ids), np.asarray(s.logprobs, np.float32)) for s in group.sequences]
    served.engine.drain()
    found = samples(group.output())
    assert len(found) == 3 and found[0].tokens[:6] == found[1].tokens[:6] and found[2].tokens[:9] == found[0].tokens[:9]
    for i, (sample, prefix) in enumerate(zip(found, prefixes, strict=True)):
        known = len(prefix.tokens)
        rest = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - known, n=i + 1)
        alone = served.alone(Request(prompt_token_ids=prompt + prefix.tokens, sampling=rest))[i]
        served.check([[sample[:known], sample[known:]]], [[prefix, alone]])


def begun(engine, group, count: int) -> None:
    """Steps until every sample has so many tokens."""
    while any(len(sequence.token_ids) < count for sequence in group.sequences):
        engine.step_round(max_steps=1)
        engine.flush()


def test_perplexity_over_pages_is_that_of_the_uncached_forward(served):
    """A prompt and what follows are scored in chunks on pages, and by HF's forward all at once."""
    prompt = max(golden_prompts(served.case), key=lambda prompt: len(prompt.tokens))
    scoring = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1)
    request = Request(prompt_token_ids=[*prompt.tokens.tolist(), *prompt.greedy.tolist()], sampling=scoring)
    (output,) = served.engine.generate([request])
    assert output.error is None, output.error
    uncached = np.concatenate([prompt.prompt_logprobs, prompt.greedy_logprobs])
    paged, expected = (np.exp(-np.mean(each, dtype=np.float64)) for each in (output.prompt_logprobs, uncached))
    assert paged == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_other_chunks_and_pages_are_the_same(served):
    """Chunks of seven tokens, larger pages, and no prefix caching."""
    engine = make_engine(served.model, max_step_tokens=7, max_seqs=6, page_size=8, prefix_cache=False)
    served.check([samples(output) for output in engine.generate(served.requests)], served.expected)


@pytest.mark.slow
def test_drafts_change_no_sample(served):
    """Keys and values of rejected drafts are overwritten by those of the tokens that come in their place."""
    drafts = dict(num_speculative_tokens=3, prompt_lookup_min=1)
    if served.engine.shapes.slot_state:
        with pytest.raises(ValueError, match="state of fixed size"):
            make_engine(served.model, **drafts)
        return
    engine = make_engine(served.model, **drafts)
    served.check([samples(output) for output in engine.generate(served.requests)], served.expected)
    check_invariants(engine.state.decode)
    assert engine.stats()["draft_tokens"] > engine.stats()["accepted_tokens"]


@pytest.mark.slow
def test_meshes_are_one_device(served):
    config = served.model.config
    experts, sharded = config.num_experts, config.unsharded_heads is None
    meshes = ["data2", *["model2"] * sharded, *(["expert2"] if experts and experts % 2 == 0 else [])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.family_runs", served.case.name, *meshes],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for mesh, found in json.loads(done.stdout.splitlines()[-1]).items():
        for group, own in zip(found, served.expected, strict=True):
            assert [tokens for tokens, _ in group] == [sample.tokens for sample in own], mesh
            for (_, logprobs), sample in zip(group, own, strict=True):
                np.testing.assert_allclose(logprobs, sample.logprobs, atol=MOST_MESH_DIFFERENCE, err_msg=mesh)
