"""Checkpoints that Levanter's trainer wrote give the model of the HF checkpoint with their weights.

tests/compat/levanter_models.py does the same in an environment with Levanter, for all families."""

import builtins
import json
import shutil
import zipfile

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from levanter_infer.checkpoints.levanter import kvstore_spec
from levanter_infer.checkpoints.load import load_model, open_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.layers.layout import Layout
from tests.golden_cases import GOLDEN_DIR, LEVANTER_CHECKPOINTS, make_weights, tensor_shapes

NAMES = list(LEVANTER_CHECKPOINTS)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    directory = tmp_path_factory.mktemp("levanter")
    with zipfile.ZipFile(GOLDEN_DIR / "levanter_checkpoints.zip") as archive:
        archive.extractall(directory)
    return directory


@pytest.fixture
def step(stored, tmp_path):
    """`step(name)`: a copy of a checkpoint, with its config.json."""

    def copy(name: str):
        shutil.copytree(stored / name, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(LEVANTER_CHECKPOINTS[name]))
        return tmp_path / name

    return copy


def from_hf(name: str, directory):
    config = LEVANTER_CHECKPOINTS[name]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(make_weights(name, config, tensor_shapes(config)), directory / "model.safetensors")
    return open_model(resolve_source(directory))


def assert_same(model, expected):
    assert jax.tree.structure(model) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype and np.array_equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_the_arrays_of_a_trainer_are_the_tensors_of_a_checkpoint(name, step, tmp_path):
    model, tokenizer = load_model(step(name))
    assert_same(model, from_hf(name, tmp_path / "hf").read())
    assert tokenizer is None


@pytest.mark.parametrize("name", NAMES)
def test_each_device_of_a_mesh_gets_its_part(name, step, tmp_path):
    stored = open_model(resolve_source(step(name)))
    if jax.device_count() < 2:
        pytest.skip("one device")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    layout = Layout.of(mesh, stored.types.config)
    assert_same(stored.read(layout), from_hf(name, tmp_path / "hf").read(layout))


def test_the_configuration_can_be_given_and_the_dtype_chosen(stored):
    name = "qwen3_moe"
    with pytest.raises(ValueError, match="has no config.json: put that of the model beside it .* or give .* config="):
        load_model(stored / name)
    model, _ = load_model(stored / name, config=LEVANTER_CHECKPOINTS[name], dtype="bfloat16")
    assert model.dtype == jax.numpy.bfloat16


CHANGES = {
    "num_hidden_layers": (4, r"shape \[3, 2, 2, 4, 16\], config.json expects \[4, 2, 2, 4, 16\]"),
    "intermediate_size": (25, r"shape \[3, 24, 16\], config.json expects \[3, 25, 16\]"),
    "vocab_size": (41, r"shape \[40, 16\], config.json expects \[41, 16\]"),
    "tie_word_embeddings": (False, "lacks 'model/lm_head/weight'"),
    "model_type": ("olmo2", "model_type='olmo2', expected one of llama, .* for a checkpoint of Levanter's trainer"),
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_configuration_of_another_model_is_refused(key, stored):
    value, message = CHANGES[key]
    with pytest.raises(ValueError, match=message):
        load_model(stored / NAMES[0], config={**LEVANTER_CHECKPOINTS[NAMES[0]], key: value})


def test_arrays_that_the_model_has_no_use_for_are_refused(stored):
    config = {**LEVANTER_CHECKPOINTS["qwen3_moe"], "model_type": "llama", "tie_word_embeddings": True}
    config = {key: value for key, value in config.items() if "expert" not in key and key not in ("norm_topk_prob",)}
    config.pop("moe_intermediate_size")
    with pytest.raises(ValueError, match="has 'model/lm_head/weight', .* which config.json has no use for"):
        load_model(stored / "qwen3_moe", config=config)


def test_a_damaged_checkpoint_is_named(step):
    directory = step(NAMES[0])
    files = [path for path in (directory / "d").rglob("*") if path.is_file()]
    for path in files:
        path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match=f"{NAMES[0]}.*copy"):
        load_model(directory)


def test_without_the_library_the_error_names_it(step, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tensorstore":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ValueError, match=r"needs the library tensorstore: in a checkout pip install '.\[tensorstore\]'"
    ):
        load_model(step(NAMES[0]))


@pytest.mark.parametrize("name", NAMES)
def test_directories_of_zarr_arrays_are_read(name, step, tmp_path):
    """The form that Levanter wrote before it took OCDBT: one zarr array in a directory of its own per parameter."""
    import tensorstore

    directory, older = step(name), tmp_path / "older"
    older.mkdir()
    for file in ("config.json", "metadata.json"):
        shutil.copy(directory / file, older / file)
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}}
    keys = tensorstore.KvStore.open(base).result().list().result()
    for path in (key.decode().removesuffix("zarr.json") for key in keys if key.endswith(b"zarr.json")):
        array = tensorstore.open({"driver": "zarr3", "kvstore": {**base, "path": path}}).result()
        kvstore = {"driver": "file", "path": f"{older}/{path}"}
        spec = {"driver": "zarr", "kvstore": kvstore, "metadata": {"compressor": {"id": "gzip"}}}
        copy = tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result()
        copy.write(array.read().result()).result()
    assert_same(load_model(older)[0], from_hf(name, tmp_path / "hf").read())


def test_urls_become_stores_of_tensorstore():
    assert kvstore_spec("gs://bucket/run/step-7/") == {"driver": "gcs", "bucket": "bucket", "path": "run/step-7/"}
    assert kvstore_spec("s3://bucket/run") == {"driver": "s3", "bucket": "bucket", "path": "run/"}
    assert kvstore_spec("file:///run/step-7") == {"driver": "file", "path": "/run/step-7/"}
    with pytest.raises(ValueError, match="hf://a/b: expected a directory, or a URL of gs:// or s3://"):
        kvstore_spec("hf://a/b")


def test_an_adapter_is_merged_into_the_arrays_of_a_trainer(step, tmp_path):
    name = NAMES[0]
    directory, plain = step(name), from_hf(name, tmp_path / "hf")
    adapter, module = tmp_path / "adapter", "model.layers.1.mlp.up_proj"
    rows, columns = tensor_shapes(LEVANTER_CHECKPOINTS[name])[f"{module}.weight"]
    rng = np.random.default_rng(0)
    parts = {"A": rng.normal(size=(2, columns)), "B": rng.normal(size=(rows, 2))}
    named = {f"base_model.model.{module}.lora_{part}.weight": parts[part].astype(np.float32) for part in "AB"}
    adapter.mkdir()
    save_file(named, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    expected = open_model(resolve_source(tmp_path / "hf", adapter=adapter)).read()
    assert_same(load_model(directory, adapter=adapter)[0], expected)
    differing = [np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (expected, plain.read())), strict=True)]
    assert differing.count(False) == 1
