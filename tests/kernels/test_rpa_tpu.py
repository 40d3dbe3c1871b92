"""The `tpu` implementation in Pallas' TPU interpreter, which detects DMA races; uninitialized memory holds NaN."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.rules import LOG2_E
from levanter_infer.kernels.tpu import backend as tpu_backend
from levanter_infer.kernels.tpu import kv_write
from levanter_infer.kernels.tpu import prefill as tpu_prefill
from levanter_infer.kernels.tpu.kv_write import WritePlan, write_kv
from levanter_infer.kernels.tpu.pool import TpuPool
from levanter_infer.kernels.tpu.sizes import Sizes as KernelSizes
from levanter_infer.kernels.tpu.sizes import Tile, align_queries
from levanter_infer.kernels.tpu.tiling import Tiles, TileShape, candidates, propose
from tests.kernels.ragged import Ragged, Sizes, attend, dense_attention, for_tpu, make_ragged
from tests.tiers import nightly_but

SIZES = Sizes(8, 2, 128, 16, tokens=60, rows=6, max_pages=20)
MIXED = [(1, 300), (7, 260), (1, 3), (2, 2), (30, 290), (1, 129)]
PARTS = pytest.mark.parametrize("parts", [1, 2], ids=["one-part", "parts-share-rows"])
"""Both kv heads in one part, or one in each, whose queries stand in the same rows."""


def small_tiles(sizes: Sizes, *, tokens=128, slots=3, parts=1) -> Tiles:
    """Items of `tokens` keys, so that short sequences have several, and blocks of few queries."""
    pool = TpuPool(sizes.kv_heads, sizes.head_dim, value_dim=sizes.value_dim)
    pages = max(1, tokens // sizes.page_size)
    queries = max(8, align_queries(pool.heads_per_group * sizes.q_heads // sizes.kv_heads))
    return Tiles(Tile(pages, slots, parts), Tile(pages, slots, pool.groups, queries))


def run(batch, *, tiles=None, traced=None, **static):
    arrays = for_tpu(batch)
    call = functools.partial(
        attend,
        kv_heads=arrays.pop("kv_heads"),
        impl="tpu_interpret",
        value_dim=batch.sizes.value_dim,
        tiles=tiles or small_tiles(batch.sizes),
        **{"scale": 0.3, **static},
    )
    out = np.asarray(jax.jit(lambda arrays: call(**arrays))({**arrays, **(traced or {})}).astype(jnp.float32))
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    return out


def check(batch, *, traced=None, tiles=None, **static):
    out = run(batch, traced=traced, tiles=tiles, **static)
    rules: dict = {"scale": 0.3, **static, **{name: np.asarray(value) for name, value in (traced or {}).items()}}
    np.testing.assert_allclose(out, dense_attention(batch, **rules), atol=1e-5, rtol=1e-5)
    return out


def test_a_small_mixed_batch_equals_dense():
    """Items of 256 keys, which are masked 128 at a time, with a scale that queries hold."""
    sizes = Sizes(4, 2, 64, 32, tokens=40, rows=5, max_pages=10)
    batch = make_ragged(sizes, [(1, 300), (7, 140), (1, 3), (20, 290)])
    check(batch, tiles=small_tiles(sizes, tokens=256), scale=1 / LOG2_E)


@pytest.mark.slow
def test_parts_whose_queries_share_rows_equal_dense():
    """Each of three parts has one kv head, and two queries of the six that stand in its rows."""
    sizes = Sizes(6, 3, 128, 16, tokens=4, rows=3, max_pages=10, sinks=True)
    check(make_ragged(sizes, [(1, 150), (1, 3), (1, 130)]), tiles=small_tiles(sizes, parts=3))


@pytest.mark.slow
def test_query_blocks_and_decode_rows_behind_long_histories_equal_dense():
    """The loop over unmasked items is left to start the queries of a later block, of one item or of several, and to
    find the row behind those that decode."""
    sizes = Sizes(2, 1, 128, 16, tokens=40, rows=6, max_pages=8)
    batch = make_ragged(sizes, [(8, 120), (1, 40), (3, 9), (1, 5), (9, 90), (8, 70)])
    check(batch, tiles=small_tiles(sizes, tokens=16, slots=4), scale=1 / LOG2_E)


@pytest.mark.parametrize(
    "choice, value, sizes, row, tokens",
    [
        # As on v5e and v5p; chunks of 256 keys out of KV blocks of 512.
        pytest.param(
            "adds_late", True, Sizes(4, 2, 64, 128, tokens=8, rows=1, max_pages=6), (8, 620), 512,
            marks=pytest.mark.slow,
        ),
        # As on v4, with query blocks before and behind the end of a KV block.
        pytest.param(
            *("transposes_queries", False, Sizes(4, 2, 64, 32, tokens=16, rows=1, max_pages=6), (16, 150), 128),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adds-late", "transposes-in-each-matmul"],
)  # fmt: skip
def test_schedules_of_other_generations_give_the_same_bits(choice, value, sizes, row, tokens, monkeypatch):
    batch, tiles = make_ragged(sizes, [row]), small_tiles(sizes, tokens=tokens)
    own = run(batch, tiles=tiles)
    assert getattr(tpu_prefill, choice)() != value
    monkeypatch.setattr(tpu_prefill, choice, lambda: value)
    np.testing.assert_array_equal(run(batch, tiles=tiles), own)


@pytest.mark.slow
def test_a_kv_block_of_more_pages_than_the_page_table_has_equals_dense():
    """256 pages of 8, whose ids are copied in two parts, of a table with 12."""
    sizes = Sizes(4, 2, 64, 8, tokens=16, rows=3, max_pages=12)
    check(make_ragged(sizes, [(1, 90), (7, 60), (1, 3)]), tiles=small_tiles(sizes, tokens=2048))


@pytest.mark.slow
def test_sinks_in_chunked_attention_equal_dense_and_pages_before_the_chunk_may_be_unmapped():
    """Chunks of 96, which is no power of two: the last queries of a prompt chunk see the third and the fourth."""
    sizes = Sizes(4, 2, 64, 32, tokens=40, rows=5, max_pages=10, sinks=True)
    batch = make_ragged(sizes, [(1, 300), (7, 140), (1, 3), (20, 290)])
    none = batch.arrays["kv_pages"].shape[1]
    batch.arrays["page_indices"] = batch.arrays["page_indices"].at[0, :9].set(none).at[3, :6].set(none)
    check(batch, tiles=small_tiles(sizes, tokens=256), attention_chunk=96)


@pytest.mark.slow
def test_latents_equal_dense():
    """Latents whose values end within a slab, in which rotated keys follow."""
    sizes = Sizes(6, 1, 176, 32, tokens=40, rows=5, max_pages=10, dtype="bfloat16", value_dim=144)
    check(make_ragged(sizes, [(1, 300), (7, 140), (1, 3), (20, 290)]), tiles=small_tiles(sizes, tokens=256))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(6, 1, 176, 32, tokens=60, rows=6, max_pages=10, dtype="bfloat16", value_dim=144),
        Sizes(4, 2, 128, 32, tokens=60, rows=6, max_pages=10, sinks=True),
    ],
    ids=["latents", "two-parts"],
)
def test_rows_that_cores_share_equal_dense(sizes, monkeypatch):
    """Each core has every second decoded row, and every second query block of a prompt chunk; some have one."""
    two_cores = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
    monkeypatch.setattr(tpu_backend, "_interpreter", lambda interpret: two_cores)
    tiles = small_tiles(sizes, parts=sizes.kv_heads)
    tiles = Tiles(*(dataclasses.replace(tile, row_shares=2) for tile in (tiles.decode, tiles.prefill)))
    check(make_ragged(sizes, [(1, 140), (7, 9), (1, 3), (20, 150)]), tiles=tiles)


@pytest.mark.slow
def test_int8_that_is_converted_by_shifts_equals_dense(monkeypatch):
    """As on v4: the keys of a block have another order."""
    monkeypatch.setattr("levanter_infer.kernels.tpu.decode.shifts_words", lambda: True)
    sizes = Sizes(4, 2, 64, 32, tokens=12, rows=4, max_pages=10, dtype="int8")
    batch = make_ragged(sizes, [(1, 300), (1, 140), (1, 3), (1, 290)])
    check(batch, tiles=small_tiles(sizes, tokens=256), traced=dict(sliding_window=jnp.int32(150)))
    check(batch, tiles=small_tiles(sizes))


@pytest.mark.slow
def test_a_mixed_batch_equals_dense():
    check(make_ragged(SIZES, MIXED))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(8, 4, 64, 16, tokens=40, rows=4, max_pages=20),
        Sizes(3, 3, 64, 8, tokens=40, rows=4, max_pages=40),
        Sizes(6, 3, 96, 32, tokens=40, rows=4, max_pages=10, dtype="bfloat16"),
        Sizes(6, 1, 256, 8, tokens=40, rows=4, max_pages=40),
        Sizes(4, 2, 160, 32, tokens=40, rows=4, max_pages=10, dtype="bfloat16", sinks=True),
        Sizes(6, 3, 192, 16, tokens=40, rows=4, max_pages=20, sinks=True),
        Sizes(8, 1, 512, 32, tokens=40, rows=4, max_pages=10, dtype="bfloat16"),
        Sizes(4, 2, 512, 16, tokens=40, rows=4, max_pages=20, sinks=True),
        Sizes(17, 1, 32, 64, tokens=40, rows=4, max_pages=5, dtype="bfloat16"),
        Sizes(2, 2, 128, 256, tokens=40, rows=4, max_pages=2),
        Sizes(4, 4, 128, 16, tokens=40, rows=4, max_pages=20, dtype="float8_e4m3fn"),
        Sizes(8, 4, 64, 32, tokens=40, rows=4, max_pages=10, dtype="int8", sinks=True),
        Sizes(6, 2, 128, 16, tokens=40, rows=4, max_pages=20, dtype="int8"),
        Sizes(16, 1, 576, 16, tokens=40, rows=4, max_pages=20, dtype="bfloat16", value_dim=512),
        Sizes(5, 1, 40, 16, tokens=40, rows=4, max_pages=20, value_dim=24, sinks=True),
        Sizes(8, 1, 576, 32, tokens=40, rows=4, max_pages=10, dtype="int8", value_dim=512),
    ],
    ids=lambda sizes: (
        f"{sizes.q_heads}-{sizes.kv_heads}-{sizes.head_dim}-page{sizes.page_size}-{sizes.dtype}"
        + sizes.sinks * "-sinks"
    ),
)
def test_every_shape_equals_dense(sizes):
    # Scores of 576 numbers would reach 100 with a scale of 0.3, and float32 round them by more than the tolerance.
    scale = 0.3 if sizes.head_dim <= 512 else sizes.head_dim**-0.5
    check(make_ragged(sizes, [(1, 300), (20, 270), (1, 17), (3, 3)]), scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
def test_parts_and_two_slots_equal_dense(sinks):
    sizes = Sizes(8, 4, 128, 16, tokens=40, rows=4, max_pages=20, sinks=sinks)
    check(make_ragged(sizes, [(1, 300), (20, 270), (1, 256)]), tiles=small_tiles(sizes, slots=2, parts=2))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 100, 1000])
def test_a_window_equals_dense_and_pages_before_it_may_be_unmapped(window):
    batch = make_ragged(SIZES, MIXED)
    none = batch.arrays["kv_pages"].shape[1]
    if window == 100:
        batch.arrays["page_indices"] = batch.arrays["page_indices"].at[0, :12].set(none).at[4, :10].set(none)
    check(batch, traced=dict(sliding_window=jnp.int32(window)))


@pytest.mark.slow
@pytest.mark.parametrize("attention_chunk", [1, 128, 100])
def test_chunked_attention_equals_dense(attention_chunk):
    """With a window too, of which the chunk or itself is the tighter bound."""
    check(make_ragged(SIZES, MIXED), attention_chunk=attention_chunk)
    check(make_ragged(SIZES, MIXED), attention_chunk=attention_chunk, traced=dict(sliding_window=jnp.int32(60)))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 144**-0.5])
def test_a_scale_may_be_any_number(scale):
    check(make_ragged(SIZES, MIXED[:3]), scale=scale, soft_cap=50.0)
    check(make_ragged(SIZES, MIXED[:3]), scale=scale)


@pytest.mark.slow
@PARTS
def test_cap_alibi_and_sinks_equal_dense(parts):
    slopes, sinks = jnp.asarray(2.0 ** -np.arange(8), jnp.float32), jnp.linspace(-3, 3, 8, dtype=jnp.float32)
    traced = dict(alibi_slopes=slopes, sinks=sinks)
    check(make_ragged(SIZES, MIXED), traced=traced, tiles=small_tiles(SIZES, parts=parts), soft_cap=0.7)


@pytest.mark.slow
@PARTS
def test_mods_equal_dense_and_hidden_poison_changes_nothing(parts):
    def score_mod(score, q_pos, kv_pos, head):
        relative = jnp.asarray(q_pos - kv_pos).astype(jnp.float32)
        return score * jnp.float32(1.5) - relative / (jnp.asarray(head) + 2).astype(jnp.float32)

    def mask_mod(q_pos, kv_pos, head):
        return (kv_pos != 77) & ((kv_pos + head) % 3 != 1)

    batch = make_ragged(SIZES, [(1, 300), (7, 100)])
    exact = dense_attention(batch, scale=0.3, score_mod=score_mod, mask_mod=mask_mod)
    pages = np.asarray(batch.arrays["page_indices"])[:2, 77 // 16]
    batch.arrays["kv_pages"] = batch.arrays["kv_pages"].at[:, pages, 77 % 16].set(jnp.nan)
    out = run(batch, tiles=small_tiles(SIZES, parts=parts), score_mod=score_mod, mask_mod=mask_mod)
    np.testing.assert_allclose(out, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_keys_on_an_unmapped_page_are_not_seen():
    batch = make_ragged(SIZES, [(1, 300), (20, 290)])
    none = batch.arrays["kv_pages"].shape[1]
    batch.arrays["page_indices"] = batch.arrays["page_indices"].at[:2, 3].set(none)

    def without_page_3(q_pos, kv_pos, head):
        return kv_pos // 16 != 3

    exact = dense_attention(batch, scale=0.3, mask_mod=without_page_3)
    np.testing.assert_allclose(run(batch), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@PARTS
def test_poison_of_a_row_does_not_reach_others(parts):
    batch = make_ragged(SIZES, [(1, 300), (7, 100), (1, 290)])
    pages = np.asarray(batch.arrays["page_indices"])
    batch.arrays["kv_pages"] = batch.arrays["kv_pages"].at[:, pages[1, :7]].set(jnp.nan)
    out, exact = run(batch, tiles=small_tiles(SIZES, parts=parts)), dense_attention(batch, scale=0.3)
    for token in (0, 8):
        np.testing.assert_allclose(out[token], exact[token], atol=1e-5)
    assert np.isnan(out[1:8]).all() and not out[9:].any()


LONG = Sizes(8, 1, 128, 64, tokens=80, rows=3, max_pages=12)
LONG_TILES = Tiles(Tile(pages=8, slots=2, parts=1), Tile(pages=8, slots=3, parts=1, queries=64))
"""Items of 512 keys, which are masked 128 at a time, and blocks of 512 rows, which are computed 256 at a time."""


def long_rows(dtype: str = "float32", sinks: bool = False) -> Ragged:
    """Two query blocks over two KV blocks, whose last keys end within a sub-block; one query over two; few keys."""
    return make_ragged(dataclasses.replace(LONG, dtype=dtype, sinks=sinks), [(70, 710), (1, 600), (2, 5)])


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
def test_subblocks_of_long_items_equal_dense(sinks):
    check(long_rows(sinks=sinks), tiles=LONG_TILES)


@pytest.mark.slow
@pytest.mark.parametrize("window", [30, 260, 512])
def test_a_window_that_begins_within_a_long_item_equals_dense(window):
    """30: the first block sees the end of one item and half of the next, the second block the next alone."""
    check(long_rows(), tiles=LONG_TILES, traced=dict(sliding_window=jnp.int32(window)))


@pytest.mark.slow
@pytest.mark.parametrize("attention_chunk", [64, 640, 672, 1024])
def test_a_chunk_that_begins_within_a_long_item_equals_dense(attention_chunk):
    """Items of 512 keys; the first row's 70 queries are at 640 to 709, in blocks of 64. 64 and 640: no query sees the
    first item. 672: a chunk begins among the queries of the first block. 1024: all queries see all keys."""
    check(long_rows(), tiles=LONG_TILES, attention_chunk=attention_chunk)


@pytest.mark.slow
def test_subblocks_of_int8_equal_dense():
    check(long_rows("int8"), tiles=LONG_TILES, traced=dict(sliding_window=jnp.int32(260)))


@pytest.mark.slow
def test_keys_that_mask_mod_hides_in_a_subblock_may_be_poison():
    def mask_mod(q_pos, kv_pos, head):
        return (kv_pos // 8 != 50) & ((kv_pos + head) % 3 != 1) & (kv_pos // 128 != 2)

    batch = long_rows()
    exact = dense_attention(batch, scale=0.3, mask_mod=mask_mod)
    pages = np.asarray(batch.arrays["page_indices"])[:2]
    pool = batch.arrays["kv_pages"].at[:, pages[:, 400 // 64], 16:24].set(jnp.nan)
    batch.arrays["kv_pages"] = pool.at[:, pages[:, 4:6]].set(jnp.nan)
    np.testing.assert_allclose(run(batch, tiles=LONG_TILES, mask_mod=mask_mod), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_an_unmapped_page_in_a_long_item_is_not_seen():
    batch = long_rows()
    none = batch.arrays["kv_pages"].shape[1]
    batch.arrays["page_indices"] = batch.arrays["page_indices"].at[:2, 3].set(none).at[0, 9].set(none)

    def without_pages(q_pos, kv_pos, head):
        return (kv_pos // 64 != 3) & ((kv_pos // 64 != 9) | (q_pos == 599))

    exact = dense_attention(batch, scale=0.3, mask_mod=without_pages)
    np.testing.assert_allclose(run(batch, tiles=LONG_TILES), exact, atol=1e-5, rtol=1e-5)


def test_a_token_is_packed_and_unpacked():
    for heads, dim in ((4, 64), (3, 96), (1, 256)):
        pool = TpuPool(heads, dim)
        k, v = jnp.arange(2 * 5 * heads * dim, dtype=jnp.float32).reshape(2, 5, heads, dim)
        tokens = pool.unpack(pool.pack(k, v))
        np.testing.assert_array_equal(tokens[:, 0::2], k)
        np.testing.assert_array_equal(tokens[:, 1::2], v)
    assert TpuPool(8, 64).slabs == 8 and TpuPool(8, 128).slabs == 16 and TpuPool(2, 256).slabs == 8


@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e"])
def test_the_scratch_memory_of_proposed_prefill_tiles_leaves_room_for_spills(generation):
    """The compiler adds its spills, at most 2 MiB of them in the cases that were compiled."""
    limit = 64 << 20 if generation == "v6e" else 16 << 20  # `tiling.vmem_bytes`
    for heads, dim, q_per_kv in itertools.product((1, 2, 3, 4, 8, 16, 32), (64, 128, 256, 512), (1, 4, 5, 8)):
        for page_size, dtype in itertools.product((8, 64, 256, 1024), ("int8", "bfloat16", "float32")):
            if page_size > 256 and dim * max(2, jnp.dtype(dtype).itemsize) > 512:
                continue  # no KV block is smaller than a page
            shape = TileShape(generation, heads, dim, q_per_kv, page_size, dtype)
            tile, operand = propose(shape).prefill, jnp.dtype("float32" if dtype == "float32" else "bfloat16")
            rows = tile.queries * q_per_kv * shape.pool.heads_per_group
            transposes = generation != "v4"
            sizes = KernelSizes(tile, shape.pool, page_size, q_per_kv, rows, operand, transposes_queries=transposes)
            vmem = [ref for ref in sizes.scratch(dtype, operand) if getattr(ref, "memory_space", None) == pltpu.VMEM]
            used = sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in vmem)
            assert len(vmem) == 9 + transposes and used <= limit - (2 << 20), (shape, tile, used / 2**20)


def test_proposed_tiles_fit_into_scoped_memory():
    for heads, dim in ((8, 128), (1, 128), (32, 128), (4, 256), (16, 256), (8, 64), (1, 64)):
        for page_size in (8, 16, 64, 256):
            for dtype in ("int8", "bfloat16", "float32"):
                shape = TileShape("v5e", heads, dim, 4, page_size, dtype)
                tile, pool = propose(shape).decode, shape.pool
                page_bytes = -(-shape.page_bytes // tile.parts)
                assert tile.slots * tile.pages * page_bytes <= 12 << 20
                assert tile.slots >= 2 and pool.groups % tile.parts == 0


def test_candidates_need_less_and_less_memory_and_end():
    for heads, dim in ((8, 128), (3, 64), (1, 256)):
        shape = TileShape("v4", heads, dim, 5, 16)
        found = list(candidates(shape))
        assert found[0] == propose(shape) and len(found) < 20
        for larger, smaller in itertools.pairwise(found):
            for a, b in ((larger.decode, smaller.decode), (larger.prefill, smaller.prefill)):
                sizes = [tile.slots * tile.pages * (1 + tile.queries) / tile.parts for tile in (a, b)]
                assert a == b or sizes[1] < sizes[0]
        assert found[-1].decode.pages == found[-1].prefill.pages == 1 and found[-1].decode.slots == 2


def test_kv_heads_that_do_not_fit_the_pool_are_refused():
    arrays = for_tpu(make_ragged(SIZES, [(1, 9)]))
    del arrays["kv_heads"]
    with pytest.raises(ValueError, match="kv_heads: got 3, expected a number that divides the 8 query heads"):
        attend(**arrays, scale=0.3, impl="tpu", kv_heads=3)
    with pytest.raises(ValueError, match=r"expected \[layers, pages, 8, page_size, 128\] for 4 kv heads of 128"):
        attend(**arrays, scale=0.3, impl="tpu", kv_heads=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, page_size", [("float32", 16), ("bfloat16", 8), ("bfloat16", 64), ("float8_e4m3fn", 16), ("int8", 64)]
)
def test_new_tokens_are_written_to_their_destinations_and_nothing_else_changes(dtype, page_size):
    rng, pages, slabs, none = np.random.default_rng(0), 9, 4, 9 * page_size
    pool = jnp.asarray(30 * rng.standard_normal((2, pages, slabs, page_size, 128)), dtype)
    chunks = [7 * page_size + i for i in range(page_size)] + [2 * page_size + i for i in range(page_size // 2)]
    dests = np.asarray([none, 3 * page_size + 5, *chunks, page_size - 1, none], np.int32)
    new = jnp.asarray(30 * rng.standard_normal((len(dests), slabs, 128)), dtype)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
    write = jax.jit(functools.partial(write_kv, interpret=params))
    out = write(pool, jnp.int32(1), new, WritePlan.of(pool, jnp.asarray(dests)))
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    expected = np.asarray(pool.astype(jnp.float32)).copy()
    for token, dest in enumerate(dests):
        if dest < none:
            expected[1, dest // page_size, :, dest % page_size] = new[token].astype(jnp.float32)
    np.testing.assert_array_equal(out.astype(jnp.float32), expected)


def test_more_stretches_are_written_than_the_ring_holds(monkeypatch):
    monkeypatch.setattr(kv_write, "_MOST_SLOTS", 8)
    rng, pages, page_size = np.random.default_rng(0), 21, 16
    pool = jnp.asarray(rng.standard_normal((1, pages, 2, page_size, 128)), jnp.bfloat16)
    dests = jnp.asarray([*(rng.permutation(pages)[:20] * page_size + rng.integers(0, 16, 20)), pages * page_size])
    new = jnp.asarray(rng.standard_normal((21, 2, 128)), jnp.bfloat16)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
    plan = WritePlan.of(pool, dests.astype(jnp.int32))
    out = write_kv(pool, jnp.int32(0), new, plan, interpret=params)
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    expected = pool.at[0, dests // page_size, :, dests % page_size].set(new, mode="drop")
    np.testing.assert_array_equal(out.astype(jnp.float32), expected.astype(jnp.float32))


def test_a_stretch_that_several_grid_steps_share_is_written_by_the_first(monkeypatch):
    """Two grid steps of 8 tokens and a chunk of 12 that goes to one stretch of 32."""
    monkeypatch.setattr(kv_write, "_STEP_BYTES", 8 * 128 * 4)
    rng, page_size = np.random.default_rng(0), 64
    pool = jnp.asarray(30 * rng.standard_normal((1, 4, 1, page_size, 128)), jnp.int8)
    dests = np.asarray([5, *(3 * page_size + 34 + np.arange(12)), 2 * page_size + 7, 4 * page_size], np.int32)
    new = jnp.asarray(30 * rng.standard_normal((len(dests), 1, 128)), jnp.int8)
    plan = WritePlan.of(pool, jnp.asarray(dests))
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
    out = write_kv(pool, jnp.int32(0), new, plan, interpret=params)
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    assert plan.counts.tolist() == [2, 1] and plan.stretches[1] == 1 | (12 << 16)
    expected = pool.at[0, dests // page_size, :, dests % page_size].set(new, mode="drop")
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    "dtype, page_size",
    nightly_but(
        [("bfloat16", 16), ("int8", 64)], [("bfloat16", 16), ("int8", 64), ("float32", 16), ("float8_e4m3fn", 32)]
    ),
)
def test_decode_tokens_and_the_chunks_behind_them_are_written_side_by_side(monkeypatch, dtype, page_size):
    rng, pages, slabs = np.random.default_rng(0), 34, 3
    monkeypatch.setattr(kv_write, "_STEP_BYTES", 24 * slabs * 128 * 4)
    pool = jnp.asarray(30 * rng.standard_normal((2, pages, slabs, page_size, 128)), dtype)
    # The first grid step has a group of decode tokens, seven more that would be one with the first token of the chunk
    # behind them, and the chunk, which goes on in the second. That ends with decode tokens and padding.
    page = rng.permutation(pages)
    decode = page[:15] * page_size + rng.integers(0, page_size, 15)
    chunk = page[17] * page_size + np.arange(12)
    later = page[18:27] * page_size + rng.integers(0, page_size, 9)
    dests = np.asarray([*decode, *chunk, *later, *[pages * page_size] * 5], np.int32)
    new = jnp.asarray(30 * rng.standard_normal((len(dests), slabs, 128)), dtype)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
    plan = WritePlan.of(pool, jnp.asarray(dests))
    out = write_kv(pool, jnp.int32(1), new, plan, interpret=params)
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    expected = pool.at[1, dests // page_size, :, dests % page_size].set(new, mode="drop")
    np.testing.assert_array_equal(out.astype(jnp.float32), expected.astype(jnp.float32))
