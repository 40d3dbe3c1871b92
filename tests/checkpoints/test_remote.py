"""Checkpoints at URLs: read by ranges into the arrays, a bounded number at a time, equal to those of a directory."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid

import fsspec
import jax
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from jax.sharding import Mesh

from levanter_infer.checkpoints import remote, weights
from levanter_infer.checkpoints.load import load_model, open_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.checkpoints.tokenizer import Tokenizer
from levanter_infer.config import load_config
from levanter_infer.engine.params import SamplingParams
from levanter_infer.fingerprint import model_fingerprint, tokenizer_fingerprint
from levanter_infer.layers.layout import Layout
from tests.tiny_models import tiny_model
from tests.tokenizer_files import CHATML, byte_level, write

SHARDS = ("model-1.safetensors", "model-2.safetensors")


class CountingFileSystem(LocalFileSystem):
    """Files of this machine, read by ranges only; knows what is under way."""

    protocol = "counted"
    cachable = False
    reads: list[tuple[str, int, int]] = []
    under_way: dict[int, int] = {}
    most_requests = most_bytes = 0
    checksum: str | None = None
    _guard = threading.Lock()

    @classmethod
    def reset(cls):
        cls.reads, cls.under_way, cls.most_requests, cls.most_bytes, cls.checksum = [], {}, 0, 0, None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("counted://"))

    def info(self, path, **kwargs):
        checksum = {"ETag": self.checksum} if self.checksum else {}
        return {**super().info(path, **kwargs), **checksum}

    def cat_file(self, path, start=None, end=None, **kwargs):
        assert start is not None and end is not None and end > start, "a whole file was asked for"
        cls, me = type(self), threading.get_ident()
        with self._guard:
            cls.reads.append((path.rsplit("/", 1)[-1], start, end))
            cls.under_way[me] = end - start
            cls.most_requests = max(cls.most_requests, len(cls.under_way))
            cls.most_bytes = max(cls.most_bytes, sum(cls.under_way.values()))
        time.sleep(0.001)
        with LocalFileSystem().open(path, "rb") as file:
            file.seek(start)
            data = file.read(end - start)
        with self._guard:
            del cls.under_way[me]
        return data

    def refuse(self, *_, **__):
        raise AssertionError("the file is copied or opened whole")

    open = _open = get = get_file = cat = cp_file = refuse  # type: ignore[assignment]


fsspec.register_implementation("counted", CountingFileSystem, clobber=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint in two shards, with tokenizer and generation_config.json."""
    path = tmp_path_factory.mktemp("model")
    save_model(tiny_model(), path)
    split(path)
    files = {"tokenizer_config": {"chat_template": CHATML}, "generation_config": {"temperature": 0.5}}
    return write(path, byte_level(), **files)


def split(path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[::2], names[1::2]), strict=True))
    for shard, held in parts.items():
        save_file({name: tensors[name] for name in held}, path / shard)
    index = {"weight_map": {name: shard for shard, held in parts.items() for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").unlink()


@pytest.fixture
def counted(directory):
    CountingFileSystem.reset()
    return f"counted://{directory}"


@pytest.fixture
def in_memory(directory):
    fs = fsspec.filesystem("memory")
    root = f"/{uuid.uuid4().hex}/model"
    fs.put(f"{directory}/", f"{root}/", recursive=True)
    yield f"memory:/{root}"
    fs.rm(root, recursive=True)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype and (np.asarray(one) == np.asarray(other)).all()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_model_at_a_url_is_that_of_its_directory(directory, counted, in_memory, dtype):
    expected, tokenizer = load_model(directory, dtype=dtype)
    for url in (counted, in_memory, f"file://{directory}"):
        found, other = load_model(url, dtype=dtype)
        assert_equal(found, expected)
        assert tokenizer is not None and other is not None and other.fingerprint == tokenizer.fingerprint
        assert other.apply_chat_template([{"role": "user", "content": "x"}]).startswith("<|im_start|>")


def test_each_byte_of_the_weights_is_read_once_and_few_at_a_time(directory, counted, monkeypatch):
    monkeypatch.setattr(remote, "CHUNK", 1000)
    monkeypatch.setattr(remote, "IN_FLIGHT", 3)
    monkeypatch.setattr(weights, "_HEADER_GUESS", 64)
    stored = open_model(resolve_source(counted))
    CountingFileSystem.reset()
    found = stored.read()
    assert_equal(found, load_model(directory)[0])
    reads = [each for each in CountingFileSystem.reads if each[0] in SHARDS]
    assert max(end - begin for _, begin, end in reads) == 1000
    assert 1 < CountingFileSystem.most_requests <= 3 and CountingFileSystem.most_bytes <= 3000
    for shard in SHARDS:
        spans = sorted((begin, end) for name, begin, end in reads if name == shard)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
        header = 8 + int.from_bytes((directory / shard).read_bytes()[:8], "little")
        assert sum(end - begin for begin, end in spans) == (directory / shard).stat().st_size - header


def test_weights_go_straight_into_the_parts_of_a_mesh(directory, counted):
    stored = open_model(resolve_source(counted))
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    layout = Layout.of(mesh, stored.types.config)
    assert_equal(stored.read(layout), layout.fit_model(load_model(directory)[0]))


def test_headers_are_checked_before_a_tensor_is_read(directory, counted):
    open_model(resolve_source(counted))
    per_shard = [sum(name == shard for name, _, _ in CountingFileSystem.reads) for shard in SHARDS]
    assert per_shard == [1, 1]


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize(
    "header, data",
    [
        ({"a": entry()}, 8),
        ({"a": entry(), "__metadata__": {"x": "y"}}, 8),
        ({"a": entry(), "b": entry(offsets=(8, 16))}, 16),
        ({"a": entry(shape=(0,), offsets=(0, 0)), "b": entry()}, 8),
        ({"a": entry()}, 7),
        ({"a": entry()}, 9),
        ({"a": entry(offsets=(0, 4))}, 4),
        ({"a": entry(offsets=(4, 12))}, 12),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, 12),
        ({"a": entry(), "b": entry()}, 8),
        ({"a": entry(shape=(-2,))}, 8),
        ({"a": entry(shape=(2**64, 0), offsets=(0, 0))}, 0),
        ({"a": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}, 0),
        ({"a": entry(shape=(0, 2**40, 2**40), offsets=(0, 0))}, 0),
        ({"a": entry(shape=(10**4000,) * 500, offsets=(0, 8))}, 8),
        ({"a": entry(offsets=(8, 0))}, 8),
        ({"a": entry(offsets=(0, 8, 9))}, 8),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        ({"a": 3}, 8),
        ({"a": entry(shape=(True, 2))}, 8),
        ([], 0),
        (b"{", 0),
        (b"", 0),
        (b'{"a":1,"a":1}', 0),
        (b"[" * 100_000, 0),
    ],
)
def test_remote_headers_are_judged_as_the_library_judges_files(tmp_path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    judge_both(path)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", (2**40).to_bytes(8, "little"), (100).to_bytes(8, "little") + b"{}"]
)
def test_what_is_no_safetensors_file_is_refused_remotely_too(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    judge_both(path)


def judge_both(path):
    opened = remote.open_directory(f"counted://{path.parent}")
    assert isinstance(opened, remote.RemoteDirectory)
    file = opened.file(path.name)
    assert file is not None

    def outcome(where):
        try:
            return {name: (t.dtype, t.shape, t.offset, t.num_bytes) for name, t in weights.read_header(where).items()}
        except ValueError as e:
            assert "is not a whole safetensors file" in str(e) or "is not valid JSON" in str(e)
            return "refused"

    assert outcome(file) == outcome(path)


def test_errors_name_the_file_at_the_url(directory, counted, tmp_path):
    copied = tmp_path / "model"
    shutil.copytree(directory, copied)
    url = f"counted://{copied}"
    (copied / SHARDS[1]).write_bytes((copied / SHARDS[1]).read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{url}/{SHARDS[1]} .* is not a whole safetensors file"):
        load_model(url)
    (copied / SHARDS[1]).unlink()
    with pytest.raises(ValueError, match=f"no file {SHARDS[1]} there"):
        load_model(url)
    (copied / "model.safetensors.index.json").unlink()
    (copied / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="found pytorch_model.bin but no model.safetensors"):
        load_model(url)
    (copied / "config.json").unlink()
    with pytest.raises(ValueError, match="no file config.json there"):
        load_model(url)
    with pytest.raises(ValueError, match="revision='v1' with the URL"):
        load_model(counted, revision="v1")


def test_a_file_that_shrinks_or_fails_while_it_is_read_is_an_error(counted, monkeypatch):
    stored = open_model(resolve_source(counted))
    monkeypatch.setattr(CountingFileSystem, "cat_file", lambda self, path, start, end: bytes(end - start - 1))
    with pytest.raises(ValueError, match="bytes came from byte .* on; the file may be truncated"):
        stored.read()

    def fail(*_, **__):
        raise PermissionError("access denied for this account")

    monkeypatch.setattr(CountingFileSystem, "cat_file", fail)
    with pytest.raises(ValueError, match="cannot read counted://.*PermissionError: access denied.*credentials"):
        stored.read()


@pytest.mark.parametrize(
    "url, match",
    [
        ("zz://bucket/model", "expected a URL that fsspec knows"),
        ("memory://nothing/here", "no file config.json there"),
        ("file:///nothing/here", "is no directory; give the directory that holds config.json"),
    ],
)
def test_a_url_that_holds_no_model_is_named(url, match):
    with pytest.raises(ValueError, match=match):
        load_model(url)


def test_a_missing_package_is_named():
    """In a process where neither can be imported, whatever is installed here."""
    program = (
        "import sys\n"
        "sys.modules['s3fs'] = sys.modules['gcsfs'] = None\n"
        "from levanter_infer.checkpoints.source import resolve_source\n"
        "for url in ('s3://bucket/model', 'gs://bucket/model'):\n"
        "    try: resolve_source(url)\n"
        "    except ValueError as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    s3, gs = done.stdout.splitlines()
    assert "s3://bucket/model" in s3 and s3.endswith("install the package s3fs")
    assert "gs://bucket/model" in gs and gs.endswith("install the package gcsfs")


def test_names_that_can_only_be_paths_never_go_to_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    def asked(*_, **__):
        raise OSError("asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
    monkeypatch.chdir(tmp_path)
    for name in ("./models/typo", "../typo", "/models/typo", "models/typo/", tmp_path / "typo", "~/no/such"):
        with pytest.raises(ValueError, match="no (such )?directory") as e:
            resolve_source(name)
        assert "asked" not in str(e.value)
    with pytest.raises(ValueError) as e:
        resolve_source("models/typo")
    assert f"there is no directory {tmp_path}/models/typo, and as a hub id it was not found" in str(e.value)


def test_identity_is_the_content_or_a_checksum_that_the_filesystem_keeps(directory, counted, in_memory):
    expected = {key: value for key, value in model_fingerprint(resolve_source(directory)).items() if key != "name"}
    for url in (counted, in_memory):
        facts = model_fingerprint(resolve_source(url))
        assert facts.pop("name") == url and facts == expected
    CountingFileSystem.reset()
    CountingFileSystem.checksum = "abc"
    first = model_fingerprint(resolve_source(counted))
    assert "weights_sha256" not in first and first["config_sha256"] == expected["config_sha256"]
    assert not [name for name, _, _ in CountingFileSystem.reads if name in SHARDS]
    assert model_fingerprint(resolve_source(counted)) == first
    CountingFileSystem.checksum = "abd"
    assert model_fingerprint(resolve_source(counted))["weights_checksums"] != first["weights_checksums"]
    assert tokenizer_fingerprint(counted)["sha256"] == Tokenizer.from_directory(directory).fingerprint


def test_configurations_and_library_take_urls(counted, tmp_path):
    (tmp_path / "run.yaml").write_text(f"model: {counted}\nprompts: x\nsampling: from_model\n")
    assert load_config(tmp_path / "run.yaml").sampling == SamplingParams(temperature=0.5)
    assert SamplingParams.from_model(counted).temperature == 0.5
