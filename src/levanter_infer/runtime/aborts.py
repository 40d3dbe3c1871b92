"""Last words: JAX's runtime ends a process with SIGABRT when it misses a peer, before any Python runs."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

LOST = 3
"""Exit status of a process that ends because another one has been lost or has failed."""
_LIMIT_S = 5
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: list[object] = []
"""Handlers that are or were installed: one that is called after it was collected would be a crash."""


def end_now(text: str, status: int = LOST) -> NoReturn:
    """Say it and end the process, whatever its other threads do."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"error: {text}\n")
        sys.stderr.flush()
    os._exit(status)


def on_abort(explain: Callable[[], str | None]) -> None:
    """Have the process end with `LOST` and an explanation when it aborts; where there is none it aborts as ever.

    The handler runs Python in the thread that aborts, which a signal handler should not. This process ends in any case;
    an alarm sees to it that it does.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def handle(_: int) -> None:
        libc.signal(signal.SIGALRM, None)  # the default: to end
        libc.alarm(_LIMIT_S)
        text = explain()
        if text is not None:
            end_now(text)
        libc.signal(signal.SIGABRT, None)

    handler = _Handler(handle)
    _kept.append(handler)
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def no_words() -> None:
    """Abort as ever."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, None)


@contextlib.contextmanager
def last_words(text: str) -> Iterator[None]:
    """What an abort within means."""
    on_abort(lambda: text)
    try:
        yield
    finally:
        no_words()
