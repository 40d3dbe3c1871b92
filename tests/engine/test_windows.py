"""Layers with a sliding window in pages of their own: less memory, and nothing else is different."""

import functools

import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.memory_audit import audit
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.kernels.cpu import bindings as cpu
from tests.engine.comparisons import all_kinds, expected, make_engine, serve
from tests.hlo import pool_copies
from tests.tiny_models import uncached_greedy, windowed_model

built = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
GEMMA3 = (7, 7, 7, 7, 7, None)
"""Gemma 3's pattern, with a window that is no multiple of a page."""


def greedy(tokens: list[int], max_tokens: int, **more) -> Request:
    return Request(prompt_token_ids=tokens, sampling=SamplingParams(temperature=0, max_tokens=max_tokens, **more))


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 61, length).tolist()


@functools.lru_cache
def gemma3_engine(backend: str) -> InferenceEngine:
    config = EngineConfig(
        max_seqs=3, max_seq_len=96, page_size=4, max_step_tokens=16, attention=backend, matmul=backend
    )
    return InferenceEngine(windowed_model(GEMMA3), config=config)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", pytest.param("cpu", marks=built)])
def test_sequences_of_many_windows_give_the_tokens_of_the_uncached_forward(backend):
    """In chunks, more of them than run at once, so that window pages are used again and again."""
    engine = gemma3_engine(backend)
    engine.reset()
    (window,) = engine.state.decode.windows
    assert (window.window, window.num_pages) == (7, engine.shapes.windows[0].num_pages) and window.num_pages < 72
    requests = [greedy(text(length, seed=i), 30) for i, length in enumerate((40, 1, 66, 5, 23, 40, 61))]
    before = engine.stats()["prefix_hits"]
    for served in (requests, requests[-2:]):  # in pages that others have left, and in cached ones
        for request, output in zip(served, engine.generate(served), strict=True):
            assert output.completions[0].token_ids == uncached_greedy(engine_model(), request.prompt_token_ids, 30)
        check_invariants(engine.state.decode)
    assert engine.stats()["prefix_hits"] > before


def engine_model():
    return windowed_model(GEMMA3)


def test_a_sequence_holds_no_more_than_its_window_of_the_layers_that_have_one():
    """At every step, in bytes of the engine's own arrays; and no pages are left over."""
    engine = gemma3_engine("xla")
    engine.reset()
    full, windowed = engine.runner.page_bytes
    assert windowed == 5 * full
    size, reach = engine.shapes.page_size, 3  # pages that a window of 7 touches
    group, seen = engine.submit(greedy(text(70, seed=9), 20)), []
    while not group.is_done:
        engine.step_round(max_steps=1)
        engine.flush()
        found = audit(engine.state.decode)
        if found.pages_in_use:
            (window,) = found.windows
            assert window.pages_in_use <= min(reach, found.pages_in_use)
            seen.append(found.reserved_bytes(engine.runner.page_bytes))
            check_invariants(engine.state.decode)
    all_full = -(-90 // size) * (full + windowed)
    assert max(seen) <= all_full * (1 / 6 + (7 + 2 * size) / 90)
    engine.drain()
    (window,) = engine.state.decode.windows
    assert int(window.num_free) == window.num_pages and engine.stats()["pages_free"] == engine.shapes.num_pages


def test_the_pools_are_smaller_by_what_is_behind_the_windows():
    sizes = dict(max_seqs=2, max_seq_len=256, page_size=4, max_step_tokens=16)
    model = windowed_model((7, 7, 5, None))
    found, whole = (InferenceEngine(model, config=EngineConfig(**sizes, window_cache=on)) for on in (True, False))
    assert [spec.memory.window for spec in model.config.pools] == [7, 5, None]
    shapes = found.shapes
    assert shapes.num_pages == whole.shapes.num_pages == 128 and whole.shapes.windows == ()
    pages = {None: 128, **{each.window: each.num_pages for each in shapes.windows}}
    layers = {7: 2, 5: 1, None: 1}
    pools = found.state.cache.pools
    assert [pool.num_entries for pool in pools] == [pages[7], pages[5], 128]
    page = whole.state.cache.nbytes // (4 * 128)
    assert found.state.cache.nbytes == page * sum(layers[window] * pages[window] for window in layers)
    assert found.describe()["window_pages"] == {7: pages[7], 5: pages[5]} and not whole.describe()["window_pages"]


def test_a_window_that_no_sequence_outgrows_has_all_pages():
    engine = InferenceEngine(windowed_model((64, None)), config=EngineConfig(max_seqs=2, max_seq_len=64, page_size=4))
    assert engine.shapes.windows == () and engine.state.cache.groups == (0, 0)


def test_a_prefix_whose_window_is_gone_is_computed_again():
    """The pages of the full layers are found, the last window before their end is not; the tokens stay right."""
    engine = gemma3_engine("xla")
    engine.reset()
    common = text(40, seed=20)
    engine.generate([greedy(common + text(3, seed=21), 2)])
    before, evictions = (engine.stats()[name] for name in ("prefix_hits", "prefix_evictions"))
    engine.generate([greedy(text(60, seed=30 + i), 30) for i in range(2)])
    assert engine.stats()["prefix_evictions"] == evictions  # but every window page has other contents by now
    again = greedy(common + text(3, seed=22), 8)
    (output,) = engine.generate([again])
    assert output.completions[0].token_ids == uncached_greedy(engine_model(), again.prompt_token_ids, 8)
    assert engine.stats()["prefix_hits"] == before
    (output,) = engine.generate([greedy(common + text(3, seed=23), 8)])  # computed again, it is found again
    assert engine.stats()["prefix_hits"] - before == 10
    check_invariants(engine.state.decode)


@pytest.mark.slow
def test_a_model_of_windows_alone_has_no_pages_of_whole_sequences():
    """Mistral 7B v0.1: the pages of the tables are stored nowhere."""
    config = EngineConfig(max_seqs=2, max_seq_len=96, page_size=4, max_step_tokens=16)
    engine = InferenceEngine(windowed_model((7, 7)), config=config)
    (pool,) = engine.state.cache.pools
    assert engine.state.cache.groups == (1,) and pool.num_entries < engine.shapes.num_pages
    requests = [greedy(text(50, seed=i), 20) for i in range(4)]
    for request, output in zip(requests, engine.generate(requests), strict=True):
        assert output.completions[0].token_ids == uncached_greedy(windowed_model((7, 7)), request.prompt_token_ids, 20)
    assert engine.runner.page_bytes[0] == 0


@built
@pytest.mark.slow
@pytest.mark.parametrize("windows", [(7, 7, None), (9, 5)], ids=["with a full layer", "two windows"])
def test_bits_are_those_of_the_request_alone(windows):
    """In chunks, cached and cold, preempted, offloaded, forked, searched and resampled."""
    model, done = windowed_model(windows), {}
    cases = all_kinds(40, seed=6)
    searches = [i for i, case in enumerate(cases) if isinstance(case, Request) and case.sampling.num_beams > 1]
    sizes = dict(max_seqs=4, page_size=8, max_step_tokens=256, prefix_cache=False, window_cache=False)
    alone = make_engine(model=model, with_beams=True, **sizes)
    plain = {i: expected(alone, case, None) for i, case in enumerate(cases) if isinstance(case, Request)}
    for config, left_out in (
        (dict(max_seqs=4, page_size=4, max_step_tokens=16, max_pages=36), []),
        (dict(max_seqs=3, page_size=4, max_step_tokens=16, max_pages=30, preempt="offload"), searches),
    ):
        engine = make_engine(model=model, with_beams=not left_out, **config)
        assert len(engine.shapes.windows) == len({w for w in windows if w})
        for order in (range(40), np.random.default_rng(0).permutation(40)):
            served = [i for i in order if i not in left_out]
            for i, (found, prefixes) in zip(served, serve(engine, [cases[i] for i in served]), strict=True):
                assert found == (plain[i] if i in plain else expected(alone, cases[i], prefixes))
                done["resampled"] = done.get("resampled", 0) + (prefixes is not None)
            check_invariants(engine.state.decode)
            assert engine.stats()["pages_free"] == engine.shapes.num_pages
            assert all(int(each.num_free) == each.num_pages for each in engine.state.decode.windows)
        for name in ("preemptions", "prefix_hits", "offloaded_pages", "copied_pages"):
            done[name] = done.get(name, 0) + engine.stats()[name]
    assert all(count > 0 for count in done.values()), done


@pytest.mark.slow
def test_the_round_program_copies_no_pool_of_either_kind():
    config = EngineConfig(max_seqs=4, max_seq_len=1024, max_pages=4096, max_step_tokens=64)
    engine = InferenceEngine(windowed_model((100, 100, None)), config=config)
    compiled = engine.programs.trace_round(engine.model, engine.state, engine.runner.nothing).lower().compile()
    for pool in engine.state.cache.pools:
        assert pool_copies(compiled.as_text(), pool.pages.array.shape, pool.pages.array.dtype) == []
