"""The C++ call between the projections and the attention of new tokens: against NumPy and against the XLA forms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels.call import KvWrite, Rotation
from levanter_infer.kernels.cpu import bindings as cpu
from tests.kernels.test_cpu import built, each_isa

LAYERS, PAGES, PAGE_SIZE, Q_HEADS, KV_HEADS = 2, 3, 4, 6, 2
NORM_LAYER = np.int32(0)
"""Another one than that of the pool: layers with and without a window have pools of their own, and norms together."""
NONE = PAGES * PAGE_SIZE
EPS = (1e-5, 1e-3)


def problem(tokens, size, dtype="float32", with_norms=True, seed=0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    pool = normal(LAYERS, PAGES, PAGE_SIZE, 2 * KV_HEADS, size).astype(dtype)
    angles = rng.uniform(-4, 4, (tokens, size // 2))
    return dict(
        q=normal(tokens, Q_HEADS, size),
        k=normal(tokens, KV_HEADS, size),
        v=normal(tokens, KV_HEADS, size),
        pool=jax.lax.bitcast_convert_type(pool, jnp.uint16) if dtype == "bfloat16" else pool,
        dests=jnp.asarray(rng.permutation(NONE)[:tokens], jnp.int32),
        cos=jnp.asarray(np.cos(angles), jnp.float32),
        sin=jnp.asarray(np.sin(angles), jnp.float32),
        norms=tuple((normal(LAYERS, size).astype(dtype), eps) for eps in EPS) if with_norms else None,
    )


def rotate_and_store(layer, isa=None, *, norms, **arrays):
    eps = None if norms is None else tuple(eps for _, eps in norms)
    weights = None if norms is None else tuple(weight for weight, _ in norms)
    return _compiled(isa, eps)(jnp.int32(layer), weights, arrays)


@functools.cache
def _compiled(isa, eps):
    def call(layer, weights, arrays):
        norms = None if eps is None else tuple(zip(weights, eps, strict=True))
        return place_tokens(layer, norms, isa, **arrays)

    return jax.jit(call)


def place_tokens(layer, norms, isa=None, *, q, k, v, pool, dests, cos, sin):
    rotation = Rotation(cos, sin, norms, NORM_LAYER)
    write = KvWrite(k, v, layer, dests, dests // PAGE_SIZE, dests % PAGE_SIZE, pool.dtype, q=q, rotation=rotation)
    return cpu.place_tokens(pool, write, isa_name=isa)


def floats(stored):
    return np.asarray(
        jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored, np.float64
    )


def rotated(x, cos, sin, norm):
    """In float64."""
    x, half = np.asarray(x, np.float64), x.shape[-1] // 2
    if norm is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm[1]) * np.asarray(norm[0][NORM_LAYER], np.float64)
    cos, sin = np.asarray(cos, np.float64)[:, None], np.asarray(sin, np.float64)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@each_isa
@pytest.mark.parametrize("size", [16, 20, 64])
@pytest.mark.parametrize(("dtype", "with_norms"), [("float32", True), ("bfloat16", False), ("bfloat16", True)])
def test_rotated_queries_and_stored_keys_and_values_equal_numpy(isa, size, dtype, with_norms):
    given = problem(11, size, dtype, with_norms)
    norms = given["norms"] or (None, None)
    q, pool = rotate_and_store(1, isa, **given)
    expected = rotated(given["q"], given["cos"], given["sin"], norms[0])
    np.testing.assert_allclose(np.asarray(q), expected, rtol=2e-6, atol=2e-6)
    stored = floats(given["pool"]).reshape(LAYERS, NONE, KV_HEADS, 2, size)
    keys, values = rotated(given["k"], given["cos"], given["sin"], norms[1]), np.asarray(given["v"])
    stored[1, np.asarray(given["dests"])] = np.stack([keys, values], axis=2)
    step = 2**-8 if dtype == "bfloat16" else 2e-6  # half of the last bit that is stored
    np.testing.assert_allclose(floats(pool).reshape(stored.shape), stored, rtol=1.01 * step, atol=2e-6)


@built
def test_values_are_rounded_as_jax_rounds():
    given = problem(4, 16, "bfloat16", with_norms=False)
    odd = [1.00390625, 1.01171875, 65504.0, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, -np.nan, 1e-40, -0.0, 0.0]
    given["v"] = given["v"].at[0, 0, : len(odd)].set(jnp.asarray(odd, jnp.float32))
    _, pool = rotate_and_store(0, **given)
    stored = jax.lax.bitcast_convert_type(pool, jnp.bfloat16).reshape(LAYERS, NONE, KV_HEADS, 2, 16)
    found, expected = stored[0, given["dests"]][:, :, 1], given["v"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    assert np.signbit(np.asarray(found[0, 0], np.float32)[10])


@built
@pytest.mark.parametrize("size", [16, 20])
def test_a_token_has_the_same_bits_in_any_batch(size):
    given = problem(11, size)
    q, pool = rotate_and_store(1, **given)
    for some in ([0], [10], [3, 1], [9, 8, 7, 6, 5, 4, 3, 2, 1]):
        picked = {name: given[name][jnp.array(some)] for name in ("q", "k", "v", "cos", "sin", "dests")}
        q_alone, pool_alone = rotate_and_store(1, **{**given, **picked})
        np.testing.assert_array_equal(np.asarray(q_alone), np.asarray(q)[some])
        at = np.asarray(given["dests"])[some]
        pages = [np.asarray(p).reshape(LAYERS, NONE, -1)[1, at] for p in (pool_alone, pool)]
        np.testing.assert_array_equal(*pages)


@built
def test_tokens_that_are_not_stored_change_nothing_and_nan_stays_in_its_token():
    given = problem(5, 16)
    given["dests"] = jnp.array([NONE, 2, 2**31 - 1, 7, -1], jnp.int32)
    given["k"] = given["k"].at[1].set(jnp.nan)
    q, pool = rotate_and_store(0, **given)
    before, after = (np.asarray(p).reshape(LAYERS, NONE, KV_HEADS, 2, 16) for p in (given["pool"], pool))
    untouched = [dest for dest in range(NONE) if dest not in (2, 7)]
    np.testing.assert_array_equal(after[0, untouched], before[0, untouched])
    np.testing.assert_array_equal(after[1], before[1])
    assert np.isnan(after[0, 2, :, 0]).all() and np.isfinite(after[0, 2, :, 1]).all()
    assert np.isfinite(after[0, 7]).all() and np.isfinite(np.asarray(q)).all()


@built
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(k=jnp.zeros((4, KV_HEADS, 16))), "shapes do not fit"),
        (dict(cos=jnp.zeros((5, 16))), "shapes do not fit"),
        (dict(pool=jnp.zeros((LAYERS, PAGES, PAGE_SIZE, 2 * KV_HEADS, 16), jnp.float16)), "neither bf16 nor f32"),
        (dict(norms=((jnp.ones((LAYERS, 8)), 0.0), (jnp.ones((LAYERS, 16)), 0.0))), "norms do not fit"),
        (dict(layer=LAYERS), "no such layer"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    given = {"layer": 0, **problem(5, 16, with_norms=False), **changes}
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(rotate_and_store(given.pop("layer"), **given))


@built
def test_the_pool_is_updated_in_place(optimized):
    given = problem(5, 16, with_norms=False)

    def steps(pool, q):
        def layer(i, carry):
            pool, q = carry
            q, pool = place_tokens(i, None, pool=pool, **{**rest, "q": q})
            return pool, q

        return jax.lax.fori_loop(0, LAYERS, layer, (pool, q))

    pool, rest = given.pop("pool"), {name: given[name] for name in ("k", "v", "cos", "sin", "dests")}
    program = jax.jit(steps, donate_argnums=0).lower(pool, given["q"]).compile().as_text()
    assert program is not None
    shape = f"f32[{','.join(map(str, pool.shape))}]"
    assert not [line for line in program.splitlines() if " copy(" in line and shape in line.split(" copy(")[0]]
