"""Rows of the residual stream sharded over devices, which are emulated by `vmap` here; tests/engine/test_mesh.py has
devices."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh

from levanter_infer.axes import MODEL, POSITION
from levanter_infer.kernels.xla.backend import XlaBackend
from levanter_infer.layers.attention import AttentionInputs
from levanter_infer.layers.layout import MESH_AXES, Layout
from levanter_infer.layers.shard_axis import ShardAxis
from levanter_infer.models.decoder import PLAIN
from levanter_infer.models.mixing import mixer_of
from levanter_infer.models.row_shards import row_shards, with_rows, with_scattered_sums
from tests.tiny_models import tiny_model

PARTS, ROWS = 2, 6
AXIS = ShardAxis(MODEL, PARTS)
BOTH_NORMS = {"model_type": "gemma2", "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"}
SHARED_EXPERT = {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
                 "moe_intermediate_size": 24, "first_k_dense_replace": 0, "attention_bias": True}  # fmt: skip
SHARED_GATE = {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
               "shared_expert_intermediate_size": 24}  # fmt: skip


class Shards(XlaBackend):
    """Rows are sharded from one of a device on."""

    row_shard = 1


def parts_of(leaf: NamedArray) -> jax.Array:
    """The parts of a weight on each device, with an axis of devices."""
    places = [i for i, axis in enumerate(leaf.axes) if MESH_AXES.get(axis.name) == MODEL]
    split = np.split(np.asarray(leaf.array), PARTS, places[0]) if places else [leaf.array] * PARTS
    return jnp.stack(split)


def layer_on_devices(model, x: NamedArray, shards: ShardAxis) -> jax.Array:
    """The first layer of `x` on emulated devices, [device, row, embed]."""
    layout = Layout.of(AbstractMesh((PARTS,), (MODEL,)), model.config)
    (stack,), block = model.shard_as(layout).stacks, model.config.blocks[0]
    leaves, structure = jax.tree.flatten(stack, is_leaf=lambda leaf: isinstance(leaf, NamedArray))

    def of_device(arrays, x: jax.Array) -> jax.Array:
        sizes = [tuple(a.resize(n) for a, n in zip(leaf.axes, array.shape, strict=True))
                 for leaf, array in zip(leaves, arrays, strict=True)]  # fmt: skip
        own = [NamedArray(*pair) for pair in zip(arrays, sizes, strict=True)]
        layer = jax.tree.unflatten(structure, own).at(jnp.int32(0), jnp.int32(ROWS))
        layer = with_scattered_sums(layer, shards)
        attend = functools.partial(layer.attention.dense, inputs=AttentionInputs(block.mixer, None, PLAIN))
        mix = mixer_of(block, [attend], layer.some_map)
        inner = NamedArray(x, (Axis(POSITION, x.shape[0]), model.embed))
        result, _ = layer(with_rows(shards.own(x), inner), block, mix, shards=shards)
        return shards.all_gather(result.array, 0)

    compute = jax.vmap(of_device, in_axes=(0, None), axis_name=MODEL)
    return jax.jit(compute)([parts_of(leaf) for leaf in leaves], x.array)


@pytest.mark.parametrize("changes", [{}, BOTH_NORMS, SHARED_EXPERT], ids=["before", "both", "moe"])
def test_a_layer_with_sharded_rows_gives_the_same(changes):
    model = tiny_model(num_hidden_layers=1, **changes)
    x = hax.random.normal(jax.random.key(1), (Axis(POSITION, ROWS), model.embed))
    config, backend = model.config, Shards()
    shards = row_shards(config, backend, AXIS, ROWS)
    assert shards == AXIS
    everywhere = layer_on_devices(model, x, ShardAxis())
    sharded = layer_on_devices(model, x, shards)
    assert not np.allclose(everywhere[0], x.array, atol=0.1)
    for device in sharded:
        np.testing.assert_allclose(device, everywhere[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "changes, rows, backend, why",
    [
        ({}, 7, Shards(), "rows that devices cannot share evenly"),
        ({}, ROWS, XlaBackend(), "a backend that does not want it"),
        (SHARED_GATE, ROWS, Shards(), "a gate of all rows for a result of some"),
    ],
    ids=["uneven", "backend", "gate"],
)
def test_rows_are_not_sharded(changes, rows, backend, why):
    model = tiny_model(**changes)
    assert row_shards(model.config, backend, AXIS, rows) == ShardAxis(), why


def test_few_rows_of_a_device_are_not_worth_it(monkeypatch):
    monkeypatch.setattr(Shards, "row_shard", 64)
    config = tiny_model().config
    found = {rows: row_shards(config, Shards(), AXIS, rows).parts for rows in (64, 120, 128, 136, 160, 512)}
    assert found == {64: 1, 120: 1, 128: 2, 136: 1, 160: 2, 512: 2}
