"""The most that this processor can do, measured beside what it does: reading memory, and multiplying and adding.

Both run in the threads of the C++ kernels and with their instructions. Other processes and other virtual machines take
from both from second to second, so that a limit counts only for what is measured next to it.
"""

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from levanter_infer.bench.report import summarize
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.kernels.cpu import huge_pages
from levanter_infer.runtime.processor import usable_processors

MEMORY_BYTES = 512 * 2**20
"""Bytes that are read to measure memory: several times what the last level of any cache at hand holds."""
MEMORY, ARITHMETIC = "memory", "arithmetic"
_SECONDS = 8e-3
"""Length of one measurement, about."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least time of some work: all of its bytes read, or all of its operations computed, whichever takes longer."""

    memory_ms: float
    arithmetic_ms: float

    @classmethod
    def of(cls, num_bytes: float, flops: float, gbps: float, gflops: float) -> "Bound":
        return cls(num_bytes / gbps / 1e6, flops / gflops / 1e6)

    @property
    def side(self) -> str:
        """The larger of the two bounds: `MEMORY` or `ARITHMETIC`."""
        return MEMORY if self.memory_ms >= self.arithmetic_ms else ARITHMETIC

    @property
    def ms(self) -> float:
        return max(self.memory_ms, self.arithmetic_ms)


def share_of_bound(times_ms: Sequence[float], bounds: Sequence[Bound]) -> dict[str, object]:
    """Times beside the bounds that were measured next to them.

    Returns: which side bounds them by the medians, `bound_ms`, and `share`, the quotient of bound and time: 1 is as
        fast as possible. The median over the turns, which compares neighbouring measurements.
    """
    middle = Bound(
        statistics.median(bound.memory_ms for bound in bounds),
        statistics.median(bound.arithmetic_ms for bound in bounds),
    )
    shares = [bound.ms / ms for bound, ms in zip(bounds, times_ms, strict=True)]
    return {"bound": middle.side, "bound_ms": round(middle.ms, 5), "share": summarize(shares, 3)}


class Probe:
    """Measures the limits of the processor, again and again."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES):
        """
        Args:
            memory_bytes: bytes that are read to measure memory.
        """
        self.threads = usable_processors()
        self._memory = huge_pages.empty((memory_bytes // cpu.READ_STEP * cpu.READ_STEP,), np.uint8)
        self._memory[:] = 1
        self._rates: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._times: dict[str, int] = {}
        """Trips of a measurement of about `_SECONDS`, by what is measured."""

    def gbps(self, num_bytes: int | None = None, threads: int | None = None) -> float:
        """Read bandwidth in GB/s.

        Args:
            num_bytes: bytes that are read in turn, again and again; what fits in a cache is read faster. All of the
                probe's memory by default, and at most.
            threads: by default as many as the kernels use.
        """
        wanted = self._memory.nbytes if num_bytes is None else min(num_bytes, self._memory.nbytes)
        part = self._memory[: max(wanted // cpu.READ_STEP, 1) * cpu.READ_STEP]
        count = threads or self.threads
        rate = part.nbytes * self._per_second(f"read {part.nbytes} {count}", lambda n: cpu.read(part, n, count)) / 1e9
        if part.nbytes == self._memory.nbytes:
            self._rates[MEMORY, count].append(rate)
        return rate

    def gflops(self, isa: str, threads: int | None = None) -> float:
        """Peak rate of multiplications and additions with the instructions of `isa`'s matmuls, in 10⁹ operations a
        second."""
        count, done = threads or self.threads, 0

        def compute(times: int) -> None:
            nonlocal done
            done = cpu.multiply_adds(times, count, isa_name=isa)

        per_second = self._per_second(f"compute {isa} {count}", compute)
        rate = done / self._times[f"compute {isa} {count}"] * per_second / 1e9
        self._rates[isa, count].append(rate)
        return rate

    def around(
        self, run: Callable[[], T], num_bytes: float, flops: float, isa: str, cached: int | None = None
    ) -> tuple[T, Bound]:
        """Run something, and measure both rates before and after it: the higher ones count, because what disturbs a
        measurement only makes it slower.

        Args:
            num_bytes, flops: bytes to read and operations to compute.
            cached: as `num_bytes` of `gbps`.
        Returns: the result of `run`, and the `Bound` of that work.
        """
        before = self.gbps(cached), self.gflops(isa)
        result = run()
        after = self.gbps(cached), self.gflops(isa)
        return result, Bound.of(num_bytes, flops, *map(max, before, after))

    def _per_second(self, name: str, run: Callable[[int], object]) -> float:
        """Trips of `run(trips)` in a second."""

        def seconds(trips: int) -> float:
            begin = time.perf_counter()
            run(trips)
            return time.perf_counter() - begin

        if name not in self._times:
            trips = 1
            while (taken := seconds(trips)) < _SECONDS / 2:
                trips = max(2 * trips, int(trips * _SECONDS / max(taken, 1e-6) / 2))
            self._times[name] = max(1, round(trips * _SECONDS / taken))
        return self._times[name] / seconds(self._times[name])

    def measured(self) -> Mapping[str, object]:
        """All of memory's bandwidths and peak rates so far, by the number of threads."""
        found: dict[str, dict[str, object]] = {"memory_gb_per_s": {}, "gflop_per_s": {}}
        for (name, threads), rates in sorted(self._rates.items()):
            if name == MEMORY:
                found["memory_gb_per_s"][str(threads)] = summarize(rates, 2)
            else:
                found["gflop_per_s"][f"{name}, {threads}"] = summarize(rates, 1)
        return {"threads": self.threads, "memory_bytes": self._memory.nbytes, **found}
