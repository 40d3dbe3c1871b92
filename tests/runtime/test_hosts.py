"""The store of JAX's own service, in a process of its own."""

import subprocess
import sys
from pathlib import Path

from tests.pairs import free_port

ROOT = Path(__file__).parents[2]
STORE = """
import sys, time
import jax
from levanter_infer.runtime.hosts import JaxKeyValueStore
from levanter_infer.runtime.multihost import _client

jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0, cluster_detection_method="deactivate")
new, old = JaxKeyValueStore(_client(), "b" * 16), JaxKeyValueStore(_client(), "a" * 16)
old.set("end/1", "left over")
old.set("beat/1", "9")
assert new.all("end") == new.all("beat") == {} and old.all("end") == {"1": "left over"}
new.set("beat/1", "1"), new.set("beat/1", "2")
assert new.all("beat") == {"1": "2"} and new.wait("beat/1", 1) == "2" and old.wait("beat/1", 1) == "9"
begin = time.monotonic()
assert new.wait("nothing", 0.3) is None and 0.2 < time.monotonic() - begin < 5
new.remove("beat/1")
assert new.all("beat") == {} and old.all("beat") == {"1": "9"}
jax.distributed.shutdown()
print("done")
"""


def test_the_store_keeps_the_keys_of_each_start_apart():
    """Writes of a process that is left over from an earlier start reach no other."""
    command = [sys.executable, "-c", STORE, str(free_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-2000:]
