"""`return_routed_experts`: the experts of each token, as the plain forward chooses them."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray

from levanter_infer.axes import POSITION
from levanter_infer.columns import Columns, encode_row
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.pure import generate
from levanter_infer.engine.request import Request
from levanter_infer.layers.indexer import Choice
from levanter_infer.models.decoder import PLAIN
from tests.tiny_models import tiny_model

LAYERS, CHOSEN = 3, 2
FAMILY = dict(
    model_type="qwen2_moe", num_hidden_layers=4, mlp_only_layers=[1], num_experts=7, num_experts_per_tok=CHOSEN,
    moe_intermediate_size=12, shared_expert_intermediate_size=8, norm_topk_prob=True,
)  # fmt: skip
SIZES = dict(max_seqs=4, max_seq_len=96, page_size=4, max_step_tokens=16, max_pages=24)
ASKED = SamplingParams(max_tokens=9, temperature=1.0, return_routed_experts=True)


@functools.cache
def model():
    return tiny_model.__wrapped__(**FAMILY)  # a list cannot be a key of its cache


@functools.cache
def engine() -> InferenceEngine:
    return InferenceEngine(model(), config=EngineConfig(**SIZES), routing=True)


def routes(tokens: list[int]) -> np.ndarray:
    """The oracle: the experts of every token in the plain forward, [token, expert layer, chosen]."""
    padded = tokens + [0] * (96 - len(tokens))
    return np.asarray(_plain(model(), jnp.asarray(padded, jnp.int32)))[: len(tokens)]


@jax.jit
def _plain(model, tokens):
    named = hax.named(tokens, (POSITION,))
    positions = hax.arange(named.axes[0], dtype=jnp.int32)
    inputs = model._inputs(positions, PLAIN, 96, None)
    x, seen = model._embed(named, positions, None), []
    for number, block in enumerate(model.config.blocks):
        stack = next(i for i, stack in enumerate(model.config.stacks) if number in stack.layers)
        at = model.config.stacks[stack].layers.index(number)
        layer = jax.tree.map(
            lambda part, at=at: NamedArray(part.array[at], part.axes[1:]),
            model.stacks[stack],
            is_leaf=lambda part: isinstance(part, NamedArray),
        )
        x, _ = layer(x, block, functools.partial(layer.attention.dense, inputs=inputs(block, Choice())), seen.append)
    return jnp.stack(seen, axis=1)


def check(output) -> None:
    for completion in output.completions:
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        found = completion.routed_experts
        assert found.dtype == np.int16 and found.shape == (len(tokens) - 1, LAYERS, CHOSEN)
        # Of two equal probabilities either may be first, so sets are compared
        assert (np.sort(found) == np.sort(routes(tokens[:-1]))).all()
        assert found.any()


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    common = rng.integers(0, 61, 21).tolist()
    return [common + rng.integers(0, 61, int(rng.integers(1, 20))).tolist() for _ in range(count)]


def test_experts_are_those_of_the_plain_forward():
    """Experts of prompts in chunks that begin alike, of several samples, preempted, beside requests that do not ask."""
    given = prompts(10)
    requests = [
        Request(prompt_token_ids=ids, sampling=SamplingParams(
            max_tokens=5 + 3 * i, n=1 + i % 3, return_routed_experts=i % 4 != 3
        ))
        for i, ids in enumerate(given)
    ]  # fmt: skip
    before = engine().stats()["preemptions"]
    for output, request in zip(engine().generate(requests), requests, strict=True):
        assert output.error is None, output.error
        if request.sampling.return_routed_experts:
            check(output)
            assert output.num_cached_tokens == 0
        else:
            assert all(completion.routed_experts is None for completion in output.completions)
    assert engine().stats()["preemptions"] > before


def test_one_token_prompts_and_ends_at_once():
    for prompt in ([5], [5, 6, 7]):
        sampling = SamplingParams(max_tokens=1, n=2, return_routed_experts=True)
        (output,) = engine().generate([Request(prompt_token_ids=prompt, sampling=sampling)])
        assert [c.routed_experts.shape for c in output.completions] == [(len(prompt), LAYERS, CHOSEN)] * 2
        check(output)


@pytest.mark.slow
def test_nothing_is_recorded_before_a_request_asks():
    fresh = InferenceEngine(model(), config=EngineConfig(**SIZES))
    (plain,) = fresh.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0))
    assert fresh.state.routes is None and fresh.shapes.routing is None
    (asked,) = fresh.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0, return_routed_experts=True))
    assert fresh.state.routes is not None and asked.completions[0].token_ids == plain.completions[0].token_ids
    check(asked)


def test_a_sample_that_is_aborted_has_none():
    request = engine().submit(Request(prompt_token_ids=prompts(1)[0], sampling=ASKED))
    engine().step_round(max_steps=2)
    engine().cancel(request)
    engine().drain()
    assert request.is_done and request.output().completions[0].routed_experts is None


def test_rows_have_a_column():
    (output,) = engine().generate([Request(prompt_token_ids=[1, 2, 3], sampling=ASKED)])
    (row,) = Columns(ASKED).rows(output)
    assert row["routed_experts"] == output.completions[0].routed_experts.tolist() and encode_row(row)
    (failed,) = engine().generate([Request(prompt_token_ids=[], sampling=ASKED)])
    assert next(Columns(ASKED).rows(failed))["routed_experts"] == []
    assert "routed_experts" not in Columns(SamplingParams()).names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(return_routed_experts=1), "return_routed_experts=1: expected true or false"),
        (dict(return_routed_experts=True, num_beams=2), "return_routed_experts with num_beams=2"),
        (dict(enable_return_routed_experts=True), "nearest known one is 'return_routed_experts'"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**changes)


def test_a_model_without_experts_refuses_the_request():
    dense = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES))
    (output,) = dense.generate([Request(prompt_token_ids=[1, 2], sampling=ASKED)])
    assert output.error == "return_routed_experts: the model has no experts; leave it out"
    with pytest.raises(ValueError, match="return_routed_experts is for InferenceEngine"):
        generate(model(), jnp.asarray([[1, 2]]), jnp.asarray([2]), ASKED)


def test_samples_that_go_on_from_others_are_refused():
    request = engine().submit(Request(prompt_token_ids=[1, 2, 3], sampling=ASKED))
    with pytest.raises(ValueError, match="has return_routed_experts"):
        engine().fork(request, 0)
    engine().drain()
    check(request.output())
