"""How quiet the machine is: what a measurement of latencies cannot be better than."""

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 8
"""Column of the time in which a virtual machine had work and was not let run."""
_GAP_S = 1e-3


def stolen_seconds() -> float | None:
    """Processor time, of all cores, that the host gave to others since the machine started; None if unknown."""
    try:
        total = _STAT.read_text().split("\n", 1)[0].split()
        return int(total[_STEAL]) / os.sysconf("SC_CLK_TCK")
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
