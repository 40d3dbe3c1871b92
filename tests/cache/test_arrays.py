"""Reading tables by index."""

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.cache.arrays import gather, gather_together


def test_columns_that_are_gathered_together_have_the_bits_of_each_alone():
    floats = [1.5, -0.0, np.nan, np.inf, 3e-45, -np.inf]
    columns = {
        "floats": jnp.asarray(floats, jnp.float32),
        "signed": jnp.asarray([-(2**31), 2**31 - 1, 0, 1, -1, 7], jnp.int32),
        "unsigned": jnp.asarray([2**32 - 1, 0, 1, 2, 3, 4], jnp.uint32),
    }
    fills = {"floats": 0.5, "signed": -3, "unsigned": 9}
    index = jnp.asarray([5, 0, 6, 2, 1, 2, 100, 4, 3], jnp.int32)  # 6 and 100 are absent
    found = jax.jit(lambda columns, index: gather_together(columns, index, fills))(columns, index)
    assert found.keys() == columns.keys()
    for name, column in columns.items():
        alone = gather(column, index, fills[name])
        assert found[name].dtype == column.dtype
        np.testing.assert_array_equal(np.asarray(found[name]).view(np.int32), np.asarray(alone).view(np.int32))
    assert np.asarray(found["floats"])[[2, 6]].tolist() == [0.5, 0.5]
