"""Tool calls: the parser at every cut of a text, and the server with the real client of OpenAI."""

import json
import random
from typing import Any

import httpx
import openai
import pytest

from levanter_infer.policies import ToolCallParser
from levanter_infer.serve.tool_calls import FORMATS, CallParser, ToolCall
from tests.serve.server import running, tiny_engine
from tests.tiers import nightly_but

HERMES, LLAMA, MISTRAL = ToolCallParser.HERMES, ToolCallParser.LLAMA3_JSON, ToolCallParser.MISTRAL
NAMES = {"add", "get-time"}
ADD = ToolCall("add", '{"a": 1}')
TIME = ToolCall("get-time", "{}")
JSON = '{"name": "add", "arguments": {"a": 1}}'
IN_TAGS = f"<tool_call>\n{JSON}\n</tool_call>"
CASES = [
    # one call, several, and text around them
    (HERMES, IN_TAGS, [ADD]),
    (HERMES, f"Let me see. \n{IN_TAGS}\n", ["Let me see.", ADD]),
    (HERMES, f'{IN_TAGS}\n<tool_call>{{"arguments":{{}},"name":"get-time"}}</tool_call>', [ADD, TIME]),
    (HERMES, f"a\n{IN_TAGS} b {IN_TAGS}\n\n", ["a", ADD, " b", ADD]),
    (HERMES, f"<tool_call>\n{JSON}", [ADD]),
    (HERMES, f"<tool_call>\n{JSON}\n</tool_", [ADD]),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"s": "}\\"</tool_call>\\\\", "u": "é\\u00e9😀"}}</tool_call>!',
        [ToolCall("add", '{"s": "}\\"</tool_call>\\\\", "u": "éé😀"}'), "!"],
    ),
    (LLAMA, JSON, [ADD]),
    (LLAMA, ' {"name": "add", "parameters": {"a": 1}}', [ADD]),
    (LLAMA, f'{JSON}; {{"name": "get-time", "parameters": {{}}}} ', [ADD, TIME]),
    (LLAMA, f"Well <|python_tag|>{JSON}", ["Well", ADD]),
    (LLAMA, f"{JSON}; and more", [ADD, "; and more"]),
    (MISTRAL, f'[TOOL_CALLS] [{JSON}, {{"name": "get-time", "arguments": {{}}}}]', [ADD, TIME]),
    (MISTRAL, 'Now [TOOL_CALLS]add{"a": 1}[TOOL_CALLS]get-time[ARGS]{}', ["Now", ADD, TIME]),
    (MISTRAL, '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', [ADD]),
    (MISTRAL, '[TOOL_CALLS][TOOL_CALLS]add{"a": 1}', ["[TOOL_CALLS]", ADD]),
    # no call: all of it is content
    *((form, text, [text]) for form in FORMATS for text in ("", " ", "\n\n", "17+25=42\n", "a < b [x] {y}")),
    *(
        (HERMES, text, [text])
        for text in (
            "<tool_call>",
            "<tool_cal",
            "a <tool_call> b </tool_call> ",
            "<tool_call>[1]</tool_call>",
            '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "add"}</tool_call>',
            '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
            f'<tool_call>{{"name": "add", "arguments": {{"a": 1{"0" * 5000}}}}}</tool_call>',
            f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 3000}{"]" * 3000}}}}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": 1}]</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": 1',
            f"<tool_call>{JSON} and </tool_call>",
            f"<tool_call>{' ' * 300}",
        )
    ),
    (HERMES, f"<tool_call>{{bad}}</tool_call>\n{IN_TAGS}", ["<tool_call>{bad}</tool_call>", ADD]),
    (LLAMA, f"The call {JSON}", [f"The call {JSON}"]),
    (LLAMA, '{"a": 1}', ['{"a": 1}']),
    (MISTRAL, '[TOOL_CALLS]rm{"a": 1}', ['[TOOL_CALLS]rm{"a": 1}']),
    (MISTRAL, f"[TOOL_CALLS] [{JSON}, 1]", [f"[TOOL_CALLS] [{JSON}, 1]"]),
    (MISTRAL, "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
    (MISTRAL, f"[TOOL_CALLS]{'x' * 300}", [f"[TOOL_CALLS]{'x' * 300}"]),
]  # fmt: skip


def joined(parts) -> list:
    """Content next to content as one."""
    found: list = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return [part for part in found if part != ""]


def parsed(kind, pieces, most=None) -> list:
    parser = CallParser(FORMATS[kind], NAMES, most)
    found = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert parser.num_calls == sum(isinstance(part, ToolCall) for part in found)
    return joined(found)


@pytest.mark.parametrize(("kind", "text", "expected"), CASES)
def test_text_is_divided_alike_however_it_is_cut(kind, text, expected):
    assert parsed(kind, [text]) == joined(expected)
    size = len(text)
    step = 1 if size < 400 else 97
    for cut in range(0, size, step):
        assert parsed(kind, [text[:cut], text[cut:]]) == joined(expected), cut
    if size < 400:
        assert parsed(kind, text) == joined(expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_random_texts_in_random_pieces_equal_the_whole(kind):
    form, draw = FORMATS[kind], random.Random(5)
    parts = [
        *(form.begin, form.end, form.separator, JSON, IN_TAGS, "{", "}", "[", "]", '"', "\\", " ", "\n"),
        *("add", "[ARGS]"),
        *('{"name": "get-time", "parameters": {}}', form.begin[:4], "text", ", "),
    ]  # fmt: skip
    with_calls = 0
    for _ in range(3000):
        text = "".join(draw.choice(parts) for _ in range(draw.randint(1, 12)))
        cuts = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 9)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = parsed(kind, [text])
        assert parsed(kind, pieces) == whole, (text, pieces)
        calls = [part for part in whole if isinstance(part, ToolCall)]
        with_calls += bool(calls)
        if not calls:
            assert "".join(whole) == text
    assert with_calls > 100


def test_content_is_prompt_and_markers_are_held_back():
    parser = CallParser(FORMATS[HERMES], NAMES)
    assert [parser.push(piece) for piece in ("Hello", " wor", "ld <to", "day>")] == [
        *(["Hello"], [" wor"], ["ld"], [" <today>"])
    ]
    assert parser.push("<tool_call>") == [] and parser.push(" no") == ["<tool_call>", " no"]
    assert parser.push(IN_TAGS[:-1]) == [] and parser.push(">") == [ADD]


def test_calls_beyond_the_most_are_dropped():
    assert parsed(MISTRAL, [f"[TOOL_CALLS][{JSON}, {JSON}] x"], most=1) == [ADD, " x"]
    assert parsed(HERMES, [IN_TAGS * 3], most=2) == [ADD, ADD]


@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call>{", "{", '"', " ", "\\", "[TOOL_CALLS][", "x"])
def test_time_is_linear_in_the_text(piece):
    for kind in FORMATS:
        parsed(kind, [piece] * 20_000)  # quadratic work takes minutes


# The server


def tool(name: str, schema: dict | None = None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema} if schema else {"name": name}}


NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOLS = [
    tool("add", {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}),
    tool("get-time"),
]
SAME: dict[str, Any] = dict(model="tiny", messages=[{"role": "user", "content": "17+25="}], tools=TOOLS, max_tokens=200)
TWO = r'Sum: <tool_call>\n\{"name": "add", "arguments": \{"a": [1-9]{2}, "b": 5\}\}\n</tool_call>'
TWO += r'\n<tool_call>\{"name": "get-time", "arguments": \{\}\}</tool_call>'


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


@pytest.fixture
def hermes(engine):
    with running(engine, tool_call_parser=HERMES) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client


def streamed(client, **asked):
    """(content, calls, reason) that the deltas of a stream add up to."""
    content, calls, reasons = "", {}, []
    for event in client.chat.completions.create(**asked, stream=True):
        (choice,) = event.choices
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or ():
            if delta.index not in calls:
                assert delta.id and delta.type == "function" and delta.function.name
                calls[delta.index] = [delta.function.name, ""]
            else:
                assert delta.id is None and delta.function.name is None
            calls[delta.index][1] += delta.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert list(calls) == list(range(len(calls)))
    return content or None, [tuple(call) for call in calls.values()], *reasons


def whole(client, **asked):
    (choice,) = client.chat.completions.create(**asked).choices
    calls = choice.message.tool_calls or ()
    assert len({call.id for call in calls}) == len(calls) and all(call.type == "function" for call in calls)
    found = [(call.function.name, call.function.arguments) for call in calls]
    return choice.message.content, found, choice.finish_reason


@pytest.mark.slow
@pytest.mark.parametrize("most", [{}, {"parallel_tool_calls": False}, {"logprobs": True, "top_logprobs": 1}])
def test_calls_of_the_model_are_parsed(hermes, most):
    asked = dict(SAME, seed=3, extra_body={"regex": TWO}, **most)
    content, calls, reason = whole(hermes, **asked)
    assert (content, reason) == ("Sum:", "tool_calls")
    name, arguments = calls[0]
    assert name == "add" and json.loads(arguments)["b"] == 5 and json.loads(arguments)["a"] >= 11
    assert calls[1:] == ([] if "parallel_tool_calls" in most else [("get-time", "{}")])
    assert streamed(hermes, **asked) == (content, calls, reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("regex", "more", "reason"),
    [
        (r"<tool_call>\{bad\}</tool_call> x", {}, "stop"),
        (r'<tool_call>\{"name": "rm", "arguments": \{\}\}</tool_call>', {}, "stop"),
        (TWO, {"max_tokens": 12}, "length"),
        (TWO, {"tool_choice": "none"}, "stop"),
    ],
)
def test_what_is_no_call_stays_content(hermes, regex, more, reason):
    asked = {**SAME, "seed": 3, "extra_body": {"regex": regex}, **more}
    content, calls, found = whole(hermes, **asked)
    assert calls == [] and "<tool_call>" in content and found == reason
    assert streamed(hermes, **asked) == (content, [], reason)


@pytest.mark.parametrize("kind", nightly_but(["llama3_json"], FORMATS))
def test_calls_are_forced(engine, kind):
    by_name = {"type": "function", "function": {"name": "add"}}
    with running(engine, tool_call_parser=kind) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for choice, more in ((by_name, {}), ("required", {}), ("required", {"parallel_tool_calls": False})):
                for seed in range(1):
                    asked = {**SAME, "max_tokens": 100, "tool_choice": choice, "seed": seed, **more}
                    content, calls, reason = whole(client, **asked)
                    assert content is None or reason == "length", content
                    if reason == "tool_calls":
                        assert calls and (choice == "required" or [name for name, _ in calls] == ["add"])
                        assert not more or len(calls) == 1
                        for name, arguments in calls:
                            assert set(json.loads(arguments)) == ({"a", "b"} if name == "add" else set())
                    assert streamed(client, **asked) == (content, calls, reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tool_choice": "any"}, "tool_choice is 'any'; expected"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice names 'rm'; expected"),
        ({"tool_choice": {"type": "function", "function": {"name": ""}}}, "tool_choice is"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice is"),
        ({"tool_choice": "required", "tools": None}, "without body.tools"),
        ({"tool_choice": "required", "regex": "a"}, "together with regex"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "ignore_eos": True}, "tool_choice is 'required', which becomes a grammar: ignore"),
        ({"tool_choice": "required", "n": 2, "num_beams": 2}, "num_beams"),
        ({"tool_choice": "required", "tools": [tool("f", {"type": "object", "$ref": "#/nosuch"})]}, "nosuch"),
        ({"tools": [{"name": "add"}]}, "tools[0] is"),
        ({"tools": [tool("a b")]}, "tools[0].function.name is 'a b'"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name is 'a', as"),
        ({"tools": [tool("a", {"type": "string"})]}, "tools[0].function.parameters is"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls is 1"),
    ],
)  # fmt: skip
def test_bad_tools_are_refused_by_name(hermes, more, named):
    for stream in (False, True):
        body = {key: value for key, value in {**SAME, **more, "stream": stream}.items() if value is not None}
        done = httpx.post(f"{hermes.base_url}chat/completions", json=body, timeout=60)
        assert done.status_code == 400 and named in done.json()["error"]["message"], done.text


def test_parameters_that_nest_too_deeply_are_refused(hermes):
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    body = {**SAME, "tools": [tool("f", deep)], "tool_choice": "required"}
    done = httpx.post(f"{hermes.base_url}chat/completions", json=body, timeout=60)
    assert done.status_code == 400 and "parameters of 'f' nest too deeply" in done.json()["error"]["message"], done.text


def test_without_a_parser_calls_are_text(engine):
    with running(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        asked = dict(SAME, seed=3, extra_body={"regex": TWO})
        content, calls, reason = whole(client, **asked)
        assert content.count("<tool_call>") == 2 and calls == [] and reason == "stop"
        assert streamed(client, **asked) == (content, [], reason)
        with pytest.raises(openai.BadRequestError, match="start it with --tool_call_parser"):
            client.chat.completions.create(**SAME, tool_choice="required")
