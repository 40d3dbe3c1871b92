"""`AsyncEngine` where calls, ends and failures meet: no waiter is forgotten, and only what failed fails."""

import asyncio
import dataclasses
import subprocess
import sys
import threading

import pytest

from levanter_infer import AsyncEngine, InferenceEngine, QueueFull, Request, SamplingParams
from tests.engine.test_async_engine import alone, check_empty, collect, reader_engine, request, run


@pytest.fixture(scope="module")
def engine():
    return reader_engine()


@pytest.fixture
def blocked(engine, monkeypatch):
    """Set: texts are encoded. Until then the intake thread waits."""
    encode, may_go_on = engine.tokenizer.encode, threading.Event()

    def slow(text, **options):
        assert may_go_on.wait(60)
        return encode(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    yield may_go_on
    may_go_on.set()


def test_a_drain_and_a_close_that_are_given_up_leave_the_owner_alive(engine):
    async def test(server):
        task = asyncio.create_task(server.generate(request(1, 40)))
        await asyncio.sleep(0)
        await server.pause("step")
        for call in (server.drain, lambda: server.aclose(drain=True)):
            giving_up = asyncio.create_task(call())
            await asyncio.sleep(0.02)
            giving_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await giving_up
            await server.resume()
        return [(await task).completions[0].token_ids]

    assert run(engine, test) == alone(engine, [request(1, 40)])
    check_empty(engine)


def test_a_call_leaves_nothing_behind_and_one_that_was_given_up_is_not_made(engine):
    made = []

    async def test(server):
        for _ in range(50):
            await server.pause("step")
            await server.resume()
        entered, go_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(server.call(lambda _: (loop.call_soon_threadsafe(entered.set), go_on.wait(60))))
        await entered.wait()
        second = asyncio.create_task(server.call(lambda _: made.append("second")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await first
        await server.call(lambda _: made.append("third"))
        assert not server._asked and not server._drains

    run(engine, test)
    assert made == ["third"]


def test_an_engine_that_sleeps_keeps_its_requests_and_its_owner(engine):
    requests = [request(i, 20) for i in range(6)]
    expected = alone(engine, requests)

    async def test(server):
        await server.call(InferenceEngine.sleep)  # with nothing to do
        await server.drain()
        await server.call(InferenceEngine.wake)
        tasks = [asyncio.create_task(collect(server, one)) for one in requests]
        await asyncio.sleep(0.01)
        await server.call(InferenceEngine.sleep)
        late = await server.generate(request(9, 20), timeout=0.05)
        assert late.completions[0].finish_reason == "abort" and not any(task.done() for task in tasks[4:])
        with pytest.raises(RuntimeError, match="programs have to be compiled for"):
            await server.generate([1, 2], SamplingParams(prompt_logprobs=0))
        await server.call(InferenceEngine.wake)
        return [tokens for tokens, _ in await asyncio.gather(*tasks)]

    assert run(engine, test) == expected
    check_empty(engine)


def test_an_engine_that_sleeps_is_given_back_empty(engine):
    async def test(server):
        task = asyncio.create_task(server.generate(request(1, 40)))
        await asyncio.sleep(0.01)
        await server.call(InferenceEngine.sleep)
        await server.aclose()
        assert server.error is None
        return await task

    output = run(engine, test)
    assert output.error is not None or output.completions[0].finish_reason == "abort"
    engine.wake()
    check_empty(engine)


@pytest.mark.parametrize("call", ["flush", "step"])
def test_a_round_that_fails_in_a_call_ends_all_requests_and_not_the_owner(engine, monkeypatch, call):
    def fail(launched):
        if launched is None:
            return []
        raise OSError("broken")

    async def test(server):
        tasks = [asyncio.create_task(collect(server, request(i, 40))) for i in range(6)]
        while not engine.has_active:
            await asyncio.sleep(0.001)
        with pytest.raises(OSError, match="broken"), monkeypatch.context() as patched:
            if call == "flush":
                await server.call(lambda _: patched.setattr(engine._rounds, "read", fail))
            else:
                await server.call(lambda engine: (patched.setattr(engine._rounds, "read", fail), engine.step_round()))
        outputs = [output for _, output in await asyncio.gather(*tasks)]
        assert {output.completions[0].finish_reason for output in outputs} == {"abort"}
        return [(await server.generate(request(7, 9))).completions[0].token_ids]

    assert run(engine, test) == alone(engine, [request(7, 9)])
    check_empty(engine)


def test_a_call_may_run_and_fork_a_request_of_its_own(engine):
    async def test(server):
        task = asyncio.create_task(collect(server, request(1, 40)))
        while not engine.has_active:
            await asyncio.sleep(0.001)

        def own(engine):
            mine = engine.submit(request(2, 20))
            while len(mine.sequences[0].token_ids) < 4:
                engine.step_round(max_steps=1)
            engine.fork(mine, 0)
            engine.drain()
            return [sample.token_ids for sample in mine.sequences]

        mine, forked = await server.call(own)
        assert forked[:4] == mine[:4] and forked != mine and len(forked) == 20
        return [(await task)[0], mine]

    assert run(engine, test) == alone(engine, [request(1, 40), request(2, 20)])
    check_empty(engine)


def test_an_id_is_free_when_its_request_has_ended_or_was_dropped(engine, blocked):
    named = dataclasses.replace(request(1, 20), id="x")

    async def test(server):
        text = asyncio.create_task(server.generate(Request("1+1=", id="x")))  # in the hands of the intake thread
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'x' is in progress"):
            await server.generate(named)
        text.cancel()
        await asyncio.sleep(0)
        again = asyncio.create_task(server.generate(named))
        await asyncio.sleep(0)
        blocked.set()
        found = [(await again).completions[0].token_ids]
        return [*found, (await server.generate(named)).completions[0].token_ids]

    assert run(engine, test) == alone(engine, [named]) * 2
    check_empty(engine)


def test_a_request_that_is_dropped_or_aborted_before_its_submission_leaves_the_queue(engine, blocked):
    async def test(server):
        for _ in range(3):
            task = asyncio.create_task(server.generate("1+1="))
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await server.generate([1, 2])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.resume()  # the owner has come by
        task = asyncio.create_task(server.generate(Request("1+1=", id="x")))
        await asyncio.sleep(0)
        assert await server.abort("x") and not await server.abort("x")
        drained = asyncio.create_task(server.drain())
        await asyncio.sleep(0.02)
        assert not drained.done()
        blocked.set()
        await drained
        output = await task
        assert output.prompt == "1+1=" and output.completions[0].finish_reason == "abort"
        assert server._waiting == 0 and not server._ids

    run(engine, test, max_waiting=1)
    check_empty(engine)


def test_a_deadline_counts_from_the_call(engine, blocked):
    async def test(server):
        task = asyncio.create_task(server.generate("1+1=", SamplingParams(max_tokens=9), timeout=0.05))
        await asyncio.sleep(0.1)
        blocked.set()
        return await task

    (completion,) = run(engine, test).completions
    assert completion.finish_reason == "abort" and not completion.token_ids


def test_what_fails_while_a_text_is_read_fails_alone(engine, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("too long")

    async def test(server):
        other = asyncio.create_task(server.generate(request(1, 20)))
        monkeypatch.setattr(engine.tokenizer, "encode", fail)
        with pytest.raises(MemoryError, match="too long"):
            await server.generate("1+1=")
        return [(await other).completions[0].token_ids]

    assert run(engine, test) == alone(engine, [request(1, 20)])


def test_an_error_of_the_engine_is_not_the_requests_fault(engine, monkeypatch):
    def fail(*_, **__):
        raise ValueError("no such program")

    async def test(server):
        refused = await server.generate([])
        with monkeypatch.context() as patch:
            patch.setattr(engine, "submit", fail)
            with pytest.raises(ValueError, match="no such program"):
                await server.generate(request(1, 20))
        assert not server._ids and server._waiting == 0
        return refused.error, [(await server.generate(request(1, 20))).completions[0].token_ids]

    error, tokens = run(engine, test)
    assert "empty" in error and tokens == alone(engine, [request(1, 20)])


def test_a_request_that_is_dropped_while_its_constraint_is_compiled_leaves_nothing(engine, monkeypatch):
    may_go_on = threading.Event()
    monkeypatch.setattr(engine, "compile_constraint", lambda _: may_go_on.wait(60))

    async def test(server):
        task = asyncio.create_task(server.generate("1+1=", SamplingParams(choice=["1", "2"])))
        await asyncio.sleep(0.01)
        assert server._waiting == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.drain()
        assert server._waiting == 0 and not server._ids
        may_go_on.set()

    run(engine, test)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("ends", ["abort", "deadline"])
def test_a_request_ends_while_its_constraint_is_compiled(engine, monkeypatch, ends, streams):
    may_go_on, compiles = threading.Event(), threading.Event()

    def compile_slowly(*_):
        compiles.set()
        assert may_go_on.wait(60)

    monkeypatch.setattr(engine._intake, "constraint", _unless(engine._intake.constraint, compile_slowly))
    asked = Request("1+1=", id="slow", sampling=SamplingParams(choice=["1", "2"]))

    async def ended(server):
        if not streams:
            return await server.generate(asked, timeout=0.1 if ends == "deadline" else None)
        updates = [each async for each in server.stream(asked, timeout=0.1 if ends == "deadline" else None)]
        return updates[-1].output

    async def test(server):
        task = asyncio.create_task(ended(server))
        assert await asyncio.to_thread(compiles.wait, 10)
        if ends == "abort":
            assert await server.abort("slow")
            assert not await server.abort("slow")
        output = await asyncio.wait_for(task, 10)
        assert not may_go_on.is_set() and server._waiting == 0 and not server._ids
        await server.drain()
        return output

    try:
        output = run(engine, test)  # the server ends too
    finally:
        may_go_on.set()
    assert output.error is None and output.prompt_token_ids == engine.tokenizer.encode("1+1=")
    assert [(each.finish_reason, each.token_ids) for each in output.completions] == [("abort", [])]
    check_empty(engine)


def _unless(of_none, of_constraint):
    return lambda params: of_constraint(params) if params.is_constrained else of_none(params)


def test_constraints_that_are_compiled_for_ever_leave_other_threads_and_the_exit_free():
    program = """
import asyncio, threading, time
from levanter_infer.runtime.threads import DaemonThreads

async def main():
    threads = DaemonThreads(2, "stuck")
    calls = [asyncio.ensure_future(asyncio.wrap_future(threads.submit(time.sleep, 1000))) for _ in range(40)]
    await asyncio.sleep(0.05)
    assert sum(each.name.startswith("stuck") for each in threading.enumerate()) == 2
    assert await asyncio.to_thread(lambda: 3) == 3
    threads.close()

asyncio.run(main())
print("ended")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "ended\n" and ended.returncode == 0, ended.stderr


def test_a_function_of_a_call_that_calls_back_is_refused_and_does_not_hang(engine):
    async def test(server):
        for back in (lambda: server.generate([1, 2]), server.pause, server.aclose):
            with pytest.raises(RuntimeError, match="whose thread it is in; call the engine"):
                await server.call(lambda _, back=back: asyncio.run(back()))

    run(engine, test)


def test_requests_of_an_event_loop_that_was_closed_are_ended(engine):
    server, loop = AsyncEngine(engine), asyncio.new_event_loop()
    stream = server.stream(request(1, 56))
    loop.run_until_complete(anext(stream))
    loop.close()  # nothing cancels its tasks

    async def rest():
        async with server:
            await server.generate(request(2, 4))
            await server.drain()
            return server._waiting, dict(server._ids)

    assert asyncio.run(asyncio.wait_for(rest(), 60)) == (0, {})
    check_empty(engine)


def test_rounds_go_on_under_a_flood_of_commands(engine):
    async def test(server):
        def again():
            if not ended:
                server._commands.put(again)

        ended = []
        server._commands.put(again)
        output = await server.generate(request(1, 20))
        ended.append(1)
        return [output.completions[0].token_ids]

    assert run(engine, test) == alone(engine, [request(1, 20)])


def test_an_interrupt_gives_the_engine_back(engine):
    async def main():
        async with AsyncEngine(engine) as server:
            tasks = [asyncio.create_task(server.generate(request(i, 40))) for i in range(6)]
            await asyncio.sleep(0.01)
            assert tasks
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    check_empty(engine)
    assert alone(engine, [request(1, 4)])


def test_what_was_prepared_is_submitted_once_and_where_it_was_prepared(engine):
    named = dataclasses.replace(request(1, 4), id="x")
    prepared = engine.prepare(named)
    assert engine.submit(prepared) is prepared
    engine.drain()
    assert [sample.token_ids for sample in prepared.sequences] == alone(engine, [named])
    with pytest.raises(ValueError, match="was submitted already"):
        engine.submit(prepared)
    with pytest.raises(ValueError, match="without an id"):
        engine.prepare(request(1))
    prepared = engine.prepare(named)
    prepared.scheduler = object()
    with pytest.raises(ValueError, match="of another engine"):
        engine.submit(prepared)
