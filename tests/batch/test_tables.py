"""Parquet in and out."""

import bz2
import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from levanter_infer.batch import tables
from levanter_infer.batch.input import Input
from levanter_infer.engine.params import SamplingParams
from levanter_infer.io.prompts import RowParser
from tests.batch.test_drive import ROWS, begin, files, prompts, work  # noqa: F401
from tests.tiers import nightly_but

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
    inputs = source.split(250)
    assert [(s.first_row, s.rows) for s in inputs.shards] == [(0, 250), (250, 250), (500, 103)]
    assert [content for shard in inputs.shards for _, content in source.rows(inputs, shard)] == rows
    write(tmp_path / "in.parquet", {"prompt": ["p"] * len(rows)})
    with pytest.raises(ValueError, match="has changed since the job began"):
        list(source.rows(inputs, inputs.shards[1]))


def test_shards_in_order_read_each_row_once(tmp_path, monkeypatch):
    """All rows are one row group, as pyarrow writes up to a million."""
    read, hashed = [], []
    rows_of, group_sha256 = tables._rows_of, tables._group_sha256
    monkeypatch.setattr(tables, "_rows_of", lambda batch: read.append(batch.num_rows) or rows_of(batch))
    monkeypatch.setattr(tables, "_group_sha256", lambda *args: hashed.append(1) or group_sha256(*args))
    write(tmp_path / "in.parquet", {"prompt": [f"p{i}" for i in range(1000)]})
    source = Input(str(tmp_path / "in.parquet"), as_chat=False, model_names=())
    inputs = source.split(30)
    read.clear(), hashed.clear()
    found = [content["prompt"] for shard in inputs.shards for _, content in source.rows(inputs, shard)]
    assert found == [f"p{i}" for i in range(1000)] and sum(read) == 1000 and len(hashed) == 1
    for number in (20, 3, 4, 33, 0):  # in any order, and after one that was not read to its end
        shard = inputs.shards[number]
        rows = source.rows(inputs, shard)
        assert next(rows)[1] == {"prompt": f"p{shard.first_row}"}
        found = [content["prompt"] for _, content in source.rows(inputs, shard)]
        assert found == [f"p{shard.first_row + i}" for i in range(shard.rows)]
    assert sum(read) < 1000 + 5 * 3 * 30


def test_sampling_may_be_json_text(tmp_path):
    write(tmp_path / "in.parquet", {"prompt": ["a", "b"], "sampling": ['{"n": 2}', "{"]})
    source = Input(str(tmp_path / "in.parquet"), as_chat=False, model_names=())
    inputs = source.split(5)
    (_, first), (_, second) = source.rows(inputs, inputs.shards[0])
    assert first == {"prompt": "a", "sampling": {"n": 2}} and "sampling is text and is not JSON" in str(second)


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
            Input(str(tmp_path / f"{name}.parquet"), as_chat=False, model_names=()).split(2)


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
        assert list(line) == list(row)
        for values in (line, row):  # JSON has the shortest decimals that read back as the same f32
            values["logprobs"] = np.asarray(values["logprobs"], np.float32).tolist()
        assert row == line
    schemas = {str(parquet.read_schema(path)) for path in (tmp_path / "b").glob("part-*.parquet")}
    assert len(schemas) == 1


def rows_of_table(path, size=100):
    """(inputs, contents) of a table as a job reads it."""
    source = Input(str(path), as_chat=False, model_names=())
    inputs = source.split(size)
    return inputs, [content for shard in inputs.shards for _, content in source.rows(inputs, shard)]


def requests(contents):
    return [RowParser(SamplingParams()).row(content, str(i), f"in:{i}") for i, content in enumerate(contents)]


def test_bad_row_of_a_table_is_an_error_of_that_row_alone(tmp_path):
    """Each of these used to end the job with a traceback."""
    deep = '{"n": ' + "[" * 100_000 + "]" * 100_000 + "}"
    good = [{"role": "user", "content": "hi"}]
    columns = {
        "id": ["a", "b", "c", "d"],
        "messages": [good, [None], good, good],
        "sampling": ['{"n": 2}', None, deep, '{"n": NaN}'],
    }
    write(tmp_path / "in.parquet", columns)
    rows = requests(rows_of_table(tmp_path / "in.parquet")[1])
    assert [row.id for row in rows] == ["a", "b", "c", "d"] and rows[0].request.sampling.n == 2
    assert rows[0].error is None and rows[1].request.messages == [None]  # which the chat template refuses
    assert "in:2: sampling is text and is not JSON that can be read: it is nested too deeply" in rows[2].error
    assert "in:3: sampling is text and is not JSON: it holds NaN" in rows[3].error
    write(tmp_path / "whole.parquet", {"messages": [[1, 2], [3]]})
    assert [row.request.messages for row in requests(rows_of_table(tmp_path / "whole.parquet")[1])] == [[1, 2], [3]]


def test_map_with_a_key_twice_and_broken_text_are_errors_of_their_rows(tmp_path):
    kind = pyarrow.map_(pyarrow.string(), pyarrow.float64())
    bias = pyarrow.array([[("5", 1.0)], [("6", 1.0), ("6", 2.0)], None], kind)
    sampling = pyarrow.StructArray.from_arrays([bias], ["logit_bias"])
    broken = pyarrow.array([b"one", b"two", b"\xff"]).view(pyarrow.string())
    write(tmp_path / "in.parquet", {"prompt": broken, "id": ["a", "b", "c"], "sampling": sampling})
    rows = requests(rows_of_table(tmp_path / "in.parquet")[1])
    assert [row.id for row in rows] == ["a", "b", "c"] and rows[0].request.sampling.logit_bias == {5: 1.0}
    assert "column sampling cannot be read, perhaps because a map has a key twice" in rows[1].error
    assert "column prompt is not UTF-8" in rows[2].error
    write(tmp_path / "ids.parquet", {"prompt": ["a", "b", "c"], "id": broken})
    rows = requests(rows_of_table(tmp_path / "ids.parquet")[1])
    assert [row.id for row in rows] == ["one", "two", "2"] and "column id is not UTF-8" in rows[2].error


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(ValueError, match="in.parquet has 2 columns prompt; expected one"):
        rows_of_table(tmp_path / "in.parquet")


def test_chats_with_tools_may_be_structures_or_json_text(tmp_path):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for encode in (json.dumps, lambda value: value):
        columns = {
            "messages": [encode(messages), encode(messages)],
            "tools": [encode(tools), None],
            "chat_template_kwargs": [encode({"a": 1}), None],
            "add_generation_prompt": [None, False],
        }
        write(tmp_path / "in.parquet", columns)
        first, second = rows_of_table(tmp_path / "in.parquet")[1]
        assert first == {"messages": messages, "tools": tools, "chat_template_kwargs": {"a": 1}}
        assert second == {"messages": messages, "add_generation_prompt": False}


def test_a_table_whose_values_have_changed_is_not_given_out(tmp_path):
    """The footer of one without statistics is the same."""
    path = tmp_path / "in.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "row_group_size": 4}
    write(path, {"prompt": [f"prompt {i}" for i in range(12)]}, **options)
    source = Input(str(path), as_chat=False, model_names=())
    inputs = source.split(3)
    before = [[content for _, content in source.rows(inputs, shard)] for shard in inputs.shards]
    assert [row["prompt"] for rows in before for row in rows] == [f"prompt {i}" for i in range(12)]
    path.write_bytes(path.read_bytes().replace(b"prompt 4", b"prompt X"))
    assert tables.footer_sha256(path.open("rb")) == inputs.files[0].sha256
    for number, shard in enumerate(inputs.shards):  # the row groups of shards 1 and 2 hold row 4
        if number in (0, 3):
            assert [content for _, content in source.rows(inputs, shard)] == before[number]
        else:
            with pytest.raises(ValueError, match="in.parquet has changed since the job began"):
                list(source.rows(inputs, shard))


def test_damaged_table_is_named(tmp_path):
    path = tmp_path / "in.parquet"
    columns = {"prompt": [f"prompt {i}" for i in range(5000)], "id": [str(i) for i in range(5000)]}
    write(path, columns, compression="gzip")
    data = bytearray(path.read_bytes())
    data[50:5000] = bytes(4950)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot read .*in.parquet: GZipCodec failed"):
        rows_of_table(path)


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
@pytest.mark.parametrize("damage", ["truncated", "broken"])
def test_damaged_compression_is_named(tmp_path, suffix, pack, damage):
    path = tmp_path / f"in.jsonl{suffix}"
    lines = "".join(json.dumps({"prompt": f"p{i * 7919 % 1000}"}) + "\n" for i in range(2000))
    data = bytearray(pack(lines.encode()))
    if damage == "truncated":
        data = data[: len(data) // 2]
    else:
        data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"cannot read .*in.jsonl{suffix}: .*truncated or damaged"):
        rows_of_table(path)


def commands_of_the_docs() -> dict[str, str]:
    """Programs of docs/batch.md that read an output, by the first package that they need."""
    text = (
        (Path(__file__).parents[2] / "docs" / "batch.md").read_text().split("## Reading results")[1].split("\n## ")[0]
    )
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return {re.findall(r"^import (?!json)(\S+)", code, re.MULTILINE)[-1]: code for code in found}


PACKAGES = ["datasets", "polars", "pandas", "pyarrow.json", "pyarrow.dataset"]


@pytest.mark.parametrize("package", nightly_but(["pyarrow.json"], PACKAGES))
def test_commands_of_the_docs_read_all_shards(prompts, tmp_path, package):  # noqa: F811
    assert set(commands_of_the_docs()) == set(PACKAGES)
    pytest.importorskip(package)
    source, job = begin(prompts, str(tmp_path / "out"), format="parquet" if package == "pyarrow.dataset" else "jsonl")
    assert work(source, job)[0] and job.finish() is not None
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    line = [sys.executable, "-c", commands_of_the_docs()[package]]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    refused = 3
    assert int(done.stdout.split()[-1]) == counts["samples"] + refused > counts["rows"]
