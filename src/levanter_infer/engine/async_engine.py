"""`AsyncEngine`: one thread owns an `InferenceEngine` and steps it; coroutines of any event loop await the results.

A request goes from thread to thread: `_enter` and `_compile` (the caller's, which waits for one that compiles its
constraint), `_prepare` (the intake thread: a text of any length becomes tokens while rounds go on), `_submit`, `_take`
and `_end` (the owner thread), `Reader.deliver` (the caller's). Whatever waits for the owner thread waits with an
`Answer`.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import numbers
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np

from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.metrics import Registry
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.reader import Reader, Update, deliver, last_update
from levanter_infer.engine.request import Request, RequestOutput, as_request, refused
from levanter_infer.engine.request_state import RequestState, SampleState
from levanter_infer.engine.wait_time import WaitTime
from levanter_infer.policies import FinishReason
from levanter_infer.runtime.threads import Answer, DaemonThreads
from levanter_infer.structured.compiler import Wanted

logger = logging.getLogger(__name__)
_COMPILERS = 4
"""Constraints that are compiled at once, at most."""


class QueueFull(RuntimeError):
    """As many requests wait as may; nothing has changed. Try again after `retry_after` seconds."""

    def __init__(self, max_waiting: int, retry_after: float):
        super().__init__(f"the queue of {max_waiting} requests (max_waiting) is full; try again in {retry_after:.2f} s")
        self.max_waiting, self.retry_after = max_waiting, retry_after

    def __reduce__(self):
        return type(self), (self.max_waiting, self.retry_after)


@dataclasses.dataclass(eq=False)
class _Live:
    """A request that has not ended, as the owner thread sees it."""

    id: str
    request: Request
    reader: Reader
    streams: bool
    since: float
    """When it was made; a deadline counts from here."""
    state: RequestState | None = None
    """None before it is submitted."""
    waits: bool = True
    is_aborted: bool = False
    """Whether it is to end as soon as it could be submitted."""
    is_dropped: bool = False
    """Whether no coroutine reads it any more."""
    has_ended: bool = False
    sent: dict[SampleState, tuple[int, int, bool]] = dataclasses.field(default_factory=dict)
    """Tokens and characters of each sample that have been delivered, and whether its end has."""

    @property
    def constrained(self) -> SamplingParams | None:
        """Its parameters, if they have a constraint."""
        params = self.request.sampling
        return params if isinstance(params, SamplingParams) and params.is_constrained else None


class AsyncEngine:
    """Serves coroutines from one engine, which belongs to a thread of its own until `aclose`.

    Other threads that call the engine's `generate` wait until then. All methods may be called from any event loop.
    A request waits from its call until its first token. Requests are submitted in the order of their calls, those with
    a constraint when it is compiled.

    Args:
        engine: the engine, on devices of this process; other callers reach it through `call` alone.
        max_waiting: requests that wait, at most.
        max_round_seconds: what a round should take, at most, where `EngineConfig.max_round_seconds` is longer. A round
            brings all its tokens at once, and requests that come meanwhile start after it.
    """

    def __init__(self, engine: InferenceEngine, *, max_waiting: int = 1024, max_round_seconds: float = 0.05):
        if type(max_waiting) is not int or max_waiting < 1:
            raise ValueError(f"max_waiting={max_waiting!r}: expected a whole number of at least 1")
        if type(max_round_seconds) not in (int, float) or not max_round_seconds > 0:
            raise ValueError(f"max_round_seconds={max_round_seconds!r}: expected seconds above 0")
        if engine.backend.spans_hosts:
            raise ValueError("the mesh belongs to several processes, which must make the same calls in the same order")
        self._engine, self._max_waiting, self._max_round_seconds = engine, max_waiting, max_round_seconds
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._unprepared: queue.SimpleQueue[_Live | None] = queue.SimpleQueue()
        self._compilers = DaemonThreads(_COMPILERS, "levanter-infer-constraints")
        self._lock = threading.Lock()
        self._waiting, self._calls = 0, 0
        self._ids: dict[str, _Live] = {}
        self._grown: set[SampleState] = set()
        self._by_state: dict[RequestState, _Live] = {}
        self._reading: set[_Live] = set()
        """Requests whose samples have all finished, while scores or routes are read."""
        self._mail: dict[asyncio.AbstractEventLoop, list] = collections.defaultdict(list)
        self._asked: set[Answer] = set()
        """Answers that the owner thread owes."""
        self._drains: list[Answer] = []
        self._closers: list[Answer] = []
        self._paused: str | None = None
        self._idle, self._closing, self._stopping, self._ended = True, False, False, False
        self._wait_time = WaitTime()
        self.error: BaseException | None = None
        """The error that ended the owner thread, if it died."""
        self._thread = threading.Thread(target=self._own, name="levanter-infer-engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._prepare, name="levanter-infer-intake", daemon=True).start()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.error is None and not self._closing

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exc) -> None:
        await self.aclose()

    # Requests

    async def generate(self, prompt, sampling=None, *, timeout: float | None = None) -> RequestOutput:
        """The output of one prompt, as in `InferenceEngine.generate`; a refused one has `error`.

        Args:
            prompt, sampling: as in `InferenceEngine.submit`. Without an id the request is named by the number of
                requests before it. Cancelling the task aborts it.
            timeout: seconds, as `Request.timeout_s`, which it replaces.
        Raises: QueueFull; ValueError for an id in use; RuntimeError if the engine is closed or its thread has died, or
            as `InferenceEngine.submit`.
        """
        live = self._enter(prompt, sampling, timeout)
        try:
            await self._compile(live)
            await live.reader.ready.wait()
            return live.reader.result()
        finally:
            self._leave(live)

    async def stream(self, prompt, sampling=None, *, timeout: float | None = None) -> AsyncGenerator[Update]:
        """Updates of one prompt as rounds are read; arguments and errors as in `generate`.

        The request is submitted with the first `anext`. Closing the iterator, or cancelling its task, aborts it.
        """
        live = self._enter(prompt, sampling, timeout, streams=True)
        reader = live.reader
        try:
            await self._compile(live)
            while True:
                await reader.ready.wait()
                reader.ready.clear()
                if reader.error is not None:
                    reader.result()
                updates, reader.pending, output = list(reader.pending.values()), {}, reader.output
                if output is not None:
                    last = updates.pop() if updates else last_update(output)
                    updates.append(dataclasses.replace(last, output=output))
                for update in updates:
                    yield update
                if output is not None:
                    return
        finally:
            self._leave(live)

    async def _compile(self, live: _Live) -> None:
        """Compile the constraint of a request, if it has one, which may take seconds, and hand it to the intake thread.

        What is wrong with the constraint comes back with the output. Where the request is aborted meanwhile, or its
        deadline passes, it goes on without its constraint, to be checked and ended.
        """
        params = live.constrained
        if params is None:
            return  # it has gone there already
        timeout = live.request.timeout_s
        has_deadline = isinstance(timeout, numbers.Real) and timeout > 0  # any other is refused, or is none
        compiled = asyncio.wrap_future(self._compilers.submit(self._engine.compile_constraint, params))
        leaves = asyncio.ensure_future(live.reader.leaves.wait())
        try:
            seconds = min(float(timeout), threading.TIMEOUT_MAX) if has_deadline else None  # type: ignore[arg-type]
            await asyncio.wait((compiled, leaves), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaves.cancel()
            is_compiled = compiled.done()
            compiled.cancel()
        if is_compiled:
            with contextlib.suppress(ValueError):
                compiled.result()
        else:
            live.is_aborted = True
        self._unprepared.put(live)

    def check_capacity(self, count: int) -> None:
        """Raises: QueueFull if `count` more requests may not wait; RuntimeError as `generate`."""
        with self._lock:
            self._check_capacity(count)

    def _check_capacity(self, count: int) -> None:
        self._check_open(self._closing)
        beyond = self._waiting + count - self._max_waiting
        if beyond > 0:
            raise QueueFull(self._max_waiting, self._wait_time.interval_s * beyond)

    def _enter(self, prompt, sampling, timeout: float | None, *, streams: bool = False) -> _Live:
        self._check_thread()
        reader = Reader(asyncio.get_running_loop())
        with self._lock:
            self._check_capacity(1)
            request = as_request(prompt, sampling)
            while request.id is None and str(self._calls) in self._ids:
                self._calls += 1  # a caller has given this number as an id
            name = request.id if isinstance(request.id, str) else str(self._calls)
            if name in self._ids:
                raise ValueError(f"a request with the id {name[:80]!r} is in progress; give each an id of its own")
            changes = {} if timeout is None else {"timeout_s": timeout}
            changes |= {"id": name} if request.id is None else {}
            asked = dataclasses.replace(request, **changes) if changes else request
            live = _Live(name, asked, reader, streams, time.monotonic())
            if not self._waiting:
                self._wait_time.starts()
            self._calls, self._waiting, self._ids[name] = self._calls + 1, self._waiting + 1, live
            if live.constrained is None:
                self._unprepared.put(live)
        return live

    def _leave(self, live: _Live) -> None:
        """A request has lost its reader: its id is free at once, and the owner thread ends it."""
        if live.reader.output is None and live.reader.error is None:
            with self._lock:
                self._forget(live)
            live.is_dropped = True
            self._commands.put(lambda: self._drop(live))

    def _forget(self, live: _Live) -> None:
        if self._ids.get(live.id) is live:
            del self._ids[live.id]

    def _prepare(self) -> None:
        """On the intake thread: encode and check requests, in the order in which they come."""
        while (live := self._unprepared.get()) is not None:
            if live.is_dropped or live.has_ended:
                continue
            try:
                # the constraint of one that ends now may not have been compiled, and is not needed
                request = _unconstrained(live.request) if live.is_aborted else live.request
                prepared = self._engine.prepare(request)
            except Exception as error:
                prepared = error
            self._commands.put(functools.partial(self._submit, live, prepared))

    async def abort(self, request_id: str) -> bool:
        """End a request with reason "abort" and what it has; returns whether it was in progress."""
        return await self._on_owner(lambda: self._abort(self._ids.get(request_id)))

    # Control

    async def pause(self, mode: str = "admit") -> None:
        """Stop admitting requests, while running ones end ("admit"), or stop after the current step ("step").

        Requests are taken and wait. Deadlines are in force.
        """
        if mode not in ("admit", "step"):
            raise ValueError(f"mode={mode!r}: expected 'admit' or 'step'")
        await self._on_owner(lambda: self._pause(mode))

    async def resume(self) -> None:
        """End a pause."""
        await self._on_owner(lambda: self._pause(None))

    async def call(self, function: Callable[..., Any], *args) -> Any:
        """`function(engine, *args)` on the owner thread between rounds; returns or raises what it does.

        Requests that are made before may be submitted after it. Cancelling the task before it has begun prevents it.
        While the engine sleeps, no round runs.
        """

        def run():
            try:
                return function(self._engine, *args)
            finally:
                self._sweep()

        return await self._on_owner(run)

    async def swap_weights(self, model, **options) -> None:
        """As `InferenceEngine.swap_weights`, between rounds."""
        await self.call(lambda engine: engine.swap_weights(model, **options))

    async def drain(self) -> None:
        """Wait until no request is in progress and all pages are free; a pause must end first."""
        done = Answer()
        await self._on_owner(lambda: self._drains.append(done))
        await done

    def stats(self) -> dict[str, Any]:
        """As `InferenceEngine.stats`."""
        return self._engine.stats()

    def metrics(self) -> Registry:
        """As `InferenceEngine.metrics`."""
        return self._engine.metrics()

    async def aclose(self, *, drain: bool = False) -> None:
        """Give the engine back: requests in progress are aborted or, with `drain`, end first. No further ones are
        taken, also if this is cancelled."""
        self._check_thread()
        with self._lock:
            self._closing = True
            drain = drain and not self._stopping
        if drain:
            with contextlib.suppress(RuntimeError):  # another call closes it at once, or the thread dies
                await self.resume()
                await self.drain()
        with self._lock:
            if self._ended:
                return
            closed = Answer()
            self._stopping = True
            self._closers.append(closed)
            self._commands.put(lambda: None)
        await closed

    async def _on_owner(self, function: Callable[[], Any]) -> Any:
        self._check_thread()
        answer = Answer()

        def run() -> None:
            self._asked.discard(answer)
            if not answer.is_wanted:
                return
            try:
                result = function()
            except Exception as error:
                answer.give(error=error)
            else:
                answer.give(result)

        with self._lock:
            self._check_open(self._stopping)
            self._asked.add(answer)
            self._commands.put(run)
        return await answer

    def _check_open(self, is_closed: bool) -> None:
        if self.error is not None:
            raise RuntimeError(f"the engine's thread has died: {self.error!r}") from self.error
        if is_closed:
            raise RuntimeError("the AsyncEngine is closed; make another one")

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a function of call() called the AsyncEngine, whose thread it is in; call the engine that it was given"
            )

    # On the owner thread

    def _own(self) -> None:
        try:
            with self._engine.held("AsyncEngine", self._max_round_seconds):
                try:
                    while not self._stopping:
                        self._turn()
                    self._finish(None)
                except BaseException as error:
                    self._finish(error)
        except BaseException as error:  # the engine cannot be reset either
            logger.exception("the engine of an AsyncEngine was left as it is")
            self.error = self.error or error
        with self._lock:
            self._ended = True
        for closed in self._closers:
            closed.give()

    def _turn(self) -> None:
        """Take the commands that have come, and run a round if there is anything to run; sleep if there is not."""
        runs = self._runs()
        if runs:
            self._engine.wait_for_launch_window()
        else:
            self._wait_for_command()
        for _ in range(self._commands.qsize()):  # those that come meanwhile wait for the next turn
            self._commands.get()()
        if runs and self._runs():
            self._idle = False
            self._take(self._engine.step_round())

    def _runs(self) -> bool:
        """Whether a round has anything to do. Without weights requests wait for `swap_weights`."""
        if not self._by_state or self._paused == "step" or self._engine.is_asleep or self._engine.model is None:
            return False
        return self._paused is None or self._engine.has_active or bool(self._reading)

    def _wait_for_command(self) -> None:
        """Take a command, or end what has a deadline, whichever comes first."""
        until = None
        if self._by_state:
            ended, until = self._engine.expire()
            self._take(ended)
        elif self._paused != "step":
            self._rest()
        try:
            command = self._commands.get(timeout=None if until is None else min(until, threading.TIMEOUT_MAX))
        except queue.Empty:
            return
        command()

    def _rest(self) -> None:
        if not self._idle and not self._engine.is_asleep:
            self._engine.drain()
            self._idle = True
        with self._lock:
            if self._ids:  # a request is being prepared
                return
        drains, self._drains = self._drains, []
        for done in drains:
            done.give()

    def _pause(self, mode: str | None) -> None:
        if mode == "step" and not self._idle:
            self._sweep()
        self._paused = mode
        self._engine.set_admits(mode != "admit")
        self._wait_time.starts()

    def _submit(self, live: _Live, prepared: RequestState | Exception) -> None:
        if live.has_ended:  # dropped before it came here
            return
        if isinstance(prepared, ValueError):  # the only kind of error that says that the request is wrong
            self._end(live, refused(live.request, live.id, str(prepared)))
            return
        try:
            if isinstance(prepared, Exception):
                raise prepared
            if prepared.timeout_s is not None:
                prepared.timeout_s = max(prepared.timeout_s - (time.monotonic() - live.since), 0.0)
            if live.is_aborted:
                for sample in prepared.sequences:
                    sample.finish(FinishReason.ABORT)
                self._end(live, prepared.output())
                return
            state = self._engine.submit(prepared)
        except Exception as error:  # the engine sleeps or has no weights, and what it has to do for this request fails
            self._end(live, error)
            return
        live.state, state.grown = state, self._grown
        self._by_state[state] = live

    def _abort(self, live: _Live | None) -> bool:
        """End a request, with an output; returns whether it was in progress."""
        if live is None or live.has_ended or live.is_aborted:
            return False
        live.is_aborted = True
        if live.state is not None:
            self._cancel(live.state)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no reader waits there
                live.reader.loop.call_soon_threadsafe(live.reader.leaves.set)
        return True

    def _drop(self, live: _Live) -> None:
        """End a request that has lost its reader."""
        if live.state is None:
            self._end(live, refused(live.request, live.id, "aborted before it was submitted"))
        elif not live.has_ended:
            self._cancel(live.state)

    def _cancel(self, state: RequestState) -> None:
        self._idle = False
        self._engine.cancel(state)
        self._take(state.sequences)

    def _take(self, ended: list[SampleState]) -> None:
        """Deliver what a round has brought; looks at the samples that got tokens or ended, and at no others."""
        touched = dict.fromkeys([*self._grown, *ended])
        self._grown.clear()
        for sample in touched:
            live = self._by_state.get(sample.request)
            if live is None:
                continue
            self._leaves_queue(live)
            if live.streams:
                self._send_delta(live, sample)
            else:
                sample.request.grown = None  # only its end matters
            if sample.finish_reason is not None and all(s.finish_reason is not None for s in sample.request.sequences):
                self._reading.add(live)
        for live in [live for live in self._reading if live.state is not None and live.state.is_done]:
            assert live.state is not None
            self._end(live, live.state.output())
        self._post()

    def _sweep(self) -> None:
        """Read the round in flight, and look at all requests: a call may have run rounds of its own, and a failure in
        one has ended all requests."""
        self._idle = False
        try:
            self._engine.flush()
        finally:
            self._take([s for state in self._by_state for s in state.sequences if s.finish_reason is not None])

    def _send_delta(self, live: _Live, sample: SampleState) -> None:
        tokens, chars, has_ended = live.sent.get(sample, (0, 0, False))
        if has_ended:
            return
        params, ended = sample.request.params, sample.finish_reason is not None
        held = 0 if ended else max(map(len, params.stop), default=1) - 1
        count, end = len(sample.token_ids), max(chars, len(sample.text) - held)
        if count == tokens and not ended:
            return
        update = Update(
            request_id=live.id,
            index=sample.index,
            token_ids=sample.token_ids[tokens:],
            text=None if sample.decoder is None else sample.text[chars:end],
            logprobs=np.asarray(sample.logprobs[tokens:], np.float32),
            processed_logprobs=np.asarray(sample.processed_logprobs[tokens:], np.float32),
            top_logprobs=sample.top_logprobs[tokens:] if params.logprobs else None,
            token_versions=np.asarray(sample.versions[tokens:], np.int32),
            num_prompt_tokens=len(sample.request.prompt_token_ids),
            prompt_token_ids=sample.request.prompt_token_ids,
            seed=sample.request.seed,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )
        live.sent[sample] = count, end, ended
        self._mail[live.reader.loop].append((live.reader, update))

    def _leaves_queue(self, live: _Live) -> None:
        if live.waits:
            live.waits = False
            with self._lock:
                self._waiting -= 1
                self._wait_time.leaves()

    def _end(self, live: _Live, result: RequestOutput | BaseException) -> None:
        if live.has_ended:
            return
        live.has_ended = True
        self._leaves_queue(live)
        with self._lock:
            self._forget(live)
        self._reading.discard(live)
        if live.state is not None:
            live.state.grown = None
            self._by_state.pop(live.state, None)
        self._mail[live.reader.loop].append((live.reader, result))
        if live.state is None:
            self._post()

    def _post(self) -> None:
        """Hand each event loop what is for it, in one call."""
        with self._lock:
            self._wait_time.end_round()
        mail, self._mail = self._mail, collections.defaultdict(list)
        for loop, letters in mail.items():
            try:
                loop.call_soon_threadsafe(deliver, letters)
            except RuntimeError:  # the loop is closed, and no reader waits there
                for live in [live for live in self._by_state.values() if live.reader.loop is loop]:
                    self._leave(live)

    def _finish(self, error: BaseException | None) -> None:
        """Give every waiter the error, or its aborted output, and leave the engine empty."""
        with self._lock:
            self.error, self._closing, self._stopping = error, True, True
        self._unprepared.put(None)
        self._compilers.close()
        if error is not None:
            logger.error("the owner thread of an AsyncEngine died", exc_info=error)
        why = RuntimeError(f"the engine's thread has died: {error!r}" if error else "the AsyncEngine was closed")
        why.__cause__ = error
        for answer in [*self._drains, *self._asked]:
            answer.give(error=why)
        states = list(self._by_state)
        for live in list(self._ids.values()):
            if error is None:
                self._drop(live)
            else:
                self._end(live, why)
        try:
            if self._engine.is_asleep:  # nothing of it is on the device
                for state in states:
                    self._engine.cancel(state)
            else:
                self._engine.reset()
        finally:  # those that had ended waited for what was read of them, which `reset` has given up
            for state, live in list(self._by_state.items()):
                self._end(live, state.output() if state.is_done else why)
            self._post()


def _unconstrained(request: Request) -> Request:
    if not isinstance(request.sampling, SamplingParams):
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **Wanted()._asdict()))
