"""Waits are shown, where a person watches and only if they take long."""

import io
import logging
import sys
import threading
import time

import pytest

from levanter_infer.runtime import progress
from levanter_infer.runtime.progress import sampling_progress, stage


@pytest.fixture
def quick(monkeypatch):
    """Waits and all that follows from them, in a twentieth of the time."""
    monkeypatch.setattr(progress, "FIRST_S", 0.1)
    monkeypatch.setattr(progress, "EVERY_S", 0.5)
    monkeypatch.setattr(progress, "_REFRESH_S", 0.02)


@pytest.fixture
def lines():
    written: list[str] = []
    with progress.lines_written_with(written.append):
        yield written


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_what_is_quick_is_not_said(lines, quick):
    with stage("reading weights"):
        time.sleep(0.02)
    assert lines == []


def test_what_is_slow_is_said_once_and_then_every_few_seconds(lines, quick):
    with stage("reading weights"):
        time.sleep(0.35)
        assert len(lines) == 1
        time.sleep(0.5)
    assert len(lines) == 2 and all(line.startswith("waiting   reading weights (") for line in lines)


def test_a_line_says_how_far_it_is(lines, quick):
    with stage("compiling", lambda: "2 of 4 programs are ready"):
        time.sleep(0.25)
    assert lines == ["waiting   compiling: 2 of 4 programs are ready (0 s)"]


def test_the_innermost_stage_is_said(lines, quick):
    with stage("making the engine"):
        with stage("compiling"):
            time.sleep(0.25)
        with stage("a short one"):
            pass
        time.sleep(0.25)
    assert [line.split(" (")[0] for line in lines] == ["waiting   compiling", "waiting   making the engine"]


def test_an_error_within_ends_the_stage_and_the_thread(lines, quick):
    with pytest.raises(KeyboardInterrupt), stage("compiling"):
        raise KeyboardInterrupt
    until = time.monotonic() + 5
    while any(thread.name == "progress" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_note_or_a_stream_that_fails_disturbs_nobody(lines, quick):
    with stage("compiling", lambda: str(1 / 0)):
        time.sleep(0.25)
    with stage("compiling"):
        time.sleep(0.25)
    assert len(lines) == 1


def test_work_goes_on_where_no_thread_can_be_started(monkeypatch, lines, quick):
    def start(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with stage("waiting"):
            pass
    with stage("later"):
        time.sleep(0.3)
    assert lines and all("later" in line for line in lines)


class Stuck(progress.Lines):
    """A display that a user has stopped, as Ctrl-S stops a terminal, until it is let go on."""

    def __init__(self):
        self.reached, self.go_on, self.hidden = threading.Event(), threading.Event(), []

    def show(self, stage):
        self.reached.set()
        self.go_on.wait(30)

    def hide(self, stage):
        self.hidden.append(stage.name)


def test_work_goes_on_while_a_terminal_takes_nothing(quick, monkeypatch):
    stuck, ended = Stuck(), threading.Event()
    monkeypatch.setattr(progress, "choose_display", lambda write: stuck)

    def work():
        with stage("compiling"):
            stuck.reached.wait(10)
            for _ in range(100):
                with stage("a short one"):
                    pass
        with stage("later"):
            pass
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ended.wait(5)
    finally:
        stuck.go_on.set()
        thread.join(10)
    until = time.monotonic() + 5
    while progress._monitor._shown is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert stuck.hidden == ["compiling"]


def test_the_library_logs(caplog, quick):
    with caplog.at_level(logging.INFO), stage("reading weights"):
        time.sleep(0.25)
    assert "reading weights" in caplog.text and caplog.records[0].name == "levanter_infer.runtime.progress"


def test_a_terminal_shows_a_line_that_vanishes(quick, monkeypatch, capsys):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with stage("compiling", lambda: "[1 of 4]"):
        time.sleep(0.3)
        assert "compiling: [1 of 4]" in screen.getvalue()
        print("a result")
    assert screen.getvalue().endswith("\x1b[2K")  # the line is erased
    assert capsys.readouterr().out == "a result\n"


def test_a_terminal_is_left_alone_by_what_is_quick(quick, monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with stage("compiling"):
        time.sleep(0.05)
    assert screen.getvalue() == ""


def test_something_within_that_draws_is_not_drawn_over(quick, monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with stage("fetching org/name", draws_itself=True):
        time.sleep(0.25)
    assert screen.getvalue() == ""


@pytest.mark.parametrize("value, expected", [("off", type(None)), ("log", progress.Lines), ("", progress.Terminal)])
def test_a_user_chooses_where_it_is_said(monkeypatch, value, expected):
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setenv(progress.VARIABLE, value)
    assert type(progress.choose_display()) is expected


def test_sampling_draws_a_bar_and_passes_updates_on(quick, monkeypatch):
    screen, updates = Screen(), []
    monkeypatch.setattr(sys, "stderr", screen)
    with sampling_progress(True, lambda *update: updates.append(update)) as update:
        assert update is not None
        update(lambda: (1, 4, 27))
        time.sleep(0.2)
    assert updates == [(1, 4, 27)] and "sampling: 1/4 samples, 27 tokens" in screen.getvalue()
    with sampling_progress(False, None) as update:
        assert update is None


def test_rounds_that_come_are_no_wait_and_one_that_does_not_is(lines, quick):
    with sampling_progress(None, None) as update:
        assert update is not None
        for i in range(30):
            update(lambda i=i: (i, 100, i))
            time.sleep(0.03)
        assert lines == []
        time.sleep(0.3)
    assert len(lines) == 1 and "sampling: 29/100 samples, 29 tokens" in lines[0]


def test_a_display_alone_counts_seldom_and_what_is_counted_last_is_the_end(lines, monkeypatch):
    monkeypatch.setattr(progress, "_REFRESH_S", 60.0)
    counted = []
    with sampling_progress(None, None) as update:
        assert update is not None
        for i in range(100):
            update(lambda i=i: counted.append(i) or (i, 100, i))
    assert counted == [0, 99]


def test_stages_of_many_threads_leave_nothing_behind(lines, quick):
    def work():
        for _ in range(50):
            with stage("a"), stage("b"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress._monitor._stages == [] and lines == []
