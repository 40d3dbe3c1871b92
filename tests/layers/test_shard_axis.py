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
