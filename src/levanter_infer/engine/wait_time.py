"""`WaitTime`: how long a request that finds the queue full should wait before it tries again."""

import time

_KEPT = 0.9
"""Weight of what was counted before, against what has just come, in the mean time between requests that cease to
wait."""


class WaitTime:
    """Measures the rate at which requests leave the queue, while any wait."""

    def __init__(self):
        self._seconds, self._count, self._since = 1.0, 1.0, 0.0
        self._left = 0

    @property
    def interval_s(self) -> float:
        """Mean time between two of them; a second before any has."""
        return self._seconds / self._count

    def starts(self) -> None:
        """The first request waits, or none could cease to until now."""
        self._since = time.monotonic()

    def leaves(self) -> None:
        """A request ceases to wait. Those of a round cease together, so they count together, in `end_round`."""
        self._left += 1

    def end_round(self) -> None:
        if self._left:
            now = time.monotonic()
            self._seconds = _KEPT * self._seconds + now - self._since
            self._count = _KEPT * self._count + self._left
            self._left, self._since = 0, now
