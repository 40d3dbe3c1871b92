"""`AsyncEngine`: one thread owns an `InferenceEngine` and steps it; coroutines of any event loop await the results."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np

from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.metrics import Registry
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request, RequestOutput, as_request, first_and_last, refused
from levanter_infer.engine.request_state import RequestState, SampleState

logger = logging.getLogger(__name__)

_SMOOTHING = 0.1
"""Weight of the newest interval in the mean time between two requests that cease to wait."""


class QueueFull(RuntimeError):
    """As many requests wait as may; nothing has changed. Try again after `retry_after` seconds."""

    def __init__(self, max_waiting: int, retry_after: float):
        super().__init__(f"the queue of {max_waiting} requests (max_waiting) is full; try again in {retry_after:.2f} s")
        self.retry_after = retry_after


@dataclasses.dataclass(frozen=True)
class Update:
    """What one sample of a request has got since its last update. Deltas that have not been read yet are merged."""

    request_id: str
    index: int
    """Sample index."""
    token_ids: list[int]
    """The new tokens."""
    text: str | None
    """The new text; what may yet become part of a stop string is held back. None without a tokenizer."""
    logprobs: np.ndarray
    """f32, one per new token, as in `Completion`; so are the next three."""
    processed_logprobs: np.ndarray
    top_logprobs: list[dict[int, float]] | None
    token_versions: np.ndarray
    num_prompt_tokens: int = 0
    """Of the request."""
    finish_reason: str | None = None
    """Set with the last tokens of the sample."""
    stop_reason: str | int | tuple[int, ...] | None = None
    output: RequestOutput | None = None
    """Set in the last update of the whole request; a refused request has this one only, with `output.error`."""

    @property
    def version_range(self) -> tuple[int, int] | None:
        """The versions of its first and its last token; None without tokens."""
        return first_and_last(self.token_versions)

    def merged(self, later: "Update") -> "Update":
        """This update and the next one of the same sample as one."""
        return dataclasses.replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            text=None if later.text is None else (self.text or "") + later.text,
            logprobs=np.concatenate([self.logprobs, later.logprobs]),
            processed_logprobs=np.concatenate([self.processed_logprobs, later.processed_logprobs]),
            top_logprobs=None if later.top_logprobs is None else (self.top_logprobs or []) + later.top_logprobs,
            token_versions=np.concatenate([self.token_versions, later.token_versions]),
        )


class _Reader:
    """The end of a request in its event loop: updates that wait to be read, one per sample at most."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.pending: dict[int, Update] = {}
        self.output: RequestOutput | None = None
        self.error: BaseException | None = None
        self.ready = asyncio.Event()

    def deliver(self, update: "Update | RequestOutput | BaseException") -> None:
        if isinstance(update, BaseException):
            self.error = update
        elif isinstance(update, RequestOutput):
            self.output = update
        else:
            before = self.pending.get(update.index)
            self.pending[update.index] = update if before is None else before.merged(update)
        self.ready.set()


@dataclasses.dataclass(eq=False)
class _Live:
    """A request that has not ended, as the owner thread sees it."""

    id: str
    request: Request
    reader: _Reader
    state: RequestState | None = None
    waits: bool = True
    sent: dict[SampleState, tuple[int, int, bool]] = dataclasses.field(default_factory=dict)
    """Tokens and characters of each sample that have been delivered, and whether its end has."""


class AsyncEngine:
    """Serves coroutines from one engine, which belongs to a thread of its own until `aclose`.

    Other threads that call the engine's `generate` wait until then. All methods may be called from any event loop.
    A request waits from its call until its first token.

    Args:
        engine: the engine; other callers reach it through `call` alone.
        max_waiting: requests that wait, at most.
    """

    def __init__(self, engine: InferenceEngine, *, max_waiting: int = 1024):
        if type(max_waiting) is not int or max_waiting < 1:
            raise ValueError(f"max_waiting={max_waiting!r}: expected a whole number of at least 1")
        self._engine, self._max_waiting = engine, max_waiting
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting, self._calls = 0, 0
        self._ids: dict[str, _Live] = {}
        self._grown: set[SampleState] = set()
        self._by_state: dict[RequestState, _Live] = {}
        self._reading: set[_Live] = set()
        """Requests whose samples have all finished, while scores or routes are read."""
        self._mail: dict[asyncio.AbstractEventLoop, list] = collections.defaultdict(list)
        self._drains: list[concurrent.futures.Future] = []
        self._paused: str | None = None
        self._idle, self._closing = True, False
        self._interval_s, self._left_at = 1.0, 0.0
        self.error: BaseException | None = None
        """What ended the owner thread, if it died."""
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._own, name="levanter-infer-engine", daemon=True)
        self._thread.start()

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
        """The output of one prompt, as of `InferenceEngine.generate`; a refused one has `error`.

        Args:
            prompt, sampling: as of `InferenceEngine.submit`. Without an id the request is named by the number of
                requests before it. Cancelling the task aborts it.
            timeout: seconds, as `Request.timeout_s`, which it replaces.
        Raises: QueueFull; ValueError for an id in use; RuntimeError if the engine is closed or its thread has died.
        """
        await self._compile(prompt, sampling)
        live = self._enter(prompt, sampling, timeout)
        try:
            await live.reader.ready.wait()
            return _output(live.reader)
        finally:
            self._leave(live)

    async def stream(self, prompt, sampling=None, *, timeout: float | None = None) -> AsyncGenerator[Update]:
        """Updates of one prompt as rounds are read; arguments and errors as of `generate`.

        The request is submitted with the first `anext`. Closing the iterator, or cancelling its task, aborts it.
        """
        await self._compile(prompt, sampling)
        live = self._enter(prompt, sampling, timeout, streams=True)
        reader = live.reader
        try:
            while True:
                await reader.ready.wait()
                reader.ready.clear()
                if reader.error is not None:
                    _output(reader)
                updates, reader.pending, output = list(reader.pending.values()), {}, reader.output
                if output is not None:
                    last = updates.pop() if updates else _empty(output)
                    updates.append(dataclasses.replace(last, output=output))
                for update in updates:
                    yield update
                if output is not None:
                    return
        finally:
            self._leave(live)

    async def _compile(self, prompt, sampling) -> None:
        """Compile the constraint of a request, if it has one, while the owner thread goes on with rounds. What is wrong
        with it comes back with the output."""
        asked = prompt.sampling if isinstance(prompt, Request) and prompt.sampling is not None else sampling
        if isinstance(asked, SamplingParams) and asked.is_constrained:
            with contextlib.suppress(ValueError):
                await asyncio.to_thread(self._engine.compile_constraint, asked)

    def check_capacity(self, count: int) -> None:
        """Raises: QueueFull if `count` more requests may not wait; RuntimeError as `generate`."""
        with self._lock:
            self._check_capacity(count)

    def _check_capacity(self, count: int) -> None:
        self._check_open()
        beyond = self._waiting + count - self._max_waiting
        if beyond > 0:
            raise QueueFull(self._max_waiting, self._interval_s * beyond)

    def _enter(self, prompt, sampling, timeout: float | None, *, streams: bool = False) -> _Live:
        reader = _Reader(asyncio.get_running_loop())
        with self._lock:
            self._check_capacity(1)
            request = as_request(prompt, sampling)
            name = request.id if isinstance(request.id, str) else str(self._calls)
            if name in self._ids:
                raise ValueError(f"a request with the id {name[:80]!r} is in progress; give each an id of its own")
            changes = {} if timeout is None else {"timeout_s": timeout}
            changes |= {"id": name} if request.id is None else {}
            live = _Live(name, dataclasses.replace(request, **changes) if changes else request, reader)
            self._calls, self._waiting, self._ids[name] = self._calls + 1, self._waiting + 1, live
            self._commands.put(lambda: self._submit(live, streams))
        return live

    def _leave(self, live: _Live) -> None:
        if live.reader.output is None and live.reader.error is None:
            self._commands.put(lambda: self._cancel(live))

    async def abort(self, request_id: str) -> bool:
        """End a request with reason "abort" and what it has; returns whether it was in progress."""
        return await self._on_owner(lambda: self._cancel(self._ids.get(request_id)))

    # Control

    async def pause(self, mode: str = "admit") -> None:
        """Stop admitting requests, while running ones end ("admit"), or stop after the current step ("step").

        Requests are taken and wait. A deadline that passes while nothing runs is in force with `resume`.
        """
        if mode not in ("admit", "step"):
            raise ValueError(f"mode={mode!r}: expected 'admit' or 'step'")
        await self._on_owner(lambda: self._pause(mode))

    async def resume(self) -> None:
        """End a pause."""
        await self._on_owner(lambda: self._pause(None))

    async def call(self, function: Callable[..., Any], *args) -> Any:
        """`function(engine, *args)` on the owner thread between rounds; returns or raises what it does."""

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
        done: concurrent.futures.Future = concurrent.futures.Future()
        await self._on_owner(lambda: self._drains.append(done))
        await asyncio.wrap_future(done)

    def stats(self) -> dict[str, Any]:
        """As `InferenceEngine.stats`."""
        return self._engine.stats()

    def metrics(self) -> Registry:
        """As `InferenceEngine.metrics`."""
        return self._engine.metrics()

    async def aclose(self, *, drain: bool = False) -> None:
        """Give the engine back: requests in progress are aborted or, with `drain`, end first."""
        if drain and self.is_ready:
            await self.resume()
            await self.drain()
        with self._lock:
            self._closing = True
            self._commands.put(lambda: None)
        await asyncio.wrap_future(self._ended)

    async def _on_owner(self, function: Callable[[], Any]) -> Any:
        done: concurrent.futures.Future = concurrent.futures.Future()

        def run():
            try:
                result = function()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        with self._lock:
            self._check_open()
            self._commands.put(run)
        either = [asyncio.wrap_future(done), asyncio.wrap_future(self._ended)]
        await asyncio.wait([asyncio.shield(each) for each in either], return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise RuntimeError("the engine was closed") from self.error
        return done.result()

    def _check_open(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"the engine's thread has died: {self.error!r}") from self.error
        if self._closing:
            raise RuntimeError("the AsyncEngine is closed; make another one")

    # On the owner thread

    def _own(self) -> None:
        try:
            with self._engine.held("AsyncEngine"):
                try:
                    while not self._closing:
                        self._turn()
                    self._finish(None)
                except BaseException as error:
                    self._finish(error)
        except BaseException as error:  # the engine cannot be reset either
            logger.exception("the engine of an AsyncEngine was left as it is")
            self.error = self.error or error
        self._ended.set_result(None)

    def _turn(self) -> None:
        """Take the commands that have come, and run a round if there is anything to run; sleep if there is not."""
        runs = bool(self._by_state) and (
            self._paused is None or (self._paused == "admit" and (self._engine.has_active or bool(self._reading)))
        )
        if runs:
            self._engine.wait_for_launch_window()
        elif not self._by_state and self._paused != "step":
            self._rest()
            self._commands.get()()
        else:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()
        if runs and self._by_state and self._paused != "step":
            self._idle = False
            self._take(self._engine.step_round())

    def _rest(self) -> None:
        if not self._idle:
            self._engine.drain()
            self._idle = True
        drains, self._drains = self._drains, []
        for done in drains:
            done.set_result(None)

    def _pause(self, mode: str | None) -> None:
        if mode == "step" and not self._idle:
            self._take(self._engine.flush())
        self._paused = mode
        self._engine.set_admits(mode != "admit")

    def _submit(self, live: _Live, streams: bool) -> None:
        if live.id not in self._ids:  # dropped before it came here
            return
        try:
            state = self._engine.submit(live.request)
        except ValueError as error:
            self._end(live, refused(live.request, live.id, str(error)))
            return
        live.state, state.grown = state, self._grown
        live.sent = {sample: (0, 0, False) for sample in state.sequences} if streams else {}
        self._by_state[state] = live

    def _cancel(self, live: _Live | None) -> bool:
        if live is None or self._ids.get(live.id) is not live:
            return False
        if live.state is None:
            self._end(live, refused(live.request, live.id, "aborted before it was submitted"))
            return True
        self._idle = False
        self._engine.cancel(live.state)
        self._take(live.state.sequences)
        return True

    def _take(self, ended: list[SampleState]) -> None:
        """Deliver what a round has brought; looks at the samples that got tokens or ended, and at no others."""
        touched = dict.fromkeys([*self._grown, *ended])
        self._grown.clear()
        for sample in touched:
            live = self._by_state.get(sample.request)
            if live is None:
                continue
            self._leaves_queue(live)
            if sample in live.sent:
                self._send_delta(live, sample)
            elif not live.sent:
                sample.request.grown = None  # only its end matters
            if sample.finish_reason is not None and all(s.finish_reason is not None for s in sample.request.sequences):
                self._reading.add(live)
        for live in [live for live in self._reading if live.state is not None and live.state.is_done]:
            assert live.state is not None
            self._end(live, live.state.output())
        self._post()

    def _sweep(self) -> None:
        """Look at all requests: a call may have run rounds of its own."""
        self._idle = False
        known = self._engine.flush()
        finished = [s for state in self._by_state for s in state.sequences if s.finish_reason is not None]
        self._take([*known, *finished])

    def _send_delta(self, live: _Live, sample: SampleState) -> None:
        tokens, chars, has_ended = live.sent[sample]
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
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )
        live.sent[sample] = count, end, ended
        self._mail[live.reader.loop].append((live.reader, update))

    def _leaves_queue(self, live: _Live) -> None:
        if live.waits:
            live.waits, now = False, time.monotonic()
            with self._lock:
                self._waiting -= 1
                if self._left_at:
                    self._interval_s += _SMOOTHING * (now - self._left_at - self._interval_s)
                self._left_at = now

    def _end(self, live: _Live, result: RequestOutput | BaseException) -> None:
        self._leaves_queue(live)
        with self._lock:
            self._ids.pop(live.id, None)
        self._reading.discard(live)
        if live.state is not None:
            live.state.grown = None
            self._by_state.pop(live.state, None)
        self._mail[live.reader.loop].append((live.reader, result))
        if live.state is None:
            self._post()

    def _post(self) -> None:
        """Hand each event loop what is for it, in one call."""
        mail, self._mail = self._mail, collections.defaultdict(list)
        for loop, letters in mail.items():
            try:
                loop.call_soon_threadsafe(_deliver, letters)
            except RuntimeError:  # the loop is closed, and no reader waits there
                logger.debug("%d updates for a closed event loop", len(letters))

    def _finish(self, error: BaseException | None) -> None:
        """Give every waiter the error, or its aborted output, and leave the engine empty."""
        with self._lock:
            self.error, self._closing = error, True
        if error is not None:
            logger.error("the owner thread of an AsyncEngine died", exc_info=error)
        why = RuntimeError(f"the engine's thread has died: {error!r}" if error else "the AsyncEngine was closed")
        why.__cause__ = error
        for done in self._drains:
            done.set_exception(why)
        for live in list(self._ids.values()):
            if error is None:
                self._cancel(live)
            else:
                self._end(live, why)
        self._post()
        self._engine.reset()


def _deliver(letters: list[tuple[_Reader, Any]]) -> None:
    for reader, update in letters:
        reader.deliver(update)


def _output(reader: _Reader) -> RequestOutput:
    if reader.error is not None:
        raise reader.error
    assert reader.output is not None
    return reader.output


def _empty(output: RequestOutput) -> Update:
    """The update of a request whose samples have all been delivered, or that was refused."""
    none = np.zeros(0, np.float32)
    last = output.completions[-1] if output.completions else None
    index, reason = (0, "error") if last is None else (last.index, last.finish_reason)
    text = None if last is None or last.text is None else ""
    size = len(output.prompt_token_ids)
    return Update(output.id, index, [], text, none, none, None, np.zeros(0, np.int32), size, reason)
