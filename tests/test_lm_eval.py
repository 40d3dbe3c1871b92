"""lm-evaluation-harness on an engine: its own evaluation of local tasks, held to an uncached forward."""

import functools
import json
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import numpy as np
import pytest

pytest.importorskip("lm_eval")
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from levanter_infer import EngineConfig, InferenceEngine, SamplingParams, load_model
from levanter_infer.lm_eval import EngineLM, main
from tests.tiny_models import uncached_logprobs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "evaluation.md"
LENGTH = 64
CLOSE = 1e-3
"""A sum of up to 64 log probabilities in float32, by two programs that add in another order."""
DOCS = [{"q": "17+25=", "a": "42\n"}, {"q": "sort 4 1 3:", "a": " 1 3 4\n"}, {"q": "12+30=", "a": "43\n"}]
PAIRS = [(doc["q"], answer) for doc in DOCS for answer in (doc["a"], "9\n")]
TEXT = "Once upon a time there was a fox. " * 12


@pytest.fixture(scope="module")
def model():
    return load_model("models/tiny", dtype="float32")


@pytest.fixture(scope="module")
def lm(model):
    return EngineLM(InferenceEngine(*model, EngineConfig(max_seqs=4, max_seq_len=LENGTH), scoring=True), max_gen_toks=8)


def requests(kind, arguments):
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def logprob(model, ids, count):
    rows = uncached_logprobs(model[0], ids, LENGTH)[-count - 1 : -1]
    return sum(row[i] for row, i in zip(rows, ids[-count:], strict=True)), list(np.argmax(rows, -1)) == ids[-count:]


def rolling(model, text):
    """Each token once, after as many before it as fit when its window began: the harness' definition."""
    ids, size, total = model[1].encode(text), LENGTH - 1, 0.0
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        seen = [model[1].eos_token_ids[0], *ids][max(0, end - size) : end + 1]
        total += logprob(model, seen, end - start)[0]
    return total


def test_simple_evaluate_of_the_three_output_types(lm, model, tmp_path):
    data = tmp_path / "docs.json"
    data.write_text("\n".join(map(json.dumps, DOCS)))
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps({"q": TEXT, "a": ""}))
    common = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
    common |= {"dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")}}
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    tasks = [
        common | {"task": "ll", "output_type": "loglikelihood", "target_delimiter": ""},
        common
        | {"task": "gen", "output_type": "generate_until", "metric_list": [exact]}
        | {"doc_to_target": "{{a.strip()}}", "generation_kwargs": {"until": ["\n"]}},
        common
        | {"task": "roll", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}"}
        | {"metric_list": [{"metric": "word_perplexity"}]}
        | {"dataset_kwargs": common["dataset_kwargs"] | {"data_files": {"test": str(texts)}}},
    ]
    tasks[0]["metric_list"] = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    results = lm_eval.simple_evaluate(
        lm, tasks=tasks, task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )
    samples = results["samples"]
    for doc, sample in zip(DOCS, samples["ll"], strict=True):
        ((got, greedy),) = sample["filtered_resps"]
        expected, best = logprob(model, model[1].encode(doc["q"] + doc["a"]), len(model[1].encode(doc["a"])))
        assert got == pytest.approx(expected, abs=CLOSE) and bool(greedy) == best
    assert results["results"]["ll"]["acc,none"] == pytest.approx(2 / 3)
    plain = lm._engine.generate([doc["q"] for doc in DOCS], SamplingParams(max_tokens=8, temperature=0, stop="\n"))
    assert [sample["filtered_resps"][0].strip() for sample in samples["gen"]] == [
        output.completions[0].text.strip() for output in plain
    ]
    (got,) = samples["roll"][0]["filtered_resps"]
    assert len(model[1].encode(TEXT)) > LENGTH and got == pytest.approx(rolling(model, TEXT), abs=CLOSE)


def test_results_depend_neither_on_the_batch_nor_on_the_order(lm):
    alone = [lm.loglikelihood(requests("loglikelihood", [pair]), True)[0] for pair in PAIRS]
    for seed in range(2):
        order = random.Random(seed).sample(range(len(PAIRS)), len(PAIRS))
        results = lm.loglikelihood(requests("loglikelihood", [PAIRS[i] for i in order]), True)
        for i, (got, greedy) in zip(order, results, strict=True):
            assert got == pytest.approx(alone[i][0], abs=CLOSE) and greedy == alone[i][1]
    sampled = {"do_sample": True, "temperature": 2.0, "top_p": 0.95, "until": ["\n"]}
    asked = [("Once upon", sampled)] * 3 + [("sort 4 1 3:", {"until": ["4"]})]
    texts = lm.generate_until(requests("generate_until", asked), True)
    assert texts[3] == " 1 3 " and len(set(texts[:3])) > 1
    assert lm.generate_until(requests("generate_until", asked[::-1]), True) == [texts[3], *texts[:3]]


def test_long_contexts_are_truncated_from_the_left(lm, model):
    ((got, _),) = lm.loglikelihood(requests("loglikelihood", [(TEXT, "17+25=")]), True)
    ids = model[1].encode(TEXT + "17+25=")[-LENGTH:]
    count = len(model[1].encode(TEXT + "17+25=")) - len(model[1].encode(TEXT.rstrip()))
    assert got == pytest.approx(logprob(model, ids, count)[0], abs=CLOSE)
    (text,) = lm.generate_until(requests("generate_until", [(TEXT, {"max_gen_toks": 5})]), True)
    kept = model[1].encode(TEXT)[-(LENGTH - 1 - 5) :]
    (plain,) = lm._engine.generate([kept], SamplingParams(max_tokens=5, temperature=0))
    assert text == plain.completions[0].text


def test_a_chat_is_rendered_and_ends_at_a_special_token(lm, model):
    text = lm.apply_chat_template([{"role": "user", "content": "17+25="}])
    assert text == "<|user|>17+25=<|assistant|>"
    assert lm.generate_until(requests("generate_until", [(text, {"until": ["<|user|>"]})]), True) == ["42\n"]
    with pytest.raises(ValueError, match="expected true"):
        lm.chat_template("other")


def test_gen_kwargs_may_be_one_token_id_or_nothing(lm):
    params, until = lm._sampling({"stop_token_ids": 7, "temperature": None, "until": None, "max_gen_toks": 5})
    assert list(params.stop_token_ids) == [(7,)] and params.max_tokens == 5 and until == []


@pytest.mark.parametrize(
    "kwargs, message",
    [({"topp": 1}, "top_p"), ({"max_gen_toks": 63}, "expected 1 to 62"), ({"until": [3]}, "list of strings")],
)
def test_bad_gen_kwargs_are_refused_by_name(lm, kwargs, message):
    with pytest.raises(ValueError, match=message):
        lm.generate_until(requests("generate_until", [("17+25=", kwargs)]), True)


@pytest.mark.parametrize(
    "arguments, message",
    [("pretrained=x", "'model'"), ("max_seqs=4", "model=PATH"), ("model=models/tiny,max_sqs=4", "max_seqs")],
)
def test_bad_model_args_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        EngineLM.create_from_arg_string(arguments, {"batch_size": 1})


def test_a_batch_size_is_refused():
    with pytest.raises(ValueError, match="max_seqs in model_args"):
        EngineLM.create_from_arg_string("model=models/tiny", {"batch_size": 8})


def test_the_command_is_that_of_the_harness(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 and "ls tasks" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_device_is_refused_by_the_command(monkeypatch, capsys, device):
    monkeypatch.setattr(
        sys, "argv", ["lm_eval", "--model=levanter-infer", "--model_args", "model=x", "--device", device]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and f"--device='{device}': JAX chooses" in capsys.readouterr().err


def test_a_device_is_refused_beside_model_args():
    with pytest.raises(ValueError, match="device='cpu': JAX chooses the device; leave it out, and set JAX_PLATFORMS"):
        EngineLM.create_from_arg_string("model=models/tiny", {"device": "cpu"})


def test_of_two_tokens_that_are_equally_likely_the_first_is_the_greedy_one(lm, model):
    """As the harness' `hf` model finds it, by argmax, and as greedy sampling chooses."""
    ids = model[1].encode("17+25=")
    first = int(np.argmax(uncached_logprobs(model[0], ids, LENGTH)[-1]))
    name = "embeddings" if model[0].lm_head is None else "lm_head"
    rows = getattr(model[0], name).weight.array
    try:
        for low, high in ((first, first + 1), (first - 1, first)):
            both = rows.at[np.array([low, high])].set(rows[first])
            lm._engine.swap_weights(eqx.tree_at(lambda m: getattr(m, name).weight.array, model[0], both))
            scores = lm._loglikelihood_tokens([(None, ids, [low]), (None, ids, [high])], True)
            assert scores[0][0] == scores[1][0] and [greedy for _, greedy in scores] == [True, False]
            (plain,) = lm._engine.generate([ids], SamplingParams(max_tokens=1, temperature=0))
            assert plain.completions[0].token_ids == [low]
    finally:
        lm._engine.swap_weights(model[0])


@pytest.mark.slow
def test_the_program_of_the_page_evaluates(tmp_path, monkeypatch):
    """With a task of this repository in place of one that has to be downloaded."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    data = tmp_path / "docs.json"
    data.write_text("\n".join(map(json.dumps, DOCS)))
    task = {"task": "hellaswag", "dataset_path": "json", "test_split": "test", "output_type": "generate_until"}
    task |= {"doc_to_text": "{{q}}", "doc_to_target": "{{a.strip()}}", "generation_kwargs": {"until": ["\n"]}}
    task |= {"dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")}}
    (tmp_path / "task.yaml").write_text(json.dumps(task))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    evaluate = functools.partial(lm_eval.simple_evaluate, task_manager=manager, bootstrap_iters=0)
    monkeypatch.setattr(lm_eval, "simple_evaluate", evaluate)
    program = tmp_path / "program.py"
    program.write_text(code)
    namespace = runpy.run_path(str(program))
    assert namespace["results"]["results"]["hellaswag"]["exact_match,none"] == pytest.approx(1 / 3)


@pytest.mark.slow
def test_the_command_of_the_page_evaluates(tmp_path):
    (command,) = re.findall(r"^```\npython (.*?)\n```$", PAGE.read_text(), flags=re.MULTILINE)
    data = tmp_path / "docs.json"
    data.write_text("\n".join(map(json.dumps, DOCS)))
    task = {"task": "sums", "dataset_path": "json", "test_split": "test", "output_type": "generate_until"}
    task |= {"doc_to_text": "{{q}}", "doc_to_target": "{{a.strip()}}", "generation_kwargs": {"until": ["\n"]}}
    task |= {"dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")}}
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    more = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, *command.split(), *more], cwd=PAGE.parents[1], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = tmp_path.glob("out*.json")
    assert json.loads(results.read_text())["results"]["sums"]["exact_match,none"] == pytest.approx(1 / 3)
