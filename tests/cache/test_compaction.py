"""The form of TPUs beside the one of other devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.cache import by_pairs
from levanter_infer.cache.compaction import closed_up, closed_up_by_shifts, flags_at, flags_by_matmul


@pytest.mark.parametrize("size", [1, 2, 127, 300, 4097])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95, 1.0])
def test_what_is_kept_closes_up_in_its_order(size, share):
    rng = np.random.default_rng(size)
    values, keep = jnp.asarray(rng.permutation(size), jnp.int32), jnp.asarray(rng.random(size) < share)
    kept = np.asarray(values)[np.asarray(keep)]
    for close in (closed_up, jax.jit(closed_up_by_shifts)):
        np.testing.assert_array_equal(close(values, keep)[: kept.size], kept)


@pytest.mark.parametrize("size, count", [(1, 3), (128, 128), (300, 5000), (5000, 300)])
def test_flags_are_read_at_indices(size, count):
    rng = np.random.default_rng(count)
    flags, index = jnp.asarray(rng.random(size) < 0.3), jnp.asarray(rng.integers(0, size, count), jnp.int32)
    for read in (flags_at, jax.jit(flags_by_matmul)):
        np.testing.assert_array_equal(read(flags, index), np.asarray(flags)[np.asarray(index)])


def test_a_program_that_may_run_on_a_tpu_has_both_forms():
    flags, index = jnp.asarray([True, False, True]), jnp.asarray([2, 1, 0], jnp.int32)
    with by_pairs.traced(True):
        text = jax.jit(lambda: closed_up(index, flags_at(flags, index))).lower().as_text()
        assert closed_up(index, flags_at(flags, index))[:2].tolist() == [2, 0]
    assert "dot_general" not in text  # lowered for this device alone
