"""Metrics against a count by hand, after workloads with forks, preemption and sequences that ended."""

import collections
import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.metrics import METRICS, Registry
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.engine.stats import Stats
from tests.tiny_models import tiny_model

SIZE = 4
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, K and V, kv heads, head size, f32
PAGE_BYTES = SIZE * TOKEN_BYTES
NUM_PAGES = 20
WEIGHTS = 4 * (2 * 61 * 32 + 2 * (2 * 32 * (32 + 16) + 3 * 32 * 64 + 2 * 32) + 32)


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(max_seqs=4, max_seq_len=64, page_size=SIZE, max_pages=NUM_PAGES, max_step_tokens=16)
    return InferenceEngine(tiny_model(), config=config)


def request(length: int, max_tokens: int, n: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, n=n, seed=length)
    return Request(prompt_token_ids=np.random.default_rng(length).integers(0, 60, length).tolist(), sampling=sampling)


def pages(tokens: int) -> int:
    return -(-tokens // SIZE)


def counted(engine) -> dict[str, object]:
    """The right result of `memory`: page by page and slot by slot, from the tables as they are."""
    decode = engine.state.decode
    table = decode.sequences
    computed, lens = np.asarray(table.num_computed).tolist(), np.asarray(table.seq_lens).tolist()
    rows = np.asarray(table.page_indices).tolist()
    holders, fill = collections.Counter(), collections.Counter()
    for slot, tokens in enumerate(computed):
        for position in range(tokens):
            page = rows[slot][position // SIZE]
            fill[page] = max(fill[page], position % SIZE + 1)
            holders[page] += position % SIZE == 0
    live = sum(fill.values()) * TOKEN_BYTES
    reserved = len(fill) * PAGE_BYTES
    histogram = collections.Counter(str(count) for count in holders.values())
    if len(fill) < NUM_PAGES:
        histogram["0"] = NUM_PAGES - len(fill)
    tables = engine.memory()["table_bytes"]
    return {
        "reserved_bytes": reserved,
        "live_bytes": live,
        "wasted_bytes": reserved - live,
        "table_bytes": tables,
        "memory_overhead": pytest.approx((WEIGHTS + tables + reserved) / (WEIGHTS + live) - 1),
        "refcount_histogram": dict(histogram),
        "slot_pages": {str(slot): pages(tokens) for slot, tokens in enumerate(computed) if tokens},
        "slot_tokens": {str(slot): lens[slot] for slot, tokens in enumerate(computed) if tokens},
    }


def run_step_by_step(engine, *requests: Request) -> list[tuple[dict, dict]]:
    """(stats of every step, memory then), both of the same moment: rounds are read before the next is launched."""
    groups = [engine.submit(each) for each in requests]
    seen = []
    while not all(group.is_done for group in groups):
        engine.step_round(max_steps=1)
        engine.flush()
        memory = engine.memory()
        assert {name: memory[name] for name in counted(engine)} == counted(engine)
        seen.append((engine.stats(), memory))
    engine.drain()
    return seen


def test_counts_of_a_plain_workload_follow_from_its_lengths(engine):
    before = engine.stats()
    workload = [(5, 7), (1, 3), (7, 6), (3, 1)]  # prompts of one step
    engine.generate([request(length, generated) for length, generated in workload])
    after = engine.stats()
    grown = {name: after[name] - before[name] for name, metric in METRICS.items() if metric.counter}
    contexts = [context for length, generated in workload for context in range(length, length + generated)]
    assert grown["generated_tokens"] == sum(generated for _, generated in workload)
    assert grown["computed_prompt_tokens"] == 5 + 7 + 3  # a prompt of one token is no chunk
    assert grown["pages_touched"] == sum(map(pages, contexts))
    assert after["paged_kv_bytes_read"] - before["paged_kv_bytes_read"] == grown["pages_touched"] * PAGE_BYTES
    assert grown["preemptions"] == grown["forks"] == grown["copied_pages"] == grown["recomputed_tokens"] == 0
    assert after["prompt_tokens"] - before["prompt_tokens"] == sum(length for length, _ in workload)
    assert (after["running"], after["waiting"], after["stored_tokens"], after["pages_in_use"]) == (0, 0, 0, 0)
    assert (after["page_bytes"], after["pool_bytes"]) == (PAGE_BYTES, NUM_PAGES * PAGE_BYTES)
    assert after["weights_bytes"] == WEIGHTS == 4 * tiny_model().config.num_parameters


@pytest.mark.parametrize("phase", ["launch", "wait", "download", "collect"])
def test_each_time_is_booked_where_it_is_spent(engine, monkeypatch, phase):
    """A delay in one phase of a round shows in that phase and in no other."""
    delay, round_loop = 0.1, sys.modules["levanter_infer.engine.round_loop"]

    def slowed(function):
        def slow(*arguments, **options):
            time.sleep(delay)
            return function(*arguments, **options)

        return slow

    asked = request(5, 6)
    engine.generate([asked])
    places = {
        "launch": (engine.programs, "round"),
        "wait": (round_loop.jax, "block_until_ready"),
        "download": (round_loop, "RoundResult"),
        "collect": (engine._scheduler, "collect"),
    }
    owner, name = places[phase]
    monkeypatch.setattr(owner, name, slowed(getattr(owner, name)))
    before = engine.stats()
    engine.generate([asked])
    after = engine.stats()
    rounds = after["rounds"] - before["rounds"]
    spent = {name: after[f"{name}_s"] - before[f"{name}_s"] for name in places}
    assert rounds > 0 and spent[phase] >= rounds * delay
    assert all(seconds < rounds * delay / 2 for name, seconds in spent.items() if name != phase), spent


def test_forks_share_pages_and_each_copy_is_counted(engine):
    before = engine.stats()
    seen = run_step_by_step(engine, request(10, 6, n=4))
    stats, memory = seen[1]  # all have forked, and computed their first token
    assert memory["refcount_histogram"]["4"] == 2  # the full pages of the prompt
    assert (stats["refs_max"], stats["refs_sum"]) == (4, 4 * 3)
    assert stats["pages_in_use"] == 2 + 4 and stats["stored_tokens"] == 11 + 3 * 10
    assert (stats["running"], stats["waiting"]) == (4, 0)
    after = engine.stats()
    assert after["forks"] - before["forks"] == 3
    copied = after["copied_pages"] - before["copied_pages"]
    assert copied == 3
    assert after["copies_per_token"] == after["copied_pages"] / after["generated_tokens"]


def test_pages_under_preemption_are_those_of_the_tables(engine):
    before = engine.stats()
    seen = run_step_by_step(engine, *(request(6 + i, 40) for i in range(6)))
    after = engine.stats()
    assert after["preemptions"] > before["preemptions"] and after["recomputed_tokens"] > before["recomputed_tokens"]
    for stats, memory in seen:
        assert stats["pages_free"] == NUM_PAGES - stats["pages_in_use"] == memory["refcount_histogram"].get("0", 0)
        assert stats["pages_in_use"] * PAGE_BYTES == memory["reserved_bytes"]
        assert stats["refs_sum"] == sum(memory["slot_pages"].values())
        assert stats["stored_tokens"] * TOKEN_BYTES == memory["live_bytes"]  # nothing is shared here
        assert stats["pages_in_use"] <= stats["pages_peak"]
    assert max(stats["pages_in_use"] for stats, _ in seen) <= after["pages_peak"] <= NUM_PAGES
    assert after["pages_free"] == NUM_PAGES


def test_a_reset_empties_the_pool_and_keeps_the_totals(engine):
    engine.submit(request(9, 20))
    engine.step_round()
    engine.drain()
    before = engine.stats()
    engine.submit(request(9, 20))
    engine.step_round(max_steps=1)
    engine.step_round(max_steps=1)
    assert engine.stats()["pages_in_use"] > 0
    engine.reset()
    after = engine.stats()
    assert after["pages_in_use"] == after["stored_tokens"] == after["refs_max"] == 0
    assert after["pages_free"] == NUM_PAGES and after["generated_tokens"] > before["generated_tokens"] > 0
    engine.generate([request(5, 2)])
    assert engine.stats()["generated_tokens"] == after["generated_tokens"] + 2


def test_the_forms_say_the_same(engine):
    engine.generate([request(5, 4, n=2)])
    engine.memory()
    registry = engine.metrics()
    values = json.loads(json.dumps(registry.as_dict()))
    assert list(values) == [name for name, metric in METRICS.items() if metric.source != "bench"]
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(registry.prometheus())
        for sample in family.samples
    }
    for name, metric in METRICS.items():
        if metric.source == "bench" or values[name] is None:
            continue
        place = "levanter_infer_" + (name.removesuffix("_s") + "_seconds" if metric.unit == "s" else name)
        if metric.kind == "histogram":
            assert samples[f"{place}_count",] == values[name]["count"] == values["rounds"]
            assert samples[f"{place}_sum",] == values[name]["sum"] > 0
            for bound, count in values[name]["buckets"].items():
                assert samples[f"{place}_bucket", bound] == count
            continue
        place += "_total" if metric.kind == "counter" else ""
        expected = {(key,): part for key, part in values[name].items()} if metric.label else {(): values[name]}
        for labels, part in expected.items():
            assert samples[place, *labels] == part
    assert f"generated_tokens={values['generated_tokens']} " in registry.line()
    assert registry.line().count("\n") == 0


def test_the_times_of_the_host_make_up_its_rounds(engine):
    before = engine.stats()
    engine.generate([request(5, 30)])
    after = engine.stats()
    spent = {name: after[name] - before[name] for name in ("launch_s", "wait_s", "download_s", "collect_s")}
    assert all(seconds > 0 for seconds in spent.values())
    assert spent["wait_s"] <= after["round_s"]["sum"] - before["round_s"]["sum"]


def test_a_step_with_a_prompt_chunk_counts_as_no_cheaper_than_one_without():
    stats = Stats(pages_total=1, page_bytes=1, pool_bytes=1, weights_bytes=1)
    stats._decode.seconds, stats._decode.steps, stats._decode.generated = 3.0, 10, 30
    mixed = stats._mixed
    mixed.seconds, mixed.steps, mixed.prompt_steps, mixed.prompt_tokens = 1.0, 10, 5, 120
    stats.registry.add("recomputed_tokens", 6)
    stats._set_rates()
    assert stats.registry["recomputed_per_token"] == pytest.approx(6 / 30)
    assert stats.registry["prefill_tokens_per_s"] == pytest.approx(120 / (5 * 0.3))
    mixed.seconds = 4.0
    stats._set_rates()
    assert stats.registry["prefill_tokens_per_s"] == pytest.approx(120 / (4.0 - 5 * 0.3))
    assert stats.registry["decode_tokens_per_s"] == pytest.approx(10.0)


def test_names_that_nobody_declared_are_refused():
    with pytest.raises(KeyError):
        Registry().set("pages_lost", 1)
    with pytest.raises(AssertionError):
        Registry().add("steps", -1)


def test_every_metric_stands_in_the_documents():
    lines = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| `", line)]
    expected = [
        [f"`{m.name}`", m.kind, m.unit or "count", m.help, m.source, m.contract, m.asked_as and f"`{m.asked_as}`"]
        for m in METRICS.values()
    ]
    assert rows == expected
