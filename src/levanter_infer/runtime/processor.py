"""Which processor this is."""

import functools
import platform
from pathlib import Path

_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")


@functools.cache
def processor_name() -> str:
    """Maker, model, stepping and features of the processor, as far as the system tells; equal on equal machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return " ".join([platform.machine(), *(fields[name] for name in _FIELDS if name in fields)])
