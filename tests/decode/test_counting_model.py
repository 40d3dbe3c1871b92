"""Whole rounds with a model that counts: its next token is a sum over all tokens before it and where they stand.

It reads them back from the pages as attention would, so that one wrong page, position, length, copy or row changes what
is sampled, and it compiles in a fraction of a real model's time.
"""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from levanter_infer.axes import EMBED, HEAD_SIZE, KV_HEADS, ROW, TOKEN, VOCAB
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.cache import Cache
from levanter_infer.decode import speculation, step
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.decode.sampling import SampleOutput
from levanter_infer.decode.shapes import SpeculationShapes
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.kernels.xla.backend import XLA
from levanter_infer.layers.shard_axis import Vocabulary
from levanter_infer.models.config import DecoderConfig
from tests.tiers import nightly_but
from tests.tiny_models import tiny_model, with_mixers

WORDS, LAYERS = 97, 2
BAD = 96
"""A token behind which the logits are NaN."""


class CountingModel(eqx.Module):
    """Stores every token with its position, in each layer differently."""

    embed: Axis = eqx.field(static=True)
    config: DecoderConfig = eqx.field(static=True)
    dtype = activation_dtype = jnp.dtype(jnp.float32)
    backend = XLA
    vocab = Vocabulary(WORDS)

    @staticmethod
    def init() -> "CountingModel":
        config = tiny_model(num_hidden_layers=LAYERS, vocab_size=WORDS).config
        config = with_mixers(dataclasses.replace(config, hidden_size=2), num_heads=1, num_kv_heads=1, head_dim=2)
        return CountingModel(embed=Axis(EMBED, 2), config=config)

    def prepare(self, backend, *, donate: bool = False) -> "CountingModel":
        return self

    def hidden(self, batch: PageBatchInfo, cache: Cache, attention) -> tuple[NamedArray, Cache]:
        """The count after each token, and whether there is something bad in it."""
        tokens, positions, (kv,) = batch.tokens.array, batch.positions.array, cache.pools
        for layer in range(LAYERS):
            stored = jnp.stack([tokens + layer, positions], axis=1).astype(jnp.float32)[:, None, :]
            stored = hax.named(stored, (TOKEN, KV_HEADS, HEAD_SIZE))
            kv = kv.write(jnp.int32(layer), batch, stored, stored)
        bounds, lens, pages = batch.cu_q_lens.array, batch.seq_lens.array, batch.page_indices.array
        token = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        row = jnp.clip(jnp.searchsorted(bounds[1:], token, side="right"), 0, lens.shape[0] - 1)
        last = lens[row] - bounds[row + 1] + token  # the place of each token in its sequence
        read = kv.pages.array.at[:, pages].get(mode="fill", fill_value=0)[:, :, :, :, 0]
        read = read.reshape(LAYERS, lens.shape[0], -1, 2)[:, row]
        seen = jnp.arange(read.shape[2], dtype=jnp.int32)[None, :] <= last[:, None]
        words = read[..., 0] - jnp.arange(LAYERS, dtype=jnp.float32)[:, None, None]
        place = read[..., 1] + jnp.arange(LAYERS, dtype=jnp.float32)[:, None, None]
        count = jnp.sum(jnp.where(seen[None], (words + 1) * (place % 13 + 1), 0), axis=(0, 2)) % WORDS
        states = jnp.stack([count, (tokens == BAD).astype(jnp.float32)], 1)
        return hax.named(states, (TOKEN, self.embed)), cache.with_pool(0, kv)

    def logits(self, hidden: NamedArray, num_rows=None) -> NamedArray:
        count, bad = hidden.array[:, 0].astype(jnp.int32), hidden.array[:, 1]
        logits = jax.nn.one_hot(count, WORDS, dtype=jnp.float32) * 50
        return hax.named(jnp.where(bad[:, None] > 0, jnp.nan, logits), (ROW, VOCAB))


def following(tokens: list[int]) -> int:
    return sum((t + 1) * ((p + layer) % 13 + 1) for layer in range(LAYERS) for p, t in enumerate(tokens)) % WORDS


def continuation(prompt: list[int], sampling: SamplingParams) -> tuple[list[int], str]:
    """The tokens that the model generates, and why it ends."""
    tokens, stops = list(prompt), [list(stop) for stop in sampling.stop_token_ids]
    while len(tokens) - len(prompt) < sampling.max_tokens:
        if tokens[-1] == BAD:
            return tokens[len(prompt) :], "error"
        tokens.append(following(tokens))
        made = tokens[len(prompt) :]
        if len(made) >= sampling.min_tokens and any(made[-len(stop) :] == stop for stop in stops):
            return made, "stop"
    return tokens[len(prompt) :], "length"


class Picked(NamedTuple):
    output: SampleOutput

    def sampled(self) -> SampleOutput:
        return self.output


def pick(logits, rows, history, *, max_top, stats, vocab, backend, modified=None, masks=None) -> Picked:
    """`sampling.choose` at temperature 0, which also depends on the history of each row."""
    assert modified is None and masks is None
    lens = history.seq_lens
    is_wrong = (history.positions != lens) | (history.prompt_lens > lens) | (history.slot_ids < 0)
    token = jnp.argmax(logits, axis=1).astype(jnp.int32) + is_wrong.astype(jnp.int32)
    finite = jnp.isfinite(logits).all(axis=1)
    logprob = jnp.where(finite, -token.astype(jnp.float32), jnp.nan)
    top = jnp.broadcast_to(token[:, None], (token.shape[0], max_top))
    top_logprobs = jnp.broadcast_to(logprob[:, None], top.shape)
    return Picked(SampleOutput(token, logprob, 2 * logprob, top, top_logprobs, finite, finite))


def foreseen(tokens: jax.Array, lens: jax.Array, sizes: SpeculationShapes) -> tuple[jax.Array, jax.Array]:
    """`speculation.lookup` that knows what the model generates, and is wrong now and then."""
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    weight = sum((place + layer) % 13 + 1 for layer in range(LAYERS))
    known = place[None, :] < lens[:, None]
    count = jnp.sum(jnp.where(known, (tokens + 1) * weight[None, :], 0), axis=1) % WORDS
    draft = []
    for ahead in range(sizes.num_tokens):
        draft.append(jnp.where((count + lens) % 5 == 0, (count + 1) % WORDS, count))
        count = (count + (draft[-1] + 1) * weight.at[lens + ahead].get(mode="clip")) % WORDS
    return jnp.where(lens % 7 > 0, 1 + lens % 9, 0), jnp.stack(draft, axis=1)


@functools.lru_cache
def make_engine(drafts: int = 0) -> InferenceEngine:
    """Args: drafts: `engine.num_speculative_tokens`."""
    config = EngineConfig(
        max_seqs=4, page_size=4, max_pages=13, max_step_tokens=9, prefix_cache=True, max_round_steps=7, max_seq_len=48,
        attention="xla", matmul="xla", num_speculative_tokens=drafts,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "choose", pick)
        patch.setattr(speculation, "lookup", foreseen)
        patch.setattr("levanter_infer.engine.engine.from_levanter", lambda model, *_: model)  # it is one as it is
        patch.setattr("levanter_infer.engine.sizes.MIN_UPLOAD_TOKENS", 12)  # long prompts come in pieces
        engine = InferenceEngine(CountingModel.init(), config=config, scoring=True)
        engine.warmup()
    return engine


def random_requests(rng: np.random.Generator) -> list[Request]:
    common = rng.integers(0, BAD, 17).tolist()
    requests = []
    for _ in range(rng.integers(1, 10)):
        prompt = common[: rng.integers(18)] if rng.random() < 0.6 else []
        prompt = prompt + rng.integers(0, BAD, rng.integers(1, 16)).tolist()
        if rng.random() < 0.1:
            prompt.append(BAD)
        made, _ = continuation(prompt, SamplingParams(max_tokens=15))
        stops = []
        if len(made) > 4 and rng.random() < 0.4:
            place = int(rng.integers(1, len(made)))
            stops = [[*prompt[-1:], made[0]], made[max(place - int(rng.integers(1, 3)), 0) : place + 1]]
        max_tokens = int(rng.integers(1, 16))
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, n=int(rng.integers(1, 4)), stop_token_ids=stops, logprobs=1,
            min_tokens=int(rng.integers(0, max_tokens)) if stops and len(stops[1]) > 1 and rng.random() < 0.3 else 0,
        )  # fmt: skip
        requests.append(Request(prompt_token_ids=prompt, sampling=sampling))
    return requests


@pytest.mark.parametrize("drafts", nightly_but([5], [0, 5]))
def test_every_sequence_counts_its_own_tokens(drafts):
    engine, rng, reasons = make_engine(drafts), np.random.default_rng(1), set()
    for _ in range(30):
        requests = random_requests(rng)
        for request, output in zip(requests, engine.generate(requests), strict=True):
            expected = continuation(list(request.prompt_token_ids), request.sampling)
            for c in output.completions:
                assert (c.token_ids, c.finish_reason) == expected
                assert c.logprobs.tolist() == [-token for token in c.token_ids]
                assert c.processed_logprobs.tolist() == [-2 * token for token in c.token_ids]
                assert c.top_logprobs == [{token: -token} for token in c.token_ids]
            assert len(output.completions) == request.sampling.n
            reasons.add(expected[1])
        check_invariants(engine.state.decode)
        assert engine.stats()["pages_free"] == engine.shapes.num_pages
    stats = engine.stats()
    assert reasons == {"length", "stop", "error"} and stats["forks"] > 20 and stats["copied_pages"] > 20
    assert stats["preemptions"] > 20 and stats["prefix_hits"] > 50
    assert (stats["accepted_tokens"] > 100) == (stats["draft_tokens"] > stats["accepted_tokens"]) == (drafts > 0)


@pytest.mark.parametrize("drafts", [0, 5])
def test_cancelled_sequences_leave_the_others_alone(drafts):
    engine, rng = make_engine(drafts), np.random.default_rng(2)
    for _ in range(8):
        requests = random_requests(rng)
        groups = [engine.submit(request) for request in requests]
        for _ in range(int(rng.integers(1, 5))):
            engine.step_round(max_steps=2)
        for group in groups[::2]:
            engine.cancel(group)
        engine.drain()
        for request, group in list(zip(requests, groups, strict=True))[1::2]:
            expected = continuation(list(request.prompt_token_ids), request.sampling)
            assert [(s.token_ids, s.finish_reason) for s in group.sequences] == [expected] * request.sampling.n
        check_invariants(engine.state.decode)
        assert engine.stats()["pages_free"] == engine.shapes.num_pages


def test_prompts_are_scored_by_the_count():
    """In any batch composition, over prompt chunks and pages, found and computed."""
    engine, rng = make_engine(), np.random.default_rng(3)
    common, texts = rng.integers(0, BAD, 18).tolist(), []
    for _ in range(12):
        tokens = common[: rng.integers(1, 19)]
        for _ in range(rng.integers(1, 24)):
            tokens = [*tokens, following(tokens) if rng.random() < 0.5 else int(rng.integers(0, BAD))]
        texts.append(tokens)
    for tokens, scores in zip(texts, engine.score(texts), strict=True):
        expected = [0.0 if token == following(tokens[: i + 1]) else -50.0 for i, token in enumerate(tokens[1:])]
        np.testing.assert_allclose(scores, expected, atol=1e-3)
    check_invariants(engine.state.decode)
    assert engine.stats()["pages_free"] == engine.shapes.num_pages
