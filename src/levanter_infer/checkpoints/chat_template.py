"""`ChatTemplate`: renders messages with a model's jinja2 template, in a process of its own.

A template comes with a download and may ask for any amount of time or memory, so `template_worker` renders it inside
limits of the operating system. The process is started by the first rendering (about 0.2 s), serves all later ones
(about 0.1 ms each), and is replaced when a limit ends it.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

_WORKER = Path(__file__).with_name("template_worker.py")
_START_S = 60.0
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
_MAX_ANSWER_BYTES = 2**27
_MAX_KILLS = 3
MAX_TEMPLATE_CHARS = 1_000_000
MAX_OUTPUT_CHARS = 8_000_000
MAX_MESSAGES = 10_000


class ChatTemplate:
    """A compiled-on-first-use chat template.

    Args:
        source: jinja2 source.
        cpu_s: processor time that compiling, and each rendering, may take.
        memory_bytes: address space of the rendering process.
    Raises: ValueError if the source is too long to be a template.
    """

    def __init__(self, source: str, *, cpu_s: float = 2.0, memory_bytes: int = 2**30):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"chat template of {len(source)} characters; expected at most {MAX_TEMPLATE_CHARS}")
        self.source = source
        self._limits = {"cpu_s": cpu_s, "memory_bytes": memory_bytes, "max_chars": MAX_OUTPUT_CHARS}
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._kills = 0

    def render(self, messages: Sequence[Mapping[str, object]], **variables: object) -> str:
        """The prompt text of a conversation.

        Args:
            messages: mappings with a string `role` and a string or absent `content`.
            variables: further names the template may use, such as `add_generation_prompt` and `bos_token`.
        Raises: ValueError if the messages are malformed, the template refuses them, fails, or exceeds a limit.
        """
        check_messages(messages)
        try:
            line = json.dumps({"variables": {**variables, "messages": [dict(m) for m in messages]}})
        except (TypeError, ValueError, RecursionError) as e:
            raise ValueError(f"messages must hold JSON values only: {e}") from e
        with self._lock:
            answer = self._ask(line)
        if "text" in answer:
            return answer["text"]
        if answer["kind"] == "refused":
            raise ValueError(f"the chat template refuses these messages: {answer['error']}")
        if answer["kind"] == "syntax":
            raise ValueError(f"the model's chat template is broken: {answer['error']}")
        raise ValueError(f"the model's chat template failed: {answer['error']}")

    def _ask(self, line: str) -> dict:
        if self._kills >= _MAX_KILLS:
            return {"kind": "template", "error": f"it was stopped {self._kills} times and is not tried again"}
        if self._worker is not None and not self._worker.is_usable:
            self._worker.close()
            self._worker = None
        try:
            if self._worker is None:
                self._worker = _Worker()
                setup = {"path": sys.path, "template": self.source, "limits": self._limits}
                answer = self._worker.exchange(json.dumps(setup), _START_S)
                if answer:
                    self._close()
                    return answer
            answer = self._worker.exchange(line, 10 * self._limits["cpu_s"] + 5)
        except _WorkerStopped as e:
            self._close()
            self._kills += 1
            return {"kind": "template", "error": str(e)}
        if answer.get("kind") == "memory":
            self._close()
        return answer

    def _close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def check_messages(messages) -> None:
    """Raises: ValueError unless `messages` is a list of mappings with a role and, if any, a text content.

    Their number is from 1 to `MAX_MESSAGES`: with more, a request could bring a good template to its limits, which are
    there against bad ones.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError("messages must be a non-empty list of {role, content} mappings")
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"messages has {len(messages)} entries; expected at most {MAX_MESSAGES}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
            raise ValueError(f"messages[{i}] is {message!r:.80}; expected a mapping with role and content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] has no role; expected one such as user, assistant or system")
        if not isinstance(message.get("content"), str | None):
            raise ValueError(f"messages[{i}].content is {type(message['content']).__name__}; expected a string")


class _WorkerStopped(Exception):
    """The worker ended or was ended without an answer."""


class _Worker:
    """A running `template_worker`; ends with this object."""

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
