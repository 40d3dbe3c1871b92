"""Host memory in huge pages, for arrays that every step reads from end to end."""

import math
import mmap

import numpy as np

HUGE_PAGE = 2**21
"""Bytes, on x86 and, by default, on ARM. JAX shares an array that begins at a multiple of 64 bytes, else it copies."""
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """`numpy.empty` in huge pages, where the system provides them on request, as Linux does by default.

    With small pages the processor translates an address and restarts its prefetching every 4 kB. `jax.device_put` to a
    CPU shares the array instead of copying it: do not write to it afterwards.
    """
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    if count * dtype.itemsize < HUGE_PAGE:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _ADVICE is not None:
        try:
            memory.madvise(_ADVICE)
        except OSError:  # a kernel without them
            pass
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE
    return np.frombuffer(memory, dtype, count, start).reshape(shape)
