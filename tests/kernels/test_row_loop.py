"""`one_by_one` gives a row the same bits, however many rows there are and wherever it stands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels.cpu.backend import CpuBackend
from levanter_infer.kernels.loops import one_by_one
from tests.tiers import nightly_but

pytestmark = pytest.mark.usefixtures("optimized")  # as users compile
WIDTHS = (37, 5376)
"""For sums over the larger one XLA would call a library."""


def norm(x):
    return [x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * 1.1 + x]


def gate(x):
    return [jax.nn.gelu(x, approximate=True) * jax.nn.sigmoid(x), jnp.argmax(x, axis=-1)]


def softmax(x):
    return [jax.nn.softmax(x), jnp.cumsum(jnp.exp(-jnp.abs(x)), axis=-1)]


@functools.cache
def compiled(compute, count: int, width: int):
    types = jax.ShapeDtypeStruct((count, width), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    lowered = jax.jit(lambda x, num: one_by_one(compute, num, x)).lower(*types)
    return lowered.compile(compiler_options=dict(CpuBackend(is_apart=True, uses_vectors=False).compiler_options))


@pytest.mark.parametrize("width", nightly_but([37], WIDTHS))
@pytest.mark.parametrize("compute", [norm, gate, softmax])
def test_bits_of_a_row_do_not_depend_on_the_others(compute, width):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((67, width)).astype(np.float32)
    alone = [
        np.concatenate(parts)
        for parts in zip(*(compiled(compute, 1, width)(row[None], 1) for row in rows), strict=True)
    ]
    for count in (2, 3, 4, 5, 8, 13, 31, 64, 67):
        for _ in range(3):
            order = rng.permutation(67)[:count]
            for found, own in zip(compiled(compute, count, width)(rows[order], count), alone, strict=True):
                assert np.asarray(found).tobytes() == own[order].tobytes(), count


def test_no_library_computes_a_wide_row():
    assert "__ynn" not in compiled(softmax, 4, WIDTHS[1]).as_text()


def test_rows_that_do_not_count_are_zeros():
    rows = np.random.default_rng(0).standard_normal((13, WIDTHS[0])).astype(np.float32)
    for num in (0, 1, 4, 7, 13):
        (found,) = compiled(norm, 13, WIDTHS[0])(rows, num)
        (whole,) = compiled(norm, 13, WIDTHS[0])(rows, 13)
        assert not np.any(found[num:])
        np.testing.assert_array_equal(found[:num], whole[:num])
