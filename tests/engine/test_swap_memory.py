"""Memory of `swap_weights` from a checkpoint: the old weights are given up before the new ones are read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process can begin anew on Linux")
def test_weights_from_a_checkpoint_take_the_place_of_the_old_ones(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.swap_runs", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["right"] and found["weights"] > 200_000_000
    # A parameter is there twice while it is laid out; a second copy of the model would be six of them.
    assert max(found["above"]) < 2.5 * found["largest"] < 0.5 * found["weights"]
    assert found["above_with_a_copy"] > found["weights"]  # what this test sees if the engine keeps the old ones
