"""An array that many devices share, on its way from the host to those of this process."""

import jax
import numpy as np
from jax.sharding import NamedSharding

Bounds = tuple[tuple[int, int], ...]
"""First and one past the last, along each axis."""


class HostParts:
    """What the devices of this process have of an array, written piece by piece.

    Args:
        sharding, shape, dtype: of the whole array, which no host need hold.
    """

    def __init__(self, sharding: NamedSharding, shape: tuple[int, ...], dtype: np.dtype):
        self._sharding, self._shape = sharding, shape
        places = sharding.addressable_devices_indices_map(shape).values()
        distinct = {_bounds(index, shape) for index in places}
        self._parts = {bounds: np.empty([stop - start for start, stop in bounds], dtype) for bounds in distinct}

    def want(self, place: tuple[int, ...]) -> bool:
        """Whether any of the devices has something of the piece at `place`, indices along the leading axes."""
        return any(_has(bounds, place) for bounds in self._parts)

    def write(self, place: tuple[int, ...], piece: np.ndarray) -> None:
        """All that the array holds at `place`."""
        for bounds, part in self._parts.items():
            if _has(bounds, place):
                own = tuple(i - start for i, (start, _) in zip(place, bounds, strict=False))
                part[own] = piece[tuple(slice(*each) for each in bounds[len(place) :])]

    def place(self) -> jax.Array:
        """The array, when all pieces have been written."""
        parts, shape = self._parts, self._shape
        return jax.make_array_from_callback(shape, self._sharding, lambda index: parts[_bounds(index, shape)])


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    """`index`: None is all of the array."""
    index = (slice(None),) * len(shape) if index is None else index
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _has(bounds: Bounds, place: tuple[int, ...]) -> bool:
    return all(start <= i < stop for i, (start, stop) in zip(place, bounds, strict=False))
