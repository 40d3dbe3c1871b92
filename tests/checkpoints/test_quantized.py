"""Quantized checkpoints are read as the floats that their codes and scales stand for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from levanter_infer.checkpoints.load import load_model
from levanter_infer.checkpoints.quantized import tensors as quantized_tensors
from levanter_infer.checkpoints.quantized.config import without_quantization
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.checkpoints.weights import read_header, read_raw
from levanter_infer.config import ModelSource, RunConfig
from levanter_infer.fingerprint import model_fingerprint
from levanter_infer.plan.spec import spec_of
from tests.golden_cases import load_case, write_checkpoint

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "quantized").glob("*.safetensors"))
"""Made by scripts/golden/make_quantized.py with the libraries that define the formats."""


def config_of(path: Path) -> dict:
    with safe_open(str(path), framework="numpy") as file:
        return json.loads(file.metadata()["quantization_config"])


def weight_of(path: Path, config: dict):
    _, quantization = without_quantization({"quantization_config": config})
    assert quantization is not None
    found = quantization.dequantized(read_header(path))
    assert set(found) == {"layer.weight", "expected"}, "a tensor of the module is left"
    return found["layer.weight"], found["expected"]


def read(tensor, dtype=np.float32) -> np.ndarray:
    out = np.empty(tensor.shape, dtype)
    tensor.read_into(out)
    return out


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_weights_are_those_of_the_library_that_defines_the_format(path, monkeypatch):
    tensor, expected = weight_of(path, config_of(path))
    expected = read(expected)
    assert tensor.shape == expected.shape and np.abs(expected).max() > 0
    if path.stem == "nvfp4":  # compressed-tensors rounds scales and weights to bfloat16
        np.testing.assert_allclose(read(tensor), expected, rtol=2**-7)
        expected = read(tensor)
    # bitsandbytes rounds the weights to the dtype of the model, bfloat16, and ours are when they are read as it.
    dtype = ml_dtypes.bfloat16 if path.stem.startswith(("nf4", "fp4")) else np.float32
    np.testing.assert_array_equal(read(tensor, dtype).astype(np.float32), expected)
    monkeypatch.setattr(quantized_tensors, "_CHUNK", 7 * expected.shape[1])
    for start, stop in ((0, 1), (3, 24), (13, expected.shape[0] - 3)):
        np.testing.assert_array_equal(read(tensor.rows(start, stop), dtype).astype(np.float32), expected[start:stop])
    np.testing.assert_array_equal(read(tensor.rows(5, 20).rows(2, 4), dtype).astype(np.float32), expected[7:9])
    np.testing.assert_array_equal(read(tensor.entry(9), dtype).astype(np.float32), expected[9])


def quantized(config: dict, tensors: dict[str, np.ndarray], tmp_path: Path) -> np.ndarray:
    save_file({**tensors, "expected": np.zeros(1, np.float32)}, tmp_path / "t.safetensors")
    return read(weight_of(tmp_path / "t.safetensors", config)[0])


def test_variants_of_gptq(tmp_path):
    """Zero points that are stored as they are, tensors without g_idx, and one group for all inputs."""
    path = next(path for path in GOLDEN if path.stem == "gptq_w4")
    tensors, config = load_file(path), config_of(path)
    expected = tensors.pop("expected")
    v1 = {**config, "checkpoint_format": None}
    np.testing.assert_array_equal(quantized(v1, tensors, tmp_path), expected)
    with_v2 = {**tensors, "layer.qzeros": np.full_like(tensors["layer.qzeros"], 0x88888888 - 2**32)}
    np.testing.assert_array_equal(quantized({**config, "checkpoint_format": "gptq_v2"}, with_v2, tmp_path), expected)
    np.testing.assert_array_equal(quantized({**v1, "format": "GPTQ_V2"}, with_v2, tmp_path), expected)
    plain = {name: tensor for name, tensor in tensors.items() if name != "layer.g_idx"}
    np.testing.assert_array_equal(quantized(config, plain, tmp_path), expected)
    order = np.random.default_rng(0).permutation(96)
    codes = np.asarray(tensors["layer.qweight"]).view(np.uint8)
    del codes
    shuffled = {**tensors, "layer.g_idx": (order // 32).astype(np.int32)}
    scales, words = tensors["layer.scales"], tensors["layer.qweight"]
    numbers = np.stack([(words >> (4 * i)) & 15 for i in range(8)], axis=1).reshape(96, 40)
    by_hand = (numbers - 8.0) * scales[order // 32]
    np.testing.assert_array_equal(quantized(config, shuffled, tmp_path), by_hand.T.astype(np.float32))
    # A stored zero point of 15 is one of 0, as in AutoGPTQ: the sum has four bits.
    wrapped = {**tensors, "layer.qzeros": np.full_like(tensors["layer.qzeros"], -1)}
    by_hand = numbers * scales[np.arange(96) // 32]
    np.testing.assert_array_equal(quantized(config, wrapped, tmp_path), by_hand.T.astype(np.float32))


def test_the_last_blocks_may_be_smaller(tmp_path):
    """As in DeepSeek's `kv_a_proj_with_mqa`, which has 576 rows and blocks of 128."""
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(0, 120, (72, 40), dtype=np.uint8), rng.random((5, 3), dtype=np.float32)
    tensors = {"layer.weight": codes.view(ml_dtypes.float8_e4m3fn), "layer.weight_scale_inv": scale}
    found = quantized({"quant_method": "fp8", "weight_block_size": [16, 16]}, tensors, tmp_path)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for row, column in ((0, 0), (15, 16), (71, 39), (64, 31), (33, 32)):
        assert found[row, column] == values[row, column] * scale[row // 16, column // 16]


def test_further_methods(tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 120, (24, 32), dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    row, one = rng.random((24, 1), dtype=np.float32), np.float32(0.37)
    fp8 = {"layer.weight": codes.view(ml_dtypes.float8_e4m3fn)}
    unused = {"layer.input_scale": np.ones(1, np.float32), "layer.k_scale": np.ones((), np.float32)}
    fbgemm = {**fp8, "layer.weight_scale": row, "layer.input_scale_ub": np.ones(1, np.float32)}
    np.testing.assert_array_equal(quantized({"quant_method": "fbgemm_fp8"}, fbgemm, tmp_path), values * row)
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8"}
    tensor = {**fp8, "layer.weight_scale": np.asarray(one), **unused}
    np.testing.assert_array_equal(quantized(modelopt, tensor, tmp_path), values * one)
    static = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    tensor = {**fp8, "layer.weight_scale_inv": np.asarray(one), "layer.activation_scale": np.asarray(one)}
    np.testing.assert_array_equal(quantized(static, tensor, tmp_path), values * one)
    integers = rng.integers(-127, 128, (24, 32), dtype=np.int8)
    eight = {"layer.weight": integers, "layer.SCB": row[:, 0], "layer.weight_format": np.zeros((), np.uint8)}
    found = quantized({"quant_method": "bitsandbytes", "load_in_8bit": True}, eight, tmp_path)
    np.testing.assert_allclose(found, integers * row / 127, rtol=3e-7)
    path = next(path for path in GOLDEN if path.stem == "nvfp4")
    stored = {name.removeprefix("layer."): read_raw([tensor])[0] for name, tensor in read_header(path).items()}
    four = {"layer.weight": stored["weight_packed"]}
    four["layer.weight_scale"] = stored["weight_scale"].view(ml_dtypes.float8_e4m3fn)
    four["layer.weight_scale_2"] = np.float32(1) / stored["weight_global_scale"]
    found = quantized({"quant_method": "modelopt", "quant_algo": "NVFP4"}, four, tmp_path)
    np.testing.assert_allclose(found, read(weight_of(path, config_of(path))[0]), rtol=3e-7)


def test_exponents_as_scales_and_auto_round(tmp_path):
    rng = np.random.default_rng(0)
    codes, exponents = rng.integers(0, 120, (24, 64), dtype=np.uint8), rng.integers(120, 134, (24, 2), dtype=np.uint8)
    tensors = {"layer.weight": codes.view(ml_dtypes.float8_e4m3fn), "layer.weight_scale": exponents}
    expected = tensors["layer.weight"].astype(np.float32) * np.repeat(2.0 ** (exponents.astype(int) - 127), 32, 1)
    groups = {"a": {"weights": {"num_bits": 8, "type": "float", "group_size": 32}, "format": "mxfp8-quantized"}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    np.testing.assert_array_equal(quantized(config, tensors, tmp_path), expected)
    for stem, packing in (("gptq_w4", "auto_round:auto_gptq"), ("awq", "auto_round:auto_awq")):
        path = next(path for path in GOLDEN if path.stem == stem)
        tensors = load_file(path)
        expected = tensors.pop("expected")
        config = {**config_of(path), "quant_method": "auto-round", "packing_format": packing}
        np.testing.assert_array_equal(quantized(config, tensors, tmp_path), expected)


def test_layers_may_have_other_numbers_of_bits(tmp_path):
    """compressed-tensors with groups of 4 and of 8 bits: `weight_shape` says which a layer has."""
    four, eight = (next(path for path in GOLDEN if path.stem == f"packed_w{bits}") for bits in (4, 8))
    groups = {f"group_{bits}": config_of(path)["config_groups"]["group_0"] for bits, path in ((4, four), (8, eight))}
    for path in (four, eight):
        config = {**config_of(path), "config_groups": groups}
        tensor, expected = weight_of(path, config)
        np.testing.assert_array_equal(read(tensor), read(expected))


# --- Whole checkpoints -------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}


def fp8_checkpoint(directory: Path, case_name: str, config: dict) -> tuple[dict[str, np.ndarray], ...]:
    """Write a golden case in bfloat16 with its matrices, but the embeddings and the head, as blocks of float8. Returns:
    the tensors, and in float32 those that they stand for."""
    case = load_case(case_name)
    write_checkpoint(directory, case)
    stored, floats = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim != 2 or "embed" in name or "lm_head" in name:
            stored[name] = tensor.astype(ml_dtypes.bfloat16)
            floats[name] = stored[name].astype(np.float32)
            continue
        rows, columns = (-(-size // 8) for size in tensor.shape)
        scale = np.random.default_rng(tensor.size).random((rows, columns), dtype=np.float32) / 100 + 0.002
        each = np.repeat(np.repeat(scale, 8, 0), 8, 1)[: tensor.shape[0], : tensor.shape[1]]
        stored[name] = (tensor / each).astype(ml_dtypes.float8_e4m3fn)
        stored[name.replace(".weight", ".weight_scale_inv")] = scale
        floats[name] = stored[name].astype(np.float32) * each
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**case.config, "torch_dtype": "bfloat16", **config}))
    return stored, floats


def same(found, expected) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def both_forms(tmp_path: Path, case: str, dtype: str | None = None) -> tuple[Path, Path]:
    """A checkpoint of blocks of float8, and one of the floats that they stand for, in bfloat16 or in `dtype`."""
    quantized_dir, plain = tmp_path / "quantized", tmp_path / "plain"
    quantized_dir.mkdir()
    plain.mkdir()
    _, floats = fp8_checkpoint(quantized_dir, case, {"quantization_config": FP8})
    write_checkpoint(plain, load_case(case))
    kept = {name: tensor if dtype else tensor.astype(ml_dtypes.bfloat16) for name, tensor in floats.items()}
    save_file(kept, plain / "model.safetensors")
    return quantized_dir, plain


@pytest.mark.parametrize("case", ["llama3", "deepseek_v3", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_checkpoint_of_float8_is_the_model_of_its_floats(tmp_path, case, dtype):
    quantized_dir, plain = both_forms(tmp_path, case, dtype)
    model, _ = load_model(quantized_dir, dtype=dtype)
    assert model.dtype == (jnp.float32 if dtype else jnp.bfloat16)
    same(model, load_model(plain)[0])


def test_remote_files_hold_the_same(tmp_path):
    fp8_checkpoint(tmp_path, "llama3", {"quantization_config": FP8})
    memory = fsspec.filesystem("memory")
    for file in tmp_path.iterdir():
        memory.pipe_file(f"/quantized/{file.name}", file.read_bytes())
    same(load_model("memory://quantized")[0], load_model(tmp_path)[0])


SHARDED = """
import sys
import jax
import numpy as np
from levanter_infer.checkpoints.load import open_model
from levanter_infer.checkpoints.source import resolve_source
from levanter_infer.layers.layout import Layout

found, expected = (open_model(resolve_source(directory)) for directory in sys.argv[1:])
mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(1, 2), ("data", "model"))
layout = Layout.of(mesh, found.types.config)
pairs = [*zip(*(jax.tree.leaves(each.read(layout)) for each in (found, expected)), strict=True)]
assert all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in pairs)
print("same", sum(not one.sharding.is_fully_replicated for one, _ in pairs))
"""


def test_a_device_reads_its_rows(tmp_path):
    quantized_dir, plain = both_forms(tmp_path, "phi3")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARDED, str(quantized_dir), str(plain)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.removeprefix("same ")) > 3


def test_experts_in_one_tensor(tmp_path):
    """The format of transformers 5: [expert, ., .] of float8, with scales of blocks or of experts."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 120, (3, 32, 24), dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    name, config = "layer.experts.gate_up_proj", {"quant_method": "fp8", "weight_block_size": [16, 16]}
    _, quantization = without_quantization({"quantization_config": config})
    for scale in (rng.random((3, 2, 2), dtype=np.float32), rng.random((3, 1, 1), dtype=np.float32)):
        stored = {name: codes.view(ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": scale}
        save_file(stored, tmp_path / "t.safetensors")
        found = quantization.dequantized(read_header(tmp_path / "t.safetensors"))
        each = np.repeat(np.repeat(scale, 32 // scale.shape[1], 1), 16 if scale.shape[2] > 1 else 24, 2)[:, :, :24]
        assert set(found) == {name}
        np.testing.assert_array_equal(read(found[name]), values * each)
        np.testing.assert_array_equal(read(found[name].entry(1)), (values * each)[1])
        np.testing.assert_array_equal(read(found[name].rows(1, 3)), (values * each)[1:])
    save_file({**stored, f"{name}_scale_inv": np.ones((3, 2, 3), np.float32)}, tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match="one scale per expert, per row, or per whole block"):
        quantization.dequantized(read_header(tmp_path / "t.safetensors"))


@pytest.mark.parametrize("case", ["qwen3_5_moe", "gemma4_moe"])
def test_a_checkpoint_with_experts_in_one_tensor(tmp_path, case):
    """The same as the floats of its codes, in the form of transformers in memory."""
    write_checkpoint(tmp_path, load_case(case))
    rng, stored, plain = np.random.default_rng(0), {}, {}
    for name, tensor in together(load_file(tmp_path / "model.safetensors")).items():
        plain[name] = tensor.astype(ml_dtypes.bfloat16)
        if not name.endswith((".gate_up_proj", ".experts.down_proj")):
            stored[name] = plain[name]
            continue
        stored[name] = tensor.astype(ml_dtypes.float8_e4m3fn)
        scale = rng.random((*tensor.shape[:1], *(-(-size // 8) for size in tensor.shape[1:])), dtype=np.float32)
        stored[f"{name}_scale_inv"] = scale
        stored[f"{name}_activation_scale"] = np.ones(len(tensor), np.float32)
        each = np.repeat(np.repeat(scale, 8, 1), 8, 2)[:, : tensor.shape[1], : tensor.shape[2]]
        plain[name] = (stored[name].astype(np.float32) * each).astype(ml_dtypes.bfloat16)
    assert len(stored) > len(plain)
    save_file(plain, tmp_path / "model.safetensors")
    expected, _ = load_model(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    same(load_model(tmp_path)[0], expected)


def together(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with all experts of a layer in one, where each has its own."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            found[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for start, parts in experts.items():
        gate, up, down = (np.stack([parts[kind][i] for i in sorted(parts[kind])]) for kind in ("gate", "up", "down"))
        found |= {f"{start}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{start}.down_proj": down}
    return found


def test_modelopt_may_describe_itself_in_a_file_of_its_own(tmp_path):
    stored, floats = fp8_checkpoint(tmp_path, "llama3", {})
    for name in [name for name in stored if name.endswith("_inv")]:
        stored[name.removesuffix("_inv")] = np.full(1, 0.25, np.float32)
        weight = name.removesuffix("_scale_inv")
        floats[weight] = stored[weight].astype(np.float32) / 4
        del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no use for"):
        load_model(tmp_path)
    before = model_fingerprint(resolve_source(tmp_path))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert set(model_fingerprint(resolve_source(tmp_path))) - set(before) == {"modelopt_config_sha256"}
    model, _ = load_model(tmp_path)
    (tmp_path / "hf_quant_config.json").unlink()
    save_file(
        {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in floats.items()}, tmp_path / "model.safetensors"
    )
    same(model, load_model(tmp_path)[0])


def test_tensors_of_other_parts_are_not_looked_at(tmp_path):
    """Such as a vision tower in a form that is not read."""
    tensors, _ = fp8_checkpoint(tmp_path, "deepseek_v3", {"quantization_config": FP8, "num_nextn_predict_layers": 1})
    expected, _ = load_model(tmp_path)
    layers = load_case("deepseek_v3").config["num_hidden_layers"]
    codes = np.zeros((8, 8), np.uint8).view(ml_dtypes.float8_e4m3fn)
    save_file({**tensors, f"model.layers.{layers}.eh_proj.weight": codes}, tmp_path / "model.safetensors")
    same(load_model(tmp_path)[0], expected)


def test_experts_of_llama4_with_a_tensor_each(tmp_path):
    """As quantized files of Llama 4 have them, where the plain ones have all experts in one tensor, transposed."""
    case = load_case("llama4")
    write_checkpoint(tmp_path, case)
    expected, _ = load_model(tmp_path)
    apart = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if ".experts." not in name:
            apart[name] = tensor
            continue
        start, kind = name.rsplit(".", 1)
        for expert, matrix in enumerate(tensor):
            parts = np.split(matrix, 2, axis=1) if kind == "gate_up_proj" else [matrix]
            for part, array in zip(("gate", "up") if len(parts) == 2 else ("down",), parts, strict=True):
                apart[f"{start}.{expert}.{part}_proj.weight"] = array.T.copy()
    save_file(apart, tmp_path / "model.safetensors")
    same(load_model(tmp_path)[0], expected)


def test_biases_of_zeros_are_left_out(tmp_path):
    """AutoGPTQ writes a bias for each layer, also of models that have none."""
    tensors, _ = fp8_checkpoint(tmp_path, "llama3", {"quantization_config": FP8})
    expected, _ = load_model(tmp_path)
    rows = tensors["model.layers.1.mlp.down_proj.weight"].shape[0]
    bias = np.zeros(rows, ml_dtypes.bfloat16)
    name = "model.layers.1.mlp.down_proj.bias"
    save_file({**tensors, name: bias}, tmp_path / "model.safetensors")
    same(load_model(tmp_path)[0], expected)
    bias[3] = 1
    save_file({**tensors, name: bias}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"no use for: '{name}'"):
        load_model(tmp_path)


def test_a_plan_is_one_of_the_floats(tmp_path):
    fp8_checkpoint(tmp_path, "llama3", {"quantization_config": FP8})
    config = RunConfig(model=ModelSource(str(tmp_path)), prompts=["x"])
    plan = spec_of(config, "cpu", None)
    assert plan.dtype == "bfloat16" and plan.model_types().config == load_model(tmp_path)[0].config


REFUSED = {
    "quant_method='aqlm', expected one of auto-round, awq, bitsandbytes, compressed-tensors": {"quant_method": "aqlm"},
    "quantization_config='fp8', expected an object": "fp8",
    "quantization_config=True, expected an object": True,
    "fmt='e5m2', expected one of e4m3": {**FP8, "fmt": "e5m2"},
    "weight_block_size=.8., expected two whole numbers": {**FP8, "weight_block_size": [8]},
    r"expected floats: one scale, one per row, one per block of 16 x 8": {**FP8, "weight_block_size": [16, 8]},
    "transform_config={'a': 1}, expected nothing": {"config_groups": {"a": {}}, "transform_config": {"a": 1}},
    "format='marlin-24', expected one of None, pack-quantized": {"config_groups": {}, "format": "marlin-24"},
    "sparsity_config.format='sparse-24', expected one of dense": {
        "quant_method": "compressed-tensors",
        "sparsity_config": {"format": "sparse-24"},
    },
    "version='gemv', expected one of gemm": {"quant_method": "awq", "version": "gemv"},
    "checkpoint_format='marlin', expected one of gptq": {"quant_method": "gptq", "checkpoint_format": "marlin"},
    "quant_algo='W4A8_AWQ', expected one of fp8": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_not_read_is_refused_by_its_key(tmp_path, says):
    fp8_checkpoint(tmp_path, "llama3", {"quantization_config": REFUSED[says]})
    with pytest.raises(ValueError, match=says):
        load_model(tmp_path)


def test_a_file_that_does_not_fit_its_config_is_refused(tmp_path):
    tensors, _ = fp8_checkpoint(tmp_path, "llama3", {"quantization_config": FP8})
    path, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj"
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(says: str, changed: dict, **keys) -> None:
        save_file({**tensors, **changed}, path)
        (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
        with pytest.raises(ValueError, match=says):
            load_model(tmp_path)

    refused("stored as F8_E4M3, .* no quantization_config|no use for", {}, quantization_config=None)
    both = {"compression_config": {"quant_method": "fp8"}}
    refused("quantization_config and compression_config are both there", {}, **both)
    refused("expected a matrix of F8_E4M3 or I8", {f"{name}.weight": np.zeros((16, 16), np.uint8)})
    scale = f"{name}.weight_scale_inv"
    refused("expected floats: one scale", {scale: np.zeros((2, 2), np.int32)})
    tensors.pop(scale)
    refused(f"{scale[:-4]} is missing|weight_scale is missing", {})


def test_a_weight_in_two_forms_is_refused(tmp_path):
    path = next(path for path in GOLDEN if path.stem == "packed_w4")
    tensors = load_file(path)
    save_file({**tensors, "layer.weight": np.zeros((40, 96), np.float32)}, tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match="layer.weight is there as it is and as layer.weight_packed"):
        weight_of(tmp_path / "t.safetensors", config_of(path))


def test_group_indices_out_of_range_are_refused(tmp_path):
    path = next(path for path in GOLDEN if path.stem == "packed_w4_actorder")
    tensors = load_file(path)
    for wrong in (-1, 4):
        tensors["layer.weight_g_idx"][5] = wrong
        with pytest.raises(ValueError, match="layer.weight: group indices range from .* for 4 groups; download"):
            quantized(config_of(path), {name: t for name, t in tensors.items() if name != "expected"}, tmp_path)


STATE = "layer.weight.quant_state.bitsandbytes__nf4"
WRONG_STATES = {
    "expected the shape of a matrix and": {"shape": [40, 128], "blocksize": 64, "nested_offset": 1e300},
    "sizes of blocks": {"shape": [40, 128], "blocksize": 64, "nested_offset": float("nan")},
    "expected the shape of a matrix": {"shape": [40, 128, 1], "blocksize": 64},
    "expected the shape of a matrix and sizes": {"shape": [40, 128], "blocksize": 0},
    "the codes of a matrix": {"shape": [41, 128], "blocksize": 64},
    "and 160 scales": {"shape": [40, 128], "blocksize": 32},
}


@pytest.mark.parametrize("says", WRONG_STATES)
def test_a_state_that_does_not_fit_the_codes_is_refused(tmp_path, says):
    path = next(path for path in GOLDEN if path.stem == "nf4")
    tensors = load_file(path)
    tensors[STATE] = np.frombuffer(json.dumps(WRONG_STATES[says]).encode(), np.uint8)
    with pytest.raises(ValueError, match=says):
        quantized(config_of(path), {name: t for name, t in tensors.items() if name != "expected"}, tmp_path)


def test_the_last_group_of_inputs_may_be_smaller(tmp_path):
    """96 inputs in groups of 64, as the configuration says; equal groups go before a size that fits no layer."""
    path = next(path for path in GOLDEN if path.stem == "gptq_w4")
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in ("expected", "layer.g_idx")}
    numbers = np.stack([(tensors["layer.qweight"] >> (4 * i)) & 15 for i in range(8)], axis=1).reshape(96, 40) - 8.0
    two = {**tensors, "layer.scales": tensors["layer.scales"][:2], "layer.qzeros": tensors["layer.qzeros"][:2]}
    two = {name: np.ascontiguousarray(tensor) for name, tensor in two.items()}
    for size, groups in ((64, np.arange(96) // 64), (16, np.arange(96) // 48)):
        expected = (numbers * two["layer.scales"][groups]).T.astype(np.float32)
        found = quantized({**config_of(path), "group_size": size}, two, tmp_path)
        np.testing.assert_array_equal(found, expected)
    uneven = {**tensors, "layer.scales": np.ones((5, 40), np.float32), "layer.qzeros": np.zeros((5, 5), np.int32)}
    with pytest.raises(ValueError, match="expected scales of groups of 32 of 96 inputs, or of equal ones"):
        quantized(config_of(path), uneven, tmp_path)


EMPTY = [
    ("fp8_block", "weight"),
    ("nvfp4", "weight_packed"),
    ("gptq_w4", "scales"),
    ("awq", "qweight"),
    ("nf4", "weight"),
]


@pytest.mark.parametrize("stem, part", EMPTY)
def test_empty_and_flat_tensors_are_refused(tmp_path, stem, part):
    path = next(path for path in GOLDEN if path.stem == stem)
    tensors = {name: read_raw([tensor])[0] for name, tensor in read_header(path).items() if name != "expected"}
    for name, tensor in read_header(path).items():
        if tensor.dtype == "F8_E4M3":
            tensors[name] = tensors[name].view(ml_dtypes.float8_e4m3fn)
    name = f"layer.{part}"
    for wrong in (tensors[name][:0], tensors[name].reshape(-1)[:1].reshape(())):
        with pytest.raises(ValueError, match=rf"t.safetensors: .*layer\.{part}"):
            quantized(config_of(path), {**tensors, name: wrong.copy()}, tmp_path)


def test_integers_are_no_scales(tmp_path):
    for stem in ("gptq_w4", "awq"):
        path = next(path for path in GOLDEN if path.stem == stem)
        tensors = {name: tensor for name, tensor in load_file(path).items() if name != "expected"}
        tensors["layer.scales"] = tensors["layer.scales"].astype(np.int32)
        with pytest.raises(ValueError, match="layer.scales .* of I32, "):
            quantized(config_of(path), tensors, tmp_path)


def test_truncated_words_are_refused(tmp_path):
    for stem, part in (("awq", "qweight"), ("gptq_w4", "qweight"), ("packed_w4", "weight_packed")):
        path = next(path for path in GOLDEN if path.stem == stem)
        tensors = {name: tensor for name, tensor in load_file(path).items() if name != "expected"}
        tensors[f"layer.{part}"] = tensors[f"layer.{part}"][:, :-1].copy()
        with pytest.raises(ValueError, match=rf"t.safetensors: got layer\..*{part}"):
            quantized(config_of(path), tensors, tmp_path)
