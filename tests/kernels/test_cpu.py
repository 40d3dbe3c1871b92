"""The C++ kernels: matmuls and attention against NumPy in every instruction set, and their batch invariance."""

import ctypes
import dataclasses
import functools
import importlib.util
import os
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels.call import AttentionCall, LinearCall
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu.backend import CpuBackend
from levanter_infer.kernels.rules import ScoreRules
from levanter_infer.layers.quantize import quantized
from levanter_infer.policies import CpuIsa
from levanter_infer.structured.automaton import packed
from tests.kernels.ragged import Sizes, dense_attention, make_ragged
from tests.tiers import nightly_but
from tests.tiny_models import tiny_model

_, *ISAS = CpuIsa
built = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")


def usable(isa: CpuIsa) -> bool:
    return cpu.available() and ISAS.index(isa) >= ISAS.index(cpu.isa())


each_isa = pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=pytest.mark.skipif(not usable(isa), reason="not on this machine")) for isa in ISAS]
)


DTYPES = ["float32", "bfloat16", "int8"]


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Weights of int8 that are indexed as the floats that they mean."""

    codes: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __getitem__(self, layer: int) -> np.ndarray:
        return np.asarray(self.codes[layer], np.float64) * np.asarray(self.scales[layer], np.float64)[:, None]


def random_problem(rows, inputs, outputs, dtype, layers=2):
    rng = np.random.default_rng(rows * inputs)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32)
    weights = [jnp.asarray(rng.standard_normal((layers, out, inputs)), jnp.float32) for out in outputs]
    if dtype == "int8":
        return x, [Quantized(*quantized(weight, 1)) for weight in weights]
    return x, [weight.astype(dtype) for weight in weights]


@functools.cache
def compiled(isa):
    def run(x, panels, outputs, layer, rows=None, *, norm=None, eps=0.0, **around):
        with_eps = None if norm is None else (norm, eps)
        return cpu.stacked_matmul(LinearCall(x, panels, outputs, layer, rows, with_eps, **around), isa_name=isa)

    return jax.jit(run, static_argnums=2, static_argnames=("eps", "is_gated_pair"))


def call_of(arrays, dtype: str, rules: ScoreRules, value_dim: int | None = None) -> AttentionCall:
    """`value_dim`: of a pool of latents."""
    _, _, page_size, stored, _ = arrays["kv_pages"].shape
    kv_heads = stored // 2 if value_dim is None else stored
    return AttentionCall(
        **arrays, kv_dtype=jnp.dtype(dtype), rules=rules, kv_heads=kv_heads, page_size=page_size, value_dim=value_dim
    )


def matmul(isa, x, weights, layer, num_rows=None, **around):
    """The matmuls with weights [layers, outputs, inputs], by the kernels of one instruction set."""
    outputs = tuple(weight.shape[1] for weight in weights)
    panels = [cpu.to_panels(getattr(weight, "codes", weight), isa_name=isa) for weight in weights]
    around |= {"scales": scales} if (scales := [w.scales for w in weights if isinstance(w, Quantized)]) else {}
    rows = None if num_rows is None else jnp.int32(num_rows)
    return compiled(isa)(x, panels, outputs, jnp.int32(layer), rows, **around)


def test_the_kernels_are_built_where_there_is_a_compiler():
    assert cpu.available() == (shutil.which("g++") is not None or shutil.which("clang++") is not None)


def rounds_inputs(isa, dtype) -> bool:
    """Whether this instruction set multiplies 16-bit inputs with weights that are no wider."""
    return isa in ("amx_bf16", "avx512_bf16") and dtype != "float32"


def as_read(isa, dtype, x) -> np.ndarray:
    """The inputs as the kernels multiply them."""
    return np.asarray(x.astype("bfloat16") if rounds_inputs(isa, dtype) else x, np.float64)


def others(queries: int, kv_heads: int) -> list[tuple[int, int]]:
    """Rows beside a prompt chunk of so many queries, which is one query block where all threads, or eight, have two
    pieces of work nevertheless."""
    needed = 2 * min(os.cpu_count() or 1, 8) * queries // kv_heads - queries
    return [(1, 5), *[(60, 60)] * -(-needed // 60)]


RULES = {"plain": (False, {}), "sinks": (True, {}), "sinks-chunk": (True, {"attention_chunk": 45})}
"""Whether the heads have sinks, and the rules that are constants of the call."""

SCORE_RULES = RULES | {
    "soft cap": (False, {"soft_cap": 4.0}),
    "slopes": (True, {"alibi_slopes": True}),
    "soft cap, slopes": (False, {"soft_cap": 4.0, "alibi_slopes": True}),
}
"""The same, with rules that change scores. Slopes are of as many heads as there are."""


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, inputs, outputs", [(1, 576, (50,)), (3, 70, (1, 2, 24)), (9, 2100, (25, 3)), (50, 33, (7,))]
)
def test_matmul_equal_numpy(isa, dtype, rows, inputs, outputs):
    x, weights = random_problem(rows, inputs, outputs, dtype)
    for layer in (0, 1):
        for y, weight in zip(matmul(isa, x, weights, layer), weights, strict=True):
            exact = as_read(isa, dtype, x) @ np.asarray(weight[layer], np.float64).T
            np.testing.assert_allclose(y, exact, atol=2e-6 * np.sqrt(inputs) * np.abs(x).max(), rtol=1e-6)


@each_isa
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("traced", [False, True])
def test_rows_are_found_again_in_panels(isa, dtype, traced):
    _, (weight,) = random_problem(1, 9, (41,), dtype, layers=1)
    to_panels = functools.partial(cpu.to_panels, isa_name=isa)
    panels = (jax.jit(to_panels) if traced else to_panels)(weight)
    rows = cpu.panel_rows(panels[0], jnp.asarray([0, 40, 17, 3]), 9, isa_name=isa)
    found = rows if dtype == "float32" else jax.lax.bitcast_convert_type(rows, jnp.bfloat16)
    np.testing.assert_array_equal(found, weight[0, np.asarray([0, 40, 17, 3])])
    assert not np.asarray(cpu.panel_rows(panels[0], jnp.asarray([10**6]), 9, isa_name=isa)).any()


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_at_any_index(isa, dtype):
    x, weights = random_problem(61, 1500, (30,), dtype)
    whole = np.asarray(matmul(isa, x, weights, 1)[0])
    for first, count in ((0, 1), (3, 2), (5, 3), (7, 4), (11, 8), (2, 9), (20, 17)):
        part = matmul(isa, x[first : first + count], weights, 1)[0]
        np.testing.assert_array_equal(part, whole[first : first + count])


@built
def test_rows_not_in_use_give_zeros_and_may_hold_nan():
    x, weights = random_problem(12, 41, (5, 6), "float32")
    whole = matmul(None, x, weights, 0)
    some = matmul(None, x.at[7:].set(jnp.nan), weights, 0, 7)
    for part, all_rows in zip(some, whole, strict=True):
        np.testing.assert_array_equal(part[:7], all_rows[:7])
        assert not part[7:].any()


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_in_use_give_zeros(isa, dtype):
    x, weights = random_problem(5, 40, (7,), dtype)
    around = {"norm": jnp.ones((2, 40)), "eps": 0.1, "residual": jnp.ones((5, 7))}
    assert not np.asarray(matmul(isa, x, weights, 1, 0, **around)[0]).any()


@each_isa
@pytest.mark.parametrize("inputs", [33, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_gate_and_residual_in_the_same_call_equal_numpy(isa, inputs, dtype):
    x, weights = random_problem(11, inputs, (20, 7), dtype)
    rng = np.random.default_rng(1)
    norm = jnp.asarray(rng.standard_normal((2, inputs)), "bfloat16" if dtype == "int8" else dtype)
    gate = jnp.asarray(4 * rng.standard_normal(x.shape), jnp.float32)
    residual = jnp.asarray(rng.standard_normal((11, 20)), jnp.float32)
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 0.1) * np.asarray(norm[1], np.float64)
    gated = wide * np.asarray(gate, np.float64) / (1 + np.exp(-np.asarray(gate, np.float64)))
    exact = [np.asarray(weight[1], np.float64).T for weight in weights]
    rounding = 2.0**-8 if rounds_inputs(isa, dtype) else 0.0  # of an input

    def close(y, read, weight, added=0.0):
        bound = 2e-6 * inputs + 1e-5 * np.abs(read @ weight + added) + rounding * (np.abs(read) @ np.abs(weight))
        assert (np.abs(np.asarray(y, np.float64) - (read @ weight + added)) <= bound).all()

    for y, weight in zip(matmul(isa, x, weights, 1, norm=norm, eps=0.1), exact, strict=True):
        close(y, normed, weight)
    added = np.asarray(residual, np.float64)
    close(matmul(isa, x, weights[:1], 1, gate=gate, residual=residual)[0], gated, exact[0], added)
    some = matmul(isa, x.at[3:].set(jnp.nan), weights[:1], 1, 3, norm=norm, eps=0.1, residual=residual)[0]
    close(some[:3], normed[:3], exact[0], added[:3])
    assert not np.asarray(some[3:]).any()


# Sizes at which linear.inc, pairs.inc, tiles.inc and handlers.cc take another path: blocks of rows (6, 12 and 16, of
# tiles in pairs), narrow weights widened once (48 rows), groups of blocks (512 rows), blocks of inputs (1024; 512 of
# int8) and parts (192 to 512, as there are rows), tiles of inputs (32) whole and in part, panels (16 and 32 outputs)
# whole and in part, several panels in one piece of work.
ROW_COUNTS = (1, 6, 7, 12, 13, 16, 17, 32, 33, 47, 48, 49, 97, 130, 530)
MANY_OUTPUTS = 32 * 8 * 16 + 5


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(34, 37), (1024, 64), (2051, 37)])
@pytest.mark.parametrize("rows", [12, 47, 48, 97])
def test_a_residual_is_added_once_at_every_size(isa, dtype, rows, inputs, outputs):
    x, weights = random_problem(rows, inputs, (outputs,), dtype)
    residual = 100 * jnp.asarray(np.random.default_rng(7).standard_normal((rows, outputs)), jnp.float32)
    before = np.asarray(residual)
    y = np.asarray(matmul(isa, x, weights, 1, residual=residual)[0], np.float64)
    exact = as_read(isa, dtype, x) @ np.asarray(weights[0][1], np.float64).T + np.asarray(residual, np.float64)
    np.testing.assert_allclose(y, exact, atol=2e-6 * np.sqrt(inputs) * np.abs(x).max() + 4e-5, rtol=1e-6)
    np.testing.assert_array_equal(residual, before)


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [1024, 1026])
def test_a_row_has_the_same_bits_on_both_sides_of_every_size(isa, dtype, inputs):
    x, weights = random_problem(max(ROW_COUNTS), inputs, (40,), dtype)
    around = {"norm": jnp.ones((2, inputs)), "eps": 0.1, "residual": jnp.ones((len(x), 40))}
    whole = np.asarray(matmul(isa, x, weights, 1, **around)[0])
    for rows in ROW_COUNTS:
        part = matmul(isa, x[:rows], weights, 1, **{**around, "residual": around["residual"][:rows]})[0]
        np.testing.assert_array_equal(part, whole[:rows])
        counted = np.asarray(matmul(isa, x, weights, 1, rows, **around)[0])
        np.testing.assert_array_equal(counted[:rows], whole[:rows])
        assert not counted[rows:].any()


@each_isa
@pytest.mark.parametrize(
    "inputs, outputs",
    nightly_but([(1540, 16400), (8, 16401)], [(8, 16400), (8, 16401), (1540, 16400), (1540, 16401)]),
)
def test_logits_of_many_rows_have_the_bits_of_few(isa, inputs, outputs):
    """16 MiB and more bypass the caches, where rows are whole cache lines."""
    x, weights = random_problem(260, inputs, (outputs, 3), "bfloat16", layers=1)
    whole, _ = matmul(isa, x, weights, 0, 257)
    assert not whole[257:].any()
    for first in (0, 240):
        part = slice(first, first + 17)
        np.testing.assert_array_equal(whole[part], matmul(isa, x[part], weights, 0)[0])


@each_isa
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 13, 48])
def test_every_panel_is_computed_where_several_are_one_piece_of_work(isa, rows, dtype):
    x, weights = random_problem(rows, 8, (MANY_OUTPUTS, 3), dtype, layers=1)
    for y, weight in zip(matmul(isa, x, weights, 0), weights, strict=True):
        exact = as_read(isa, dtype, x) @ np.asarray(weight[0], np.float64).T
        np.testing.assert_allclose(y, exact, atol=1e-5, rtol=1e-6)


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(34, 37), (96, 64), (1026, 40), (8, MANY_OUTPUTS)])
@pytest.mark.parametrize("rows", nightly_but([1, 97], [1, 16, 33, 97]))
def test_a_gated_pair_has_the_bits_of_two_results_and_a_gate(isa, dtype, rows, inputs, outputs):
    x, weights = random_problem(rows, inputs, (outputs, outputs), dtype)
    _, (down,) = random_problem(1, outputs, (5,), dtype)
    norm = {"norm": jnp.ones((2, inputs)), "eps": 0.1}
    gate, up = matmul(isa, x, weights, 1, **norm)
    used = rows - rows // 3
    (pair,) = matmul(isa, x, weights, 1, used, is_gated_pair=True, **norm)
    wide, partner = np.asarray(gate[:used], np.float64), np.asarray(up[:used], np.float64)
    np.testing.assert_allclose(pair[:used], wide / (1 + np.exp(-wide)) * partner, atol=1e-5, rtol=1e-6)
    assert not np.asarray(pair[used:]).any()
    fused, apart = matmul(isa, pair, [down], 1, used), matmul(isa, up, [down], 1, used, gate=gate)
    np.testing.assert_array_equal(fused[0], apart[0])


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inputs", "width", "outputs"), [(34, 37, 40), (96, 64, 33), (70, 1026, 5), (8, 3, MANY_OUTPUTS)]
)
@pytest.mark.parametrize("rows", nightly_but([1, 41, 97], [1, 16, 33, 41, 97, 530]))
def test_swiglu_in_one_call_has_the_bits_of_two(isa, dtype, rows, inputs, width, outputs):
    """The result of the gated pair is in no array then, and with AMX it is in the order in which tiles are loaded."""
    x, pair = random_problem(rows, inputs, (width, width), dtype)
    _, (down,) = random_problem(2, width, (outputs,), dtype)
    norm, used = {"norm": jnp.full((2, inputs), 0.7), "eps": 0.1}, rows - rows // 3
    residual = jnp.outer(x[:, 0], jnp.arange(outputs, dtype=jnp.float32))
    (hidden,) = matmul(isa, x, pair, 1, used, is_gated_pair=True, **norm)
    (expected,) = matmul(isa, hidden, [down], 1, used, residual=residual)
    (found,) = matmul(isa, x, [*pair, down], 1, used, is_gated_pair=True, residual=residual, **norm)
    assert found.shape == (rows, outputs)
    np.testing.assert_array_equal(found, expected)
    (plain,) = matmul(isa, x, [*pair, down], 1, used, is_gated_pair=True, **norm)
    np.testing.assert_array_equal(plain, matmul(isa, hidden, [down], 1, used)[0])


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("width", [5, 31, 37])
def test_what_is_not_finite_reaches_no_later_call_of_swiglu_and_no_other_row(isa, dtype, bad, width):
    """The memory of what the gate and the pair give is used again, and has outputs that do not exist."""
    x, pair = random_problem(20, 64, (width, width), dtype)
    _, wide = random_problem(20, 64, (512, 512), dtype)
    _, (down,) = random_problem(1, width, (33,), dtype)
    _, (down_of_wide,) = random_problem(1, 512, (33,), dtype)
    for row in (3, 19):
        spoilt = x.at[row, 5].set(bad)
        matmul(isa, spoilt, [*wide, down_of_wide], 0, is_gated_pair=True)[0].block_until_ready()
        for given in (x, spoilt):
            (hidden,) = matmul(isa, given, pair, 0, is_gated_pair=True)
            (found,) = matmul(isa, given, [*pair, down], 0, is_gated_pair=True)
            np.testing.assert_array_equal(found, matmul(isa, hidden, [down], 0)[0])
            others = np.isfinite(np.asarray(given)).all(axis=1)
            assert np.isfinite(np.asarray(found)[others]).all()


@each_isa
def test_a_norm_or_gate_has_the_same_bits_in_any_number_of_rows(isa):
    x, weights = random_problem(60, 70, (20,), "bfloat16")
    extras = {"norm": jnp.ones((2, 70)), "gate": x[::-1]}
    for name, extra in extras.items():
        whole = matmul(isa, x, weights, 0, **{name: extra})[0]
        part = matmul(isa, x[8:9], weights, 0, **{name: extra if name == "norm" else extra[8:9]})[0]
        np.testing.assert_array_equal(part, whole[8:9])


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [32, 41, 96])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_in_one_row_does_not_reach_another(isa, dtype, inputs, bad):
    x, weights = random_problem(19, inputs, (5,), dtype)
    clean = np.asarray(matmul(isa, x, weights, 0)[0])
    for row in (0, 9, 18):
        spoilt = np.asarray(matmul(isa, x.at[row].set(bad), weights, 0)[0])
        others = np.arange(19) != row
        np.testing.assert_array_equal(spoilt[others], clean[others])
        assert not np.isfinite(spoilt[row]).any()


@built
def test_arguments_that_do_not_fit_are_refused():
    x, weights = random_problem(2, 8, (3,), "float32")
    with pytest.raises(Exception, match="no such layer"):
        jax.block_until_ready(matmul(None, x, weights, 2))
    with pytest.raises(Exception, match="weights are not \\[layers, panels"):
        jax.block_until_ready(matmul(None, x[:, :6], weights, 0))
    with pytest.raises(Exception, match="linear: shapes do not fit"):
        jax.block_until_ready(matmul(None, x, weights, 0, is_gated_pair=True))
    with pytest.raises(Exception, match="weights are not \\[layers, panels"):
        jax.block_until_ready(matmul(None, x, [weights[0], jnp.ones((2, 40, 8))], 0, is_gated_pair=True))
    with pytest.raises(Exception, match="weights are not \\[layers, panels"):
        jax.block_until_ready(matmul(None, x, [weights[0], weights[0], jnp.ones((2, 8, 9))], 0, is_gated_pair=True))
    with pytest.raises(Exception, match="the residual does not fit"):
        down = jnp.ones((2, 8, 3))
        jax.block_until_ready(matmul(None, x, [*weights * 2, down], 0, is_gated_pair=True, residual=jnp.ones((2, 3))))
    with pytest.raises(Exception, match="rows have no inputs"):
        jax.block_until_ready(matmul(None, x[:, :0], [weights[0][:, :, :0]], 0))
    with pytest.raises(Exception, match="of int8, and no others, have scales"):
        jax.block_until_ready(compiled(None)(x, [cpu.to_panels(weights[0].astype(jnp.int8))], (3,), jnp.int32(0)))
    with pytest.raises(Exception, match="the scales do not fit"):
        jax.block_until_ready(matmul(None, x, [Quantized(weights[0].astype(jnp.int8), jnp.ones((2, 4)))], 0))
    with pytest.raises(Exception, match="neither bf16 nor f32"):
        panels = cpu.to_panels(weights[0]).astype(jnp.int32)
        jax.block_until_ready(compiled(None)(x, [panels], (3,), jnp.int32(0)))


@each_isa
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 160, 192, 256, 512])
def test_attention_equals_dense_in_every_instruction_set(isa, head_dim, rules):
    sinks, rules = rules
    rows = [(1, 140), (43, 170), (4, 4), *others(43, kv_heads=2)]
    counts = {"tokens": sum(queries for queries, _ in rows), "rows": len(rows)}
    sizes = Sizes(6, 2, head_dim, 16, **counts, dtype="bfloat16", stored="uint16", sinks=sinks)
    batch = make_ragged(sizes, rows)
    scale = 3 / head_dim**0.5
    out = cpu.cpu_attention(call_of(batch.arrays, "bfloat16", ScoreRules(scale=scale, **rules)), isa_name=isa)
    np.testing.assert_allclose(out, dense_attention(batch, scale=scale, **rules), atol=1e-5, rtol=1e-5)


@each_isa
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_alone_and_all_heads_together_attend_alike(isa, dtype, page_size, rules):
    sinks, rules = rules
    # The heads of a query block are divided where it is more than a quarter of a thread's work.
    rows = 4 * (os.cpu_count() or 1) + 1
    counts = {"tokens": rows + 8, "rows": rows, "max_pages": 9}
    sizes = Sizes(9, 3, 64, page_size, **counts, dtype=dtype, sinks=sinks)
    batch = make_ragged(sizes, [(9, 70), *((1, 1 + 5 * i % 70) for i in range(rows - 1))])
    call = call_of(batch.arrays, dtype, ScoreRules(scale=0.3, **rules))
    together = np.asarray(cpu.cpu_attention(call, isa_name=isa))
    np.testing.assert_allclose(together, dense_attention(batch, scale=0.3, **rules), atol=1e-5, rtol=1e-5)
    alone = dataclasses.replace(call, num_seqs=jnp.int32(1), cu_q_lens=call.cu_q_lens.at[2:].set(9))
    np.testing.assert_array_equal(np.asarray(cpu.cpu_attention(alone, isa_name=isa))[:9], together[:9])


@each_isa
@pytest.mark.parametrize("rules", nightly_but(["plain", "sinks-chunk", "soft cap, slopes"], SCORE_RULES))
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(Sizes(6, 2, 64, 16), id="groups of 3"),
        pytest.param(Sizes(3, 1, 512, 16), id="heads of 512"),
        pytest.param(Sizes(2, 2, 70, 8, max_pages=20), id="a head each"),
        pytest.param(Sizes(26, 2, 32, 16), id="groups of 13"),
        pytest.param(Sizes(14, 1, 80, 16, value_dim=48), id="latents"),
    ],
)
def test_a_query_has_the_same_bits_decoded_and_in_any_prompt_chunk(isa, sizes, rules):
    sinks, rules = SCORE_RULES[rules]
    length, queries = 150, 90
    rows = [(queries, length), *others(queries, sizes.kv_heads)]
    counts = {"tokens": sum(count for count, _ in rows), "rows": len(rows)}
    sizes = dataclasses.replace(sizes, **counts, dtype="bfloat16", stored="uint16", sinks=sinks)
    batch = make_ragged(sizes, rows)
    slopes = (
        {"alibi_slopes": np.arange(sizes.q_heads, dtype=np.float32) / (-2 * sizes.q_heads)}
        if rules.get("alibi_slopes")
        else {}
    )
    scale = 3 / sizes.head_dim**0.5
    score_rules = ScoreRules(scale=scale, sliding_window=jnp.int32(100), **{**rules, **slopes})
    q = batch.arrays["q"]

    @jax.jit
    def attend(changed):
        call = call_of({**batch.arrays, **changed}, "bfloat16", score_rules, sizes.value_dim)
        return cpu.cpu_attention(call, isa_name=isa)

    def run(first, count):
        """The queries first … first + count - 1 of the first row, alone."""
        changed = {
            "q": jnp.zeros_like(q).at[:count].set(q[first : first + count]),
            "seq_lens": batch.arrays["seq_lens"].at[0].set(length - queries + first + count),
            "cu_q_lens": batch.arrays["cu_q_lens"].at[1:].set(count),
            "num_seqs": jnp.int32(1),
        }
        return np.asarray(attend(changed))[:count]

    whole = np.asarray(attend({}))
    expected = dense_attention(batch, scale=scale, sliding_window=100, **{**rules, **slopes})
    np.testing.assert_allclose(whole, expected, atol=1e-5, rtol=1e-5)
    for first, count in ((0, 1), (29, 1), (89, 1), (4, 3), (5, 8), (3, 25), (0, 90)):
        np.testing.assert_array_equal(run(first, count), whole[first : first + count])


@each_isa
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("window", [None, 40])
def test_a_value_that_is_not_finite_reaches_those_who_see_it_alone(isa, dtype, bad, window):
    rows = [(30, 90), (3, 70), *others(30, kv_heads=2)]
    sizes = Sizes(6, 2, 64, 16, tokens=sum(count for count, _ in rows), rows=len(rows), dtype=dtype)
    batch = make_ragged(sizes, rows)
    rules = ScoreRules(scale=0.3, sliding_window=None if window is None else jnp.int32(window))

    def attend(pool):
        arrays = {**batch.arrays, "kv_pages": pool}
        return np.asarray(cpu.cpu_attention(call_of(arrays, dtype, rules), isa_name=isa))

    pool, pages = batch.arrays["kv_pages"], batch.arrays["page_indices"]
    clean = attend(pool)
    for position in (45, 75):  # before the queries, which begin at 60, and among them
        spoilt = attend(pool.at[:, pages[0, position // 16], position % 16, 1].set(bad))  # the first kv head's value
        seen = np.arange(60, 90) >= position
        if window is not None:
            seen &= np.arange(60, 90) - window < position
        assert not np.isfinite(spoilt[:30][seen, :3]).any()
        np.testing.assert_array_equal(spoilt[:30][~seen], clean[:30][~seen])
        np.testing.assert_array_equal(spoilt[:30, 3:], clean[:30, 3:])
        np.testing.assert_array_equal(spoilt[30:33], clean[30:33])


@built
def test_what_the_attention_kernel_cannot_do_is_refused():
    batch = make_ragged(Sizes(2, 1, 16, 4, max_pages=40), [(1, 9)])
    with pytest.raises(ValueError, match="score_mod"):
        rules = ScoreRules(scale=1.0, score_mod=lambda score, *_: score)
        cpu.cpu_attention(call_of(batch.arrays, "float32", rules))
    with pytest.raises(ValueError, match="not float16"):
        cpu.cpu_attention(call_of(batch.arrays, "float16", ScoreRules(scale=1.0)))


@built
def test_nan_in_a_query_gives_nan_there_and_nowhere_else():
    batch = make_ragged(Sizes(2, 1, 16, 4, max_pages=40), [(1, 9), (1, 40)])
    q = batch.arrays["q"].at[1, 0, 0].set(jnp.nan)
    arrays = {**batch.arrays, "q": q}
    out = cpu.cpu_attention(call_of(arrays, "float32", ScoreRules(scale=0.3)))
    assert np.isnan(out[1, 0]).all() and np.isfinite(out[0]).all() and np.isfinite(out[1, 1]).all()


@built
def test_the_library_names_its_instruction_set():
    assert cpu.isa() in ISAS
    assert isinstance(cpu._library(), ctypes.CDLL)


def test_a_handler_of_another_version_of_xlas_interface_is_refused_with_the_reason(tmp_path, monkeypatch):
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "later.c").write_text(LATER)
    calls = [f"-DNAME{i}=levanter_infer_{call}" for i, call in enumerate(cpu._CALLS)]
    include = f"-I{jax.ffi.include_dir()}"
    library = tmp_path / "later.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", include, *calls, str(tmp_path / "later.c"), "-o", str(library)], check=True
    )
    spec = importlib.util.spec_from_file_location("later", library)
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(cpu, "_CALLS", ("linear",))
    why = cpu._load.__wrapped__()
    assert isinstance(why, str) and "built for version 9.0 of XLA's FFI, and jaxlib" in why


LATER = """
#include "xla/ffi/api/c_api.h"
const char* levanter_infer_isa() { return "generic"; }
int levanter_infer_panel(const char* isa) { return 8; }
int levanter_infer_ffi_api() { return 9000; }
const char* levanter_infer_sources() { return ""; }
XLA_FFI_Error* NAME0(XLA_FFI_CallFrame* frame) {
  __auto_type extension = frame->extension_start;
  if (extension != NULL && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
    metadata->api_version.major_version = 9;
    metadata->api_version.minor_version = 0;
  }
  return NULL;
}
"""
"""A handler that reports version 9.0."""


@built
def test_kernels_built_for_a_newer_jaxlib_are_refused_before_xla_knows_them(monkeypatch):
    built = cpu._library().levanter_infer_ffi_api()
    assert 0 < built <= cpu._ffi_api() < 2**31
    monkeypatch.setattr(cpu, "_ffi_api", lambda: built - 1)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: pytest.fail("registered"))
    why = cpu._load.__wrapped__()
    assert isinstance(why, str) and "XLA's FFI" in why and f"0.{built % 1000 - 1}" in why


@built
def test_kernels_built_from_other_sources_are_refused(tmp_path, monkeypatch):
    assert not isinstance(cpu._load.__wrapped__(), str)
    changed = tmp_path / "native"
    shutil.copytree(cpu._SOURCES, changed)
    with (changed / "linear.inc").open("a") as file:
        file.write("\n")
    monkeypatch.setattr(cpu, "_SOURCES", changed)
    why = cpu._load.__wrapped__()
    assert isinstance(why, str) and "built from other sources than this checkout has" in why
    monkeypatch.setattr(cpu, "_SOURCES", tmp_path / "none")  # an installed package
    assert not isinstance(cpu._load.__wrapped__(), str)


@built
def test_a_window_of_nothing_gives_zeros_whatever_the_values_hold():
    batch = make_ragged(Sizes(2, 1, 16, 4, max_pages=40), [(8, 8)])
    arrays = {**batch.arrays, "kv_pages": jnp.full_like(batch.arrays["kv_pages"], jnp.nan)}
    rules = ScoreRules(scale=0.3, sliding_window=jnp.int32(0))
    out = cpu.cpu_attention(call_of(arrays, "float32", rules))
    assert not np.asarray(out).any()


@built
@pytest.mark.parametrize("bounds", [[0, -5, -5, -5, -5, -5], [3, 8, 8, 8, 8, 8]])
def test_bounds_that_do_not_ascend_from_0_are_refused(bounds):
    batch = make_ragged(Sizes(2, 1, 16, 4, max_pages=40), [(8, 8)])
    arrays = {**batch.arrays, "cu_q_lens": jnp.asarray(bounds, jnp.int32)}
    with pytest.raises(Exception, match="does not ascend"):
        rules = ScoreRules(scale=0.3)
        jax.block_until_ready(cpu.cpu_attention(call_of(arrays, "float32", rules)))


@built
@pytest.mark.parametrize(
    ("changed", "window", "reason"),
    [
        ({"seq_lens": [7]}, None, "more queries than tokens"),
        ({"seq_lens": [-1]}, None, "more queries than tokens"),
        ({}, -1, "window is negative"),
    ],
)
def test_positions_before_the_first_are_refused(changed, window, reason):
    batch = make_ragged(Sizes(2, 1, 16, 4, rows=1, max_pages=40), [(8, 8)])
    arrays = {**batch.arrays, **{name: jnp.asarray(values, jnp.int32) for name, values in changed.items()}}
    rules = ScoreRules(scale=0.3, sliding_window=None if window is None else jnp.int32(window))
    with pytest.raises(Exception, match=reason):
        jax.block_until_ready(cpu.cpu_attention(call_of(arrays, "float32", rules)))


@built
def test_a_model_of_float16_is_not_taken_for_bfloat16():
    model = tiny_model(dtype="float16")
    with pytest.raises(ValueError, match="not float16"):
        model.prepare(CpuBackend())


def stats_of(logits, isa, num_rows=None):
    rows = logits.shape[0] if num_rows is None else num_rows
    found = jax.jit(functools.partial(cpu.logit_stats, isa_name=isa))(jnp.asarray(logits), jnp.int32(rows))
    return [np.asarray(part) for part in found]


@each_isa
@pytest.mark.parametrize("vocab", [1, 7, 67, 1000])
def test_logit_stats_equal_numpy(isa, vocab):
    logits = 5 * np.random.default_rng(vocab).standard_normal((5, vocab)).astype(np.float32)
    logits[1] = np.round(logits[1])  # ties
    logits[2, : vocab - 1] = -np.inf
    peak, total, best = stats_of(logits, isa)
    np.testing.assert_array_equal(peak, logits.max(axis=1))
    np.testing.assert_array_equal(best, logits.argmax(axis=1))
    exact = np.exp(np.float64(logits) - peak[:, None]).sum(axis=1)
    np.testing.assert_allclose(total, exact, rtol=3e-7)


@each_isa
@pytest.mark.parametrize("bad", [[np.nan, 3], [np.inf, 3], [-np.inf, -np.inf]])
@pytest.mark.parametrize("index", [0, 66])
def test_nan_and_infinity_spoil_the_sum_of_their_row_only(isa, bad, index):
    logits = np.random.default_rng(0).standard_normal((3, 67)).astype(np.float32)
    clean = stats_of(logits, isa)
    logits[1] = bad[1]
    logits[1, index] = bad[0]
    spoilt = stats_of(logits, isa)
    nothing = bad[1] == -np.inf
    assert spoilt[1][1] == 0 if nothing else np.isnan(spoilt[1][1])
    assert 0 <= spoilt[2][1] < 67
    for before, after in zip(clean, spoilt, strict=True):
        np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])


@built
def test_logit_stats_of_a_row_have_the_same_bits_in_any_batch():
    logits = np.random.default_rng(0).standard_normal((6, 301)).astype(np.float32)
    together = stats_of(logits, cpu.isa(), num_rows=4)
    for row in range(4):
        for part, alone in zip(together, stats_of(logits[row : row + 1], cpu.isa()), strict=True):
            np.testing.assert_array_equal(part[row], alone[0])
    assert [part[4:].tolist() for part in together] == [[0, 0], [1, 1], [0, 0]]


@each_isa
@pytest.mark.parametrize("vocab", [1, 7, 67, 1000, 4096, 5003])
def test_the_best_of_masked_logits_is_that_of_those_that_the_mask_leaves(isa, vocab):
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.standard_normal((8, vocab)), 1).astype(np.float32)  # with ties
    allowed, masked = rng.random((8, vocab)) < 0.5, np.array([1, 1, 1, 0, 1, 0, 1, 1], bool)
    allowed[1], allowed[2] = np.arange(vocab) == vocab - 1, False
    logits[4, :] = -np.inf
    call = jax.jit(functools.partial(cpu.masked_best, isa_name=isa))
    peak, best = call(jnp.asarray(logits), jnp.asarray(packed(allowed)), jnp.asarray(masked), jnp.int32(7))
    left = np.where(allowed | ~masked[:, None], logits, -np.inf)
    np.testing.assert_array_equal(peak, [*left[:7].max(axis=1), 0])
    np.testing.assert_array_equal(best, [*left[:7].argmax(axis=1), 0])


@built
def test_masks_of_too_few_words_are_refused():
    with pytest.raises(Exception, match="a bit for each token"):
        one = jnp.zeros((2, 128), jnp.uint32)
        jax.block_until_ready(cpu.masked_best(jnp.zeros((2, 4097)), one, jnp.ones(2, bool), jnp.int32(2)))
