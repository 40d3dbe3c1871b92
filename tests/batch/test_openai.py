"""OpenAI's batch lines: what they mean here, what is refused, and results that OpenAI's own types read."""

import importlib
import json

import numpy as np
import pytest

from levanter_infer.batch.input import Input
from levanter_infer.batch.job import count
from levanter_infer.batch.openai import ResultLines, as_row
from levanter_infer.columns import encode_row
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import NO_TOKEN, NOT_FINITE, Completion, Request, RequestOutput
from levanter_infer.io.prompts import Row, RowParser

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def called(arguments):
    """A chat with a call; OpenAI's messages hold its arguments as JSON text, which chat templates do not read."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]


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
            line(CHAT, messages=MESSAGES, logprobs=False, top_logprobs=0, temperature=0, stream=False),
            {"id": "r1", "messages": MESSAGES, "sampling": {"temperature": 0, "logprobs": None}},
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
        (line(TEXT, prompt=["x"]), {"id": "r1", "sampling": {}, "prompt": "x"}),
        (line(TEXT, prompt=[[1, 2]]), {"id": "r1", "sampling": {}, "prompt_token_ids": [1, 2]}),
        ({"prompt": "x"}, {"prompt": "x"}),
        (line(CHAT, messages=PARTS), {"id": "r1", "messages": PARTS, "sampling": {}}),
        (
            line(CHAT, messages=MESSAGES, tools=TOOLS, tool_choice="auto", chat_template_kwargs={"a": 1}),
            {"id": "r1", "messages": MESSAGES, "sampling": {}, "tools": TOOLS, "chat_template_kwargs": {"a": 1}},
        ),
        (line(CHAT, messages=MESSAGES, tools=[]), {"id": "r1", "messages": MESSAGES, "sampling": {}}),
        *(
            (line(CHAT, messages=called(given)), {"id": "r1", "messages": called(read), "sampling": {}})
            for given, read in [
                ('{"city": "Köln", "n": 1.5}', {"city": "Köln", "n": 1.5}),
                ("", {}),
                ({"a": None}, {"a": None}),
                ("[1]", "[1]"),
                ("{a", "{a"),
                (None, None),
            ]
        ),
        (
            line(CHAT, messages=[{"role": "assistant", "tool_calls": ["x", {"function": 3}]}, 4]),
            {"id": "r1", "messages": [{"role": "assistant", "tool_calls": ["x", {"function": 3}]}, 4], "sampling": {}},
        ),
    ],
)
def test_line_becomes_row(given, row):
    assert as_row(given, ("m",)) == row


WITHOUT_EFFECT = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "stream": False,
    "stream_options": {"include_usage": True},
    "n": 1,
    "prediction": None,
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "temperature": None,
    "max_tokens": None,
    "logprobs": None,
    "seed": None,
}
OF_CHATS = {
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tool_choice": "none",
    "top_logprobs": None,
    "tools": None,
    "audio": None,
    "function_call": None,
    "reasoning_effort": None,
}


@pytest.mark.parametrize(
    "given",
    [line(CHAT, messages=MESSAGES, **WITHOUT_EFFECT, **OF_CHATS), line(TEXT, prompt="x", **WITHOUT_EFFECT, echo=False)],
)
def test_parameters_of_official_clients_that_change_nothing_are_accepted(given):
    row = as_row(given, ())
    assert set(row) <= {"id", "messages", "prompt", "sampling"} and row["sampling"] == {"n": 1}
    assert RowParser(SamplingParams()).row(row, "0", "here").error is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (line(CHAT, model="gpt", messages=MESSAGES), "body.model is 'gpt'; expected one of m"),
        (line(CHAT, messages=MESSAGES, toolz=[]), "unknown key body.toolz; did you mean tools"),
        (line(CHAT, messages=MESSAGES, tool_choice="required"), "body.tool_choice is 'required', which the chat"),
        (line(CHAT, messages=MESSAGES, tool_choice="none", tools=TOOLS), "body.tool_choice is 'none'"),
        (line(CHAT, messages=MESSAGES, response_format={"type": "xml"}), "body.response_format is .*json_object"),
        (
            line(CHAT, messages=MESSAGES, response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
            "body.response_format is .*json_object",
        ),
        (line(CHAT, messages=MESSAGES, reasoning_effort="high"), "body.reasoning_effort is 'high', which a batch"),
        (line(CHAT, messages=MESSAGES, audio={}), "body.audio is {}, which a batch job cannot do; expected null"),
        (line(CHAT, messages=MESSAGES, modalities=["audio"]), "body.modalities is"),
        (line(CHAT, messages=MESSAGES, temprature=0), "did you mean temperature"),
        (line(CHAT, messages=MESSAGES, temprature=None), "did you mean temperature"),
        (
            line(CHAT, messages=MESSAGES, stream=True),
            "body.stream is True, which a batch job cannot do; expected false or null",
        ),
        (line(CHAT, messages=MESSAGES, stream=0), "body.stream is 0"),
        (line(CHAT, messages=MESSAGES, max_tokens=1, max_completion_tokens=2), "both given"),
        (line(CHAT, messages=MESSAGES, top_logprobs=2), "without body.logprobs"),
        (line(CHAT, messages=MESSAGES, logprobs=2), "expected true or false"),
        (line(TEXT, messages=MESSAGES), "unknown key body.messages"),
        (line(TEXT, prompt=["x", "y"]), "body.prompt is a list of 2 prompts; expected one prompt a line"),
        (line(TEXT, prompt=[[1], [2]]), "body.prompt is a list of 2 prompts; expected one prompt a line"),
        (line(TEXT, prompt="x", echo=True), "body.echo is True"),
        (line(TEXT, prompt="x", suffix="y"), "body.suffix is 'y'"),
        (line("/v1/embeddings", input="x"), "url is '/v1/embeddings'"),
        ({"custom_id": 3, "url": TEXT, "body": {}}, "custom_id is 3"),
        ({"custom_id": "x" * 5000, "url": TEXT, "body": {}}, "custom_id is 'xxx.*expected a string of 1 to 4096"),
        ({"custom_id": "a", "url": TEXT, "body": "x"}, "body is 'x'"),
        ({"custom_id": "a", "url": TEXT, "method": "GET", "body": {}}, "method is 'GET'"),
        ({"custom_id": "a", "url": TEXT, "body": {}, "prompt": "x"}, "unknown key prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        as_row(given, ("m",))


def test_list_of_strings_is_never_taken_for_token_ids():
    row = RowParser(SamplingParams()).row(as_row(line(TEXT, prompt=[]), ()), "0", "here")
    assert row.request is None or not row.request.prompt_token_ids
    row = RowParser(SamplingParams()).row(as_row(line(TEXT, prompt=[1, "x"]), ()), "0", "here")
    assert "prompt_token_ids[1] is 'x'" in row.error


def test_refused_line_keeps_its_custom_id(tmp_path):
    lines = [line(CHAT, messages=MESSAGES, stream=True), line(CHAT, model="gpt"), {"custom_id": "c"}]
    for name, content in zip("abc", lines, strict=True):
        content["custom_id"] = name
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = Input(str(tmp_path / "in.jsonl"), as_chat=False, model_names=("m",))
    inputs = source.split(5)
    rows = [RowParser(SamplingParams()).row(c, "number", where) for where, c in source.rows(inputs, inputs.shards[0])]
    assert [row.id for row in rows] == ["a", "b", "c"] and all(row.error for row in rows)


class Letters:
    """A tokenizer of single bytes, of which 200 begins a character of two and 5 has no text."""

    is_byte_level, vocab_size = True, 256

    def token_bytes(self, token_id: int) -> bytes:
        return {200: b"\xc3", 5: b""}.get(token_id, bytes([token_id]))


def result(url=CHAT, error=None, reason="stop", why=NOT_FINITE, n=1, **sampling):
    """A line of the output for a request to `url`."""
    kind = {"messages": MESSAGES} if url == CHAT else {"prompt": "x"}
    params = SamplingParams(n=n, **sampling)
    k = params.logprobs
    completions = [
        Completion(
            index=index,
            token_ids=[104, 200],
            text="h",
            finish_reason=reason,
            error=why if reason == "error" else None,
            logprobs=np.asarray([-0.25, -np.inf], np.float32),
            processed_logprobs=np.zeros(2, np.float32),
            top_logprobs=[{104: -0.25, 5: -1.5}, {105: -0.5, 106: -np.inf}] if k else None,
            seed=1,
        )
        for index in range(n)
    ]
    output = RequestOutput("r\ud800", kind.get("prompt"), [1, 2, 3], [] if error else completions, error=error)
    source = Row(output.id, None if error == "unreadable" else Request(**kind, sampling=params, id=output.id))
    (written,) = ResultLines("m", Letters()).rows(source, output)
    assert list(written) == ["id", "custom_id", "response", "error"]
    assert ResultLines("m", Letters()).rows(source, output) == [written]
    return json.loads(encode_row(written))


def test_result_lines_have_the_documented_shape():
    chat, text = result(n=2), result(TEXT)
    assert chat["custom_id"] == "r\ud800" and chat["error"] is None and chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "m"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "h", "refusal": None}
    assert body["choices"][0]["logprobs"] is None and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    body = text["response"]["body"]
    assert body["object"] == "text_completion" and body["choices"][0]["text"] == "h" and body["id"].startswith("cmpl-")
    assert count([chat]) == dict(rows=1, failed_rows=0, samples=2, prompt_tokens=3, generated_tokens=4)


def test_log_probabilities_have_openais_shape():
    first, second = result(logprobs=2)["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("h", [104], -0.25)
    assert first["top_logprobs"] == [
        {"token": "h", "bytes": [104], "logprob": -0.25},
        {"token": "token_id:5", "bytes": None, "logprob": -1.5},
    ]
    assert (second["token"], second["bytes"], second["logprob"]) == ("\N{REPLACEMENT CHARACTER}", [0xC3], -9999.0)
    plain = result(logprobs=0)["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[], []]
    found = result(TEXT, logprobs=2)["response"]["body"]["choices"][0]["logprobs"]
    assert found["tokens"] == ["h", "\N{REPLACEMENT CHARACTER}"] and found["text_offset"] == [0, 1]
    assert found["token_logprobs"] == [-0.25, -9999.0]
    assert found["top_logprobs"] == [{"h": -0.25, "token_id:5": -1.5}, {"i": -0.5, "j": -9999.0}]
    assert result(TEXT, logprobs=0)["response"]["body"]["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize(
    ("options", "status", "kind", "message"),
    [
        ({"error": "too long"}, 400, "invalid_request_error", "too long"),
        ({"error": "unreadable"}, 400, "invalid_request_error", "unreadable"),
        ({"reason": "error"}, 500, "server_error", "not finite"),
        ({"reason": "error", "why": NO_TOKEN}, 400, "invalid_request_error", "no token can follow"),
        ({"reason": "abort"}, 408, "timeout", "before its answer was complete"),
    ],
)
def test_failed_requests_are_error_lines(options, status, kind, message):
    written = result(**options)
    response = written["response"]
    assert written["custom_id"] == "r\ud800" and response["status_code"] == status
    assert response["body"]["error"]["type"] == written["error"]["code"] == kind
    assert (
        message in written["error"]["message"] and response["body"]["error"]["message"] == written["error"]["message"]
    )
    assert count([written])["failed_rows"] == 1


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"logprobs": 0}, {"logprobs": 2}, {"reason": "length"}])
def test_openais_own_types_read_the_results(options):
    pytest.importorskip("openai")
    from openai.types import Completion as TextCompletion
    from openai.types.chat import ChatCompletion

    for kind, url in ((ChatCompletion, CHAT), (TextCompletion, TEXT)):
        body = result(url, **options)["response"]["body"]
        read = kind.model_validate(body, strict=True)
        assert len(read.choices) == options.get("n", 1) and read.usage.prompt_tokens == 3
        assert (read.choices[0].logprobs is not None) == ("logprobs" in options)
        assert json.loads(read.model_dump_json(exclude_unset=True)) == body


@pytest.mark.parametrize(("module", "given"), [("chat", line(CHAT, messages=MESSAGES)), ("", line(TEXT, prompt="x"))])
def test_null_of_any_parameter_that_openai_knows_is_accepted(module, given):
    pytest.importorskip("openai")
    types = importlib.import_module("openai.types." + f"{module}.completion_create_params".lstrip("."))
    names = set(types.CompletionCreateParamsBase.__annotations__) - {"model", "messages", "prompt"}
    assert len(names) > 10
    row = as_row({**given, "body": {**dict.fromkeys(names), **given["body"]}}, ())
    assert RowParser(SamplingParams()).row(row, "0", "here").error is None
