"""Programs with experts, as compiled for a TPU that is not there."""

from pathlib import Path

import pytest
from scripts.tpu_schedule import compile_builder

BUILDERS = Path(__file__).resolve().parents[1] / "scripts" / "tpu_builders.py"
MATRIX = 128 * 768 * 2048 * 2
"""Bytes of one matrix of all experts of a layer."""


@pytest.mark.slow
def test_a_round_copies_no_matrices_of_experts():
    sizes = dict(model="30b-a3b", layers=2, seqs=8, context=1024, tokens=64)
    schedule = compile_builder(f"{BUILDERS}:program", "v5e", schedules=False, **sizes)
    assert schedule.error is None, schedule.error
    assert schedule.argument_bytes > 2 * 3 * MATRIX
    # What XLA keeps in VMEM, of which a v5e has 128 MiB, counts as temporaries too: here a layer's other weights.
    assert schedule.temporary_bytes < MATRIX / 2 and all(size < MATRIX / 4 for size, *_ in schedule.moves)


@pytest.mark.slow
def test_stacks_filled_up_to_lanes_are_read_as_they_are_stored():
    """Experts of gpt-oss, on each of four chips: 2,880 inputs are no multiple of 128, nor are 720."""
    for outs, ins in ((720, 2944), (2880, 768)):
        sizes = dict(num_experts=128, chosen=4, outs=outs, ins=ins)
        schedule = compile_builder(f"{BUILDERS}:experts", "v5p", schedules=False, **sizes)
        assert schedule.error is None, schedule.error
        assert schedule.argument_bytes > 2 * 128 * outs * ins * 2 > 100 * schedule.temporary_bytes


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, dict(outs=2048, ins=768)], ids=["gate", "down"])
def test_a_step_of_64_tokens_is_bound_by_the_matrices_that_it_reads(sizes):
    """The cycles of a visit, modelled, are fewer than HBM takes for the block of the matrix that it reads."""
    for generation, bytes_per_cycle in {"v4": 1230 / 1.05 / 2, "v5e": 820 / 1.5, "v5p": 2765 / 1.75 / 2}.items():
        kernel = compile_builder(f"{BUILDERS}:experts", generation, **sizes).kernel("grouped_matmul")
        loop = kernel.main_loop()
        assert loop is not None and loop.cycles < MATRIX / 128 / 2 / bytes_per_cycle, generation
