"""Messages of an aborting process: JAX's runtime ends it with SIGABRT, from a C++ thread, when it misses a peer."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

LOST = 3
"""Exit status of a process that ends because another one has been lost or has failed."""
_KEPT = (signal.SIGSEGV, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)
"""Signals that `faulthandler.enable` takes too and that keep their default here."""
_pipe: int | None = None
"""Write end of the pipe into which an abort is reported; None: aborts are left alone."""
_lock = threading.Lock()
_explain: Callable[[], str | None] | None = None


def end_now(text: str, status: int = LOST) -> NoReturn:
    """Write an error and end the process, whatever its other threads do."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"error: {text}\n")
        sys.stderr.flush()
    os._exit(status)


def on_abort(explain: Callable[[], str | None]) -> None:
    """End the process with `LOST` and an explanation when it aborts; where `explain` gives None it aborts as usual.

    No Python runs in a signal handler. `faulthandler` handles SIGABRT in C: it writes a few bytes into a pipe and calls
    the handler that was there before, which is the C library's `sleep`. So the aborting thread waits for some seconds
    (`sleep` is given the number of the signal, 6), in which a thread that reads the pipe calls `explain` and ends the
    process. If that thread does not come to it, the abort goes on.
    """
    global _pipe, _explain
    with _lock:
        _explain = explain
        if _pipe is not None:
            return
        reader, _pipe = os.pipe()
        faulthandler.disable()  # one that writes elsewhere
        _set_handler(signal.SIGABRT, ctypes.CDLL(None).sleep)
        faulthandler.enable(_pipe, all_threads=False)
        for number in _KEPT:
            _set_handler(number, None)
    threading.Thread(target=_wait_for_abort, args=(reader,), name="aborts", daemon=True).start()


def clear_abort_message() -> None:
    """Let the process abort as usual."""
    global _pipe
    with _lock:
        if _pipe is None:
            return
        faulthandler.disable()
        _set_handler(signal.SIGABRT, None)
        os.close(_pipe)  # ends the thread
        _pipe = None


@contextlib.contextmanager
def abort_message(text: str) -> Iterator[None]:
    """End the process with this error if it aborts within the context."""
    on_abort(lambda: text)
    try:
        yield
    finally:
        clear_abort_message()


def _wait_for_abort(reader: int) -> None:
    with open(reader, "rb", buffering=0) as pipe:
        aborts = pipe.read(1) != b""
    if not aborts:
        return
    text = None if _explain is None else _explain()
    if text is not None:
        end_now(text)
    _set_handler(signal.SIGABRT, None)
    os.kill(os.getpid(), signal.SIGABRT)


def _set_handler(number: int, handler) -> None:
    """`signal` of the C library, with one of its own functions as the handler; None: the default.

    `signal.signal` of Python takes no C function, and does not see this handler.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    libc.signal(number, None if handler is None else ctypes.cast(handler, ctypes.c_void_p))
