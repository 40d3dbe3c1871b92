"""Log probabilities of prompts: those of the uncached forward, on every path, and the same bits on all of them."""

import asyncio
import dataclasses

import equinox as eqx
import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.async_engine import AsyncEngine
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.pure import generate
from levanter_infer.engine.request import Request
from levanter_infer.kernels.cpu import bindings as cpu
from tests.tiers import nightly_but
from tests.tiny_models import SIZES, tiny_model, uncached_logprobs

LENGTH, PAGE = SIZES["max_seq_len"], SIZES["page_size"]
POISON = 60
"""A token that no other test uses: in `other`, its embedding is not a number."""
built = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built, so bits may differ")


@pytest.fixture(scope="module")
def shared():
    config = EngineConfig(**SIZES, max_pages=20, prefix_cache=True)
    return InferenceEngine(tiny_model(), config=config, scoring=True)


@pytest.fixture
def engine(shared):
    """Small pages, chunks and pool, the prefix cache, and the C++ kernels where there are any."""
    shared.reset()
    yield shared
    check_invariants(shared.state.decode)
    assert shared.stats()["pages_free"] == shared.shapes.num_pages


@pytest.fixture(scope="module")
def other():
    """Other sizes, XLA's matmuls, no prefix cache, and more of the likeliest tokens. Extended by its first test."""
    model = tiny_model()
    poisoned = model.embeddings.weight.array.at[POISON].set(np.nan)
    model = eqx.tree_at(lambda m: m.embeddings.weight.array, model, poisoned)
    sizes = dict(max_seqs=3, max_seq_len=LENGTH, page_size=8, max_step_tokens=80, prefix_cache=False)
    config = EngineConfig(**sizes, max_prompt_logprobs=3, matmul="xla")
    return InferenceEngine(model, config=config)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, POISON, length).tolist()


def request(ids: list[int], max_tokens: int = 0, k: int | None = 0, salt: str | None = None, **sampling) -> Request:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=k, seed=1, **sampling)
    return Request(prompt_token_ids=ids, sampling=params, cache_salt=salt)


def expected(ids: list[int]) -> np.ndarray:
    return uncached_logprobs(tiny_model(), ids, LENGTH)[np.arange(len(ids) - 1), ids[1:]]


def check(ids: list[int], logprobs: np.ndarray) -> None:
    assert logprobs.dtype == np.float32 and logprobs.shape == (len(ids) - 1,)
    np.testing.assert_allclose(logprobs, expected(ids), atol=2e-4)


def grown(engine, before: dict) -> dict[str, int]:
    after = engine.stats()
    return {name: after[name] - before[name] for name in ("prefix_hits", "computed_prompt_tokens", "scored_tokens")}


def test_outputs_say_how_much_of_a_scored_prompt_was_found(engine):
    scored = [engine.generate([request(text(18))])[0].num_cached_tokens for _ in range(2)]
    assert scored == [0, 16]


@pytest.mark.slow
def test_the_first_request_that_is_scored_extends_the_engine_and_disturbs_nobody(other):
    plain = request(text(9), max_tokens=20, k=None, temperature=0.0)
    running = other.submit(plain)
    other.step_round(max_steps=3)
    programs = {"init": 1, "round": 1, "reset": 1, "zero_cache": 1}
    assert other.stats()["programs"] == programs and other.state.scores is None
    scored = other.submit(request(text(30, seed=1)))
    other.drain()
    likeliest = np.argmax(uncached_logprobs(tiny_model(), text(9) + running.sequences[0].token_ids, LENGTH), axis=-1)
    assert running.sequences[0].token_ids == likeliest[8:-1].tolist()
    check(text(30, seed=1), scored.output().prompt_logprobs)
    programs = {name: 2 for name in programs} | {"extend": 1, "read_scores": 1}
    assert other.stats()["programs"] == programs
    other.generate([plain, request(text(3), n=2, max_tokens=2)])
    other.reset()
    assert other.stats()["programs"] == programs


@pytest.mark.parametrize("name", nightly_but(["engine"], ["engine", "other"]))
def test_scores_are_those_of_the_uncached_forward(name, request):
    engine = request.getfixturevalue(name)
    for _ in range(2):  # the second time with what is cached
        sequences = [text(length, seed=length) for length in (1, 2, 5, 8, 17, LENGTH, 33)]
        for ids, logprobs in zip(sequences, engine.score(sequences), strict=True):
            check(ids, logprobs)


@pytest.mark.parametrize("n", [1, 3])
def test_samples_that_are_drawn_again_have_the_scores_of_their_own_prompt(engine, n):
    for seed in range(6):  # in slots that held other prompts
        params = SamplingParams(max_tokens=2, n=n, prompt_logprobs=0)
        asked = Request(prompt_token_ids=text(13, seed=seed), sampling=params, first_sample=5)
        (output,) = engine.generate([asked])
        check(text(13, seed=seed), output.prompt_logprobs)


def test_a_close_ends_requests_whose_scores_are_being_read(engine, monkeypatch):
    """Their samples have ended, and the scores come with the next round, which does not come."""
    step_round = engine.step_round

    async def test():
        server = AsyncEngine(engine)

        def last_round(*args, **options):
            if ended := step_round(*args, **options):
                server._stopping = True
            return ended

        monkeypatch.setattr(engine, "step_round", last_round)
        calls = [server.generate(request(text(6, seed=i))) for i in range(3)]
        outputs = await asyncio.wait_for(asyncio.gather(*calls), 60)
        await server.aclose()
        return outputs

    outputs = asyncio.run(test())
    assert {output.completions[0].finish_reason for output in outputs} == {"abort"}


@pytest.mark.parametrize("name, count", nightly_but([("engine", 1)], [("engine", 1), ("other", 3), ("other", 2)]))
def test_the_likeliest_tokens_are_those_of_the_uncached_forward(name, count, request):
    ids = text(21, seed=3)
    params = SamplingParams(max_tokens=1, prompt_logprobs=count)
    (output,) = request.getfixturevalue(name).generate([Request(prompt_token_ids=ids, sampling=params)])
    check(ids, output.prompt_logprobs)
    oracle = uncached_logprobs(tiny_model(), ids, LENGTH)[:-1]
    assert [list(top) for top in output.prompt_top_logprobs] == np.argsort(-oracle)[:, :count].tolist()
    best = [list(top.values()) for top in output.prompt_top_logprobs]
    np.testing.assert_allclose(best, -np.sort(-oracle)[:, :count], atol=5e-5)


@built
def test_a_scored_token_has_the_bits_of_a_sampled_one(engine):
    (output,) = engine.generate([request(text(11), max_tokens=40, k=None, logprobs=0)])
    (completion,) = output.completions
    (scores,) = engine.score([text(11) + completion.token_ids])
    assert scores[10:].tobytes() == completion.logprobs.tobytes()


@built
def test_scores_are_the_same_bits_alone_together_chunked_forked_cached_and_after_preemption(engine):
    rng = np.random.default_rng(5)
    common = text(40, seed=9)
    asked = []
    for i in range(40):
        ids = common[: int(rng.integers(0, 40))] + text(int(rng.integers(1, 20)), seed=i)
        k, salt = rng.choice([None, 0, 1], p=[0.2, 0.4, 0.4]), rng.choice([None, "a"])
        max_tokens = int(rng.integers(k is None, 25)) if i % 4 or k is None else 0
        n = int(rng.integers(1, 4)) if max_tokens else 1
        asked.append(request(ids, max_tokens=max_tokens, k=k, n=n, salt=salt))
    before = engine.stats()
    together = engine.generate(asked)
    assert engine.stats()["preemptions"] > before["preemptions"]
    assert grown(engine, before)["prefix_hits"] > 40
    for one, output in zip(asked, together, strict=True):
        assert (output.prompt_logprobs is None) == (one.sampling.prompt_logprobs is None)
        if output.prompt_logprobs is not None:
            engine.reset()
            (alone,) = engine.score([one.prompt_token_ids])
            assert alone.tobytes() == output.prompt_logprobs.tobytes()
            check(list(one.prompt_token_ids), alone)


def test_a_common_beginning_is_computed_once(engine):
    sequences = [text(40) + text(3, seed=i) for i in range(1, 9)]
    before = engine.stats()
    scores = engine.score(sequences)
    for ids, logprobs in zip(sequences, scores, strict=True):
        check(ids, logprobs)
    counts = grown(engine, before)
    assert counts["scored_tokens"] == 8 * 42
    assert counts["prefix_hits"] == 7 * 10 and counts["computed_prompt_tokens"] == 43 + 7 * 3
    before = engine.stats()
    (output,) = engine.generate([request(text(41, seed=50), n=4, max_tokens=2)])
    check(text(41, seed=50), output.prompt_logprobs)
    assert grown(engine, before)["computed_prompt_tokens"] == 41 and len(output.completions) == 4


def test_pages_without_scores_are_not_found_by_those_who_want_them(engine):
    before = engine.stats()
    for k in (None, 0):  # which request computes a prefix first must not matter
        (output,) = engine.generate([request(text(18), max_tokens=1, k=k)])
        assert grown(engine, before)["prefix_hits"] == 0
    check(text(18), output.prompt_logprobs)
    longer = text(18) + output.completions[0].token_ids + text(5, seed=2)
    engine.generate([request(text(18), max_tokens=12, temperature=0.0)])
    check(longer, engine.score([longer])[0])


@pytest.mark.slow
def test_what_is_not_finite_is_an_error_of_its_own_request(other):
    sick, well = text(12)[:6] + [POISON] + text(12)[6:], text(20, seed=4)
    outputs = other.generate([request(sick), request(well), request(sick, max_tokens=3, n=2), request(well)])
    for output in outputs[::2]:
        assert np.isnan(output.prompt_logprobs[6:]).all()
        assert {c.finish_reason for c in output.completions} == {"error"}
    for output in outputs[1::2]:
        check(well, output.prompt_logprobs)
        assert [(c.token_ids, c.finish_reason) for c in output.completions] == [([], "length")]
    last = text(20, seed=4) + [POISON]  # the logits that are not finite stand behind all that is scored
    scored, sampled = other.generate([request(last), request(last, max_tokens=1)])
    check(last, scored.prompt_logprobs)
    assert [output.completions[0].finish_reason for output in (scored, sampled)] == ["length", "error"]


def test_a_prompt_that_leaves_for_the_host_half_way_is_scored_anew(engine):
    group = engine.submit(request(text(50, seed=3), max_tokens=2))
    engine.step_round(max_steps=2)
    assert engine.spill_to_host(group.sequences[0]) == 32 // PAGE
    engine.score([text(60, seed=i) for i in range(4)])  # others write to the pages that it had; then it comes back
    check(text(50, seed=3), group.output().prompt_logprobs)


def test_the_sample_that_scores_the_prompt_does_not_go_back_into_it(engine):
    """A fork begins with the last prompt token, whose score the first sample has set aside by then."""
    ids = list(range(1, 21))
    sampling = SamplingParams(n=2, max_tokens=6, prompt_logprobs=0, seed=5)
    (expected,) = engine.generate([Request(prompt_token_ids=ids, sampling=dataclasses.replace(sampling, n=1))])
    refusals = 0
    for rounds in range(1, 5):
        engine.reset()
        group = engine.submit(Request(prompt_token_ids=ids, sampling=sampling))
        for _ in range(rounds):
            engine.step_round(max_steps=1)
        try:
            engine.resample(group, [1, 1])
        except ValueError as error:
            assert "sample 1 has no token yet; call step_round" in str(error) or "has not started" in str(error)
            refusals += 1
        engine.drain()
        np.testing.assert_array_equal(group.output().prompt_logprobs, expected.prompt_logprobs)
    assert 0 < refusals < 4


def test_the_first_sample_may_end_and_go_on_from_another_one_while_its_scores_are_read(engine):
    ids, sampling = text(9), SamplingParams(max_tokens=3, n=2, prompt_logprobs=0, temperature=0.0, ignore_eos=True)
    group = engine.submit(Request(prompt_token_ids=ids, sampling=sampling))
    first, second = group.sequences
    while first.finish_reason is None:  # the second one starts a step later
        engine.step_round(max_steps=1)
        engine.flush()
    assert second.finish_reason is None and group.prompt_scores is None
    engine.resample(group, [1, 1])
    assert first.finish_reason is None and engine.state.decode.sequences.prompt_lens[first.slot] == 9
    engine.drain()
    check(ids, group.output().prompt_logprobs)


def test_cancelled_and_forgotten_requests_wait_for_no_scores(engine):
    groups = [engine.submit(request(text(50, seed=i))) for i in range(6)]
    engine.step_round(max_steps=1)
    engine.cancel(groups[0])
    engine.drain()
    assert groups[0].prompt_scores is None and all(group.is_done for group in groups)
    check(text(50, seed=5), groups[5].output().prompt_logprobs)
    group = engine.submit(request(text(5)))
    while not engine._rounds.scores._asked:
        engine.step_round()
    engine.reset()
    assert group.is_done and group.sequences[0].finish_reason == "abort"
    stopped = engine.submit(request(text(5), max_tokens=20))
    while not stopped.sequences[0].token_ids:
        engine.step_round(max_steps=1)
    stopped.sequences[0].finish("stop")  # as at a stop string, while its slot has yet to be given back
    engine.reset()
    assert stopped.is_done


@pytest.mark.parametrize(
    "bad, message",
    [
        ([], r"sequences\[1\]: the prompt is empty"),
        ([1, 61], r"sequences\[1\]: prompt_token_ids\[1\]=61 is outside the vocabulary"),
        ("text", r"sequences\[1\]: prompt_token_ids is str"),
        ([1] * (LENGTH + 1), r"sequences\[1\]: the prompt has 65 tokens, more than engine.max_seq_len=64"),
    ],
)
def test_a_sequence_that_cannot_be_scored_is_named_before_anything_runs(engine, bad, message):
    before = engine.stats()["rounds"]
    with pytest.raises(ValueError, match=message):
        engine.score([[1, 2], bad])
    assert engine.stats()["rounds"] == before


@pytest.mark.parametrize("wrong", ["text", b"text", [1, 2, 3], np.arange(3), {"a": [1]}, 5, None])
def test_what_is_no_list_of_sequences_is_not_scored(engine, wrong):
    before = engine.stats()["rounds"]
    with pytest.raises(ValueError, match=r"^sequences is .*; expected a list of sequences of token ids, such as \[\["):
        engine.score(wrong)
    assert engine.stats()["rounds"] == before


def test_sequences_may_come_from_an_iterator_or_an_array(engine):
    ids = [[1, 2, 3], [4, 5, 6]]
    expected = [scores.tolist() for scores in engine.score(ids)]
    for given in (iter(ids), np.asarray(ids), tuple(ids)):
        assert [scores.tolist() for scores in engine.score(given)] == expected


def test_more_than_the_engine_keeps_is_refused(engine):
    (output,) = engine.generate([request([1, 2], k=2)])
    assert "prompt_logprobs=2 but engine.max_prompt_logprobs=1; raise engine.max_prompt_logprobs" in output.error
    with pytest.raises(ValueError, match="prompt_logprobs come from InferenceEngine only"):
        generate(tiny_model(), [[1, 2]], [2], SamplingParams(prompt_logprobs=0))


@pytest.mark.slow
def test_logits_are_there_for_a_few_tokens_at_once(other):
    compiled = other.programs._programs["round"].wait().as_text()
    tokens = other.shapes.buckets[-1]
    assert "f32[64,61]" in compiled and f"f32[{tokens},61]" not in compiled and f"f32[{tokens},32]" in compiled
