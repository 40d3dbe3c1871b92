"""Output of the benches: one JSON line per case, with the provenance that comparisons need."""

import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

from levanter_infer.bench.machine import Peaks
from levanter_infer.engine.metrics import METRICS
from levanter_infer.fingerprint import haliax_version
from levanter_infer.runtime.processor import model_name


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
