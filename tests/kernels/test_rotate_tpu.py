"""The kernel for TPUs that rotates queries and keys, in Pallas' interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels.call import KvWrite, Rotation
from levanter_infer.kernels.tpu import backend as backend_module
from levanter_infer.kernels.tpu import rotate
from levanter_infer.kernels.tpu.backend import TpuBackend


def write_of(tokens: int, q_heads: int, kv_heads: int, dtype=jnp.bfloat16, dim: int = 128) -> KvWrite:
    rng = np.random.default_rng(tokens)
    sides = [jnp.asarray(rng.normal(size=(tokens, n, dim)), dtype) for n in (q_heads, kv_heads, kv_heads)]
    angles = jnp.asarray(rng.uniform(0, 99, (tokens, dim // 2)), jnp.float32)
    dests = jnp.asarray(rng.permutation(tokens), jnp.int32)
    return KvWrite(
        k=sides[1],
        v=sides[2],
        layer=jnp.int32(0),
        dests=dests,
        page=dests // 16,
        offset=dests % 16,
        kv_dtype=jnp.dtype(jnp.bfloat16),
        q=sides[0],
        rotation=Rotation(jnp.cos(angles), jnp.sin(angles), query_factor=0.3),
    )


@pytest.mark.parametrize("tokens, q_heads, kv_heads", [(32, 8, 2), (256, 16, 1)])
def test_the_kernel_rotates_as_xla_does(tokens, q_heads, kv_heads):
    write = write_of(tokens, q_heads, kv_heads)
    assert write.q is not None and write.v is not None and write.rotation is not None
    expected = backend_module._rotated_and_packed(write)
    found = rotate.rotate(write.q, write.k, write.v, write.rotation, interpret=True)
    for own, xlas in zip(found, expected, strict=True):
        assert own.shape == xlas.shape and own.dtype == xlas.dtype
        np.testing.assert_allclose(own.astype(jnp.float32), xlas.astype(jnp.float32), rtol=2**-7, atol=1e-6)
        assert np.mean(np.asarray(own != xlas)) < 1e-3  # a sum that is rounded once may be another bfloat16


def test_the_backend_stores_what_it_rotates():
    write = write_of(32, 8, 2)
    backend = TpuBackend()
    assert write.q is not None and write.rotation is not None
    assert backend.rotates(write.rotation, write.q, write.k, write.kv_dtype)
    pool = jnp.zeros((1, 2, 4, 16, 128), jnp.bfloat16)
    q, pool = jax.jit(lambda pages: backend.write_kv(pages, write))(pool)
    rotated_q = backend_module._rotated(write.q, write.rotation, 0.3)
    rotated_k = backend_module._rotated(write.k, write.rotation)
    plain = dataclasses.replace(write, q=None, k=rotated_k, rotation=None)
    np.testing.assert_array_equal(q, rotated_q)
    np.testing.assert_array_equal(pool, backend.write_kv(jnp.zeros_like(pool), plain)[1])


@pytest.mark.parametrize(
    "sizes, is_apart",
    [((24, 8, 2), False), ((32, 4, 2), False), ((32, 8, 2, jnp.float32), False), ((32, 8, 2, jnp.bfloat16, 64), False),
     ((32, 8, 2), True)],
    ids=["tokens", "heads", "dtype", "head size", "batch_invariant"],
)  # fmt: skip
def test_other_shapes_are_left_to_xla(sizes, is_apart):
    write = write_of(*sizes)
    assert write.q is not None and write.rotation is not None
    backend = TpuBackend().configured(rows_apart=is_apart)
    assert not backend.rotates(write.rotation, write.q, write.k, write.kv_dtype)
