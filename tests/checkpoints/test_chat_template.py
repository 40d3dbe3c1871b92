"""Chat templates: ordinary ones give the strings that transformers gives; hostile ones are stopped."""

import os
import resource
import time

import pytest

from levanter_infer.checkpoints import chat_template
from levanter_infer.checkpoints.chat_template import ChatTemplate
from tests.chat_cases import LLAMA_SYSTEM

CHAT = [
    {"role": "system", "content": "Be brief.\nAlways."},
    {"role": "user", "content": " 1+1? <b> "},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Why?"},
]

CHATML = """\
{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>' }}
    {% endif %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = (
    "{{- bos_token }}\n"
    + LLAMA_SYSTEM
    + """\
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}{{- raise_exception("no tools here") }}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' -%}{%- set system_message = messages[0]['content'] -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{{ bos_token }}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{% if loop.last and system_message is defined %}{{ '[INST] ' + system_message + '\\n\\n' + message['content'] + "
    "' [/INST]' }}{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
EXPECTED = {
    CHATML: (
        "<|im_start|>system\nBe brief.\nAlways.<|im_end|>\n<|im_start|>user\n 1+1? <b> <|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    ),
    LLAMA3: (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.\nAlways.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1? <b><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    MISTRAL: "<s>[INST]  1+1? <b>  [/INST] 2</s>[INST] Be brief.\nAlways.\n\nWhy? [/INST]",
}
VARIABLES = {"tools": None, "documents": None, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", EXPECTED, ids=["chatml", "llama3", "mistral"])
def test_ordinary_template_gives_the_string_of_transformers(source):
    assert ChatTemplate(source).render(CHAT, **VARIABLES) == EXPECTED[source]


def test_template_has_what_transformers_gives_it():
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ loop.index }}"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
        "{% generation %}[{{ messages[3].content }}]{% endgeneration %}"
        "{{ {'b': '<é>', 'a': [1]} | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=1) }}"
        "{{ strftime_now('%Y')|length }}{{ 'x' * 3 }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ '%s-%03d' % ('q', 5) }}"
        "{{ range(3)|list }}{{ missing }}{{ tools is none }}"
    )
    expected = '13[Why?]{"b": "<é>", "a": [1]}{\n "b": 1,\n "a": 2\n}4xxx323q-005[0, 1, 2]True'
    assert ChatTemplate(source).render(CHAT, **VARIABLES) == expected


def test_refusal_by_the_template_is_a_value_error_with_its_words():
    template = ChatTemplate(MISTRAL)
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        template.render([{"role": "assistant", "content": "hi"}], **VARIABLES)
    assert template.render(CHAT, **VARIABLES) == EXPECTED[MISTRAL]


@pytest.mark.parametrize(
    "messages, match",
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is int"),
        ([{"role": "user", "content": "x", "extra": object()}], "JSON values"),
    ],
)
def test_malformed_messages_are_refused(messages, match):
    with pytest.raises(ValueError, match=match):
        ChatTemplate(CHATML).render(messages)


DOUBLING = "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = OP %}{% endfor %}{{ ns.x|length }}"
ATTACKS = {
    "repeat": "{{ 'a' * 10**9 }}",
    "repeat_list": "{{ (10**9 * [1])|length }}",
    "power": "{{ 2 ** (2 ** 30) }}",
    "power_of_power": "{{ 10 ** 1000 ** 1000 }}",
    "square": DOUBLING.replace("'aaaa'", "7").replace("OP", "ns.x * ns.x"),
    "plus": DOUBLING.replace("OP", "ns.x + ns.x"),
    "concatenate": DOUBLING.replace("OP", "ns.x ~ ns.x"),
    "range": "{% for i in range(10**12) %}{% endfor %}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}aaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent_argument": "{{ '%*d' % (10**9, 1) }}",
    "format_method": "{{ '{:2000000000}'.format(1) }}",
    "format_filter": "{{ '%2000000000d'|format(1) }}",
    "center_folded_while_compiling": "{{ 'a'|center(2000000000) }}",
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "replace": "{{ ('a' * 999999)|replace('a', 'b'|center(999999)) }}",
    "join": "{{ range(99999)|map('string')|join('a'|center(999999)) }}",
    "indent": "{{ 'a'|indent(2000000000, true) }}",
    "batch": "{{ [1]|batch(2000000000, 0)|list }}",
    "tojson": "{{ {'a': 1}|tojson(indent=2000000000) }}",
    "lipsum": "{{ lipsum(n=10000000) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "[" * 100_000 + " }}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_template_is_stopped(name):
    """Within a fifth of a second of processor time; the bound on wall time allows for a busy machine."""
    template = ChatTemplate(ATTACKS[name], cpu_s=0.2, memory_bytes=2**29)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="chat template failed: "):
        template.render(CHAT)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    "name, says",
    [
        ("repeat", "'\\*' gives more than"),
        ("repeat_list", "'\\*' gives more than"),
        ("square", "'\\*' of integers beyond"),
        ("power", "'\\*\\*' gives an integer beyond"),
        ("plus", "'\\+' gives more than"),
        ("percent", "'%' format with a width"),
        ("range", "range of 1000000000000 items"),
        ("output", "output exceeds 8000000 characters"),
    ],
)
def test_bounded_operator_says_what_was_too_large(name, says):
    with pytest.raises(ValueError, match=says):
        ChatTemplate(ATTACKS[name]).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
    ],
)
def test_template_reaches_neither_internals_nor_files_nor_its_arguments(source):
    with pytest.raises(ValueError, match="SecurityError|no loader"):
        ChatTemplate(source).render(CHAT)


def test_template_process_sees_no_environment_of_ours(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "x")
    template = ChatTemplate("{{ messages[0].role }}")
    template.render(CHAT)
    assert template._worker is not None
    with open(f"/proc/{template._worker._process.pid}/environ") as file:
        assert "SECRET_OF_THE_CALLER" not in file.read()


def test_broken_template_is_named_as_such():
    with pytest.raises(ValueError, match="chat template is broken: line 1"):
        ChatTemplate("{% for").render(CHAT)


def test_number_of_messages_is_bounded():
    template = ChatTemplate("{{ messages | length }}")
    message = {"role": "user", "content": ""}
    assert template.render([message] * 10_000) == "10000"
    with pytest.raises(ValueError, match="messages has 10001 entries; expected at most 10000"):
        template.render([message] * 10_001)


def test_thousand_chats_share_one_process():
    template = ChatTemplate(CHATML)
    template.render(CHAT, **VARIABLES)
    assert template._worker is not None
    pid = template._worker._process.pid
    for i in range(1000):
        assert f"{i}<" in template.render([{"role": "user", "content": str(i)}], add_generation_prompt=False)
    assert template._worker._process.pid == pid


def test_process_ends_with_its_template():
    template = ChatTemplate(CHATML)
    template.render(CHAT, **VARIABLES)
    assert template._worker is not None
    pid = template._worker._process.pid
    del template
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_late_answer_of_a_worker_is_not_taken_for_that_to_the_next_chat(monkeypatch):
    template = ChatTemplate("{{ messages[0]['content'] }}")
    assert template.render([{"role": "user", "content": "first"}]) == "first"
    late = template._worker
    select = chat_template.select.select
    monkeypatch.setattr(chat_template.select, "select", lambda *_: ([], [], []))
    with pytest.raises(ValueError, match="too long"):
        template.render([{"role": "user", "content": "second"}])
    monkeypatch.setattr(chat_template.select, "select", select)
    assert not late.is_usable and template.render([{"role": "user", "content": "third"}]) == "third"


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of other processes are readable on Linux only")
def test_the_worker_writes_no_core_file_and_has_a_bound_on_its_memory():
    template = ChatTemplate(CHATML)
    template.render(CHAT)
    assert template._worker is not None
    process = template._worker._process.pid
    assert resource.prlimit(process, resource.RLIMIT_CORE) == (0, 0)
    memory, most = resource.prlimit(process, resource.RLIMIT_AS)
    assert 0 < memory == most < 2**33
