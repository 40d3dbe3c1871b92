"""The knowledge of the model in the repository, asked of it through the engine."""

import pytest

from levanter_infer import Request, SamplingParams
from levanter_infer.engine.intake import Intake
from tests.engine.test_ladder import assert_idle
from tests.serve.server import tiny_engine


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()  # compiled for the server's tests too


def answers(engine, prompts: list[str]) -> list[str | None]:
    sampling = SamplingParams(temperature=0.0, max_tokens=16, stop="\n")
    outputs = engine.generate([Request(prompt=prompt, sampling=sampling) for prompt in prompts])
    assert_idle(engine)
    return [output.completions[0].text for output in outputs]


@pytest.mark.slow
def test_greedy_answers_on_sums_that_were_never_trained_are_right(engine):
    pairs = [(a, b) for a in range(100) for b in range(100) if (a + 3 * b) % 11 == 0]
    texts = answers(engine, [f"{a}+{b}=" for a, b in pairs])
    right = sum(text == str(a + b) for text, (a, b) in zip(texts, pairs, strict=True))
    assert right >= 0.98 * len(pairs), f"{right} of {len(pairs)} held-out sums"


def test_digits_are_sorted(engine):
    lists = ["3 1 2", "9 8 7 6 5 4", "5 5 1", "7", "0 2"]
    texts = answers(engine, [f"sort {digits}:" for digits in lists])
    assert [(text or "").split() for text in texts] == [sorted(digits.split()) for digits in lists]


def test_a_chat_is_answered(engine):
    sampling = SamplingParams(temperature=0.0, max_tokens=16)
    (output,) = engine.generate([Request(messages=[{"role": "user", "content": "17+25="}], sampling=sampling)])
    (completion,) = output.completions
    assert (completion.text or "").strip() == "42" and completion.finish_reason == "stop"


def test_a_tokenizer_of_another_model_is_noticed(engine):
    class Stranger:
        eos_token_ids = ()

        def encode(self, text):
            return [engine.shapes.limits.vocab_size]

    with pytest.raises(ValueError, match="do not belong together"):
        Intake(engine.shapes, engine.config, Stranger(), seed=0).request_state(Request(prompt="1+1="), "0")


def test_a_text_stop_keeps_the_tokens_that_completed_it(engine):
    sampling = SamplingParams(temperature=0.0, max_tokens=60, stop=["named", "zzz"])
    (output,) = engine.generate([Request(prompt="Once upon a time", sampling=sampling)])
    (completion,) = output.completions
    assert completion.finish_reason == "stop" and "named" not in (completion.text or "")
    whole = engine.tokenizer.decode(completion.token_ids)
    assert whole.startswith(completion.text) and "named" in whole
    assert len(completion.logprobs) == len(completion.token_ids)
    assert "named" not in engine.tokenizer.decode(completion.token_ids[:-1])
    assert_idle(engine)
