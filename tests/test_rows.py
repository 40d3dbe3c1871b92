"""Rows in: each wrong one is an error of its own. Rows out: complete or not at all, never over something else."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from levanter_infer.columns import Columns
from levanter_infer.config import OutputConfig, load_config
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import RequestOutput
from levanter_infer.io import prompts
from levanter_infer.io.output import RowWriter
from levanter_infer.io.paths import local_path
from levanter_infer.io.prompts import columns_of, read_rows
from levanter_infer.io.terminal import escape_for_terminal


def config_of(**values):
    return dataclasses.replace(load_config(None, [("model", "m"), ("prompts", "x")]), prompts=None, **values)


def read(tmp_path, content, name="rows.jsonl", **values):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    config = config_of(prompts_file=str(path), **values)
    return read_rows(config, columns=columns_of(config))


def test_prompts_of_the_configuration_are_numbered():
    config = dataclasses.replace(load_config(None, [("model", "m"), ("prompts", "a"), ("prompts", "b")]))
    assert [(r.id, r.request.prompt, r.request.id) for r in read_rows(config)] == [("0", "a", "0"), ("1", "b", "1")]


def test_chat_makes_each_prompt_a_message(tmp_path):
    config = dataclasses.replace(load_config(None, [("model", "m"), ("prompts", "a")]), chat=True)
    message = [{"role": "user", "content": "a"}]
    assert read_rows(config)[0].request.messages == message
    assert read(tmp_path, '{"prompt": "a"}', chat=True)[0].request.messages == message
    assert read_rows(config_of(chat=message))[0].request.messages == message


def test_text_file_has_one_prompt_a_line(tmp_path):
    result = read(tmp_path, "17+25=\r\n\n  two words \nümläut", name="prompts.txt")
    assert [r.request.prompt for r in result] == ["17+25=", "  two words ", "ümläut"]
    assert [r.id for r in result] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["rows.jsonl", "ROWS.JSONL", "rows.txt"])
def test_byte_order_mark_and_the_case_of_the_suffix_change_nothing(tmp_path, name):
    line = b"a" if name.endswith(".txt") else b'{"prompt": "a"}'
    assert [r.request.prompt for r in read(tmp_path, b"\xef\xbb\xbf" + line, name=name)] == ["a"]


def test_row_with_two_prompts_is_refused_in_a_chat_too(tmp_path):
    line = '{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}'
    assert "got prompt and messages" in read(tmp_path, line, chat=True)[0].error


def test_key_written_twice_is_an_error_of_the_row(tmp_path):
    result = read(tmp_path, '{"prompt": "a", "prompt": "b"}\n{"prompt": "c"}')
    assert "a key is written twice" in result[0].error and result[1].request.prompt == "c"


def test_jsonl_row_may_have_each_kind_of_prompt_an_id_and_sampling(tmp_path):
    lines = [
        {"prompt": "a"},
        {"prompt_token_ids": [1, 2], "id": 17},
        {"messages": [{"role": "user", "content": "x"}], "id": "chat", "sampling": {"top_k": 7, "seed": 3}},
    ]
    base = SamplingParams(temperature=0.5, stop=["x"], seed=9, logit_bias={3: 1.0})
    result = read(tmp_path, "\n".join(map(json.dumps, lines)), sampling=base)
    assert [r.id for r in result] == ["0", "17", "chat"] == [r.request.id for r in result]
    assert result[1].request.prompt_token_ids == [1, 2]
    assert result[0].request.sampling == dataclasses.replace(base, seed=None)
    assert result[2].request.sampling == dataclasses.replace(base, top_k=7, seed=3)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "the line is not JSON"),
        ("[" * 100_000, "the line is not JSON that can be read: it is nested too deeply; make it flatter"),
        ("9" * 5000, "a number in it has more than 4300 digits; expected numbers of at most 64 bits"),
        ('{"prompt": "a", "sampling": {"seed": ' + "9" * 4000 + "}}", "use a seed of at most 64 bits"),
        ('{"prompt_token_ids": ["' + "x" * 100_000 + '"]}', "prompt_token_ids[0] is 'xxx"),
        ('{"prompt_token_ids": [1, true]}', "prompt_token_ids[1] is True; expected a token id, a whole number from 0"),
        ('{"prompt_token_ids": [1, 4294967296]}', "prompt_token_ids[1] is 4294967296; expected a token id"),
        ("3", "the row is 3; expected an object"),
        ("{}", "expected one of prompt, prompt_token_ids, messages; got none"),
        ('{"prompt": "a", "messages": []}', "got prompt and messages"),
        ('{"promt": "a"}', "unknown key promt; did you mean prompt?"),
        ('{"prompt": 3}', "prompt is 3; expected a string"),
        ('{"prompt_token_ids": "12"}', "prompt_token_ids is '12'; expected a list"),
        ('{"messages": {}}', "messages is {}; expected a list"),
        ('{"prompt": "a", "id": 1.5}', "id is 1.5; expected a string of at most 4096 characters or a whole number"),
        ('{"prompt": "a", "id": true}', "id is True; expected a string of at most 4096 characters or a whole number"),
        ('{"prompt": "a", "sampling": 3}', "sampling is 3; expected an object"),
        ('{"prompt": "a", "sampling": {"temp": 3}}', "no parameter 'temp'"),
        ('{"prompt": "a", "sampling": {"max_tokens": 0}}', "max_tokens=0: expected"),
        ('{"prompt": "a", "sampling": {"temperature": NaN}}', "the line is not JSON: it holds NaN"),
        ('{"prompt": "a", "sampling": {"temperature": 1e999}}', "temperature=inf: expected"),
        ('{"prompt": "a", "sampling": {"n": 5000}}', "sampling.n=5000; expected at most 4096"),
        ('{"prompt": "a", "id": "0"}', "id '0' is that of"),
        (b'{"prompt": "\xff"}', "the line is not UTF-8"),
    ],
)
def test_wrong_row_is_an_error_of_that_row_alone(tmp_path, line, message):
    line = line.encode() if isinstance(line, str) else line
    result = read(tmp_path, b'{"prompt": "before"}\n' + line + b'\n{"prompt": "after"}\n')
    assert [r.error is None for r in result] == [True, False, True]
    assert result[1].request is None
    assert f"{tmp_path / 'rows.jsonl'}:2: " in result[1].error and message in result[1].error
    assert len(result[1].error) < 700  # however long the row is


def test_overlong_line_is_an_error_of_that_row_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_LINE_BYTES", 30)
    content = json.dumps({"prompt": "x" * 100}) + '\n{"prompt": "after"}\n' + json.dumps({"prompt": "y" * 10}) + "\n"
    result = read(tmp_path, content)
    assert "longer than 30 bytes" in result[0].error
    assert [r.request.prompt for r in result[1:]] == ["after", "y" * 10]
    (marked,) = read(tmp_path, b"\xef\xbb\xbf" + b"x" * 30, name="p.txt")  # with its mark it is too long
    assert "longer than 30 bytes" in marked.error


def test_number_of_rows_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_ROWS", 3)
    assert len(read(tmp_path, "a\nb\nc\n", name="p.txt")) == 3
    with pytest.raises(ValueError, match=r"p.txt:4: more than 3 rows; split the file"):
        read(tmp_path, "a\nb\nc\nd\n", name="p.txt")


def test_file_that_cannot_be_read_stops_the_run(tmp_path):
    with pytest.raises(ValueError, match="cannot read prompts_file .*nope.jsonl: No such file"):
        read_rows(config_of(prompts_file=str(tmp_path / "nope.jsonl")))
    with pytest.raises(ValueError, match="expected .jsonl with one row a line"):
        read_rows(config_of(prompts_file=str(tmp_path / "rows.json")))
    with pytest.raises(ValueError, match="has no rows"):
        read(tmp_path, "\n\n")


def test_files_may_be_given_as_local_urls(tmp_path):
    (tmp_path / "my rows.txt").write_text("a\n")
    (row,) = read_rows(config_of(prompts_file=f"file://{tmp_path}/my rows.txt"))
    assert row.request is not None and row.request.prompt == "a"
    write_all(f"file://{tmp_path}/out.jsonl", [{"a": 1}])
    assert (tmp_path / "out.jsonl").read_text() == '{"a": 1}\n'


@pytest.mark.parametrize("url", ["gs://bucket/rows.jsonl", "file://host/rows.jsonl", "https://example.org/rows.jsonl"])
def test_files_that_are_not_local_are_refused(url):
    with pytest.raises(ValueError, match=f"prompts_file {url}: expected a local file.*levanter_infer.batch"):
        read_rows(config_of(prompts_file=url))
    with pytest.raises(ValueError, match=f"output {url}: expected a local file"):
        RowWriter(url)


def test_row_that_json_cannot_hold_is_an_error_and_the_others_are_written(tmp_path):
    path = tmp_path / "out.jsonl"
    write_all(path, [{"id": "a", "x": 1.0}, {"id": "b", "x": float("nan"), "y": [{1}], "z": "kept"}, {"id": "c"}])
    first, wrong, last = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {"id": "a", "x": 1.0} and last == {"id": "c"}
    assert (wrong["id"], wrong["x"], wrong["y"], wrong["z"]) == ("b", None, [], "kept")
    assert "the row cannot be written as JSON: x, y: " in wrong["error"]


def test_value_that_json_does_not_have_is_refused_where_it_is_read_and_costs_no_other_row(tmp_path):
    """A NaN among token ids used to be refused by the engine and, after sampling, to end the writing of all rows."""
    lines = ['{"prompt": "a"}', '{"prompt_token_ids": [NaN]}', '{"prompt_token_ids": [1e999]}', '{"id": -Infinity}']
    result = read(tmp_path, "\n".join(lines))
    assert result[0].error is None
    assert "it holds NaN, which JSON does not have; write a number or null" in result[1].error
    assert "prompt_token_ids[0] is inf; expected a token id" in result[2].error
    assert "it holds -Infinity" in result[3].error
    columns = Columns(SamplingParams())
    outputs = [RequestOutput(row.id, None, [float("nan"), "x"], [], error=row.error) for row in result[1:]]
    write_all(tmp_path / "out.jsonl", [row for output in outputs for row in columns.rows(output)])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt_token_ids"] for row in rows] == [[], [], []] and all(row["error"] for row in rows)


@pytest.mark.parametrize("size", [4097, 3_000_000])
def test_id_of_any_length_is_refused_and_not_echoed(tmp_path, size):
    (row,) = read(tmp_path, json.dumps({"prompt": "a", "id": "x" * size}))
    assert row.id == "0" and "expected a string of at most 4096 characters" in row.error and len(row.error) < 500
    (row,) = read(tmp_path, '{"prompt": "a", "id": 1' + "0" * 4200 + "}")
    assert row.id == "0" and "or a whole number" in row.error and len(row.error) < 500
    assert read(tmp_path, json.dumps({"prompt": "a", "id": "x" * 4096}))[0].id == "x" * 4096


CHATS = [{"role": "user", "content": "x"}]


def test_keys_of_chats_reach_the_request_those_of_the_row_before_those_of_the_configuration(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    own = {"chat_template_kwargs": {"b": 2}, "continue_final_message": True, "tools": tools}
    lines = [{"messages": CHATS}, {"messages": CHATS, **own}, {"prompt": "plain"}]
    given = {"chat_template_kwargs": {"a": 1, "b": 1}}
    result = [row.request for row in read(tmp_path, "\n".join(map(json.dumps, lines)), **given)]
    assert result[0].chat_template_kwargs == {"a": 1, "b": 1} and result[0].tools is None
    assert result[1].chat_template_kwargs == {"a": 1, "b": 2} and result[1].continue_final_message is True
    assert result[0].add_generation_prompt is result[1].add_generation_prompt is None  # the engine decides
    assert result[1].tools == tools
    assert result[2].chat_template_kwargs is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "tools": []}, "tools with prompt; it is for chats: leave it out, or give messages"),
        ({"prompt_token_ids": [1], "add_generation_prompt": True}, "add_generation_prompt with prompt_token_ids"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs with prompt"),
        ({"prompt": "a", "continue_final_message": False}, "continue_final_message with prompt"),
        ({"messages": CHATS, "tools": [1]}, "tools is [1]; expected a list of objects"),
        ({"messages": CHATS, "chat_template_kwargs": 3}, "chat_template_kwargs is int; expected a mapping"),
        ({"messages": CHATS, "chat_template_kwargs": {"messages": []}}, "'messages' is a parameter of its own"),
        ({"messages": CHATS, "add_generation_prompt": 1}, "add_generation_prompt is 1; expected true or false"),
        (
            {"messages": CHATS, "add_generation_prompt": True, "continue_final_message": True},
            "are both true; a chat either continues",
        ),
    ],
)
def test_keys_of_chats_are_refused_by_name_where_they_make_no_sense(tmp_path, row, message):
    assert message in read(tmp_path, json.dumps(row))[0].error


def test_chat_keys_of_the_configuration_are_checked():
    base = [("model", "m"), ("prompts", "x")]
    config = load_config(None, [*base, ("chat_template_kwargs", "{enable_thinking: false}"), ("chat", "true")])
    assert read_rows(config)[0].request.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(ValueError, match="tools"):
        load_config(None, [*base, ("tools", "3")])
    with pytest.raises(ValueError, match="'tokenize' is no variable of a template"):
        load_config(None, [*base, ("chat_template_kwargs", "{tokenize: false}")])
    with pytest.raises(ValueError, match="are both true"):
        load_config(None, [*base, ("add_generation_prompt", "true"), ("continue_final_message", "true")])


def test_row_that_asks_for_a_column_that_the_output_lacks_is_refused(tmp_path):
    lines = '{"prompt": "a", "sampling": {"logprobs": 2}}\n{"prompt": "b"}'
    result = read(tmp_path, lines)
    assert result[1].error is None
    assert "asks for logprobs and top_logprobs" in result[0].error
    assert "output.include: [logprobs, top_logprobs]" in result[0].error
    for values in (
        {"sampling": SamplingParams(logprobs=1)},
        {"output": OutputConfig("x", include=["logprobs", "top_logprobs"])},
    ):
        assert [row.error for row in read(tmp_path, lines, **values)] == [None, None]


def write_all(path, content, **options):
    with RowWriter(path, **options) as writer:
        writer.write(content)
        writer.commit()


def test_rows_appear_at_commit_under_the_files_name(tmp_path):
    path = tmp_path / "out.jsonl"
    with RowWriter(path) as writer:
        writer.write([{"text": "é\n\x1b"}, {"text": "\ud800 half"}])
        assert not path.exists()
        writer.commit()
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["é\n\x1b", "\ud800 half"]
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_existing_output_is_replaced_only_when_told(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("precious")
    with pytest.raises(ValueError, match="exists; give another name, or --overwrite"):
        RowWriter(path)
    assert path.read_text() == "precious"
    write_all(path, [{"a": 1}], overwrite=True)
    assert path.read_text() == '{"a": 1}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_output_that_appears_during_the_run_is_not_replaced(tmp_path):
    path = tmp_path / "out.jsonl"
    with RowWriter(path) as writer:
        writer.write([{"a": 1}])
        path.write_text("precious")
        with pytest.raises(ValueError, match=r"appeared meanwhile; the rows are in .*\.partial"):
            writer.commit()
    assert path.read_text() == "precious"
    assert (tmp_path / "out.jsonl.partial").read_text() == '{"a": 1}\n'


def test_run_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyboardInterrupt), RowWriter(tmp_path / "out.jsonl") as writer:
        writer.write([{"a": 1}])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_partial_file_of_a_killed_run_is_taken_over_and_that_of_a_living_one_is_not(tmp_path):
    path = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.partial").write_text("left by a killed run\n")
    with RowWriter(path) as writer:
        with pytest.raises(ValueError, match="another run is writing"):
            RowWriter(path)
        writer.write([{"a": 1}])
        writer.commit()
    assert path.read_text() == '{"a": 1}\n'


@pytest.mark.parametrize("at", ["none", "none/deeper", "file"])
def test_output_in_a_directory_that_does_not_exist_is_refused_with_what_to_do(tmp_path, monkeypatch, at):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    remedy = f"expected a directory {at}; make it first .mkdir -p {at}., or" if at != "file" else "file is no directory"
    message = f"^cannot write output {at}/out: (No such file|Not a) .*irectory; {remedy}.* give another name"
    with pytest.raises(ValueError, match=message):
        RowWriter(f"{at}/out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("make", [lambda p: p / "none" / "out", lambda p: p])
def test_output_that_cannot_be_written_is_named(tmp_path, make):
    with pytest.raises(ValueError, match="output .*(No such file|is a directory)"):
        RowWriter(make(tmp_path))


def test_terminal_text_has_no_control_characters():
    hostile = "a\x1b[2J\x07\x9b31m\r\x00\u202e\u2066\u2028\ud800\U000e0041\x7f\ue000"
    assert escape_for_terminal(hostile) == (
        "a\\x1b[2J\\x07\\x9b31m\\x0d\\x00\\u202e\\u2066\\u2028\\ud800\\U000e0041\\x7f\\ue000"
    )
    assert escape_for_terminal("tab\tline\nümläut 猫🙂 👩\u200d🔬 [red]") == "tab\tline\nümläut 猫🙂 👩\u200d🔬 [red]"


TOO_LARGE = """
import pathlib, resource, signal
from levanter_infer.batch.store import LocalStore
from levanter_infer.io.output import RowWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
folder = pathlib.Path.cwd()
def written(): RowWriter(folder / "out").write([{"id": "x" * 10**6}])
def added(): LocalStore(folder).claim("journal").add(b"x" * 10**6)
def put(): LocalStore(folder).put("part", b"x" * 10**6)
for act in (written, added, put):
    try:
        act()
    except (OSError if act is not written else ValueError) as error:
        print(error)
"""


def test_file_that_becomes_too_large_is_named_with_a_remedy(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(prompts.__file__).parents[2])}
    line = [sys.executable, "-c", TOO_LARGE]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    expected = [f"cannot write {what}{tmp_path}/{n}" for what, n in (("output ", "out"), ("", "journal"), ("", "part"))]
    assert len(done.stdout.splitlines()) == 3, done.stderr
    for line, prefix in zip(done.stdout.splitlines(), expected, strict=True):
        assert line.startswith(f"{prefix}: File too large; the file system, or the limit of `ulimit -f`, allows no")


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_output_without_a_name_is_refused(path):
    with pytest.raises(ValueError, match="has no file name"):
        RowWriter(path)


def test_output_with_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot write output .*: File name too long"):
        RowWriter(tmp_path / ("x" * 300))


def test_pipe_or_device_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a device or a pipe"):
        RowWriter(tmp_path / "pipe", overwrite=True)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def test_link_that_leads_nowhere_is_refused_before_the_work(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="exists; give another name"):
        RowWriter(tmp_path / "link")


@pytest.mark.parametrize("taken", [False, True])
def test_output_appears_on_a_file_system_without_hard_links(tmp_path, monkeypatch, taken):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "out.jsonl"
    with RowWriter(path) as writer:
        writer.write([{"a": 1}])
        if taken:
            path.write_text("mine")
            with pytest.raises(ValueError, match="appeared meanwhile"):
                writer.commit()
        else:
            writer.commit()
    assert path.read_text() == ("mine" if taken else '{"a": 1}\n')


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/a.jsonl", "output") == tmp_path / "a.jsonl"
    assert local_path("~no-such-user/a", "output") == Path("~no-such-user/a")
    assert local_path("file:///~/a", "output") == Path("/~/a")
