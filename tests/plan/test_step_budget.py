"""Budgets of a step, from a text in the form in which the TPU compiler writes a round."""

import pytest

from levanter_infer.plan import step_budget as parts
from levanter_infer.plan.step_budget import step_budgets


def config(cycles: int) -> str:
    return f'backend_config={{"flag_configs":[],"estimated_cycles":"{cycles}"}}'


def instruction(name: str, operation: str, scope: str, cycles: int | None = None, more: str = "") -> str:
    found = f'  %{name} = f32[8]{{0}} {operation}(%x){more}, metadata={{op_name="jit(one_round)/while/body/{scope}"}}'
    return found if cycles is None else f"{found}, {config(cycles)}"


def loop(name: str, scope: str, body: str) -> str:
    return instruction(name, "while", f"{scope}/while", more=f", condition=%{body}_condition, body=%{body}")


def computation(name: str, *lines: str) -> str:
    return "\n".join([f"%{name} (x: f32[8]) -> f32[8] {{", *lines, "}"])


def counts_to(name: str, trips: int) -> str:
    limit = f"  %limit.{trips} = s32[]{{:T(128)}} constant({trips})"
    return computation(f"{name}_condition", limit, f"  ROOT %lt = pred[] compare(%i, %limit.{trips}), direction=LT")


def asks(name: str) -> str:
    return computation(f"{name}_condition", "  ROOT %more = pred[] get-tuple-element(%x), index=0")


ROUND = "\n\n".join(
    [
        computation("dots", "  ROOT %d = f32[8] convolution(%x, %x)"),
        computation("moves", "  ROOT %m = f32[8] transpose(%x)"),
        counts_to("layers", 3),
        computation(
            "layers",
            instruction("a", "fusion", "forward_8/while/body/dot_general", 100, ", calls=%dots"),
            instruction("b", "fusion", "forward_8/while/body/transpose", 7, ", calls=%moves"),
            instruction("c", "add", "forward_8/while/body/add", 5),
            instruction("d", "slice", "forward_8/while/body/attention/slice", 11),
            instruction("e", "pad", "forward_8/while/body/kv_write/pad", 13),
            f"  %pad.2 = f32[8]{{0}} pad(%x), {config(1)}",  # XLA has lost where it comes from
            instruction("f", "custom-call", "attention/pallas_call", more=', custom_call_target="tpu_custom_call"'),
            instruction("f2", "custom-call", "forward_8/while/body/grouped_matmul/pallas_call", 41),
            instruction("g", "all-reduce", "forward_8/while/body/psum"),
            loop("h", "forward_8/while/body/attention/chunks", "chunks"),
        ),
        asks("chunks"),
        computation("chunks", instruction("i", "add", "forward_8/while/body/attention/chunks/while/body/add", 17)),
        asks("forward"),
        computation("forward", loop("j", "forward_8/while/body", "layers")),
        asks("other"),
        computation("other", instruction("k", "add", "forward_4/while/body/add", 1000)),
        asks("head_4"),
        computation("head_4", instruction("t", "dot", "sampling/head_4/while/body/dot_general", 1000)),
        asks("head_8"),
        computation("head_8", instruction("u", "dot", "sampling/head_8/while/body/dot_general", 37)),
        asks("evict_one"),
        computation("evict_one", instruction("v", "add", "schedule/while/body/while/body/add", 2)),
        asks("evict"),
        computation(
            "evict",
            instruction("l", "add", "schedule/while/body/add", 19),
            loop("w", "schedule/while/body", "evict_one"),
        ),
        computation("searched", instruction("y", "sort", "sampling/processed/drawn/filtered/found/cond/search", 5000)),
        computation("found", instruction("z", "copy", "sampling/processed/drawn/filtered/found/cond/copy", 3)),
        computation(
            "drawn",
            instruction("m", "exponential", "sampling/processed/drawn/cond/branch_1_fun/exp", 23),
            instruction(
                "x",
                "conditional",
                "sampling/processed/drawn/cond/branch_1_fun/filtered/cond/branch_1_fun/found/cond",
                more=", true_computation=%found, false_computation=%searched",
            ),
        ),
        computation("not_drawn", instruction("n", "copy", "sampling/processed/drawn/cond/branch_0_fun/copy", 29)),
        computation(
            "steps",
            loop("o", "forward_8", "forward"),
            loop("p", "forward_4", "other"),
            loop("p2", "sampling/head_4", "head_4"),
            loop("p3", "sampling/head_8", "head_8"),
            loop("q", "schedule", "evict"),
            instruction("r", "add", "append/add", 31),
            instruction(
                "s", "conditional", "sampling/processed/drawn/cond", more=", branch_computations={%not_drawn, %drawn}"
            ),
        ),
    ]
)


def unscheduled(name: str) -> None:
    """No instruction has a schedule."""


def test_a_step_is_what_its_loops_and_branches_execute():
    budgets = {(each.has_chunks, each.sampled): each for each in step_budgets(ROUND, 5, (4, 8), unscheduled)}
    greedy = budgets[False, "greedy"]
    layers = {parts.MATMULS: 337 + 3 * 41, parts.MOVES: 24, parts.LAYERS: 15, parts.ATTENTION: 33, parts.KV_WRITE: 39}
    assert greedy.cycles == {**layers, parts.SAMPLING: 29, parts.CONTROL: 31}
    assert greedy.total == sum(greedy.cycles.values()) and greedy.expected == greedy.cycles
    assert greedy.when_needed == {"schedule": 21}
    assert greedy.kernels == {"attention": 3} and not greedy.once and greedy.collectives == {"all-reduce": 3}
    assert budgets[False, "top_k"].cycles[parts.SAMPLING] == 23 + 3
    assert budgets[True, "greedy"].cycles[parts.ATTENTION] == 33 + 3 * 17


def test_a_schedule_goes_before_what_the_compiler_expected():
    """`y2` and `z2` compute the same as `c`, whose schedule is theirs; `z3` does not."""
    more = [instruction(name, "add", "append/add", 1000) for name in ("y2", "z2")]
    more.append(instruction("z3", "add", "append/add", 1000).replace("f32[8]", "f32[16]"))
    hlo = ROUND.replace("%steps (x: f32[8]) -> f32[8] {", "\n".join(["%steps (x: f32[8]) -> f32[8] {", *more]))
    assert hlo != ROUND
    greedy = step_budgets(hlo, 5, (4, 8), {"c": 2, "a": 60, "e": 0, "f": 9}.get)[0]
    assert greedy.cycles[parts.MATMULS] == 3 * (60 + 41) + 37
    assert greedy.cycles[parts.CONTROL] == 3 * 2 + 1000  # `r`, `y2` and `z2`, and `z3`
    assert greedy.expected[parts.CONTROL] == 1000 and greedy.expected[parts.MATMULS] == 3 * 41 + 37
    assert greedy.cycles[parts.KV_WRITE] == 0
    assert greedy.cycles[parts.ATTENTION] == 3 * (11 + 9) and not greedy.kernels


def test_copies_to_and_from_hbm_outside_of_layers_are_counted_in_bytes_with_their_padding():
    lines = [
        "  %p = (f32[8,100]{1,0:T(8,128)S(1)}, f32[8,100]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)",
        "  %s = ((bf16[64,256]{1,0:T(8,128)(2,1)}), bf16[16,256]{1,0:T(8,128)(2,1)S(1)}, s32[]) slice-start(%x)",
        "  %q = s32[100,3]{0,1:T(8,128)} copy(%x)",
        "  %r = s32[100]{0:T(1024)} copy(%x)",
        "  %v = (f32[8]{0:T(128)S(1)}, f32[8]{0:T(128)S(1)}, u32[]{:S(2)}) copy-start(%x)",
        "  %w = f32[8]{0:T(128)S(1)} copy(%x)",
    ]
    in_a_layer = lines[0].replace("%p", "%p2")
    hlo = ROUND.replace("%steps (x: f32[8]) -> f32[8] {", "\n".join(["%steps (x: f32[8]) -> f32[8] {", *lines]))
    hlo = hlo.replace("%layers (x: f32[8]) -> f32[8] {", "\n".join(["%layers (x: f32[8]) -> f32[8] {", in_a_layer]))
    hlo = hlo.replace("%evict (x: f32[8]) -> f32[8] {", "\n".join(["%evict (x: f32[8]) -> f32[8] {", in_a_layer]))
    pairs = zip(step_budgets(hlo, 5, (4, 8), unscheduled), step_budgets(ROUND, 5, (4, 8), unscheduled), strict=True)
    added = {more.copied_bytes - fewer.copied_bytes for more, fewer in pairs}
    assert added == {8 * 128 * 4 + 16 * 256 * 2 + 8 * 128 * 4 + 1024 * 4}


def test_a_step_in_blocks_goes_through_the_forward_and_the_head_as_often_as_it_has_blocks():
    hlo = ROUND.replace(loop("p3", "sampling/head_8", "head_8") + "\n", "")
    assert hlo != ROUND
    budgets = step_budgets(hlo, 5, (12,), unscheduled, block_tokens=4)
    for budget in budgets:
        blocks = 3 if budget.has_chunks else 2
        assert budget.bucket == 4 * blocks
        assert budget.cycles[parts.LAYERS] == 1000 * blocks
        assert budget.cycles[parts.MATMULS] == 2 * 1000  # the head, of five rows
        assert budget.cycles[parts.CONTROL] == 31


def test_a_text_without_estimates_is_refused():
    with pytest.raises(ValueError, match="no estimates of cycles"):
        step_budgets(computation("steps", loop("o", "forward_8", "forward")), 8, (8,), unscheduled)


def test_a_program_without_the_bucket_is_refused():
    with pytest.raises(ValueError, match="no loop of forward_16"):
        step_budgets(ROUND, 16, (16,), unscheduled)


def test_of_the_branches_of_the_head_a_step_takes_that_for_its_rows():
    heads = "\n".join([loop("p2", "sampling/head_4", "head_4"), loop("p3", "sampling/head_8", "head_8")])
    branches = ", branch_computations={%not_drawn, %head_4, %head_8}"
    hlo = ROUND.replace(heads, instruction("p2", "conditional", "sampling/head/cond", more=branches))
    hlo = hlo.replace("/head_4/while", "/head/cond/branch_1_fun/head_4").replace(
        "/head_8/while", "/head/cond/branch_2_fun/head_8"
    )
    assert hlo.count("/head/cond") == 3
    for rows, cycles in ((3, 1000), (5, 37)):
        assert step_budgets(hlo, rows, (4, 8), unscheduled)[4].cycles[parts.MATMULS] == 300 + 3 * 41 + cycles
