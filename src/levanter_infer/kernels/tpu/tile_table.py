"""Tiles that a search found for some shapes: those that compile, with the shortest loops. Written by
`scripts/search_tiles.py --write`."""

from levanter_infer.kernels.tiling import Tiles, TileShape, propose
from levanter_infer.kernels.tpu.sizes import Tile

_FOUND: list[tuple[tuple, tuple, tuple]] = []
"""The fields of a `TileShape`, of its decode `Tile` and of its prefill `Tile`."""

TABLE = {TileShape(*shape): Tiles(Tile(*decode), Tile(*prefill)) for shape, decode, prefill in _FOUND}


def choose(shape: TileShape) -> Tiles:
    """The tiles of the table, or for a shape that it does not hold those that `tiling.propose` gives."""
    return TABLE.get(shape) or propose(shape)
