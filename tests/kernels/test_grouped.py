"""Grouped matmuls: every backend against a loop over results in numpy; C++ bits are those of the dense matmul."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from levanter_infer.engine.instructions import usable_isas
from levanter_infer.kernels.backend import Fuse
from levanter_infer.kernels.call import GroupedCall, LinearCall
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu.backend import CpuBackend
from levanter_infer.kernels.registry import make_backend
from levanter_infer.layers.quantize import quantized
from levanter_infer.policies import CpuIsa
from tests.kernels.ragged import RUNS_HERE

LAYERS, GROUPS, EPS = 2, 5, 1e-5
LAYER = 1
needs_cpu = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
ISAS = [isa.value for isa in CpuIsa if isa != CpuIsa.AUTO and cpu.available()]


def usable(isa: str) -> bool:
    return isa in usable_isas()


def arrays(counts, inputs: int, outs: tuple[int, ...], seed: int = 0):
    """x of more rows than any result reads, the row of each result (NaN in rows that none reads), and weights."""
    rng = np.random.default_rng(seed)
    num_results = sum(counts) + 3
    x = rng.standard_normal((9, inputs)).astype(np.float32)
    x[8] = np.nan
    rows = np.concatenate([rng.integers(0, 8, sum(counts)), [8, 8, 8]]).astype(np.int32)
    assert len(rows) == num_results
    weights = [rng.standard_normal((LAYERS, GROUPS, out, inputs)).astype(np.float32) / inputs**0.5 for out in outs]
    return x, rows, weights


def one_by_one(x, rows, counts, weights, norm=None, gate=None) -> list[np.ndarray]:
    """The oracle, in float64."""
    x, group = x.astype(np.float64), np.repeat(np.arange(GROUPS), counts)
    if norm is not None:
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * norm[LAYER]
    if gate is not None:
        x = gate / (1 + np.exp(-gate.astype(np.float64))) * x
    results = []
    for weight in weights:
        y = np.zeros((len(rows), weight.shape[2]))
        for i, g in enumerate(group):
            y[i] = weight[LAYER, g].astype(np.float64) @ x[rows[i]]
        results.append(y)
    return results


@functools.partial(jax.jit, static_argnames=("backend", "outs"))
def computed(backend, outs, x, rows, counts, weights, norm=None, gate=None, scales=()):
    norm = None if norm is None else (norm, EPS)
    layer = jnp.int32(LAYER)
    call = GroupedCall(x, counts, weights, outs, rows=rows, layer=layer, norm=norm, gate=gate, scales=scales)
    return backend.grouped_linear(call)


def stored(backend, weights, dtype=jnp.float32) -> list[jax.Array]:
    panels = []
    for w in weights:
        one = backend.store(jnp.asarray(w, dtype), w.shape[2], w.shape[3])
        panels.append(one.reshape(LAYERS, GROUPS, *one.shape[-2:]))  # panels of several axes of layers too
    return panels


COUNTS = [(0, 3, 0, 1, 14), (60, 0, 2, 0, 0), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)]
NAMES = [name for name in (*RUNS_HERE, "tpu_interpret") if name != "reference"]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_backend_gives_what_a_loop_over_results_gives(name, counts):
    backend = make_backend(name)
    dtype = jnp.bfloat16 if "gpu" in name else jnp.float32
    x, rows, weights = arrays(counts, inputs=24, outs=(40, 7))
    x, *weights = (np.asarray(jnp.asarray(array, jnp.bfloat16).astype(jnp.float32)) for array in (x, *weights))
    panels = stored(backend, weights, dtype)
    got = computed(backend, (40, 7), jnp.asarray(x, dtype), rows, jnp.asarray(counts, jnp.int32), panels)
    for result, expected in zip(got, one_by_one(x, rows, counts, weights), strict=True):
        np.testing.assert_allclose(result, expected, atol=2e-5)
        assert not np.any(np.asarray(result)[sum(counts) :])  # exactly zero, whatever those rows hold


@pytest.mark.parametrize("counts", COUNTS[:3])
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_int8_give_what_the_floats_give_that_they_mean(name, counts):
    backend = make_backend(name)
    dtype = jnp.bfloat16 if "gpu" in name else jnp.float32
    x, rows, weights = arrays(counts, inputs=24, outs=(40, 7))
    x = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))  # which a processor may round them to
    codes, scales = zip(*(quantized(jnp.asarray(weight), 1) for weight in weights), strict=True)
    meant = [
        np.asarray(code, np.float32) * np.asarray(scale)[..., None] for code, scale in zip(codes, scales, strict=True)
    ]
    panels = stored(backend, codes, jnp.int8)
    got = computed(backend, (40, 7), jnp.asarray(x, dtype), rows, jnp.asarray(counts, jnp.int32), panels, scales=scales)
    for result, expected in zip(got, one_by_one(x, rows, counts, meant), strict=True):
        np.testing.assert_allclose(result, expected, atol=2e-5)
        assert not np.any(np.asarray(result)[sum(counts) :])


@pytest.mark.parametrize("counts", [(0, 3, 0, 1, 14), (60, 0, 2, 0, 100), (0, 0, 0, 0, 0)])
def test_a_tpu_cuts_rows_into_tiles_and_matrices_into_blocks(counts):
    """With its detector of races; groups that share a tile, groups of several, and outputs that fill no block."""
    backend = make_backend("tpu_interpret")
    x, rows, weights = arrays(counts, inputs=136, outs=(300,))
    got = computed(backend, (300,), x, rows, jnp.asarray(counts, jnp.int32), stored(backend, weights))
    (expected,) = one_by_one(x, rows, counts, weights)
    np.testing.assert_allclose(got[0], expected, atol=2e-5)
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found


@needs_cpu
@pytest.mark.parametrize("inputs", [24, 31])
@pytest.mark.parametrize("isa", ISAS)
def test_norm_and_gate_are_fused_on_a_cpu(isa, inputs):
    if not usable(isa):
        pytest.skip(f"the processor has no {isa}")
    backend = CpuBackend(isa=isa)
    assert {Fuse.NORM, Fuse.GATE} <= backend.fuses
    counts = (2, 0, 15, 1, 50)
    x, rows, weights = arrays(counts, inputs=inputs, outs=(70,))
    rng = np.random.default_rng(1)
    norm, gate = rng.standard_normal((LAYERS, inputs)).astype(np.float32), rng.standard_normal(x.shape)
    panels = stored(backend, weights)
    for extra in ({"norm": norm}, {"gate": gate.astype(np.float32)}, {}):
        got = computed(backend, (70,), x, rows, jnp.asarray(counts, jnp.int32), panels, **extra)
        expected = one_by_one(x, rows, counts, weights, **extra)
        np.testing.assert_allclose(got[0], expected[0], atol=2e-5)


@needs_cpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("isa", ISAS)
def test_a_result_has_the_bits_of_the_dense_matmul(isa, dtype):
    """Whichever and however many rows its group has: bits are batch-invariant."""
    if not usable(isa):
        pytest.skip(f"the processor has no {isa}")
    backend, inputs, outs = CpuBackend(isa=isa), 2056, 45
    counts = (1, 0, 13, 3, 60)
    x, rows, weights = arrays(counts, inputs=inputs, outs=(outs,))
    codes, scale = quantized(jnp.asarray(weights[0]), 1)
    scales = [scale] if dtype == jnp.int8 else []
    (panels,) = stored(backend, [codes] if scales else weights, dtype)
    (got,) = computed(backend, (outs,), x, rows, jnp.asarray(counts, jnp.int32), [panels], scales=scales)
    for group in range(GROUPS):
        own = [each[LAYER] for each in scales]
        call = LinearCall(jnp.asarray(x[:8]), [panels[LAYER]], [outs], layer=jnp.int32(group), scales=own)
        dense = np.asarray(backend.linear(call)[0])
        first = sum(counts[:group])
        for i in range(first, first + counts[group]):
            assert dense[rows[i]].tobytes() == np.asarray(got[i]).tobytes(), (group, i)


@needs_cpu
def test_combining_does_not_depend_on_the_rows_beside():
    rng = np.random.default_rng(0)
    values, weights = rng.standard_normal((30, 37)).astype(np.float32), rng.random((6, 4)).astype(np.float32)
    places = rng.integers(0, 30, (6, 4)).astype(np.int32)
    got = np.asarray(CpuBackend().combine(values, places, weights, jnp.int32(5)))
    np.testing.assert_allclose(got[:5], (weights[:5, :, None] * values[places[:5]]).sum(1), atol=1e-5)
    assert not got[5:].any()
    alone = [np.asarray(CpuBackend().combine(values, places[i : i + 1], weights[i : i + 1], None))[0] for i in range(5)]
    assert np.stack(alone).tobytes() == got[:5].tobytes()
    np.testing.assert_allclose(
        make_backend("xla").combine(jnp.asarray(values), places, weights, None)[:5], got[:5], atol=1e-5
    )


@needs_cpu
@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        ([0, 9], (2, 0, 0, 0, 0), "no such row"),
        ([0, 1], (2, 0, 1, 0, 0), "counts"),
        ([0, 1], (-1, 0, 1, 0, 0), "counts"),
    ],
)
def test_what_does_not_fit_is_an_error(rows, counts, message):
    x, _, weights = arrays((0,) * GROUPS, inputs=24, outs=(40,))
    backend = CpuBackend()
    with pytest.raises(Exception, match=message):
        computed(
            backend, (40,), x, np.asarray(rows, np.int32), jnp.asarray(counts, jnp.int32), stored(backend, weights)
        )
