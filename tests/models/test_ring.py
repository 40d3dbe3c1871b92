"""Columns of the residual stream on a ring of devices, which are emulated by `vmap` here; tests/engine/test_mesh.py has
devices."""

import dataclasses
import functools
import json
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from levanter_infer.axes import DATA, MODEL, POSITION
from levanter_infer.kernels.xla.backend import XlaBackend
from levanter_infer.layers.attention import AttentionInputs
from levanter_infer.layers.collective_matmul import gathered, scattered
from levanter_infer.layers.gated_norm import init_norm
from levanter_infer.layers.layout import MESH_AXES, Layout
from levanter_infer.layers.linear import Linear
from levanter_infer.layers.shard_axis import ShardAxis, Vocabulary
from levanter_infer.models.decoder import PLAIN
from levanter_infer.models.mixing import mixer_of
from levanter_infer.models.ring import columns_of, ring_of, squares_of, with_ring
from tests.tiers import nightly_but
from tests.tiny_models import tiny_model

PARTS, ROWS = 2, 6
AXIS = ShardAxis(MODEL, PARTS)
BIASES = {"model_type": "qwen2"}
PLUS_ONE = {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"}
BOTH_NORMS = {"model_type": "gemma2", "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "norm_topk_prob": True}  # fmt: skip


class Ring(XlaBackend):
    """Columns are on a ring from one byte on."""

    ring_bytes = 1


class InHalves(Ring):
    """The halves that go in both directions are computed apart."""

    def halves_ring_matmuls(self) -> bool:
        return True


def parts_of(leaf: NamedArray) -> jax.Array:
    """The parts of a weight on each device, with an axis of devices."""
    places = [i for i, axis in enumerate(leaf.axes) if MESH_AXES.get(axis.name) == MODEL]
    split = np.split(np.asarray(leaf.array), PARTS, places[0]) if places else [leaf.array] * PARTS
    return jnp.stack(split)


def layer_on_devices(model, x: NamedArray, ring: ShardAxis) -> jax.Array:
    """The first layer of `x` on emulated devices, [device, row, embed]."""
    layout = Layout.of(AbstractMesh((PARTS,), (MODEL,)), model.config)
    (stack,), block = model.shard_as(layout).stacks, model.config.blocks[0]
    leaves, structure = jax.tree.flatten(stack, is_leaf=lambda leaf: isinstance(leaf, NamedArray))

    def of_device(arrays, x: jax.Array) -> jax.Array:
        sizes = [tuple(a.resize(n) for a, n in zip(leaf.axes, array.shape, strict=True))
                 for leaf, array in zip(leaves, arrays, strict=True)]  # fmt: skip
        own = [NamedArray(*pair) for pair in zip(arrays, sizes, strict=True)]
        own_x = columns_of((Axis(POSITION, x.shape[0]), model.embed), ring.own(x, 1))
        layer = jax.tree.unflatten(structure, own).at(jnp.int32(0), jnp.int32(ROWS))
        layer = with_ring(layer, ring, squares_of(own_x, ring))
        attend = functools.partial(layer.attention.dense, inputs=AttentionInputs(block.mixer, None, PLAIN))
        result, _ = layer(own_x, block, mixer_of(block, [attend], layer.some_map))
        return ring.all_gather(result.array, 1)

    compute = jax.vmap(of_device, in_axes=(0, None), axis_name=MODEL)
    return jax.jit(compute)([parts_of(leaf) for leaf in leaves], x.array)


@pytest.mark.parametrize("changes", nightly_but([BIASES], [{}, BIASES, PLUS_ONE]), ids=["plain", "biases", "plus_one"])
def test_a_layer_on_a_ring_gives_the_same(changes):
    model = tiny_model(num_hidden_layers=1, **changes)
    keys = iter(jax.random.split(jax.random.key(3), 99))
    model = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape, leaf.dtype), model)
    x = hax.random.normal(jax.random.key(1), (Axis(POSITION, ROWS), model.embed))
    assert ring_of(model.config, Ring(), AXIS, ROWS, x.dtype) == AXIS
    everywhere, on_ring = (layer_on_devices(model, x, ring) for ring in (ShardAxis(), AXIS))
    assert not np.allclose(everywhere[0], x.array, atol=0.1)
    for device in on_ring:
        np.testing.assert_allclose(device, everywhere[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("backend", [Ring(), InHalves()], ids=["whole", "in halves"])
@pytest.mark.parametrize("parts", nightly_but([4], [2, 4, 8]))
def test_matmuls_beside_transfers_are_those_of_all_columns(parts, backend):
    rng = np.random.default_rng(parts)
    x, norm = rng.normal(size=(5, 4 * parts)).astype(np.float32), rng.normal(size=4 * parts).astype(np.float32)
    weights = [rng.normal(size=(out, 4 * parts)).astype(np.float32) for out in (3, 6)]
    ring = ShardAxis(MODEL, parts)
    columns = jnp.stack(np.split(x, parts, 1))
    inner = jax.vmap(lambda own: gathered(own, weights, [3, 6], (norm, 1e-5), ring, backend), axis_name=MODEL)
    normed = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * norm
    for found, weight in zip(inner(columns), weights, strict=True):
        np.testing.assert_allclose(found, np.broadcast_to(normed @ weight.T, found.shape), rtol=1e-4, atol=1e-4)
    squares = jnp.sum(columns * columns, axis=2)
    given = jax.vmap(lambda own, squares: gathered(own, weights, [3, 6], (norm, 1e-5), ring, backend, squares=squares),
                    axis_name=MODEL)(columns, 4 * squares)  # fmt: skip
    for found, half in zip(inner(columns), given, strict=True):
        np.testing.assert_allclose(half, found / 2, rtol=1e-4, atol=1e-4)
    back = jnp.asarray(rng.normal(size=(parts, 4 * parts, 3)), jnp.float32)
    inputs = jnp.asarray(rng.normal(size=(parts, 5, 3)), jnp.float32)
    summed = jax.vmap(lambda x, weight: scattered(x, weight, ring, backend), axis_name=MODEL)(inputs, back)
    expected = np.einsum("dri,doi->ro", inputs, back)
    np.testing.assert_allclose(np.concatenate(list(summed), 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("further", ["nothing", "norm", "positions"])
@pytest.mark.parametrize("changes", [{}, PLUS_ONE], ids=["plain", "multiplier"])
def test_a_device_has_its_columns_of_the_embeddings(changes, further):
    model = tiny_model(**changes)
    embed = model.embed
    if further == "norm":
        norm = init_norm((), embed, model.config.norm, key=jax.random.key(5), dtype=jnp.float32)
        model = dataclasses.replace(model, embedding_norm=norm)
    if further == "positions":
        weight = hax.random.normal(jax.random.key(6), (Axis("learnt", ROWS), embed))
        table = Linear(weight=weight, bias=None, num_in=1, backend=model.embeddings.backend)
        model = dataclasses.replace(model, position_embeddings=table)
    positions = hax.arange(Axis(POSITION, ROWS), dtype=jnp.int32)
    tokens = positions * (model.config.vocab_size // ROWS)
    expected = model._embed(tokens, positions, None).array

    def of_device(rows: jax.Array) -> jax.Array:
        weight = NamedArray(rows, (Axis("vocab", rows.shape[0]), embed))
        own = dataclasses.replace(
            model, embeddings=dataclasses.replace(model.embeddings, weight=weight), shard_axis=AXIS
        )
        return own._embed(tokens, positions, None, AXIS).array

    size = Vocabulary(model.config.vocab_size, AXIS).padded_size
    table = jnp.pad(model.embeddings.weight.array, ((0, size - model.config.vocab_size), (0, 0)))
    found = jax.vmap(of_device, axis_name=MODEL)(table.reshape(PARTS, -1, embed.size))
    np.testing.assert_allclose(np.concatenate(list(found), 1), expected, rtol=1e-6, atol=1e-6)


def test_a_device_has_its_columns_of_a_sum():
    values = jax.random.normal(jax.random.key(0), (4, 5, 8))
    found = jax.vmap(lambda own: ShardAxis(MODEL, 4).own_sum(own, 1), axis_name=MODEL)(values)
    np.testing.assert_allclose(np.concatenate(list(found), 1), np.sum(values, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ShardAxis().own_sum(values[0], 1), values[0])


def shifts(by: int):
    """`ShardAxis.shifted` by each of two rings of four devices."""
    mesh = AbstractMesh((2, 4), (DATA, MODEL))
    spec = PartitionSpec((DATA, MODEL))
    shifted = functools.partial(ShardAxis(MODEL, 4).shifted, by=by)
    function = jax.shard_map(shifted, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(function).trace(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, spec)))


@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_is_a_permute_on_a_tpu_and_a_gather_of_one_ring_on_a_cpu(by):
    """Rings may take different numbers of steps, and a CPU's permute is one rendezvous of the devices of all."""
    values = jnp.arange(4)
    found = jax.vmap(lambda own: ShardAxis(MODEL, 4).shifted(own, by), axis_name=MODEL)(values)
    np.testing.assert_array_equal(found, np.roll(values, by))
    on_tpu, on_cpu = (shifts(by).lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cpu"))
    pairs = re.findall(r"source_target_pairs = dense<(.*?)> :", on_tpu)
    assert [json.loads(each) for each in pairs] == [
        [[ring + i, ring + (i + by) % 4] for ring in (0, 4) for i in range(4)]
    ]
    assert "all_gather" not in on_tpu
    assert "all_gather" in on_cpu and "collective_permute" not in on_cpu


class Apart(Ring):
    """The same in `numerics: batch_invariant`."""

    rows_apart = True


@pytest.mark.parametrize(
    "changes, axis, backend",
    [
        ({}, AXIS, Apart()),
        ({}, ShardAxis(), Ring()),
        ({}, AXIS, XlaBackend()),
        (EXPERTS, AXIS, Ring()),
        (BOTH_NORMS, AXIS, Ring()),
    ],
    ids=["batch_invariant", "one device", "backend", "experts", "norms of results"],
)
def test_there_is_no_ring(changes, axis, backend):
    assert ring_of(tiny_model(**changes).config, backend, axis, ROWS, jnp.dtype(jnp.float32)) == ShardAxis()


def test_small_transfers_are_not_worth_it(monkeypatch):
    monkeypatch.setattr(Ring, "ring_bytes", 2**18)
    axis = ShardAxis(MODEL, 4)

    def has_ring(rows: int, width: int) -> bool:
        config = dataclasses.replace(tiny_model().config, hidden_size=width)
        return ring_of(config, Ring(), axis, rows, jnp.dtype(jnp.bfloat16)) == axis

    shapes = [(64, 4096), (128, 4096), (256, 4096), (256, 4096 + 512), (512, 8192), (2**15, 32)]
    assert [shape for shape in shapes if has_ring(*shape)] == [(128, 4096), (256, 4096), (512, 8192)]
