"""Linear maps: stored outputs first, float32 sums, bits."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter_infer.kernels.xla.backend import XlaBackend
from levanter_infer.kernels.xla.linear import to_bits
from levanter_infer.layers.linear import Linear

LAYERS, OUT, HEADS, EMBED = Axis("layers", 2), Axis("head_size", 6), Axis("kv_head", 3), Axis("embed", 8)


def _random(*axes: Axis, dtype=jnp.float32) -> hax.NamedArray:
    """Normal values; numpy's, because every new shape costs `jax.random` a compilation."""
    values = np.random.default_rng(len(axes)).normal(size=[axis.size for axis in axes])
    return hax.named(jnp.asarray(values, dtype), [axis.name for axis in axes])


def _layer(linear: Linear, index: int) -> Linear:
    return jax.tree.map(lambda a: a["layers", index], linear, is_leaf=lambda a: isinstance(a, hax.NamedArray))


def test_linear_stores_layers_then_outputs_then_inputs(getkey):
    linear = Linear.init((LAYERS,), (HEADS, OUT), (EMBED,), key=getkey(), dtype=jnp.float32, bias=True)
    assert [axis.name for axis in linear.weight.axes] == ["layers", "kv_head", "head_size", "embed"]
    assert linear.bias is not None and [axis.name for axis in linear.bias.axes] == ["layers", "kv_head", "head_size"]


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_linear_equals_numpy_at_any_row_count(rows):
    linear = _layer(Linear(weight=_random(LAYERS, EMBED, HEADS, OUT), bias=_random(LAYERS, EMBED), num_in=2), 1)
    assert linear.bias is not None
    x = _random(Axis("token", rows), HEADS, OUT)
    expected = np.einsum("thd,ehd->te", x.array, linear.weight.array) + np.asarray(linear.bias.array)
    got = linear(x)
    assert [axis.name for axis in got.axes] == ["token", "embed"]
    np.testing.assert_allclose(np.asarray(got.array), expected, rtol=1e-5, atol=1e-5)


class MergingBackend(XlaBackend):
    merges_ins = True


@pytest.mark.parametrize("lead", [(), (LAYERS,)], ids=["one", "stack"])
def test_input_axes_are_stored_as_one_where_a_backend_wants_it(lead):
    linear = Linear(weight=_random(*lead, EMBED, HEADS, OUT), bias=_random(*lead, EMBED), num_in=2)
    stored = linear.prepare(MergingBackend())
    assert [axis.name for axis in stored.weight.axes] == [*(axis.name for axis in lead), "embed", "kv_head"]
    assert stored.weight.array.shape[-1] == HEADS.size * OUT.size
    assert stored.ins == linear.ins and stored.outs == linear.outs and stored.dtype == linear.dtype
    x = _random(Axis("token", 5), HEADS, OUT)
    layer = jnp.int32(1) if lead else None
    got, expected = (each.at(layer, None)(x) for each in (stored, linear))
    assert got.axes == expected.axes and (got.array == expected.array).all()
    assert linear.prepare(XlaBackend()).weight.axes == linear.weight.axes
    again = linear.prepare(MergingBackend(), donate=True)
    assert linear.weight.array.is_deleted() and (again.weight.array == stored.weight.array).all()


def test_bf16_products_are_summed_in_float32(getkey):
    # Each of the 256 matmuls after the first is lost if the running sum is kept in bfloat16.
    weight = hax.ones((Axis("embed", 1), Axis("mlp", 257)), dtype=jnp.bfloat16)
    x = hax.named(jnp.full((4, 257), 1, jnp.bfloat16).at[:, 0].set(256), ("token", "mlp"))
    assert np.asarray(Linear(weight=weight, bias=None, num_in=1)(x).array, np.float32).tolist() == [[512.0]] * 4


def test_bits_give_the_same_bits():
    linear = Linear(weight=_random(OUT, EMBED, dtype=jnp.bfloat16), bias=None, num_in=1)
    x = _random(Axis("token", 5), EMBED, dtype=jnp.bfloat16)
    stored = Linear(weight=hax.NamedArray(to_bits(linear.weight.array), linear.weight.axes), bias=None, num_in=1)
    assert stored.weight.dtype == jnp.uint16
    assert (stored(x).array == linear(x).array).all()


def test_bits_share_the_memory_of_the_weights_and_outlive_them():
    weight = _random(OUT, EMBED, dtype=jnp.bfloat16)
    expected = np.array(weight.array).view(np.uint16)
    stored = to_bits(weight.array)
    assert stored.unsafe_buffer_pointer() == weight.array.unsafe_buffer_pointer()
    jax.jit(lambda a: a + 1, donate_argnums=0)(weight.array).block_until_ready()
    del weight
    assert (np.asarray(stored) == expected).all()


def test_float32_weights_stay_as_they_are():
    weight = _random(OUT, EMBED).array
    assert to_bits(weight) is weight


def test_rows_keep_their_bits_in_any_company():
    linear = Linear(weight=_random(OUT, EMBED, dtype=jnp.bfloat16), bias=None, num_in=1)
    x = _random(Axis("token", 12), EMBED, dtype=jnp.bfloat16)
    whole = np.asarray(linear(x).array)
    for rows in (1, 2, 5):
        assert (np.asarray(linear(x["token", :rows]).array) == whole[:rows]).all()
