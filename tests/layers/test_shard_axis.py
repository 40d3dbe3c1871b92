"""Values of tokens of which every device has a part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.axes import MODEL
from levanter_infer.layers.shard_axis import ShardAxis, Vocabulary
from tests.tiers import nightly_but


@pytest.mark.parametrize("parts", nightly_but([4], [2, 4]))
@pytest.mark.parametrize("size, stride, count", [(120, 8, 16), (257, 17, 16), (120, 1, 5), (64, 40, 3), (31, 2, 16)])
def test_tokens_that_are_a_stride_apart_have_the_values_of_any(parts, size, stride, count):
    """Some are in no part, and some begin behind it."""
    vocab = Vocabulary(size, ShardAxis(MODEL, parts))
    rng = np.random.default_rng(parts)
    values = jnp.asarray(rng.normal(size=(parts, 9, vocab.part_size)), jnp.float32).at[:, 3].set(jnp.inf)
    ids = rng.integers(0, size, 9)[:, None] + stride * np.arange(count)[None, :]

    def at(stride):
        of_part = lambda part: vocab.at(part, jnp.asarray(ids, jnp.int32), -jnp.inf, stride)  # noqa: E731
        return np.asarray(jax.vmap(of_part, axis_name=MODEL)(values))

    whole = np.concatenate(list(np.asarray(values)), axis=1)
    np.testing.assert_array_equal(at(stride), at(None))
    expected = np.where(ids < size, np.take_along_axis(whole, np.minimum(ids, whole.shape[1] - 1), axis=1), -np.inf)
    np.testing.assert_array_equal(at(stride)[0], expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(6, 1024), (6, 72), (2, 3, 512), (512,)], ids=["wide", "narrow", "3 axes", "vector"])
def test_sums_in_order_add_the_parts_one_after_the_other_in_float32(shape, dtype):
    parts = 4
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.normal(size=(parts, *shape)) * 10.0 ** rng.integers(-4, 5, (parts, *shape)), dtype)
    summed = jax.vmap(ShardAxis(MODEL, parts, in_order=True).sum, axis_name=MODEL)(values)
    expected = np.zeros(shape, np.float32)
    for part in np.asarray(values, np.float32):
        expected = expected + part
    assert summed.dtype == dtype
    for device in summed:
        np.testing.assert_array_equal(device, jnp.asarray(expected).astype(dtype))
