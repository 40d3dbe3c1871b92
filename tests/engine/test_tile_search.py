"""Tiles of the attention for TPUs, proved by the compiler."""

import pytest

from levanter_infer.engine.tile_search import find_tiles
from levanter_infer.kernels.rpa_tpu_sizes import Tile
from levanter_infer.kernels.tile_table import TABLE
from levanter_infer.kernels.tiling import Tiles, TileShape, candidates

SHAPE = TileShape("v5e", kv_heads=3, head_dim=128, q_per_kv=5, page_size=32)


@pytest.mark.tpu_compile
def test_a_shape_that_no_table_knows_gets_tiles_that_compile():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    assert SHAPE not in TABLE
    assert find_tiles(SHAPE, max_tokens=8) in list(candidates(SHAPE))


@pytest.mark.tpu_compile
def test_tiles_that_do_not_fit_are_refused_with_the_memory_that_is_short():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    tiles = Tiles(decode=Tile(pages=256, slots=4, parts=1), chunk=Tile(pages=1, slots=2, parts=3, queries=16))
    with pytest.raises(ValueError, match=r"\d\d\.\d\d MiB of vmem are needed and 16.00 there, .*; fewer pages"):
        find_tiles(SHAPE, max_tokens=1, tiles=tiles)


def test_a_generation_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="generation=v3: expected one of v4, v5e, v5p, v6e"):
        find_tiles(TileShape("v3", 8, 128, 4, 16), max_tokens=8)
