"""Weights from one process to another on this machine: broadcast by `multihost_utils`, and JAX's transfer server.

JAX_PLATFORMS=cpu python -W ignore scripts/weight_transfer.py [--mb 512] [--repeat 5] [--turns 2]

One JSON line for each repeat: seconds, GB/s, and by how much the peak of the receiver's resident memory was above what
it held before, the weights themselves included. Both ways in turns, 8 arrays.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

from levanter_infer.runtime.memory import process_bytes

ARRAYS = 8
WAIT_MS = 120_000


def forget_peak() -> int:
    """Let the peak begin anew (man 5 proc). Returns: resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return process_bytes()[1]


def run(index: int, port: str, way: str, mb: int, repeat: int) -> list[dict]:
    import jax
    import numpy as np
    from jax._src import distributed
    from jax.experimental import multihost_utils, transfer

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    store, device = distributed.global_state.client, jax.local_devices()[0]
    assert store is not None
    sends, size, link, server, found = index == 0, mb * 2**20 // ARRAYS // 4, None, None, []
    if way == "transfer":
        server = transfer.start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"])
        store.key_value_set(f"address/{index}", server.address())
        link = server.connect(store.blocking_key_value_get(f"address/{1 - index}", WAIT_MS))
    like = jax.ShapeDtypeStruct((size,), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    for turn in range(repeat):
        weights = [jax.device_put(np.full(size, turn + i, np.float32), device) for i in range(ARRAYS)] if sends else []
        jax.block_until_ready(weights)
        before = forget_peak()
        store.wait_at_barrier(f"begin/{turn}", WAIT_MS)
        begin = time.perf_counter()
        if server is not None and link is not None:
            if sends:
                server.await_pull(turn, weights)
            got = [] if sends else link.pull(turn, [like] * ARRAYS)
        else:
            given = map(np.asarray, weights) if sends else [np.zeros(size, np.float32)] * ARRAYS
            got = [multihost_utils.broadcast_one_to_all(each, is_source=sends) for each in given]
            got = [] if sends else list(map(jax.numpy.asarray, got))
        jax.block_until_ready(got)
        seconds = time.perf_counter() - begin
        assert all(float(each[0]) == float(each[-1]) == turn + i for i, each in enumerate(got))
        store.wait_at_barrier(f"end/{turn}", WAIT_MS)
        found.append({"s": seconds, "gb_per_s": mb / 1024 / seconds, "peak_mb": (process_bytes()[1] - before) >> 20})
        del weights, got
    jax.distributed.shutdown()
    return [{name: round(value, 3) for name, value in each.items()} for each in found if not sends]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("mb", 512), ("repeat", 5), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--process", nargs=3, metavar=("INDEX", "PORT", "WAY"))
    args = parser.parse_args()
    if args.process:
        index, port, way = args.process
        for each in run(int(index), port, way, args.mb, args.repeat):
            print(json.dumps({"way": way, "mb": args.mb, **each}), flush=True)
        return
    for _ in range(args.turns):
        for way in ("broadcast", "transfer"):
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                port = str(found.getsockname()[1])
            command = [sys.executable, *(f"-W{each}" for each in sys.warnoptions), __file__]
            sizes = ["--mb", str(args.mb), "--repeat", str(args.repeat)]
            both = [subprocess.Popen([*command, *sizes, "--process", str(i), port, way]) for i in range(2)]
            if any(process.wait() for process in both):
                sys.exit(f"{way}: a process failed")


if __name__ == "__main__":
    main()
