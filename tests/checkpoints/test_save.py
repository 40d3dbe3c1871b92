"""A saved model is an ordinary HF checkpoint, and loading it gives the model back bit for bit."""

import json
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from levanter_infer.checkpoints import weights
from levanter_infer.checkpoints.load import load_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.kernels.cpu.backend import CPU
from levanter_infer.kernels.xla.backend import XlaBackend
from levanter_infer.models.registry import family_for
from tests.golden_cases import load_case, make_weights, write_checkpoint
from tests.tiny_models import tiny_model

CASES = (
    "llama2_bias",
    "llama_tied",
    "llama_longrope",
    "mistral_window",
    "qwen2_window",
    "qwen3_layer_types",
    "qwen3_moe",
)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_what_was_saved_gives_the_model_bit_for_bit(tmp_path, name, dtype):
    case = load_case(name)
    model, _ = load_model(write_checkpoint(tmp_path / "given", case), dtype=dtype)
    save_model(model, tmp_path / "saved")
    again, _ = load_model(tmp_path / "saved")
    assert model.config == again.config == family_for(case.config).config_from_hf(case.config)
    assert eqx.tree_equal(model, again)
    with safe_open(tmp_path / "saved" / "model.safetensors", "numpy") as file:
        expected = make_weights(name, case.config)
        assert set(file.keys()) == set(expected) and file.metadata() == {"format": "pt"}
        for tensor, value in expected.items():
            assert (file.get_tensor(tensor) == value.astype(jnp.dtype(dtype))).all()


def test_a_saved_file_is_whole_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    # The last tensor of a tied model is a small one, which Python buffers.
    model, _ = load_model(write_checkpoint(tmp_path / "given", load_case("llama_tied")))
    synced = {}

    def fsync(descriptor):
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    save_model(model, tmp_path / "saved")
    size = (tmp_path / "saved" / "model.safetensors").stat().st_size
    assert synced[str(tmp_path / "saved" / ".model.safetensors.partial")] == size


def test_extra_config_keys_are_written_unless_they_change_the_model(tmp_path):
    model, _ = load_model(write_checkpoint(tmp_path / "given", load_case("llama1")))
    save_model(model, tmp_path / "saved", hf_config={"eos_token_id": 2})
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["eos_token_id"], config["torch_dtype"]) == (2, "float32")
    assert config["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(ValueError, match="'rms_norm_eps': 0.5.* changes the model"):
        save_model(model, tmp_path / "saved", hf_config={"rms_norm_eps": 0.5})
    with pytest.raises(ValueError, match="'eos_tokn_id'"):
        save_model(model, tmp_path / "saved", hf_config={"eos_tokn_id": 2})


def test_what_cannot_be_saved_writes_nothing(tmp_path, monkeypatch):
    model, _ = load_model(write_checkpoint(tmp_path / "given", load_case("llama1")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for directory, hf_config, message in (
        ("saved", {"eos_token_id": np.int64(3)}, "cannot be written as JSON"),
        (
            "saved",
            {"torch_dtype": "bfloat16"},
            "hf_config has {'torch_dtype': 'bfloat16'}, and the weights are float32",
        ),
        ("memory://x/y", {}, "memory://x/y is a URL, and save_model writes to this machine"),
    ):
        with pytest.raises(ValueError, match=message):
            save_model(model, directory, hf_config=hf_config)
    assert [path.name for path in tmp_path.iterdir()] == ["given"]
    save_model(model, "~/saved")
    assert load_model("~/saved")[0].config == model.config and (tmp_path / "home" / "saved").is_dir()


def test_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    model, _ = load_model(write_checkpoint(tmp_path, load_case("llama1")))
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_dtype_without_a_name_is_refused(tmp_path):
    model, _ = load_model(write_checkpoint(tmp_path / "given", load_case("llama1")))
    with pytest.raises(ValueError, match="weights are int8, expected one of float32, float16, bfloat16"):
        save_model(jax.tree.map(lambda leaf: leaf.astype(np.int8), model), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    bits = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model).prepare(XlaBackend(CPU))
    with pytest.raises(ValueError, match="weights are uint16"):
        save_model(bits, tmp_path / "saved")


def test_all_of_a_file_is_given_to_the_system_before_it_is_synced(tmp_path, monkeypatch):
    model, sizes = tiny_model(), []
    monkeypatch.setattr(weights.os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    save_model(model, tmp_path)
    assert sizes == [(tmp_path / "model.safetensors").stat().st_size]
