"""The model of speed against what can be worked out by hand, and what it reads from compiled programs."""

import dataclasses

import pytest

from levanter_infer.plan.figures import Figures, WindowFigures
from levanter_infer.plan.hlo import Collective, collectives_of
from levanter_infer.plan.roofline import Workload, model_speed, send_s, step_collectives
from levanter_infer.plan.targets import Chip

CHIP = Chip("tpu", "test", 16 * 2**30, memory_gbps=1000, tflops=100, link_gbps=100, hop_us=1)
GB = 10**9
MODEL = {
    "parameters": 4 * 10**9,
    "layers": 10,
    "looped_layers": 10,
    "layer_bodies": 1,
    "hidden": 1000,
    "q_heads": 8,
    "head_dim": 100,
    "value_dim": 100,
    "experts": None,
    "experts_per_token": 0,
    "expert_bytes": 0,
    "embedding_bytes": GB,
    "head_bytes": GB,
    "itemsize": 2,
    "weight_itemsize": 2,
    "parts": 1,
}
FIGURES = Figures(
    memory_bytes=16 * 2**30,
    weights_bytes=9 * GB,
    pool_bytes=4 * GB,
    tables_bytes=0,
    upload_bytes=0,
    page_bytes=16 * 10**5,
    page_size=16,
    num_pages=2500,
    seq_pages=100,
    max_seqs=20,
    max_step_tokens=100,
    max_seq_len=1600,
    num_ranks=2,
    buckets=(8, 20, 100),
    sampled_rows=20,
    attention="tpu",
    matmul="xla",
    tiles={},
    model=MODEL,
)


def test_a_step_that_reads_weights_takes_their_time_at_the_bandwidth():
    speed = model_speed(FIGURES, CHIP, Workload(600, 400), ())
    assert speed.sequences == 20 and speed.seqs_by_pages == int(2500 / (800 / 16 + 0.5))
    assert speed.decode.weights_s == pytest.approx(8e-3)
    assert speed.decode.kv_s == pytest.approx(20 * 800 * 1e5 / 1e12)
    flops = 2 * 20 * 4e9 + 20 * 800 * 4 * 8 * 100 * 10
    assert speed.decode.compute_s == pytest.approx(flops / 1e14)
    assert speed.decode.total_s == speed.decode.weights_s + speed.decode.kv_s
    assert speed.decode_tokens_per_s == pytest.approx(2 * 20 / speed.decode.total_s)
    assert speed.prompt_s == pytest.approx(6 * 8e-3 + 4 * 8 * 100 * 10 * 600**2 / 2 / 1e14)
    assert speed.tokens_per_s == pytest.approx(2 * 20 / (speed.decode.total_s + 20 / 400 * speed.prompt_s))


def test_a_step_in_blocks_reads_the_weights_for_each_of_them():
    blocks = dataclasses.replace(FIGURES, buckets=(128,), block_tokens=64, max_seqs=80, num_pages=25_000)
    speed = model_speed(blocks, CHIP, Workload(600, 400), ())
    assert speed.sequences == 80
    assert speed.decode.weights_s == pytest.approx(2 * 8e-3)  # two blocks, and two of the head
    flops = 2 * 128 * 4e9 + 80 * 800 * 4 * 8 * 100 * 10
    assert speed.decode.compute_s == pytest.approx(flops / 1e14)
    # Prompts: steps of 100 tokens in two blocks, and one block of the head
    attention = 4 * 8 * 100 * 10 * 600**2 / 2 / 1e14
    step = max(2 * 7e-3 + 1e-3, (2 * 128 * 3.5e9 + 2 * 64 * 5e8) / 1e14)
    assert speed.prompt_s == pytest.approx(6 * step + attention)
    one = model_speed(dataclasses.replace(blocks, max_seqs=64), CHIP, Workload(600, 400), ())
    assert one.decode.weights_s == pytest.approx(8e-3)


def test_sums_of_blocks_are_sent_for_each_of_them():
    sharded = dataclasses.replace(FIGURES, model=MODEL | {"parts": 4}, buckets=(128,), block_tokens=64)
    one = model_speed(sharded, CHIP, Workload(600, 400), None).decode.collectives_s
    many = dataclasses.replace(sharded, max_seqs=80, num_pages=25_000)
    assert model_speed(many, CHIP, Workload(600, 400), None).decode.collectives_s == pytest.approx(2 * one)


def test_layers_with_a_window_read_no_more_than_that():
    windowed = dataclasses.replace(FIGURES, page_bytes=4 * 10**5, windows=(WindowFigures(100, 300, 12 * 10**5),))
    speed = model_speed(windowed, CHIP, Workload(600, 400), ())
    assert speed.decode.kv_s == pytest.approx(20 * (800 * 0.25e5 + 100 * 0.75e5) / 1e12)


LONG = Workload(600, 400)


def most(figures: Figures, chip: Chip = CHIP, workload: Workload = LONG) -> str:
    gains = model_speed(figures, chip, workload, () if figures.model["parts"] == 1 else None).gains
    assert all(gain > 0.99 for gain in gains.values())
    return next(iter(gains))


def test_what_binds_is_what_there_should_be_more_of():
    assert most(FIGURES) == "memory bandwidth"
    slow = dataclasses.replace(CHIP, tflops=1)
    assert most(FIGURES, slow) == "arithmetic"
    apart = dataclasses.replace(CHIP, link_gbps=0.1)
    assert most(dataclasses.replace(FIGURES, model=MODEL | {"parts": 8}), apart) == "links"
    few = dataclasses.replace(FIGURES, max_seqs=1, buckets=(8, 100))
    assert most(few, workload=Workload(1, 40)) == "slots (engine.max_seqs)"
    crowded = dataclasses.replace(FIGURES, num_pages=30)
    assert most(crowded, workload=Workload(16, 400)) == "pages (engine.max_pages)"


def test_experts_that_nobody_chose_are_neither_read_nor_computed():
    experts = {"experts": 8, "experts_per_token": 2, "expert_bytes": 4 * GB}
    figures = dataclasses.replace(FIGURES, model=MODEL | experts, max_seqs=1)
    speed = model_speed(figures, CHIP, Workload(1, 1), ())
    assert speed.decode.weights_s == pytest.approx((8 - 4 * 0.75) * 1e-3)
    many = model_speed(dataclasses.replace(figures, max_seqs=20), CHIP, Workload(1, 1), ())
    assert many.decode.weights_s == pytest.approx((8 - 4 * 0.75**20) * 1e-3)


def test_collectives_cost_their_bytes_and_their_hops():
    each = Collective("all-reduce", "bf16[20,1000]", 40_000, parts=4, depth=3)
    assert send_s(each, CHIP) == pytest.approx(2 * 0.75 * 40_000 / 1e11 + 4e-6)
    gather = dataclasses.replace(each, operation="all-gather", count=2)
    assert send_s(gather, CHIP, scale=2.0) == pytest.approx(2 * (0.75 * 80_000 / 1e11 + 4e-6))


def test_collectives_of_a_period_run_once_for_each_of_its_layers():
    """Six bodies with two all-reduces each, in a loop that runs ten times."""
    chip = dataclasses.replace(CHIP, hop_us=0)
    each = Collective("all-reduce", "bf16[20,1000]", 40_000, parts=4, depth=3, count=12)
    model = MODEL | {"parts": 4, "layers": 62, "looped_layers": 60, "layer_bodies": 6}
    figures = dataclasses.replace(FIGURES, model=model)
    found = model_speed(figures, chip, Workload(600, 400), (each,)).decode.collectives_s
    assert found == pytest.approx(60 * 2 * 2 * 0.75 * 40_000 / 1e11)


HLO = """
ENTRY %main (x: bf16[20,1000]) -> bf16[20,1000] {
  %a = bf16[20,1000]{1,0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, metadata={op_name="jit(f)/while/body/while/body/while/body/psum"}
  %b = bf16[20,1000]{1,0} all-reduce(%a), replica_groups=[2,4]<=[8], metadata={op_name="jit(f)/while/body/while/body/while/body/psum"}
  %c = bf16[100,1000]{1,0} all-reduce(%a), replica_groups=[2,4]<=[8], metadata={op_name="jit(f)/while/body/while/body/while/body/psum"}
  %d = bf16[20,1000]{1,0} all-reduce(%a), replica_groups=[2,4]<=[8], metadata={op_name="jit(f)/while/body/while/body/psum"}
  %e = (f32[4,64], f32[16,64]) all-gather-start(%a), replica_groups=[2,4]<=[8], metadata={op_name="jit(f)/while/body/while/body/all_gather"}
  %g = (f32[4], s32[4]) all-reduce(%a, %b), replica_groups=[2,4]<=[8], metadata={op_name="jit(f)/all_gather"}
  %f = f32[16,64] all-gather-done(%e)
}
"""  # noqa: E501


def test_collectives_are_read_with_their_bytes_groups_and_loops():
    found = collectives_of(HLO)
    outer, layer = found[0], found[-2]
    assert (outer.depth, outer.num_bytes, outer.kind) == (0, 32, "f32[4] s32[4]")
    assert (layer.operation, layer.depth, layer.count, layer.parts) == ("all-reduce", 3, 2, 4)
    sent = step_collectives(tuple(found), FIGURES, 20)
    assert [(each.num_bytes, each.count) for each in sent.per_layer] == [(40_000, 2)]
    assert [each.kind for each in sent.per_step] == ["bf16[20,1000]"]
    assert [(each.operation, each.num_bytes) for each in sent.per_block] == [("all-gather", 4096)]
    assert [each.kind for each in step_collectives(tuple(found), FIGURES, 100).per_layer] == ["bf16[100,1000]"]


def test_columns_that_go_around_a_ring_are_activations_of_a_layer():
    def sent(columns: int, depth: int = 3) -> Collective:
        return Collective("collective-permute", f"bf16[20,{columns}]", 40 * columns, parts=2, depth=depth, count=4)

    found = (sent(250), sent(125), sent(300), dataclasses.replace(sent(250), operation="all-reduce"))
    groups = step_collectives(found, FIGURES, 20)
    assert groups.per_layer == found[:2] and groups.per_block == found[2:]
    assert step_collectives(found, FIGURES, 100).per_layer == ()
