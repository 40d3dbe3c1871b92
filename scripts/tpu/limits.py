"""Limits of the prefill kernel by the units of a TPU: the bundles of a KV block that each unit needs at least.

Counted are the instructions that the algorithm cannot do without, for scores f32[keys, columns]: matmuls with keys and
with values, one exponential for each score, and for each register of 1,024 scores its maximum, subtraction and sum, its
scale unless queries hold it, half a conversion to bfloat16, one load and one store; results of matmuls and powers that
are taken out of queues; one multiplication of the outputs by the factor, and additions to them. An exponential takes a
slot of the vector ALU too, because it is issued there: the counts of schedules add up only with it. Not counted: masks,
copies of registers, transposition of values, latencies, the loop around.
"""

from dataclasses import dataclass

LANES, SUBLANES = 128, 8


@dataclass(frozen=True)
class Units:
    """One core; slots per bundle as libtpu prints them with its schedules."""

    mxus: int
    mxu_size: int
    """Rows and columns of a matrix unit."""
    mxu_cycles: int
    """Cycles in which one matrix unit takes 16 rows of bfloat16."""
    valu: int
    eup_cycles: int
    """Bundles that one exponential of a register occupies its slot."""
    pops: int
    loads: int
    stores: int


UNITS = {
    "v4": Units(mxus=4, mxu_size=128, mxu_cycles=16, valu=2, eup_cycles=2, pops=2, loads=1, stores=1),
    "v5e": Units(mxus=4, mxu_size=128, mxu_cycles=16, valu=4, eup_cycles=1, pops=2, loads=3, stores=1),
    "v5p": Units(mxus=4, mxu_size=128, mxu_cycles=16, valu=4, eup_cycles=1, pops=2, loads=3, stores=1),
    "v6e": Units(mxus=2, mxu_size=256, mxu_cycles=8, valu=4, eup_cycles=1, pops=2, loads=3, stores=2),
}


def prefill_limits(
    generation: str, *, keys: int, columns: int, head_dim: int, value_dim: int, scales: bool
) -> dict[str, float]:
    """Bundles that one group of heads needs for a KV block at least, by unit.

    Args:
        columns: pairs of query and head.
        head_dim, value_dim: numbers of a key and of a value, as stored: multiples of 128.
        scales: whether scores are multiplied by their scale, which the queries do not hold.
    """
    units = UNITS[generation]
    size = units.mxu_size
    scores = keys * columns / (LANES * SUBLANES)
    outputs = value_dim * columns / (LANES * SUBLANES)
    passes = -(-keys // size)  # results of the second matmul are added once for each
    streamed = keys * -(-head_dim // size) + value_dim * passes
    return {
        "MXU": streamed / 16 * -(-columns // size) * units.mxu_cycles / units.mxus,
        "VALU": ((4.5 + scales) * scores + outputs * (passes + 1)) / units.valu,
        "EUP": scores * units.eup_cycles,
        "pops": (2 * scores + outputs * passes) / units.pops,
        "loads": (scores + outputs) / units.loads,
        "stores": (scores + outputs) / units.stores,
    }
