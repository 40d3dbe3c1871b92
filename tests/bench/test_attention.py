"""The attention bench: counts by hand, and lines that say what they measured."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.bench.__main__ import main as bench
from levanter_infer.bench.attention import Case, attend, attend_to_gathered, inputs
from levanter_infer.kernels.registry import make_backend

SIZES = dict(page_size=4, heads=4, kv_heads=2, head_dim=8, dtype="float32")


def test_bytes_pages_and_flops_are_those_counted_by_hand():
    # Three sequences of 10 tokens: 3 pages of 4 each. Two queries see 9 and 10 keys.
    case = Case("prefill", 3, 10, 2, **SIZES)
    assert case.pages_touched == 9
    assert case.paged_kv_bytes_read == 3 * 10 * (2 + 2) * 8 * 4
    assert case.flops == 3 * (9 + 10) * 4 * (2 * 8 + 2 * 8)


@pytest.mark.parametrize("queries", [1, 4])
def test_what_is_timed_after_the_gather_computes_the_same_attention(queries):
    kv, batch, q, _, _ = inputs(Case("prefill", 2, 8, queries, **SIZES))
    dense = attend_to_gathered(1, q, kv, batch)
    paged = attend(1, q, kv, batch, backend=make_backend("reference", jax.default_backend()))
    np.testing.assert_allclose(dense, paged, rtol=1e-5, atol=1e-5)
    assert float(jnp.std(dense)) > 0.01


@pytest.mark.slow
def test_a_line_per_case_with_the_names_of_the_metrics(capsys):
    sizes = ["--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--dtype", "float32"]
    cases = ["--phases", "decode,prefill", "--batch", "2", "--context", "8", "--chunk", "8", "--impl", "reference,xla"]
    assert bench(["attention", *cases, *sizes, "--repeats", "1", "--milliseconds", "0.1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["phase"], line["queries"], line["impl"]) for line in lines] == [
        ("decode", 1, "reference"),
        ("decode", 1, "xla"),
        ("prefill", 4, "reference"),
        ("prefill", 4, "xla"),
    ]
    for line in lines:
        for name in ("gather_ms", "softmax_ms", "kv_write_ms", "copy_page_ms", "total_ms"):
            assert line[name]["median"] > 0, name
        rate = line["paged_kv_bytes_read"] / line["total_ms"]["median"] / 1e6
        assert line["gb_per_s"] == pytest.approx(rate, rel=0.01, abs=1e-3)


def test_a_chunk_of_less_than_two_tokens_a_sequence_is_no_case(capsys):
    assert bench(["attention", "--phases", "prefill", "--batch", "8", "--context", "8", "--chunk", "8"]) == 0
    assert capsys.readouterr().out == ""
