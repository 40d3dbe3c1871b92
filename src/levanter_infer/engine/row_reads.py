"""`RowReads`: rows of device tables on the host, whichever data shard has them."""

from collections.abc import Sequence

import numpy as np


class RowReads:
    """In which call, and where in it, each row of tables of data shards is read.

    Every call reads `size` rows of each shard, so that one compiled program serves however many are wanted.

    Args:
        shards: which shard has the row, for each row that is wanted.
        num_shards: how many there are; the arrays of one alone have no axis of shards.
    """

    def __init__(self, shards: Sequence[int] | np.ndarray, num_shards: int, size: int):
        self._shards, self._num_shards, self._size = np.asarray(shards, np.int64), num_shards, size
        counts = np.bincount(self._shards, minlength=num_shards)
        order = np.argsort(self._shards, kind="stable")
        self._places = np.empty_like(self._shards)
        """Of each row among those of its shard."""
        self._places[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._num_calls = -(-int(counts.max(initial=0)) // size)

    def arguments(self, values: Sequence[int] | np.ndarray, *, fill: int) -> list[np.ndarray]:
        """What each call is given of these values, one for each row: i32[size], or i32[shard, size] of several shards.

        `fill`: stands where a call reads fewer rows.
        """
        laid = np.full((self._num_shards, self._num_calls * self._size), fill, np.int32)
        laid[self._shards, self._places] = values
        calls = np.split(laid, self._num_calls, axis=1) if self._num_calls else []
        return [call if self._num_shards > 1 else call[0] for call in calls]

    def rows(self, results: Sequence) -> np.ndarray:
        """The rows in the order in which they are wanted, [row, …], of what the calls gave: [size, …] or
        [shard, size, …] each. Waits for the device."""
        arrays = [np.asarray(result) for result in results]
        joined = np.concatenate([array if self._num_shards > 1 else array[None] for array in arrays], axis=1)
        return joined[self._shards, self._places]
