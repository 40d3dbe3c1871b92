"""The kernel for TPUs that rotates queries and keys and writes them, in Pallas' interpreter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.call import KvWrite, Rotation
from levanter_infer.kernels.tpu import backend as backend_module
from levanter_infer.kernels.tpu import kv_write
from levanter_infer.kernels.tpu.backend import TpuBackend
from tests.tiers import nightly_but


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


@pytest.mark.parametrize(
    "tokens, q_heads, kv_heads, decode",
    nightly_but([(32, 8, 2, 32)], [(32, 8, 2, 32), (128, 8, 1, 107), (96, 8, 5, 40), (48, 16, 3, 0)]),
    ids=["decode", "decode tokens and a chunk", "several grid steps", "chunk"],
)
def test_the_kernel_rotates_and_stores_as_xla_does(monkeypatch, tokens, q_heads, kv_heads, decode):
    """`decode` tokens of sequences of their own, a chunk of the others, and padding behind them."""
    monkeypatch.setattr(kv_write, "_STEP_BYTES", 48 * 10 * 128 * 4)
    write = write_of(tokens, q_heads, kv_heads)
    rng, page_size = np.random.default_rng(0), 16
    num_pages = tokens + 8
    page = rng.permutation(num_pages)
    first = page[:decode] * page_size + rng.integers(0, page_size, decode)
    others = max(tokens - decode - 3, 0)
    chunk = page[decode : decode + -(-(others + 5) // page_size), None] * page_size + np.arange(page_size)
    none = num_pages * page_size
    dests = np.concatenate([first, chunk.reshape(-1)[5:][:others], np.full(tokens - decode - others, none)])
    write = dataclasses.replace(
        write, dests=jnp.asarray(dests, jnp.int32), page=jnp.asarray(dests // 16), offset=jnp.asarray(dests % 16)
    )
    assert write.q is not None and write.v is not None and write.rotation is not None
    assert kv_write.rotates(write.q, write.k, write.rotation, write.kv_dtype)
    pool = jnp.asarray(rng.standard_normal((2, num_pages, 2 * kv_heads, page_size, 128)), jnp.bfloat16)
    plan = kv_write.WritePlan.of(pool, write.dests)
    expected = jax.jit(lambda pages: TpuBackend().write_kv(pages, write))(pool)
    nan = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
    sides = write.q, write.k, write.v
    found = kv_write.rotate_and_write(pool, write.layer, sides, write.rotation, plan, interpret=nan)
    assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found
    for own, xlas in zip(found, expected, strict=True):
        assert own.shape == xlas.shape and own.dtype == xlas.dtype
        np.testing.assert_allclose(own.astype(jnp.float32), xlas.astype(jnp.float32), rtol=2**-7, atol=1e-6)
        assert np.mean(np.asarray(own != xlas)) < 1e-3  # a sum that is rounded once may be another bfloat16


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("q_heads, kv_heads", [(8, 1), (8, 2), (16, 1), (32, 1), (32, 8), (40, 5), (64, 4), (24, 3)])
def test_queries_of_a_device_are_rotated_by_the_kernel(monkeypatch, q_heads, kv_heads, cores):
    """Heads of a device with and without tensor parallelism, and the steps of engines."""
    monkeypatch.setattr(kv_write, "cores_of", lambda generation: cores)
    for tokens in (16, 48, 64, 80, 96, 128, 192, 256, 320, 448, 512, 1024, 1408, 2048, 8192):
        sides = [jax.ShapeDtypeStruct((tokens, heads, 128), jnp.bfloat16) for heads in (q_heads, kv_heads)]
        angles = jax.ShapeDtypeStruct((tokens, 64), jnp.float32)
        assert kv_write.rotates(*sides, Rotation(angles, angles), jnp.dtype(jnp.bfloat16)), tokens


@pytest.mark.parametrize("q_heads, kv_heads", [(8, 2), (40, 5), (24, 6), (40, 10)])
def test_a_step_of_several_grid_steps_is_lowered(q_heads, kv_heads):
    """The verifier of kernels knows what the interpreter does not: places of rows that are not the multiples that the
    kernel says."""
    i32, tokens, bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32), 1024, jnp.bfloat16
    pool = jax.ShapeDtypeStruct((1, 99, 2 * kv_heads, 16, 128), bf16)
    sides = [jax.ShapeDtypeStruct((tokens, heads, 128), bf16) for heads in (q_heads, kv_heads, kv_heads)]
    angles = [jax.ShapeDtypeStruct((tokens, 64), jnp.float32)] * 2

    def write(pool, dests, sides, angles):
        plan = kv_write.WritePlan.of(pool, dests)
        assert plan.groups.shape[0] > 1
        return kv_write.rotate_and_write(pool, jnp.int32(0), tuple(sides), Rotation(*angles), plan)

    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(write).trace(pool, i32((tokens,)), sides, angles)
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("tokens, steps", [(16, 1), (32, 1), (64, 2), (80, 1), (192, 2), (512, 2), (1536, 4), (9, 1)])
def test_two_cores_share_the_tokens_of_a_step_if_both_have_enough(monkeypatch, tokens, steps):
    monkeypatch.setattr(kv_write, "cores_of", lambda generation: 2)
    pool, dests = (jax.ShapeDtypeStruct(*each) for each in (((1, 4, 4, 16, 128), jnp.bfloat16), ((tokens,), jnp.int32)))
    plan = jax.eval_shape(kv_write.WritePlan.of, pool, dests)
    assert plan.groups.shape == (steps,)


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
    [
        ((24, 8, 2), False),
        ((256, 256, 8), False),
        ((32, 4, 2), False),
        ((32, 8, 2, jnp.float32), False),
        ((32, 8, 2, jnp.bfloat16, 64), False),
        ((32, 8, 2), True),
    ],
    ids=["tokens", "memory", "heads", "dtype", "head size", "batch_invariant"],
)
def test_other_shapes_are_left_to_xla(sizes, is_apart):
    write = write_of(*sizes)
    assert write.q is not None and write.rotation is not None
    backend = TpuBackend().configured(rows_apart=is_apart)
    assert not backend.rotates(write.rotation, write.q, write.k, write.kv_dtype)
