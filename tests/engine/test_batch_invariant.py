"""With `numerics: batch_invariant` a result depends on its request alone, to the bit."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine import backend_choice
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.request import Request
from levanter_infer.engine.row_audit import _rounded, audit_rows, described
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu.backend import CpuBackend
from levanter_infer.layers.norm import RMSNorm
from levanter_infer.models.registry import FAMILIES
from tests.engine.comparisons import all_kinds, expected, make_engine, random_requests, serve
from tests.family_cases import case_of, load, load_config
from tests.golden_cases import load_case
from tests.tiers import nightly_but
from tests.tiny_models import tiny_model

BY_ROW = CpuBackend(is_apart=True)
ONE_PER_KIND = ("deepseek_v3", "falcon_h1", "gemma4_text", "gpt_oss", "grug_moe", "kimi_linear", "llama", "phi")
"""Families of all kinds of layers that there are."""
built = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")


@built
@pytest.mark.slow  # in CI with experts, below
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_the_request_alone(dtype):
    """In a batch, in another order, in chunks, on pages of another size, preempted, offloaded, cached and cold."""
    cases = all_kinds(40, seed=5)
    searches = [i for i, case in enumerate(cases) if isinstance(case, Request) and case.sampling.num_beams > 1]
    alone = make_engine(dtype, with_beams=True, max_seqs=4, page_size=8, max_step_tokens=256, prefix_cache=False)
    plain = {i: expected(alone, case, None) for i, case in enumerate(cases) if isinstance(case, Request)}
    done: collections.Counter[str] = collections.Counter()
    for config, left_out in (
        (dict(max_seqs=8, page_size=4, max_step_tokens=16, max_pages=24), []),
        # Without tables for beams, which are compiled once: scripts/compare_bits.py has both
        (dict(max_seqs=6, page_size=16, max_step_tokens=48, max_pages=6, preempt="offload"), searches),
    ):
        engine = make_engine(dtype, with_beams=not left_out, **config)
        for order in (range(40), np.random.default_rng(0).permutation(40)):
            served = [i for i in order if i not in left_out]
            for i, (found, prefixes) in zip(served, serve(engine, [cases[i] for i in served]), strict=True):
                assert found == (plain[i] if i in plain else expected(alone, cases[i], prefixes))
                done["resampled"] += prefixes is not None
            check_invariants(engine.state.decode)
            assert engine.stats()["pages_free"] == engine.shapes.num_pages
        for name in ("preemptions", "prefix_hits", "offloaded_pages"):
            done[name] += engine.stats()[name]
    assert searches and all(done[name] > 0 for name in ("resampled", "preemptions", "prefix_hits", "offloaded_pages"))


EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
MIXTURES = {
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 20, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
}


@pytest.mark.slow
@built
@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [("qwen2_moe", "bfloat16"), ("qwen3_moe", "float32"), ("mixtral", "bfloat16")],
)
def test_bits_of_experts_are_those_of_the_request_alone(model_type, dtype):
    """The router's choice and weights, the experts' grouped matmuls, and the shared expert with its gate."""
    family = {"model_type": model_type, **MIXTURES[model_type]}
    cases = random_requests(24, seed=7)
    alone = make_engine(dtype, family=family, max_seqs=2, page_size=8, max_step_tokens=64, prefix_cache=False)
    plain = [expected(alone, case, None) for case in cases]
    engine = make_engine(dtype, family=family, max_seqs=8, page_size=4, max_step_tokens=16, max_pages=24)
    for order in (range(24), np.random.default_rng(0).permutation(24)):
        for i, (found, _) in zip(order, serve(engine, [cases[i] for i in order]), strict=True):
            assert found == plain[i], i
    assert engine.stats()["preemptions"] and engine.stats()["prefix_hits"]


@pytest.mark.parametrize(
    "config", [{"matmul": "xla"}, {"attention": "xla"}, {"kv_dtype": "float16"}, {"kv_dtype": "int8"}]
)
def test_it_is_refused_where_the_kernels_do_not_give_it(config):
    with pytest.raises(ValueError, match="batch_invariant.*needs the kernels for CPUs"):
        make_engine(**config)


FAMILY_ENGINES: tuple[dict, ...] = (
    dict(max_seqs=6, page_size=4, max_step_tokens=13, max_pages=26),
    dict(max_seqs=9, page_size=8, max_step_tokens=70),
)
"""Chunks and buckets of other sizes than alone, and a pool in which sequences are preempted."""


@built
@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_bits_of_a_family_are_those_of_the_request_alone(model_type, tmp_path, optimized):
    """Parts that no kernel computes: XLA computes them row by row. Compiled as users compile;
    tests/engine/test_families.py has some families without optimisation, which compiles faster."""
    model = load(load_case(case_of(model_type)), tmp_path)
    cases = random_requests(20, seed=11)
    alone = make_engine(model=model, max_seqs=4, page_size=8, max_step_tokens=128, prefix_cache=False)
    plain = [expected(alone, case, None) for case in cases]
    preemptions = 0
    for config in FAMILY_ENGINES:
        engine = make_engine(model=model, **{"prefix_cache": None, **config})
        for order in (range(20), np.random.default_rng(0).permutation(20)):
            for i, (found, _) in zip(order, serve(engine, [cases[i] for i in order]), strict=True):
                assert found == plain[i], i
        preemptions += engine.stats()["preemptions"]
    assert preemptions > 0


@built
@pytest.mark.parametrize("model_type", nightly_but(ONE_PER_KIND, sorted(FAMILIES)))
def test_nothing_of_a_family_is_computed_for_all_tokens_together(model_type):
    assert audit_rows(load_config(case_of(model_type)), jnp.dtype(jnp.float32), BY_ROW, BY_ROW).joint is None


@built
def test_rows_that_xla_rounds_are_compiled_without_vectors(monkeypatch):
    """LLVM compiles each copy of a row by itself: with vectors of other sizes, and other formulas in them."""

    def options(**family):
        engine = InferenceEngine(tiny_model(**family), config=EngineConfig(max_seq_len=96, numerics="batch_invariant"))
        return engine.backend.compiler_options

    monkeypatch.setattr(backend_choice, "machine", lambda: "x86_64")
    assert "xla_cpu_prefer_vector_width" not in options()  # kernels compute all of it
    found = options(model_type="granite", residual_multiplier=0.5)
    assert int(found["xla_cpu_prefer_vector_width"]) < 128
    assert found["xla_cpu_max_isa"] == "AVX"  # without fused multiplications and additions
    monkeypatch.setattr(backend_choice, "machine", lambda: "aarch64")
    options()
    with pytest.raises(ValueError, match="batch_invariant.* not possible for granite on aarch64.*on x86-64 alone"):
        options(model_type="granite", residual_multiplier=0.5)


def _at_once(norm, x, rows):
    """As `RMSNorm.by_rows`, but for all rows together."""
    return norm(x)


@built
def test_it_is_refused_for_what_is_computed_for_all_tokens_together(monkeypatch):
    monkeypatch.setattr(RMSNorm, "by_rows", _at_once)
    audit_rows.cache_clear()
    with pytest.raises(ValueError, match=r"batch_invariant.*not possible for olmo2: XLA computes .*layers/norm.py:"):
        InferenceEngine(tiny_model(model_type="olmo2"), config=EngineConfig(max_seq_len=96, numerics="batch_invariant"))
    audit_rows.cache_clear()
    found = audit_rows(load_config(case_of("gemma2")), jnp.dtype(jnp.float32), CpuBackend(), CpuBackend()).joint
    assert found is not None and "layers/" in found  # the default mode


def test_a_number_that_is_multiplied_and_added_counts_and_a_sum_does_not():
    def traced(function):
        jaxpr = jax.make_jaxpr(function)(np.ones(3, np.float32), np.ones(3, np.float32)).jaxpr
        return next((described(equation) for _, equation in _rounded(jaxpr, set())), None)

    assert traced(lambda x, y: x + y) is None and traced(lambda x, y: (x + y) * y) is None
    assert traced(lambda x, y: x + jnp.where(y > 0, x * y, y)).startswith("add of what was multiplied")
    assert traced(lambda x, y: jnp.sum(x) * y).startswith("reduce_sum")
    assert traced(lambda x, y: jax.lax.fori_loop(0, 3, lambda _, z: jnp.exp(z), x)).startswith("exp")
