"""Tiles of the attention for TPUs, proved by the compiler."""

import dataclasses

import pytest

from levanter_infer import EngineConfig, InferenceEngine, generate
from levanter_infer.config import decode_engine
from levanter_infer.engine import tile_search
from levanter_infer.engine.tile_search import check_tiles, find_tiles
from levanter_infer.kernels.tpu.sizes import Tile
from levanter_infer.kernels.tpu.tiling import TABLE, Tiles, TileShape, candidates, propose
from tests.tiny_models import tiny_model

SHAPE = TileShape("v5e", kv_heads=3, head_dim=128, q_per_kv=5, page_size=32)


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_a_shape_that_no_table_knows_gets_tiles_that_compile():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    assert SHAPE not in TABLE
    assert find_tiles(SHAPE, max_tokens=8) in list(candidates(SHAPE))


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_tiles_that_do_not_fit_are_refused_with_the_memory_that_is_short():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    tiles = Tiles(decode=Tile(pages=256, slots=4, parts=1), prefill=Tile(pages=1, slots=2, parts=3, queries=16))
    with pytest.raises(ValueError, match=r"\d\d\.\d\d MiB of vmem are needed and 16.00 there, .*fewer pages"):
        find_tiles(SHAPE, max_tokens=1, tiles=tiles)


def test_a_generation_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="generation=v3: expected one of v4, v5e, v5p, v6e"):
        find_tiles(TileShape("v3", 8, 128, 4, 16), max_tokens=8)


def test_every_candidate_is_one_that_the_kernels_can_have():
    for kv_heads, head_dim, q_per_kv in ((8, 128, 4), (1, 128, 16), (3, 64, 5), (4, 96, 1), (16, 256, 7)):
        shape = TileShape("v5p", kv_heads, head_dim, q_per_kv, 16)
        for tiles in candidates(shape):
            check_tiles(shape, tiles)


@pytest.mark.parametrize(
    "path, change, message",
    [
        ("decode", dict(pages=3), "engine.tiles.decode.pages=3: expected a power of two"),
        ("decode", dict(parts=2), "engine.tiles.decode.parts=2: expected a divisor of the 3 groups of kv heads"),
        ("decode", dict(queries=2), "engine.tiles.decode.queries=2: expected 1"),
        ("prefill", dict(slots=1), "engine.tiles.prefill.slots=1: expected 2 or more"),
        ("prefill", dict(queries=48), "engine.tiles.prefill.queries=48: expected 16 times a power of two"),
    ],
)
def test_tiles_that_no_kernel_can_have_are_refused_by_name(path, change, message):
    tiles = propose(SHAPE)
    wrong = dataclasses.replace(tiles, **{path: dataclasses.replace(getattr(tiles, path), **change)})
    with pytest.raises(ValueError, match=message):
        check_tiles(SHAPE, wrong)


def test_the_former_name_of_the_prefill_tile_is_answered_with_the_new_one():
    tile = dataclasses.asdict(propose(SHAPE).prefill)
    assert decode_engine({"tiles": {"decode": {**tile, "queries": 1}, "prefill": tile}}).tiles is not None
    with pytest.raises(ValueError, match="unknown key engine.tiles.chunk; did you mean prefill\\?"):
        decode_engine({"tiles": {"decode": tile, "chunk": tile}})


def test_tiles_for_an_attention_without_any_are_refused():
    config = EngineConfig(max_seqs=1, max_seq_len=32, tiles=propose(SHAPE))
    for refused in (
        lambda: InferenceEngine(tiny_model(), config=config),
        lambda: generate(tiny_model(), [[1]], [1], config=config),
    ):
        with pytest.raises(ValueError, match="engine.tiles is for the attention of TPUs, and here attention="):
            refused()


def test_a_compiler_that_ends_its_process_costs_the_tiles_at_which_it_ended_alone(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        """#!/bin/sh
cat > /dev/null
if [ -e $0.second ]; then echo '{"error": ""}'; exit; fi
touch $0.second
echo '{"error": "no"}'
exit 3
"""
    )
    compiler.chmod(0o700)
    monkeypatch.setattr(tile_search.sys, "executable", str(compiler))
    given = [propose(SHAPE)] * 3
    assert list(tile_search._refusals("v5e", {}, given)) == ["no", "the compiler ended its process with 3", ""]


def test_query_blocks_of_sparse_attention_fit_a_group_of_tokens():
    for heads in (1, 4, 16, 128):
        shape = TileShape("v5e", 1, 576, heads, 64, "bfloat16", 512, 128, True)
        assert all(tiles.prefill.queries <= 64 for tiles in candidates(shape))
    tiles = propose(dataclasses.replace(shape, q_per_kv=4))
    wide = dataclasses.replace(tiles, prefill=dataclasses.replace(tiles.prefill, queries=128))
    with pytest.raises(ValueError, match="prefill.queries=128: expected at most 64 with sparse attention"):
        check_tiles(dataclasses.replace(shape, q_per_kv=4), wide)
