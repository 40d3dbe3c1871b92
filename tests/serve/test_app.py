"""The HTTP server, by the real client of OpenAI and by raw HTTP: answers equal the engine's, and nothing is left."""

import asyncio
import contextlib
import json
import math
import random
import re
import runpy
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from levanter_infer import Request, SamplingParams
from levanter_infer.engine.async_engine import QueueFull
from levanter_infer.engine.reader import Update
from levanter_infer.io.openai import Answers
from levanter_infer.io.prompts import RowParser
from levanter_infer.serve.answers import Events
from levanter_infer.serve.calls import CallReader
from levanter_infer.serve.tools import ToolReader
from tests.serve.server import running, tiny_engine

PROMPT = "17+25="


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


@pytest.fixture(scope="module")
def expected(engine):
    def made(prompts, **sampling):
        return engine.generate(prompts, SamplingParams(**{"max_tokens": 8, **sampling}))

    return {
        "greedy": made([PROMPT, "1+1="], temperature=0, logprobs=2),
        "seeded": made([PROMPT], seed=7, n=3, temperature=1.5),
        "scored": made(["17+25=42"], max_tokens=0, prompt_logprobs=1),
    }


@pytest.fixture
def served(engine, expected):
    with running(engine) as server:
        yield server


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(served, path: str = "/v1/completions", **body) -> httpx.Response:
    return httpx.post(f"{served.url}{path}", json=body, timeout=120)


def pages_are_free(served) -> bool:
    """Whether all pages become free soon: a request that was aborted frees them when its round has ended."""
    for _ in range(200):
        asyncio.run_coroutine_threadsafe(served.asynchronous.drain(), served.loop).result(60)
        if served.engine.stats()["pages_free"] == served.engine.shapes.num_pages:
            return True
        time.sleep(0.02)
    return False


def test_completions_equal_the_engines(client, expected):
    answer = client.completions.create(model="tiny", prompt=[PROMPT, "1+1="], temperature=0, max_tokens=8, logprobs=2)
    for choice, output in zip(answer.choices, expected["greedy"], strict=True):
        (own,) = output.completions
        assert (choice.text, choice.finish_reason) == (own.text, own.finish_reason)
        assert choice.logprobs.token_logprobs == pytest.approx(own.logprobs.tolist(), abs=0)
        assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * len(own.token_ids)
    assert answer.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in expected["greedy"])
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_documented_program_gets_an_answer(served, capsys, tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert programs
    for program in programs:
        assert "http://127.0.0.1:8000" in program
        path = tmp_path / "program.py"
        path.write_text(program.replace("http://127.0.0.1:8000", served.url))
        runpy.run_path(str(path))
    assert capsys.readouterr().out.strip() == "42"


def test_seeds_parameters_and_token_ids_are_applied(client, expected):
    extra = {"top_k": 0, "return_token_ids": True}
    ids = expected["seeded"][0].prompt_token_ids
    for prompt in (PROMPT, ids):
        answer = client.completions.create(
            model="other", prompt=prompt, seed=7, n=3, temperature=1.5, max_tokens=8, extra_body=extra
        )
        own = expected["seeded"][0].completions
        assert [c.token_ids for c in answer.choices] == [c.token_ids for c in own]
        assert [c.prompt_token_ids for c in answer.choices] == [ids] * 3
        assert {c.weights_version for c in answer.choices} == {0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "\ud800": 1}),
        ("/v1/completions", {"prompt": "a", "model": "\ud800"}),
        ("/tokenize", {"prompt": "a", "\ud800": 1}),
        ("/detokenize", {"tokens": [1], "\ud800": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "\ud800", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "\ud800", "content": "a"}], "stream": True}),
    ],
)
def test_half_a_surrogate_pair_in_a_refused_request_comes_back_escaped(served, path, body):
    answer = httpx.post(f"{served.url}{path}", content=json.dumps(body), timeout=60)
    assert answer.status_code == 400 and "\\ud800" in answer.text
    assert "error" in answer.json()


def test_parameters_of_a_call_are_read_once_for_all_its_prompts(monkeypatch):
    made = []
    check = SamplingParams.__post_init__
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda own: (made.append(own.stop_token_ids), check(own)))
    reader = CallReader(RowParser(SamplingParams(max_tokens=8)), ToolReader("none", None), ["tiny"], 9)
    body = {"prompt": ["a", [1, 2], "b"], "stop_token_ids": [7, 8], "cache_salt": "s", "timeout_s": 5, "n": 2}
    requests = reader.read(body, "prompt", "name").requests
    assert [each for each in made if each] == [[7, 8]]
    assert [(each.id, each.prompt, each.prompt_token_ids) for each in requests] == [
        ("name-0", "a", None), ("name-1", None, [1, 2]), ("name-2", "b", None)
    ]  # fmt: skip
    assert requests[0].sampling == SamplingParams(max_tokens=8, stop_token_ids=[7, 8], n=2)
    assert all(each.sampling is requests[0].sampling for each in requests)
    assert {(each.cache_salt, each.timeout_s) for each in requests} == {("s", 5)}
    with pytest.raises(ValueError, match=r"body.prompt\[1\]"):
        reader.read({**body, "prompt": ["a", [-1]]}, "prompt", "name")


def test_a_large_body_is_read_beside_the_event_loop(served):
    gaps, has_ended = [], asyncio.Event()

    async def watch() -> None:
        last = time.monotonic()
        while not has_ended.is_set():
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    watching = asyncio.run_coroutine_threadsafe(watch(), served.loop)
    content = json.dumps({"prompt": "a", "stop_token_ids": [1] * 1_000_000})
    begin = time.monotonic()
    answer = httpx.post(f"{served.url}/v1/completions", content=content, timeout=60)
    seconds = time.monotonic() - begin
    served.loop.call_soon_threadsafe(has_ended.set)
    watching.result(10)
    assert answer.status_code == 400 and "stop_token_ids has 1000000 entries" in answer.text
    assert max(gaps) < seconds / 2


def test_text_offsets_of_a_stream_are_those_of_the_answer(engine, expected):
    answers = Answers("tiny", engine.tokenizer)
    reader = CallReader(RowParser(SamplingParams()), ToolReader("none", engine.tokenizer), ["tiny"], 9)
    call = reader.read({"prompt": [PROMPT, "1+1="], "logprobs": 2, "stream": True}, "prompt", "name")
    events, joined = Events(answers, call, "name", 0, "tiny"), {}
    for begin, end in ((0, 1), (1, 1), (1, 2), (2, 8)):
        for prompt, output in enumerate(expected["greedy"]):
            (own,) = output.completions
            part = slice(begin, end)
            update = Update(
                "name", 0, own.token_ids[part], "", own.logprobs[part], own.processed_logprobs[part],
                own.top_logprobs[part], own.token_versions[part],
            )  # fmt: skip
            (choice,) = json.loads(events.update(prompt, update).removeprefix("data: "))["choices"]
            joined.setdefault(choice["index"], []).extend(choice["logprobs"]["text_offset"])
    whole = [answers.logprobs(output.completions[0])["text_offset"] for output in expected["greedy"]]
    assert joined == dict(enumerate(whole)) and all(len(each) > 2 for each in whole)


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (400, {"prompt": "a", "allowed_token_ids": [0], "stop_token_ids": [0], "min_tokens": 1}),
        (408, {"prompt": "a", "timeout_s": 1e-6}),
    ],
)
def test_a_stream_that_fails_before_any_token_has_the_status_of_the_answer(served, status, changes):
    whole, streamed = (post(served, **changes, stream=stream) for stream in (False, True))
    assert (whole.status_code, streamed.status_code) == (status, status)
    assert streamed.json() == whole.json()


def test_streams_join_to_the_answer(client, expected):
    events = list(
        client.completions.create(
            model="tiny", prompt=[PROMPT, "1+1="], temperature=0, max_tokens=8, logprobs=2, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    texts, logprobs, reasons = ["", ""], ([], []), {}
    for event in events:
        for choice in event.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index].extend(choice.logprobs.token_logprobs)
            reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    own = [output.completions[0] for output in expected["greedy"]]
    assert texts == [c.text for c in own] and reasons == {i: c.finish_reason for i, c in enumerate(own)}
    assert list(map(list, logprobs)) == [c.logprobs.tolist() for c in own]
    assert events[-1].usage.completion_tokens == sum(len(c.token_ids) for c in own)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_counts_the_tokens_so_far(client, path):
    same = dict(model="tiny", temperature=1.5, seed=3, max_tokens=8, n=2, stream=True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    made = client.completions if path == "/v1/completions" else client.chat.completions
    given = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    asked = {**same, **given, "extra_body": {"return_token_ids": True}}
    plain = [event for event in made.create(**asked) if event.choices]
    assert all(event.usage is None for event in plain)
    *events, last = made.create(**asked, stream_options=options)
    counts = [0, 0]
    for event in events:
        (choice,) = event.choices
        counts[choice.index] += len(getattr(choice, "token_ids", None) or ())
        used = event.usage
        assert (used.prompt_tokens, used.completion_tokens) == (last.usage.prompt_tokens, counts[choice.index])
        assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    assert min(counts) > 0 and sum(counts) == last.usage.completion_tokens and not last.choices


def test_a_stream_says_its_seeds_and_the_tokens_of_its_prompt(client, expected):
    own = expected["seeded"][0]
    asked = dict(model="tiny", prompt=PROMPT, seed=7, n=3, temperature=1.5, max_tokens=8, stream=True)
    found: dict[int, list] = {0: [], 1: [], 2: []}
    for event in client.completions.create(**asked, extra_body={"return_token_ids": True}):
        found[event.choices[0].index].append(event.choices[0])
    for index, events in found.items():
        assert [event.prompt_token_ids for event in events if hasattr(event, "prompt_token_ids")] == [
            own.prompt_token_ids
        ]
        assert events[0].prompt_token_ids and [token for event in events for token in event.token_ids] == (
            own.completions[index].token_ids
        )
        assert [event.seed for event in events if event.finish_reason is not None] == [7]


def test_log_probabilities_can_be_declined():
    reader = CallReader(RowParser(SamplingParams(max_tokens=8, logprobs=1)), ToolReader("none", None), ["tiny"], 9)
    for body, expected in (({}, 1), ({"logprobs": None}, 1), ({"logprobs": False}, None), ({"logprobs": True}, 0)):
        (request,) = reader.read({"messages": [{"role": "user", "content": "x"}], **body}, "messages", "name").requests
        assert request.sampling.logprobs == expected


@pytest.mark.parametrize("grace_s", [0.0, 0.4])
def test_requests_that_outlast_the_grace_period_are_answered(engine, caplog, grace_s):
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
    with running(engine, grace_s=grace_s) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        asyncio.run_coroutine_threadsafe(server.asynchronous.pause("step"), server.loop).result(60)
        with ThreadPoolExecutor(4) as threads:
            plain = [threads.submit(client.post, "/v1/completions", json={**body, "stream": s}) for s in (False, True)]
            while engine.stats()["waiting"] + len(server.asynchronous._ids) < 2:
                time.sleep(0.01)
            server.end()
            for answer in (each.result(60) for each in plain):
                assert answer.status_code == 503 and "the server ends" in answer.json()["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_stream_that_outlasts_the_grace_period_ends_with_an_error(engine, caplog):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with running(engine, grace_s=0.3) as server:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert "assistant" in next(lines)
            asyncio.run_coroutine_threadsafe(server.asynchronous.pause("step"), server.loop).result(60)
            server.end()
            last = list(lines)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server ends, and its requests with it"
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("ids", [{"allowed_token_ids": [1, 112145]}, {"bad_words": [[1, 112145]]}])
def test_constraints_on_ids_outside_the_vocabulary_are_refused(served, ids):
    refused = post(served, "/v1/completions", prompt=PROMPT, **ids)
    assert refused.status_code == 400 and next(iter(ids)) in refused.json()["error"]["message"], refused.text


def test_tokenizer_endpoints_equal_the_tokenizer(served, engine):
    for special in (True, False):
        done = post(served, "/tokenize", prompt="17+25=<|user|>\n", add_special_tokens=special).json()
        assert done["tokens"] == engine.tokenizer.encode("17+25=<|user|>\n", special)
        assert (done["count"], done["max_model_len"]) == (len(done["tokens"]), 256)
    assert post(served, "/detokenize", tokens=done["tokens"]).json() == {"prompt": "17+25=<|user|>\n"}
    info = httpx.get(f"{served.url}/tokenizer_info").json()
    assert engine.tokenizer.encode(info["eos_token"], False) == [engine.tokenizer.eos_token_ids[0]]
    for path, body, named in (
        ("/tokenize", {"prompt": 1}, "body.prompt is 1"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, "expected one of tiny, other"),
        ("/detokenize", {"tokens": [99999]}, "body.tokens"),
        ("/detokenize", {"tokens": [True]}, "body.tokens"),
    ):
        refused = post(served, path, **body)
        assert refused.status_code == 400 and named in refused.json()["error"]["message"]


def test_echo_scores_the_prompt(client, expected):
    answer = client.completions.create(model="tiny", prompt="17+25=42", max_tokens=0, echo=True, logprobs=1)
    (choice,), own = answer.choices, expected["scored"][0]
    assert choice.text == "17+25=42" and len(choice.logprobs.tokens) == len(own.prompt_token_ids)
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    np.testing.assert_array_equal(choice.logprobs.token_logprobs[1:], own.prompt_logprobs)
    starts = [len("".join(choice.logprobs.tokens[:i])) for i in range(len(choice.logprobs.tokens))]
    assert choice.logprobs.text_offset == starts


def test_chats_are_rendered_and_streamed(client, engine):
    messages = [{"role": "user", "content": PROMPT}]
    same = dict(model="tiny", messages=messages, temperature=0, max_tokens=8, logprobs=True, top_logprobs=1)
    answer = client.chat.completions.create(**same)
    events = list(client.chat.completions.create(**same, stream=True))
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    assert text == answer.choices[0].message.content and events[0].choices[0].delta.role == "assistant"
    assert text == "42\n"
    found = [e for event in events for c in event.choices if c.logprobs for e in c.logprobs.content]
    assert [e.logprob for e in found] == [e.logprob for e in answer.choices[0].logprobs.content]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert client.chat.completions.create(**same, tools=tools).choices[0].message.content is not None


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "not JSON"),
        (b"\xff", "UTF-8"),
        (b"[1]", "JSON object"),
        (b"NaN", "NaN"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "digits"),
        (b'{"prompt": "a", "prompt": "b"}', "twice"),
        (b'{"prompt": "a", "nosuch": 1}', "nosuch"),
        (b'{"prompt": "a", "suffix": "b"}', "suffix"),
        (b'{"prompt": "a", "model": "gpt"}', "body.model is 'gpt'; expected one of tiny, other"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        (b'{"prompt": "a", "logprobs": 5}', "logprobs"),
        (b'{"prompt": [], "max_tokens": 1}', "prompt"),
        (b'{"prompt": [1, -1]}', "prompt_token_ids[1]"),
        (b'{"prompt": [99999]}', "99999"),
        (b'{"prompt": ["a", 1]}', "prompt"),
        (b'{"prompt": "a", "stream": 1}', "stream"),
        (b'{"prompt": "a", "stream_options": {"include_usage": true}}', "stream_options"),
        (b'{"prompt": "a", "stream": true, "stream_options": {"continuous_usage_stats": true}}', "include_usage"),
        (b'{"prompt": "a", "stream": true, "stream_options": {"other": true}}', "continuous_usage_stats"),
        (b'{"prompt": "a", "stream": true, "best_of": 3}', "best_of"),
        (b'{"prompt": "a", "n": 1000000}', "n"),
        (b'{"messages": []}', "prompt"),
        (b'{"prompt": "a", "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}', "no token can follow"),
        (b'{"prompt": "a", "allowed_token_ids": [0], "min_tokens": 1, "n": 2}', "no token can follow"),
    ],
)
def test_bad_bodies_are_refused_by_name(served, content, named):
    done = httpx.post(f"{served.url}/v1/completions", content=content, timeout=60)
    assert done.status_code == 400, done.text
    error = done.json()["error"]
    assert named in error["message"] and error["type"] == "invalid_request_error"


def test_other_endpoints(served):
    get = {path: httpx.get(f"{served.url}{path}") for path in ("/health", "/metrics", "/v1/models", "/", "/version")}
    assert {path: each.status_code for path, each in get.items()} == dict.fromkeys(get, 200)
    assert [model["id"] for model in get["/v1/models"].json()["data"]] == ["tiny", "other"]
    assert httpx.get(f"{served.url}/v1/models/other").json() == get["/v1/models"].json()["data"][1]
    missing = httpx.get(f"{served.url}/v1/models/org/none")
    assert missing.status_code == 404 and "no model 'org/none'; there are: tiny, other" in missing.text
    assert "generated_tokens_total" in get["/metrics"].text and "<script" not in get["/"].text
    assert httpx.get(f"{served.url}/v1/nosuch").status_code == 404
    assert httpx.get(f"{served.url}/v1/completions").status_code == 405


def test_limits_of_a_server(engine):
    with running(engine, api_key="secret", max_waiting=2, max_body_bytes=1000, max_prompts=3) as server:
        body = {"prompt": "1+1=", "max_tokens": 2}
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"authorization": "secret"}, 401),
        ):
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == status
        assert httpx.get(f"{server.url}/health").status_code == 200
        with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer secret"}, timeout=60) as client:
            assert client.post("/v1/completions", json=body).status_code == 200
            assert client.post("/v1/completions", content=b" " * 1001).status_code == 413
            assert client.post("/v1/completions", json={**body, "prompt": ["a"] * 4}).status_code == 400
            held = asyncio.run_coroutine_threadsafe(server.asynchronous.pause("admit"), server.loop)
            held.result(60)

            async def crowd():
                async with httpx.AsyncClient(base_url=server.url, headers=client.headers, timeout=60) as many:
                    tasks = [asyncio.ensure_future(many.post("/v1/completions", json=body)) for _ in range(6)]
                    while sum(task.done() for task in tasks) < 4:  # two may wait
                        await asyncio.sleep(0.01)
                    asyncio.run_coroutine_threadsafe(server.asynchronous.resume(), server.loop)
                    return [task.result() for task in tasks if await task]

            answers = asyncio.run(crowd())
        assert sorted(each.status_code for each in answers) == [200, 200, 429, 429, 429, 429]
        assert all(int(each.headers["retry-after"]) >= 1 for each in answers if each.status_code == 429)
        assert len({each.json()["choices"][0]["finish_reason"] for each in answers if each.status_code == 200}) == 1
        assert pages_are_free(server)


@pytest.mark.parametrize("clients", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_clients_that_go_away_leave_no_pages(served, clients):
    draw = random.Random(3)
    before = served.engine.stats()["generated_tokens"]

    async def leave(number: int):
        body = {"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, "stream": number % 2 == 0}
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            try:
                async with asyncio.timeout(draw.uniform(0.001, 0.3)):
                    async with client.stream("POST", "/v1/completions", json=body) as answer:
                        async for _ in answer.aiter_lines():
                            pass
            except TimeoutError:
                return True
        return False

    async def stay():
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            return (await client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0})).json()

    async def all_of_them():
        return await asyncio.gather(stay(), *(leave(number) for number in range(clients)))

    kept, *left = asyncio.run(all_of_them())
    assert kept["choices"][0]["text"] == "42\n" and any(left)
    assert pages_are_free(served)
    assert served.engine.stats()["generated_tokens"] - before < clients * 50


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_while_it_waits_leaves_the_queue(engine, stream):
    body = {"prompt": PROMPT, "temperature": 0}
    with running(engine, max_waiting=1) as server:
        asyncio.run_coroutine_threadsafe(server.asynchronous.pause("admit"), server.loop).result(60)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={**body, "stream": stream}, timeout=0.5)

        async def capacity() -> None:
            while True:  # paused: nothing but the departure frees its place
                with contextlib.suppress(QueueFull):
                    return server.asynchronous.check_capacity(1)
                await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(capacity(), 20), server.loop).result(60)
        asyncio.run_coroutine_threadsafe(server.asynchronous.resume(), server.loop).result(60)
        assert post(server, **body).json()["choices"][0]["text"] == "42\n"
        assert pages_are_free(server)


@pytest.mark.parametrize("stream", [True, False])
def test_prompts_enter_a_queue_all_or_none(engine, stream):
    with running(engine, max_waiting=2) as server:
        before = server.engine.stats()

        def fits(count: int) -> bool:
            with contextlib.suppress(QueueFull):
                server.asynchronous.check_capacity(count)
                return True
            return False

        asyncio.run_coroutine_threadsafe(server.asynchronous.pause("admit"), server.loop).result(60)

        async def crowd():
            body = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

                def send(prompt):
                    return asyncio.ensure_future(client.post("/v1/completions", json={**body, "prompt": prompt}))

                tasks = [send("1+1=")]
                while fits(2):
                    await asyncio.sleep(0.01)
                full = await client.post("/v1/completions", json={**body, "prompt": ["a", "b"], "stream": stream})
                tasks.append(send("2+2="))  # has the place that none of the two prompts took
                while fits(1):
                    await asyncio.sleep(0.01)
                asyncio.run_coroutine_threadsafe(server.asynchronous.resume(), server.loop)
                return full, [await task for task in tasks]

        full, kept = asyncio.run(crowd())
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert [each.status_code for each in kept] == [200, 200]
        assert pages_are_free(server)
        sizes = {"generated_tokens": 6, "prompt_tokens": sum(len(engine.tokenizer.encode(p)) for p in ("1+1=", "2+2="))}
        assert {key: server.engine.stats()[key] - before[key] for key in sizes} == sizes


@pytest.mark.parametrize("streams", [64, pytest.param(1000, marks=pytest.mark.slow)])
def test_concurrent_streams_equal_those_alone(engine, streams):
    requests = [
        Request(prompt=f"{i % 90 + 5}+{i % 7}=", sampling=SamplingParams(max_tokens=8, seed=i)) for i in range(streams)
    ]
    wanted = [output.completions[0].text for output in engine.generate(requests)]
    first: list[float] = []

    async def one(client: httpx.AsyncClient, number: int) -> str:
        body = {"prompt": requests[number].prompt, "max_tokens": 8, "seed": number, "stream": True}
        text, begin = "", time.monotonic()
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first.append(time.monotonic() - begin) if not text else None
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert line == "" or line == "data: [DONE]"
        return text

    async def all_of_them(url: str):
        limits = httpx.Limits(max_connections=streams)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(one(client, number) for number in range(streams)))

    with running(engine, max_waiting=streams) as server:
        got = asyncio.run(all_of_them(server.url))
        assert got == wanted and pages_are_free(server)
    print(f"time to first token, p99: {sorted(first)[math.ceil(0.99 * len(first)) - 1]:.3f} s of {streams} streams")


def test_an_answer_on_a_connection_that_is_kept_does_not_wait_for_an_acknowledgement(served):
    seconds = []
    with httpx.Client() as client:
        for _ in range(11):
            begin = time.monotonic()
            client.get(f"{served.url}/health")
            seconds.append(time.monotonic() - begin)
    assert sorted(seconds)[5] < 0.03  # 0.044 if it does
