"""Bundles that a schedule runs, on schedules in the form in which libtpu writes them."""

from levanter_infer.plan.bundles import computed, executed, split_bundles

LOOP = """
     0   :  { %s1_s0 = smov.u32 0 /* copy;; of a */ }
   0x1   :  { %s2_s1 = smov.u32 4294967295  ;;  %v1_v0 = vld [vmem:[#allocation0]] } /* Start region 3 */
   0x2 LB: > { %s5_s2 = sadd.s32 1, %s3_s0  ;;  %s3_s0 = sphi %s1_s0, %s9_s0 /* phi copy */ }
   0x3   : > { %p1_p0 = scmp.ge.s32.totalorder %s3_s0, 1  ;;  %p2_p1 = scmp.lt.s32.totalorder %s3_s0, LAST }
   0x4   : > { %p3_p2 = pnand %p2_p1, %p1_p0 }
   0x5   : > { %7 = sbr.rel (%p3_p2) target = $region5 }
   0x6   : > { %8 = vst [vmem:[#allocation0]] %v1_v0 }
   0x7   : > {}
   0x8   : > {}
   0x9   : > {} /* End region 3 */
   0xa   : > { %9 = vst [vmem:[#allocation0]] %v1_v0 } /* Start region 4 */
   0xb   : > { %10 = vst [vmem:[#allocation0]] %v1_v0 } /* End region 4 */
   0xc PF: > { %s9_s0 = smov.u32 %s5_s2 } /* Start/End empty region 5 */
   0xd   : > { %p9_p5 = scmp.ge.s32.totalorder %s9_s0, 4 /* loop exit test */ }
   0xe   :  { %11 = sbr.rel (!%p9_p5) target = $region6 }
   0xf   :  {}
  0x10   :  {}
  0x11   :  {}
  0x12   :  { %12 = vst [vmem:[#allocation0]] (%p9_p5), %v1_v0 }
  0x13   :  {}
"""
LOOP = LOOP.replace("0x2 LB: > {", "0x2 LB: > {", 1).replace("phi copy */ }", "phi copy */ } /* Start region 6 */")
"""Four trips, of which the first and those from LAST on skip 0xa and 0xb; branches have four delay slots."""


def ran(schedule: str) -> list[int] | None:
    return executed(split_bundles(schedule))


def test_trips_and_skipped_stretches_are_counted():
    found = ran(LOOP.replace("LAST", "3"))
    assert found is not None
    assert found[:2] == [0, 1] and found[-1] == 0x13
    assert [found.count(address) for address in (0x2, 0x5, 0x9, 0xA, 0xB, 0xC, 0x12)] == [4, 4, 4, 2, 2, 4, 4]


def test_what_data_decide_counts_as_run():
    found = ran(LOOP.replace("%s3_s0, LAST", "%s77_s20, 3"))
    assert found is not None and [found.count(address) for address in (0x9, 0xA, 0x12)] == [4, 3, 4]


def test_a_loop_whose_end_data_decide_has_no_count():
    assert ran(LOOP.replace("LAST", "3").replace("%s9_s0, 4 /*", "%s9_s0, %s77_s20 /*")) is None


def test_integers_without_a_sign_are_compared_as_such():
    assert [computed(f"scmp.lt.{form}", [5, -1]) for form in ("s32", "u32")] == [False, True]
    assert computed("smin", [-1, -2]) == -2 and computed("smin", [-1, 3]) == 3
    assert computed("scmp.lt.s32", [5, None]) is None


def test_registers_wrap_and_keep_their_value_where_a_predicate_does_not_hold():
    schedule = """
     0   :  { %s1_s0 = smov.u32 4294967295  ;;  %s2_s1 = smov.u32 2 }
   0x1   :  { %s3_s0 = sadd.s32 1, %s1_s0  ;;  %s4_s1 = smov.u32 %s1_s0 }
   0x2   :  { %p1_p0 = scmp.eq.s32.totalorder %s3_s0, 0  ;;  %p2_p1 = scmp.lt.s32.totalorder %s4_s1, 0 }
   0x3   :  { %s5_s0 = smov.u32 (!%p1_p0, %s3_s0), 7  ;;  %s6_s1 = smov.u32 (%p2_p1, %s4_s1), 9 }
   0x4   :  { %p3_p2 = scmp.ne.s32.totalorder %s5_s0, 0  ;;  %p4_p3 = scmp.ne.s32.totalorder %s6_s1, 9 }
   0x5   :  { %p5_p4 = por %p4_p3, %p3_p2 }
   0x6   :  { %7 = sbr.rel (%p5_p4) target = $region0 } /* Start region 0 */
   0x7   :  {}
"""
    assert ran(schedule) == list(range(8))  # a branch back to itself is not taken


SPILLED = """
     0   :  { %s1_s0 = smov.u32 0 }
   0x1   :  { %2 = sst [smem:[#allocation7_spill]] %s1_s0 }
   0x2   : > { %v1_v0 = vld [vmem:[#allocation0]] } /* Start region 3 */
   0x3   : > { %s3_s0 = sld [smem:[#allocation7_spill]] }
   0x4   : > { %s4_s0 = sadd.s32 1, %s3_s0 }
   0x5   : > { %5 = sst [smem:[#allocation7_spill]] %s4_s0  ;;  %p6_p1 = scmp.ge.s32.totalorder %s4_s0, 5 }
   0x6   :  { %7 = sbr.rel (!%p6_p1) target = $region3 }
   0x7   :  {}
   0x8   :  {}
   0x9   :  {}
   0xa   :  {} /* End region 3 */
"""


def test_a_counter_that_stands_in_scalar_memory_is_followed():
    """The compiler spills the counters of long loops; an array, which a copy may fill, is not known."""
    found = ran(SPILLED)
    assert found is not None and [found.count(address) for address in (0x1, 0x2, 0xA)] == [1, 5, 5]
    assert ran(SPILLED.replace("[#allocation0]", "[#allocation7_spill + $0x1]")) is None


def test_pointers_into_one_array_are_compared():
    found = ran(
        LOOP.replace("LAST", "3")
        .replace("%s1_s0 = smov.u32 0 /*", "%s1_s0 = inlined_call_operand.vmem [shape: s32[8], index: 0] /*")
        .replace("sadd.s32 1, %s3_s0", "scalar_lea.vmem %s3_s0, 1")
    )
    assert found is not None and [found.count(address) for address in (0x2, 0x5, 0xC)] == [4, 4, 4]


def test_a_loop_of_xla_whose_end_data_decide_runs_once_at_least():
    unknown = LOOP.replace("LAST", "3").replace("%s9_s0, 4 /*", "%s9_s0, %s77_s20 /*")
    found = executed(split_bundles(unknown), once=True)
    assert found is not None and found.count(0x2) == 1
