"""Which pages the attention kernels read, and how often: their results alone would not show it."""

import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.extend.core import Jaxpr

from levanter_infer.bench.attention import Case, inputs
from levanter_infer.kernels.gpu import attention as gpu_attention
from levanter_infer.kernels.tpu.sizes import Tile
from levanter_infer.kernels.tpu.tiling import Tiles
from tests.jaxprs import LOOPS, body, equations
from tests.kernels.ragged import RUNS_HERE, Sizes, attend, for_tpu, make_ragged
from tests.tiers import nightly_but

SIZES = Sizes(4, 2, 64, 16, tokens=8, rows=3, max_pages=40)
LENS = (300, 100)
PAGES = tuple(-(-length // SIZES.page_size) for length in LENS)


WALKS = [impl for impl in RUNS_HERE if impl != "reference"]


# M45: a sequence's pages and no more


@pytest.mark.parametrize("impl", nightly_but([impl for impl in WALKS if impl != "gpu_interpret"], WALKS))
def test_time_follows_the_length_and_not_the_width_of_the_table(impl, optimized):
    """Sequences of three pages in tables for 1,024 and for 16,384, which a walk over whole tables would show."""

    def seconds(width: int) -> float:
        batch = make_ragged(Sizes(4, 2, 64, 16, tokens=2, rows=2, max_pages=8), [(1, 40), (1, 33)])
        pages = batch.arrays["page_indices"]
        none = batch.arrays["kv_pages"].shape[1]
        arrays = {**batch.arrays, "page_indices": jnp.full((2, width), none, jnp.int32).at[:, :8].set(pages)}
        program = jax.jit(lambda arrays: attend(**arrays, scale=0.3, impl=impl))
        jax.block_until_ready(program(arrays))
        times = []
        for _ in range(15):
            start = time.perf_counter()
            jax.block_until_ready(program(arrays))
            times.append(time.perf_counter() - start)
        return min(times)

    narrow, wide = seconds(1024), seconds(16384)
    assert wide < 4 * narrow, f"{narrow * 1e3:.2f} ms became {wide * 1e3:.2f} ms"


@pytest.mark.parametrize("impl", nightly_but([impl for impl in WALKS if impl not in ("xla", "gpu_interpret")], WALKS))
def test_pages_before_the_chunk_cost_no_time(impl, optimized):
    """16,384 keys, of which the query sees 32."""
    batch = make_ragged(Sizes(4, 2, 64, 64, tokens=2, rows=2, max_pages=256), [(1, 256 * 64)])

    def seconds(**rules) -> float:
        program = jax.jit(lambda arrays: attend(**arrays, scale=0.3, impl=impl, **rules))
        jax.block_until_ready(program(batch.arrays))
        times = []
        for _ in range(15):
            start = time.perf_counter()
            jax.block_until_ready(program(batch.arrays))
            times.append(time.perf_counter() - start)
        return min(times)

    chunk, everything = seconds(attention_chunk=32), seconds()
    assert 4 * chunk < everything, f"{chunk * 1e3:.2f} ms in a chunk, {everything * 1e3:.2f} ms without"


# M45, M50, M51 on a TPU: the async copies, one by one


@pytest.fixture
def copies(monkeypatch):
    """Async copies in Pallas' TPU interpreter: ("start", shape of the source, indices), ("wait", semaphore, bytes)."""
    events: list[tuple] = []
    start, wait = interpret_pallas_call.dma_start, interpret_pallas_call.dma_wait

    def noted_start(token, device, core, space, source, transforms, *rest, **options):
        (indexer,) = transforms
        events.append(("start", indexer.shape, indexer.indices))
        return start(token, device, core, space, source, transforms, *rest, **options)

    def noted_wait(token, device, core, semaphore, size, **options):
        events.append(("wait", int(semaphore), int(size)))
        return wait(token, device, core, semaphore, size, **options)

    monkeypatch.setattr(interpret_pallas_call, "dma_start", noted_start)
    monkeypatch.setattr(interpret_pallas_call, "dma_wait", noted_wait)
    return events


@pytest.mark.slow
def test_a_tpu_copies_no_page_before_the_chunk(copies):
    """In chunks of 96, a query at 299 sees the keys from 288 on, and one at 99 those from 96 on: a page each."""
    batch = make_ragged(SIZES, [(1, length) for length in LENS])
    arrays, tiles = for_tpu(batch), Tiles(Tile(8, 3, 1), Tile(8, 2, 1, 8))
    heads = arrays.pop("kv_heads")
    call = functools.partial(attend, kv_heads=heads, scale=0.3, impl="tpu_interpret", tiles=tiles, attention_chunk=96)
    jax.block_until_ready(jax.jit(lambda arrays: call(**arrays))(arrays))

    layers, num_pages, *page = arrays["kv_pages"].shape
    pool, table = (layers * num_pages, *page), np.asarray(batch.arrays["page_indices"])
    fetched = [int(event[2][0]) for event in copies if event[0] == "start" and event[1] == pool]
    assert sorted(fetched) == sorted(num_pages + table[row, page] for row, page in ((0, 18), (1, 6)))


def test_a_tpu_copies_each_page_once_and_ahead_of_its_use(copies):
    """26 pages for 300 and 100 tokens, keys and values of all heads in one copy each; the copies of the second item are
    started before the kernel waits for those of the first."""
    batch = make_ragged(SIZES, [(1, length) for length in LENS])
    pages_per_item, arrays = 8, for_tpu(batch)
    tiles = Tiles(Tile(pages_per_item, 3, 1), Tile(pages_per_item, 2, 1, 8))
    heads = arrays.pop("kv_heads")
    call = functools.partial(attend, kv_heads=heads, scale=0.3, impl="tpu_interpret", tiles=tiles)
    jax.block_until_ready(jax.jit(lambda arrays: call(**arrays))(arrays))

    layers, num_pages, *page = arrays["kv_pages"].shape
    pool = (layers * num_pages, *page)
    fetched = [(i, event[2]) for i, event in enumerate(copies) if event[0] == "start" and event[1] == pool]
    table = np.asarray(batch.arrays["page_indices"])
    expected = [num_pages + page for row, count in enumerate(PAGES) for page in table[row, :count]]
    assert sorted(int(indices[0]) for _, indices in fetched) == sorted(expected)
    for _, (_, *inside) in fetched:
        assert [(int(each.start), each.size) for each in inside] == [(0, size) for size in page]
    page_bytes = 4 * int(np.prod(page))
    first_wait = next(i for i, event in enumerate(copies) if event[0] == "wait" and event[2] >= page_bytes)
    assert sum(i < first_wait for i, _ in fetched) == 2 * pages_per_item


@pytest.mark.slow
def test_a_tpu_copies_the_page_ids_of_an_item_a_turn_before_it_needs_them(copies):
    """Three items of 300 tokens and one of 100. What is copied before the first turn has nothing to hide behind."""
    batch = make_ragged(SIZES, [(1, length) for length in LENS])
    arrays, tile = for_tpu(batch), Tile(8, 2, 1)
    heads = arrays.pop("kv_heads")
    tiles = Tiles(tile, Tile(8, 2, 1, 8))
    call = functools.partial(attend, kv_heads=heads, scale=0.3, impl="tpu_interpret", tiles=tiles)
    jax.block_until_ready(jax.jit(lambda arrays: call(**arrays))(arrays))

    table, page_bytes = (SIZES.rows, 1, 128), 4 * int(np.prod(arrays["kv_pages"].shape[2:]))
    starts = [i for i, event in enumerate(copies) if event[0] == "start" and event[1] == table]
    waits = [i for i, event in enumerate(copies) if event[0] == "wait" and event[2] == 4 * 128]
    pages = [i for i, event in enumerate(copies) if event[0] == "wait" and event[2] >= page_bytes]
    assert len(starts) == len(waits) == 4
    for start, wait in list(zip(starts, waits, strict=True))[tile.slots :]:
        assert any(start < i < wait for i in pages)


# M50: keys and values in one visit, as the programs say


def visits(jaxpr: Jaxpr, pool: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(reads of the pool, matmuls) of each loop body that reads the pool itself."""
    reads, matmul = 0, 0
    for eqn in equations(jaxpr, into_loops=False):
        if eqn.primitive.name in LOOPS:
            yield from visits(body(eqn), pool)
        elif eqn.primitive.name == "dot_general":
            matmul += 1
        elif eqn.primitive.name in ("gather", "dynamic_slice", "masked_load", "load", "get"):
            reads += getattr(eqn.invars[0].aval, "shape", None) == pool
    if reads:
        yield reads, matmul


@pytest.mark.parametrize("impl, loops", [("xla", 2), ("gpu_interpret", 3)])
def test_values_are_summed_in_the_visit_that_reads_their_keys(monkeypatch, impl, loops):
    """Only loops that compute scores and the sum of values read the pool, for decode tokens and for prompt chunks."""
    monkeypatch.setattr(gpu_attention, "ONE_LANE_TOKENS", 0)
    batch = make_ragged(SIZES, [(1, 300), (5, 100)])
    program = jax.make_jaxpr(lambda arrays: attend(**arrays, scale=0.3, impl=impl))(batch.arrays)
    found = list(visits(program.jaxpr, batch.arrays["kv_pages"].shape))
    # A loop for rows with one query; one for the others, or on a GPU two, of which one is without masks.
    assert len(found) == loops, found
    for reads, matmul in found:
        assert matmul == 2
        # `xla` has a branch for a CPU, with a gather each for keys and for values, and one for other platforms.
        assert reads == (3 if impl == "xla" else 2)


# I47: no expansion of keys and values to the query heads


@pytest.mark.parametrize("impl", ["xla", "gpu_interpret"])
def test_nothing_the_size_of_a_context_has_the_query_heads(impl):
    """24 query heads of 2 kv heads: keys or values repeated for each would be 24 × tokens × head size somewhere."""
    sizes = Sizes(24, 2, 64, 16, tokens=8, rows=3, max_pages=40)
    batch = make_ragged(sizes, [(1, 300), (5, 100)])
    program = jax.make_jaxpr(lambda arrays: attend(**arrays, scale=0.3, impl=impl))(batch.arrays)
    made = [var.aval for eqn in equations(program.jaxpr) for var in eqn.outvars]
    largest = max((aval for aval in made if hasattr(aval, "size")), key=lambda aval: aval.size)
    pool = batch.arrays["kv_pages"].shape
    assert largest.shape == pool or largest.size < 24 * 300 * 64, largest


# M52: the page size is part of the program


def test_a_page_size_is_a_constant_of_its_program():
    """A batch carries its page size as structure, not as a number: each size has programs of its own, and no program
    takes it as an input."""
    batches = [
        inputs(Case("decode", 2, 64, 1, page_size, heads=4, kv_heads=2, head_dim=8, dtype="float32"))[:3]
        for page_size in (8, 16, 32)
    ]
    assert len({jax.tree.structure(batch) for _, batch, _ in batches}) == 3
    assert len({len(jax.tree.leaves(batch)) for _, batch, _ in batches}) == 1

    def pages_and_offsets(batch):
        return batch.pages_and_offsets()

    programs = [jax.make_jaxpr(pages_and_offsets)(batch) for _, batch, _ in batches]
    shifts = {
        str(getattr(literal, "val", None))
        for program in programs
        for eqn in equations(program.jaxpr)
        for literal in eqn.invars
    }
    assert len({str(program) for program in programs}) == 3 and {"3", "4", "5"} <= shifts
