"""The tensor table: each reader takes a parameter out of a tensor, and its inverse writes the same bytes back."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from levanter_infer.checkpoints import load as load_module
from levanter_infer.checkpoints.load import load_model
from levanter_infer.checkpoints.save import save_model
from levanter_infer.models import registry
from levanter_infer.models.family import TENSOR_NAMES
from levanter_infer.models.llama import LLAMA
from levanter_infer.models.qwen3_moe import QWEN3_MOE
from levanter_infer.models.tensors import Order, Slice, Tensor, parameters, tensor_table
from tests.tiny_models import tiny_model

ATTENTION, MLP = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."


def paths(block: str, names: str, kind: str = "weight") -> tuple[str, ...]:
    return tuple(f"layers.{block}.{name}_proj.{kind}" for name in names.split())


FUSED = tensor_table(  # as Phi-3
    TENSOR_NAMES,
    Tensor(f"{ATTENTION}qkv_proj.weight", paths("attention", "q k v")),
    Tensor(f"{ATTENTION}qkv_proj.bias", paths("attention", "q k v", "bias")),
    Tensor(f"{MLP}gate_up_proj.weight", paths("mlp", "gate up")),
)
PER_HEAD = tensor_table(  # as GPT-NeoX, with GPT-2's transposed maps
    TENSOR_NAMES,
    Tensor(f"{ATTENTION}query_key_value.weight", paths("attention", "q k v"), Order.BY_KV_HEAD),
    Tensor(f"{ATTENTION}query_key_value.bias", paths("attention", "q k v", "bias"), Order.BY_KV_HEAD),
    Tensor(f"{MLP}c_fc.weight", paths("mlp", "up"), transposed=True),
)
EXPERTS = tensor_table(  # as gpt-oss
    TENSOR_NAMES,
    Tensor(f"{MLP}router.weight", ("layers.mlp.router.weight",)),
    Tensor(
        f"{MLP}experts.gate_up_proj",
        paths("mlp", "gate up"),
        Order.ALTERNATING,
        transposed=True,
        stacked_experts=True,
    ),
    Tensor(f"{MLP}experts.down_proj", paths("mlp", "down"), stacked_experts=True),
)
MOE = dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)


@pytest.fixture
def family(monkeypatch):
    """`family(table)`: a registered family as Llama, or as Qwen3-MoE, whose checkpoints have other tensors."""

    def family(base, table):
        changed = dataclasses.replace(base, tensors=table)
        monkeypatch.setitem(registry.FAMILIES, base.model_type, changed)
        return changed

    return family


def seen_as(model, path: str, layer: int, expert: int | None = None) -> np.ndarray:
    """[out, in] of one layer."""
    part = model.layers
    for name in path.removeprefix("layers.").split("."):
        part = getattr(part, name)
    array = np.asarray(part.array[layer] if expert is None else part.array[layer, expert])
    return array.reshape(-1) if path.endswith("bias") else array.reshape(-1, array.shape[-1])


@pytest.mark.parametrize("table", [FUSED, PER_HEAD], ids=["fused", "per_head"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_is_loaded_bit_for_bit_and_saved_again_byte_for_byte(family, tmp_path, table, dtype):
    family(LLAMA, table)
    model = tiny_model(dtype=dtype, attention_bias=True)
    model = jax.tree.map(lambda leaf: leaf + jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape) / 7, model)
    save_model(model, tmp_path / "first")
    again, _ = load_model(tmp_path / "first")
    assert eqx.tree_equal(model, again)
    save_model(again, tmp_path / "second")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_rows_of_fused_tensors_stand_one_after_the_other(family, tmp_path):
    family(LLAMA, FUSED)
    model = tiny_model(attention_bias=True)
    save_model(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for block, names, fused in (
            ("attention", "q k v", "self_attn.qkv_proj"),
            ("mlp", "gate up", "mlp.gate_up_proj"),
        ):
            expected = np.concatenate([seen_as(model, path, layer) for path in paths(block, names)])
            assert (stored[f"model.layers.{layer}.{fused}.weight"] == expected).all()
    assert not any("q_proj" in name or "gate_proj" in name for name in stored)


def test_rows_by_head_and_transposed_maps_are_where_neox_and_gpt2_have_them(family, tmp_path):
    family(LLAMA, PER_HEAD)
    model = tiny_model(attention_bias=True)  # 2 heads of keys and values, each with 2 of queries, of 8 numbers
    save_model(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    q, k, v = (seen_as(model, path, 1) for path in paths("attention", "q k v"))
    expected = np.concatenate(
        [np.concatenate([q[16 * h : 16 * h + 16], *(a[8 * h : 8 * h + 8] for a in (k, v))]) for h in (0, 1)]
    )
    assert (stored["model.layers.1.self_attn.query_key_value.weight"] == expected).all()
    assert (stored["model.layers.1.mlp.c_fc.weight"] == seen_as(model, *paths("mlp", "up"), 1).T).all()


def test_experts_in_one_tensor_with_alternating_columns(family, tmp_path):
    family(QWEN3_MOE, EXPERTS)
    model = tiny_model(**MOE)
    save_model(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    assert stored.shape == (4, 32, 48)
    for expert, (part, name) in itertools.product(range(4), enumerate(("gate", "up"))):
        (path,) = paths("mlp", name)
        assert (stored[expert, :, part::2] == seen_as(model, path, 1, expert).T).all()
    again, _ = load_model(tmp_path)
    assert eqx.tree_equal(model, again)


def test_a_part_of_a_tensor_is_read_alone(family, tmp_path, monkeypatch):
    family(LLAMA, FUSED)
    save_model(tiny_model(attention_bias=True), tmp_path)
    read: list[tuple[str, int]] = []
    original = load_module.read_tensors

    def counted(pieces):
        read.extend((tensor.name, tensor.num_bytes) for tensor, _ in pieces)
        original(pieces)

    monkeypatch.setattr(load_module, "read_tensors", counted)
    load_model(tmp_path)
    assert sum(size for _, size in read) == sum(
        array.nbytes for array in load_file(tmp_path / "model.safetensors").values()
    )


@pytest.mark.parametrize("seed", range(3))
def test_writing_is_the_inverse_of_reading(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        groups, parts = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        rows = tuple(int(n) * groups for n in rng.integers(1, 5, parts))
        columns = () if rng.random() < 0.3 else (int(rng.integers(1, 6)),)
        slices = [
            Slice(rows, part, groups, columns, bool(rng.random() < 0.5) and bool(columns)) for part in range(parts)
        ]
        slices = [dataclasses.replace(each, transposed=slices[0].transposed) for each in slices]
        tensor = rng.standard_normal(slices[0].tensor_shape)
        written = np.full_like(tensor, np.nan)
        for each in slices:
            values = each.read(tensor)
            assert values.shape == each.shape
            if each.row_range is not None:
                assert (tensor[slice(*each.row_range)] == values).all()
            each.write(written, values)
        assert (written == tensor).all()


def test_a_line_without_its_parameters_is_skipped():
    lines = {parameter.line for parameter in parameters(tiny_model(), LLAMA.tensors)}
    assert "layers.attention.q_proj.weight" in lines and "layers.attention.q_proj.bias" not in lines
