"""Prompts that `generate` takes, those that it refuses, alone and in which words, and how results are shown."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.checkpoints.chat_template import check_messages
from levanter_infer.checkpoints.tokenizer import Tokenizer
from levanter_infer.checkpoints.tokenizer_limits import TokenBound
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Completion, Request, RequestOutput, as_requests
from tests import tokenizer_files
from tests.tiny_models import tiny_model

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


class Recording(Tokenizer):
    """A tokenizer that notes what its template is asked for."""

    def apply_chat_template(self, messages, **asked):
        self.asked = asked
        check_messages(messages)
        return "".join(message.get("content") or "" for message in messages)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Recording.from_directory(
        tokenizer_files.write(
            tmp_path_factory.mktemp("t"),
            tokenizer_files.byte_level(bos=True),
            tokenizer_config={"eos_token": "<|eos|>"},
        )
    )


@pytest.fixture(scope="module")
def engine(tokenizer):
    sizes = dict(max_seqs=4, max_seq_len=64, page_size=4, max_step_tokens=32)
    return InferenceEngine(tiny_model(vocab_size=300), tokenizer, EngineConfig(**sizes))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.completions[0].token_ids for output in outputs]


# Forms of prompts


def test_prompts_of_all_kinds_give_what_requests_give(engine, tokenizer):
    ids, chat = tokenizer.encode("the cat"), [{"role": "user", "content": "hello"}]
    requests = [
        Request("the cat", sampling=GREEDY),
        Request(prompt_token_ids=ids, sampling=GREEDY),
        Request(messages=chat, sampling=GREEDY),
    ]
    expected = tokens(engine.generate(requests))
    assert tokens(engine.generate(["the cat", ids, chat], GREEDY)) == expected
    assert tokens(engine.generate(("the cat", tuple(ids), tuple(chat)), GREEDY)) == expected
    assert tokens(engine.generate((text for text in ["the cat"]), GREEDY)) == expected[:1]
    assert tokens(engine.generate([np.asarray(ids), range(3)], GREEDY))[0] == expected[1]
    for alone, wanted in zip(["the cat", ids, chat], expected, strict=True):
        assert tokens(engine.generate(alone, GREEDY)) == [wanted]
    assert tokens(engine.generate(requests[0])) == tokens(engine.generate(np.asarray(ids), GREEDY)) == expected[:1]
    assert engine.generate([]) == []


def test_a_completion_begins_with_the_space_of_its_first_word(tmp_path):
    files = tokenizer_files.write(tmp_path, tokenizer_files.llama2(), tokenizer_config={"eos_token": "</s>"})
    tokenizer = Tokenizer.from_directory(files)
    word = tokenizer.encode("hello", add_special_tokens=False)
    assert len(word) == 1 and tokenizer.decode(word) == "hello"
    sizes = dict(max_seqs=2, max_seq_len=32, page_size=4)
    engine = InferenceEngine(tiny_model(vocab_size=tokenizer.vocab_size), tokenizer, EngineConfig(**sizes))
    sampling = SamplingParams(max_tokens=2, temperature=0.0, allowed_token_ids=word)
    for prompt, text in (("hello", " hello hello"), (word, " hello hello"), ([1], "hello hello")):
        (output,) = engine.generate([prompt], sampling)
        assert output.completions[0].text == text
    assert tokenizer.decode(output.prompt_token_ids + output.completions[0].token_ids) == text


def test_sampling_of_the_call_is_for_prompts_that_bring_none(engine):
    own = SamplingParams(max_tokens=5, temperature=0.0)
    prompts = [Request("a", sampling=own), Request("a"), "a"]
    assert [len(ids) for ids in tokens(engine.generate(prompts, GREEDY))] == [5, 3, 3]
    assert [len(ids) for ids in tokens(engine.generate(["a", "a", Request("a")], [own, GREEDY, own]))] == [5, 3, 5]
    default = engine.generate(Request("a"))[0]
    assert len(default.completions[0].token_ids) <= SamplingParams().max_tokens and default.error is None
    group = engine.submit("a", GREEDY)
    engine.drain()
    assert len(group.sequences[0].token_ids) == 3


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        (5, None, "prompts is int; expected a list of prompts"),
        (None, None, "prompts is NoneType"),
        ({"role": "user", "content": "x"}, None, r"prompts is dict; .* a chat \(a list of messages\)"),
        (b"text", None, "prompts is bytes"),
        (np.asarray(5), None, "prompts is ndarray"),
        (["a"], 0.7, "sampling is 0.7; expected SamplingParams, or a list"),
        (["a"], {"n": 2}, "sampling is {'n': 2}; expected SamplingParams"),
        (["a", "b"], [GREEDY], "sampling has 1 entries for 2 prompts"),
        (["a"], [5], "sampling is .*; expected SamplingParams"),
    ],
)
def test_a_call_of_another_form_is_refused_before_anything_runs(engine, prompts, sampling, message):
    rounds = engine.stats()["rounds"]
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, sampling)
    assert engine.stats()["rounds"] == rounds


def test_what_is_no_prompt_is_refused_alone(engine):
    outputs = engine.generate(["a", 5, None, {"prompt": "x"}, b"x", 1.5], GREEDY)
    assert outputs[0].error is None
    for i, output in enumerate(outputs[1:], 1):
        assert f"prompts[{i}] is" in output.error and "expected a string, a list of token ids" in output.error
        assert output.id == str(i) and output.completions == [] and output.num_cached_tokens is None


def test_arrays_of_jax_are_token_ids():
    one, two = [3, 4, 5], [6, 7, 8]
    for prompts in (jnp.asarray([one, two]), [jnp.asarray(one), jnp.asarray(two)]):
        assert [list(request.prompt_token_ids) for request in as_requests(prompts)] == [one, two]
    assert [list(request.prompt_token_ids) for request in as_requests(jnp.asarray(one))] == [one]


@pytest.mark.parametrize("prompt", [{"prompt": "x"}, {"prompt_token_ids": [1, 2]}])
def test_a_mapping_with_a_prompt_is_told_what_to_write(engine, prompt):
    output = engine.generate([prompt], GREEDY)[0]
    assert "a mapping with a prompt" in output.error and "give text or token ids themselves" in output.error


def test_request_takes_the_prompt_by_place_and_the_rest_by_name():
    assert Request("hi").prompt == "hi" and Request("hi").sampling is None
    with pytest.raises(TypeError, match="one positional argument, the prompt, and was given 2; write the others by"):
        Request("hi", SamplingParams())  # type: ignore[misc]
    for name, nearest in {
        "sampling_params": "sampling",
        "input_ids": "prompt_token_ids",
        "mesages": "messages",
    }.items():
        with pytest.raises(TypeError, match=f"Request has no parameter '{name}'; the nearest known one is '{nearest}'"):
            Request("hi", **{name: 1})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("sampling_params", "nearest known one is 'sampling'"),
        ("temperature", "nearest known one is 'sampling'"),
        ("use_tqdm", "nearest known one is 'progress'"),
        ("lora_request", "none is near it (known: prompts, sampling, on_update, progress)"),
    ],
)
def test_an_unknown_name_in_a_call_is_answered_with_the_nearest_one(engine, name, nearest):
    rounds = engine.stats()["rounds"]
    with pytest.raises(TypeError, match=f"^generate has no parameter '{name}'; ") as raised:
        engine.generate(["a"], **{name: GREEDY})
    assert nearest in str(raised.value) and engine.stats()["rounds"] == rounds
    with pytest.raises(TypeError, match="submit has no parameter 'sampling_params'; the nearest known one is 'sampl"):
        engine.submit("a", sampling_params=GREEDY)


@pytest.mark.parametrize("wrong", ["zz", None, 3])
def test_only_what_was_submitted_can_be_cancelled(engine, wrong):
    group = engine.submit("a", GREEDY)
    with pytest.raises(TypeError, match=rf"cancel was given {wrong!r} .*; expected what submit\(\) returned"):
        engine.cancel(wrong)
    engine.drain()
    assert group.sequences[0].finish_reason == "length"


@pytest.mark.parametrize("call", ["spill_to_host", "prefetch"])
def test_only_samples_can_be_offloaded(engine, call):
    group = engine.submit("a", GREEDY)
    for wrong in (group, None):
        with pytest.raises(TypeError, match=rf"{call} was given .*; expected a sample of what submit\(\) returned"):
            getattr(engine, call)(wrong)
    engine.drain()
    assert group.output().completions[0].finish_reason == "length"


def test_a_request_that_goes_on_has_no_output_yet(engine):
    group = engine.submit("a", GREEDY)
    with pytest.raises(RuntimeError, match=r"has not ended; call engine.step_round\(\) until request.is_done"):
        group.output()
    engine.drain()
    assert group.output().error is None


def test_a_prepared_request_that_was_cancelled_is_not_submitted(engine):
    prepared = engine.prepare(Request("a", id="q"))
    engine.cancel(prepared)
    with pytest.raises(ValueError, match="request 'q' was cancelled; prepare it again"):
        engine.submit(prepared)


def test_outputs_are_equal_if_all_of_their_numbers_are(engine):
    sampling = SamplingParams(max_tokens=5, seed=3, n=2)
    first, second = (engine.generate(Request("hello", sampling=sampling, id="a"))[0] for _ in range(2))
    second = dataclasses.replace(second, num_cached_tokens=first.num_cached_tokens)
    assert first == second and first.completions == second.completions and first.completions[0] != first.completions[1]
    completion = second.completions[1]
    for field in ("logprobs", "token_versions"):
        changed = dataclasses.replace(completion, **{field: getattr(completion, field) + 1})
        assert changed != completion and dataclasses.replace(second, completions=[completion, changed]) != second
    scored = dataclasses.replace(first, prompt_logprobs=np.array([np.nan, 1], np.float32))
    assert scored == dataclasses.replace(scored, prompt_logprobs=scored.prompt_logprobs.copy())
    assert scored != first and first != scored and first != 3


# Chats

CHAT = [{"role": "user", "content": "hello"}]


def test_a_chat_passes_what_it_was_given_to_the_template(engine, tokenizer):
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = Request(
        messages=CHAT, tools=tools, chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False
    )
    tokens(engine.generate([request], GREEDY))
    assert tokenizer.asked == {
        "tools": tools, "add_generation_prompt": False, "continue_final_message": False, "enable_thinking": False,
    }  # fmt: skip
    for more in ({}, {"add_generation_prompt": False}):
        tokens(engine.generate([Request(messages=CHAT, continue_final_message=True, **more)], GREEDY))
        assert tokenizer.asked["continue_final_message"] is True and tokenizer.asked["add_generation_prompt"] is False
    tokens(engine.generate([CHAT], GREEDY))
    assert tokenizer.asked == {"tools": None, "add_generation_prompt": True, "continue_final_message": False}


def test_text_of_a_chat_is_encoded_without_the_tokens_around_a_prompt(engine, tokenizer):
    chat, text = engine.generate([CHAT, "hello"], GREEDY)
    assert text.prompt_token_ids == [tokenizer.encode("<|bos|>")[0], *chat.prompt_token_ids]
    assert chat.prompt_token_ids == tokenizer.encode("hello", add_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "tools": []}, "tools is for chats, and this request has no messages; leave it out"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs is for chats"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt is for chats"),
        ({"prompt_token_ids": [1], "continue_final_message": True}, "continue_final_message is for chats"),
        (
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "set add_generation_prompt=False",
        ),
        ({"messages": CHAT, "add_generation_prompt": 1}, "add_generation_prompt is 1; expected true or false"),
        ({"messages": CHAT, "tools": {"a": 1}}, "tools is dict; expected a list of tools"),
        ({"messages": CHAT, "tools": ["f"]}, r"tools\[0\] is str; expected a list of tools"),
        ({"messages": "hello"}, "messages is str; expected a list of messages"),
        ({"messages": ["hello"]}, r"messages\[0\] is str"),
        ({"messages": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs is list; expected a mapping"),
        ({"messages": CHAT, "chat_template_kwargs": {1: 2}}, "chat_template_kwargs has the key 1"),
        (
            {"messages": CHAT, "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs: 'tools' is a parameter",
        ),
        (
            {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}},
            "kwargs: 'tokenize' is no variable",
        ),
    ],
)
def test_fields_of_a_chat_that_make_no_sense_are_refused_by_name(engine, fields, message):
    good, bad = engine.generate(["a", Request(**fields)], GREEDY)
    assert good.error is None
    assert bad.error is not None
    pytest.raises(ValueError, _raise, bad.error).match(message)


def _raise(message):
    raise ValueError(message)


# Hostile input


def deep(levels: int = 100_000):
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


class Broken(Sequence):
    """A sequence that cannot be read."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise KeyError("nothing")


class BrokenLen(Broken):
    def __len__(self):
        raise AttributeError("no length")


class BrokenMapping(Mapping):
    def __getitem__(self, key):
        raise RuntimeError("no")

    def __iter__(self):
        raise RuntimeError("no")

    def __len__(self):
        return 1


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


HOSTILE = [
    None, True, -1, 0, 10**400, -(10**5000), 2**63, 0.0, float("nan"), float("inf"), 1e308, "", "x" * 3_000_000,
    "\ud800", b"x", [], [None], [float("nan")], [1.5], ["a"], [True], [-1], [10**400], [10**5000], [[1]], [[]], {},
    {"a": 1}, {1: 2}, {"tools": deep()}, [{}], [{"role": "user"}], [{"role": 1, "content": deep()}], np.asarray(5),
    np.zeros((2, 2), np.int32), np.asarray([1.5]), np.asarray([True]), np.asarray([], np.int32),
    np.asarray([2**63 - 1]), np.asarray([None]), np.float32("nan"), deep(), (), set(), object(), Unprintable(),
    [Unprintable()], Broken(), BrokenLen(), BrokenMapping(), [BrokenMapping()], int, range(10**12), memoryview(b"ab"),
    1 + 2j, SamplingParams(), Request("x"), [1] * 5_000_000,
]  # fmt: skip
FIELDS = [field.name for field in dataclasses.fields(Request)]


@pytest.mark.parametrize("field", FIELDS)
def test_whatever_a_field_holds_the_request_is_served_or_refused_alone(engine, field):
    base: dict = {"messages": CHAT} if field not in ("prompt", "prompt_token_ids") else {}
    requests = [Request(**{**base, field: value}) for value in HOSTILE]  # type: ignore[arg-type]
    begin = time.perf_counter()
    first, *outputs, last = engine.generate([Request("a"), *requests, Request("a")], GREEDY)
    assert time.perf_counter() - begin < 30
    assert tokens([first]) == tokens([last])
    refused = [output for output in outputs if output.error is not None]
    assert len(refused) >= len(HOSTILE) - 15
    for output in refused:
        assert output.completions == [] and 10 < len(output.error) < 600
    for output in outputs:
        assert isinstance(output.id, str) and len(output.id) < 5000 and len(repr(output)) < 3000
        assert output.error is not None or output.completions[0].token_ids


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SamplingParams)])
def test_whatever_a_parameter_holds_is_taken_or_refused_in_words(field):
    refused = 0
    for value in HOSTILE:
        try:
            SamplingParams(**{field: value})
        except ValueError as error:
            refused += 1
            assert field in str(error) and len(str(error)) < 600
    assert refused >= len(HOSTILE) / 2


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(EngineConfig) if field.name != "tiles"])
def test_whatever_an_engine_is_configured_with_is_taken_or_refused_in_words(field):
    for value in HOSTILE:
        try:
            EngineConfig(**{field: value})
        except ValueError as error:
            assert field in str(error) and len(str(error)) < 600


@pytest.mark.parametrize("digits", [309, 400, 5000])
def test_a_limit_of_time_of_many_digits_is_refused_alone(engine, digits):
    bad, good = engine.generate([Request("a", timeout_s=10**digits), Request("a", timeout_s=1e9)], GREEDY)
    assert "timeout_s=" in bad.error and "up to 1e9; leave it out" in bad.error
    assert good.error is None


def test_a_prompt_that_is_too_long_is_refused_before_it_is_encoded(engine, tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: asked.append(1))
    begin = time.perf_counter()
    prompts = [
        "x" * 10_000_000,
        [{"role": "user", "content": "y" * 7_000_000}],
        [1] * 5_000_000,
        np.ones(10**7, np.int32),
    ]
    outputs = engine.generate(prompts)
    assert time.perf_counter() - begin < 3 and not asked
    assert "the prompt has at least 1000000 tokens" in outputs[0].error and "max_seq_len=64" in outputs[0].error
    assert "at least 700000 tokens" in outputs[1].error
    assert "5000000 tokens" in outputs[2].error and "10000000 tokens" in outputs[3].error


def test_a_3_mb_id_is_refused_and_not_echoed(engine):
    (output,) = engine.generate([Request("a", id="i" * 3_000_000)])
    assert "expected a string of up to 4096 characters" in output.error
    assert len(output.error) < 300 and len(output.id) < 100
    assert engine.generate([Request("a", id="i" * 4096)], GREEDY)[0].id == "i" * 4096


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_bound_of_tokens_holds_for_texts_of_all_kinds(tmp_path, kind):
    tokenizer = Tokenizer.from_directory(tokenizer_files.write(tmp_path, getattr(tokenizer_files, kind)()))
    pieces = ["the", "cat", " ", "wörd ☃", "<|eos|>", "猫", "e\u0301", "\n", "hello", "▁", "🙂", "<s>", "zz", "\u1f82"]
    rng = np.random.default_rng(0)
    for length in range(1, 200):
        text = "".join(rng.choice(pieces, length))
        least, number = tokenizer.least_tokens(text), len(tokenizer.encode(text, add_special_tokens=False))
        assert 0 < least <= number
    assert tokenizer.least_tokens("the cat" * 1000) > 500


@pytest.mark.parametrize(
    ("normalizer", "holds"),
    [
        (None, True),
        ({"type": "NFC"}, True),
        ({"type": "Strip"}, False),
        ({"type": "Replace", "pattern": {"String": "aa"}, "content": ""}, False),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "aaaa"}, False),
        ({"type": "Replace", "pattern": {"String": "\N{LOWER ONE EIGHTH BLOCK}"}, "content": " "}, False),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, False),
    ],
)
def test_no_bound_is_claimed_where_text_may_be_dropped(normalizer, holds):
    content = json.loads(tokenizer_files.byte_level().to_str()) | {"normalizer": normalizer}
    assert (TokenBound(json.dumps(content))("a" * 1000) > 0) == holds
    stripping = content | {"normalizer": None}
    stripping["added_tokens"][0]["rstrip"] = True
    bound = TokenBound(json.dumps(stripping))
    assert bound(" " * 1000) == 0 < bound("a" * 1000)
    assert TokenBound(json.dumps(stripping | {"pre_tokenizer": {"type": "Whitespace"}}))("a" * 1000) == 0


# What ended it


def test_stop_reason_names_the_stop_that_matched(engine, tokenizer):
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    (free,) = engine.generate(["the cat"], greedy)[0].completions
    ids = free.token_ids
    assert free.stop_reason is None and free.finish_reason == "length"
    place = next(i for i in range(1, 12) if ids[i] not in ids[:i])

    def ended(**stops) -> tuple:
        (completion,) = engine.generate(["the cat"], dataclasses.replace(greedy, **stops))[0].completions
        return completion.finish_reason, completion.stop_reason

    pair = (ids[place - 1], ids[place])
    assert ended(stop_token_ids=[299, ids[place]]) == ("stop", ids[place])
    assert ended(stop_token_ids=[list(pair)]) == ("stop", pair)
    assert ended(stop_token_ids=[ids[place], list(pair)]) == ("stop", pair)
    assert free.text is not None
    text = free.text
    stop = next(c for c in text if c.isprintable() and c != "\ufffd")
    assert ended(stop=["no such text", stop]) == ("stop", stop)


def test_an_end_of_sequence_token_is_no_stop_that_was_asked_for(engine, tokenizer):
    (eos,) = tokenizer.eos_token_ids
    always = SamplingParams(max_tokens=5, logit_bias={eos: 1e9})
    own = dataclasses.replace(always, stop_token_ids=[eos])
    plain, asked = (output.completions[0] for output in engine.generate(["a", "a"], [always, own]))
    assert (plain.finish_reason, plain.stop_reason, plain.token_ids) == ("stop", None, [eos])
    assert (asked.finish_reason, asked.stop_reason) == ("stop", eos)


@pytest.mark.slow
def test_a_chat_ends_at_each_id_of_generation_config_and_at_no_other(engine, tmp_path):
    """As gpt-oss, Gemma, Llama 3 and GLM need it: the end of a turn is not the eos of tokenizer_config.json."""
    files = {"chat_template": tokenizer_files.CHATML, "generation_config": {"eos_token_id": [2, 40, 41]}}
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    raw = tokenizer_files.byte_level(bos=True)
    own = Tokenizer.from_directory(tokenizer_files.write(tmp_path, raw, tokenizer_config=config, **files))
    engine = InferenceEngine(tiny_model(vocab_size=300), own, engine.config)
    ids = {"<|bos|>": 0, "<|eos|>": 1, "<|im_end|>": 2, "other": 40, "another": 41}
    sampling = [SamplingParams(max_tokens=4, temperature=0.0, logit_bias={i: 1e9}) for i in ids.values()]
    outputs = engine.generate([Request(messages=[{"role": "user", "content": "hello"}])] * len(ids), sampling)
    found = {name: output.completions[0] for name, output in zip(ids, outputs, strict=True)}
    assert {name: (c.finish_reason, len(c.token_ids)) for name, c in found.items()} == {
        **dict.fromkeys(("<|bos|>", "<|eos|>"), ("length", 4)),
        **dict.fromkeys(("<|im_end|>", "other", "another"), ("stop", 1)),
    }
    assert (
        outputs[0].prompt_token_ids == own.encode(own.apply_chat_template([{"role": "user", "content": "hello"}]))[1:]
    )


def test_cumulative_logprob_is_the_sum_of_the_models(engine):
    (completion,) = engine.generate("the cat", SamplingParams(max_tokens=9, seed=3))[0].completions
    assert completion.cumulative_logprob == pytest.approx(float(np.sum(completion.logprobs, dtype=np.float64)))
    assert completion.cumulative_logprob < 0


# How it is shown


def test_results_are_shown_shortly():
    completion = Completion(
        index=1,
        token_ids=list(range(50)),
        text="word " * 1000,
        finish_reason="stop",
        logprobs=np.zeros(50, np.float32),
        processed_logprobs=np.zeros(50, np.float32),
        top_logprobs=None,
        seed=5,
        stop_reason="x",
    )
    shown = repr(completion)
    assert shown.startswith("Completion(index=1, text='word word") and "5000 characters" in shown
    assert shown.endswith("finish_reason='stop', stop_reason='x', token_ids=<50 tokens>)") and len(shown) < 300
    output = RequestOutput("7", "p" * 10**6, list(range(10**5)), [completion] * 9)
    assert "9 in all" in repr(output) and len(repr(output)) < 2000 and "id='7'" in repr(output)
    refused = RequestOutput("7", None, [], [], error="why")
    assert repr(refused) == "RequestOutput(id='7', prompt_token_ids=[], error='why')"


def test_an_engine_is_shown_by_its_sizes(engine):
    shown = repr(engine)
    assert shown.startswith("InferenceEngine(") and "max_seqs=4" in shown and len(shown) < 300
