"""Growth of a measurement, as a fitted exponent."""

from collections.abc import Sequence

import numpy as np

_EXPONENTS = np.arange(0.1, 4.0, 0.005)


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
