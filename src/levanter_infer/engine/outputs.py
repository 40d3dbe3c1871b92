"""`RoundResult`: what a round has brought, of all data-parallel ranks."""

from levanter_infer.decode.outputs import HostOutputs, RoundOutputs
from levanter_infer.decode.shapes import Shapes

_MAXIMA = ("refs_max",)
"""Scalars of a round of which the largest of all ranks counts; of the others the sum."""


class RoundResult:
    """The outputs of a round on the host; waits for its end.

    Args:
        num_ranks: data-parallel ranks. The outputs of one have no axis of ranks.
    """

    def __init__(self, outputs: RoundOutputs, shapes: Shapes, num_ranks: int):
        ranks = range(num_ranks) if num_ranks > 1 else (None,)
        self.ranks = [HostOutputs(outputs, shapes, rank) for rank in ranks]
        scalars = [rank.scalars for rank in self.ranks]
        self.scalars = {name: (max if name in _MAXIMA else sum)(of[name] for of in scalars) for name in scalars[0]}
        """Scalars of all ranks together: sums, and maxima of `_MAXIMA`."""

    @property
    def steps(self) -> list[int]:
        """Steps of each rank since the last reset."""
        return [rank.scalars["steps"] for rank in self.ranks]
