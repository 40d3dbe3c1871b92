"""Beam search through the engine: HF transformers' hypotheses and scores, in any company and through preemption."""

import equinox as eqx
import numpy as np
import pytest

from levanter_infer.checkpoints.load import load_model
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from tests.beam_cases import CASES, MAX_TOKENS, MODEL, PROMPT_LENS, answers, prompt
from tests.golden_cases import load_case, write_checkpoint

PAGES = 20
"""What the largest of the searches may need, alone."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    model, _ = load_model(write_checkpoint(tmp_path_factory.mktemp("model"), load_case(MODEL)), dtype="float32")
    config = EngineConfig(max_seqs=6, max_seq_len=32, page_size=4, max_pages=PAGES, max_step_tokens=16)
    return InferenceEngine(model, config=config)


@pytest.fixture
def engine(shared):
    yield shared
    check_invariants(shared.state.decode)
    assert shared.stats()["pages_free"] == PAGES and shared._slots.is_idle


def request(name: str, length: int, **changes) -> Request:
    case = CASES[name]
    params = {
        "num_beams": case.num_beams, "n": case.num_beams, "length_penalty": case.length_penalty,
        "early_stopping": case.early_stopping, "repetition_penalty": case.repetition_penalty,
        "min_tokens": case.min_tokens, "stop_token_ids": case.ends, "max_tokens": MAX_TOKENS,
    }  # fmt: skip
    return Request(prompt_token_ids=prompt(length), sampling=SamplingParams(**{**params, **changes}))


def assert_found(completions, expected, ends):
    assert [c.token_ids for c in completions] == [found["tokens"] for found in expected]
    scores = np.asarray([found["score"] for found in expected])
    assert np.allclose([c.score for c in completions], scores, rtol=1e-4, atol=1e-5)
    assert [c.finish_reason for c in completions] == [
        "stop" if c.token_ids[-1] in ends else "length" for c in completions
    ]


def test_hypotheses_and_scores_are_those_of_hf_for_all_searches_together(engine):
    asked = [(name, i) for name in CASES for i in range(len(PROMPT_LENS))]
    outputs = engine.generate([request(name, PROMPT_LENS[i]) for name, i in asked])
    expected = answers()
    for (name, i), output in zip(asked, outputs, strict=True):
        assert output.error is None, output.error
        assert_found(output.completions, expected[name][i], CASES[name].ends)
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["copied_pages"] > 0
