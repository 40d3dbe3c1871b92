"""One test per fault that an earlier engine of this kind had; each would fail on that fault.

The numbers are those of docs/faults.md.
"""

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Iterator

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.axes import POSITION
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.config import DecoderConfig
from tests.tiny_models import SIZES, shared_engine, tiny_model, uncached_greedy

VOCAB = 61
POISON = 60


def engine(model=None, **config) -> InferenceEngine:
    return InferenceEngine(model or tiny_model(), config=EngineConfig(**{**SIZES, **config}))


def greedy(max_tokens: int = 8, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, POISON, length).tolist()


def one(engine: InferenceEngine, ids: list[int], sampling: SamplingParams):
    (output,) = engine.generate([Request(prompt_token_ids=ids, sampling=sampling)])
    assert output.error is None, output.error
    return output.completions[0]


def assert_idle(engine: InferenceEngine) -> None:
    check_invariants(engine.state.decode)
    assert engine.stats()["pages_free"] == engine.shapes.num_pages


def test_c1_a_prompt_longer_than_a_step_is_served_and_one_longer_than_the_engine_is_refused():
    subject = shared_engine()
    long, too_long = prompt(50), prompt(64)
    outputs = subject.generate(
        [Request(prompt_token_ids=too_long, sampling=greedy()), Request(prompt_token_ids=long, sampling=greedy())]
    )
    assert "64 tokens" in outputs[0].error and "max_seq_len=64" in outputs[0].error
    assert outputs[1].completions[0].token_ids == uncached_greedy(tiny_model(), long, 8)


def test_c3_running_out_of_pages_loses_nothing_and_leaves_the_engine_usable():
    subject = shared_engine(max_pages=8)
    before = subject.stats()["preemptions"]
    requests = [Request(prompt_token_ids=prompt(6, i), sampling=greedy(20)) for i in range(6)]
    for _ in range(2):
        outputs = subject.generate(requests)
        assert [o.completions[0].finish_reason for o in outputs] == ["length"] * 6
        assert all(len(o.completions[0].token_ids) == 20 for o in outputs)
    assert subject.stats()["preemptions"] > before
    assert_idle(subject)


def test_c4_reset_after_use_compiles_once_and_the_engine_goes_on():
    subject = shared_engine()
    first = one(subject, prompt(5), greedy()).token_ids
    subject.reset()
    assert one(subject, prompt(5), greedy()).token_ids == first
    subject.reset()
    assert subject.stats()["programs"]["reset"] == 1 and subject.stats()["programs"]["round"] == 1


def test_c5_length_limits_end_a_sequence_and_give_its_pages_back():
    subject = shared_engine()
    completion = one(subject, prompt(58), greedy(16))
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 6)
    assert_idle(subject)


@pytest.mark.slow
def test_c6_no_token_is_dropped_when_more_is_pending_than_a_step_holds():
    subject = shared_engine(max_seqs=8, max_step_tokens=8, max_round_steps=2)
    outputs = subject.generate([Request(prompt_token_ids=prompt(9, i), sampling=greedy(7)) for i in range(20)])
    for i, output in enumerate(outputs):
        assert output.completions[0].token_ids == uncached_greedy(tiny_model(), prompt(9, i), 7)


def test_c7_samples_of_one_request_share_a_pool_that_holds_one_of_them():
    subject = shared_engine(max_pages=8)
    (output,) = subject.generate([Request(prompt_token_ids=prompt(20), sampling=greedy(12, n=4))])
    assert [c.token_ids for c in output.completions] == [uncached_greedy(tiny_model(), prompt(20), 12)] * 4
    assert_idle(subject)


def test_c8_asking_for_logprobs_compiles_nothing():
    subject = shared_engine()
    plain = one(subject, prompt(5), greedy())
    asked = one(subject, prompt(5), greedy(logprobs=5))
    assert plain.top_logprobs is None and len(asked.top_logprobs) == 8
    assert [len(top) for top in asked.top_logprobs] == [5] * 8
    assert subject.stats()["programs"]["round"] == 1


def test_c9_a_stop_sequence_does_not_match_across_the_end_of_the_prompt():
    subject = shared_engine()
    first = one(subject, prompt(5), greedy()).token_ids[0]
    across = one(subject, prompt(5), greedy(stop_token_ids=[[prompt(5)[-1], first]]))
    assert (across.finish_reason, len(across.token_ids)) == ("length", 8)


def test_c10_stop_sequences_are_separate_and_reasons_and_logprobs_are_right():
    subject = shared_engine()
    free = one(subject, prompt(5, 3), greedy())
    stop = next(i for i in range(2, 8) if free.token_ids[i - 1 : i + 1] not in [free.token_ids[:2]])
    pair, other = free.token_ids[stop - 1 : stop + 1], (free.token_ids[0] + 1) % VOCAB
    stopped = one(subject, prompt(5, 3), greedy(stop_token_ids=[[other, other, other], pair]))
    assert stopped.finish_reason == "stop" and stopped.token_ids[-2:] == pair
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.logprobs) == len(stopped.processed_logprobs) == len(stopped.token_ids)
    assert free.finish_reason == "length" and len(free.logprobs) == 8


def test_c12_an_over_long_prompt_is_refused_and_not_cut():
    (output,) = engine(max_seq_len=16).generate([Request(prompt_token_ids=prompt(16), sampling=greedy())])
    assert output.completions == [] and "leaves no token to generate" in output.error


def test_c13_logprobs_are_the_models_and_processed_ones_are_the_samplers():
    sampling = SamplingParams(max_tokens=6, temperature=0.5, seed=1)
    completion = one(shared_engine(), prompt(5), sampling)
    ids = prompt(5) + completion.token_ids
    logits = tiny_model()(hax.named(jnp.asarray(ids, jnp.int32), (POSITION,))).array[4:-1]
    chosen = jnp.asarray(completion.token_ids)[:, None]
    for got, temperature in ((completion.logprobs, 1.0), (completion.processed_logprobs, 0.5)):
        expected = jnp.take_along_axis(jax.nn.log_softmax(logits / temperature, axis=-1), chosen, axis=1)[:, 0]
        np.testing.assert_allclose(got, expected, atol=2e-4)


@pytest.fixture(scope="module")
def poisonous():
    """A model in which one token makes everything behind it NaN."""
    model = tiny_model()
    table = model.embeddings.weight.array.at[POISON].set(jnp.nan)
    return eqx.tree_at(lambda m: m.embeddings.weight.array, model, table)


def test_c14_a_row_that_is_not_finite_ends_alone(poisonous):
    subject = engine(poisonous, max_pages=8)
    sampling = SamplingParams(max_tokens=10, temperature=1.0, seed=3, logprobs=2, logit_bias={POISON: -1e9})
    healthy = [Request(prompt_token_ids=prompt(5 + i, i), sampling=sampling) for i in range(6)]
    alone = [subject.generate([request])[0].completions[0] for request in healthy]
    poisoned = [Request(prompt_token_ids=[*prompt(4, 9), POISON], sampling=greedy(n=2)) for _ in range(3)]
    mixed = [request for pair in zip(healthy, poisoned * 2, strict=True) for request in pair]
    outputs = subject.generate(mixed)
    for output in outputs[1::2]:
        assert [(c.finish_reason, c.token_ids) for c in output.completions] == [("error", [])] * 2
    for output, expected in zip(outputs[0::2], alone, strict=True):
        (completion,) = output.completions
        assert completion.token_ids == expected.token_ids and completion.finish_reason == expected.finish_reason
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-4)
    assert_idle(subject)


def test_c15_an_interrupted_call_leaves_the_engine_empty_and_usable():
    subject = shared_engine()
    expected = one(subject, prompt(5), greedy()).token_ids

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        subject.generate([Request(prompt_token_ids=prompt(5), sampling=greedy(40))] * 9, on_update=interrupt)
    check_invariants(subject.state.decode)
    assert one(subject, prompt(5), greedy()).token_ids == expected
    assert_idle(subject)


@pytest.mark.parametrize("call", ["step_round", "flush", "drain"])
def test_an_interrupted_read_ends_requests_and_loses_no_token_in_silence(call, monkeypatch):
    """The tokens of the round that was being read are gone: a request that went on would lack them."""
    subject = shared_engine(max_pages=8)
    group = subject.submit(Request(prompt_token_ids=prompt(5), sampling=greedy(20)))
    for _ in range(2):
        subject.step_round(max_steps=4)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", interrupt)
        with pytest.raises(KeyboardInterrupt):
            getattr(subject, call)()
    subject.drain()
    assert group.sequences[0].finish_reason == "abort"
    assert one(subject, prompt(5), greedy(20)).token_ids == uncached_greedy(tiny_model(), prompt(5), 20)
    assert_idle(subject)


def test_a_request_of_another_engine_is_refused_and_harms_none():
    subject, other = shared_engine(max_pages=8), shared_engine()
    own, foreign = (e.submit(Request(prompt_token_ids=prompt(5), sampling=greedy(20))) for e in (subject, other))
    for each in (subject, other):
        each.step_round(max_steps=2)
        each.step_round(max_steps=2)
    for call, arguments in (("cancel", [foreign]), ("fork", [foreign, 0]), ("resample", [foreign, [0]])):
        with pytest.raises(ValueError, match=f"^{call} was given request '0' of another engine; "):
            getattr(subject, call)(*arguments)
    with pytest.raises(ValueError, match="^spill_to_host was given request '0' of another engine; "):
        subject.spill_to_host(foreign.sequences[0])
    for each, group in ((subject, own), (other, foreign)):
        each.drain()
        assert group.sequences[0].token_ids == uncached_greedy(tiny_model(), prompt(5), 20)
        assert_idle(each)


def test_cancellation_gives_all_pages_back_within_two_rounds():
    subject = shared_engine(max_seqs=8, max_step_tokens=8, max_round_steps=2)
    groups = [
        subject.submit(Request(prompt_token_ids=prompt(5, i), sampling=greedy(50, n=2), id=str(i))) for i in range(3)
    ]
    for _ in range(3):
        subject.step_round()
    subject.cancel(groups[0])
    subject.cancel(groups[2])
    assert {s.finish_reason for s in groups[0].sequences} == {"abort"}
    subject.drain()
    assert [s.finish_reason for s in groups[1].sequences] == ["length"] * 2
    assert groups[1].sequences[0].token_ids == uncached_greedy(tiny_model(), prompt(5, 1), 50)
    assert_idle(subject)


def test_a_submission_that_fails_leaves_no_request_behind(monkeypatch):
    """The failure comes when the request has been queued already; its caller holds nothing to cancel."""
    subject = shared_engine()
    other = subject.submit(Request(prompt_token_ids=prompt(4), sampling=greedy()))

    def fail(*_):
        raise AttributeError("a fault of the counters")

    with monkeypatch.context() as patch:
        patch.setattr(subject._stats, "on_submit", fail)
        with pytest.raises(AttributeError, match="a fault of the counters"):
            subject.submit(Request(prompt_token_ids=prompt(5), sampling=greedy(40, n=2), timeout_s=100))
    assert [group for group in subject._scheduler.requests() if not group.is_done] == [other]
    subject.drain()
    assert other.sequences[0].token_ids == uncached_greedy(tiny_model(), prompt(4), 8)
    assert one(subject, prompt(5), greedy()).token_ids == uncached_greedy(tiny_model(), prompt(5), 8)
    assert_idle(subject)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt_token_ids=[]), "empty"),
        (Request(prompt_token_ids=[1, 61]), r"prompt_token_ids\[1\]=61"),
        (Request(prompt_token_ids=[-1]), "outside the vocabulary"),
        (Request(prompt_token_ids=[1.5]), "not an integer"),
        (Request(prompt_token_ids=[True]), "not an integer"),
        (Request(), "one of prompt"),
        (Request(prompt="hi"), "needs a tokenizer"),
        (Request(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=65)), "max_tokens=65"),
        (Request(prompt_token_ids=[1] * 40, sampling=SamplingParams(max_tokens=20)), "10 pages|15 pages|pool has 8"),
        (Request(prompt_token_ids=[1], sampling=SamplingParams(n=9)), "engine.max_seqs"),
        (Request(prompt_token_ids=[1], sampling=SamplingParams(logprobs=21)), "max_logprobs"),
        (Request(prompt_token_ids=[1], sampling=SamplingParams(stop="x")), "stop strings need a tokenizer"),
    ],
)
def test_a_bad_request_is_refused_alone_and_says_why(request_, message):
    subject = shared_engine(max_pages=8)
    good = Request(prompt_token_ids=prompt(3), sampling=greedy(4))
    first, bad, last = subject.generate([good, request_, good])
    assert bad.completions == [] and re.search(message, bad.error), bad.error
    assert (
        first.completions[0].token_ids == last.completions[0].token_ids == uncached_greedy(tiny_model(), prompt(3), 4)
    )


@pytest.mark.slow
def test_samples_of_a_prompt_that_takes_several_uploads_wait_for_all_of_it():
    """Their slots may still show the end of an earlier sequence while the prompt is on its way."""
    subject = _with_small_uploads()
    short = Request(prompt_token_ids=prompt(3), sampling=greedy(2))
    long = Request(prompt_token_ids=prompt(40, 5), sampling=greedy(6, n=3))
    expected = uncached_greedy(tiny_model(), prompt(40, 5), 6)
    for _ in range(3):
        subject.generate([short] * 8)
        (output,) = subject.generate([long])
        assert [c.token_ids for c in output.completions] == [expected] * 3
    assert_idle(subject)


@pytest.mark.slow
def test_cancelling_a_prompt_that_is_still_being_uploaded_gives_its_slots_back():
    subject = _with_small_uploads()
    long = Request(prompt_token_ids=prompt(40, 5), sampling=greedy(6, n=3))
    for rounds in range(4):
        groups = [subject.submit(long) for _ in range(2)]
        for _ in range(rounds):
            subject.step_round()
        subject.cancel(groups[0])
        subject.drain()
        assert {s.finish_reason for s in groups[0].sequences} == {"abort"}
        assert [s.token_ids for s in groups[1].sequences] == [uncached_greedy(tiny_model(), prompt(40, 5), 6)] * 3
    assert_idle(subject)
    assert subject._scheduler.slots_of(groups[0]).num_free == subject.shapes.num_slots


@functools.lru_cache
def _with_small_uploads() -> InferenceEngine:
    """An engine whose uploads hold 16 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("levanter_infer.engine.sizes.MIN_UPLOAD_TOKENS", 16)
        return engine()


@contextlib.contextmanager
def interrupted_round(subject: InferenceEngine) -> Iterator[None]:
    """The round that is launched within takes the state, which is donated, and is interrupted before it returns one."""
    run = subject.programs.round

    def interrupted(*arguments):
        run(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subject.programs, "round", interrupted)
        yield


def test_an_interrupt_that_takes_the_state_with_it_leaves_the_engine_usable():
    subject = shared_engine()
    expected = one(subject, prompt(5), greedy()).token_ids
    with interrupted_round(subject):
        subject.generate([Request(prompt_token_ids=prompt(5), sampling=greedy())])
    assert one(subject, prompt(5), greedy()).token_ids == expected
    assert_idle(subject)


class InterruptedLaunch:
    """From then on the `count`-th call of a method that JAX calls while a round is launched is interrupted.

    With `compares`, JAX is in the middle of comparing the static fields of the model with those that the round was
    compiled for; else it takes an argument apart.
    """

    def __init__(self, monkeypatch, subject: InferenceEngine, count: int, *, compares: bool = True):
        left = iter(range(count))

        def interrupt(owner, name: str) -> None:
            original = getattr(owner, name)

            def interrupted(*arguments):
                if next(left, None) is None:
                    undo.undo()
                    raise KeyboardInterrupt
                return original(*arguments)

            undo.setattr(owner, name, interrupted)

        undo = pytest.MonkeyPatch()
        if compares:  # fields that are equal; of those that are the same object no comparison is asked
            config = copy.deepcopy(subject.model.config)
            monkeypatch.setattr(subject.runner, "model", dataclasses.replace(subject.model, config=config))
            for kind in (hax.Axis, DecoderConfig, RopeConfig):
                interrupt(kind, "__eq__")
        else:
            interrupt(hax.NamedArray, "tree_flatten")


def calls_of_tree_flatten(run) -> int:
    """How often JAX takes a `NamedArray` apart meanwhile."""
    calls, original = 0, hax.NamedArray.tree_flatten

    def counted(self):
        nonlocal calls
        calls += 1
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hax.NamedArray, "tree_flatten", counted)
        run()
    return calls


@pytest.mark.parametrize(("count", "compares"), [(0, True), (1, True), (3, True), (0, False), ("half", False)])
def test_an_interrupt_while_a_round_is_launched_comes_out_as_one(monkeypatch, count, compares):
    subject = shared_engine(max_pages=8)
    expected = one(subject, prompt(5), greedy()).token_ids
    requests = [Request(prompt_token_ids=prompt(5), sampling=greedy(20))] * 2
    count = calls_of_tree_flatten(lambda: subject.generate(requests)) // 2 if count == "half" else count
    InterruptedLaunch(monkeypatch, subject, count, compares=compares)
    with pytest.raises(KeyboardInterrupt):
        subject.generate(requests)
    assert one(subject, prompt(5), greedy()).token_ids == expected
    assert_idle(subject)


def test_an_interrupt_in_the_very_first_round_leaves_the_engine_usable():
    subject = engine()
    with interrupted_round(subject):
        subject.warmup()
    assert one(subject, prompt(5), greedy()).token_ids == uncached_greedy(tiny_model(), prompt(5), 8)
    assert_idle(subject)


def test_an_interrupted_launch_ends_what_was_submitted_and_leaves_the_engine_usable(monkeypatch):
    subject = shared_engine(max_pages=8)
    expected = one(subject, prompt(5), greedy()).token_ids
    groups = [subject.submit(Request(prompt_token_ids=prompt(5), sampling=greedy())) for _ in range(3)]
    InterruptedLaunch(monkeypatch, subject, 1)
    with pytest.raises(KeyboardInterrupt):
        subject.step_round()
    assert [group.sequences[0].finish_reason for group in groups] == ["abort"] * 3
    assert one(subject, prompt(5), greedy()).token_ids == expected
    assert_idle(subject)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request(prompt_token_ids=np.arange(70) % 60), "70 tokens"),
        (Request(prompt_token_ids=np.array([], np.int32)), "empty"),
        (Request(prompt_token_ids=5), "prompt_token_ids is int"),
        (Request(prompt_token_ids=[1], sampling={"n": 2}), "sampling is dict"),
    ],
)
def test_input_of_another_type_is_refused_alone(bad, message):
    good = Request(prompt_token_ids=np.asarray(prompt(3)), sampling=greedy(4, seed=np.int32(5)))
    first, refused = shared_engine(max_pages=8).generate([good, bad])
    assert message in refused.error
    assert first.completions[0].token_ids == uncached_greedy(tiny_model(), prompt(3), 4)


def test_a_reset_by_somebody_else_ends_what_was_in_progress():
    subject = shared_engine(max_pages=8)
    group = subject.submit(Request(prompt_token_ids=prompt(3), sampling=greedy(20, n=2)))
    (output,) = subject.generate(
        [Request(prompt_token_ids=prompt(4), sampling=greedy(20))], on_update=lambda *_: subject.reset()
    )
    assert output.completions[0].finish_reason == "abort"
    assert group.is_done
    assert_idle(subject)
