"""scripts/tpu_schedule.py against kernels whose loops are known."""

from pathlib import Path

import pytest
from scripts.tpu.limits import prefill_limits
from scripts.tpu_schedule import compile_builder, describe

from levanter_infer.plan.bundles import Schedules, executed, split_bundles
from levanter_infer.plan.cycles import estimated_cycles
from levanter_infer.plan.hlo import collectives, large_moves
from levanter_infer.runtime.libtpu import short_of
from tests.tpu_kernels import COPIED, TRIPS, VALUES

KERNELS = Path(__file__).with_name("tpu_kernels.py")
BUILDERS = Path(__file__).resolve().parents[1] / "scripts" / "tpu_builders.py"
MIB = 2**20


@pytest.mark.tpu_compile
def test_loops_spills_and_memory_are_those_of_the_kernels(tmp_path):
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    schedule = compile_builder(f"{KERNELS}:kernels", "v5e", keep=str(tmp_path))
    assert schedule.error is None, schedule.error

    nested = schedule.kernel("nested_loops")
    outer, inner = nested.loops
    assert (outer.depth, inner.depth) == (1, 2) and outer.first <= inner.first and inner.last <= outer.last
    assert nested.main_loop() is inner
    assert inner.slots["VSTORE"] == COPIED <= inner.bundles  # one store a bundle
    assert inner.slots["VLOAD"] == COPIED
    assert outer.own_bundles == outer.bundles - inner.bundles
    assert nested.memory["vmem"]["total"] >= 8 * VALUES * 512  # of the output at least
    assert (nested.spills, inner.spills, inner.dmas) == (0, 0, 0)

    matmul = schedule.kernel("product_loop").main_loop()
    peak = 2 * 256**3 / 131072  # cycles at the peak of four matrix units of 128 by 128
    assert matmul is not None and matmul.slots["MATMUL"] > 0
    assert peak <= matmul.bundles <= matmul.cycles < 2 * peak

    crowded = schedule.kernel("many_values")
    assert crowded.spills >= VALUES - 64 and crowded.fills >= crowded.spills
    assert 4096 * (VALUES - 64) <= crowded.memory["vmem"]["spill slots"] < crowded.memory["vmem"]["total"]
    assert "nested_loops" in describe(schedule) and "MATMUL" in describe(schedule)

    text = next(tmp_path.glob("*-counted_loop*-final_bundles.txt")).read_text()
    bundles = split_bundles(text)
    ran = executed(bundles)
    assert ran is not None and len(bundles) > schedule.kernel("counted_loop").loops[0].skippable > 0
    assert sum(bundles[address].count("vst [") for address in ran) == (TRIPS + 2) * COPIED
    schedules = Schedules(str(tmp_path), "v5e")
    counted = next(name for name in schedules.names if name.startswith("counted_loop"))
    assert schedules.cycles(counted) >= len(ran) > 0
    assert all(schedules.cycles(name) is None for name in schedules.names if name.startswith("nested_loops"))
    assert schedules.cycles("no_such_instruction") is None


@pytest.mark.tpu_compile
def test_a_kernel_that_does_not_fit_is_refused_with_the_memory_that_is_short():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    schedule = compile_builder(f"{KERNELS}:too_large", "v5e", schedules=False, mib=40)
    assert schedule.error is not None and schedule.short_of is not None
    space, wanted, there = schedule.short_of
    assert space == "vmem" and wanted >= 40 and there == 16
    assert "MiB short" in describe(schedule)


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.parametrize("builder", ["decode", "prefill", "mixed"])
def test_the_builders_of_attention_compile(builder):
    schedule = compile_builder(
        f"{BUILDERS}:{builder}", "v5e", schedules=False, impl="xla", seqs=4, context=512, page=16
    )
    assert schedule.error is None, schedule.error


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Used 18.32M of 15.75G hbm. Exceeded", ("hbm", 18.32, 15.75 * 1024)),
        ("Allocation (size=2097152) would exceed memory (size=1048576) :: #allocation0 space=smem", ("smem", 2, 1)),
        ("INVALID_ARGUMENT: Mosaic failed", None),
    ],
)
def test_the_words_of_the_compiler_for_too_little_memory(text, found):
    assert short_of(text) == found


HLO = """
%fused_move (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  ROOT %t = bf16[1024,1024]{0,1} transpose(%p), dimensions={1,0}
}

%fused_sum (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  %c = bf16[1024,1024]{1,0} copy(%p)
  ROOT %t = bf16[1024,1024]{1,0} add(%c, %c)
}

%fused_write (p: bf16[1024,1024], u: bf16[1,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  %u = bf16[1,1024]{1,0} parameter(1)
  %i = s32[] constant(0)
  ROOT %t = bf16[1024,1024]{1,0} dynamic-update-slice(%p, %u, %i, %i)
}

ENTRY %main (x: bf16[1024,1024], u: bf16[1,1024]) -> bf16[1024,1024] {
  %x = bf16[1024,1024]{1,0} parameter(0)
  %u = bf16[1,1024]{1,0} parameter(1)
  %copy.1 = bf16[1024,1024]{0,1} copy(%x)
  %copy.2 = bf16[8,1024]{0,1} copy(%x)
  %a = bf16[1024,1024]{1,0} fusion(%x), kind=kLoop, calls=%fused_move
  %b = bf16[1024,1024]{1,0} fusion(%x), kind=kLoop, calls=%fused_sum
  %c = bf16[1024,1024]{1,0} fusion(%x, %u), kind=kLoop, calls=%fused_write
  %r = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}) all-reduce-start(%a), to_apply=%add
  ROOT %d = bf16[1024,1024]{1,0} all-reduce(%a), to_apply=%add
}
"""


def test_large_moves_are_copies_and_fusions_of_nothing_else():
    kind = "bf16[1024,1024]"
    assert large_moves(HLO, MIB) == [(2 * MIB, "fusion of transpose", kind, 1), (2 * MIB, "copy", kind, 1)]
    assert len(large_moves(HLO, 2**10)) == 3
    nearer = HLO.replace("%copy.1 = bf16[1024,1024]{0,1}", "%copy.1 = bf16[1024,1024]{0,1:T(8,128)(2,1)S(1)}")
    assert large_moves(nearer, MIB)[1] == (2 * MIB, "copy, to or from VMEM", kind, 1)
    assert collectives(HLO) == {"all-reduce": 2}


def test_cycles_wait_for_results():
    matmul = "{ %1 = vmatmul.bf16.vlgmr.msra.gmra.mxu0 %v0 }"
    other = "{ %v3 = vadd.f32 %v1, %v2 }"
    pop = "{ %v9 = vpop.f32.mrf.mxu0 }"
    assert estimated_cycles([other] * 5, "v5e") == 5
    assert estimated_cycles([matmul, other, pop], "v5e") == 1 + 125
    assert estimated_cycles([matmul, *[other] * 200, pop], "v5e") == 202
    reduced = ["{ %3 = vmax.xlane.f32.xlu0 %v1 }", "{ %v4 = vpop.xlane.xlu0 %3 }"]
    assert estimated_cycles(reduced, "v5e") == 1 + 115


def test_the_units_bound_prefill_as_counted_by_hand():
    # 1,024 keys, 256 queries of 4 heads: 64 passes of 16 keys over 8 stripes of 128 queries, and as many of values.
    small = prefill_limits("v4", keys=1024, columns=1024, head_dim=128, value_dim=128, scales=False)
    assert small["MXU"] == 2 * 64 * 8 * 16 / 4
    # Keys fill half of a unit of 256 x 256, values with the weights as stationary operand all of it.
    large = prefill_limits("v6e", keys=1024, columns=1024, head_dim=128, value_dim=128, scales=False)
    assert large["MXU"] == (64 * 4 + 8 * 4 * 4) * 8 / 2
    assert large["EUP"] == 1024 == small["EUP"] / 2
    # 4.5 operations for each of 1,024 registers of scores, exponentials among them, and 5 for each of 128 of outputs;
    # 5.5 where the scores are scaled, which bound a v6e then.
    scaled = prefill_limits("v6e", keys=1024, columns=1024, head_dim=128, value_dim=128, scales=True)
    assert max(large, key=large.get) == "MXU" and large["VALU"] == (4.5 * 1024 + 5 * 128) / 4
    assert max(scaled, key=scaled.get) == "VALU" and scaled["VALU"] == (5.5 * 1024 + 5 * 128) / 4
    assert max(small, key=small.get) == "MXU"
