"""The same tokens on every path: uncached, reference, xla, C++, chunked, mixed, forked, preempted.

Each rung compares whole greedy continuations with those of the plain uncached forward.
"""

import functools

import numpy as np
import pytest

from levanter_infer.decode.codes import WAITING
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.tiers import nightly_but
from tests.tiny_models import shared_engine, tiny_model, uncached_greedy

STEPS = 20
LENGTHS = (23, 1, 7, 16, 33, 40)


@functools.lru_cache
def prompts():
    rng = np.random.default_rng(7)
    return [rng.integers(0, 61, length).tolist() for length in LENGTHS]


@functools.lru_cache
def expected():
    return [uncached_greedy(tiny_model(), prompt, STEPS) for prompt in prompts()]


def run(which, n=1, **config):
    """Token ids of every completion, and the engine after the run."""
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**{"max_seq_len": 64, **config}))
    return sampled(engine, which, n), engine


def sampled(engine, which, n=1):
    """Token ids of every completion."""
    sampling = SamplingParams(max_tokens=STEPS, temperature=0.0, n=n)
    outputs = engine.generate([Request(prompt_token_ids=prompts()[i], sampling=sampling) for i in which])
    assert_idle(engine)
    return [[c.token_ids for c in output.completions] for output in outputs]


def assert_idle(engine):
    check_invariants(engine.state.decode)
    assert engine.stats()["pages_free"] == engine.shapes.num_pages


XLA = dict(attention="xla", matmul="xla")
"""Backends of engines without the C++ kernels: on accelerators, and on a CPU where they were not built."""


@pytest.mark.parametrize("backend", nightly_but([XLA], [{"attention": "reference"}, XLA, {}]))
def test_paged_attention_gives_the_tokens_of_the_uncached_forward(backend):
    tokens, engine = run([3], max_seqs=1, max_step_tokens=16, page_size=4, **backend)
    assert tokens == [[expected()[3]]]
    assert engine.stats()["steps"] == STEPS  # the prompt was computed as a whole


@pytest.mark.parametrize(
    "chunk, backend", nightly_but([(16, XLA)], [(1, {}), (3, XLA), (16, XLA), (16, {}), (1000, {})])
)
def test_prompt_chunks_of_any_size_give_the_same_tokens(chunk, backend):
    tokens, engine = run([0, 4], max_seqs=1, max_step_tokens=chunk, page_size=4, **backend)
    assert tokens == [[expected()[0]], [expected()[4]]]
    prompt_steps = sum(-(-LENGTHS[i] // chunk) for i in (0, 4))
    assert engine.stats()["steps"] == prompt_steps + 2 * (STEPS - 1)


@pytest.mark.slow
@pytest.mark.parametrize("page_size, backend", [(1, {}), (4, XLA), (64, {})])
def test_mixed_batches_give_the_same_tokens_at_any_page_size(page_size, backend):
    tokens, _ = run(range(len(LENGTHS)), max_seqs=4, max_step_tokens=24, page_size=page_size, **backend)
    assert tokens == [[t] for t in expected()]


def test_forks_give_the_same_tokens_and_copy_pages_only_where_they_diverge():
    engine = shared_engine()
    before = engine.stats()
    tokens = sampled(engine, [0, 3], n=3)
    assert tokens == [[expected()[0]] * 3, [expected()[3]] * 3]
    forks, copies = (engine.stats()[name] - before[name] for name in ("forks", "copied_pages"))
    assert forks == 4
    # Each fork writes one shared page: its copy is all that it costs beyond its own tokens.
    assert 0 < copies <= 4


@pytest.mark.slow
def test_more_forks_than_are_copied_at_once_give_the_same_tokens():
    tokens, engine = run([0], n=66, max_seqs=66, page_size=8)
    assert tokens == [[expected()[0]] * 66] and engine.stats()["forks"] == 65


@pytest.mark.parametrize("backend", nightly_but([{}], [{}, XLA]))
def test_preempted_sequences_give_the_same_tokens(backend):
    """Short prompts that grow far beyond what the pool holds: most of them lose their pages on the way."""
    steps = 40
    short = [[i, i + 7, 3] for i in range(8)]
    engine = shared_engine(max_pages=20, **backend)
    sampling = SamplingParams(max_tokens=steps, temperature=0.0)
    groups = [engine.submit(Request(prompt_token_ids=p, sampling=sampling, id=str(i))) for i, p in enumerate(short)]
    preempted = set()
    while not all(group.is_done for group in groups):
        engine.step_round(max_steps=1)
        table = engine.state.decode.sequences
        waits = np.asarray((table.status == WAITING) & (table.seq_lens > table.prompt_lens))
        preempted |= {g.id for g in groups if g.sequences[0].slot is not None and waits[g.sequences[0].slot]}
    engine.drain()
    assert [group.sequences[0].token_ids for group in groups] == [
        uncached_greedy(tiny_model(), p, steps) for p in short
    ]
    assert len(preempted) > len(groups) // 2
    assert_idle(engine)


def test_sampled_tokens_do_not_depend_on_company_slots_or_preemption():
    sampling = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, n=2, seed=11)
    requests = [Request(prompt_token_ids=p, sampling=sampling, id=str(i)) for i, p in enumerate(prompts())]
    roomy, tight = shared_engine(), shared_engine(max_pages=20)
    preemptions = tight.stats()["preemptions"]
    together = [[c.token_ids for c in o.completions] for o in roomy.generate(requests)]
    preempted = [[c.token_ids for c in o.completions] for o in tight.generate(requests[::-1])][::-1]
    alone = [[c.token_ids for c in roomy.generate([request])[0].completions] for request in requests]
    assert together == alone
    assert preempted == alone
    assert tight.stats()["preemptions"] > preemptions
    assert len({tuple(t) for samples in alone for t in samples}) == 2 * len(requests)
