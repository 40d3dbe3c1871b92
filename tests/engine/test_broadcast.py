"""Weights from another process: a trainer and an engine in two processes of `jax.distributed`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_hundred_swaps_from_another_process_neither_compile_nor_grow():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-m", "tests.broadcast_runs"]
    runs = [
        subprocess.Popen(
            [*command, str(i), port, "100"], cwd=ROOT, env=os.environ, text=True, stdout=subprocess.PIPE, stderr=-1
        )
        for i in range(2)
    ]
    ends = [run.communicate(timeout=500) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(error[-2000:] for _, error in ends)
    found = json.loads(ends[1][0].splitlines()[-1])
    assert found["wrong"] == 0 and found["version"] == 100
    assert found["compiled"][1:] == found["compiled"][:1] * 99  # the first swap compiles the broadcast of each shape
    assert max(found["live"][50:]) <= max(found["live"][:50])
    assert found["resident"][-1] - found["resident"][20] < 8 << 20
