"""A process that aborts says why, and no Python of ours runs in a signal handler."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "levanter_infer"
PROGRAM = """
import ctypes, threading, time
from levanter_infer.runtime.aborts import abort_message, clear_abort_message, on_abort
{setup}
threading.Thread(target=lambda: ctypes.CDLL(None).abort()).start()  # as JAX does it: in a thread without Python
time.sleep(60)
"""


@pytest.mark.parametrize(
    "setup, status, said",
    [
        ("on_abort(lambda: 'the lead is lost')", 3, "error: the lead is lost\n"),
        ("on_abort(lambda: 'first')\non_abort(lambda: 'second')", 3, "error: second\n"),
        ("on_abort(lambda: None)", -signal.SIGABRT, ""),
        ("on_abort(lambda: 'one')\nclear_abort_message()", -signal.SIGABRT, ""),
        ("with abort_message('one'): pass\non_abort(lambda: 'again')", 3, "error: again\n"),
        ("import faulthandler\nfaulthandler.enable()\non_abort(lambda: 'lost')", 3, "error: lost\n"),
    ],
    ids=["explained", "replaced", "unexplained", "cleared", "set-again", "faulthandler"],
)
def test_a_process_that_aborts_says_what_it_means_at_once(setup, status, said):
    command = [sys.executable, "-c", PROGRAM.format(setup=setup)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4)
    assert done.returncode == status and done.stderr == said


def test_no_python_of_ours_runs_in_a_signal_handler():
    """Handlers are functions of the interpreter or of the C library; the one exception writes two attributes."""
    given = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        assert "CFUNCTYPE" not in {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}, path
        given += [
            (str(path.relative_to(SOURCE)), ast.unparse(node.args[1]))
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "signal.signal"
        ]
    assert sorted(given) == [
        ("batch/__main__.py", "handler"),  # restores the handler that was there
        ("batch/__main__.py", "self._receive"),
        ("batch/on_ray.py", "handler"),  # as well
        ("checkpoints/template_worker.py", "signal.SIG_DFL"),  # no Python, in a process of its own
        ("cli/__init__.py", "signal.default_int_handler"),
    ]
