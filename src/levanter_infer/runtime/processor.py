"""The processor: its name and features, from /proc/cpuinfo, and how many threads XLA starts on it."""

import functools
import math
import os
import platform
from pathlib import Path

from levanter_infer.runtime import control_groups

_CPUINFO = Path("/proc/cpuinfo")
_THREADS = "PJRT_NPROC"
_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")


@functools.cache
def processor_name() -> str:
    """Vendor, model, stepping and features of the processor, as far as they are known; equal on equal machines."""
    lines = _lines()
    if lines is None:
        return f"{platform.machine()} {platform.processor()}"
    first = lines[: lines.index("")] if "" in lines else lines
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}
    return " ".join([platform.machine(), *(fields[name] for name in _FIELDS if name in fields)])


@functools.cache
def model_name() -> str:
    """Marketing name of the processor; "unknown" where the system has none, as on many ARM machines."""
    lines = _lines()
    if lines is None:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


@functools.cache
def features() -> str:
    """The line of the processor's features, exactly as the system writes it: directory names are derived from it."""
    lines = _lines()
    if lines is None:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def usable_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads() -> int | None:
    """Have XLA start no more threads than the CPU quota of this process's control groups has processors, rounded up.
    XLA counts those that the process may run on: with a quota of 4 of 96 it would start 96 threads, which the system
    then holds up together once their waiting has used up the quota.

    Precondition: JAX has no device yet; later it has no effect. XLA has a thread for each forced device in any case.
    Returns: the number of threads; None if it was left as it is, also where PJRT_NPROC or NPROC has one.
    """
    count = usable_processors()
    quota = math.ceil(min(control_groups.processors(), default=count))
    if quota >= count or not {_THREADS, "NPROC"}.isdisjoint(os.environ):
        return None
    os.environ[_THREADS] = str(quota)
    return quota


def _lines() -> list[str] | None:
    """Lines of /proc/cpuinfo; None without such a file."""
    try:
        return _CPUINFO.read_text().splitlines()
    except OSError:
        return None
