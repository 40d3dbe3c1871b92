"""The scenarios at sizes of a few tokens."""

import json

import pytest

from levanter_infer.bench.__main__ import main as bench
from levanter_infer.bench.progress import Progress
from levanter_infer.bench.scenarios import ratio_if_equal

TINY = {
    **{"hidden": 32, "layers": 1, "heads": 2, "kv-heads": 1, "mlp": 32, "vocab": 61, "dtype": "float32"},
    **{"chunk": 16, "repeats": 1},
}


def lines_of(capsys, **options) -> list[dict]:
    given = [part for key, value in {**TINY, **options}.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    assert bench(["scenarios", *given]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_times_of_different_outputs_are_not_compared():
    same = ratio_if_equal([1, 2, 3], [1, 2, 3], 2.0, 8.0)
    assert same == {"equal": True, "ratio": 4.0}
    other = ratio_if_equal([1, 2, 3], [1, 5, 3], 2.0, 8.0)
    assert not other["equal"] and "ratio" not in other and "token 1" in str(other["refused"])


def test_rates_of_a_window_are_taken_between_rounds_in_proportion():
    progress = Progress([], [0.0, 1.0, 3.0], [0, 10, 20], [0, 4, 4], 1.0)
    assert progress.seconds_of(10, 20) == pytest.approx(2.0)
    assert progress.seconds_of(5, 15) == pytest.approx(1.5)
    assert progress.prefill_seconds_of(0, 2) == pytest.approx(0.5)
    # The prompt has been computed after a second; the last two are those of generation.
    assert progress.prefill_seconds_of(2, 4) == pytest.approx(0.5)
    waits = Progress([], [0.0, 1.0, 2.0, 4.0, 5.0], [0, 0, 10, 20, 20], [0, 4, 4, 4, 4], 2.0)
    assert waits.seconds_of(0, 20) == pytest.approx(3.0)


@pytest.mark.slow
def test_the_cache_changes_nothing_but_the_time(capsys):
    (line,) = lines_of(capsys, cases="cache", cache_tokens=6)
    assert line["equal"] and line["ratio"] > 0 and line["config"]["dtype"] == "float32"


@pytest.mark.slow
def test_a_chat_says_that_its_history_is_computed_again(capsys):
    first, second = lines_of(capsys, cases="chat", chat="8,24", generate=4)
    assert (first["history"], second["history"]) == (8, 24)
    assert second["prompt_tokens_computed"] == 24 and "again" in second["note"]


def test_latency_of_a_layer_has_both_targets(capsys):
    lines = lines_of(capsys, cases="layer", batch=2, layer_context="32")
    assert [(line["target"], line["page_size"]) for line in lines] == [("bench-llama", 32), ("bench-llama-paged", 16)]
    assert all(line["layer_ms"]["median"] > 0 for line in lines)
