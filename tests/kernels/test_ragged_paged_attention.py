"""All implementations against attention on contiguous K/V; the pools are poisoned wherever no row may read."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels.xla.backend import ReferenceBackend
from levanter_infer.kernels.xla.reference import reference_attention
from tests.kernels.ragged import (
    CALLS_MODS,
    LAYER,
    RUNS_HERE,
    Sizes,
    attend,
    attention_call,
    dense_attention,
    make_ragged,
    random_rows,
)
from tests.tiers import nightly_but

SIZES = {
    "mqa-page4": Sizes(8, 1, 16, 4, max_pages=40),
    "gqa3-page16-bits": Sizes(6, 2, 64, 16, dtype="bfloat16", stored="uint16"),
    "mha-page1": Sizes(2, 2, 128, 1, max_pages=150, rows=4),
    "gqa2-page64-bf16": Sizes(4, 2, 32, 64, max_pages=4, dtype="bfloat16"),
}
KINDS = ("decode", "prompts", "chunks", "mixed")
IMPLS = nightly_but([impl for impl in RUNS_HERE if impl not in ("reference", "gpu_interpret")], RUNS_HERE)
"""In CI the tests of random batches and of mods have all of them. The reference is nearly the oracle itself, and
tests/kernels/test_rpa_gpu.py is about the kernels of a GPU."""


@functools.cache
def attention(impl, kv_dtype="float32", **static):
    """The jitted entry; everything that may be traced is."""
    static = {"scale": 0.3, "kv_dtype": kv_dtype, **static}
    return jax.jit(lambda arrays: attend(**arrays, **static, impl=impl))


def check(batch, impl, *, traced=None, **static):
    traced = traced or {}
    out = attention(impl, batch.sizes.dtype, **static)({**batch.arrays, **traced})
    # f32: scores reach 20, so that their rounding alone moves a weight by 2e-6 of itself.
    rules = {"scale": 0.3, **static, **{name: np.asarray(value) for name, value in traced.items()}}
    rules.pop("value_dim", None)  # of the batch's own sizes
    np.testing.assert_allclose(out, dense_attention(batch, **rules), atol=1e-5, rtol=1e-5)
    return out


@pytest.mark.parametrize("impl", RUNS_HERE)
@pytest.mark.parametrize(
    "name, sinks",
    nightly_but([("mqa-page4", False), ("gqa3-page16-bits", True)], itertools.product(SIZES, [False, True])),
)
def test_attention_of_random_batches_equals_dense(name, impl, sinks):
    sizes = dataclasses.replace(SIZES[name], sinks=sinks)
    for kind in KINDS:
        for seed in range(2):
            check(make_ragged(sizes, random_rows(sizes, kind, seed), seed), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_attention_of_the_named_batches_equals_dense(impl):
    n = 21
    scenarios = {
        "one prompt": [(n, n)],
        "decode step 7": [(1, n + 8)],
        "A decodes, B prefills a prompt chunk": [(1, 30), (9, 25)],
        "a page boundary": [(1, 16), (1, 17), (16, 32), (2, 33)],
        "a prompt chunk longer than a query block": [(1, 3), (40, 150)],
        "one token": [(1, 1)],
        "no rows": [],
    }
    for rows in scenarios.values():
        check(make_ragged(SIZES["mqa-page4"], rows), impl)


@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("impl", IMPLS)
def test_window_is_traced_and_equals_dense(impl, sinks):
    sizes = dataclasses.replace(SIZES["mqa-page4"], sinks=sinks)
    batch = make_ragged(sizes, [(1, 140), (1, 3), (20, 150), (7, 7)])
    for window in (1, 5, 130, 1000):
        check(batch, impl, traced=dict(sliding_window=jnp.int32(window)))


@pytest.mark.parametrize("impl", IMPLS)
def test_pages_behind_a_window_may_be_unmapped_and_change_no_bit(impl):
    """Windows that end within a page and at its edge; of a prompt chunk, those of its first query."""
    batch = make_ragged(SIZES["mqa-page4"], [(1, 140), (1, 3), (20, 150), (7, 7), (1, 128)])
    none, pages = batch.arrays["kv_pages"].shape[1], batch.arrays["page_indices"]
    run = attention(impl)
    for window in (1, 5, 9, 64):
        traced = dict(sliding_window=jnp.int32(window))
        whole = run({**batch.arrays, "page_indices": pages, **traced})
        for row, first_query in enumerate((139, 2, 130, 0, 127)):
            behind = max(first_query - window + 1, 0) // 4
            batch.arrays["page_indices"] = batch.arrays["page_indices"].at[row, :behind].set(none)
        np.testing.assert_array_equal(check(batch, impl, traced=traced), whole)
        batch.arrays["page_indices"] = pages


@pytest.mark.parametrize("attention_chunk, window", [(1, None), (16, None), (100, None), (100, 20)])
@pytest.mark.parametrize("impl", IMPLS)
def test_chunked_attention_equals_dense_and_pages_before_the_chunk_may_be_unmapped(impl, attention_chunk, window):
    """Queries at the first and the last position of a chunk, prompt chunks that cross one and three of them."""
    sizes = dataclasses.replace(SIZES["mqa-page4"], sinks=True)
    batch = make_ragged(sizes, [(1, 129), (1, 128), (1, 3), (34, 133), (7, 7)])
    none = batch.arrays["kv_pages"].shape[1]
    unmapped = {0: 128 // attention_chunk * attention_chunk // 4, 3: 99 // attention_chunk * attention_chunk // 4}
    for row, pages in unmapped.items():
        batch.arrays["page_indices"] = batch.arrays["page_indices"].at[row, :pages].set(none)
    check(batch, impl, attention_chunk=attention_chunk, traced=window and dict(sliding_window=jnp.int32(window)))


@pytest.mark.parametrize("head_dim", nightly_but([96, 512], [64, 96, 128, 160, 192, 256, 512]))
@pytest.mark.parametrize("impl", IMPLS)
def test_every_head_size_equals_dense(impl, head_dim):
    sizes = Sizes(6, 2, head_dim, 16, tokens=24, rows=4, max_pages=10, dtype="bfloat16", sinks=True)
    check(make_ragged(sizes, [(1, 140), (18, 130), (1, 5), (3, 3)]), impl, scale=head_dim**-0.5)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(6, 1, 34, 4, max_pages=40, value_dim=24),
        Sizes(16, 1, 576, 16, tokens=24, rows=4, max_pages=10, dtype="bfloat16", stored="uint16", value_dim=512),
        Sizes(3, 1, 96, 16, tokens=24, rows=4, max_pages=10, value_dim=64, sinks=True),
        Sizes(8, 2, 40, 16, tokens=24, rows=4, max_pages=10, dtype="int8", value_dim=40, sinks=True),
    ],
    ids=["small", "deepseek-bits", "few-rows", "two-heads-int8"],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_values_that_are_the_first_numbers_of_their_keys_equal_dense(impl, sizes):
    if impl == "cpu" and sizes.kv_heads > 1:
        with pytest.raises(ValueError, match="latents of one head, not of 2"):
            batch = make_ragged(dataclasses.replace(sizes, dtype="float32"), [(1, 3)])
            attend(**batch.arrays, scale=1.0, value_dim=40, impl=impl)
        return
    if impl.startswith("gpu") and sizes.dtype == "int8":
        pytest.skip("kernels for GPUs read no pages of int8")
    for kind in KINDS:
        batch = make_ragged(sizes, random_rows(sizes, kind, 0), 0)
        out = check(batch, impl, value_dim=sizes.value_dim, scale=sizes.head_dim**-0.5)
        assert out.shape == (sizes.tokens, sizes.q_heads, sizes.value_dim)


def test_a_pool_of_latents_is_checked():
    sizes = Sizes(6, 1, 34, 4, max_pages=40, value_dim=24)
    arrays = make_ragged(sizes, [(1, 3)]).arrays
    with pytest.raises(ValueError, match="value_dim: got 35, expected 1 to 34"):
        attend(**arrays, scale=1.0, value_dim=35, impl="xla")
    with pytest.raises(ValueError, match="got 1 heads of latents for 6 query heads, expected kv_heads=2"):
        attend(**arrays, scale=1.0, value_dim=24, kv_heads=2, impl="xla")
    with pytest.raises(ValueError, match="got 1 interleaved heads"):
        attend(**arrays, scale=1.0, kv_heads=1, impl="xla")


@pytest.mark.parametrize("scale, soft_cap", [(1.0, None), (144**-0.5, 50.0), (-0.01, None)])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_scale_may_be_any_number(impl, scale, soft_cap):
    check(make_ragged(SIZES["mqa-page4"], [(1, 90), (20, 60)]), impl, scale=scale, soft_cap=soft_cap)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_sink_takes_its_share_of_the_weights_and_one_of_minus_infinity_takes_none(impl):
    """Sinks of 4 heads: none; the maximum, by 60; one far below all scores; one of the size of the scores."""
    batch = make_ragged(SIZES["gqa2-page64-bf16"], [(1, 100), (20, 60), (2, 2)])
    run = attention(impl, "bfloat16")
    plain = np.asarray(run(batch.arrays))
    out = np.asarray(run({**batch.arrays, "sinks": jnp.asarray([-np.inf, 60, -60, 0], jnp.float32)}))
    np.testing.assert_allclose(out[:, 0], plain[:, 0], atol=1e-6)
    np.testing.assert_allclose(out[:, 1], 0, atol=1e-12)
    np.testing.assert_allclose(out[:, 2], plain[:, 2], atol=1e-6)
    assert np.abs(out[:23, 3] - plain[:23, 3]).max() > 0.01
    check(batch, impl, traced=dict(sinks=jnp.asarray([-1e30, 60, -60, 0], jnp.float32)))


@pytest.mark.parametrize("impl", CALLS_MODS)
def test_a_query_with_a_sink_that_sees_nothing_gives_zeros(impl):
    def mask_mod(q_pos, kv_pos, head):
        return (q_pos % 4 != 2) & (kv_pos >= 0) & (head >= 0)

    batch = make_ragged(dataclasses.replace(SIZES["mqa-page4"], sinks=True), [(1, 139), (1, 12), (20, 30)])
    batch.arrays["sinks"] = batch.arrays["sinks"].at[0].set(-jnp.inf)
    out = attention(impl, mask_mod=mask_mod)(batch.arrays)
    sees_nothing = np.array([True, False, *(np.arange(10, 30) % 4 == 2)])
    assert not np.asarray(out[:22])[sees_nothing].any() and np.asarray(out[:22])[~sees_nothing].all()


@pytest.mark.parametrize("impl", IMPLS)
def test_cap_alibi_and_sinks_equal_dense(impl):
    batch = make_ragged(SIZES["gqa3-page16-bits"], [(1, 140), (30, 170), (4, 4)])
    slopes, sinks = jnp.asarray(2.0 ** -np.arange(6), jnp.float32), jnp.linspace(-3, 3, 6, dtype=jnp.float32)
    check(batch, impl, traced=dict(alibi_slopes=slopes, sinks=sinks), soft_cap=0.7)


@pytest.mark.parametrize("impl", CALLS_MODS)
def test_mods_equal_dense_and_a_query_that_sees_nothing_gives_zeros(impl):
    def score_mod(score, q_pos, kv_pos, head):
        relative = jnp.asarray(q_pos - kv_pos).astype(jnp.float32)
        return score * jnp.float32(1.5) - relative / (jnp.asarray(head) + 2).astype(jnp.float32)

    def mask_mod(q_pos, kv_pos, head):
        return ((kv_pos + head) % 3 != 1) & (q_pos % 4 != 2)

    batch = make_ragged(SIZES["mqa-page4"], [(1, 139), (1, 12), (20, 30)])
    out = check(batch, impl, score_mod=score_mod, mask_mod=mask_mod)
    assert not out[0].any() and out[1].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_hidden_keys_on_unmapped_pages_are_not_read(impl):
    sizes = SIZES["mqa-page4"]
    batch = make_ragged(sizes, [(1, 100), (3, 90)])
    none = batch.arrays["kv_pages"].shape[1]
    batch.arrays["page_indices"] = batch.arrays["page_indices"].at[:2, :15].set(none)
    check(batch, impl, traced=dict(sliding_window=jnp.int32(20)))


@pytest.mark.parametrize("context", nightly_but([1024], [1024, 16384]))
def test_long_contexts_equal_dense_without_nan(context):
    sizes = Sizes(2, 1, 16, 16, tokens=4, rows=2, max_pages=context // 16)
    batch = make_ragged(sizes, [(1, context), (3, context - 5)])
    for impl in RUNS_HERE:
        assert np.isfinite(check(batch, impl)).all()


def test_large_scores_do_not_overflow():
    batch = make_ragged(SIZES["mqa-page4"], [(1, 150), (20, 60)])
    batch.arrays["q"] = batch.arrays["q"] * jnp.float32(1e4)
    out = [attention(impl)(batch.arrays) for impl in RUNS_HERE]
    assert np.isfinite(out[0][:21]).all()
    for result in out[1:]:
        np.testing.assert_allclose(result, out[0], atol=2e-3)


@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
def test_bf16_queries_give_bf16_rounded_once(sinks):
    sizes = dataclasses.replace(SIZES["gqa3-page16-bits"], sinks=sinks)
    batch = make_ragged(sizes, [(1, 100), (20, 60)])
    q = batch.arrays["q"].astype(jnp.bfloat16)
    for impl in RUNS_HERE:
        run = attention(impl, "bfloat16")
        exact = run({**batch.arrays, "q": q.astype(jnp.float32)})
        out = run({**batch.arrays, "q": q})
        assert out.dtype == jnp.bfloat16
        # The tensor cores take weights of bf16 as well: half an ulp of each.
        atol = 2**-7 if impl.startswith("gpu") else 1e-6
        np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=2**-8, atol=atol)


def test_float8_bits_are_read_as_float8():
    batch = make_ragged(Sizes(4, 2, 16, 8, dtype="float8_e4m3fn", stored="uint8"), [(1, 70), (10, 20)])
    for impl in ("reference", "xla"):
        check(batch, impl)


def test_reference_returns_the_weights():
    batch = make_ragged(SIZES["mqa-page4"], [(1, 9), (2, 5)])
    call = attention_call(**batch.arrays, scale=0.3, backend=ReferenceBackend())
    out, weights = reference_attention(call)
    assert weights.shape == (48, 8, 160)
    np.testing.assert_allclose(weights.sum(-1)[:3], 1, atol=1e-6)
    assert (np.asarray(weights[:, 0] > 0).sum(-1)[:4] == [9, 4, 5, 0]).all()
    np.testing.assert_allclose(np.asarray(weights[0, :, :9]) @ batch.values[0][:, 0], out[0], atol=1e-5)


@pytest.mark.parametrize("impl", nightly_but([i for i in CALLS_MODS if i != "gpu_interpret"], CALLS_MODS))
def test_position_5_of_pages_of_4_is_offset_1_of_the_second_page(impl):
    num_pages, none = 9, 9
    value = jnp.arange(num_pages * 4, dtype=jnp.float32).reshape(num_pages, 4)
    pool = jnp.zeros((LAYER + 1, num_pages, 4, 2, 1), jnp.float32).at[LAYER, :, :, 1, 0].set(value)

    def only_position_5(q_pos, kv_pos, head):
        return (kv_pos == 5) & (q_pos >= 0) & (head >= 0)

    arrays = dict(
        q=jnp.ones((1, 1, 1), jnp.float32),
        kv_pages=pool,
        layer=jnp.int32(LAYER),
        page_indices=jnp.asarray([[2, 7, none]], jnp.int32),
        seq_lens=jnp.asarray([7], jnp.int32),
        cu_q_lens=jnp.asarray([0, 1], jnp.int32),
        num_seqs=jnp.int32(1),
    )
    out = attention(impl, mask_mod=only_position_5)(arrays)
    assert out[0, 0, 0] == value[7, 1]
