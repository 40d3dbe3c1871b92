"""Curves as PNG files."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path


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
