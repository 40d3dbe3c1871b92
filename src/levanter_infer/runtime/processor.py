"""Name and features of the processor, from /proc/cpuinfo."""

import functools
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
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


def _lines() -> list[str] | None:
    """Lines of /proc/cpuinfo; None without such a file."""
    try:
        return _CPUINFO.read_text().splitlines()
    except OSError:
        return None
