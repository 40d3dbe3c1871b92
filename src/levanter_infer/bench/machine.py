"""How quiet the machine is: what a measurement of latencies cannot be better than."""

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Columns of the time in which a core had nothing to do, or waited for a disk."""
_COLUMNS = 8
"""Behind them stands what is counted elsewhere already."""
_GAP_S = 1e-3


def others_seconds() -> float | None:
    """Processor time of all cores that did not go to this process: to others, the system, and the host's other
    guests. A running total, of which differences count, in steps of about 10 ms; None where it is not known.
    """
    try:
        columns = [int(ticks) for ticks in _STAT.read_text().split("\n", 1)[0].split()[1 : 1 + _COLUMNS]]
        busy = sum(columns) - sum(columns[i] for i in _IDLE)
        return busy / os.sysconf("SC_CLK_TCK") - time.process_time()
    except (OSError, IndexError, ValueError):
        return None


def jitter(seconds: float = 1.0) -> dict[str, float | int]:
    """Run an empty loop on one core; how often, and how long, it stood still for more than a millisecond."""
    gaps = []
    last = time.perf_counter()
    end = last + seconds
    while last < end:
        now = time.perf_counter()
        if now - last > _GAP_S:
            gaps.append((now - last) * 1e3)
        last = now
    return {
        "seconds": seconds,
        "gaps": len(gaps),
        "gaps_ms": round(sum(gaps), 1),
        "longest_ms": round(max(gaps, default=0.0), 1),
    }
