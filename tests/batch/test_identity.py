"""Whose results an output holds: nothing of another job or input, or altered since, is taken for this job's."""

import collections
import hashlib
import json
import os
import shutil

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from levanter_infer.batch.input import Input
from levanter_infer.batch.job import COMMITS, JOB, JOURNALS, MANIFEST, Job, dumps, read_job_spec
from levanter_infer.batch.store import LocalStore, ObjectStore, open_store
from tests.batch.fake_engine import FakeEngine
from tests.batch.test_drive import ROWS, begin, files, output, prompts, undisturbed, work  # noqa: F401


def half(prompts, output, **options):  # noqa: F811
    """A job that was stopped with shards finished and rows in journals."""
    source, job = begin(prompts, output, **options)
    engine = FakeEngine()
    assert not work(source, job, rounds=4, engine=engine)[0]
    there = files(output)
    assert any(COMMITS in name for name in there) and any(JOURNALS in name for name in there)
    return source, job


def remove(output, name):  # noqa: F811
    open_store(output).remove(name)


def test_every_record_and_journal_names_its_job(prompts, output):  # noqa: F811
    half(prompts, output)
    there = files(output)
    sha256 = hashlib.sha256(there[f"/{JOB}"]).hexdigest()
    for name, data in there.items():
        if COMMITS in name:
            assert json.loads(data)["job"] == sha256
        if JOURNALS in name:
            assert data.splitlines()[0].endswith(b" job " + sha256.encode())


@pytest.mark.parametrize("left", [COMMITS, JOURNALS, MANIFEST])
def test_results_without_job_json_are_no_beginning_of_another_job(prompts, output, left):  # noqa: F811
    source, job = half(prompts, output)
    if left == MANIFEST:
        assert work(source, job)[0] and job.finish() is not None
    store = open_store(output)
    store.remove(JOB)
    for folder in {COMMITS, JOURNALS} - {left}:
        store.remove_leftovers(folder)
    with pytest.raises(ValueError, match=f"the output holds .*{left} of a job, and no job.json.*put job.json back"):
        read_job_spec(store)


def test_records_of_another_job_are_not_taken_over(prompts, output, tmp_path):  # noqa: F811
    """job.json is lost and written anew, by a job of other settings, while records are there."""
    half(prompts, output)
    there = files(output)
    remove(output, JOB)
    store = open_store(output)
    for name in there:
        if name.startswith((f"/{COMMITS}", f"/{JOURNALS}")):
            remove(output, name.removeprefix("/"))
    source, job = begin(prompts, output, numerics="default")
    for name, data in there.items():
        if COMMITS in name:
            store.put(name.removeprefix("/"), data)
    with pytest.raises(ValueError, match="_commits/part-00000.* of the output belongs to another job than job.json"):
        job.records(job.committed())
    assert work(source, job)[0]
    with pytest.raises(ValueError, match="belongs to another job than job.json; put back the job.json"):
        job.finish()
    assert f"/{MANIFEST}" not in files(output)


def test_a_journal_of_another_job_is_not_taken_over(prompts, output):  # noqa: F811
    half(prompts, output)
    there = files(output)
    for name in there:
        remove(output, name.removeprefix("/"))
    source, job = begin(prompts, output, numerics="default")
    (name,) = sorted(name for name in there if JOURNALS in name)[:1]
    open_store(output).put(name.removeprefix("/"), there[name])
    with pytest.raises(ValueError, match=f"{name[1:]} of the output belongs to another job than job.json"):
        work(source, job)
    remove(output, name.removeprefix("/"))
    assert work(source, job)[0] and job.finish() is not None  # and nothing is locked


class Held(FakeEngine):
    """Calls something in the middle of its work, as if the process had been stopped there."""

    def __init__(self, after: int, meanwhile):
        super().__init__()
        self.after, self.meanwhile = after, meanwhile

    def step_round(self):
        super().step_round()
        if self.rounds == self.after:
            self.meanwhile()


@pytest.mark.parametrize("another", ["none", "other settings", "begun"])
def test_a_process_whose_output_was_replaced_writes_nothing_more(prompts, output, tmp_path, another):  # noqa: F811
    """A running process; its output is deleted, and another job begins there."""
    source, job = begin(prompts, output)
    after: dict[str, bytes] = {}

    def replace():
        for name in files(output):
            remove(output, name.removeprefix("/"))
        if another != "none":
            new = begin(prompts, output, numerics="default")
            if another == "begun":
                assert not work(*new, rounds=3)[0]
        after.update(files(output))

    with pytest.raises(ValueError, match="job.json of the output is .*so nothing more of this job is written there"):
        work(source, job, engine=Held(4, replace))
    assert files(output) == after
    if another != "none":
        new = begin(prompts, output, numerics="default")
        assert work(*new)[0] and new[1].finish() is not None


def test_a_stopped_process_whose_output_was_removed_does_not_say_that_all_is_safe(prompts, output):  # noqa: F811
    source, job = begin(prompts, output, size=100)
    engine = Held(3, lambda: [remove(output, name.removeprefix("/")) for name in files(output)])
    assert not work(source, job, rounds=3, engine=engine)[0]
    assert files(output) == {}
    with pytest.raises(ValueError, match="job.json of the output is gone"):
        job.check_current()


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_finished_part_that_was_altered_at_the_same_size_is_named(prompts, output, tmp_path, format):  # noqa: F811
    source, job = half(prompts, output, format=format)
    store, name = open_store(output), f"part-000000.{format}"
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    store.put(name, bytes(data))
    expected = f"{name} of the output has changed .*put it back, or remove _commits/part-000000.json to compute"
    with pytest.raises(ValueError, match=expected):
        job.records(job.committed())  # as a resumed job does
    assert work(source, job)[0]
    with pytest.raises(ValueError, match=expected):
        job.finish()
    assert f"/{MANIFEST}" not in files(output)
    remove(output, f"{COMMITS}/part-000000.json")
    assert work(source, job)[1].rows == 5 and job.finish() is not None
    assert files(output) == undisturbed(prompts, tmp_path, format=format)


def test_all_that_is_damaged_is_counted(prompts, tmp_path):  # noqa: F811
    out = str(tmp_path / "out")
    source, job = begin(prompts, out)
    work(source, job)
    for path in (tmp_path / "out").glob("part-*"):
        path.write_bytes(path.read_bytes()[:-2] + b"x\n")
    with pytest.raises(ValueError, match="part-000000.*part-000001.*part-000002.*; and 2 more$"):
        job.finish()


@pytest.mark.parametrize("change", ["appended", "appended to the last line", "fewer", "another compressed member"])
def test_an_input_that_has_changed_its_size_is_named(tmp_path, change):
    import gzip

    packed = change == "another compressed member"
    path = tmp_path / ("in.jsonl.gz" if packed else "in.jsonl")
    text = "".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(ROWS))
    if change == "appended to the last line":
        text = text.rstrip("\n")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())

    def source():
        return Input(str(path), as_chat=False, model_names=())

    inputs = source().split(5)
    source().check_unchanged(inputs)
    os.utime(path, (1, 1))
    source().check_unchanged(inputs)  # a copy
    with open(path, "ab") as file:
        more = b'{"prompt": "new"}\n'
        if change == "fewer":
            file.truncate(20)
        else:
            file.write(gzip.compress(more) if packed else more)
    with pytest.raises(ValueError, match=f"{path.name} has .* bytes and had .* with 23 rows when the job began; rows"):
        source().check_unchanged(inputs)


def test_an_input_that_grows_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n' * 3)
    source = Input(str(path), as_chat=False, model_names=())
    scan = source._scan_lines

    def growing(*arguments):
        found = scan(*arguments)
        with open(path, "a") as file:
            file.write('{"prompt": "b"}\n')
        return found

    monkeypatch.setattr(source, "_scan_lines", growing)
    with pytest.raises(ValueError, match="in.jsonl had 48 bytes and has 64"):
        source.split(2)


# What is damaged


BROKEN = [b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b"[" * 100_000, b'{"file": 3}']


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_record_is_named_with_what_to_do(prompts, tmp_path, content):  # noqa: F811
    out = str(tmp_path / "out")
    source, job = begin(prompts, out)
    work(source, job)
    (tmp_path / "out" / COMMITS / "part-000003.json").write_bytes(content)
    with pytest.raises(ValueError, match="^_commits/part-000003.json of the output is no record.*remove _commits/part"):
        job.finish()


@pytest.mark.parametrize(
    ("key", "value"),
    [("file", "../secret"), ("file", "part-000001.jsonl"), ("bytes", "7"), ("rows", None), ("rows", 1.5), ("shard", 9)],
)
def test_a_record_of_wrong_values_is_named(prompts, tmp_path, key, value):  # noqa: F811
    out = str(tmp_path / "out")
    source, job = begin(prompts, out)
    work(source, job)
    path = tmp_path / "out" / COMMITS / "part-000003.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), key: value}))
    with pytest.raises(ValueError, match="^_commits/part-000003.json of the output is no record"):
        job.finish()


def _damage(spec, *path_and_value):
    *path, last, value = path_and_value
    inner = spec
    for key in path:
        inner = inner[key]
    inner[last] = value
    return json.dumps(spec).encode()


def test_a_broken_job_json_is_named_with_what_to_do(prompts, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    begin(prompts, str(out))
    good = (out / JOB).read_bytes()
    shards = json.loads(good)["input"]["shards"]
    broken = [
        *BROKEN,
        _damage(json.loads(good), "config", None),
        _damage(json.loads(good), "config", "batch", "format", "csv"),
        _damage(json.loads(good), "guarantee", "numerics", []),
        _damage(json.loads(good), "sizes", 3),
        _damage(json.loads(good), "input", "files", [{}]),
        _damage(json.loads(good), "input", "shards", shards[1:]),
        _damage(json.loads(good), "input", "shards", shards[:-1]),
        _damage(json.loads(good), "input", "shards", 0, shards[0][:-1]),
        _damage(json.loads(good), "input", "shards", 0, 1, 7),
        _damage(json.loads(good), "input", "shards", 0, 4, "x"),
    ]
    for content in broken:
        (out / JOB).write_bytes(content)
        with pytest.raises(ValueError, match="^job.json of the output .*give another output"):
            read_job_spec(LocalStore(out))
    (out / JOB).write_bytes(good)
    assert read_job_spec(LocalStore(out)) is not None


def test_a_job_of_an_older_format_is_refused_by_the_version_that_wrote_it(tmp_path):
    (tmp_path / JOB).write_text('{"format": 1, "versions": {"levanter_infer": "0.1.0+abc"}}')
    with pytest.raises(ValueError, match="has format 1, written by levanter_infer 0.1.0.abc; expected format 3"):
        read_job_spec(LocalStore(tmp_path))


def test_a_journal_of_lines_that_are_no_rows_is_named(prompts, tmp_path):  # noqa: F811
    import zlib

    out = tmp_path / "out"
    source, job = half(prompts, str(out))
    path = sorted((out / JOURNALS).iterdir())[0]
    header = path.read_bytes().splitlines(keepends=True)[0]
    for body in (
        b"",
        b"x []",
        b"99 []",
        b"-1 []",
        b"0 []",
        b"0 [{}]",
        b"0 {",
        b"0 7",
        b"0 [1]",
        b"0 " + b"[" * 100_000,
    ):
        path.write_bytes(header + b"%08x %s\n" % (zlib.crc32(body), body))
        with pytest.raises(ValueError, match=f"^_journal/{path.name} of the output holds a line.*remove _journal/"):
            work(source, job)
    for torn in (b"", header[:20], b"garbage\n", header + b"garbage\n"):
        path.write_bytes(torn)
        work(source, Job(job.store, job.spec), rounds=0)
    assert work(source, job)[0] and job.finish() is not None
    assert files(str(out)) == undisturbed(prompts, tmp_path)


def test_a_second_record_of_other_rows_is_an_error(prompts, tmp_path):  # noqa: F811
    """Where locks do not keep processes apart although they should, as on some network file systems."""
    source, job = begin(prompts, str(tmp_path / "out"))
    first = next(job.claim(job.input.shards))
    shutil.rmtree(tmp_path / "out" / JOURNALS)
    second = next(job.claim(job.input.shards))
    for shard, text in ((first, "one"), (second, "other")):
        for i in range(5):
            shard.finish(i, [{"id": str(i), "index": 0, "prompt_token_ids": [1], "token_ids": [2], "text": text}])
    first.commit()
    with pytest.raises(ValueError, match="_commits/part-000000.json of the output was written by another process"):
        second.commit()


# What is durable


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_anything_else(tmp_path, monkeypatch):
    """The order of fsync and rename, as the system sees it: else a power cut leaves an empty file under a record."""
    events, fsync, replace = [], os.fsync, os.replace

    def seen_fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(("fsync", os.path.basename(path), 0 if os.path.isdir(path) else os.fstat(descriptor).st_size))
        fsync(descriptor)

    def seen_replace(old, new):
        events.append(("replace", os.path.basename(old), os.path.basename(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    store = LocalStore(tmp_path)
    for write in (store.put, store.create):
        events.clear()
        name = write.__name__
        write(f"{COMMITS}/{name}", b"12345")
        assert events == [
            ("fsync", f"{name}.partial", 5),  # all of it
            ("replace", f"{name}.partial", name),
            ("fsync", COMMITS, 0),
        ]


def test_a_shard_is_on_the_disk_before_its_record_and_a_journal_when_it_is_left(prompts, tmp_path, monkeypatch):  # noqa: F811
    events = []
    source, job = begin(prompts, str(tmp_path / "out"))
    put, create, fsync = LocalStore.put, LocalStore.create, os.fsync
    monkeypatch.setattr(LocalStore, "put", lambda *a: (put(*a), events.append(a[1])))
    monkeypatch.setattr(LocalStore, "create", lambda *a: (create(*a), events.append(a[1]))[0])
    assert not work(source, job, rounds=4)[0]
    parts = [name for name in events if name.startswith("part-")]
    assert parts and events == [n for part in parts for n in (part, f"{COMMITS}/{part.removesuffix('.jsonl')}.json")]

    shard = next(job.claim(job.input.shards[::-1]))
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: (fsync(descriptor), synced.append(descriptor)))
    shard.leave()
    assert len(synced) == 1


# How often job.json is looked at


class Tagged(MemoryFileSystem):
    """Objects in memory with the entity tags that object stores give theirs, under the name that s3fs has for them."""

    cachable = False

    def info(self, path, **kwargs):
        found = super().info(path, **kwargs)
        return found | ({"ETag": hashlib.md5(self.cat_file(path)).hexdigest()} if found["type"] == "file" else {})


def store_of(kind, tmp_path):
    if kind == "disk":
        return LocalStore(tmp_path / "out")
    return ObjectStore(Tagged() if kind == "tagged objects" else MemoryFileSystem(), f"/{tmp_path.name}/out")


@pytest.mark.parametrize(("kind", "reads", "looks"), [("disk", 0, 4), ("tagged objects", 0, 3), ("objects", 3, 3)])
def test_job_json_which_grows_with_the_job_is_not_read_for_each_shard(
    prompts,  # noqa: F811
    tmp_path,
    monkeypatch,
    kind,
    reads,
    looks,
):
    source, job = begin(prompts, str(tmp_path / "begun"), size=2)
    store, calls = store_of(kind, tmp_path), collections.Counter()
    store.create(JOB, dumps(job.spec))
    job = Job(store, job.spec)
    for name in ("read", "version"):
        method = getattr(store, name)
        monkeypatch.setattr(
            store, name, lambda file, name=name, method=method: (calls.update([(name, file)]), method(file))[1]
        )
    assert work(source, job)[0]
    shards = len(job.committed())
    assert shards == len(job.input.shards) == 12
    first = 1 if reads == 0 else 0
    assert calls["read", JOB] == reads * shards + first and calls["version", JOB] == looks * shards


@pytest.mark.parametrize("kind", ["disk", "tagged objects"])
def test_job_json_that_was_written_again_is_read_again(prompts, tmp_path, kind):  # noqa: F811
    _, job = begin(prompts, str(tmp_path / "begun"))
    store, content = store_of(kind, tmp_path), dumps(job.spec)
    store.create(JOB, content)
    job = Job(store, job.spec)
    job.check_current()
    store.put(JOB, content)
    job.check_current()  # the same content is the same job
    store.put(JOB, content[:-2] + b" \n")  # as long as before
    for _ in range(2):
        with pytest.raises(ValueError, match="job.json of the output is another one than this job began with"):
            job.check_current()
    store.put(JOB, content)
    job.check_current()
    store.remove(JOB)
    with pytest.raises(ValueError, match="job.json of the output is gone"):
        job.check_current()
