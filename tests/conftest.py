"""Strict JAX for every test: implicit dtype and rank promotion are errors."""

import jax
import pytest


def pytest_configure(config):
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def getkey():
    """A source of fresh, reproducible keys: `key = getkey()`."""
    count = 0

    def get():
        nonlocal count
        count += 1
        return jax.random.fold_in(jax.random.key(20260), count)

    return get
