"""Output of the benches: one JSON line per case, with the provenance that comparisons need; curves as PNG files."""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

from levanter_infer.bench.machine import Peaks
from levanter_infer.engine.metrics import METRICS
from levanter_infer.fingerprint import haliax_version
from levanter_infer.runtime.processor import model_name

_EXPONENTS = np.arange(0.1, 4.0, 0.005)
"""Exponents that `growing_part` tries."""


def provenance() -> dict[str, object]:
    """Commit, machine and versions of this run."""
    return {
        "commit": _commit(),
        "machine": {
            "cpu": model_name(),
            "cores": os.cpu_count(),
            "device": str(jax.devices()[0].device_kind),
            "platform": jax.default_backend(),
        },
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "equinox")}
        | {"haliax": haliax_version(), "python": platform.python_version()},
    }


def measured(**values: object) -> dict[str, object]:
    """Measurements under names of the engine's metrics (engine/metrics.py)."""
    unknown = sorted(set(values) - set(METRICS))
    assert not unknown, f"no such metrics: {unknown}"
    return values


def emit(case: dict[str, object]) -> None:
    print(json.dumps(case), flush=True)


def summarize(values: Sequence[float], digits: int = 4) -> dict[str, float | int]:
    """Median, smallest and largest of repeated measurements, and the standard deviation of the sample (0 for one)."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "sd": round(statistics.stdev(values) if len(values) > 1 else 0.0, digits),
        "runs": len(values),
    }


def utilisation(bytes_per_s: float, flop_per_s: float, peaks: Peaks | None) -> dict[str, object]:
    """Utilisation of the device's bandwidth and peak rate; None if these are unknown."""
    known = peaks is not None
    return measured(
        bandwidth_utilisation=round(bytes_per_s / (peaks.memory_gbps * 1e9), 4) if known else None,
        compute_utilisation=round(flop_per_s / (peaks.tflops * 1e12), 4) if known else None,
    )


def percentiles(runs: Sequence[Sequence[float]], digits: int = 2) -> dict[str, dict[str, float | int]]:
    """Mean, p50, p95, p99 and largest value of each run, summarized over the runs; empty if a run has no values."""
    if not all(len(values) for values in runs):
        return {}
    ranks = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
    found = [[statistics.fmean(values), *np.percentile(values, list(ranks.values()))] for values in runs]
    names = ("mean", *ranks)
    return {name: summarize([float(run[i]) for run in found], digits) for i, name in enumerate(names)}


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x: 0 is constant, 1 linear, 2 quadratic."""
    slope = np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0]
    return round(float(slope), 3)


def growing_part(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The p and a of y = a + b · x^p with the smallest relative errors, a and b not negative.

    A step of 20 ms at any context plus 1 ms at the longest one has an exponent near 0, which hides the growth of the
    1 ms; p is the exponent of that part.

    Returns: the exponent p of the part that grows, and a, the value where x is 0.
    Raises: ValueError for fewer than four points, through which too many such curves go.
    """
    if len(x) < 4:
        raise ValueError(f"{len(x)} points; a constant, a factor and an exponent are fitted to four at least")
    xs, ys = np.asarray(x, float) / max(x), np.asarray(y, float)

    def error_of(p: float) -> tuple[float, float]:
        """Error of the best a and b for this exponent, with relative weights; and that a."""
        columns = np.stack([np.ones_like(xs), xs**p], axis=1) / ys[:, None]
        (a, b), *_ = np.linalg.lstsq(columns, np.ones_like(ys), rcond=None)
        if a < 0:
            a, b = 0.0, np.sum(columns[:, 1]) / np.sum(columns[:, 1] ** 2)
        return float(np.sum((columns @ [a, b] - 1) ** 2)) if b >= 0 else np.inf, float(a)

    best = min(_EXPONENTS, key=lambda p: error_of(p)[0])
    return round(float(best), 3), error_of(best)[1]


def digest(value: object) -> str:
    """A short hash of anything that JSON can hold: equal workloads and equal outputs have equal hashes."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def add_plot_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the curve (needs matplotlib)")


def draw(
    path: Path | None,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    log: bool = False,
) -> None:
    """Write one figure with a line per curve; does nothing without a path.

    Args:
        curves: x and y values by label.
        x, y: labels of the axes, with units.
        log: both axes are logarithmic.
    Raises: SystemExit if matplotlib is missing: a requested figure is not left out silently.
    """
    if path is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, (xs, ys) in curves.items():
        axes.plot(xs, ys, marker="o", markersize=3, label=label)
    if log:
        axes.loglog()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(True, alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
