"""Strict JAX for every test: implicit dtype and rank promotion are errors.

Compilation is most of the time that these tests take, so they skip XLA's expensive optimisations, which change speed
and not meaning. A test that reads a compiled program asks for the real one with the fixture `optimized`.
"""

import jax
import pytest


def pytest_configure(config):
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def optimized():
    """Compile as users do."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def getkey():
    """A source of fresh, reproducible keys: `key = getkey()`."""
    count = 0

    def get():
        nonlocal count
        count += 1
        return jax.random.fold_in(jax.random.key(20260), count)

    return get
