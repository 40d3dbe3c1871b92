"""A test that hangs fails by itself: of this suite, and with its own settings."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HANGS = """
import time

def test_waits_for_a_slot_that_nobody_gives_back():
    while True:
        time.sleep(0.01)

def test_comes_after_it():
    pass
"""


def test_every_test_has_a_limit(pytestconfig):
    assert 0 < float(pytestconfig.getini("timeout")) <= 600
    assert pytestconfig.getini("timeout_method") == "signal", "another method ends the process, and the tests behind it"


def test_a_test_that_hangs_fails_and_the_next_one_runs(tmp_path):
    path = tmp_path / "test_hangs.py"
    path.write_text(HANGS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-c",
        ROOT / "pyproject.toml",
        "--timeout=1",
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert "1 failed, 1 passed" in done.stdout and "Timeout" in done.stdout, done.stdout + done.stderr
