"""Jobs with an engine that has no model: every row once, in order, whatever interrupts them."""

import json
import os
import random
import re

import fsspec
import pytest

from levanter_infer.batch.drive import Driver
from levanter_infer.batch.input import Input
from levanter_infer.batch.job import (
    COMMITS,
    JOB,
    JOURNALS,
    MANIFEST,
    Job,
    check_same,
    dumps,
    make_job_spec,
    read_job_spec,
)
from levanter_infer.batch.store import LocalStore, open_store
from levanter_infer.engine.params import SamplingParams
from levanter_infer.io.output import lock_file
from tests.batch.fake_engine import FakeEngine

ROWS = 23


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": f"p{i}", "sampling": {"n": 1 + i % 2, "logprobs": i % 3}} for i in range(ROWS)]
    rows[13] = {"prompt": "nan"}
    rows[5], rows[11], rows[12] = {"promt": "x"}, {"prompt": "refuse"}, {"prompt": "late", "timeout_s": 3}
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(params=["disk", "objects"])
def output(request, tmp_path):
    if request.param == "disk":
        return str(tmp_path / "out")
    return f"memory://{tmp_path.name}"


def begin(prompts, output, numerics="batch_invariant", format="jsonl", size=5):
    """A job as `run.open_worker` finds or begins it."""
    source, store = Input(str(prompts), as_chat=False, model_names=()), open_store(output)
    config = {"engine": {"numerics": numerics}, "batch": {"format": format}}
    if read_job_spec(store) is None:
        store.create(JOB, dumps(make_job_spec(config, {}, {}, source.split(size))))
    return source, Job(store, read_job_spec(store))


def work(source, job, worker=0, workers=1, rounds=None, engine=None):
    """Run a worker, and stop it after so many rounds."""
    engine = engine or FakeEngine()
    driver = Driver(
        engine,
        lambda shard: source.rows(job.input, shard),
        SamplingParams(logprobs=1),  # rows may ask for more or less
        max_seqs=2,
        equal_bytes=job.spec["guarantee"]["numerics"] == "batch_invariant",
    )
    stop = (lambda: False) if rounds is None else (lambda: engine.rounds >= rounds)
    return driver.run(job.claim(job.shards_of(worker, workers)), stop), driver.totals


def files(output) -> dict[str, bytes]:
    fs, path = fsspec.core.url_to_fs(output)
    fs.invalidate_cache()
    return {name.removeprefix(path): fs.cat_file(name) for name in sorted(fs.find(path))}


def rows_of(output) -> list[dict]:
    return [
        json.loads(line)
        for name, data in files(output).items()
        if name.endswith(".jsonl")
        for line in data.splitlines()
    ]


def undisturbed(prompts, tmp_path, **options):
    source, job = begin(prompts, str(tmp_path / "undisturbed"), **options)
    assert work(source, job)[0] and job.finish() is not None
    return files(str(tmp_path / "undisturbed"))


def test_a_job_writes_every_row_once_in_order_and_a_manifest(prompts, output):
    source, job = begin(prompts, output)
    engine = FakeEngine()
    complete, totals = work(source, job, engine=engine)
    manifest = job.finish()
    assert complete and totals.rows == ROWS and totals.failed == 4 and manifest is not None
    parts = [
        json.loads(line) for shard in manifest["shards"] for line in files(output)[f"/{shard['file']}"].splitlines()
    ]
    assert [(row["id"], row["index"]) for row in parts] == [
        (str(i), index)
        for i in range(ROWS)
        for index in ([None] if i in (5, 11, 12) else range(1 if i == 13 else 1 + i % 2))
    ]
    errors = [row["error"] for row in parts if row["error"]]
    assert "in.jsonl:6: unknown key promt" in errors[0] and errors[1] == "refused" and "timeout_s depends" in errors[2]
    assert errors[3:] == ["the model's logits are not finite"]
    assert manifest["counts"] == {
        "rows": ROWS,
        "failed_rows": 4,
        "samples": len(parts) - 3,
        "prompt_tokens": 3 * (ROWS - 3),
        "generated_tokens": 2 * (len(parts) - 3),
    }
    assert json.loads(files(output)[f"/{MANIFEST}"])["shards"] == manifest["shards"]
    assert not any(JOURNALS in name or name.endswith(".partial") for name in files(output))
    assert engine.max_running <= 4 * 2 + 1  # the window, and one request more of two sequences


def test_timeouts_are_served_where_equal_bytes_are_not_promised(prompts, output):
    source, job = begin(prompts, output, numerics="default")
    assert work(source, job)[1].failed == 3


def test_the_first_unforeseen_error_of_a_row_is_logged_with_its_traceback(prompts, tmp_path, caplog):
    class Faulty(FakeEngine):
        def submit(self, request):
            if request.prompt in ("p2", "p3"):
                raise AttributeError("a fault of the engine")
            return super().submit(request)

    source, job = begin(prompts, str(tmp_path / "out"))
    complete, totals = work(source, job, engine=Faulty())
    assert complete and totals.rows == ROWS
    [record] = caplog.records
    assert "row 2 failed unexpectedly" in record.getMessage()
    assert record.exc_info is not None and "a fault of the engine" in str(record.exc_info[1])


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5, 8, 12])
def test_a_stopped_job_goes_on_where_it_was_and_ends_the_same(prompts, output, tmp_path, rounds):
    source, job = begin(prompts, output)
    first, second = FakeEngine(), FakeEngine()
    complete, totals = work(source, job, rounds=rounds, engine=first)
    assert complete == (totals.rows == ROWS) and first.flushed == (not complete) and first.rounds <= rounds
    assert job.finish() is None or complete
    source, job = begin(prompts, output)
    complete, after = work(source, job, engine=second)
    assert complete and after.found <= totals.rows and after.rows == ROWS - totals.rows  # nothing is computed twice
    assert job.finish() is not None
    assert files(output) == undisturbed(prompts, tmp_path)


class Killed(BaseException):
    """The process is gone: nothing below may handle it."""


class DyingStore(LocalStore):
    """Dies at one of its writes: before it, after it or, where that can be, in the middle of it."""

    def __init__(self, root, writes: int, chance: random.Random):
        super().__init__(root)
        self.left, self.chance = writes, chance

    def spend(self, write, data: bytes, *, can_tear: bool):
        self.left -= 1
        if self.left > 0:
            return write(data)
        how = self.chance.choice(["before", "after", "within"])
        if how == "after" and self.left == 0:
            write(data)
        if how == "within" and self.left == 0 and can_tear:
            write(data[: self.chance.randrange(len(data))])
        raise Killed

    def put(self, name, data):
        self.spend(lambda d: LocalStore.put(self, name, d), data, can_tear=False)

    def create(self, name, data):
        return self.spend(lambda d: LocalStore.create(self, name, d), data, can_tear=False)

    def claim(self, name):
        journal = super().claim(name)
        add = journal.add
        journal.add = lambda data: self.spend(add, data, can_tear=True)
        return journal


@pytest.mark.parametrize("seed", range(20))
def test_a_job_killed_at_any_write_ends_the_same(prompts, tmp_path, seed):
    output, chance = tmp_path / "out", random.Random(seed)
    source, job = begin(prompts, str(output))
    deaths = 0
    while True:
        job = Job(DyingStore(output, chance.randrange(1, 12), chance), job.spec)
        try:
            if work(source, job)[0] and job.finish() is not None:
                break
        except Killed:
            deaths += 1
    assert deaths > 2
    assert files(str(output)) == undisturbed(prompts, tmp_path)


def test_workers_share_the_shards_and_any_number_of_them_writes_the_same(prompts, output, tmp_path):
    source, job = begin(prompts, output)
    engines = [FakeEngine() for _ in range(3)]
    for worker in (2, 0, 1):
        assert work(source, job, worker, 3, engine=engines[worker])[0]
        assert (job.finish() is None) == (len(job.committed()) < len(job.input.shards))
    submitted = [name for engine in engines for name in engine.submitted]
    assert len(submitted) == len(set(submitted))
    if job.store.has_claims:  # the first has done the work of those that had not come yet
        assert engines[1].submitted == [] and job.finish() is not None
    else:
        assert all(engine.submitted for engine in engines)
    assert files(output) == undisturbed(prompts, tmp_path)


def test_a_shard_that_another_process_works_on_is_left_to_it(prompts, tmp_path):
    source, job = begin(prompts, str(tmp_path / "out"))
    taken = next(job.claim(job.input.shards))
    assert taken.source.index == 0
    assert work(source, job)[0] and job.finish() is None and len(job.committed()) == len(job.input.shards) - 1
    taken.leave()
    assert work(source, job)[1].rows == 5 and job.finish() is not None
    assert files(str(tmp_path / "out")) == undisturbed(prompts, tmp_path)


def test_what_killed_processes_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    store = LocalStore(tmp_path)
    kept, own = ["download.partial", "part-000000.jsonl", "part-000002.jsonl.partial"], re.compile(r"part-\d+\.jsonl")
    for name in (*kept[:2], "part-000001.jsonl.partial", "part-000003.jsonl.partial"):
        (tmp_path / name).write_text("x")
    (tmp_path / kept[2]).mkdir()  # cannot be removed so
    writing = lock_file(tmp_path / "part-000003.jsonl.partial")
    store.remove_leftovers("", own)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "part-000003.jsonl.partial"]
    os.close(writing)
    store.remove_leftovers("", own)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_job_leaves_what_it_has_not_written_where_it_is(prompts, tmp_path, format):
    output = tmp_path / "out"
    source, job = begin(prompts, str(output), format=format)
    (output / "model.partial").mkdir()
    strangers, left = ("download.partial", "part-1.partial", "notes.jsonl.partial"), []
    for name in strangers:
        (output / name).write_text("mine")
    for name in (
        "part-000001.jsonl",
        "part-000001-0123456789abcdef.parquet",
        JOB,
        MANIFEST,
        f"{COMMITS}/part-000001.json",
    ):
        left.append(output / f"{name}.partial")
        left[-1].parent.mkdir(exist_ok=True)
        left[-1].write_text("half")
    assert work(source, job)[0] and job.finish() is not None
    assert [(output / name).read_text() for name in strangers] == ["mine"] * 3 and (output / "model.partial").is_dir()
    assert not any(path.exists() for path in left)


def test_a_file_without_a_record_is_not_believed(prompts, tmp_path):
    output = tmp_path / "out"
    source, job = begin(prompts, str(output))
    (output / "part-000002.jsonl").write_text("another's\n")
    assert work(source, job)[0] and job.finish() is not None
    assert files(str(output)) == undisturbed(prompts, tmp_path)


def test_a_record_whose_file_has_another_size_is_reported(prompts, tmp_path):
    output = tmp_path / "out"
    source, job = begin(prompts, str(output))
    work(source, job)
    with open(output / "part-000001.jsonl", "a") as file:
        file.write("more\n")
    with pytest.raises(ValueError, match="part-000001.jsonl has .* bytes, and it has .*; remove _commits/part-000001"):
        job.finish()
    (output / "_commits" / "part-000001.json").unlink()
    assert work(source, job)[1].rows == 5 and job.finish() is not None
    assert files(str(output)) == undisturbed(prompts, tmp_path)


def test_two_processes_without_claims_leave_one_whole_file_of_a_shard(prompts, tmp_path):
    """In an object store, in the default mode: both compute the shard, the second finds the record of the first."""
    output = f"memory://{tmp_path.name}-twice"
    source, job = begin(prompts, output, numerics="default")
    first, second = next(job.claim(job.input.shards)), next(job.claim(job.input.shards))
    for shard, text in ((first, "one"), (second, "other")):
        for i in range(5):
            row = {"id": str(i), "index": 0, "prompt_token_ids": [1], "token_ids": [2], "text": text}
            shard.finish(i, [row])
        shard.commit()
    assert [row["text"] for row in rows_of(output)] == ["one"] * 5
    (record,) = job.records([0])
    assert record["bytes"] == job.store.size(record["file"])


def test_a_changed_input_stops_the_job_without_committing_what_it_held(prompts, tmp_path):
    source, job = begin(prompts, str(tmp_path / "out"))
    prompts.write_text(prompts.read_text().replace("p8", "q8"))
    with pytest.raises(ValueError, match="in.jsonl has changed since the job began"):
        work(source, job)
    assert 1 not in job.committed()


def test_a_job_that_began_otherwise_is_refused_by_what_differs():
    def spec(**changes):
        config = {
            "engine": {"numerics": "default", "max_pages": None},
            "batch": {"format": "jsonl"},
            "model": {"path": "a"},
        }
        facts = {"model": {"weights_sha256": "1"}, "device": {"kind": "cpu"}}
        made = make_job_spec(config, facts, {"max_pages": 64}, inputs)
        for key, value in changes.items():
            *path, last = key.split("__")
            inner = made
            for name in path:
                inner = inner[name]
            inner[last] = value
        return made

    from levanter_infer.batch.input import InputShards

    inputs = InputShards((), ())
    check_same(spec(), spec())
    check_same(spec(), spec(config__model__path="elsewhere", config__engine__max_pages=64))
    check_same(spec(guarantee__promise="in the words of an earlier version"), spec())
    check_same(spec(), spec(device__kind="other"))  # not promised in the default mode
    differing = spec(model__weights_sha256="2", config__engine__max_pages=65)
    with pytest.raises(
        ValueError, match="engine.max_pages is 65 and was None; model.weights_sha256 is '2' and was '1'"
    ):
        check_same(spec(), differing)
    exact = {"guarantee__numerics": "batch_invariant"}
    with pytest.raises(ValueError, match="device.kind is 'other' and was 'cpu'"):
        check_same(spec(**exact), spec(**exact, device__kind="other"))


def test_a_directory_of_something_else_is_not_taken_for_a_job(tmp_path):
    for content in ("{", '{"a": 1}', '{"format": 1, "input": {}}', '{"format": 99}'):
        (tmp_path / JOB).write_text(content)
        with pytest.raises(ValueError, match="give another output"):
            read_job_spec(LocalStore(tmp_path))
