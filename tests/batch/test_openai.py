"""OpenAI's batch lines: what they mean here, and what is refused."""

import pytest

from levanter_infer.batch.openai import as_row

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def line(url: str, **body):
    return {"custom_id": "r1", "method": "POST", "url": url, "body": body}


@pytest.mark.parametrize(
    ("given", "row"),
    [
        (
            line(CHAT, model="m", messages=MESSAGES, max_completion_tokens=5, logprobs=True, top_logprobs=2, stop=None),
            {"id": "r1", "messages": MESSAGES, "sampling": {"max_tokens": 5, "logprobs": 2}},
        ),
        (
            line(CHAT, messages=MESSAGES, logprobs=False, temperature=0, stream=False),
            {"id": "r1", "messages": MESSAGES, "sampling": {"temperature": 0}},
        ),
        (
            line(TEXT, prompt="x", max_tokens=3, logprobs=1, best_of=2, n=2, seed=4, top_k=5),
            {
                "id": "r1",
                "prompt": "x",
                "sampling": {"n": 2, "seed": 4, "top_k": 5, "max_tokens": 3, "best_of": 2, "logprobs": 1},
            },
        ),
        (line(TEXT, prompt=[1, 2]), {"id": "r1", "sampling": {}, "prompt_token_ids": [1, 2]}),
        ({"prompt": "x"}, {"prompt": "x"}),
    ],
)
def test_line_becomes_row(given, row):
    assert as_row(given, ("m",)) == row


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (line(CHAT, model="gpt", messages=MESSAGES), "body.model is 'gpt'; expected one of m"),
        (line(CHAT, messages=MESSAGES, tools=[]), "unknown key body.tools"),
        (line(CHAT, messages=MESSAGES, temprature=0), "did you mean temperature"),
        (line(CHAT, messages=MESSAGES, stream=True), "stream"),
        (line(CHAT, messages=MESSAGES, max_tokens=1, max_completion_tokens=2), "both given"),
        (line(CHAT, messages=MESSAGES, top_logprobs=2), "without body.logprobs"),
        (line(CHAT, messages=MESSAGES, logprobs=2), "expected true or false"),
        (line(TEXT, messages=MESSAGES), "unknown key body.messages"),
        (line("/v1/embeddings", input="x"), "url is '/v1/embeddings'"),
        ({"custom_id": 3, "url": TEXT, "body": {}}, "custom_id is 3"),
        ({"custom_id": "a", "url": TEXT, "body": "x"}, "body is 'x'"),
        ({"custom_id": "a", "url": TEXT, "method": "GET", "body": {}}, "method is 'GET'"),
        ({"custom_id": "a", "url": TEXT, "body": {}, "prompt": "x"}, "unknown key prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        as_row(given, ("m",))
