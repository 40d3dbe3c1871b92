"""How much memory a pool may take by default."""

import os

import jax

_CPU_SHARE, _CPU_LIMIT_BYTES = 0.25, 2 << 30
_DEVICE_SHARE = 0.85  # the rest is for activations, compiled programs and fragmentation


def default_pool_bytes() -> int:
    """Bytes for the KV pool: most of an accelerator's free memory; on a CPU a modest part, at most 2 GiB."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * _DEVICE_SHARE)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(available * _CPU_SHARE), _CPU_LIMIT_BYTES)
