"""`output.carry`: columns of the input's rows that stand unchanged in those of the output."""

import json
import math

import pytest

from levanter_infer.batch.drive import Driver
from levanter_infer.batch.input import InputShards
from levanter_infer.batch.job import JOB, Job, check_same, dumps, make_job_spec, read_job_spec
from levanter_infer.batch.store import open_store
from levanter_infer.batch.worker import _config_fingerprint, input_of, output_format
from levanter_infer.columns import as_utf8, encode_row
from levanter_infer.config import load_config
from levanter_infer.io.prompts import columns_of, read_rows
from tests.batch.fake_engine import FakeEngine
from tests.batch.test_drive import files, rows_of

OWN = [
    {"source": "a", "meta": {"n": [1, None, 2.5], "é": "\ud800"}},
    {"source": "", "meta": None},
    {"meta": 2**70},
    {"source": "refused", "meta": [], "sampling": 3},
    {"source": "once more", "meta": "text"},
]
"""Columns of their own that rows have; `sampling: 3` is refused."""


def config_of(prompts_file, output="out", kind=None, **keys):
    from levanter_infer.batch.config import BatchRunConfig

    given = {"prompts_file": str(prompts_file), "output.path": str(output), "output.carry": "[source, meta]", **keys}
    return load_config(None, [("model", "m"), *given.items()], kind or BatchRunConfig)


def lines(path, rows=OWN):
    path.write_text("".join(json.dumps({"prompt": f"p{i}", **row}) + "\n" for i, row in enumerate(rows)))
    return path


def job_of(config):
    """The job of a configuration, as `worker.open_worker` begins it, but with nothing of a model."""
    source, store = input_of(config), open_store(config.output.path)
    if read_job_spec(store) is None:
        facts = {"engine": {"numerics": "batch_invariant"}, "batch": {"format": config.batch.format}}
        store.create(JOB, dumps(make_job_spec(facts, {}, {}, source.split(config.batch.rows_per_shard))))
    return source, Job(store, read_job_spec(store))


def work(config, rounds=math.inf):
    """Do the job of a configuration with an engine without a model."""
    (source, job), engine = job_of(config), FakeEngine()
    rows_as = output_format(config, None)
    read = lambda shard: source.rows(job.input, shard)  # noqa: E731
    driver = Driver(engine, read, config.sampling, max_seqs=1, equal_bytes=True, output_format=rows_as)
    driver.run(job.claim(job.input.shards), lambda: engine.rounds >= rounds)
    return job.finish()


# Lines


def test_columns_of_lines_are_those_of_their_rows(tmp_path):
    config = config_of(lines(tmp_path / "in.jsonl"), tmp_path / "out", **{"sampling.n": "2"})
    assert work(config) is not None
    rows = rows_of(str(tmp_path / "out"))
    assert [list(row)[-3:] for row in rows] == [["error", "source", "meta"]] * 9  # two samples each, and one refused
    for row in rows:
        own = OWN[int(row["id"])]
        assert row["source"] == own.get("source") and (row["meta"] == own["meta"] or row["id"] == "0")
        assert bool(row["error"]) == (row["id"] == "3")
    assert rows[0]["meta"] == {"n": [1, None, 2.5], "é": "\\ud800"}  # which pyarrow could not read


def test_a_carried_number_beyond_floats_is_an_error_of_its_row_before_it_is_sampled(tmp_path):
    own = [{"prompt": "a", "source": 1.5, "meta": "m"}, {"prompt": "b", "source": 3, "meta": [1.5]}]
    path = lines(tmp_path / "in.jsonl", own)
    path.write_text(path.read_text().replace("[1.5]", "[1e999]"))
    assert work(config_of(path, tmp_path / "out")) is not None
    first, second = rows_of(str(tmp_path / "out"))
    assert not first["error"] and (first["source"], first["meta"]) == (1.5, "m")
    assert "in.jsonl:2: meta holds a number beyond 64-bit floats" in second["error"]
    assert (second["source"], second["meta"]) == (3, None) and second["finish_reason"] == "error"


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_columns_of_lines_are_the_same_bytes_after_a_stop(tmp_path, format):
    keys = {"batch.format": format, "batch.rows_per_shard": "3"}
    path = lines(tmp_path / "in.jsonl", OWN * 3)
    stopped, whole = (config_of(path, tmp_path / name, **keys) for name in ("stopped", "whole"))
    assert work(stopped, rounds=3) is None and any("_journal" in name for name in files(str(tmp_path / "stopped")))
    assert work(stopped) is not None and work(whole) is not None
    assert files(str(tmp_path / "stopped")) == files(str(tmp_path / "whole"))


def test_sample_writes_the_same_columns_as_a_job(tmp_path):
    from levanter_infer.config import RunConfig
    from levanter_infer.engine.request import RequestOutput

    config = config_of(lines(tmp_path / "in.jsonl"), kind=RunConfig)
    columns = columns_of(config)
    rows = read_rows(config, columns=columns)
    written = [json.loads(encode_row(out)) for row in rows for out in columns.rows(_failed(row.id), row.carried)]
    assert [row["source"] for row in written] == [own.get("source") for own in OWN]
    assert [row["meta"] for row in written] == [as_utf8(own["meta"]) for own in OWN]
    assert list(columns.rows(RequestOutput("x", None, [], [], error="e")))[0]["meta"] is None


def _failed(name):
    from levanter_infer.engine.request import RequestOutput

    return RequestOutput(name, None, [], [], error="e")


def test_a_column_that_is_not_carried_is_refused_with_the_key_that_carries_it(tmp_path):
    path = lines(tmp_path / "in.jsonl", [{"meta": 1, "label": 2}])
    config = config_of(path, **{"output.carry": "[meta]"})
    (row,) = read_rows(config, columns=columns_of(config))
    assert "unknown key label; " in row.error and "if output.carry names it: [label]" in row.error
    assert row.carried == {"meta": 1}
    (scored,) = read_rows(config, completions=True)
    assert "unknown key meta" in scored.error and "output.carry" not in scored.error


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "in.jsonl",
            {"output.carry": "[meta, text]"},
            "output.carry names text, which is a column of the output; give",
        ),
        ("in.jsonl", {"output.carry": "[score]"}, "output.carry names score, which is a column of the output; give"),
        (
            "in.jsonl",
            {"output.carry": "[messages]"},
            "output.carry names messages, which is a key of the request; give",
        ),
        ("in.jsonl", {"output.carry": "[custom_id]"}, "output.carry names custom_id, which is a key of the request"),
        ("in.jsonl", {"output.carry": "[a, b, a]"}, "output.carry names 'a' twice"),
        ("in.jsonl", {"batch.format": "openai"}, "output.carry with batch.format: openai, whose lines lack columns"),
        ("in.txt", {}, "output.carry with .*in.txt: plain prompts have no columns; give JSONL"),
    ],
)
def test_what_cannot_be_carried_is_refused_before_anything_is_read(tmp_path, name, keys, message):
    path = tmp_path / name
    path.write_text("{broken")
    with pytest.raises(ValueError, match=message):
        input_of(config_of(path, **keys))


def test_what_sample_and_score_cannot_carry_is_refused(tmp_path):
    from levanter_infer import score
    from levanter_infer.config import RunConfig

    given = [("model", "m"), ("prompts", "x"), ("output.carry", "[meta]")]
    with pytest.raises(ValueError, match="output.carry without output.path"):
        load_config(None, [*given, ("output.metrics", "m.json")])
    config = load_config(None, [*given, ("output.path", "out")])
    with pytest.raises(ValueError, match="output.carry with prompts: plain prompts have no columns"):
        read_rows(config, columns=columns_of(config))
    with pytest.raises(ValueError, match="output.carry is for sample and batch"):
        score.run(config_of(lines(tmp_path / "in.jsonl"), kind=RunConfig))


def test_a_job_is_not_resumed_with_other_columns(tmp_path):
    def facts(carry):
        return _config_fingerprint(config_of(lines(tmp_path / "in.jsonl"), **{"output.carry": carry}))

    made = [make_job_spec(facts(carry), {}, {}, InputShards((), ())) for carry in ("[source]", "[source]", "[meta]")]
    check_same(*made[:2])
    with pytest.raises(ValueError, match=r"output.carry is \['meta'\] and was \['source'\]"):
        check_same(made[0], made[2])


# Parquet


def table(path, **columns):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    length = len(next(iter(columns.values())))
    parquet.write_table(pyarrow.table({"prompt": [f"p{i}" for i in range(length)], **columns}), path)
    return path


def read_parts(output):
    dataset = pytest.importorskip("pyarrow.dataset")
    return dataset.dataset(str(output), format="parquet", exclude_invalid_files=True).to_table().sort_by("id")


def test_columns_of_lines_are_json_text_in_parquet_in_every_shard(tmp_path):
    keys = {"batch.format": "parquet", "batch.rows_per_shard": "2"}
    config = config_of(lines(tmp_path / "in.jsonl"), tmp_path / "out", **keys)
    assert work(config) is not None
    found = read_parts(tmp_path / "out")
    assert {str(found.schema.field(name).type) for name in ("source", "meta")} == {"string"}
    texts = found["meta"].to_pylist()
    assert texts[1] is None and [json.loads(text) for text in texts[2:]] == [2**70, [], "text"]
    assert json.loads(texts[0])["n"] == [1, None, 2.5]
    assert found["source"].to_pylist() == ['"a"', '""', None, '"refused"', '"once more"']


def test_columns_of_parquet_keep_their_types_in_parquet_also_after_a_stop(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    meta = pyarrow.struct({"n": pyarrow.list_(pyarrow.int16()), "ok": pyarrow.bool_(), "x": pyarrow.float32()})
    values = [{"n": [i], "ok": i % 2 == 0, "x": None} if i % 3 else None for i in range(9)]
    (tmp_path / "in").mkdir()
    source = pyarrow.array(["a", "b", None] * 3).dictionary_encode()
    table(tmp_path / "in" / "a.parquet", meta=pyarrow.array(values, meta), source=source)
    score = pyarrow.array([0.1, math.nan, math.inf, None], pyarrow.float32())
    table(tmp_path / "in" / "b.parquet", weight=score, source=pyarrow.nulls(4))  # a column may be nothing in one file
    keys = {"batch.format": "parquet", "batch.rows_per_shard": "4", "output.carry": "[weight, source, meta]"}
    stopped, whole = (
        config_of(tmp_path / "in" / "*.parquet", tmp_path / name, **keys) for name in ("stopped", "whole")
    )
    assert work(stopped, rounds=5) is None and work(stopped) is not None and work(whole) is not None
    assert files(str(tmp_path / "stopped")) == files(str(tmp_path / "whole"))
    found = read_parts(tmp_path / "whole").sort_by([("id", "ascending")])
    types = {name: str(found.schema.field(name).type) for name in ("weight", "source")}
    assert types == {"weight": "float", "source": "string"} and found.schema.field("meta").type == meta
    rows = {int(row["id"]): row for row in found.to_pylist()}
    assert [rows[i]["meta"] for i in range(13)] == [*values, *[None] * 4]
    assert [rows[i]["source"] for i in range(13)] == [*["a", "b", None] * 3, *[None] * 4]
    assert [rows[i]["weight"] for i in range(13)] == [*[None] * 9, score[0].as_py(), None, None, None]


def test_columns_of_parquet_are_json_in_lines(tmp_path):
    path = table(tmp_path / "in.parquet", source=["a", None], meta=[{"x": 1.5}, {"x": math.nan}])
    assert work(config_of(path, tmp_path / "out")) is not None
    rows = rows_of(str(tmp_path / "out"))
    assert [(row["source"], row["meta"], row["error"]) for row in rows] == [
        ("a", {"x": 1.5}, ""),
        (None, {"x": None}, ""),
    ]


def test_only_carried_columns_have_to_agree_between_tables(tmp_path):
    """Others may differ in type, and carried ones are JSON in text then."""
    import datetime

    table(tmp_path / "a.parquet", meta=[1], source=["x"], id=[7], sampling=[{"n": 1}])
    table(tmp_path / "b.parquet", meta=[2], source=["x"], id=["i"], sampling=["{}"])
    config = config_of(tmp_path / "*.parquet", tmp_path / "out", **{"batch.format": "parquet"})
    assert work(config) is not None
    assert [str(read_parts(tmp_path / "out")[name].type) for name in ("source", "meta")] == ["string", "int64"]
    table(tmp_path / "b.parquet", meta=["m"], source=["x"])
    assert work(config_of(tmp_path / "*.parquet", tmp_path / "text", **{"batch.format": "parquet"})) is not None
    assert sorted(read_parts(tmp_path / "text")["meta"].to_pylist()) == ['"m"', "1"]
    lines(tmp_path / "c.jsonl")
    assert input_of(config_of(tmp_path / "*[abc].*")).split(5).carried == ""
    table(tmp_path / "b.parquet", meta=[datetime.datetime(2020, 1, 1)], source=["x"])
    with pytest.raises(ValueError, match="column meta of output.carry has type timestamp"):
        input_of(config_of(tmp_path / "*[abc].*")).split(5)


def test_tables_whose_columns_cannot_be_carried_are_refused_before_the_job_begins(tmp_path):
    import datetime

    (tmp_path / "two").mkdir()
    table(tmp_path / "two" / "a.parquet", meta=[1], source=["x"])
    table(tmp_path / "two" / "b.parquet", meta=["1"], source=["x"])
    table(tmp_path / "when.parquet", meta=[datetime.datetime(2020, 1, 1)], source=["x"])
    table(tmp_path / "other.parquet", meta=[1], source=["x"], label=[1])
    table(tmp_path / "none.parquet", meta=[1])
    assert input_of(config_of(tmp_path / "two" / "*.parquet")).split(5).carried == ""  # JSON in text
    for name, message in {
        "when.parquet": "column meta of output.carry has type timestamp.*; expected text, numbers.*cast it",
        "other.parquet": r"other.parquet.label; .*if output.carry names it: \[label\]",
        "none.parquet": "output.carry names 'source'; the files have the columns prompt, meta",
    }.items():
        config = config_of(tmp_path / name, tmp_path / "out")
        with pytest.raises(ValueError, match=message):
            input_of(config).split(5)
