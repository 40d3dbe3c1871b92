"""Between threads and event loops: `Answer`, which a coroutine awaits, and `DaemonThreads`, an executor that keeps
neither `asyncio.run` nor the interpreter from ending."""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any


class Answer:
    """A result that a coroutine awaits, and another thread gives."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future()

    def __await__(self):
        return self._future.__await__()

    @property
    def is_wanted(self) -> bool:
        """Whether it is still awaited."""
        return not self._future.done() and not self._loop.is_closed()

    def give(self, result: Any = None, error: BaseException | None = None) -> None:
        """Return the result, or raise the error, where it is awaited; from any thread."""

        def enter() -> None:
            if self._future.done():
                return
            if error is None:
                self._future.set_result(result)
            else:
                self._future.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed, and no coroutine waits there
            self._loop.call_soon_threadsafe(enter)


class DaemonThreads:
    """Runs functions in threads that are never joined: what takes for ever is left behind when the process ends.

    `concurrent.futures.ThreadPoolExecutor` joins its threads when the interpreter exits, and an event loop those of its
    default executor.

    Args:
        count: threads, at most; they start as they are needed.
        name: of the threads, before a number.
    """

    def __init__(self, count: int, name: str):
        self._count, self._name = count, name
        self._lock, self._threads, self._unfinished = threading.Lock(), 0, 0
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future, Callable[[], Any]] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[..., Any], *args) -> concurrent.futures.Future:
        """A future of `function(*args)`; cancelling it before the function has begun prevents it."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            self._unfinished += 1
            if self._threads < min(self._count, self._unfinished):
                self._threads += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._calls.put((future, lambda: function(*args)))
        return future

    def close(self) -> None:
        """End each thread when all that was submitted before is done, without waiting for it."""
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    result = function()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del call, future, function  # what they hold is not kept until the next call
            with self._lock:
                self._unfinished -= 1
