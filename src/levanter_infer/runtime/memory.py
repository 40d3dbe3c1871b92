"""Memory of the machine and the device, and the default sizes of the KV pool and of KV offload."""

import contextlib
import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from levanter_infer.runtime import control_groups

_CPU_SHARE, _CPU_LIMIT_BYTES = 0.25, 2 << 30
_HOST_SHARE = 0.25
_DEVICE_SHARE = 0.85  # the rest is for activations, compiled programs and fragmentation


def default_pool_bytes(unread_bytes: int = 0, device_bytes: int | None = None) -> int:
    """Bytes for the KV pool: most of an accelerator's free memory; on a CPU a modest part, at most 2 GiB.

    Rounded down, by a sixteenth at most, so that starts in nearly equal states choose equal pools, for which the
    programs have been compiled before.

    Args:
        unread_bytes: part of the free memory that is reserved for weights to be read.
        device_bytes: memory of an accelerator on another machine, all of it free; None: this process's first device.
    """
    if device_bytes is not None:
        return _steady(int(max(device_bytes - unread_bytes, 0) * _DEVICE_SHARE))
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0) - unread_bytes
        return _steady(int(max(free, 0) * _DEVICE_SHARE))
    available = available_bytes() - unread_bytes
    return _steady(min(int(max(available, 0) * _CPU_SHARE), _CPU_LIMIT_BYTES))


def default_host_bytes() -> int:
    """Default bytes of host memory for KV offload: a quarter of the available memory."""
    return _steady(int(available_bytes() * _HOST_SHARE))


def available_bytes() -> int:
    """Memory available to this process: the smallest of the machine's and that of each control group around it."""
    return min([_machine_bytes(), *control_groups.free_bytes()])


def _machine_bytes() -> int:
    """Free memory of the machine."""
    # macOS counts no free pages.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):  # the page cache counts as available
        free = _bytes_by_name(Path("/proc/meminfo")).get("MemAvailable", free)
    return free


def check_host_memory(what: str, needed: Mapping[str, int], remedy: str) -> None:
    """Refuse what this machine cannot hold: it would be allocated, and the system would end the process once it is
    written. Swap space counts, but not beyond the limit of a control group.

    Args:
        what: the subject of the error, such as "the engine".
        needed: bytes, by what needs them.
        remedy: what to do, for the error.
    Raises: ValueError
    """
    free, total = _machine_bytes(), sum(needed.values())
    with contextlib.suppress(OSError):
        free += _bytes_by_name(Path("/proc/meminfo")).get("SwapFree", 0)
    free = min([free, *control_groups.free_bytes()])
    if total > free:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in needed.items() if size)
        raise ValueError(
            f"{what} does not fit into memory: it needs {gib(total)} ({parts}), and {gib(free)} are free; {remedy}"
        )


def gib(size: int) -> str:
    """A number of bytes as text, in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


def _bytes_by_name(path: Path) -> dict[str, int]:
    """Sizes in bytes, from lines such as `VmRSS:  123 kB`. Raises: OSError."""
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in lines if rest[-2:] == "kB"}


def _steady(size: int) -> int:
    """A size rounded down to its five leading bits."""
    low = max(size.bit_length() - 5, 0)
    return size >> low << low


def process_bytes() -> tuple[int, int]:
    """Resident memory of this process: current and peak. Zeros without /proc."""
    try:
        found = _bytes_by_name(Path("/proc/self/status"))
    except OSError:
        return 0, 0
    return found.get("VmRSS", 0), found.get("VmHWM", 0)


def peak_bytes() -> int:
    """Peak memory of the device, where it is counted, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats and "peak_bytes_in_use" in stats else process_bytes()[1]


def return_free_memory() -> None:
    """Return freed memory to the system: malloc keeps some 300 MB after a round was compiled."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
