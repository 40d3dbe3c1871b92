"""Bounds of a measurement: noise of the machine, its memory bandwidth and its peak rate."""

import dataclasses
import os
import time
from pathlib import Path

import jax

from levanter_infer.kernels.tpu.tiling import GENERATIONS
from levanter_infer.plan import probe
from levanter_infer.plan.targets import GPUS, TPUS

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Columns of idle time, and of waiting for a disk."""
_COLUMNS = 8
"""Number of columns; those after them are counted in others already."""
_GAP_S = 1e-3


def others_seconds() -> float | None:
    """Processor time of all cores outside this process: of other processes, the system and other virtual machines. A
    running total in steps of about 10 ms, to be subtracted; None if unknown.
    """
    try:
        columns = [int(ticks) for ticks in _STAT.read_text().split("\n", 1)[0].split()[1 : 1 + _COLUMNS]]
        busy = sum(columns) - sum(columns[i] for i in _IDLE)
        return busy / os.sysconf("SC_CLK_TCK") - time.process_time()
    except (OSError, IndexError, ValueError):
        return None


def jitter(seconds: float = 1.0) -> dict[str, float | int]:
    """Run an empty loop on one core; number and length of its pauses of more than a millisecond."""
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


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Peak rates of a device."""

    memory_gbps: float
    """Memory bandwidth in GB/s; data in a processor's cache are read faster."""
    tflops: float
    """Peak rate of matmuls in 10¹² floating-point operations per second."""


def device_peaks(dtype: str) -> Peaks | None:
    """Peaks of this process's first device: measured on a CPU, else from the data sheet; None for an unknown device.

    The rate of a CPU is the higher one of XLA's matmuls in `dtype` and in float32.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return Peaks(probe.memory_gbps(), max(probe.tflops(name) for name in {dtype, "float32"}))
    if device.platform == "tpu":
        chip = TPUS.get(GENERATIONS.get(device.device_kind) or device.device_kind.removeprefix("TPU "))
    else:
        words = device.device_kind.lower().replace("-", " ").split()
        chip = next((chip for name, chip in GPUS.items() if name in words), None)
    return None if chip is None else Peaks(chip.memory_gbps, chip.tflops)
