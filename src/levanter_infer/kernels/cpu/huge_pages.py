"""Host memory in huge pages, for arrays that every step reads or writes."""

import ctypes
import math
import mmap
from typing import Any

import jax
import numpy as np

HUGE_PAGE = 2**21
"""Bytes, on x86 and, by default, on ARM. JAX shares an array that begins at a multiple of 64 bytes, else it copies."""
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which `mmap` does not name: memory is provided before it is used."""


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
    address = np.frombuffer(memory, np.uint8).ctypes.data
    _request(address, len(memory))
    return np.frombuffer(memory, dtype, count, -address % HUGE_PAGE).reshape(shape)


def remap_zeros(arrays: Any) -> None:
    """Move arrays of zeros to huge pages: the system takes their memory back and provides other, with zeros too.

    Args:
        arrays: a pytree of arrays of zeros that JAX has allocated. Those that are not in a CPU's memory stay as they
            are, and so do all where the system provides no huge pages on request.
    """
    for shard in (shard for leaf in jax.tree.leaves(arrays) for shard in leaf.addressable_shards):
        if shard.device.platform != "cpu":
            continue
        start = shard.data.block_until_ready().unsafe_buffer_pointer()
        first, end = -(-start // HUGE_PAGE) * HUGE_PAGE, (start + shard.data.nbytes) // HUGE_PAGE * HUGE_PAGE
        if first >= end or not _request(first, end - first):
            continue
        _madvise(first, end - first, mmap.MADV_DONTNEED)
        # One call for all would keep other threads from mapping memory until it ends, for seconds.
        for page in range(first, end, HUGE_PAGE):
            if not _madvise(page, HUGE_PAGE, _POPULATE_WRITE):  # an older kernel provides it when it is written
                break


def _request(address: int, size: int) -> bool:
    """Whether the system will provide huge pages where this memory is written first. `address`: that of a page."""
    return _HUGE is not None and _madvise(address, size, _HUGE)


def _madvise(address: int, size: int, advice: int) -> bool:
    """Whether the system follows."""
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice)) == 0
