"""`AsyncEngine` and `as_completed`: results as they come equal those of `generate`, and nothing is left behind."""

import asyncio
import copy
import dataclasses
import threading
import time

import numpy as np
import pytest

from levanter_infer import (
    AsyncEngine,
    EngineConfig,
    InferenceEngine,
    QueueFull,
    Request,
    RequestOutput,
    SamplingParams,
    load_model,
)
from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine import wait_time
from tests.tiny_models import shared_engine, tiny_model


@pytest.fixture(scope="module")
def engine():
    return shared_engine()


def reader_engine() -> InferenceEngine:
    """An engine that reads and writes text, a token a round."""
    config = EngineConfig(max_seqs=8, max_seq_len=96, page_size=4, max_step_tokens=32, max_round_steps=1)
    return InferenceEngine(*load_model("models/tiny"), config)


@pytest.fixture(scope="module")
def reader():
    return reader_engine()


def request(seed: int, max_tokens: int | None = None) -> Request:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 60, int(rng.integers(2, 9))).tolist()
    tokens = max_tokens or int(rng.integers(1, 9))
    return Request(prompt_token_ids=ids, sampling=SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True))


def alone(engine, requests) -> list[list[int]]:
    return [output.completions[0].token_ids for output in engine.generate(requests)]


def check_empty(engine) -> None:
    check_invariants(engine.state.decode)
    engine.drain()
    assert engine.stats()["pages_free"] == engine.shapes.num_pages


async def collect(server, one) -> tuple[list[int], RequestOutput]:
    ids, output = [], None
    async for update in server.stream(one):
        ids += update.token_ids
        output = update.output
    assert output is not None
    return ids, output


def run(engine, test, **options):
    async def body():
        async with AsyncEngine(engine, **options) as server:
            return await test(server)

    return asyncio.run(asyncio.wait_for(body(), 120))


def test_max_round_seconds_makes_rounds_short_while_the_async_engine_has_the_engine(engine):
    def rounds(**options) -> int:
        before = engine.stats()["rounds"]
        run(engine, lambda server: collect(server, request(0, max_tokens=48)), **options)
        return engine.stats()["rounds"] - before

    assert rounds(max_round_seconds=10.0) < 20
    assert rounds(max_round_seconds=1e-9) > 40  # the second round may still be a longer one
    with pytest.raises(ValueError, match="max_round_seconds=0: expected seconds above 0"):
        run(engine, lambda server: server.drain(), max_round_seconds=0)


def test_as_completed_yields_refused_first_and_all_as_alone(engine):
    requests = [request(i) for i in range(12)]
    expected = alone(engine, requests)
    outputs = list(engine.as_completed([*requests, Request(prompt_token_ids=[])]))
    assert outputs[0].error and outputs[0].id == "12"
    assert {int(o.id): o.completions[0].token_ids for o in outputs[1:]} == dict(enumerate(expected))
    check_empty(engine)


def test_closing_as_completed_cancels_the_rest(engine):
    results = engine.as_completed([request(i, 1 if i == 0 else 40) for i in range(12)])
    assert next(results).id == "0"
    results.close()
    check_empty(engine)


def streams_equal_alone(engine, count: int) -> None:
    requests = [request(i) for i in range(count)]
    expected, threads = alone(engine, requests), threading.active_count()
    compiled = engine.stats()["compilations"]
    seen = []

    async def test(server):
        tasks = [asyncio.create_task(collect(server, one)) for one in requests]
        await asyncio.sleep(0.01)
        seen.append(threading.active_count())
        return await asyncio.gather(*tasks)

    results = run(engine, test)
    assert [ids for ids, _ in results] == expected
    assert [output.completions[0].token_ids for _, output in results] == expected
    assert engine.stats()["compilations"] == compiled
    assert seen[0] <= threads + 2  # the owner's, and the one that reads texts
    check_empty(engine)


def test_streams_equal_alone(engine):
    streams_equal_alone(engine, 60)


@pytest.mark.slow
def test_a_thousand_streams_equal_alone(engine):
    streams_equal_alone(engine, 1000)


def test_dropped_consumers_free_their_pages_and_harm_no_others(engine):
    requests = [request(i, 20) for i in range(40)]
    expected = alone(engine, requests)

    async def test(server):
        tasks = [asyncio.create_task(server.generate(one)) for one in requests]
        await asyncio.sleep(0.02)
        for task in tasks[::2]:
            task.cancel()
        kept = await asyncio.gather(*tasks[1::2])
        await server.drain()
        return [output.completions[0].token_ids for output in kept]

    assert run(engine, test) == expected[1::2]
    check_empty(engine)


async def leave(server, one: Request, fate: int) -> list[int] | None:
    """Consume a request in one of six ways. Returns: its tokens, if it was read to its end."""
    name = one.id or ""
    if fate == 0:
        return (await server.generate(one)).completions[0].token_ids
    if fate == 1:
        return (await collect(server, one))[0]
    if fate == 2:  # the stream is dropped, and not closed
        async for _ in server.stream(one):
            break
        return None
    if fate == 3:
        await server.generate(one, timeout=0.01 + one.prompt_token_ids[0] / 2000)
        return None
    task = asyncio.create_task(server.generate(one))
    await asyncio.sleep(one.prompt_token_ids[0] % 50 / 1000)
    if fate == 4:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif await server.abort(name):
        assert (await task).completions[0].finish_reason == "abort"
    return None


def test_200_consumers_that_leave_at_random_free_their_pages_and_harm_no_others(engine):
    requests = [dataclasses.replace(request(i, 16), id=f"request {i}") for i in range(200)]
    expected, fates = alone(engine, requests), np.random.default_rng(0).integers(0, 6, 200).tolist()

    async def test(server):
        found = await asyncio.gather(*map(leave, [server] * 200, requests, fates))
        await server.drain()
        assert not server._ids and not server._by_state and server._waiting == 0
        return found

    for found, tokens, fate in zip(run(engine, test), expected, fates, strict=True):
        assert found == (tokens if fate < 2 else None)
    check_empty(engine)


def test_event_loops_of_several_threads_share_an_engine(engine):
    requests = [request(i, 12) for i in range(40)]
    expected, found = alone(engine, requests), {}
    server = AsyncEngine(engine)

    async def serve(mine: range) -> None:
        found.update(zip(mine, await asyncio.gather(*(collect(server, requests[i]) for i in mine)), strict=True))

    threads = [threading.Thread(target=lambda k=k: asyncio.run(serve(range(k, 40, 4)))) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    asyncio.run(server.aclose())
    assert [found[i][0] for i in range(40)] == expected
    check_empty(engine)


def test_the_samples_of_a_streamed_request_are_those_of_its_output(engine):
    asked = Request(prompt_token_ids=[3, 4, 5], sampling=SamplingParams(max_tokens=12, n=3, seed=5, logprobs=2))
    (expected,) = engine.generate(asked)

    async def test(server):
        return [update async for update in server.stream(asked)]

    updates = run(engine, test)
    assert [update.output is None for update in updates] == [True] * (len(updates) - 1) + [False]
    for sample in expected.completions:
        mine = [update for update in updates if update.index == sample.index]
        assert sum((update.token_ids for update in mine), []) == sample.token_ids
        np.testing.assert_array_equal(np.concatenate([update.logprobs for update in mine]), sample.logprobs)
        assert sum((update.top_logprobs for update in mine), []) == sample.top_logprobs
        assert [u.finish_reason for u in mine] == [None] * (len(mine) - 1) + [sample.finish_reason]


def test_text_that_may_belong_to_a_stop_string_is_never_shown(reader):
    sampling = SamplingParams(max_tokens=40, temperature=2.0, seed=3, ignore_eos=True)
    (plain,) = reader.generate("17+25=", sampling)
    text = plain.completions[0].text
    stop = text[len(text) // 2 :][:3]
    asked = dataclasses.replace(sampling, stop=[stop, stop[:2] + "\0" * 7])  # the second never comes, and begins alike
    (expected,) = (output.completions[0] for output in reader.generate("17+25=", asked))
    assert expected.stop_reason == stop and len(expected.text) > 2

    async def test(server):
        return [update async for update in server.stream("17+25=", asked)]

    updates, shown = run(reader, test), ""
    assert len(updates) > 3
    for update in updates:
        shown += update.text
        assert expected.text.startswith(shown)
    assert shown == expected.text and updates[-1].stop_reason == stop


def test_a_slow_reader_finds_what_it_missed_in_one_update(engine):
    asked = Request(prompt_token_ids=[3, 4, 5], sampling=SamplingParams(max_tokens=50, n=2, seed=5, ignore_eos=True))
    (expected,) = engine.generate(asked)

    async def test(server):
        stream = server.stream(asked)
        updates = [await anext(stream)]
        await server.drain()
        return updates + [update async for update in stream]

    updates = run(engine, test)
    assert len(updates) <= 4  # what the first round brought, and one for each sample
    for sample in expected.completions:
        assert sum((update.token_ids for update in updates if update.index == sample.index), []) == sample.token_ids
    check_empty(engine)


def test_a_text_is_read_while_rounds_go_on_and_requests_keep_their_order(reader, monkeypatch):
    asked = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (30, 4)]
    expected = [output.completions[0].token_ids for output in reader.generate([[1, 2], "3+4="], asked)]
    encode, may_go_on, order = reader.tokenizer.encode, threading.Event(), []
    submit = reader._rounds.submit
    monkeypatch.setattr(reader._rounds, "submit", lambda made: (order.extend(r.id for r in made), submit(made)))

    def slow(text, **options):
        assert may_go_on.wait(60)
        return encode(text, **options)

    async def test(server):
        stream = server.stream([1, 2], asked[0])
        tokens = (await anext(stream)).token_ids
        monkeypatch.setattr(reader.tokenizer, "encode", slow)
        late = [asyncio.create_task(server.generate(each, asked[1])) for each in ("3+4=", [5, 6], "")]
        tokens = tokens + [token async for update in stream for token in update.token_ids]  # to its end
        assert not any(task.done() for task in late)
        may_go_on.set()
        outputs = await asyncio.gather(*late)
        assert outputs[2].error is not None
        return [tokens, outputs[0].completions[0].token_ids]

    assert run(reader, test) == expected
    assert order == ["0", "1", "2"]


@pytest.mark.slow
def test_a_prompt_of_a_megabyte_does_not_hold_up_streams():
    model, tokenizer = load_model("models/tiny")
    text = ("17+25=42 and then some words, " * 40_000)[: 1 << 20]
    begin = time.perf_counter()
    tokenizer.encode(text)
    seconds = time.perf_counter() - begin
    # Long enough for the text to be encoded, and too short for it to be served
    sizes = dict(max_seqs=8, max_seq_len=tokenizer.least_tokens(text) + 1, max_pages=4096, page_size=16)
    engine = InferenceEngine(model, tokenizer, EngineConfig(**sizes, max_round_seconds=0.02))
    engine.warmup()

    async def times(server, seed: int) -> np.ndarray:
        sampling = SamplingParams(max_tokens=1500, ignore_eos=True, seed=seed)
        return np.asarray([time.perf_counter() async for _ in server.stream([seed, 6, 7], sampling)])

    async def longest_gap(server, is_beside: bool) -> float:
        streams = [asyncio.create_task(times(server, seed)) for seed in range(8)]
        await asyncio.sleep(0.2)
        if is_beside:
            assert "leaves no token" in ((await server.generate(text)).error or "")
        return max(float(np.diff(each).max()) for each in await asyncio.gather(*streams))

    async def test(server):
        return [[await longest_gap(server, is_beside) for is_beside in (False, True)] for _ in range(5)]

    alone_s, beside_s = np.median(run(engine, test), axis=0)
    print(f"encoding takes {seconds:.2f} s; longest gap {1e3 * alone_s:.0f} ms, beside it {1e3 * beside_s:.0f} ms")
    assert beside_s < 0.2 * seconds


def test_a_request_without_an_id_gets_one_that_no_other_has(engine):
    async def test(server):
        named = dataclasses.replace(request(0, 9), id="1")
        calls = [server.generate(each) for each in (named, request(1, 9), request(2, 9))]
        return [output.completions[0].token_ids for output in await asyncio.gather(*calls)]

    assert run(engine, test) == alone(engine, [request(seed, 9) for seed in range(3)])


def test_a_closed_stream_ends_its_request(engine):
    async def test(server):
        stream = server.stream(request(1, 50))
        first = await anext(stream)
        await stream.aclose()
        await server.drain()
        return first

    assert run(engine, test).token_ids
    check_empty(engine)


def test_a_full_queue_refuses_and_changes_nothing_else(engine):
    requests = [request(i) for i in range(4)]
    expected = alone(engine, requests)

    async def test(server):
        await server.pause("step")
        tasks = [asyncio.create_task(server.generate(one)) for one in requests]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as full:
            await server.generate(request(9))
        copied = copy.copy(full.value)  # as pickle does it
        assert 0 < full.value.retry_after == copied.retry_after and str(copied) == str(full.value)
        await server.resume()
        return [output.completions[0].token_ids for output in await asyncio.gather(*tasks)]

    assert run(engine, test, max_waiting=4) == expected


def test_clients_that_try_again_when_they_are_told_to_are_all_served(engine):
    requests = [request(i) for i in range(60)]
    expected, refusals = alone(engine, requests), []

    async def insist(server, one):
        while True:
            try:
                return (await server.generate(one)).completions[0].token_ids
            except QueueFull as full:
                refusals.append(full.retry_after)
                await asyncio.sleep(min(full.retry_after, 0.05))

    async def test(server):
        found = await asyncio.gather(*(insist(server, one) for one in requests))
        assert server._waiting == 0
        return found

    assert run(engine, test, max_waiting=3) == expected and refusals
    check_empty(engine)


def test_the_wait_that_a_full_queue_names_counts_no_idle_time_and_those_of_a_round_together(monkeypatch):
    now = 100.0
    monkeypatch.setattr(wait_time.time, "monotonic", lambda: now)
    wait = wait_time.WaitTime()
    for _ in range(100):
        now += 1000.0  # no request waits
        wait.starts()
        for _ in range(2):
            now += 2.0
            for _ in range(8):
                wait.leaves()
            wait.end_round()
            wait.end_round()
    assert wait.interval_s == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("mode", ["admit", "step"])
def test_a_deadline_that_passes_in_a_pause_ends_its_request_then(engine, mode):
    expected = alone(engine, [request(2, 50)])

    async def test(server):
        running = asyncio.create_task(collect(server, request(2, 50)))
        late = asyncio.create_task(server.generate(request(3, 50), timeout=30)) if mode == "step" else None
        await server.pause(mode)
        begin = time.monotonic()
        output = await server.generate(request(1, 50), timeout=0.1)
        assert 0.1 <= time.monotonic() - begin < 5 and output.completions[0].finish_reason == "abort"
        await server.resume()
        assert late is None or (await late).completions[0].finish_reason == "length"
        return [(await running)[0]]

    assert run(engine, test) == expected
    check_empty(engine)


def test_closing_with_drain_ends_what_is_in_progress_and_takes_nothing_more(engine):
    requests = [request(i, 20) for i in range(20)]
    expected = alone(engine, requests)

    async def test(server):
        await server.pause("step")
        tasks = [asyncio.create_task(server.generate(one)) for one in requests]
        await asyncio.sleep(0)
        closing = asyncio.create_task(server.aclose(drain=True))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="is closed"):
            await server.generate(request(99))
        await closing
        return [output.completions[0].token_ids for output in await asyncio.gather(*tasks)]

    assert run(engine, test) == expected
    check_empty(engine)


@pytest.mark.parametrize("mode", ["admit", "step"])
def test_paused_requests_go_on_as_alone(engine, mode):
    requests = [request(i, 40) for i in range(2)]
    expected = alone(engine, requests)

    async def test(server):
        stream = server.stream(requests[0])
        ids = (await anext(stream)).token_ids
        await server.pause(mode)
        late = asyncio.create_task(server.generate(requests[1]))
        if mode == "admit":
            ids = ids + [token async for update in stream for token in update.token_ids]
        await asyncio.sleep(0.1)
        assert not late.done()
        await server.resume()
        if mode == "step":
            ids = ids + [token async for update in stream for token in update.token_ids]
        return [ids, (await late).completions[0].token_ids]

    assert run(engine, test) == expected


def test_requests_wait_until_weights_that_sleep_gave_up_are_there_again(engine):
    asked = request(3, 8)
    expected = alone(engine, [asked])

    async def test(server):
        await server.call(lambda engine: engine.sleep(drop_weights=True))
        waiting = asyncio.create_task(server.generate(asked))
        await asyncio.sleep(0.05)
        await server.call(InferenceEngine.wake)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await server.swap_weights(tiny_model())
        return [(await waiting).completions[0].token_ids]

    assert run(engine, test) == expected


def test_a_deadline_and_an_abort_end_a_request(engine):
    async def test(server):
        late = await server.generate(request(1, 50), timeout=1e-6)
        await server.pause("step")
        task = asyncio.create_task(server.generate(Request(prompt_token_ids=[1, 2], id="x")))
        await asyncio.sleep(0)
        assert await server.abort("x") and not await server.abort("x")
        assert (await task).completions[0].finish_reason == "abort"
        await server.resume()
        return late

    assert run(engine, test).completions[0].finish_reason == "abort"
    check_empty(engine)


def test_a_swap_shows_in_the_versions_of_tokens(engine):
    before = engine.stats()["prompt_tokens"]

    async def test(server):
        await server.pause("step")
        stream = server.stream(request(1, 50))
        first = asyncio.create_task(anext(stream))
        while server.stats()["prompt_tokens"] == before:
            await asyncio.sleep(0.001)
        await server.call(lambda engine: [engine.step_round(max_steps=4) for _ in range(3)])
        versions = list((await first).token_versions)
        await server.swap_weights(tiny_model(), policy="keep_kv", version=7)
        await server.resume()
        async for update in stream:
            versions += list(update.token_versions)
        assert versions == list(update.output.completions[0].token_versions)
        return versions

    versions = run(engine, test)
    assert versions[0] != 7 and versions[-1] == 7 and versions == sorted(versions)


def test_every_waiter_gets_the_error_of_a_dead_owner(engine, monkeypatch):
    def fail(*args):
        raise OSError("broken")

    async def test(server):
        monkeypatch.setattr(engine._rounds, "step", fail)
        results = await asyncio.gather(*(server.generate(request(i)) for i in range(3)), return_exceptions=True)
        assert all("broken" in str(result) for result in results)
        assert isinstance(server.error, OSError) and not server.is_ready

    run(engine, test)
    monkeypatch.undo()
    check_empty(engine)
