"""`AsyncEngine` and `as_completed`: results as they come equal those of `generate`, and nothing is left behind."""

import asyncio
import threading

import numpy as np
import pytest

from levanter_infer import AsyncEngine, EngineConfig, InferenceEngine, QueueFull, Request, RequestOutput, SamplingParams
from levanter_infer.decode.invariants import check_invariants
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(max_seqs=8, max_seq_len=64, page_size=4, max_step_tokens=32)
    return InferenceEngine(tiny_model(), config=config)


def request(seed: int, max_tokens: int | None = None) -> Request:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 60, int(rng.integers(2, 9))).tolist()
    tokens = max_tokens or int(rng.integers(1, 9))
    return Request(prompt_token_ids=ids, sampling=SamplingParams(max_tokens=tokens, seed=seed, temperature=1.0))


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
    assert seen[0] <= threads + 1
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
        assert full.value.retry_after > 0
        await server.resume()
        return [output.completions[0].token_ids for output in await asyncio.gather(*tasks)]

    assert run(engine, test, max_waiting=4) == expected


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
    async def test(server):
        await server.pause("step")
        stream = server.stream(request(1, 50))
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
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
