"""Chats are rendered as transformers 5 renders them, byte for byte; what cannot be rendered fails alone and by name."""

import json
import logging
import math
import re
import select
import subprocess
import sys
import uuid
from datetime import datetime

import fsspec
import pytest

from levanter_infer.checkpoints import chat_template
from levanter_infer.checkpoints.chat import check_template_kwargs
from levanter_infer.checkpoints.chat_template import ChatTemplate
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.checkpoints.tokenizer import Tokenizer
from tests.chat_cases import CHATS, TAKES_PARTS, TEMPLATES, TOOLS, USER
from tests.golden_cases import GOLDEN_DIR
from tests.tokenizer_files import byte_level, write

GOLDEN = json.loads((GOLDEN_DIR / "chats.json").read_text())
JOINED = {"parts": "What is\n this? ", "part": "What is", "continue_parts": "What is\n this? "}
JOINED["result_parts"] = JOINED["parts"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    def make(name):
        directory = tmp_path_factory.mktemp(name)
        files = {"tokenizer_config": GOLDEN["tokenizer_config"], "chat_template": TEMPLATES[name]}
        return Tokenizer.from_directory(write(directory, byte_level(), **files))

    return {name: make(name) for name in TEMPLATES}


def rendered(tokenizer, chat):
    messages, arguments = CHATS[chat]
    return tokenizer.apply_chat_template(messages, **{"add_generation_prompt": False, **arguments})


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_equal_those_of_transformers(tokenizers, name):
    compared = 0
    for chat in CHATS:
        expected = GOLDEN["chats"][f"{name}/{chat}"]
        if chat in JOINED and name not in TAKES_PARTS:
            continue
        if isinstance(expected, dict):
            with pytest.raises(ValueError):
                rendered(tokenizers[name], chat)
        else:
            assert rendered(tokenizers[name], chat) == expected, chat
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize("chat", JOINED)
@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - set(TAKES_PARTS)))
def test_parts_are_joined_for_a_template_that_adds_strings(tokenizers, name, chat):
    messages, arguments = CHATS[chat]
    plain = [*messages[:-1], {**messages[-1], "content": JOINED[chat]}]
    arguments = {"add_generation_prompt": False, **arguments}
    try:
        expected = tokenizers[name].apply_chat_template(plain, **arguments)
    except ValueError as refusal:  # of the role
        assert name == "gemma"
        with pytest.raises(ValueError, match=re.escape(str(refusal))):
            tokenizers[name].apply_chat_template(messages, **arguments)
        return
    text = JOINED[chat].strip()
    assert text in expected or json.dumps(text) in expected or json.dumps(JOINED[chat]) in expected
    assert tokenizers[name].apply_chat_template(messages, **arguments) == expected


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'][1:] | list %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% set c = messages[0].content %}{% set d = c %}{% for p in d or [] %}{{ p }}{% endfor %}", True),
        ("{% macro f(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}{{ f(messages[0].content) }}", True),
        ("{% macro f(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}{{ f(messages) }}", False),
        (
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}{% endfor %}",
            False,
        ),
    ],
)
def test_a_template_that_loops_over_contents_takes_parts(source, expected):
    template = ChatTemplate(source)
    template.render([{"role": "user", "content": "x"}])
    assert template._description["takes_parts"] is expected


def test_generation_prompt_is_the_default_unless_a_message_is_continued(tokenizers):
    tokenizer = tokenizers["chatml"]
    assert tokenizer.apply_chat_template([USER]).endswith("<|im_start|>assistant\n")
    assert tokenizer.apply_chat_template([USER], continue_final_message=True).endswith("é猫</b> ")
    with pytest.raises(ValueError, match="add_generation_prompt and continue_final_message are both true"):
        tokenizer.apply_chat_template([USER], continue_final_message=True, add_generation_prompt=True)


def get_weather(city: str):
    """The weather."""


@pytest.mark.parametrize(
    "messages, arguments, match",
    [
        ([{"role": 3, "content": "x"}], {}, r"messages\[0\].role is int; expected a string"),
        ([{"role": None, "content": "x"}], {}, r"messages\[0\] has no role"),
        ([USER, None], {}, r"messages\[1\] is None"),
        ([{"role": "user", "content": {"a": 1}}], {}, r"messages\[0\].content is dict; expected a string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            {},
            r"messages\[0\].content\[0\] is a part of type 'image_url'; only parts of type 'text'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, r"content\[0\].text is absent; expected a string"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], {}, r"content\[0\].text is int"),
        ([{"role": "user", "content": ["x"]}], {}, r"content\[0\] is 'x'; expected {\"type\""),
        ([USER], {"tools": [get_weather]}, r"tools\[0\] is the function get_weather; expected its JSON schema"),
        ([USER], {"tools": "x"}, "tools is str; expected a list of JSON schemas"),
        ([USER], {"tools": [1]}, r"tools\[0\] is 1; expected a JSON schema"),
        ([USER], {"tools": [{"f": get_weather}]}, "JSON values only: function is not serializable"),
        (
            [USER],
            {"chat_template": "{{ x }}"},
            r"has no chat template '{{ x }}'; its templates are default: choose one",
        ),
        (
            [USER],
            {"chat_template": ["rag"]},
            "chat_template is list; expected the name of one of the model's templates",
        ),
        ([USER], {"tokenize": False}, "'tokenize' is no variable of a template; the text is returned"),
        ([USER], {"x": object()}, "JSON values only: object is not serializable"),
    ],
)
def test_what_is_no_chat_is_refused_by_name(tokenizers, messages, arguments, match):
    with pytest.raises(ValueError, match=match):
        tokenizers["chatml"].apply_chat_template(messages, **arguments)
    assert tokenizers["chatml"].apply_chat_template([USER])


def test_names_of_parameters_are_no_variables_of_the_template():
    check_template_kwargs({"enable_thinking": False})
    with pytest.raises(ValueError, match="'tools' is a parameter of its own"):
        check_template_kwargs({"tools": []})
    for wrong in (3, "no name", ""):
        with pytest.raises(ValueError, match=f"has the key {wrong!r}; expected the name of a template's variable"):
            check_template_kwargs({wrong: 1})
    with pytest.raises(ValueError, match="chat_template is list; expected the name of one of the model's templates"):
        check_template_kwargs({"chat_template": ["rag"]})
    with pytest.raises(ValueError, match="chat_template_kwargs is list; expected a mapping"):
        check_template_kwargs([])


def test_a_variable_that_the_template_does_not_read_is_named_once(tokenizers, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tokenizers["qwen3"].apply_chat_template([USER], enable_thinkng=False, enable_thinking=False)
    assert [record.getMessage() for record in caplog.records] == [
        "the model's chat template reads no variable 'enable_thinkng', which was given to it"
    ]


def test_names_that_clients_choose_are_neither_all_kept_nor_shown_in_full(caplog):
    template = ChatTemplate("{{ messages[0].content }}")
    template.render([USER])
    with caplog.at_level(logging.WARNING):
        for i in range(300):
            template.warn_of_unread([f"x{i}" + "y" * 100_000])
    shown = [record.getMessage() for record in caplog.records]
    assert 1 < len(shown) <= 100 and max(map(len, shown)) < 200
    assert sum(map(len, template._warned)) < 10_000


def nested(depth: int, make):
    value: object = "x"
    for _ in range(depth):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda v: [v], lambda v: {"a": v}], ids=["list", "mapping"])
@pytest.mark.parametrize("place", ["entry", "content", "role", "message", "tool", "variable"])
@pytest.mark.parametrize("depth", [400, 100_000])
def test_deep_nesting_is_that_chats_error(tokenizers, make, place, depth):
    value, tokenizer = nested(depth, make), tokenizers["qwen3"]
    deep = {
        "entry": ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": value}}]}], {}),
        "content": ([{"role": "user", "content": value}], {}),
        "role": ([{"role": value, "content": "x"}], {}),
        "message": ([value], {}),
        "tool": ([USER], {"tools": [{"f": value}]}),
        "variable": ([USER], {"x": value}),
    }
    messages, arguments = deep[place]
    try:
        tokenizer.apply_chat_template(messages, **arguments)
        assert depth == 400
    except ValueError:
        pass
    assert tokenizer.apply_chat_template([USER]) == rendered(tokenizer, "prompt")


def test_numbers_that_are_not_finite_are_printed_as_transformers_prints_them(tokenizers):
    tools = [{"a": math.nan, "b": -math.inf}]
    assert '{"a": NaN, "b": -Infinity}' in tokenizers["qwen3"].apply_chat_template([USER], tools=tools)


LOOPING = (
    "{% if messages[0].role == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}ok {{ messages[0].content }}"
)


def test_a_chat_that_runs_into_a_limit_fails_alone_however_often():
    template = ChatTemplate(LOOPING, cpu_s=0.2)
    for i in range(6):
        with pytest.raises(ValueError, match="takes too long"):
            template.render([{"role": "loop"}])
        assert template.render([{"role": "user", "content": str(i)}]) == f"ok {i}"


def test_a_chat_of_many_messages_may_take_longer():
    source = "{% for m in messages %}{% for a in range(20000) %}{% endfor %}{% endfor %}{{ messages|length }}"
    template = ChatTemplate(source, cpu_s=0.1)
    assert template.render([USER] * 500) == "500"


def test_a_template_that_cannot_be_compiled_is_tried_three_times(monkeypatch):
    template, started = ChatTemplate("{{ a }}" * 100_000, cpu_s=0.05), []
    real = chat_template._Worker
    monkeypatch.setattr(chat_template, "_Worker", lambda: started.append(real()) or started[-1])
    for _ in range(5):
        with pytest.raises(ValueError, match="chat template failed: it takes too long"):
            template.render([USER])
    assert len(started) == 3


IGNORES_AND_BLOCKS = """
import signal

from levanter_infer.checkpoints.chat_template import ChatTemplate

signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
try:
    ChatTemplate("{{ a }}" * 100_000, cpu_s=0.05).render([{"role": "user", "content": "hi"}])
except ValueError as e:
    print(e)
"""


def test_processor_time_is_limited_where_the_parent_ignores_and_blocks_the_signal():
    # In a process of its own: libtpu sets timers of this signal, and Python knows nothing of its handler to restore it.
    done = subprocess.run([sys.executable, "-c", IGNORES_AND_BLOCKS], capture_output=True, text=True, timeout=60)
    assert "chat template failed: it takes too long" in done.stdout, done.stderr


def test_an_interrupted_chat_leaves_no_answer_to_the_next(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": "first"}]) == "first"
    real = select.select

    def interrupted(*arguments):
        monkeypatch.setattr(select, "select", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(select, "select", interrupted)
    with pytest.raises(KeyboardInterrupt):
        template.render([{"role": "user", "content": "second"}])
    assert template.render([{"role": "user", "content": "third"}]) == "third"


NAMED = {"default": "d", "tool_use": "{{ tools|length }}", "rag": "{{ documents[0].text }}"}


def as_config(directory, names):
    named = [{"name": name, "template": NAMED[name]} for name in names]
    write(directory, byte_level(), tokenizer_config={"chat_template": named})


def as_files(directory, names):
    write(directory / "additional_chat_templates", byte_level(), **{n: NAMED[n] for n in names if n != "default"})
    write(directory, byte_level(), **({"chat_template": NAMED["default"]} if "default" in names else {}))


@pytest.mark.parametrize("save", [as_config, as_files])
def test_a_template_is_chosen_by_name_and_by_tools_as_transformers_chooses(tmp_path, save):
    save(tmp_path / "three", NAMED)
    tokenizer = Tokenizer.from_directory(tmp_path / "three")
    assert tokenizer.apply_chat_template([USER]) == "d"
    assert tokenizer.apply_chat_template([USER], tools=TOOLS) == "2"
    assert tokenizer.apply_chat_template([USER], tools=[]) == "0"
    assert tokenizer.apply_chat_template([USER], tools=TOOLS, chat_template="default") == "d"
    assert tokenizer.apply_chat_template([USER], documents=[{"text": "é"}], chat_template="rag") == "é"
    with pytest.raises(ValueError, match="no chat template 'rga'; its templates are default, rag, tool_use"):
        tokenizer.apply_chat_template([USER], chat_template="rga")

    save(tmp_path / "two", ["default", "rag"])
    assert Tokenizer.from_directory(tmp_path / "two").apply_chat_template([USER], tools=TOOLS) == "d"

    save(tmp_path / "one", ["tool_use"])
    tokenizer = Tokenizer.from_directory(tmp_path / "one")  # prompts and chats with tools remain possible
    assert tokenizer.apply_chat_template([USER], tools=TOOLS) == "2"
    with pytest.raises(ValueError, match="no chat template 'default'; its templates are tool_use: choose one by chat_"):
        tokenizer.apply_chat_template([USER])


def test_files_of_templates_come_before_tokenizer_config_and_a_processors_last(tmp_path):
    as_files(tmp_path, ["default", "rag"])
    write(tmp_path, byte_level(), tokenizer_config={"chat_template": "c"})
    assert Tokenizer.from_directory(tmp_path).apply_chat_template([USER]) == "d"
    processors = {"chat_template": {"chat_template": "{{ messages[0].role }}"}}
    both = write(tmp_path / "both", byte_level(), tokenizer_config={"chat_template": "c"}, **processors)
    assert Tokenizer.from_directory(both).apply_chat_template([USER]) == "c"
    alone = write(tmp_path / "alone", byte_level(), **processors)
    assert Tokenizer.from_directory(alone).apply_chat_template([USER]) == "user"


def test_a_template_of_a_name_changes_the_fingerprint(tmp_path):
    as_files(tmp_path, ["default", "rag"])
    before = Tokenizer.from_directory(tmp_path).fingerprint
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("other")
    assert Tokenizer.from_directory(tmp_path).fingerprint != before


def test_named_templates_are_read_from_a_url(tmp_path):
    as_files(tmp_path / "model", NAMED)
    fs = fsspec.filesystem("memory")
    root = f"/{uuid.uuid4().hex}"
    fs.put(f"{tmp_path}/model/", f"{root}/", recursive=True)
    tokenizer = Tokenizer.from_source(resolve_source(f"memory:/{root}"))
    fs.rm(root, recursive=True)
    assert tokenizer.apply_chat_template([USER], documents=[{"text": "x"}], chat_template="rag") == "x"


def test_the_clock_of_a_template_is_that_of_the_machine():
    template = ChatTemplate("{{ strftime_now('%d %B %Y, %A') }}")
    days = [datetime.now().strftime("%d %B %Y, %A")]
    text = template.render([USER])
    assert text in [*days, datetime.now().strftime("%d %B %Y, %A")]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_may_be_as_long_as_a_prompt(tokenizers, name):
    text = "the cat " * 300_000
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text}, USER]
    assert tokenizers[name].apply_chat_template(chat).count(text[:-1]) == 2
