"""`ChatTemplate`: renders messages with a model's jinja2 template, in a process of its own.

A template is part of a download and may take any amount of time or memory, so `template_worker` renders it inside
limits of the operating system. The first rendering starts the process (about 0.2 s); later ones take about 0.1 ms
each. A process that a limit ends is replaced, so only the chat that reached the limit fails.
"""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from levanter_infer.checkpoints.chat import (
    check_end,
    check_messages,
    check_tools,
    cut_at_tag,
    prepared,
    tag_final_message,
)

logger = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("template_worker.py")
_START_S = 60.0
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
_MAX_ANSWER_BYTES = 2**27
_MESSAGE_CPU_S = 0.005
"""Processor time that a message adds to the limit: published templates look back over all messages at each."""
_MAX_COMPILATIONS = 3
"""Number of stopped compilations after which a template counts as broken."""
_MAX_WARNINGS, _SHOWN_CHARS = 100, 80
"""Names of unread variables that are warned of, and characters of one that are shown and kept."""
MAX_TEMPLATE_CHARS = 1_000_000
MAX_OUTPUT_CHARS = 8_000_000


class ChatTemplate:
    """A compiled-on-first-use chat template.

    Args:
        source: jinja2 source.
        cpu_s: processor time that compiling, and each rendering, may take; a rendering 5 ms more for each message.
        memory_bytes: address space of the rendering process.
    Raises: ValueError if the source is too long to be a template.
    """

    def __init__(self, source: str, *, cpu_s: float = 2.0, memory_bytes: int = 2**30):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"chat template of {len(source)} characters; expected at most {MAX_TEMPLATE_CHARS}")
        self.source = source
        self._limits = {
            "cpu_s": cpu_s,
            "message_cpu_s": _MESSAGE_CPU_S,
            "memory_bytes": memory_bytes,
            "max_chars": MAX_OUTPUT_CHARS,
        }
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._stops = 0
        self._broken: dict | None = None
        self._description: dict = {}
        self._warned: set[str] = set()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        continue_final_message: bool | str = False,
        **variables: object,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: mappings with a string `role` and a `content` that is text, parts of text, or absent.
            tools: JSON schemas.
            continue_final_message: leave the last message unfinished; a string is the key of the entry that is
                continued, such as reasoning_content.
            variables: further variables of the template, such as `add_generation_prompt` and `bos_token`.
        Raises: ValueError if the messages are malformed, the template refuses them, fails, or exceeds a limit.
        """
        check_messages(messages)
        check_tools(tools)
        check_end(variables.get("add_generation_prompt"), continue_final_message)
        with self._lock:
            worker = self._ready()
            if isinstance(worker, dict):
                return _text_of(worker)
            given = prepared(messages, takes_parts=self._description["takes_parts"])
            final = None
            if continue_final_message:
                field = continue_final_message if isinstance(continue_final_message, str) else "content"
                final = tag_final_message(given, field, self.source)
            line = _as_json({**variables, "tools": tools, "messages": given})
            text = _text_of(self._ask(worker, line, self._limits["cpu_s"] + _MESSAGE_CPU_S * len(given)))
        return text if final is None else cut_at_tag(text, final)

    def warn_of_unread(self, names: Iterable[str]) -> None:
        """Warn once of each variable that the template does not read, and of the first 100 only: clients choose the
        names. Requires: `render` has returned."""
        for name in set(names) - set(self._description["reads"]):
            shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."
            if shown not in self._warned and len(self._warned) < _MAX_WARNINGS:
                self._warned.add(shown)
                logger.warning("the model's chat template reads no variable %r, which was given to it", shown)

    def _ready(self) -> "_Worker | dict":
        """A worker with the compiled template, or the answer with the reason why there is none."""
        if self._broken is not None:
            return self._broken
        if self._worker is not None and self._worker.is_usable:
            return self._worker
        self._close()
        self._worker = _Worker()
        setup = {"path": sys.path, "template": self.source, "limits": self._limits}
        try:
            answer = self._worker.exchange(json.dumps(setup), _START_S)
        except _WorkerStopped as e:
            answer = {"kind": "template", "error": str(e)}
            self._stops += 1
        except BaseException:
            self._close()
            raise
        if "kind" not in answer:
            self._stops = 0
            self._description = answer
            return self._worker
        self._close()
        # Compiling sees no chat, so its errors are the template's own and stay.
        if answer["kind"] == "syntax" or self._stops >= _MAX_COMPILATIONS:
            self._broken = answer
        return answer

    def _ask(self, worker: "_Worker", line: str, cpu_s: float) -> dict:
        try:
            answer = worker.exchange(line, 10 * cpu_s + 5)
        except _WorkerStopped as e:
            answer = {"kind": "template", "error": str(e)}
            self._close()
        except BaseException:  # interrupted: the next chat would read this answer
            self._close()
            raise
        if answer.get("kind") == "memory":
            self._close()
        return answer

    def _close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def _as_json(variables: Mapping[str, object]) -> str:
    def plain(value: object) -> object:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{type(value).__name__} is not serializable")

    try:
        return json.dumps({"variables": variables}, default=plain)
    except RecursionError as e:
        raise ValueError("messages, tools or variables of the chat template nest too deeply") from e
    except (TypeError, ValueError) as e:
        raise ValueError(f"messages, tools and variables of the chat template must hold JSON values only: {e}") from e


def _text_of(answer: Mapping[str, str]) -> str:
    """The text of an answer. Raises: ValueError with the reason if it has none."""
    if "text" in answer:
        return answer["text"]
    if answer["kind"] == "refused":
        raise ValueError(f"the chat template refuses these messages: {answer['error']}")
    if answer["kind"] == "syntax":
        raise ValueError(f"the model's chat template is broken: {answer['error']}")
    raise ValueError(f"the model's chat template failed: {answer['error']}")


class _WorkerStopped(Exception):
    """The worker ended without an answer."""


class _Worker:
    """A running `template_worker` process, which ends with this object."""

    def __init__(self):
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which then closes the worker
        )
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _stop, self._process, self._owner)

    @property
    def is_usable(self) -> bool:
        """False once the process has ended, and in a fork of the process that started it."""
        return self._owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        self._end()

    def exchange(self, line: str, timeout_s: float) -> dict:
        """Send one line and wait for its answer. Raises: _WorkerStopped if there is none in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _WorkerStopped(self._reason()) from None
        deadline, answer = time.monotonic() + timeout_s, bytearray()
        while not answer.endswith(b"\n"):
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise _WorkerStopped("it takes too long")
            piece = os.read(self._process.stdout.fileno(), 2**20)
            if not piece:
                raise _WorkerStopped(self._reason())
            answer += piece
            if len(answer) > _MAX_ANSWER_BYTES:
                raise _WorkerStopped("its output is too long")
        return json.loads(answer)

    def _reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        status = self._process.returncode
        if status is not None and status == -signal.SIGPROF:
            return "it takes too long"
        return f"its process ended with status {status}"


def _stop(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() != owner:
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    process.wait()
