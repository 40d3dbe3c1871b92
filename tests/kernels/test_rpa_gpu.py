"""Particulars of the `gpu` implementation, in Pallas' interpreter or, where there is a GPU, on it.

The oracle tests of `test_ragged_paged_attention.py` run on it as well.
"""

import functools
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.kernels.gpu import attention as rpa_gpu
from levanter_infer.runtime import gpu_compiler
from tests.kernels.ragged import RUNS_HERE, Sizes, attend, bits, dense_attention, lowering_for_gpu, make_ragged
from tests.tiers import nightly_but

ROOT = Path(__file__).resolve().parents[2]
GPU = RUNS_HERE[-1]
SIZES = Sizes(6, 2, 32, 16, tokens=60, rows=6, max_pages=20)
MIXED = [(1, 300), (7, 260), (1, 3), (2, 2), (30, 290), (1, 129)]


@functools.cache
def _jitted(kv_dtype, mods):
    static = dict(scale=0.3, kv_dtype=kv_dtype, impl=GPU, **dict(mods))
    return jax.jit(lambda arrays: attend(**arrays, **static))


def run(batch, retrace=False, **mods):
    """`retrace`: in a new trace, which uses what a test has patched."""
    jitted = _jitted(batch.sizes.dtype, tuple(mods.items()))
    return (jax.jit(lambda arrays: jitted.__wrapped__(arrays)) if retrace else jitted)(batch.arrays)


def check(batch, out, **rules):
    np.testing.assert_allclose(out, dense_attention(batch, scale=0.3, **rules), atol=1e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def two_lanes(monkeypatch):
    """Steps of few tokens have two lanes too, as large ones; the oracle tests have one."""
    monkeypatch.setattr(rpa_gpu, "ONE_LANE_TOKENS", 0)


@pytest.fixture
def many_splits(monkeypatch):
    """Histories in parts of at least 32 keys, heads in tiles of 16."""

    def smaller(lanes=rpa_gpu.lanes, **sizes):
        decode, prefill = lanes(**sizes)
        return replace(decode, rows=16, keys=16, splits=4, min_turns=2), replace(prefill, rows=16, keys=32)

    monkeypatch.setattr(rpa_gpu, "lanes", smaller)


@pytest.mark.parametrize("head_dim, page_size", nightly_but([(96, 32)], [(64, 8), (96, 32), (128, 16), (256, 256)]))
def test_every_head_dim_and_page_size_equals_dense(head_dim, page_size):
    sizes = Sizes(4, 2, head_dim, page_size, tokens=12, rows=3, max_pages=max(1, 320 // page_size), dtype="bfloat16")
    batch = make_ragged(sizes, [(1, 250), (9, 140), (1, 17)])
    check(batch, run(batch))


@pytest.mark.parametrize(
    "head_dim, itemsize, group, many, few",
    [
        (128, 2, 4, (32, 1), (64, 4)),
        (64, 4, 16, (32, 1), (64, 4)),
        (128, 4, 4, (32, 2), (32, 4)),
        (128, 2, 17, (64, 4), (64, 4)),
        (256, 2, 4, (32, 8), (32, 8)),
    ],
)
def test_many_rows_have_turns_of_one_warp(head_dim, itemsize, group, many, few):
    """Keys and warps; heads of which one warp holds no turn keep more. Splits are as long as without."""
    sizes = dict(heads_per_kv_head=group, head_dim=head_dim, itemsize=itemsize, max_tokens=8192, kv_heads=8)
    for rows, expected in ((32, many), (31, few)):
        tile, _ = rpa_gpu.lanes(**sizes, num_rows=rows)
        assert (tile.keys, tile.warps) == expected
        assert tile.keys * tile.min_turns == rpa_gpu.least_split(rows * 8)


def test_chunks_of_float32_have_registers():
    sizes = dict(heads_per_kv_head=4, max_tokens=8192, kv_heads=8, num_rows=8)
    found = {
        (dim, size): rpa_gpu.lanes(head_dim=dim, itemsize=size, **sizes)[1] for dim in (128, 256) for size in (2, 4)
    }
    assert all(tile.warps == 8 for tile in found.values())
    assert [found[128, 2].rows, found[128, 4].rows, found[256, 4].rows] == [128, 64, 32]


@pytest.mark.parametrize("one_lane, splits", nightly_but([(False, True)], itertools.product([False, True], repeat=2)))
def test_turns_of_one_warp_equal_dense(one_lane, splits, monkeypatch):
    sizes = Sizes(6, 2, 64, 16, tokens=16, rows=4, max_pages=20, sinks=True)
    monkeypatch.setattr(rpa_gpu, "_MANY_PROGRAMS", 1)
    monkeypatch.setattr(rpa_gpu, "ONE_LANE_TOKENS", 64 * one_lane)
    if not splits:
        monkeypatch.setattr(rpa_gpu, "least_split", lambda _: 1024)
    seen, run_lane = [], rpa_gpu._run
    monkeypatch.setattr(rpa_gpu, "_run", lambda call, tile, *rest: seen.append(tile) or run_lane(call, tile, *rest))
    batch = make_ragged(sizes, [(1, 290), (5, 200), (1, 32), (1, 33)])
    batch.arrays["sliding_window"] = jnp.int32(100)
    check(batch, run(batch, retrace=True), sliding_window=100)
    assert (seen[-1].keys, seen[-1].warps, seen[-1].splits > 1) == (32, 1, splits)


@pytest.mark.slow
def test_fixed_splits_do_not_depend_on_the_number_of_rows(monkeypatch):
    """The same sequence in a step of few rows and in one of many: a turn of keys may not be shorter there."""
    seen = []
    monkeypatch.setattr(rpa_gpu, "_run", lambda call, tile, *_: seen.append(tile) or call.q)
    for rows in (1, 512):
        batch = make_ragged(Sizes(8, 8, 64, 16, tokens=8, rows=rows, max_pages=40), [(1, 9)])
        attend(**batch.arrays, scale=1.0, impl="gpu", rows_apart=True)
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_pages_of_float16_equal_dense():
    batch = make_ragged(replace(SIZES, dtype="float16"), MIXED[:4])
    check(batch, run(batch))


@pytest.mark.slow
@pytest.mark.parametrize("q_heads, kv_heads", [(1, 1), (3, 3), (12, 2), (40, 1)])
def test_splits_and_tiles_of_heads_equal_dense(q_heads, kv_heads, many_splits):
    batch = make_ragged(Sizes(q_heads, kv_heads, 16, 8, tokens=24, rows=4, max_pages=20), [(1, 160), (18, 40), (1, 50)])
    sinks, slopes = jnp.linspace(-3, 3, q_heads, dtype=jnp.float32), jnp.linspace(0.1, 1, q_heads, dtype=jnp.float32)
    batch.arrays.update(sinks=sinks, alibi_slopes=slopes, sliding_window=jnp.int32(130))
    out = run(batch, retrace=True)
    check(batch, out, sinks=np.asarray(sinks), alibi_slopes=np.asarray(slopes), sliding_window=130)


@pytest.mark.parametrize("rules", [dict(), dict(sinks=True, attention_chunk=150)], ids=["plain", "sinks-chunk"])
def test_bits_of_a_row_do_not_depend_on_the_others(rules, many_splits):
    rules = dict(rules)
    together = make_ragged(replace(SIZES, sinks=rules.pop("sinks", False)), MIXED)
    together.arrays["sliding_window"] = jnp.int32(200)
    jitted = jax.jit(_jitted.__wrapped__("float32", tuple(rules.items())).__wrapped__)
    out = jitted(together.arrays)
    check(together, out, sliding_window=200, **rules)
    token = 0
    for row, (q_len, _) in enumerate(MIXED):
        alone = dict(together.arrays)
        alone["page_indices"] = jnp.roll(together.arrays["page_indices"], -row, axis=0)
        alone["seq_lens"] = jnp.roll(together.arrays["seq_lens"], -row)
        alone["cu_q_lens"] = jnp.full(7, q_len, jnp.int32).at[0].set(0)
        alone["num_seqs"] = jnp.int32(1)
        alone["q"] = jnp.roll(together.arrays["q"], -token, axis=0)
        np.testing.assert_array_equal(bits(jitted(alone)[:q_len]), bits(out[token : token + q_len]))
        token += q_len


@pytest.mark.parametrize("rules", [dict(), dict(sinks=True, attention_chunk=150)], ids=["plain", "sinks-chunk"])
def test_bits_of_a_token_do_not_depend_on_its_chunk_where_splits_are_fixed(rules, monkeypatch):
    """A prompt chunk, and each of its tokens as a decode token between others; two splits, of which its first tokens
    see nothing of the second; a window that begins within the first."""
    monkeypatch.setattr(rpa_gpu, "FIXED_SPLITS", 2)
    monkeypatch.setattr(rpa_gpu, "MIN_FIXED_SPLIT_TOKENS", 64)
    rules = dict(rules)
    chunk = make_ragged(replace(SIZES, sinks=rules.pop("sinks", False)), [(3, 9), (30, 270)])
    chunk.arrays["sliding_window"] = jnp.int32(230)
    static = dict(scale=0.3, impl=GPU, rows_apart=True, **rules)
    jitted = jax.jit(lambda arrays: attend(**arrays, **static))
    out = jitted(chunk.arrays)
    check(chunk, out, sliding_window=230, **rules)
    assert not np.asarray(out[33:]).any()
    for first in range(0, 30, 5):
        apart = dict(chunk.arrays)  # five tokens of the second row, as five rows of one
        apart["page_indices"] = jnp.broadcast_to(chunk.arrays["page_indices"][1], apart["page_indices"].shape)
        apart["seq_lens"] = jnp.append(241 + first + jnp.arange(5, dtype=jnp.int32), 0)
        apart["cu_q_lens"] = jnp.minimum(jnp.arange(7, dtype=jnp.int32), 5)
        apart["num_seqs"] = jnp.int32(5)
        apart["q"] = jnp.roll(chunk.arrays["q"], -3 - first, axis=0)
        token = 3 + first
        np.testing.assert_array_equal(bits(jitted(apart)[:5]), bits(out[token : token + 5]))


@pytest.mark.parametrize("hidden", nightly_but([270], [None, 270]))
def test_poison_that_a_query_does_not_see_changes_nothing(hidden, many_splits):
    """In another row's pages and queries, before the window, and where `mask_mod` hides it."""

    def mask_mod(q_pos, kv_pos, head):
        return (kv_pos != hidden) & (q_pos >= 0) & (head >= 0)

    mods = {} if hidden is None else dict(mask_mod=mask_mod)
    batch = make_ragged(SIZES, [(1, 300), (7, 100), (1, 290)])
    batch.arrays["sliding_window"] = jnp.int32(100)
    pages, pool = np.asarray(batch.arrays["page_indices"]), batch.arrays["kv_pages"]
    for row, seq_len in ((0, 300), (2, 290)):
        unseen = np.append(np.arange(seq_len - 100), [] if hidden is None else hidden).astype(int)
        pool = pool.at[:, pages[row, unseen // 16], unseen % 16].set(jnp.nan)
    batch.arrays["kv_pages"] = pool.at[:, pages[1, :7]].set(jnp.nan)
    batch.arrays["q"] = batch.arrays["q"].at[1:8].set(jnp.nan)
    out = np.asarray(run(batch, retrace=True, **mods))
    exact = dense_attention(batch, scale=0.3, sliding_window=100, **mods)
    for token in (0, 8):
        np.testing.assert_allclose(out[token], exact[token], atol=1e-5)
    assert np.isnan(out[1:8]).all() and not out[9:].any()


def test_pages_of_float8_are_refused():
    batch = make_ragged(Sizes(4, 2, 16, 8, dtype="float8_e4m3fn"), [(1, 9)])
    with pytest.raises(ValueError, match='reads pages of float32, bfloat16 or float16, not float8_e4m3fn; use "xla"'):
        run(batch)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of other platforms")
def test_a_cpu_refuses_to_compile_it():
    batch = make_ragged(SIZES, [(1, 9)])
    with pytest.raises(ValueError, match="interpret"):
        jax.jit(functools.partial(attend, scale=0.3, impl="gpu"))(**batch.arrays)


def _bend(score, q_pos, kv_pos, head):
    return score - jnp.float32(0.1) * (q_pos - kv_pos).astype(jnp.float32) / (head + 1).astype(jnp.float32)


def _stripes(q_pos, kv_pos, head):
    return ((kv_pos + head) % 3 != 1) & (q_pos % 4 != 2)


@pytest.mark.parametrize(
    "sizes, options",
    [
        (Sizes(32, 8, 128, 16, dtype="bfloat16"), {}),
        (Sizes(9, 3, 64, 8, max_pages=400, dtype="bfloat16"), dict(score_mod=_bend, mask_mod=_stripes)),
        (Sizes(4, 4, 256, 256, dtype="float16"), dict(soft_cap=20.0)),
        (Sizes(71, 1, 96, 64, tokens=1, rows=1), {}),
        (Sizes(6, 2, 64, 16, max_pages=80, stored="uint16", dtype="bfloat16"), dict(sinks=True, window=True)),
        (Sizes(6, 2, 64, 16, max_pages=80), dict(alibi=True, window=True)),
        (Sizes(64, 8, 64, 16, max_pages=80, dtype="bfloat16"), dict(sinks=True, window=True)),
        (Sizes(40, 8, 128, 16, max_pages=80, dtype="bfloat16"), dict(attention_chunk=8192)),
        (Sizes(6, 2, 160, 16, max_pages=80, dtype="bfloat16"), dict(attention_chunk=100, sinks=True)),
        (Sizes(6, 2, 192, 16), dict(attention_chunk=64, window=True)),
        (Sizes(16, 2, 512, 16, max_pages=80, dtype="bfloat16"), {}),
        (Sizes(16, 2, 512, 16), {}),
        (Sizes(128, 1, 576, 64, max_pages=80, dtype="bfloat16", value_dim=512), {}),
        (Sizes(6, 1, 34, 16, max_pages=80, value_dim=24), dict(score_mod=_bend, mask_mod=_stripes)),
        (Sizes(32, 8, 128, 16, dtype="bfloat16"), dict(rows_apart=True)),
        (Sizes(32, 8, 128, 16, max_pages=80, dtype="bfloat16"), dict(rows_apart=True, sinks=True, window=True)),
    ],
)
def test_every_option_is_lowered_for_a_gpu(sizes, options):
    arrays = dict(make_ragged(replace(sizes, tokens=1 if sizes.rows == 1 else 48), [(1, 9)]).arrays)
    options = dict(options)
    if options.pop("sinks", False):
        arrays["sinks"] = jnp.zeros(sizes.q_heads)
    if options.pop("alibi", False):
        arrays["alibi_slopes"] = jnp.ones(sizes.q_heads)
    if options.pop("window", False):
        arrays["sliding_window"] = jnp.int32(100)
    static = dict(scale=0.1, kv_dtype=jnp.dtype(sizes.dtype), value_dim=sizes.value_dim, impl="gpu", **options)
    with lowering_for_gpu():
        traced = jax.jit(lambda arrays: attend(**arrays, **static)).trace(arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    is_apart = options.get("rows_apart", False)
    least = rpa_gpu.MIN_FIXED_SPLIT_TOKENS if is_apart else rpa_gpu.least_split(sizes.rows * sizes.kv_heads)
    splits = sizes.max_pages * sizes.page_size > least
    # One kernel for prompt chunks if the batch can hold any, one for decode tokens, one to combine their splits; with
    # `rows_apart` one takes both.
    assert text.count("custom_call") == (sizes.tokens > 1 and not is_apart) + 1 + splits


@pytest.mark.slow
@pytest.mark.skipif(gpu_compiler.why_missing() is not None, reason=f"needs {gpu_compiler.NEEDS}")
def test_kernels_compile_for_an_h200_and_for_the_least_shared_memory():
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu_kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"compiled": 110, "failures": {}}


def test_a_step_of_few_tokens_has_one_lane_with_the_bits_of_decode_tokens(monkeypatch):
    batch = make_ragged(SIZES, MIXED)
    two = run(batch)
    monkeypatch.setattr(rpa_gpu, "ONE_LANE_TOKENS", 64)
    one = run(batch, retrace=True)
    check(batch, one)
    decodes = [
        first
        for first, (q_len, _) in zip(np.cumsum([0] + [q for q, _ in MIXED[:-1]]), MIXED, strict=True)
        if q_len == 1
    ]
    np.testing.assert_array_equal(bits(one)[decodes], bits(two)[decodes])
    jaxpr = jax.make_jaxpr(functools.partial(attend, scale=0.2, impl="gpu"))(**batch.arrays)
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("pallas_call") == 2


def test_nothing_is_made_of_the_pool():
    """The full pool is the operand of the kernels: no slice of a layer, no padding, no other dtype."""
    arrays = make_ragged(replace(SIZES, head_dim=24), [(1, 300), (20, 260)]).arrays
    jaxpr = jax.make_jaxpr(functools.partial(attend, scale=0.2, impl="gpu"))(**arrays)
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("pallas_call") == 3
    assert max(out.aval.size for eqn in jaxpr.eqns for out in eqn.outvars) < arrays["kv_pages"][0].size
