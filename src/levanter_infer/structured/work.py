"""`Work`, a bound on what a stranger's constraint may cost to compile."""


class Work:
    """Counts steps down from a bound.

    Args:
        steps: how many there may be.
        refusal: raised once there are more.
    """

    def __init__(self, steps: int, refusal: Exception):
        self._left, self._refusal = steps, refusal

    def take(self, steps: int) -> None:
        """So many steps are about to be taken. Raises: the refusal."""
        self._left -= steps
        if self._left < 0:
            raise self._refusal
