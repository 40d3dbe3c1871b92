"""Matmuls of the `gpu` implementation, in Pallas' interpreter or, where there is a GPU, on it."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels.call import LinearCall
from levanter_infer.kernels.gpu.linear import gated, norm_rows, normed, shared_memory, stacked_matmul, tile_of
from tests.tiers import nightly_but

LAYERS, LAYER = 3, 1


@functools.cache
def matmul():
    def run(x, weights, layer, num_rows=None):
        call = LinearCall(x, weights, [weight.shape[1] for weight in weights], layer, num_rows)
        return stacked_matmul(call, interpret=jax.default_backend() != "gpu")

    return jax.jit(run)


def problem(rows, ins, outs, dtype="bfloat16"):
    rng = np.random.default_rng(rows * ins)
    x = jnp.asarray(rng.standard_normal((rows, ins)), dtype)
    weights = [jnp.asarray(rng.standard_normal((LAYERS, out, ins)), dtype) for out in outs]
    # Nothing is read of other layers.
    weights = [jnp.full_like(weight, jnp.nan).at[LAYER].set(weight[LAYER]) for weight in weights]
    return x, weights


@pytest.mark.parametrize("dtype", nightly_but(["bfloat16"], ["bfloat16", "float16"]))
@pytest.mark.parametrize("rows, ins, outs", [(1, 128, (32, 40, 7)), (5, 72, (33,)), (70, 136, (130, 20))])
def test_matmul_equal_numpy(rows, ins, outs, dtype):
    x, weights = problem(rows, ins, outs, dtype)
    for y, weight in zip(matmul()(x, weights, jnp.int32(LAYER)), weights, strict=True):
        exact = np.asarray(x, np.float64) @ np.asarray(weight[LAYER], np.float64).T
        np.testing.assert_allclose(y, exact, atol=1e-4, rtol=1e-5)


def test_weights_of_int8_have_the_bits_of_floats_and_a_factor():
    """The factor is a power of two, which rounds nothing: alone, with a residual and as a gated pair."""
    rng = np.random.default_rng(0)
    x, _ = problem(40, 72, (33,))
    codes = [jnp.asarray(rng.integers(-127, 128, (LAYERS, 33, 72)), jnp.int8) for _ in range(2)]
    scales = [jnp.asarray(2.0 ** rng.integers(-9, -4, (LAYERS, 33)), jnp.float32) for _ in range(2)]
    meant = [
        (code.astype(jnp.float32) * scale[..., None]).astype(x.dtype) for code, scale in zip(codes, scales, strict=True)
    ]
    residual = jnp.asarray(rng.standard_normal((40, 33)), x.dtype)
    call = LinearCall(x, codes, [33, 33], jnp.int32(LAYER), scales=scales, dtype=x.dtype)
    for other in (
        call,
        dataclasses.replace(call, is_gated_pair=True),
        dataclasses.replace(call, weights=codes[:1], scales=scales[:1], num_outs=[33], residual=residual),
    ):
        weights = meant[: len(other.weights)]
        for ours, floats in zip(
            fused(other), fused(dataclasses.replace(other, weights=weights, scales=())), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(floats, np.float32))


def test_tiles_of_rows_that_do_not_count_give_zeros_and_may_hold_nan():
    x, weights = problem(130, 64, (20,))
    whole = matmul()(x, weights, jnp.int32(LAYER))[0]
    some = matmul()(x.at[64:].set(jnp.nan), weights, jnp.int32(LAYER), jnp.int32(64))[0]
    np.testing.assert_array_equal(some[:64], whole[:64])
    assert not some[64:].any()


def fused(call: LinearCall):
    return stacked_matmul(call, interpret=jax.default_backend() != "gpu")


def narrow(values, dtype):
    """As the kernels and XLA round what they multiply."""
    return np.asarray(jnp.asarray(values, jnp.float32).astype(dtype), np.float64)


@pytest.mark.parametrize("dtype", nightly_but(["bfloat16"], ["bfloat16", "float16"]))
@pytest.mark.parametrize("rows", [3, 16, 40])
def test_norm_and_residual_equal_numpy(rows, dtype):
    x, (weight,) = problem(rows, 72, (33,), dtype)
    rng = np.random.default_rng(1)
    norm = jnp.asarray(rng.standard_normal((LAYERS, 72)), dtype)
    residual = jnp.asarray(rng.standard_normal((rows, 33)), dtype)
    layer, wide, matrix = jnp.int32(LAYER), np.asarray(x, np.float64), np.asarray(weight[LAYER], np.float64)
    tolerance = dict(atol=0.15, rtol=0.02) if dtype == "bfloat16" else dict(atol=0.03, rtol=3e-3)

    (y,) = fused(LinearCall(x, [weight], [33], layer, norm=(norm, 0.5), residual=residual))
    scale = 1 / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 0.5)
    exact = narrow(wide * scale * np.asarray(norm[LAYER], np.float64), dtype) @ matrix.T
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact + np.asarray(residual, np.float64), **tolerance)

    (y,) = fused(LinearCall(x, [weight], [33], layer, residual=residual, dtype=x.dtype))
    exact = wide @ matrix.T + np.asarray(residual, np.float64)
    assert y.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, **tolerance)


@pytest.mark.parametrize("rows", nightly_but([40], [3, 40, 70]))
def test_a_gated_pair_has_the_bits_of_two_matmuls_and_a_gate(rows):
    x, weights = problem(rows, 72, (33, 33))
    norm = jnp.asarray(np.random.default_rng(3).standard_normal((LAYERS, 72)), x.dtype)
    call = LinearCall(x, weights, [33, 33], jnp.int32(LAYER), norm=(norm, 0.5), dtype=x.dtype)
    gate, up = fused(call)
    (y,) = fused(dataclasses.replace(call, is_gated_pair=True))
    assert y.dtype == x.dtype
    # A GPU's exponential is Triton's in one and XLA's in the other.
    tolerance = 1e-2 if jax.default_backend() == "gpu" else 0
    np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(gated(up, gate), np.float32), rtol=tolerance)


def test_a_norm_of_its_own_equals_jnp():
    x, _ = problem(40, 72, (1,))
    weights = jnp.asarray(np.random.default_rng(2).standard_normal((LAYERS, 72)), x.dtype)
    found = norm_rows(x, weights, 1e-5, jnp.int32(LAYER), interpret=jax.default_backend() != "gpu")
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(normed(x, weights[LAYER], 1e-5), np.float32), rtol=1e-2
    )


@pytest.mark.parametrize("capability, bytes_", [(8.0, 163 << 10), (8.6, 99 << 10), (9.0, 227 << 10), (12.0, 99 << 10)])
def test_tiles_fit_into_shared_memory_and_divide_the_inputs(capability, bytes_):
    assert shared_memory(capability) == bytes_
    for rows, ins, outs in itertools.product((1, 17, 64, 100, 2048), (40, 576, 2880, 4096, 14336), (1, 4096, 28672)):
        tile = tile_of(rows, ins, outs, bytes_)
        assert 2 * tile.stages * (tile.rows + tile.outs) * tile.ins <= bytes_
        assert tile.stages >= 2 and (ins % tile.ins == 0 or tile.ins == 64)
        assert tile.rows <= max(16, 2 * rows)


def test_few_programs_get_smaller_tiles():
    sides = [(tile.rows, tile.outs) for tile in (tile_of(256, 4096, outs, 227 << 10) for outs in (4096, 6144, 28672))]
    assert sides == [(64, 128), (128, 128), (128, 256)]


def test_float32_is_refused():
    x, weights = problem(2, 64, (20,), "float32")
    with pytest.raises(ValueError, match='bfloat16 or float16, not float32 times float32; use "xla"'):
        matmul()(x, weights, jnp.int32(LAYER))
