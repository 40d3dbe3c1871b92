"""Norms, rotation and write of the `gpu` backend, in Pallas' interpreter or, where there is a GPU, on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels.call import KvWrite, Rotation
from levanter_infer.kernels.gpu.kv_write import rotate_and_write
from levanter_infer.kernels.registry import make_backend
from tests.tiers import nightly_but

LAYERS, LAYER, NORM_LAYER, PAGES, PAGE_SIZE = 3, 1, 2, 5, 4
TOKENS, QUERY_FACTOR = 7, 0.37


def arrays(q_heads: int, kv_heads: int, head_dim: int, dtype: str) -> dict:
    rng = np.random.default_rng(head_dim)

    def normal(*shape, of=dtype):
        return jnp.asarray(rng.standard_normal(shape), of)

    angle = rng.uniform(0, 6, (TOKENS, head_dim // 2))
    dests = np.array([3, 4, 19, PAGES * PAGE_SIZE, 8, 9, PAGES * PAGE_SIZE + 3], np.int32)  # two are not stored
    return dict(
        pool=normal(LAYERS, PAGES, PAGE_SIZE, 2 * kv_heads, head_dim),
        q=normal(TOKENS, q_heads, head_dim),
        k=normal(TOKENS, kv_heads, head_dim),
        v=normal(TOKENS, kv_heads, head_dim),
        cos=jnp.asarray(np.cos(angle), jnp.float32),
        sin=jnp.asarray(np.sin(angle), jnp.float32),
        weights=(normal(LAYERS, head_dim, of="float32"), normal(LAYERS, head_dim, of="float32")),
        dests=jnp.asarray(dests),
    )


@functools.partial(jax.jit, static_argnames="has_norms", donate_argnames="pool")
def run(*, pool, q, k, v, cos, sin, weights, dests, has_norms):
    norms = tuple((weight, eps) for weight, eps in zip(weights, (1e-6, 0.5), strict=True)) if has_norms else None
    rotation = Rotation(cos, sin, norms, jnp.int32(NORM_LAYER) if has_norms else None, QUERY_FACTOR)
    layer, page, offset = jnp.int32(LAYER), dests // PAGE_SIZE, dests % PAGE_SIZE
    write = KvWrite(k, v, layer, dests, page, offset, pool.dtype, q=q, rotation=rotation)
    return rotate_and_write(pool, write, interpret=jax.default_backend() != "gpu")


def expected(given: dict, has_norms: bool) -> tuple[np.ndarray, np.ndarray]:
    def placed(side, weight, eps):
        x = np.asarray(side, np.float64)
        if has_norms:
            x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * np.asarray(weight[NORM_LAYER], np.float64)
        first, second = np.split(x, 2, axis=-1)
        cos, sin = (np.asarray(given[name], np.float64)[:, None] for name in ("cos", "sin"))
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    pool = np.asarray(given["pool"], np.float64).copy()
    q, k = (placed(given[n], w, eps) for n, w, eps in zip("qk", given["weights"], (1e-6, 0.5), strict=True))
    for token, dest in enumerate(np.asarray(given["dests"])):
        if dest < PAGES * PAGE_SIZE:
            pool[LAYER, dest // PAGE_SIZE, dest % PAGE_SIZE, ::2] = k[token]
            pool[LAYER, dest // PAGE_SIZE, dest % PAGE_SIZE, 1::2] = np.asarray(given["v"], np.float64)[token]
    return q * QUERY_FACTOR, pool


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize(
    "q_heads, kv_heads, head_dim, dtype",
    nightly_but(
        [(3, 3, 96, "float32"), (5, 1, 16, "bfloat16")],
        [(8, 2, 64, "float32"), (3, 3, 96, "float32"), (5, 1, 16, "bfloat16"), (6, 6, 128, "float16")],
    ),
)
def test_rotation_and_write_equal_numpy(q_heads, kv_heads, head_dim, dtype, has_norms):
    given = arrays(q_heads, kv_heads, head_dim, dtype)
    q, pool = expected(given, has_norms)
    found_q, found = run(**given, has_norms=has_norms)
    assert (found_q.dtype, found.dtype) == (given["q"].dtype, jnp.dtype(dtype))
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    np.testing.assert_allclose(np.asarray(found_q, np.float64), q, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(np.asarray(found, np.float64), pool, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("page", [(4, 6, 16), (3, 2, 7), (16, 16, 128)], ids=str)
def test_pages_are_copied_in_all_layers(dtype, page):
    """Of any number of numbers, with pairs of none."""
    pool = jnp.asarray(np.random.default_rng(3).integers(0, 256, (LAYERS, 9, *page), np.uint8)).astype(dtype)
    source, target = jnp.asarray([5, 9, 0, 2, 5], jnp.int32), jnp.asarray([1, 9, 8, 12, 3], jnp.int32)
    on_gpu = make_backend("gpu_interpret" if jax.default_backend() != "gpu" else "gpu")
    wanted = np.asarray(pool).copy()
    wanted[:, [1, 8, 3]] = wanted[:, [5, 0, 5]]
    for backend in (on_gpu, make_backend("xla")):
        found = jax.jit(backend.copy_pages)(pool, source, target)
        assert found.dtype == pool.dtype and np.asarray(found).tobytes() == wanted.tobytes()
