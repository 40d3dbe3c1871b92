"""Several threads in one engine: calls take turns, or name the thread that uses it."""

import collections
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from levanter_infer.decode.invariants import check_invariants
from levanter_infer.engine import turns as turns_module
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.engine.turns import Turns
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.runtime import progress
from tests.tiny_models import SIZES, tiny_model, uncached_greedy


@pytest.fixture(scope="module")
def engine():
    numerics = "batch_invariant" if cpu.available() else "default"
    config = EngineConfig(**SIZES, max_pages=20, preempt="offload", numerics=numerics)
    return InferenceEngine(tiny_model(), config=config, scoring=True)


def request(seed: int) -> Request:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 60, int(rng.integers(2, 9))).tolist()
    sampling = SamplingParams(max_tokens=int(rng.integers(1, 9)), seed=seed, temperature=0.0 if seed % 2 else 1.0)
    return Request(prompt_token_ids=ids, sampling=sampling)


def many_threads(engine, threads: int, each: int) -> None:
    requests = [[request(thread * each + i) for i in range(each)] for thread in range(threads)]
    alone = [[engine.generate(one)[0].completions[0].token_ids for one in own] for own in requests]
    start = threading.Barrier(threads)

    def call(own):
        start.wait()
        return [(output.error, output.completions[0]) for output in engine.generate(own)]

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(call, requests))
    for own, expected in zip(results, alone, strict=True):
        assert [error for error, _ in own] == [None] * each
        assert [completion.token_ids for _, completion in own] == expected
        assert {completion.finish_reason for _, completion in own} == {"length"}
    check_invariants(engine.state.decode)
    assert engine.stats()["pages_free"] == engine.shapes.num_pages


def test_calls_of_several_threads_are_all_answered_as_alone(engine):
    many_threads(engine, threads=6, each=4)


@pytest.mark.slow
def test_twenty_threads_with_fifty_requests_each_are_answered_as_alone(engine):
    many_threads(engine, threads=20, each=50)


def test_a_thread_with_requests_in_progress_passes_those_that_wait_for_them(engine):
    first = engine.submit(request(3))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate, request(5))
        while not engine._turns._queue:
            time.sleep(0.001)
        own = engine.generate(request(4))  # would wait for the other, and the other for `first`
        assert not waiting.done() or first.is_done
        engine.drain()  # the other may be in its call by now
        assert first.is_done and own[0].error is None
        assert waiting.result(60)[0].completions[0].token_ids == engine.generate(request(5))[0].completions[0].token_ids


class Busy:
    """A thread inside `generate`, until it is let go on."""

    def __init__(self, engine):
        self._go_on, inside = threading.Event(), threading.Event()

        def on_update(*_):
            inside.set()
            self._go_on.wait(60)

        def run():
            self.outputs = engine.generate(request(1), on_update=on_update)

        self._thread = threading.Thread(target=run, name="sampler")
        self._thread.start()
        assert inside.wait(60)

    def end(self):
        self._go_on.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.outputs


CALLS = {
    "submit": lambda e: e.submit(request(2)),
    "step_round": lambda e: e.step_round(),
    "flush": lambda e: e.flush(),
    "wait_for_launch_window": lambda e: e.wait_for_launch_window(),
    "cancel": lambda e: e.cancel(None),
    "resample": lambda e: e.resample(None, []),
    "fork": lambda e: e.fork(None, 0),
    "spill_to_host": lambda e: e.spill_to_host(None),
    "prefetch": lambda e: e.prefetch(None),
    "swap_weights": lambda e: e.swap_weights(tiny_model()),
    "reset": lambda e: e.reset(),
    "zero_cache": lambda e: e.zero_cache(),
    "memory": lambda e: e.memory(),
}


def test_calls_of_another_thread_are_told_who_uses_the_engine_and_disturb_nothing(engine):
    alone = engine.generate(request(1))[0].completions[0].token_ids
    busy = Busy(engine)
    for name, call in CALLS.items():
        with pytest.raises(RuntimeError, match=rf"^{name}\(\) was called .* thread 'sampler' is in generate\(\)"):
            call(engine)
    assert engine.stats()["rounds"] > 0 and engine.describe()["max_seqs"] == 4
    assert busy.end()[0].completions[0].token_ids == alone


def test_generate_and_score_wait_for_their_turn(engine):
    busy = Busy(engine)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(engine.generate, request(3)), pool.submit(engine.score, [[1, 2, 3]])]
        time.sleep(0.3)
        assert not any(each.done() for each in waiting)
        busy.end()
        assert waiting[0].result(60)[0].error is None and len(waiting[1].result(60)[0]) == 2


def test_generate_waits_until_the_requests_of_another_thread_have_ended(engine):
    group = engine.submit(Request(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=20, temperature=0.0)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate, request(3))
        while not group.is_done:
            engine.step_round(max_steps=2)
            assert not waiting.done() or group.is_done
        assert waiting.result(60)[0].error is None
    assert group.sequences[0].token_ids == uncached_greedy(tiny_model(), [1, 2], 20)
    engine.drain()


def test_requests_of_a_thread_that_has_ended_hold_nobody_up(engine):
    thread = threading.Thread(target=lambda: engine.submit(request(5)))
    thread.start()
    thread.join()
    assert engine.generate(request(3))[0].error is None
    engine.drain()


def test_an_error_in_one_call_leaves_those_that_wait_unharmed(engine):
    alone = engine.generate(request(3))[0].completions[0].token_ids
    inside, go_on = threading.Event(), threading.Event()

    def fail(*_):
        inside.set()
        go_on.wait(60)
        raise KeyError("of the caller")

    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(lambda: engine.generate(request(1), on_update=fail))
        assert inside.wait(60)
        waiting = pool.submit(engine.generate, request(3))
        go_on.set()
        assert waiting.result(60)[0].completions[0].token_ids == alone
        with pytest.raises(KeyError):
            failing.result(60)


def test_a_callback_may_call_the_engine(engine):
    alone = [engine.generate(request(i))[0].completions[0].token_ids for i in (1, 3)]
    inner = []
    (outer,) = engine.generate(request(1), on_update=lambda *_: inner.append(engine.generate(request(3))[0]))
    assert outer.completions[0].token_ids == alone[0]
    assert inner and all(output.completions[0].token_ids == alone[1] for output in inner)


# Turns alone


def no_thread() -> bool:
    return False


def test_those_who_wait_go_in_order_of_arrival():
    turns, order, threads = Turns(), [], []

    def wait(i):
        with turns.taken("call", no_thread, waits=True):
            order.append(i)

    with turns.taken("first", no_thread, waits=True):
        for i in range(5):
            threads.append(threading.Thread(target=wait, args=(i,)))
            threads[-1].start()
            while len(turns._queue) <= i:
                time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]


def test_a_call_that_does_not_wait_takes_no_turn_from_those_who_do():
    turns = Turns()
    turns._queue.append(threading.Event())  # as between the end of a call and the waking of the next one
    with pytest.raises(RuntimeError, match="other threads wait for their turn"):
        with turns.taken("submit", no_thread, waits=False):
            pass
    with turns.taken("step_round", lambda: True, waits=False):  # they wait for this one's requests
        pass


def test_waiting_ends_with_an_interrupt_and_the_next_one_gets_the_turn():
    turns, done = Turns(), threading.Event()

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            raise KeyboardInterrupt

    def wait():
        with turns.taken("call", no_thread, waits=True):
            done.set()

    def interrupted():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("levanter_infer.engine.turns.threading.Event", Interrupted)
            with pytest.raises(KeyboardInterrupt), turns.taken("call", no_thread, waits=True):
                pass

    with turns.taken("first", no_thread, waits=True):
        thread = threading.Thread(target=interrupted)
        thread.start()
        thread.join(10)
        assert not turns._queue
        other = threading.Thread(target=wait)
        other.start()
        while not turns._queue:
            time.sleep(0.001)
    assert done.wait(10)
    other.join(10)


def test_an_interrupt_right_after_queueing_leaves_no_ticket_behind():
    turns = Turns()

    class Queue(collections.deque):
        def append(self, ticket):
            super().append(ticket)
            raise KeyboardInterrupt

    turns._queue = Queue()
    with pytest.raises(KeyboardInterrupt), turns.taken("call", no_thread, waits=True):
        pass
    assert not turns._queue
    with turns.taken("submit", no_thread, waits=False):
        pass


def test_long_waiting_is_logged_with_who_is_waited_for(monkeypatch, caplog):
    monkeypatch.setattr("levanter_infer.engine.turns._WARN_S", 0.0)
    turns = Turns()

    def wait():
        with turns.taken("score", no_thread, waits=True):
            pass

    with turns.taken("generate", no_thread, waits=True):
        thread = threading.Thread(target=wait, name="later")
        thread.start()
        while not caplog.records:
            time.sleep(0.01)
    thread.join(10)
    me = threading.current_thread().name
    assert f"score() in thread 'later' waits for its turn: thread '{me}' is in generate()" in caplog.text


def test_waiting_for_a_thread_that_does_not_go_on_is_logged_again_and_again(monkeypatch, caplog):
    """It has submitted requests, lives, and makes no further call."""
    for name, seconds in {"_LOOK_S": 0.01, "_WARN_S": 0.05, "_WARN_AGAIN_S": 0.3}.items():
        monkeypatch.setattr(f"levanter_infer.engine.turns.{name}", seconds)
    turns, in_progress = Turns(), [True]

    def wait():
        with turns.taken("generate", lambda: bool(in_progress), waits=True):
            pass

    with turns.taken("submit", lambda: bool(in_progress), waits=False):
        pass
    begin, thread = time.monotonic(), threading.Thread(target=wait, name="later")
    thread.start()
    while len(caplog.records) < 3 and time.monotonic() < begin + 10:
        time.sleep(0.01)
    took = time.monotonic() - begin
    in_progress.clear()
    thread.join(10)
    assert len(caplog.records) == 3 and took > 0.05 + 2 * 0.3
    me = threading.current_thread().name
    for record in caplog.records:
        assert f"thread {me!r} has submitted requests that have not ended; drain() or canc" in record.getMessage()
    assert record.getMessage().endswith("ends them (1 s)")


def test_a_wait_of_two_seconds_is_logged():
    assert turns_module._WARN_S == progress.FIRST_S == 2.0
