"""`stage`: names a wait, and shows it if it takes long: in terminals and notebooks, elsewhere as log lines.

    with stage("reading weights"):
        ...

A stage that ends within `FIRST_S` is not shown. After that a terminal and a notebook show the innermost stage and its
seconds. Elsewhere a line is written then and every `EVERY_S` seconds: by the commands on standard error, otherwise at
level INFO of this module's logger. LEVANTER_INFER_PROGRESS=log writes lines in terminals and notebooks too, and `off`
shows nothing.
"""

import contextlib
import html
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

logger = logging.getLogger(__name__)

VARIABLE = "LEVANTER_INFER_PROGRESS"
FIRST_S = 2.0
"""Seconds before a stage is shown."""
EVERY_S = 10.0
"""Seconds between log lines of one stage."""
BAR_S = 0.5
"""Seconds of sampling before a bar is drawn."""
_REFRESH_S = 0.25
_ERASE_S = 1.0
"""Longest wait at the end of a stage until its display is erased, in seconds."""


class Stage:
    """A wait, and its progress as far as that is known."""

    def __init__(self, name: str, note: Callable[[], str] | None, *, after_s: float, draws_itself: bool = False):
        self.name, self.after_s, self.draws_itself = name, after_s, draws_itself
        self.begin = self.alive = time.monotonic()
        self.said: float | None = None
        """Time of its last log line."""
        self.finished: int | None = None
        self.total: int | None = None
        self._note = note or (lambda: "")

    def update(self, finished: int, total: int, note: str = "") -> None:
        """Set the number of finished parts; as a sign of life it also delays the next log line."""
        self.finished, self.total, self._note = finished, total, lambda: note
        self.alive = time.monotonic()

    @property
    def text(self) -> str:
        note = self._note()
        return self.name + (f": {note}" if note else "")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin


class Display(Protocol):
    """Shows stages while they last."""

    def show(self, stage: Stage) -> None: ...
    def hide(self, stage: Stage) -> None: ...


class Lines:
    """Log lines: one when a stage has taken long, then one every few seconds."""

    def __init__(self, write: Callable[[str], None] | None = None):
        self._write = write or logger.info

    def show(self, stage: Stage) -> None:
        now = time.monotonic()
        if now - stage.alive >= FIRST_S and (stage.said is None or now - stage.said >= EVERY_S):
            stage.said = now
            self._write(f"waiting   {stage.text} ({stage.seconds:.0f} s)")

    def hide(self, stage: Stage) -> None:
        pass


class Terminal:
    """A line at the bottom of the terminal, with a bar if the number of parts is known; erased at the end."""

    def __init__(self):
        self._progress: Any = None
        self._task: Any = None

    def show(self, stage: Stage) -> None:
        if stage.draws_itself:
            return
        if self._progress is None:
            self._progress = _rich_progress()
            self._task = self._progress.add_task("", total=None, time=0.0)
            self._progress.start()
        self._progress.update(
            self._task, description=stage.text, completed=stage.finished or 0, total=stage.total, time=stage.seconds
        )
        self._progress.refresh()

    def hide(self, stage: Stage) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _rich_progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    elapsed = TextColumn("{task.fields[time]:.0f} s")
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), elapsed
    console = Console(stderr=True)
    # Output on standard output stays there; lines on standard error appear above the bar.
    return Progress(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False)


class Notebook:
    """One output per stage in the cell, replaced until the stage ends, with its duration at the end."""

    def __init__(self):
        self._handle: Any = None

    def show(self, stage: Stage) -> None:
        if stage.draws_itself:
            return
        if self._handle is None:
            self._handle = importlib.import_module("IPython.display").DisplayHandle()  # every notebook has it
            self._handle.display(_mime(stage), raw=True)
        else:
            self._handle.update(_mime(stage), raw=True)

    def hide(self, stage: Stage) -> None:
        if self._handle is not None:
            self._handle.update(_mime(stage), raw=True)
            self._handle = None


def _mime(stage: Stage) -> dict[str, str]:
    text = f"{stage.text} ({stage.seconds:.1f} s)"
    shown = html.escape(text)
    if stage.total:
        done = round(20 * (stage.finished or 0) / stage.total)
        text = f"[{'#' * done}{'.' * (20 - done)}] {text}"
        shown = f'<progress max="{stage.total}" value="{stage.finished}"></progress> {shown}'
    return {"text/plain": text, "text/html": f"<div>{shown}</div>"}


class _Monitor:
    """The stages of this process; shows the one that was entered last.

    Only its own thread draws, and never inside the lock that entering and leaving a stage takes: if a terminal blocks,
    that thread is stuck and the work goes on.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._stages: list[Stage] = []
        self._shown: tuple[Stage, Display] | None = None
        """Set by its thread, inside the lock."""
        self._thread: threading.Thread | None = None
        self.write: Callable[[str], None] | None = None

    def enter(self, stage: Stage) -> None:
        with self._changed:
            self._stages.append(stage)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # too many threads, or the interpreter is ending
                    self._thread = None
            self._changed.notify_all()

    def leave(self, stage: Stage) -> None:
        """Remove a stage, and wait until it is erased, so that the next output takes its line; `_ERASE_S` at most."""
        with self._changed:
            self._stages.remove(stage)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._shown is None or self._shown[0] is not stage, _ERASE_S)

    def _watch(self) -> None:
        while True:
            with self._changed:
                stage = self._stages[-1] if self._stages else None
                if stage is None and self._shown is None:
                    self._thread = None
                    return
            if stage is None or (self._shown is not None and self._shown[0] is not stage):
                self._hide()
                continue
            left = stage.begin + stage.after_s - time.monotonic()
            if left <= 0:
                with contextlib.suppress(Exception):  # a closed terminal does not end the work
                    self._show(stage)
            with self._changed:
                if self._stages and self._stages[-1] is stage:
                    self._changed.wait(max(left, 0.001) if left > 0 else _REFRESH_S)

    def _show(self, stage: Stage) -> None:
        if self._shown is None:
            display = choose_display(self.write)
            with self._changed:
                if display is None or stage not in self._stages:
                    return
                self._shown = stage, display
        self._shown[1].show(stage)

    def _hide(self) -> None:
        assert self._shown is not None
        stage, display = self._shown
        with contextlib.suppress(Exception):
            display.hide(stage)
        with self._changed:
            self._shown = None
            self._changed.notify_all()


_monitor = _Monitor()


def choose_display(write: Callable[[str], None] | None = None) -> Display | None:
    """The display of this process; None: none.

    Args:
        write: writes a log line where there is no terminal and no notebook; None: the logger.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted == "off":
        return None
    if wanted != "log" and is_notebook():
        return Notebook()
    if wanted != "log" and sys.stderr is not None and sys.stderr.isatty():
        return Terminal()
    return Lines(write)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def lines_written_with(write: Callable[[str], None]) -> Iterator[None]:
    """Write log lines with `write` instead of the logger; for commands, which use standard error."""
    before, _monitor.write = _monitor.write, write
    try:
        yield
    finally:
        _monitor.write = before


@contextlib.contextmanager
def stage(
    name: str, note: Callable[[], str] | None = None, *, after_s: float | None = None, draws_itself: bool = False
) -> Iterator[Stage]:
    """Show a wait if it takes long.

    Args:
        name: the work, such as "reading weights".
        note: gives the progress as text whenever it is shown; called from another thread.
        after_s: seconds before it is shown in a terminal or notebook; default `FIRST_S`.
        draws_itself: the work draws its own progress in terminals and notebooks, so only log lines are written.
    """
    made = Stage(name, note, after_s=FIRST_S if after_s is None else after_s, draws_itself=draws_itself)
    _monitor.enter(made)
    try:
        yield made
    finally:
        _monitor.leave(made)


Update = Callable[[int, int, int], None]
"""Called after each round with (finished sequences, all sequences, tokens generated so far)."""
Count = Callable[[], tuple[int, int, int]]
"""Returns the arguments of `Update`. Its time grows with the number of sequences."""
_COUNTING = 0.05
"""Largest share of the time for counting for a display."""


@contextlib.contextmanager
def sampling_progress(
    progress: bool | None, on_update: Update | None, name: str = "sampling", parts: str = "samples"
) -> Iterator[Callable[[Count], None] | None]:
    """A progress bar over rounds.

    Args:
        progress: True shows it at once, None after half a second, False never.
        on_update: called after each round.
        parts: unit of `finished` and the total.
    Returns: a function to call after each round, if any. For a display alone it counts a few times a second.
    """
    if progress is False:
        yield None if on_update is None else lambda count: on_update(*count())
        return
    with stage(name, after_s=0 if progress else BAR_S) as shown:
        due, last = 0.0, None

        def show(count: Count) -> tuple[int, int, int]:
            finished, total, tokens = counted = count()
            shown.update(finished, total, f"{finished}/{total} {parts}" + (f", {tokens} tokens" if tokens else ""))
            return counted

        def update(count: Count) -> None:
            nonlocal due, last
            last = count
            begin = shown.alive = time.monotonic()
            if on_update is not None:
                on_update(*show(count))
            elif begin >= due:
                show(count)
                now = time.monotonic()
                due = now + max(_REFRESH_S, (now - begin) / _COUNTING)

        yield update
        if last is not None:
            show(last)
