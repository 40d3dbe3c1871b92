"""The ground of the record of compiled shapes: kernels of different tables and pools are the same."""

import haliax as hax
import jax
import pytest
from jax.sharding import AbstractMesh
from scripts.family_shapes import SHAPES, AttentionShape, family_shapes
from scripts.kernel_tables import replace
from scripts.search_tiles import variants
from scripts.sweep_tpu import Case, Row, all_cases, family_cases, kernel_digest, other_cases, read, sweep, write
from scripts.tpu_builders import mixed

from levanter_infer.axes import KV_HEADS, Q_HEADS_PER_GROUP
from levanter_infer.kernels.tpu.sizes import Tile
from levanter_infer.layers.layout import Layout
from levanter_infer.models.registry import FAMILIES
from levanter_infer.runtime.libtpu import TARGETS

HEADS = (2, 1, 128)


def digest(**sizes) -> str:
    tiles = dict(decode=dict(pages=4, slots=2), prefill=dict(pages=4, slots=2, queries=8))
    function, types = mixed(None, heads=HEADS, tokens=32, **{"page": 16, "tiles": tiles, **sizes})
    return kernel_digest("v5e", jax.jit(function).trace(*types).jaxpr.jaxpr)


@pytest.mark.slow
def test_kernels_do_not_depend_on_tables_sequences_and_pools():
    small = digest(context=2048, seqs=2)
    assert small == digest(context=131072, seqs=20, pool_pages=7)
    assert small != digest(context=2048, seqs=2, page=32)
    assert small != digest(context=2048, seqs=2, window=100)
    assert small != digest(context=2048, seqs=2, sinks=True)
    assert small != digest(context=2048, seqs=2, attention_chunk=100)


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", TARGETS)
def test_heads_of_64_to_512_sinks_and_chunks_compile_with_proposed_tiles(generation):
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    cases = other_cases([generation])
    assert {64, 96, 128, 160, 192, 256, 512} == {case.heads[2] for case in cases}
    assert any(case.sinks for case in cases) and any(case.attention_chunk for case in cases)
    rows = list(sweep(generation, cases, None))
    assert [row.case for row in rows if row.how != "compiled"] == [] and len(rows) == len(cases)


def test_each_family_has_the_shapes_of_its_models():
    """A new family gets a line in scripts/family_shapes.py: its attention is then compiled for every TPU."""
    assert set(FAMILIES) <= set(SHAPES)
    shapes = family_shapes()
    assert len(shapes) == len(set(shapes)) and AttentionShape((16, 1, 576), value_dim=512) in shapes


def test_shapes_of_a_device_are_those_of_the_layout():
    for heads, parts in [((32, 8, 128), 4), ((9, 3, 64), 8), ((14, 2, 64), 8), ((12, 12, 64), 8), ((64, 8, 64), 8)]:
        num_q_heads, num_kv_heads, head_dim = heads
        layout = Layout(AbstractMesh((parts,), ("model",)), num_kv_heads, num_q_heads // num_kv_heads, 64)
        queries = hax.zeros({KV_HEADS: num_kv_heads, Q_HEADS_PER_GROUP: num_q_heads // num_kv_heads})
        all_kv_heads, group = layout.fitted(queries).array.shape
        kv_heads = all_kv_heads // parts
        assert AttentionShape(heads).share(parts).heads == (kv_heads * group, kv_heads, head_dim)
    gpt_oss = AttentionShape((64, 8, 64), window=128, sinks=True)
    assert gpt_oss.share(8) == AttentionShape((8, 1, 64), window=128, sinks=True)


def test_a_record_is_read_as_it_was_written(tmp_path):
    cases = all_cases(["v4", "v5e", "v5p", "v6e"])
    assert len(cases) == len(set(cases)) == 1200
    rows = [
        Row(cases[700], "failed", "", "abc", 1.5, "ValueError: a, b"),
        Row(Case("v4", (32, 8, 128), 16, 2048, 16), "compiled", "123", "abc", 0.0),
    ]
    write(tmp_path / "record.csv", {row.case: row for row in rows}, cases)
    assert list(read(tmp_path / "record.csv").values()) == rows[::-1]
    assert read(tmp_path / "none.csv") == {}
    ruled = [Row(case, "same", "123", "abc", 0.0) for case in family_cases(["v5e"]) if case.sinks or case.value_dim]
    write(tmp_path / "rules.csv", {row.case: row for row in ruled}, family_cases(["v4", "v5e"]))
    assert list(read(tmp_path / "rules.csv").values()) == ruled and len(ruled) > 9


def test_variants_of_a_tile_differ():
    found = list(variants(Tile(pages=4, slots=3, parts=1, queries=8)))
    assert len(found) == len(set(found)) == 5 and found[0].pages == 4


def test_a_table_is_put_in_its_place():
    text = "a\n<!-- one -->\n<!-- end -->\nb\n<!-- two -->\nold\n<!-- end -->\n"
    text = replace(replace(text, "one", "x\ny"), "two", "z")
    assert text == "a\n<!-- one -->\nx\ny\n<!-- end -->\nb\n<!-- two -->\nz\n<!-- end -->\n"
    assert replace(text, "one", "x\ny") == text
    with pytest.raises(ValueError, match="0 places for the table 'three', expected 1"):
        replace(text, "three", "")
