"""The command: what it prints, writes and returns, for what it is given."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import levanter_infer
from levanter_infer import sample
from levanter_infer.checkpoints.save import save_model
from levanter_infer.cli import session
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import NOT_FINITE, Completion, Request, RequestOutput
from levanter_infer.runtime import progress
from tests.tiny_models import tiny_model
from tests.tokenizer_files import CHATML, byte_level, write

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model with a byte-level tokenizer, as an HF directory."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    changes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    save_model(tiny_model(**changes), directory)
    return write(directory, tokenizer, chat_template=CHATML, generation_config={"eos_token_id": 1})


@pytest.fixture(scope="module")
def engines():
    return []


@pytest.fixture
def one_engine(engines, monkeypatch):
    """The first engine of this file serves every test that asks for it: compiling is what takes time here."""
    make = sample.make_engine

    def make_once(config, num_rows):
        if not engines:
            engines.append(make(config, num_rows))
        return engines[0]

    monkeypatch.setattr(sample, "make_engine", make_once)


@pytest.fixture
def command(capsys):
    def run(*arguments):
        status = sample.main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


SMALL = ("--engine.max_seqs", "4", "--engine.page_size", "8", "--engine.max_step_tokens", "32")


def test_mixed_requests_give_rows_completions_summary_and_status(checkpoint, command, engines, monkeypatch, tmp_path):
    """One good request in each form, one that is refused by the engine and one that cannot be read."""
    lines = [
        {"prompt": "hello", "id": "text", "sampling": {"n": 2, "logprobs": 0}},
        {"prompt_token_ids": [3, 4, 5]},
        {"messages": [{"role": "user", "content": "the cat"}], "id": "chat"},
        {"prompt": "hello " * 500, "id": "long"},
        {"promt": "x", "id": "typo"},
        {"prompt_token_ids": [float("nan")], "id": "nan"},
        {"prompt": "hello", "id": "top", "sampling": {"logprobs": 2}},
    ]
    make = sample.make_engine
    monkeypatch.setattr(sample, "make_engine", lambda *args: engines.append(make(*args)) or engines[-1])
    prompts, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--model", str(checkpoint), "--prompts_file", str(prompts), "--output", str(output))
    sampling = ("--sampling.max_tokens", "6", "--sampling.ignore_eos", "true", "--sampling.seed", "5")
    status, out, err = command(*arguments, *sampling, *SMALL, "--output.include", "[logprobs]")
    assert status == 1
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["id"], row["index"]) for row in rows] == [
        *(("text", 0), ("text", 1), ("1", 0), ("chat", 0), ("long", None), ("typo", None)),
        *(("row 5", None), ("top", None)),
    ]
    assert all(len(row["token_ids"]) == 6 and row["finish_reason"] == "length" for row in rows[:4])
    assert [len(row["logprobs"]) for row in rows] == [6, 6, 6, 6, 0, 0, 0, 0]  # one schema for all
    assert rows[0]["token_ids"] != rows[1]["token_ids"] and rows[0]["seed"] == rows[1]["seed"] != rows[2]["seed"]
    assert "leaves no token to generate" in rows[4]["error"] and "did you mean prompt?" in rows[5]["error"]
    assert "it holds NaN" in rows[6]["error"] and "output.include: [top_logprobs]" in rows[7]["error"]
    assert out.count("(length, 6 tokens)") == 4 and "\x1b" not in out
    assert "error: request long: " in err and "error: request typo: " in err
    for expected in ("max_seqs=4", "page_size=8", "sha256 ", "7 requests (4 failed), 4 samples", "programs compiled"):
        assert expected in err


def test_chats_of_every_form_reach_the_template(checkpoint, command, one_engine, tmp_path):
    """A text, the same as a part, one that goes on in its last message, one without the start of an answer."""
    lines = [
        {"messages": [{"role": "user", "content": "the cat"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]},
        {"messages": [{"role": "user", "content": "the cat"}], "continue_final_message": True},
        {"messages": [{"role": "user", "content": "the cat"}], "add_generation_prompt": False},
        {"messages": [{"role": "user", "content": [1]}]},
    ]
    prompts, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--model", str(checkpoint), "--prompts_file", str(prompts), "--output", str(output))
    assert command(*arguments, "--sampling.max_tokens", "3", *SMALL)[0] == 1
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    begun, part, continued, closed = (row["prompt_token_ids"] for row in rows[:4])
    assert part == begun and [row["prompt"] for row in rows] == [""] * 5
    assert len(continued) < len(closed) < len(begun)
    assert closed[: len(continued)] == continued and begun[: len(closed)] == closed
    assert "messages[0]" in rows[4]["error"]


def test_all_well_returns_zero_and_a_written_file_is_kept(checkpoint, command, one_engine, tmp_path):
    output = tmp_path / "out.jsonl"
    base = ("--model", str(checkpoint), "--prompts", "hello", "--sampling.max_tokens", "3", "--output", str(output))
    assert command(*base, *SMALL)[0] == 0
    first = output.read_text()
    status, out, err = command(*base, *SMALL)
    assert (status, out, output.read_text()) == (2, "", first) and "--overwrite to replace it" in err
    status, _, _ = command(*base, *SMALL, "--overwrite")
    assert status == 0 and output.read_text() == first  # the same seed, the same row


def test_metrics_are_written_as_json_or_for_prometheus(checkpoint, command, one_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "_LOG_SECONDS", 0)
    base = ("--model", str(checkpoint), "--prompts", "hello", "--sampling.max_tokens", "3", *SMALL)
    files = tmp_path / "m.json", tmp_path / "m.prom"
    for file in files:
        status, out, err = command(*base, "--output.metrics", str(file))
        assert status == 0 and "hello" in out and "progress  " in err and " pages_total=" in err
    values = json.loads(files[0].read_text())
    assert values["generated_tokens"] > 0 and values["pages_free"] == values["pages_total"]
    assert values["peak_memory_bytes"] > values["pool_bytes"] + values["weights_bytes"]
    assert f"levanter_infer_pages_total {float(values['pages_total'])}\n" in files[1].read_text()
    status, _, err = command(*base, "--output.metrics", str(files[0]))
    assert status == 2 and "--overwrite to replace it" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "error: no model: give `model:"),
        (["prompts"], "error: unexpected 'prompts': expected --config FILE and --key value"),
        (["--config"], "error: --config needs a value"),
        (["--sampling.seed", "--model"], "error: --sampling.seed needs a value"),
        (["--config", "a", "--config", "b"], "error: --config is given twice"),
        (["--confg", "a"], "error: unknown option --confg; did you mean --config?"),
        (["--max_tokens", "5"], "error: unknown option --max_tokens; did you mean --sampling.max_tokens?"),
        (["--max-tokens", "5"], "error: unknown option --max-tokens; did you mean --sampling.max_tokens?"),
        (["--top-p=0.5"], "error: unknown option --top-p; did you mean --sampling.top_p?"),
        (["--max_seqs", "5"], "error: unknown option --max_seqs; did you mean --engine.max_seqs?"),
        (["--prompts-file", "x"], "error: unknown option --prompts-file; did you mean --prompts_file?"),
        (["--tensor-parallel-size", "4"], "error: unknown option --tensor-parallel-size; did you mean --mesh.model?"),
        (["--versio"], "error: unknown option --versio; did you mean --version?"),
        (["--config", "nope.yaml"], "error: cannot read the configuration nope.yaml"),
        (["--model", "m", "--prompts", "x", "--sampling.temprature", "1"], "the nearest known one is 'temperature'"),
        (["--model", "m", "--prompts", "x", "--mesh.model", "3"], "mesh.model=3: expected one of 1, 2, 4, 8 or 16"),
        (["--model", "m", "--prompts_file", "nope.txt"], "error: cannot read prompts_file nope.txt"),
        (["--model", "./nope", "--prompts", "x"], "error: model './nope' is no such directory"),
        (["--model", ".", "--prompts", "x", "--output", "nope/out"], "error: cannot write output nope/out"),
        (["--model", ".", "--prompts", "x", "--engine.max_seq", "1"], "unknown key engine.max_seq; did you mean"),
        (["--model", ".", "--prompts", "x"], "config.json"),
    ],
)
def test_mistake_returns_two_and_one_line(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*arguments)
    assert (status, out) == (2, "") and message in err and "Traceback" not in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_mistake_is_answered_without_jax(tmp_path):
    code = (
        "import sys; from levanter_infer.sample import main\n"
        "status = main(['--model', './nope', '--prompts', 'x']); assert 'jax' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "no such directory" in done.stderr


def test_version_is_that_of_the_package(command):
    status, out, err = command("--version")
    assert (status, out, err) == (0, f"levanter-infer {levanter_infer.__version__}\n", "")


def test_help_names_every_key(command):
    status, out, _ = command("--help")
    assert status == 0 and sample.main(["--model", "m", "-h"]) == 0
    for key in (
        "--overwrite",
        "sampling.top_p (1.0)",
        "engine.max_seqs (64)",
        "model.revision",
        "prompts_file",
        "mesh.",
    ):
        assert key in out


def completion(text, index=0, finish_reason="stop"):
    nothing = np.zeros(1, np.float32)
    error = NOT_FINITE if finish_reason == "error" else None
    return Completion(index, [5], text, finish_reason, nothing, nothing, None, 0, error=error)


def test_completions_are_safe_and_readable_on_a_terminal():
    output = RequestOutput("a\x1b", "p", [1], [completion("one\ntwo\x1b[2J\n", 0), completion("x", 1)])
    text = sample.completion_text(Request(prompt="line\nnext"), output, color=False)
    assert text == (
        "[a\\x1b] line\n    next\n  0> one\n     two\\x1b[2J\n     (stop, 1 token)\n  1> x\n     (stop, 1 token)"
    )
    ids = RequestOutput("0", None, [1, 2], [completion(None)])
    assert sample.completion_text(Request(prompt_token_ids=[1, 2]), ids, color=False).startswith("[0] 1 2\n  -> 5\n")
    chat = Request(messages=[{"role": "user", "content": "hi"}])
    assert sample.completion_text(chat, ids, color=True).startswith("\x1b[2m[0]\x1b[0m user: hi\n")


def test_sequence_that_ends_in_error_counts_as_failed(capsys):
    outputs = [
        RequestOutput("a", "p", [1], [completion("x"), completion("", 1, "error")]),
        RequestOutput("b", "p", [1], [completion("x")]),
        *(RequestOutput(str(i), None, [], [], error="bad\x1b") for i in range(30)),
    ]
    assert sample.report_failures(outputs) == 31
    assert [sample.failure(output) is not None for output in outputs[:3]] == [True, False, True]
    err = capsys.readouterr().err
    assert "request a: sample 1: the model's logits are not finite" in err
    assert "bad\\x1b" in err and "and 11 more requests" in err and err.count("\n") == 21


def test_sampling_text_shows_what_differs_from_the_defaults():
    assert session.sampling_text(SamplingParams(top_k=5)) == "max_tokens=64 temperature=1.0 top_k=5"


def test_interrupt_returns_130(command, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "run", interrupted)
    status, _, err = command("--model", "m", "--prompts", "x")
    assert status == 130 and err == "interrupted\n"


HEEDS_SIGINT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""A shell's background job ignores the keyboard's signal, and so would the command that is started here."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupt_while_programs_compile_ends_at_once_and_leaves_no_file(checkpoint, tmp_path, number):
    arguments = ["--model", str(checkpoint), "--prompts", "hello", "--output", str(tmp_path / "out.jsonl"), *SMALL]
    hidden = {"JAX_COMPILATION_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    with subprocess.Popen(
        [sys.executable, "-c", HEEDS_SIGINT, "-m", "levanter_infer", "sample", *arguments],
        env={**env, "PYTHONPATH": str(ROOT / "src"), "LEVANTER_INFER_COMPILE_CACHE": "off"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("waiting   ") and "compiling" in line:
                process.send_signal(number)
                begin = time.monotonic()
                break
        said += process.stderr.readlines()
        assert process.wait(timeout=60) == 130, "".join(said)
    assert time.monotonic() - begin < 3
    assert "programs are ready, not yet " in "".join(said)
    assert said[-1] == "interrupted\n" and "Traceback" not in "".join(said)
    assert list(tmp_path.iterdir()) == []


def test_command_samples_the_configuration_of_the_repository(checkpoint, tmp_path):
    """As users start it, in a process without the strict checks of the tests; a random model stands in for the tiny."""
    arguments = ["--config", "configs/tiny.yaml", "--model", str(checkpoint), "--sampling.max_tokens", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "levanter_infer.sample", *arguments, *SMALL],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0] 17+25=\n  -> ") and "\n[5] Once upon a time\n  -> " in done.stdout
    assert "(0 failed)" in done.stderr and "temperature=0 stop=('\\n',)" in done.stderr


def test_a_bar_is_drawn_only_where_somebody_watches(checkpoint, one_engine, monkeypatch, capsys):
    arguments = ["--model", str(checkpoint), "--prompts", "hello", "--sampling.max_tokens", "200", *SMALL]
    monkeypatch.setattr(progress, "BAR_S", 0.0)
    assert sample.main(arguments) == 0
    assert "sampling:" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert sample.main([*arguments, "--sampling.ignore_eos", "true"]) == 0
    captured = capsys.readouterr()
    assert "sampling" in captured.err and "\x1b[2K" in captured.err and "\x1b" not in captured.out


def test_value_error_inside_the_engine_is_not_taken_for_the_users_mistake():
    class Broken:
        def generate(self, *_, **__):
            raise ValueError("incompatible shapes")

    with pytest.raises(RuntimeError, match="please report this"):
        session.generate(Broken(), [], None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.partial"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_output_never_replaces_the_prompts(command, tmp_path, name, scheme):
    prompts = tmp_path / name
    prompts.write_text('{"prompt": "a"}\n')
    arguments = ("--model", "m", "--prompts_file", str(prompts), "--output", f"{scheme}{tmp_path}/rows.jsonl")
    status, _, err = command(*arguments, "--overwrite")
    assert status == 2 and "would replace the prompts_file" in err
    assert prompts.read_text() == '{"prompt": "a"}\n'


def test_error_or_id_of_many_lines_is_shown_in_one(capsys):
    fake = "a\nerror: request 7: b\x1b[31m" + "x" * 10**6
    sample.report_failures([RequestOutput(fake, None, [], [], error=fake)])
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < 1000 and "\x1b" not in err
    done = RequestOutput("1\n[2] fake", "p", [1], [])
    assert sample.completion_text(Request(prompt="p"), done, color=False) == "[1 [2] fake] p"


def test_engine_that_does_not_fit_into_memory_is_the_users_mistake(checkpoint, command):
    arguments = ("--model", str(checkpoint), "--prompts", "x", "--engine.max_pages", "100000000")
    status, _, err = command(*arguments)
    assert status == 2 and "does not fit into memory" in err and "lower engine.max_pages" in err


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("arguments, status", [("--help", 0), ("--config nowhere.yaml", 2)])
def test_closed_standard_stream_changes_no_status(redirection, arguments, status):
    line = f"{sys.executable} -m levanter_infer.sample {arguments} {redirection}"
    assert subprocess.run(["bash", "-c", line], capture_output=True, cwd=ROOT).returncode == status


def test_completions_are_not_asked_of_a_closed_standard_output(checkpoint, one_engine, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert sample.main(["--model", str(checkpoint), "--prompts", "hello", "--sampling.max_tokens", "2", *SMALL]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_disk_behind_standard_error_is_a_status():
    line = f"{sys.executable} -m levanter_infer.sample --model no/such/model --prompts x 2> /dev/full"
    assert subprocess.run(["bash", "-c", line], capture_output=True, cwd=ROOT).returncode == 2


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
def test_files_of_batches_are_refused_by_name(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(b"x")
    assert sample.main(["--model", "models/tiny", "--prompts_file", str(tmp_path / name)]) == 2
    assert f"levanter_infer.batch reads .{name.rsplit('.')[-1]}; expected .jsonl" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_disk_behind_standard_output_is_reported():
    line = f"{sys.executable} -m levanter_infer.sample --help > /dev/full"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2 and result.stderr == "error: No space left on device\n"
