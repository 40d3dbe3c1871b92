"""lm-evaluation-harness on a server, by its own `local-completions`: the numbers are those of the engine in process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")  # of lm_eval[api]
from scripts.fuzz_server import server

pytestmark = pytest.mark.slow
PAGE = Path(__file__).resolve().parents[1] / "docs" / "evaluation.md"
CLOSE = 1e-4
"""Relative, of sums of log probabilities: batches of other sizes add in another order."""
DOCS = [{"q": "17+25=", "a": "42\n"}, {"q": "sort 4 1 3:", "a": " 1 3 4\n"}, {"q": "12+30=", "a": "43\n"}]
TEXT = "Once upon a time there was a fox. " * 20


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with one task of each type."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "docs.json").write_text("\n".join(map(json.dumps, DOCS)))
    (folder / "texts.json").write_text(json.dumps({"q": TEXT}))

    def task(name: str, file: str, **more) -> None:
        data = {"data_files": {"test": str(folder / file)}, "cache_dir": str(folder / "cache")}
        same = {"task": name, "dataset_path": "json", "test_split": "test", "dataset_kwargs": data}
        (folder / f"{name}.yaml").write_text(json.dumps(same | more))

    accuracy = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    choices = {"doc_to_choice": ["42\n", "43\n", " 1 3 4\n", "9\n"], "doc_to_target": "{{a}}", "target_delimiter": ""}
    task("choose", "docs.json", output_type="multiple_choice", doc_to_text="{{q}}", metric_list=accuracy, **choices)
    until = {"until": ["\n", "3"], "max_gen_toks": 8}
    exact = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    target = {"doc_to_text": "{{q}}", "doc_to_target": "{{a.strip()}}", "metric_list": exact}
    task("write", "docs.json", output_type="generate_until", generation_kwargs=until, **target)
    perplexity = [{"metric": "word_perplexity"}]
    asked = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}"}
    task("perplexity", "texts.json", metric_list=perplexity, **asked)
    return folder


def evaluate(folder: Path, out: Path, names: str, *options: str) -> dict[str, list]:
    """The responses of each task, sorted by document, of one run of the harness' command."""
    more = ["--tasks", names, "--include_path", str(folder), "--output_path", str(out), "--log_samples"]
    command = [sys.executable, "-m", "levanter_infer.lm_eval", *options, *more]
    done = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True, timeout=500, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in names.split(","):
        (file,) = out.rglob(f"samples_{name}_*.jsonl")
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        found[name] = [sample["resps"] for sample in samples]
    return found


def in_page(model: str, url: str) -> list[str]:
    """The options of the page's command with a model, for the server at `url`, without the tasks."""
    commands = re.findall(r"^python -m levanter_infer.lm_eval (.*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (command,) = (each for each in commands if each.startswith(f"--model {model} "))
    assert "http://127.0.0.1:8000" in command and " --tasks sums " in command
    return command.replace("\\\n", " ").replace("http://127.0.0.1:8000", url).replace("--tasks sums", "").split()


def test_numbers_of_a_server_are_those_of_the_engine_in_process(tasks, tmp_path):
    names = "choose,write,perplexity"
    own = "model=models/tiny,max_seqs=8,max_seq_len=256,max_gen_toks=8"
    expected = evaluate(tasks, tmp_path / "own", names, "--model", "levanter-infer", "--model_args", own)
    with server("--engine.max_seqs", "8", "--engine.max_seq_len", "257") as (url, _):
        found = evaluate(tasks, tmp_path / "server", names, *in_page("local-completions", url))
    assert found["write"] == expected["write"] and any("4" in text for ((text,),) in expected["write"])
    pairs = list(zip(_numbers(found["choose"]), _numbers(expected["choose"]), strict=True))
    assert len(pairs) == 12 and len({greedy for _, (_, greedy) in pairs}) == 2
    for (got, is_greedy), (wanted, was_greedy) in pairs:
        assert got == pytest.approx(wanted, rel=CLOSE, abs=CLOSE) and is_greedy == was_greedy
    ((((got,),),),) = (found["perplexity"],)
    ((((wanted,),),),) = (expected["perplexity"],)
    assert float(got) == pytest.approx(float(wanted), rel=CLOSE) and float(wanted) < -10


def _numbers(responses: list) -> list[tuple[float, bool]]:
    """(log probability, whether greedy) of each choice of each document."""
    return [(float(pair[0][0]), str(pair[0][1]) == "True") for resps in responses for pair in resps]


def test_chats_of_a_server_are_those_of_the_engine_in_process(tasks, tmp_path):
    own = ["--model", "levanter-infer", "--model_args", "model=models/tiny,max_seqs=8,max_seq_len=256,max_gen_toks=8"]
    expected = evaluate(tasks, tmp_path / "own", "write", *own, "--apply_chat_template")
    with server("--engine.max_seqs", "8", "--engine.max_seq_len", "256") as (url, _):
        found = evaluate(tasks, tmp_path / "server", "write", *in_page("local-chat-completions", url))
    assert found == expected
