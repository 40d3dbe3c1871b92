"""Launches of a step, from texts in the form in which XLA writes a round for GPUs, and of a round that is compiled."""

import json
from pathlib import Path

import pytest

from levanter_infer.kernels.gpu import linear
from levanter_infer.plan.compiled import NoCompiler, compile_programs, environment_for
from levanter_infer.plan.launches import PARTS, step_launches
from levanter_infer.plan.spec import EngineSpec
from levanter_infer.plan.targets import GPUS, parse_target
from levanter_infer.runtime import gpu_compiler
from levanter_infer.runtime.gpu_compiler import Written

ROOT = Path(__file__).resolve().parents[2]

LAUNCHES = """\
001: kCopy [source | sink] kCopy
002: kWhile [prev=001 (1) | sink]
condition:
    003: kCustomKernel [source | sink] goes_on grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        004: kCustomKernel [source | sink] pack grid: [1, 1, 1]
    005: kWhile [source | sink]
condition:
        No thunks.      body:
        006: kWhile [source | sink]
condition:
            007: kCustomKernel [source | sink] compare grid: [1, 1, 1]
          body:
            008: kDynamicSliceFusion [source | sink] params=1, results=1
                009: kCopy [source | sink] kCopy
            000: kCommandBuffer [source | sink]
                010: kCustomKernel [source | sink] stacked_matmul__1 grid: [1, 1, 1]
                011: kCustomKernel [source | sink] attend_split grid: [1, 1, 1]
                012: kCustomKernel [source | sink] input_scatter_fusion grid: [1, 1, 1]
    013: kWhile [source | sink]
condition:
        No thunks.      body:
        014: kCustomKernel [source | sink] other_bucket grid: [1, 1, 1]
    015: kWhile [source | sink]
condition:
        No thunks.      body:
        016: kCustomKernel [source | sink] gemm_fusion_dot_general grid: [1, 1, 1]
    017: kConditional [source | sink]
      false_branch:
        018: kCustomKernel [source | sink] draw grid: [1, 1, 1]
        019: kCustomKernel [source | sink] draw_2 grid: [1, 1, 1]
      true_branch:
        No thunks.
    020: kWhile [source | sink]
condition:
        No thunks.      body:
        021: kCustomKernel [source | sink] evict grid: [1, 1, 1]
"""
PATHS = {
    2: "while",
    4: "while/body/schedule/add",
    5: "while/body/forward_8/while",
    6: "while/body/forward_8/while/body/while",
    8: "while/body/forward_8/while/body/while/body/dynamic_slice",
    10: "while/body/forward_8/while/body/while/body/pallas_call",
    11: "while/body/forward_8/while/body/while/body/attention/pallas_call",
    12: "while/body/forward_8/while/body/while/body/kv_write/scatter",
    13: "while/body/forward_4/while",
    14: "while/body/forward_4/while/body/add",
    15: "while/body/sampling/head_8/while",
    16: "while/body/sampling/head_8/while/body/dot_general",
    17: "while/body/sampling/processed/cond",
    18: "while/body/sampling/processed/cond/branch_1_fun/exp",
    20: "while/body/schedule/while",
}


def written(launches: str = LAUNCHES) -> Written:
    names, hlo = [], []
    for number in range(1, 22):
        names.append(f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "i.{number}"')
        names.append(f"    thunk_id: {number}\n  }}\n}}")
        trips = ', backend_config={"known_trip_count":{"n":"3"}}' if number == 6 else ""
        op_name = f', metadata={{op_name="jit(one_round)/{PATHS[number]}"}}' if number in PATHS else ""
        hlo.append(f"  %i.{number} = f32[8] op(%x){op_name}{trips}")
    return Written(launches, "\n".join(names), "\n".join(hlo))


def counted(launches: str = LAUNCHES) -> dict:
    found = step_launches(written(launches), max_seqs=8, buckets=[4, 8])
    return {(each.sampled, each.has_chunks): each for each in found}


def test_a_step_runs_its_bucket_its_head_and_the_branches_that_are_taken():
    greedy = counted()["greedy", False]
    assert greedy.kernels == dict(
        zip(PARTS, (3 + 1, 3, 3, 3, 0, 2), strict=True)  # matmuls of 3 layers and the head, …, and goes_on, pack
    )
    assert (greedy.total, greedy.layer_kernels) == (15, 4)
    assert counted()["temperature", False].kernels["sampling"] == 2


def test_the_host_waits_for_what_no_graph_decides():
    greedy = counted()["greedy", False]
    # the loop over steps; forward_8, head_8: two each; forward_4, evictions; the branch. It counts layers itself.
    assert (greedy.host_conditions, greedy.graph_conditions) == (1 + 2 + 2 + 1 + 1 + 1, 0)
    assert greedy.host_launches == 2 + 3 * 2 + 1  # goes_on and the first graph; a copy and a graph a layer; the head


def test_a_round_in_one_graph_leaves_nothing_to_the_host():
    lines = [f"    {line}" if line != "condition:" else line for line in LAUNCHES.splitlines() if "Buffer" not in line]
    lines = [line.replace("No thunks.", "No thunks.    ") for line in lines]
    lines = [line[4:] if any(f" {n:03}:" in line for n in (4, 10, 11, 12)) else line for line in lines]
    greedy = counted("\n".join(["000: kCommandBuffer [source | sink]", *lines]))["greedy", False]
    assert (greedy.host_launches, greedy.host_conditions) == (0, 0)
    assert greedy.graph_conditions == 8 + 3 + 1  # that of the layers too
    assert greedy.total == 15 + 4  # and its kernel, four times


BRANCHES = """\
001: kWhile [source | sink]
condition:
    002: kCustomKernel [source | sink] goes_on grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        003: kCustomKernel [source | sink] pack grid: [1, 1, 1]
        004: kConditional [source | sink]
          false_branch:
            005: kCustomKernel [source | sink] evict grid: [1, 1, 1]
          true_branch:
            No thunks.
    006: kConditional [source | sink]
      branch_0:
        No thunks.
      branch_1:
        007: kCustomKernel [source | sink] other_bucket grid: [1, 1, 1]
      branch_2:
        008: kCustomKernel [source | sink] stacked_matmul grid: [1, 1, 1]
        009: kCustomKernel [source | sink] stacked_matmul__1 grid: [1, 1, 1]
"""
BRANCH_PATHS = {
    1: "while",
    3: "while/body/schedule/add",
    4: "while/body/schedule/cond",
    5: "while/body/schedule/cond/branch_1_fun/add",
    6: "while/body/cond",
    7: "while/body/cond/branch_1_fun/forward_4/add",
    8: "while/body/cond/branch_2_fun/forward_8/while/body/pallas_call",
    9: "while/body/cond/branch_2_fun/forward_8/while/body/pallas_call",
}


@pytest.mark.parametrize(("seqs", "kernels"), [(8, {"matmuls": 2, "control": 2}), (4, {"the rest of layers": 1})])
def test_of_the_branches_between_buckets_that_of_the_step_counts(monkeypatch, seqs, kernels):
    monkeypatch.setattr(__name__ + ".PATHS", BRANCH_PATHS)
    greedy = step_launches(written(BRANCHES), seqs, [4, 8])[0]
    assert {part: greedy.kernels[part] for part in kernels} == kernels
    assert (greedy.host_conditions, greedy.graph_conditions) == (2, 1)  # the loop over steps and the buckets; evictions


NESTED = """\
001: kWhile [source | sink]
condition:
    No thunks.  body:
    005: kWhile [source | sink]
condition:
        No thunks.      body:
        013: kWhile [source | sink]
condition:
            No thunks.          body:
            006: kWhile [source | sink]
condition:
                No thunks.              body:
                007: kCustomKernel [source | sink] state grid: [1, 1, 1]
        008: kCustomKernel [source | sink] stacked_matmul grid: [1, 1, 1]
"""


def test_a_counted_loop_in_one_that_does_not_run_is_no_loop_over_layers(monkeypatch):
    inner = "while/body/forward_8/while/body/while"
    paths = {1: "while", 5: "while/body/forward_8/while", 13: inner, 6: f"{inner}/body/while"}
    monkeypatch.setattr(__name__ + ".PATHS", paths)
    greedy = step_launches(written(NESTED), 8, [8])[0]
    assert (greedy.total, greedy.layer_kernels) == (1, 0)


def test_another_text_is_refused():
    with pytest.raises(ValueError, match="has no forward_16"):
        step_launches(written(), max_seqs=16, buckets=[16])
    with pytest.raises(ValueError, match="is not understood"):
        step_launches(written("    001: kCopy [source | sink] kCopy"), max_seqs=8, buckets=[8])


def test_every_gpu_of_a_plan_is_described():
    for chip in GPUS.values():
        text = gpu_compiler.describe(chip.kind, chip.compute_capability, chip.memory_bytes, chip.memory_gbps)
        assert f"memory_bandwidth: {int(chip.memory_gbps * 1e9)}\n" in text
        assert f"optin: {linear.shared_memory(float(chip.compute_capability))}\n" in text  # as the kernels' tiles have
    with pytest.raises(ValueError, match="7.5 is not known here; expected 8.0"):
        gpu_compiler.describe("T4", "7.5", 1, 1)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(gpu_compiler, "why_missing", lambda: "no plugin")
    with pytest.raises(NoCompiler, match="no plugin, or say --no-compile"):
        environment_for(parse_target("h100"))


@pytest.mark.skipif(gpu_compiler.why_missing() is not None, reason=f"needs {gpu_compiler.NEEDS}")
def test_launches_of_a_round_for_an_h100():
    shape = json.loads((ROOT / "configs" / "shapes" / "llama-3.2-1b.json").read_text()) | {"num_hidden_layers": 3}
    engine = {"max_seqs": 16, "max_seq_len": 512, "max_step_tokens": 512, "max_pages": 1024}
    program = compile_programs(EngineSpec("h100", shape, "bfloat16", engine, {"model": 1}), timeout_s=300)[0]
    assert program.error is None and program.no_budget is None
    pool = "bf16[3,1024,"
    assert not [move for move in program.copies if str(move[2]).startswith(pool)]  # no branch copies it
    for each in program.launches:
        assert each.host_conditions <= (12 if each.sampled == "penalties" else 7)
        assert each.kernels["matmuls"] == 3 * 4 + 1
        assert each.kernels["KV write"] == 3
        # Four matmuls, two norms, the write, the counter; attention in one lane, or in two with a launch for splits.
        assert each.layer_kernels <= (11 if each.has_chunks else 10)
    sampling = {each.sampled: each.kernels["sampling"] for each in program.launches}
    assert sampling["top_p"] == sampling["top_k"] == sampling["temperature"] <= sampling["greedy"] + 8  # no sort
    assert sampling["penalties"] > sampling["top_p"]
