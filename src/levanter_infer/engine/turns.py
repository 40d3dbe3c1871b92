"""`Turns`: one thread in an engine at a time. Other threads wait for their turn, or get an error that names it."""

import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from levanter_infer.runtime.progress import FIRST_S

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
"""Seconds after which a waiting thread looks by itself whether the engine is free: its owner may have died."""
_WARN_S, _WARN_AGAIN_S = FIRST_S, 30.0
"""Seconds of waiting before a log line names the thread in the engine, and between two lines: a thread that lives and
makes no further call may block others for ever."""

Method = TypeVar("Method", bound=Callable[..., Any])


class Turns:
    """The turns of threads at an engine.

    A call belongs to its thread from start to end; calls from within it, such as those of a callback, pass. Between
    the calls of a thread that has requests in progress, further calls that do not wait pass too, from any thread, and
    those that wait stay outside until these requests have ended or their thread has.
    """

    def __init__(self):
        self._mutex = threading.Lock()
        self._owner: threading.Thread | None = None
        self._call = ""
        self._user: threading.Thread | None = None
        """The thread whose requests are in progress, if there are any: it made the last call that does not wait."""
        self._queue: collections.deque[threading.Event] = collections.deque()

    @contextlib.contextmanager
    def taken(self, call: str, is_busy: Callable[[], bool], *, waits: bool) -> Iterator[None]:
        """Hold the engine for one call.

        Args:
            call: its name, for messages.
            is_busy: whether requests are in progress; asked only while no thread is in a call.
            waits: wait for the turn, in order of arrival. An interrupt ends the waiting.
        Raises: RuntimeError naming the thread that uses the engine, if `waits` is false and there is one.
        """
        me = threading.current_thread()
        if self._owner is me:
            yield
            return
        try:
            if waits:
                self._wait(me, call, is_busy)
            else:
                self._take_now(me, call, is_busy)
            yield
        finally:
            if self._owner is me:
                # An assignment comes first: an interrupt cannot come before it and leave the engine taken for good
                self._owner = None
                self._wake_next()

    def _take_now(self, me: threading.Thread, call: str, is_busy: Callable[[], bool]) -> None:
        with self._mutex:
            if self._is_free() and (not self._queue or is_busy()):
                self._owner, self._call, self._user = me, call, me
                return
            owner, running = self._owner, self._call
        if owner is None:
            others = "other threads wait for their turn in generate() or score()"
        else:
            others = f"thread {owner.name!r} is in {running}()"
        raise RuntimeError(
            f"{call}() was called from thread {me.name!r} while the engine is in use: {others}. Let one thread make "
            "all calls of this kind; generate() and score() may be called from any thread and wait for their turn"
        )

    def _wait(self, me: threading.Thread, call: str, is_busy: Callable[[], bool]) -> None:
        ticket, begin = threading.Event(), time.monotonic()
        warn_at = begin + _WARN_S
        try:
            self._queue.append(ticket)  # within: an interrupt after it must not leave a ticket without a thread
            while True:
                with self._mutex:
                    if self._may_enter(me, ticket, is_busy):
                        self._owner, self._call = me, call
                        return
                ticket.wait(_LOOK_S)
                ticket.clear()
                now = time.monotonic()
                if now > warn_at:
                    warn_at = now + _WARN_AGAIN_S
                    said = "%s() in thread %r waits for its turn: %s (%.0f s)"
                    logger.warning(said, call, me.name, self._reason(), now - begin)
        finally:
            with contextlib.suppress(ValueError):  # interrupted before it was there
                self._queue.remove(ticket)
            self._wake_next()

    def _is_free(self) -> bool:
        return self._owner is None or not self._owner.is_alive()

    def _may_enter(self, me: threading.Thread, ticket: threading.Event, is_busy: Callable[[], bool]) -> bool:
        """Whether it is the turn of `me`.

        A thread that has requests in progress passes the others: they wait for those, and would wait for ever.
        """
        if not self._is_free():
            return False
        user = self._user
        if user is None or not user.is_alive() or not is_busy():
            return self._queue[0] is ticket
        return user is me

    def _reason(self) -> str:
        owner, user = self._owner, self._user
        if owner is not None:
            return f"thread {owner.name!r} is in {self._call}()"
        if user is not None:
            return f"thread {user.name!r} has submitted requests that have not ended; drain() or cancel() ends them"
        return "others came before"

    def _wake_next(self) -> None:
        for ticket in tuple(self._queue)[:1]:
            ticket.set()


def exclusive(method: Method) -> Method:
    """A method of an engine that raises RuntimeError while another thread uses the engine."""
    return _within_turns(method, waits=False)


def waits_for_turn(method: Method) -> Method:
    """A method of an engine that waits until no other thread uses the engine."""
    return _within_turns(method, waits=True)


def _within_turns(method: Method, *, waits: bool) -> Method:
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        with self._turns.taken(method.__name__, self._is_in_progress, waits=waits):
            return method(self, *args, **kwargs)

    return cast(Method, call)
