"""Experts of MXFP4 are read as the bfloat16 that their blocks and scales stand for."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from levanter_infer.checkpoints.load import load_model
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.registry import family_for
from levanter_infer.models.tensors import parameters
from tests.golden_cases import load_case, write_checkpoint

QUANTIZED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
WIDTHS = {"hidden_size": 64, "intermediate_size": 32}
NUMBERS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""By their codes (OCP Microscaling Formats 1.0, table of E2M1)."""


def value(blocks: np.ndarray, scales: np.ndarray, expert: int, row: int, column: int) -> float:
    """The number of one input `column` of one output `row`."""
    group, place = divmod(column, 32)
    byte = int(blocks[expert, row, group, place // 2])
    return NUMBERS[byte >> 4 if place % 2 else byte & 15] * 2.0 ** (int(scales[expert, row, group]) - 127)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of bfloat16 whose experts are blocks and scales, and these by the names of their tensors."""
    case = load_case("gpt_oss")
    write_checkpoint(tmp_path, case)
    rng, tensors, pairs = np.random.default_rng(0), {}, {}
    layers, experts = case.config["num_hidden_layers"], case.config["num_local_experts"]
    (tmp_path / "config.json").write_text(json.dumps({**case.config, **WIDTHS, **QUANTIZED}))
    config = family_for(case.config).config_from_hf({**case.config, **WIDTHS})
    types = DecoderModel.types(config)
    for param in parameters(types, family_for(case.config).tensors):
        for name in param.names:
            tensors[name] = rng.normal(size=param.tensor_shape).astype(ml_dtypes.bfloat16)
    for layer in range(layers):
        for name, outs, ins in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            full = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[full]
            blocks = rng.integers(0, 256, (experts, outs, ins // 32, 16), dtype=np.uint8)
            scales = rng.integers(118, 132, (experts, outs, ins // 32), dtype=np.uint8)
            pairs[full] = blocks, scales
            tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, pairs


def test_blocks_and_scales_are_read_as_the_numbers_that_they_stand_for(checkpoint):
    directory, pairs = checkpoint
    model, _ = load_model(directory)
    assert model.dtype == jnp.bfloat16
    gate, up, down = (np.asarray(part.weight.array, np.float32) for part in vars_of(model))
    for layer in (0, 3):
        fused = pairs[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        last = pairs[f"model.layers.{layer}.mlp.experts.down_proj"]
        for expert, row, column in ((0, 0, 0), (2, 5, 33), (6, 31, 63), (3, 17, 30)):
            assert gate[layer, expert, row, column] == value(*fused, expert, 2 * row, column)
            assert up[layer, expert, row, column] == value(*fused, expert, 2 * row + 1, column)
            assert down[layer, expert, 2 * row, column // 2] == value(*last, expert, 2 * row, column // 2)


def vars_of(model):
    moe = model.layers.mlp
    return moe.gate_proj, moe.up_proj, moe.down_proj


CHANGES = {
    "_scales is missing": lambda blocks, scales: {"down_proj_blocks": blocks},
    "_scales .7, 3, 1. of U8, expected": lambda blocks, scales: {
        "down_proj_blocks": blocks,
        "down_proj_scales": scales[:, :3],
    },
    "no use for: 'model.layers.1.mlp.experts.down_proj_blocks'": lambda blocks, scales: {
        "down_proj_blocks": blocks.astype(np.float32),
        "down_proj_scales": scales,
    },
    "down_proj is there as it is and as": lambda blocks, scales: {
        "down_proj_blocks": blocks,
        "down_proj_scales": scales,
        "down_proj": np.zeros((1, 1), np.float32),
    },
    "up_proj_scales": lambda blocks, scales: {
        "down_proj_blocks": blocks,
        "down_proj_scales": scales,
        "up_proj_scales": scales,
    },
}


@pytest.mark.parametrize("says", CHANGES)
def test_blocks_that_do_not_fit_their_scales_are_refused(checkpoint, says):
    directory, _ = checkpoint
    tensors, prefix = load_file(directory / "model.safetensors"), "model.layers.1.mlp.experts."
    pair = [tensors.pop(f"{prefix}down_proj_{kind}") for kind in ("blocks", "scales")]
    changed = {f"{prefix}{name}": tensor for name, tensor in CHANGES[says](*pair).items()}
    save_file({**tensors, **changed}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        load_model(directory)


def test_other_quantizations_are_refused_by_their_key(checkpoint):
    directory, _ = checkpoint
    config = json.loads((directory / "config.json").read_text())
    for other in ({"quant_method": "aqlm"}, "mxfp4", [1], True):
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": other}))
        with pytest.raises(ValueError, match="quantization_config"):
            load_model(directory)
