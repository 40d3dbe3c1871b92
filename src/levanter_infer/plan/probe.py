"""Measured memory bandwidth and matmul rate of this machine's processor."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.decode.programs import compile_program
from levanter_infer.runtime.processor import usable_processors

_READ_BYTES = 1 << 28
_ROWS, _WIDTH = 512, 2048


def memory_gbps() -> float:
    """Memory bandwidth of all cores, in GB/s: a sum of numbers that are in no cache."""
    threads = usable_processors()
    parts = np.array_split(np.ones(_READ_BYTES // 4, np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        return _READ_BYTES / _best_s(lambda: list(pool.map(np.add.reduce, parts))) / 1e9


def tflops(dtype: str) -> float:
    """Rate of matmuls of `dtype` in 10¹² operations per second: 512 rows with weights [out, in]."""
    rows, weights = jnp.ones((_ROWS, _WIDTH), dtype), jnp.ones((_WIDTH, _WIDTH), dtype)

    def matmul(rows, weights):
        return jnp.einsum("ri,oi->ro", rows, weights, preferred_element_type=jnp.float32)

    program = compile_program(matmul)
    return 2 * _ROWS * _WIDTH**2 / _best_s(lambda: jax.block_until_ready(program(rows, weights))) / 1e12


def _best_s(run: Callable) -> float:
    """Seconds of the best of five runs, after a warm-up run."""
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
