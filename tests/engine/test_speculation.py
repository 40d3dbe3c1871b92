"""Speculative decoding changes how many steps a sequence takes, and nothing of what it gets."""

import dataclasses

import numpy as np
import pytest

from levanter_infer.checkpoints.load import load_model
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.kernels.tpu.sizes import Tile
from levanter_infer.kernels.tpu.tiling import Tiles
from tests.engine.comparisons import Blocks, Resampling, all_kinds, expected, make_engine, serve
from tests.family_cases import load
from tests.golden_cases import load_case
from tests.tiny_models import SIZES, tiny_model, windowed_model

VOCAB = 4
"""So few tokens repeat themselves, and what is drafted is sampled now and then."""
DRAFTS = dict(num_speculative_tokens=4, prompt_lookup_min=1)


def few_tokens(case: Request | Resampling) -> Request | Resampling:
    """A case of `comparisons` for a model of `VOCAB` tokens, with more that a sample may ask for."""
    request = case.request if isinstance(case, Resampling) else case
    ids = [token % VOCAB for token in request.prompt_token_ids or ()]
    if isinstance(case, Resampling):
        return dataclasses.replace(case, request=dataclasses.replace(request, prompt_token_ids=ids))
    sampling, number = case.sampling, sum(ids)
    if sampling.num_beams == 1:
        asked = (
            dict(stop_token_ids=[[1, 2, 3], [3, 3], [0, 2, 0]], min_tokens=min(2, sampling.max_tokens)),
            dict(repetition_penalty=1.3, presence_penalty=0.2, logprobs=3),
            dict(logit_bias={2: 1.5, 3: -3.0}, min_p=0.05),
            dict(allowed_token_ids=[0, 2]),
            dict(prompt_logprobs=1),
            {},
        )[number % 6]
        sampling = dataclasses.replace(sampling, **asked)
    else:
        sampling = dataclasses.replace(sampling, stop_token_ids=[stop[0] % VOCAB for stop in sampling.stop_token_ids])
    return dataclasses.replace(case, prompt_token_ids=ids, sampling=sampling)


def compare(count: int, config: dict, blocks: Blocks | None = None, **others) -> dict[str, int]:
    """Serve requests of all kinds with drafts, and compare bits with each alone without. Returns: what has happened."""
    cases = [few_tokens(case) for case in all_kinds(count, seed=3)]
    others = dict(family={"vocab_size": VOCAB}, blocks=blocks, with_beams=True) | others
    alone = make_engine(**{"max_seqs": 4, "page_size": 8, "prefix_cache": False, **others})
    own = {i: expected(alone, case, None) for i, case in enumerate(cases) if isinstance(case, Request)}
    done = dict.fromkeys(("draft_tokens", "accepted_tokens", "preemptions", "prefix_hits", "forks", "resampled"), 0)
    engine = make_engine(**{**others, **DRAFTS, **config})
    for i, (found, prefixes) in enumerate(serve(engine, cases)):
        assert found == (own[i] if i in own else expected(alone, cases[i], prefixes)), cases[i]
        done["resampled"] += prefixes is not None
    check_invariants(engine.state.decode)
    assert engine.stats()["pages_free"] == engine.shapes.num_pages
    for name in set(done) - {"resampled"}:
        done[name] += engine.stats()[name]
    assert alone.stats()["draft_tokens"] == 0
    return done


@pytest.mark.slow
@pytest.mark.parametrize("count, dtype", [(20, "bfloat16"), (40, "bfloat16"), (40, "float32")])
def test_bits_are_those_without_drafts(count, dtype):
    """Samples, beams, constraints, stops, penalties, scores, forks; cached, preempted, in chunks."""
    pool = dict(max_seqs=8, page_size=16, max_step_tokens=24, max_pages=10)
    done = compare(count, pool, dtype=dtype)
    assert all(done.values()) and done["accepted_tokens"] > count / 2, done


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_on_other_pages_are_those_without_drafts(dtype):
    configs = (
        dict(max_seqs=2, page_size=32, max_step_tokens=8),
        dict(max_seqs=16, page_size=8, max_round_steps=3, preempt="offload", max_pages=14),
    )
    for config in configs:
        cases = [few_tokens(case) for case in all_kinds(30, seed=4)]
        cases = [case for case in cases if isinstance(case, Request) and case.sampling.num_beams == 1]
        family = {"vocab_size": VOCAB}
        plain = make_engine(dtype, family=family, max_seqs=4, page_size=8)
        engine = make_engine(dtype, family=family, **{**config, **DRAFTS})
        for case, (found, _) in zip(cases, serve(engine, cases), strict=True):
            assert found == expected(plain, case, None)
        check_invariants(engine.state.decode)
        assert engine.stats()["accepted_tokens"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_bits_in_blocks_are_those_without_drafts(platform):
    """As on a TPU and a GPU: a draft may go on in the next block."""
    pool = dict(max_seqs=8, page_size=16, max_step_tokens=40)
    done = compare(20, pool, blocks=Blocks(platform=platform), dtype="bfloat16")
    assert done["accepted_tokens"] > 5, done


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_tokens_of_the_kernels_in_their_interpreters_are_those_without_drafts(platform):
    """In the default mode, where draft tokens take the kernels of decode tokens, in one page with one another."""
    tiles = Tiles(Tile(32, 2, 1), Tile(32, 2, 1, 8)) if platform == "tpu" else None
    matmul = "tpu_interpret" if platform == "tpu" else "xla"
    blocks = Blocks(platform, matmul=matmul, attention=f"{platform}_interpret", is_apart=False, tiles=tiles)
    sizes = dict(max_seqs=4, max_seq_len=64, page_size=16, max_step_tokens=32, numerics="default", blocks=blocks)
    model, rng = tiny_model(dtype="bfloat16", num_hidden_layers=1, vocab_size=VOCAB), np.random.default_rng(0)
    requests = [
        Request(
            prompt_token_ids=rng.integers(0, VOCAB, 5 + 3 * i).tolist(),
            sampling=SamplingParams(max_tokens=24, seed=i, temperature=float(i % 2)),
        )
        for i in range(5)
    ]
    found = []
    for drafts in ({}, DRAFTS):
        engine = make_engine(model=model, **sizes, **drafts)
        outputs = engine.generate(requests)
        found.append([output.completions[0].token_ids for output in outputs])
    assert found[0] == found[1] and engine.stats()["accepted_tokens"] > 20


@pytest.mark.slow
def test_windows_release_their_pages_with_drafts():
    model, sizes = windowed_model((8, None, 5)), dict(max_seq_len=96, page_size=4, max_seqs=4)
    prompts = [np.random.default_rng(i).integers(0, 5, 9 + 7 * i).tolist() for i in range(4)]
    sampling = SamplingParams(max_tokens=40, seed=1, logit_bias={token: 30.0 for token in range(3)})
    found = []
    for drafts in ({}, DRAFTS):
        engine = InferenceEngine(model, config=EngineConfig(numerics="batch_invariant", **sizes, **drafts))
        outputs = engine.generate([Request(prompt_token_ids=ids, sampling=sampling) for ids in prompts])
        found.append([output.completions[0].token_ids for output in outputs])
        check_invariants(engine.state.decode)
    assert found[0] == found[1] and engine.stats()["accepted_tokens"] > 10


def test_a_text_that_repeats_itself_takes_fewer_steps():
    """Rounds end with their steps, and the ring holds what these sample."""
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**SIZES, num_speculative_tokens=3, max_round_steps=7))
    ids = [5, 6, 7, 8] * 4
    sampling = SamplingParams(max_tokens=44, logit_bias={5: 50.0}, temperature=0.0)
    (output,) = engine.generate([Request(prompt_token_ids=ids, sampling=sampling)])
    (completion,) = output.completions
    stats = engine.stats()
    assert len(completion.token_ids) == 44 == stats["generated_tokens"]
    assert stats["steps"] == stats["prompt_steps"] + 44 - 1 - stats["accepted_tokens"]
    assert stats["accepted_tokens"] > 20 and stats["prompt_steps"] == 1
    assert stats["programs"] == {**stats["programs"], "round": 1}


def test_what_has_a_state_has_no_drafts(tmp_path):
    with pytest.raises(ValueError, match=r"num_speculative_tokens=2: this model remembers a state of fixed size"):
        model = load(load_case("lfm2"), tmp_path)
        InferenceEngine(model, config=EngineConfig(num_speculative_tokens=2))
    with pytest.raises(ValueError, match="num_speculative_tokens=2 and a logits_mod with a memory"):
        InferenceEngine(
            tiny_model(),
            config=EngineConfig(**SIZES, num_speculative_tokens=2),
            logits_mod=lambda logits, history, memory: (logits, memory + 1),
            logits_mod_init=0,
        )


@pytest.mark.slow
def test_a_function_without_a_memory_sees_the_draft():
    def never_twice(logits, history, memory):
        few = logits.at[4:].set(-np.inf)
        return few.at[history.tokens[history.seq_len - 1]].set(-np.inf), memory

    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    request = Request(prompt_token_ids=[3, 1, 2, 3, 1, 2, 3, 1], sampling=sampling)
    found = []
    for drafts in ({}, DRAFTS):
        config = EngineConfig(**{**SIZES, **drafts, "page_size": 16})
        engine = InferenceEngine(tiny_model(), config=config, logits_mod=never_twice)
        found.append(engine.generate([request])[0].completions[0].token_ids)
    assert found[0] == found[1] and engine.stats()["accepted_tokens"] > 0


def test_constraints_go_on_behind_their_drafts():
    """Each row of a draft has the mask of the state that the tokens before it lead to."""
    model, tokenizer = load_model("models/tiny")
    sampling = dict(max_tokens=90, logprobs=0, seed=2)
    requests = [
        Request("17+25=", sampling=SamplingParams(regex=r'(\{"a": [0-9]{1,2}, "b": [x-z]+\}\n){4}', **sampling)),
        Request("sort 4 1 3:", sampling=SamplingParams(regex=r"(([0-4]{3}|[5-9]{2}) ){12}", n=3, **sampling)),
        Request("Once upon", sampling=SamplingParams(choice=["a dog and a dog", "a dog and a cat"], **sampling)),
        Request("Once upon", sampling=SamplingParams(grammar='start: "no "* "yes"', **sampling)),
        Request("12+30= 42\n12+30=", sampling=SamplingParams(**sampling)),
    ]
    found = []
    for drafts in ({}, DRAFTS):
        config = EngineConfig(max_seqs=8, max_seq_len=256, numerics="batch_invariant", **drafts)
        engine = InferenceEngine(model, tokenizer, config, constraints=True)
        outputs = engine.generate(requests)
        assert all(output.error is None for output in outputs)
        found.append([(c.token_ids, c.logprobs.tobytes(), c.finish_reason) for o in outputs for c in o.completions])
    assert found[0] == found[1]
    assert engine.stats()["accepted_tokens"] > 50


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(num_speculative_tokens=33), "num_speculative_tokens=33: expected an integer of at most 32"),
        (dict(num_speculative_tokens=-1), "num_speculative_tokens=-1: expected an integer of at least 0"),
        (dict(prompt_lookup_max=3), "prompt_lookup_max=3: there is no prompt lookup without"),
        (
            dict(num_speculative_tokens=2, prompt_lookup_min=5, prompt_lookup_max=3),
            "prompt_lookup_min=5 exceeds engine.prompt_lookup_max=3",
        ),
        (dict(num_speculative_tokens=2, page_size=1), "page_size=1: a draft ends with its page"),
        (
            dict(num_speculative_tokens=2, prompt_lookup_max=40),
            "prompt_lookup_max=40: expected a whole number of at most",
        ),
        (dict(num_speculative_tokens=2, prompt_lookup_min=0), "prompt_lookup_min=0: expected a whole number"),
        (dict(prompt_lookup_num_tokens=4), "num_speculative_tokens"),
    ],
)
def test_what_it_cannot_be_is_refused(config, message):
    with pytest.raises((ValueError, TypeError), match=message):
        EngineConfig(**config)


def test_the_least_match_is_at_most_the_most():
    for least, most, pair in ((None, None, (3, 5)), (None, 2, (2, 2)), (6, None, (6, 6)), (1, 3, (1, 3))):
        config = EngineConfig(num_speculative_tokens=5, prompt_lookup_min=least, prompt_lookup_max=most)
        assert config.prompt_lookup == pair
