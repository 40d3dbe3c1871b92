"""Pages of 8-bit integers, with a scale for each head of each token."""

import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels import int8
from levanter_infer.kernels.tpu.pool import TpuPool
from tests.kernels.ragged import Sizes, attend, dense_attention, make_ragged
from tests.tiers import nightly_but


def test_a_number_is_off_by_half_a_scale_at_most():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 64)).astype(np.float32) * 10.0 ** rng.integers(-2, 4, (50, 1))
    x[0] = 0
    integers, codes = int8.encode(jnp.asarray(x))
    scale = np.asarray(int8.scale_of(codes))
    largest = np.abs(x).max(axis=1, keepdims=True)
    numbers = int8.decode(integers, codes)
    assert (np.abs(numbers - x) <= scale * 0.5001).all()
    assert (scale[1:] <= largest[1:] * (2 ** (1 / 8) / 127 * 1.0001)).all()


def test_numbers_that_are_not_finite_are_stored_as_0_and_large_ones_stay_finite():
    numbers = np.asarray(int8.decode(*int8.encode(jnp.asarray([[jnp.nan, 1.0, -jnp.inf], [1e30, -1.0, 0.0]]))))
    assert np.isfinite(numbers).all() and numbers[0].tolist() == pytest.approx([0, 1, 0], abs=0.01)


@pytest.mark.parametrize("impl", nightly_but(["xla"], ["reference", "xla"]))
def test_attention_over_integers_equals_dense(impl):
    batch = make_ragged(Sizes(4, 2, 64, 16, tokens=40, rows=5, dtype="int8"), [(1, 100), (7, 40), (20, 90)])
    out = attend(**batch.arrays, scale=0.3, impl=impl)
    np.testing.assert_allclose(out, dense_attention(batch, scale=0.3), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="got head_dim 64, expected 65 as in q and one for the scale"):
        arrays = {**batch.arrays, "kv_pages": batch.arrays["kv_pages"][..., :64]}
        attend(**arrays, scale=0.3, impl=impl)


def test_more_heads_than_a_page_holds_scales_for_are_refused():
    with pytest.raises(
        ValueError, match="kv_heads=65 with int8 pages: a page holds the scales of 64 kv heads per device at most"
    ):
        TpuPool(65, 128, scaled=True)
