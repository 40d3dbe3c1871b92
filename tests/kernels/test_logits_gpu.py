"""Statistics of logits of the `gpu` backend, in Pallas' interpreter or, where there is a GPU, on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels.gpu.logits import logit_stats


def stats(logits):
    return [np.asarray(each) for each in logit_stats(logits, interpret=jax.default_backend() != "gpu")]


@pytest.mark.parametrize("vocab", [7, 4096, 10000])
def test_statistics_equal_numpy(vocab):
    logits = np.random.default_rng(vocab).normal(scale=4, size=(5, vocab)).astype(np.float32)
    logits[1, vocab // 2 :] = -np.inf
    logits[2] -= 1000
    logits[3, [vocab // 3, vocab - 1]] = 50  # the first of equal ones
    logits[4, :] = 2
    peak, total, best = stats(jnp.asarray(logits))
    np.testing.assert_array_equal(peak, logits.max(axis=1))
    np.testing.assert_array_equal(best, logits.argmax(axis=1))
    exact = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True)).sum(axis=1)
    np.testing.assert_allclose(total, exact, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, None], ids=["nan", "inf", "nothing"])
def test_rows_that_are_not_finite_have_no_sum(value):
    logits = np.zeros((3, 5000), np.float32)
    if value is None:
        logits[1] = -np.inf
    else:
        logits[1, 4500] = value
    _, total, best = stats(jnp.asarray(logits))
    assert total[1] == 0 if value is None else np.isnan(total[1])
    np.testing.assert_allclose(np.asarray(total)[[0, 2]], 5000)
    assert (0 <= best).all() and (best < 5000).all()
