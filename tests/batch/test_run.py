"""The command: what it writes and says, and that nothing is lost when it is stopped or killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from levanter_infer import sample
from levanter_infer.batch import __main__ as run
from levanter_infer.batch import worker
from levanter_infer.batch.__main__ import main
from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.batch.job import check_same
from levanter_infer.checkpoints.save import save_model
from levanter_infer.cli.common import parse_arguments
from levanter_infer.config import ModelSource, OutputConfig, load_config
from levanter_infer.engine import instructions
from levanter_infer.kernels.cpu import bindings as cpu
from tests.tiny_models import tiny_model
from tests.tokenizer_files import CHATML, byte_level, write

ROOT = Path(__file__).parents[2]
SMALL = ("--engine.max_seqs", "4", "--engine.page_size", "8", "--engine.max_step_tokens", "32")
SHARDS = ("--batch.rows_per_shard", "4")
SAMPLING = ("--sampling.max_tokens", "24", "--sampling.ignore_eos", "true", "--sampling.seed", "5")
COLUMNS = ("--output.include", "[logprobs, top_logprobs]")
ONE_MESH = ("--multihost.layout", "one_mesh", "--multihost.coordinator", "127.0.0.1:1", "--multihost.processes", "2")
ONE_MESH += ("--multihost.process_id", "1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model with a byte-level tokenizer, as an HF directory."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    changes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    save_model(tiny_model(**changes), directory)
    return write(directory, tokenizer, chat_template=CHATML, generation_config={"eos_token_id": 1})


@pytest.fixture(scope="module", autouse=True)
def one_engine():
    """The first engine of this file serves every run: compiling is what takes time here."""
    make, engines = worker.make_engine, []

    def make_once(config, num_rows):
        if not engines:
            engines.append(make(config, num_rows))
        return engines[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "make_engine", make_once)
        patch.setattr(sample, "make_engine", make_once)
        patch.setattr(worker, "LOG_SECONDS", 0)
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("in") / "rows.jsonl"
    lines = [{"prompt": f"hello {i}", "sampling": {"n": 1 + i % 2, "logprobs": i % 3}} for i in range(30)]
    lines[3], lines[4] = {"messages": [{"role": "user", "content": "the cat"}], "id": "chat"}, {"promt": "x"}
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def arguments(checkpoint, prompts):
    return ["--model", str(checkpoint), "--prompts_file", str(prompts), *SAMPLING, *SMALL, *COLUMNS]


@pytest.fixture
def command(arguments, capsys):
    def call(output, *more):
        status = main([*arguments, *SHARDS, "--output", str(output), *more])
        return status, capsys.readouterr().err

    return call


@pytest.fixture(scope="module")
def whole(arguments, one_engine, tmp_path_factory):
    """The output of an undisturbed job."""
    output = tmp_path_factory.mktemp("whole") / "out"
    assert main([*arguments, *SHARDS, "--output", str(output)]) == 1  # one row fails
    return contents(output)


def contents(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}


def lay(output: Path, whole: dict[str, bytes]) -> None:
    """Put the files of a job into a directory."""
    for name, data in whole.items():
        (output / name).parent.mkdir(exist_ok=True, parents=True)
        (output / name).write_bytes(data)


def test_rows_are_those_of_sample_and_the_manifest_says_what_was_promised(command, arguments, tmp_path, whole, capsys):
    output = tmp_path / "out"
    status, said = command(output, "--output.metrics", str(tmp_path / "m.json"))
    assert status == 1  # one row failed
    for expected in ("30 rows in 1 files, 8 shards", "pages in use", "rows/s", "left", "complete: 30 rows, 1 failed"):
        assert expected in said
    rows = "".join(path.read_text() for path in sorted(output.glob("part-*.jsonl")))
    alone = tmp_path / "sample.jsonl"
    sample.main([*arguments, "--output", str(alone)])
    capsys.readouterr()
    assert rows == alone.read_text().replace(str(arguments[3]), Path(arguments[3]).name)
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["guarantee"]["numerics"] == manifest["config"]["engine"]["numerics"] == "batch_invariant"
    assert manifest["counts"]["rows"] == 30 and manifest["counts"]["failed_rows"] == 1
    assert len(manifest["model"]["weights_sha256"]) == len(manifest["tokenizer"]["sha256"]) == 64
    assert manifest["config"]["sampling"]["seed"] == 5 and manifest["versions"]["jax"]
    assert json.loads((tmp_path / "m.json").read_text())["generated_tokens"] > 0
    assert contents(output) == whole
    (output / "manifest.json").unlink()
    for more in (["--output.metrics", str(tmp_path / "m.json")], []):  # the metrics are those of the same job
        status, said = command(output, *more)
        assert status == 1 and "0 rows" in said and contents(output) == whole  # nothing is left to do
    status, said = command(tmp_path / "other", "--output.metrics", str(tmp_path / "m.json"))
    assert status == 2 and "m.json exists" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sampling.temperature", "0.5"], "sampling.temperature is 0.5 and was 1.0"),
        (["--batch.rows_per_shard", "9"], "batch.rows_per_shard is 9 and was 4"),
        (["--engine.numerics", "default"], "guarantee.numerics is 'default' and was 'batch_invariant'"),
        (["--engine.max_round_steps", "3"], None),
    ],
)
def test_a_job_that_began_otherwise_is_not_resumed(command, tmp_path, whole, options, message):
    lay(tmp_path, whole)
    status, said = command(tmp_path, *options)
    assert (status, message is None or message in said) == (1 if message is None else 2, True)
    assert contents(tmp_path) == whole


def test_a_file_of_other_weights_or_input_is_named(command, checkpoint, tmp_path, whole, prompts):
    lay(tmp_path / "out", whole)
    weights = checkpoint / "model.safetensors"
    kept = weights.read_bytes()
    try:
        weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        status, said = command(tmp_path / "out")
    finally:
        weights.write_bytes(kept)
    assert status == 2 and "model.weights_sha256 is " in said
    other = tmp_path / "others.jsonl"
    other.write_bytes(prompts.read_bytes())
    status, said = command(tmp_path / "out", "--prompts_file", str(other))
    assert status == 2 and "not in both: others.jsonl, rows.jsonl" in said


def unfinished(output: Path, whole) -> None:
    """The job of `whole` with one shard that is not committed."""
    lay(output, whole)
    next(output.glob("_commits/*")).unlink()
    (output / "manifest.json").unlink()


@pytest.mark.skipif(not cpu.available() or cpu.isa() == "generic", reason="there is one instruction set only")
class TestInstructionSet:
    """A job goes on with the instruction set that it began with."""

    def test_the_manifest_names_it_and_a_resumed_job_takes_it(self, command, tmp_path, whole, monkeypatch):
        began = json.loads(whole["manifest.json"])["sizes"]["cpu_isa"]
        assert began in instructions.usable_isas("float32")
        make, configs = worker.make_engine, []
        monkeypatch.setattr(worker, "make_engine", lambda config, rows: configs.append(config) or make(config, rows))
        monkeypatch.setattr(
            instructions, "usable_isas", lambda dtype=None: ("avx512_bf16", "avx512", "avx2", "generic")
        )
        unfinished(tmp_path, whole)
        assert command(tmp_path)[0] == 1 and contents(tmp_path) == whole
        assert configs[0].engine["cpu_isa"] == began

    def test_a_processor_without_it_is_refused(self, command, tmp_path, whole, monkeypatch):
        began = json.loads(whole["manifest.json"])["sizes"]["cpu_isa"]
        monkeypatch.setattr(instructions, "usable_isas", lambda dtype=None: ("generic",))
        unfinished(tmp_path, whole)
        before = contents(tmp_path)
        status, said = command(tmp_path)
        assert status == 2 and contents(tmp_path) == before
        assert f"the job began with engine.cpu_isa={began}, and this processor has generic" in said
        assert "Resume it on a processor with that instruction set" in said

    def test_another_one_by_name_is_refused(self, command, tmp_path, whole):
        unfinished(tmp_path, whole)
        status, said = command(tmp_path, "--engine.cpu_isa", "generic")
        assert status == 2 and "engine.cpu_isa is 'generic' and was 'auto'" in said

    def test_without_the_promise_of_equal_bytes_it_is_chosen_anew(self, monkeypatch):
        monkeypatch.setattr(instructions, "usable_isas", lambda dtype=None: ("avx2", "generic"))
        sizes = {"max_pages": 9, "cpu_isa": "avx512"}
        config = BatchRunConfig(
            model=ModelSource("x"), prompts_file="x", output=OutputConfig("out"), engine={"numerics": "default"}
        )
        assert worker._sizes_here(config, sizes) == {"max_pages": 9}
        assert worker._sizes_here(config, {**sizes, "cpu_isa": "avx2"}) == {**sizes, "cpu_isa": "avx2"}

    def test_wider_instructions_that_are_not_used_are_no_difference(self, whole):
        there = json.loads(whole["job.json"])
        here = {**there, "device": {**there["device"], "instructions": "another"}}
        check_same(there, here)
        sizes = {key: value for key, value in there["sizes"].items() if key != "cpu_isa"}
        with pytest.raises(ValueError, match="device.instructions is 'another'"):
            check_same({**there, "sizes": sizes}, here)


def test_openai_lines_become_openai_results_and_resume_to_the_same_bytes(command, checkpoint, tmp_path):
    chat, text = "/v1/chat/completions", "/v1/completions"
    parts = [{"role": "user", "content": "the cat"}]
    bodies = {
        "chat": (chat, {"messages": parts, "logprobs": True, "top_logprobs": 2, "user": "u", "max_tokens": 4}),
        "two": (text, {"prompt": "hello", "n": 2, "max_tokens": 3, "model": checkpoint.name}),
        "ids": (text, {"prompt": [5, 6], "logprobs": 0, "max_tokens": 3}),
        "bad": (chat, {"messages": parts, "stream": True}),
        "long": (text, {"prompt": "hello " * 500}),
    }
    lines = [{"custom_id": k, "method": "POST", "url": url, "body": body} for k, (url, body) in bodies.items()]
    prompts = tmp_path / "lines.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ("--prompts_file", str(prompts), "--batch.format", "openai", "--output.include", "[]")
    status, said = command(tmp_path / "out", *options)
    assert status == 1 and "complete: 5 rows, 2 failed_rows, 4 samples" in said
    written = [json.loads(x) for path in sorted((tmp_path / "out").glob("part-*.jsonl")) for x in path.open()]
    assert [line["custom_id"] for line in written] == list(bodies)
    chat_body, two, ids = (line["response"]["body"] for line in written[:3])
    entries = chat_body["choices"][0]["logprobs"]["content"]
    assert len(entries) == chat_body["usage"]["completion_tokens"] == 4 and chat_body["model"] == checkpoint.name
    assert all(len(entry["top_logprobs"]) == 2 and entry["bytes"] for entry in entries)
    assert (
        b"".join(map(bytes, (e["bytes"] for e in entries))).decode("utf-8", "replace")
        == (chat_body["choices"][0]["message"]["content"])
    )
    assert len({choice["text"] for choice in two["choices"]}) == 2
    assert "".join(ids["choices"][0]["logprobs"]["tokens"]) == ids["choices"][0]["text"]
    assert [line["response"]["status_code"] for line in written[3:]] == [400, 400]
    stream, long = (line["error"]["message"] for line in written[3:])
    assert "body.stream is True" in stream and "no token to generate" in long
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "_commits" / "part-000000.json").unlink()
    assert command(tmp_path / "out", *options)[0] == 1 and contents(tmp_path / "out") == before
    (tmp_path / "out" / "_commits" / "part-000000.json").unlink()
    (tmp_path / "moved").symlink_to(checkpoint)  # the same model has another name now
    assert command(tmp_path / "out", *options, "--model", str(tmp_path / "moved"))[0] == 1
    assert contents(tmp_path / "out") == before


def test_columns_belong_to_what_a_job_began_with(command, tmp_path, whole):
    lay(tmp_path, whole)
    status, said = command(tmp_path, "--output.include", "[logprobs]")
    assert status == 2 and "output.include is ['logprobs'] and was ['logprobs', 'top_logprobs']" in said
    status, said = command(tmp_path, "--chat_template_kwargs", "{enable_thinking: false}")
    assert status == 2 and "chat_template_kwargs" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_round_interrupts_whatever_swallows_exceptions(number):
    """Libraries that load a model hold many an `except Exception`; the next signal is another handler's again."""
    stop, before = run.StopSignal(), signal.getsignal(number)
    with pytest.raises(run.Stopped), stop.installed():
        with contextlib.suppress(Exception):
            signal.raise_signal(number)
        pytest.fail("went on")
    assert stop.is_set() and stop.received == number and signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_an_object_is_deleted_is_not_lost(number, capsys):
    """Python prints what is raised there and goes on; JAX has a callback in every garbage collection."""

    class Deleted:
        def __del__(self):
            signal.raise_signal(number)

    stop, before = run.StopSignal(), sys.unraisablehook
    with pytest.raises(run.Stopped), stop.installed():
        Deleted()
        time.sleep(20)
        pytest.fail("went on")
    assert stop.received == number and sys.unraisablehook is before and capsys.readouterr().err == ""


def test_a_second_signal_does_not_disturb_what_the_first_one_has_begun():
    stop = run.StopSignal()
    with pytest.raises(run.Stopped), stop.installed():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            ended_in_order = True
    assert ended_in_order


def test_processes_of_one_mesh_agree_on_what_is_left_once_their_engines_are_made(
    arguments, tmp_path, whole, monkeypatch
):
    class Hosts:
        """Process 1 of two, whose process 0 finds that others have finished the job meanwhile."""

        index, count, is_lead, left = 1, 2, False, iter([8, 0])

        def broadcast(self, what, value):
            return next(self.left)

    output = tmp_path / "out"
    lay(output, {"job.json": whole["job.json"]})
    monkeypatch.setattr(worker, "agree", lambda *_: None)
    monkeypatch.setattr(worker, "_engine", lambda *_: object())
    options = [*arguments, *SHARDS, "--output", str(output), *ONE_MESH]
    config = load_config(*parse_arguments("batch", options, BatchRunConfig), BatchRunConfig)
    assert worker.open_worker(config, Hosts()).engine is None  # type: ignore[arg-type]


@pytest.mark.parametrize("output, problem", [("memory://x/out", "gone at its end"), ("file://", "has no path")])
def test_an_output_that_would_not_be_there_afterwards_is_refused(command, output, problem):
    status, said = command(output)
    assert status == 2 and problem in said


def test_a_second_interrupt_ends_at_once_what_a_first_has_asked_to_stop():
    stop = run.StopSignal()
    with stop.installed():
        stop.defer()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_within_two_rounds_and_what_is_finished_stays(command, tmp_path, whole, monkeypatch, number):
    rounds, call, engine_rounds = [], worker.Progress.__call__, worker.Progress
    read = []

    def signalling(self, totals):
        rounds.append(self._engine.metrics()["rounds"])
        if len(rounds) == 8:
            os.kill(os.getpid(), number)
        read[:] = [self._engine]
        call(self, totals)

    monkeypatch.setattr(engine_rounds, "__call__", signalling)
    output = tmp_path / "out"
    status, said = command(output)
    assert status == (0 if number == signal.SIGTERM else 130) and "stopped   " in said and "all of it is safe" in said
    assert read[0].metrics()["rounds"] - rounds[-1] <= 2 and not (output / "manifest.json").exists()
    # the first line of a journal names the job
    finished = sum(max(0, path.read_bytes().count(b"\n") - 1) for path in (output / "_journal").iterdir())
    committed = sum(json.loads(path.read_text())["rows"] for path in (output / "_commits").glob("*"))
    assert 0 < finished + committed < 30 and f"{finished + committed} rows" in said
    status, said = command(output)
    assert status == 1 and f"{30 - finished - committed} rows" in said
    assert contents(output) == whole


@pytest.mark.slow
def test_a_killed_process_loses_nothing_and_the_bytes_are_the_same(arguments, command, tmp_path, whole):
    output = tmp_path / "out"
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-m", "levanter_infer.batch", *arguments, *SHARDS, "--engine.max_round_seconds", "1e-9"]
    process = subprocess.Popen([*line, "--output", str(output)], cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while not list(output.glob("_commits/*")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    process.kill()
    _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said.decode()[-2000:]
    assert not (output / "manifest.json").exists()
    status, said = command(output)
    assert status == 1 and " are finished, " in said and contents(output) == whole


_BIG = "1" + "0" * 400
HOSTILE = [
    *(b'{"prompt_token_ids": [NaN]}', b'{"prompt_token_ids": [Infinity, 1]}', b'{"prompt_token_ids": [1e400]}'),
    *(f'{{"prompt_token_ids": [{_BIG}]}}'.encode(), b'{"prompt_token_ids": [-1]}', b'{"prompt_token_ids": [[1]]}'),
    *(b'{"prompt": "\xff\xfe"}', b"\x00\x01\x02", b'{"prompt": "a\\ud800b"}', b'{"prompt": "\\u0000"}'),
    *(b"[" * 100_000, b'{"messages": ' + b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    b'{"messages": [' + b'{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    *(b"null", b"7", b'"text"', b"[]", b"{}", b"NaN", b'{"prompt": null}', b'{"prompt": 7}', b'{"prompt": ""}'),
    *(f'{{"prompt": "x", "timeout_s": {_BIG}}}'.encode(), b'{"prompt": "x", "timeout_s": NaN}'),
    *(f'{{"prompt": "x", "priority": {_BIG}}}'.encode(), b'{"prompt": "x", "priority": 1e400}'),
    *(
        f'{{"prompt": "x", "sampling": {{"{k}": {v}}}}}'.encode()
        for k in ("max_tokens", "seed", "temperature", "n", "top_k")
        for v in (_BIG, "NaN", "-1e400", "[]", '"x"')
    ),
    *(
        b'{"prompt": "x", "sampling": {"logit_bias": {"NaN": NaN}}}',
        b'{"prompt": "x", "sampling": {"logit_bias": [1]}}',
    ),
    f'{{"prompt": "x", "sampling": {{"logit_bias": {{"{_BIG}": 1}}}}}}'.encode(),
    *(
        b'{"prompt": "x", "sampling": {"stop": [[]]}}',
        b'{"prompt": "x", "sampling": "{"}',
        b'{"prompt": "x", "sampling": 3}',
    ),
    *(
        b'{"messages": [null]}',
        b'{"messages": [{"role": 3}]}',
        b'{"messages": [{"role": "user", "content": {"a": NaN}}]}',
    ),
    *(
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "messages": []}',
        b'{"prompt": "x", "cache_salt": {"a": []}}',
    ),
    *(b'{"prompt": "x", "id": null}', b'{"prompt": "x", "id": [1]}', b'{"prompt": "x", "id": 1e999}'),
    f'{{"prompt": "x", "id": {"9" * 5000}}}'.encode(),
    *(b'{"custom_id": "c", "body": null}', b'{"custom_id": 3}', b'{"custom_id": "d", "body": {"messages": 3}}'),
    b'{"custom_id": "e", "url": "/v1/completions", "body": {"prompt": [NaN], "n": NaN}}',
]


def test_every_line_of_a_hostile_file_gets_its_row_and_changes_no_other(command, tmp_path):
    """Each hostile line stands between two good ones, whose rows are those that they have among harmless lines."""
    good = b'{"prompt": "hello"}'
    rows = {}
    for name, lines in (("hostile", HOSTILE), ("harmless", [b"{}"] * len(HOSTILE))):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"\n".join(each for line in lines for each in (good, line)))
        options = ("--prompts_file", str(path), "--sampling.max_tokens", "4")
        status, said = command(tmp_path / name, *options)
        assert status == 1 and "Traceback" not in said, said[-3000:]
        assert f"complete: {2 * len(HOSTILE)} rows" in said and (tmp_path / name / "manifest.json").exists()
        parts = sorted((tmp_path / name).glob("part-*.jsonl"))
        rows[name] = [
            json.loads(line, parse_constant=float) for part in parts for line in part.read_text().splitlines()
        ]
        assert command(tmp_path / name, *options)[0] == 1  # a resumed job meets nothing new
    by_number = {name: {row["id"]: row for row in found} for name, found in rows.items()}
    for i, line in enumerate(HOSTILE):
        assert by_number["hostile"][str(2 * i)] == by_number["harmless"][str(2 * i)], line[:100]
        names = (str(2 * i + 1), f"row {2 * i + 1}")  # the second where the id is unknown: other rows have ids
        found = [by_number["hostile"][name] for name in names if name in by_number["hostile"]]
        (row,) = found or [by_number["hostile"][json.loads(line)["custom_id"]]]
        assert bool(row["error"]) != (row["finish_reason"] in ("stop", "length")), line[:100]
    errors = [row["error"] for row in rows["hostile"] if row["error"]]
    assert len(rows["hostile"]) == 2 * len(HOSTILE) and len(errors) >= len(HOSTILE) - 6
    assert max(map(len, errors)) < 1000


def test_ids_that_are_not_unique_stop_the_command_before_anything_is_written(command, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "id": "x"}\n{"prompt": "b"}\n{"prompt": "c", "id": "x"}\n')
    status, said = command(tmp_path / "out", "--prompts_file", str(path))
    assert status == 2 and "two rows have the id 'x' in in.jsonl:1 and in.jsonl:3: ids must differ" in said
    assert not list((tmp_path / "out").glob("*"))


def test_rows_that_were_added_since_the_job_began_are_noticed(command, tmp_path, whole, prompts):
    lay(tmp_path / "out", whole)
    kept = prompts.read_bytes()
    try:
        prompts.write_bytes(kept + b'\n{"prompt": "new"}')
        status, said = command(tmp_path / "out")
    finally:
        prompts.write_bytes(kept)
    assert status == 2 and f"rows.jsonl has {len(kept) + 18} bytes and had {len(kept)} with 30 rows" in said
    assert contents(tmp_path / "out") == whole


def test_results_of_another_job_are_refused_by_the_command(command, tmp_path, whole):
    lay(tmp_path, {name: data for name, data in whole.items() if name not in ("job.json", "manifest.json")})
    status, said = command(tmp_path, "--sampling.temperature", "0.5")
    assert status == 2 and "error: the output holds _commits of a job, and no job.json that says which; put" in said
    before = contents(tmp_path)
    (tmp_path / "job.json").write_bytes(whole["job.json"])
    assert command(tmp_path)[0] == 1 and contents(tmp_path) == whole and len(before) == len(whole) - 2


@pytest.mark.parametrize("complete", [True, False])
def test_an_altered_part_is_noticed_when_a_job_goes_on_and_when_it_is_complete(command, tmp_path, whole, complete):
    lay(tmp_path, whole)
    part = tmp_path / "part-000002.jsonl"
    part.write_bytes(part.read_bytes().replace(b"hello", b"hallo", 1))
    if not complete:
        (tmp_path / "_commits" / "part-000005.json").unlink()
        (tmp_path / "manifest.json").unlink()
    status, said = command(tmp_path)
    assert status == 2 and "error: part-000002.jsonl of the output has changed since it was written" in said
    (tmp_path / "_commits" / "part-000002.json").unlink()
    status, said = command(tmp_path)
    assert status == 1 and f"compared  {7 if complete else 6} finished shards" in said and contents(tmp_path) == whole


@pytest.mark.parametrize("name", ["job.json", "_commits/part-000003.json", "_journal/part-000003"])
def test_what_is_corrupted_is_one_line_that_names_the_file_and_what_to_do(command, tmp_path, whole, name):
    lay(tmp_path, whole)
    if "_journal" in name:
        (tmp_path / "_commits" / "part-000003.json").unlink()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"%08x 0 7\n" % zlib.crc32(b"0 7") if "_journal" in name else b"[" * 10_000)
    status, said = command(tmp_path)
    assert status == 2 and "Traceback" not in said
    assert any(line.startswith(f"error: {name} of the output") for line in said.splitlines()), said
    assert "give another output" in said or f"remove {name} to compute" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--worker", "2/2"], "expected i/n with i from 0 to n - 1"),
        (["--batch.format", "csv"], "expected jsonl, parquet or openai"),
        (["--batch.rows_per_shard", "0"], "expected at least 1"),
        (["--prompts", "x"], "both given"),
        (["--batch.format", "openai"], "output.include with batch.format: openai"),
        (["--output.include", "[num_cached_tokens]"], "this job promises equal bytes; leave it out or set engine.num"),
        (["--overwrite"], "never replaces it"),
        (["--batch.row_per_shard", "3"], "did you mean rows_per_shard"),
    ],
)
def test_wrong_usage_is_answered_before_anything_is_loaded(command, tmp_path, options, message):
    status, said = command(tmp_path / "out", *options)
    assert status == 2 and message in said and not (tmp_path / "out").exists()


def test_sample_refuses_the_keys_of_a_job(arguments, capsys):
    assert sample.main([*arguments, *SHARDS]) == 2
    assert "unknown option --batch" in capsys.readouterr().err
