"""Parquet in and out."""

import json

import numpy as np
import pytest

from levanter_infer.batch.plan import Input
from tests.batch.test_drive import ROWS, begin, files, prompts, work  # noqa: F401

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(path, columns, **options):
    parquet.write_table(pyarrow.table(columns), path, **options)


def test_rows_of_a_table_are_those_of_lines(tmp_path):
    rows = [
        {"prompt": "a", "id": "x", "sampling": {"n": 2}},
        {"prompt_token_ids": [1, 2], "id": "y", "sampling": {"temperature": 0.5}},
        {"messages": [{"role": "user", "content": "hi"}], "id": "z"},
        *({"prompt": f"p{i}", "id": f"i{i}"} for i in range(600)),
    ]
    names = ("prompt", "prompt_token_ids", "messages", "id", "sampling")
    write(tmp_path / "in.parquet", {name: [row.get(name) for row in rows] for name in names}, row_group_size=70)
    source = Input(str(tmp_path / "in.parquet"), as_chat=False, model_names=())
    plan = source.plan(250)
    assert [(s.first_row, s.rows) for s in plan.shards] == [(0, 250), (250, 250), (500, 103)]
    assert [content for shard in plan.shards for _, content in source.rows(plan, shard)] == rows
    write(tmp_path / "in.parquet", {"prompt": ["p"] * len(rows)})
    with pytest.raises(ValueError, match="has changed since the job began"):
        list(source.rows(plan, plan.shards[1]))


def test_sampling_may_be_json_text(tmp_path):
    write(tmp_path / "in.parquet", {"prompt": ["a", "b"], "sampling": ['{"n": 2}', "{"]})
    source = Input(str(tmp_path / "in.parquet"), as_chat=False, model_names=())
    plan = source.plan(5)
    (_, first), (_, second) = source.rows(plan, plan.shards[0])
    assert first == {"prompt": "a", "sampling": {"n": 2}} and "text and not JSON" in str(second)


def test_what_is_no_table_of_rows_is_refused(tmp_path):
    write(tmp_path / "wrong.parquet", {"promt": ["a"]})
    (tmp_path / "none.parquet").write_text("x" * 100)
    write(tmp_path / "twice.parquet", {"prompt": ["a", "b"], "id": ["x", "x"]})
    for name, message in {
        "wrong": "did you mean prompt",
        "none": "is no Parquet file",
        "twice": "ids must differ",
    }.items():
        with pytest.raises(ValueError, match=message):
            Input(str(tmp_path / f"{name}.parquet"), as_chat=False, model_names=()).plan(2)


def test_output_tables_hold_what_lines_hold_and_equal_bytes_after_a_stop(prompts, tmp_path):  # noqa: F811
    outputs = {}
    for name, format, rounds in (("a", "jsonl", None), ("b", "parquet", None), ("c", "parquet", 4)):
        outputs[name] = str(tmp_path / name)
        source, job = begin(prompts, outputs[name], format=format)
        if rounds is not None:
            assert not work(source, job, rounds=rounds)[0]
        assert work(source, job)[0] and job.finish() is not None
    assert files(outputs["b"]) == files(outputs["c"])
    lines = [
        json.loads(x)
        for n, data in files(outputs["a"]).items()
        if "/part-" in n and "_commits" not in n
        for x in data.splitlines()
    ]
    table = parquet.read_table(sorted((tmp_path / "b").glob("part-*.parquet"))).to_pylist()
    assert len(lines) == len(table) > ROWS
    for line, row in zip(lines, table, strict=True):
        tops = row.pop("top_logprobs")
        assert line.pop("top_logprobs", None) == (tops and [{str(k): v for k, v in place} for place in tops])
        for values in (line, row):  # JSON has the shortest decimals that read back as the same f32
            values["logprobs"] = values["logprobs"] and np.asarray(values["logprobs"], np.float32).tolist()
        assert {k: v for k, v in row.items() if k in line} == line
        assert all(v is None for k, v in row.items() if k not in line)
