"""Tiles that a search found, by the shape that they are for: what compiles, with the shortest loops. Written by
`scripts/search_tiles.py --write`."""

from levanter_infer.kernels.tiling import Tiles, TileShape, propose
from levanter_infer.kernels.tpu.sizes import Tile

_FOUND: list[tuple[tuple, tuple, tuple]] = []
"""Fields of `TileShape`, and of `Tile` for one query and for many."""

TABLE = {TileShape(*shape): Tiles(Tile(*decode), Tile(*chunk)) for shape, decode, chunk in _FOUND}


def choose(shape: TileShape) -> Tiles:
    """Of the table; for a shape that is not in it, those that `tiling` proposes."""
    return TABLE.get(shape) or propose(shape)
