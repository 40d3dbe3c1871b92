"""The command that scores: what counts of a row, and what becomes of it."""

import json
from pathlib import Path

import numpy as np
import pytest

from levanter_infer import score
from levanter_infer.checkpoints.save import save_model
from levanter_infer.checkpoints.tokenizer import Tokenizer
from levanter_infer.config import load_config
from levanter_infer.engine.request import Request
from levanter_infer.io.prompts import read_rows
from tests.tiny_models import tiny_model, uncached_logprobs
from tests.tokenizer_files import CHATML, byte_level, write

ROOT = Path(__file__).parent.parent
LENGTH = 64
CHANGES = {"vocab_size": byte_level().get_vocab_size(), "max_position_embeddings": 256}
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_model(tiny_model(**CHANGES), directory)
    return write(directory, byte_level(), chat_template=CHATML, generation_config={"eos_token_id": 1})


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.from_directory(checkpoint)


def test_rows_of_every_kind_are_scored_and_a_bad_one_fails_alone(checkpoint, tmp_path, capsys):
    greedy = np.argmax(uncached_logprobs(tiny_model(**CHANGES), [5, 6, 7], LENGTH)[-1])
    lines = [
        {"prompt": "hello there", "id": "text"},
        {"prompt": "hello", "completion": " there"},
        {"prompt_token_ids": [5, 6, 7], "completion_token_ids": [int(greedy)], "id": "greedy"},
        {"messages": CHAT, "completion": "ho", "id": "chat"},
        {"prompt_token_ids": [4], "id": "one"},
        {"prompt": "", "completion": "x", "id": "nothing"},
        {"prompt": "hello", "sampling": {"n": 2}, "id": "sampling"},
        {"prompt": "hello " * 500, "id": "long"},
    ]
    prompts, output, metrics = tmp_path / "rows.jsonl", tmp_path / "out.jsonl", tmp_path / "m.json"
    prompts.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--model", str(checkpoint), "--prompts_file", str(prompts), "--output", str(output)]
    sizes = ["--engine.max_seqs", "2", "--engine.page_size", "8", "--engine.max_step_tokens", "32"]
    status = score.main([*arguments, *sizes, "--output.metrics", str(metrics)])
    out, err = capsys.readouterr()
    assert status == 1
    rows = {row["id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert list(rows) == ["text", "1", "greedy", "chat", "one", "nothing", "sampling", "long"]
    total, count = 0.0, 0
    for row in list(rows.values())[:5]:
        ids, first = row["prompt_token_ids"] + row["token_ids"], len(row["prompt_token_ids"])
        oracle = uncached_logprobs(tiny_model(**CHANGES), ids, LENGTH)[first - 1 : -1]
        expected = oracle[np.arange(len(oracle)), row["token_ids"]]
        np.testing.assert_allclose(row["logprobs"], expected, atol=5e-5)
        assert row["num_tokens"] == len(expected) and row["logprob"] == pytest.approx(sum(expected), abs=1e-3)
        assert not len(expected) or row["is_greedy"] == (np.argmax(oracle, axis=-1).tolist() == row["token_ids"])
        assert row["perplexity"] == (pytest.approx(np.exp(-np.mean(expected)), rel=1e-3) if len(expected) else None)
        total, count = total + sum(expected), count + len(expected)
    assert rows["greedy"]["is_greedy"] and not rows["text"]["is_greedy"] and rows["one"]["num_tokens"] == 0
    assert rows["one"]["is_greedy"] is None
    assert rows["text"]["logprobs"][-rows["1"]["num_tokens"] :] == rows["1"]["logprobs"]
    assert json.loads(metrics.read_text())["perplexity"] == pytest.approx(np.exp(-total / count), rel=1e-3)
    for name, message in {
        "nothing": "there is no token before the completion",
        "sampling": "unknown key sampling",
        "long": "more than engine.max_seq_len=256",
    }.items():
        assert message in rows[name]["error"] and f"error: request {name}: " in err
    assert "[greedy] logprob -" in out and out.count("\n") == 5
    assert f"8 texts (3 failed), {count} tokens scored" in err and "perplexity" in err


def test_what_the_completion_changes_or_adds_counts(tokenizer):
    def whole(**row):
        completion = row.pop("completion", None)
        request, first = score._joined(Request(**row), completion, tokenizer)
        return list(request.prompt_token_ids), first

    context, text = tokenizer.encode("hello th"), tokenizer.encode("hello there")
    ids, first = whole(prompt="hello th", completion="ere")
    assert ids == text and ids[:first] == context[:first] and (first == len(context) or ids[first] != context[first])
    assert whole(prompt="hello there") == (text, 1)
    assert whole(prompt_token_ids=[3, 4], completion=[5, 6]) == ([3, 4, 5, 6], 2)
    answered, first = whole(messages=CHAT, completion="ho")
    asked = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert tokenizer.decode(answered, skip_special_tokens=False) == asked + "ho"
    assert whole(messages=CHAT)[0] == answered[: len(whole(messages=CHAT)[0])] and first > len(whole(messages=CHAT)[0])


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "a", "completion_token_ids": [1]}, "completion_token_ids behind prompt; expected completion"),
        ({"prompt_token_ids": [1], "completion": "a"}, "completion behind prompt_token_ids; expected"),
        ({"prompt": "a", "completion": ""}, "completion is ''; expected a string of at least one character"),
        ({"prompt_token_ids": [1], "completion_token_ids": []}, "expected a list of at least one token id"),
        ({"messages": CHAT, "chat_template_kwargs": {"messages": []}}, "'messages' is a parameter of its own"),
        ({"completion": "a"}, "expected one of prompt, prompt_token_ids, messages; got none"),
    ],
)
def test_a_row_that_cannot_be_scored_says_why(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (read,) = read_rows(load_config(None, [("model", "m"), ("prompts_file", str(path))]), completions=True)
    assert message in read.error


def test_parameters_without_effect_are_refused(capsys):
    assert score.main(["--model", "m", "--prompts", "x", "--sampling.temperature", "0.5"]) == 2
    assert "sampling.temperature has no effect on scores" in capsys.readouterr().err


def test_the_configuration_of_this_repository_loads(monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = read_rows(load_config("configs/score.yaml"), completions=True)
    assert [row.error for row in rows] == [None] * 3 and [row.completion for row in rows] == ["42\n", "43\n", None]


def test_impossible_tokens_make_no_number_that_json_lacks():
    impossible = score.Score({}, np.asarray([-np.inf, -1], np.float32))
    assert score.perplexity([impossible]) is None and score.perplexity([]) is None
    assert score.perplexity([score.Score({}, np.full(2, -np.log(4), np.float32))]) == pytest.approx(4)
