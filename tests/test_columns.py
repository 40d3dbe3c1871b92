"""Rows of one output have one schema, and readers that infer types can put its files together."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from levanter_infer.columns import OPTIONAL, TYPES, Columns, encode_row, stop_reason_text
from levanter_infer.config import OutputConfig, load_config
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import NOT_FINITE, Completion, RequestOutput
from tests.tiers import nightly_but


def completion(**changes):
    values = {
        "index": 0,
        "token_ids": [5, 6],
        "text": "a\x1b[2Jb",
        "finish_reason": "stop",
        "logprobs": np.asarray([-0.1, -np.inf], np.float32),
        "processed_logprobs": np.asarray([-0.5, 0.0], np.float32),
        "top_logprobs": None,
        "seed": 2**63,
        "token_versions": np.asarray([3, 4], np.int32),
    }
    return Completion(**(values | changes))


OUTPUT = RequestOutput("r", "p", [1, 2], [completion(), completion(index=1)])
TOP = [{7: np.float32(-0.5), 9: np.float32(-np.inf)}, {8: np.float32(-1)}]
ALWAYS = [name for name in TYPES if name not in OPTIONAL]


def one(output: RequestOutput, *include: str, **sampling):
    return next(Columns(SamplingParams(**sampling), include).rows(output))


def test_row_has_the_documented_columns_and_there_is_one_for_each_sample():
    result = list(Columns(SamplingParams(logprobs=0)).rows(OUTPUT))
    names = ["id", "index", "prompt", "prompt_token_ids", "text", "token_ids", "logprobs", "finish_reason"]
    names += ["stop_reason", "seed", "seed_str", "error"]
    assert [list(row) for row in result] == [names, names] and [row["index"] for row in result] == [0, 1]
    row = result[0]
    assert (row["id"], row["prompt"], row["prompt_token_ids"], row["error"]) == ("r", "p", [1, 2], "")
    assert row["logprobs"] == [-0.1, None] and np.float32(row["logprobs"][0]) == np.float32(-0.1)
    assert row["text"] == "a\x1b[2Jb"  # files hold what was sampled
    assert list(one(OUTPUT)) == ALWAYS


def test_optional_columns_are_there_if_sampling_or_include_asks():
    scored = dataclasses.replace(
        OUTPUT, prompt_logprobs=np.asarray([-0.1], np.float32), prompt_top_logprobs=TOP[:1], num_cached_tokens=7
    )
    logprobs, routed = np.asarray([-0.5, -1.0], np.float32), np.asarray([[[4, 0]], [[1, 3]], [[2, 1]]], np.int16)
    scored.completions = [completion(top_logprobs=TOP, score=-1.5, logprobs=logprobs, routed_experts=routed)]
    entries = [[{"token_id": 7, "logprob": -0.5}, {"token_id": 9, "logprob": None}], [{"token_id": 8, "logprob": -1.0}]]
    expected = {
        "logprobs": [-0.5, -1.0],
        "top_logprobs": entries,
        "processed_logprobs": [-0.5, 0.0],
        "cumulative_logprob": -1.5,
        "token_versions": [3, 4],
        "score": -1.5,
        "routed_experts": [[[4, 0]], [[1, 3]], [[2, 1]]],
        "prompt_logprobs": [-0.1],
        "prompt_top_logprobs": entries[:1],
        "num_cached_tokens": 7,
    }
    assert set(expected) == set(OPTIONAL)
    for name, value in expected.items():
        row = one(scored, name)
        assert row[name] == value and set(row) == {*ALWAYS, name}
    assert set(one(scored, logprobs=1)) == {*ALWAYS, "logprobs", "top_logprobs"}
    assert set(one(scored, prompt_logprobs=1)) == {*ALWAYS, "prompt_logprobs", "prompt_top_logprobs"}
    assert set(one(scored, num_beams=2)) == {*ALWAYS, "score"}
    assert set(one(scored, return_routed_experts=True)) == {*ALWAYS, "routed_experts"}
    assert list(one(scored, *OPTIONAL)) == list(TYPES)


def test_unknown_columns_are_refused_by_name():
    base = [("model", "m"), ("prompts", "x"), ("output", "o")]
    with pytest.raises(ValueError, match="output.include names 'logprob': expected some of logprobs, top_logprobs"):
        load_config(None, [*base, ("output.include", "[logprob]")])
    with pytest.raises(ValueError, match="output.include names 'text': is always there"):
        OutputConfig("x", include=["text"])
    assert load_config(None, [*base, ("output.include", "[token_versions]")]).output.include == ["token_versions"]


@pytest.mark.parametrize(("reason", "text"), [(None, ""), ("\n", "\n"), (2, "2"), ((5, 6), "[5, 6]")])
def test_stop_reason_is_text(reason, text):
    assert stop_reason_text(reason) == text
    row = one(dataclasses.replace(OUTPUT, completions=[completion(stop_reason=reason)]))
    assert row["stop_reason"] == text


def test_failed_request_has_a_row_of_the_same_columns_and_types():
    failed = one(RequestOutput("r", None, [1], [], error="too long"), *OPTIONAL)
    assert list(failed) == list(TYPES) and (failed["error"], failed["finish_reason"]) == ("too long", "error")
    assert (failed["index"], failed["seed"], failed["seed_str"], failed["text"]) == (None, None, "", "")
    for name, kind in TYPES.items():
        if kind in ("text", "ints", "floats", "tops", "experts"):
            assert failed[name] is not None
    broken = one(dataclasses.replace(OUTPUT, completions=[completion(finish_reason="error", error=NOT_FINITE)]))
    assert broken["error"] == "the model's logits are not finite" and broken["token_ids"] == [5, 6]


def mixed_outputs() -> list[list[RequestOutput]]:
    """Results of several files: of every kind of prompt, with and without what a row may lack, failed, broken."""
    good = completion(text=None, top_logprobs=None, seed=5)
    scored = completion(
        logprobs=np.asarray([-0.5, -1.25], np.float32),
        top_logprobs=TOP,
        stop_reason=(1, 2),
        seed=2**53 - 1,
        score=-0.25,
    )
    return [
        [RequestOutput("a", None, [1], [good]), RequestOutput("b", "p", [1, 2], [scored])],
        [RequestOutput("c", None, [], [], error="no"), RequestOutput("d", None, [3], [scored])],
        [RequestOutput("e", "x", [1], [scored, scored]), RequestOutput("f", "x", [4], [scored], num_cached_tokens=3)],
    ]


def write_files(folder, include) -> list[str]:
    columns = Columns(SamplingParams(prompt_logprobs=None), include)
    names = []
    for number, outputs in enumerate(mixed_outputs()):
        names.append(str(folder / f"part-{number}.jsonl"))
        lines = [encode_row(row) + "\n" for output in outputs for row in columns.rows(output)]
        (folder / f"part-{number}.jsonl").write_text("".join(lines))
    return names


WITHOUT_PROMPTS = [name for name in OPTIONAL if not name.startswith("prompt_")]


@pytest.mark.parametrize("include", [[], WITHOUT_PROMPTS])
def test_pyarrow_infers_one_schema_for_all_files(tmp_path, include):
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow_json = pytest.importorskip("pyarrow.json")
    tables = [pyarrow_json.read_json(name) for name in write_files(tmp_path, include)]
    assert all(table.schema == tables[0].schema for table in tables)
    whole = pyarrow.concat_tables(tables)
    assert whole.num_rows == 7 and not any(pyarrow.types.is_null(field.type) for field in whole.schema)
    assert whole["seed"].to_pylist()[:2] == [5, 2**53 - 1]


READERS = {
    "datasets": "datasets.load_dataset('json', data_files=files, split='train', cache_dir=folder).num_rows",
    "polars": "polars.concat([polars.read_ndjson(file) for file in files]).height",
    "polars scan": "polars.scan_ndjson(files).collect().height",
    "pandas": "len(pandas.concat([pandas.read_json(file, lines=True) for file in files]))",
}


@pytest.mark.parametrize("reader", nightly_but([], READERS))
def test_other_readers_put_the_files_together(tmp_path, reader):
    module = reader.split()[0]
    pytest.importorskip(module)
    files = write_files(tmp_path, WITHOUT_PROMPTS)
    code = f"import {module}\nfiles, folder = {files!r}, {str(tmp_path)!r}\nprint({READERS[reader]})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.split()[-1] == "7", done.stderr[-2000:]


@pytest.mark.parametrize("seed", [0, 2**53 - 1, 2**53 + 1, 12426054289685354689, 2**64 - 1])
def test_seed_survives_readers_whose_numbers_are_doubles(tmp_path, seed):
    row = one(dataclasses.replace(OUTPUT, completions=[completion(seed=seed)]))
    line = encode_row(row)
    assert f'"seed": {seed}, ' in line  # as given
    rounded = json.loads(line, parse_int=lambda text: int(float(text)))  # as node and jq read it
    assert int(rounded["seed_str"]) == seed and (rounded["seed"] == seed) == (seed in (0, 2**53 - 1))
    pyarrow_json = pytest.importorskip("pyarrow.json")
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    read = pyarrow_json.read_json(str(tmp_path / "rows.jsonl")).to_pylist()[0]
    assert int(read["seed_str"]) == seed and (seed >= 2**53 or read["seed"] == seed)


def test_a_reader_that_is_given_the_schema_reads_files_of_failed_rows_and_large_seeds(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow_json = pytest.importorskip("pyarrow.json")
    from levanter_infer.batch.tables import arrow_schema

    columns = Columns(SamplingParams(logprobs=2))
    outputs = [RequestOutput("f", None, [], [], error="no"), dataclasses.replace(OUTPUT, completions=[completion()])]
    schema, tables = arrow_schema(columns.names), []
    for number, output in enumerate(outputs):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(encode_row(row) + "\n" for row in columns.rows(output)))
        options = pyarrow_json.ParseOptions(explicit_schema=schema)
        tables.append(pyarrow_json.read_json(str(path), parse_options=options))
    whole = pyarrow.concat_tables(tables)
    assert whole.schema == schema and whole["seed"].to_pylist() == [None, 2**63]
