"""Cycles of a run of bundles with waits for results: a replay of in-order issue.

One bundle issues per cycle. Results of the matrix units (MXU), of the cross-lane unit (XLU: reductions over lanes) and
of the transcendental unit (EUP) come back through queues, and the instruction that pops a queue stalls the core until
its entry is there; the printed schedule does not show that. Not modelled: waits for DMAs and semaphores, bank conflicts
of VMEM, the length of the queues.
"""

import collections
import dataclasses
import re
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Cycles, from the critical paths that the scheduler of libtpu 0.0.51 prints."""

    eup: int
    """Cycles from issue to result."""
    xlu: int
    """Cycles from issue to result of a reduction over lanes."""
    xlu_issue: int
    """Cycles between two reductions on one unit."""
    mxu: int
    """Cycles from issue to the first result."""
    mxu_rows: int
    """Cycles between groups of 8 rows of one matmul."""
    push: int
    """Cycles between two pushes of weights."""
    push_transposed: int
    """Cycles between two pushes of transposed 16-bit weights."""


LATENCIES = {
    "v4": Latencies(eup=8, xlu=79, xlu_issue=8, mxu=83, mxu_rows=8, push=8, push_transposed=8),
    "v5e": Latencies(eup=7, xlu=115, xlu_issue=8, mxu=125, mxu_rows=8, push=4, push_transposed=8),
    "v5p": Latencies(eup=9, xlu=115, xlu_issue=8, mxu=125, mxu_rows=8, push=4, push_transposed=8),
    "v6e": Latencies(eup=14, xlu=137, xlu_issue=4, mxu=192, mxu_rows=4, push=4, push_transposed=8),
}
_INSTRUCTION = re.compile(r"%(\w+) = (v[a-z]\w*)((?:\.[\w\[\]]+)*)((?: %\w+)*)")
_UNIT = re.compile(r"\.((?:mxu|xlu)\d)")
_EUP = ("vexp2", "vpow2", "vrcp", "vtanh", "vlog2", "vrsqrt", "verf", "vsin", "vcos")
_NARROW = re.compile(r"\.(?:bf16|f8|s8|u8|s4)")


@dataclasses.dataclass(frozen=True)
class _Instruction:
    result: str
    name: str
    form: str
    operands: tuple[str, ...]
    unit: str | None

    @property
    def row_groups(self) -> int:
        """Groups of 8 rows that one matmul takes: two where two rows share a register line."""
        return 2 if _NARROW.search(self.form) else 1


def _instructions(bundle: str) -> list[_Instruction]:
    found = []
    for result, name, form, operands in _INSTRUCTION.findall(bundle):
        unit = _UNIT.search(form)
        found.append(_Instruction(result, name, form, tuple(operands.split()), unit and unit[1]))
    return found


class _Core:
    """Cycle, from the start, until which each unit is busy."""

    def __init__(self, latencies: Latencies, pops_per_group: dict[str | None, float]):
        self.latencies, self._pops_per_group = latencies, pops_per_group
        self.now = 0
        self._busy: collections.Counter = collections.Counter()  # units
        self._pushed: collections.Counter = collections.Counter()  # when the weights of an MXU are complete
        self._ready: dict[str, int] = {}  # queued results of EUP and XLU, by what issued them
        self._matmul: dict[str | None, list[int]] = collections.defaultdict(list)  # when each group is ready
        self._popped: collections.Counter = collections.Counter()

    def issue(self, instruction: _Instruction) -> None:
        latencies, unit, name = self.latencies, instruction.unit, instruction.name
        if name.startswith("vmatmul"):
            start = max(self.now, self._busy[unit])
            if "vlgmr" in instruction.form:  # begins to use the weights that were pushed
                start = max(start, self._pushed[unit])
            groups = instruction.row_groups
            self._busy[unit] = start + groups * latencies.mxu_rows
            self._matmul[unit] += [start + latencies.mxu + i * latencies.mxu_rows for i in range(groups)]
        elif name.startswith("vmatpush"):
            slow = "xpose" in instruction.form and instruction.row_groups == 2
            self._pushed[unit] = max(self.now, self._pushed[unit])
            self._pushed[unit] += latencies.push_transposed if slow else latencies.push
        elif name == "vpop" and unit is not None and unit.startswith("mxu"):
            group = int(self._popped[unit] / self._pops_per_group.get(unit, 1))
            self._popped[unit] += 1
            if group < len(self._matmul[unit]):
                self.now = max(self.now, self._matmul[unit][group])
        elif name == "vpop":
            self.now = max(self.now, *(self._ready.get(operand[1:], 0) for operand in instruction.operands), 0)
        elif ".xlane." in instruction.form:
            start = max(self.now, self._busy[unit])
            self._busy[unit] = start + latencies.xlu_issue
            self._ready[instruction.result] = start + latencies.xlu
        elif name in _EUP:
            self._ready[instruction.result] = self.now + latencies.eup

    @property
    def idle_at(self) -> int:
        return max([self.now, *self._busy.values(), *self._pushed.values()])


def estimated_cycles(bundles: Sequence[str], generation: str) -> int:
    """Cycles of these bundles, issued in their order, until the units are free again.

    Args:
        bundles: as `bundles.split_bundles` gives them; a loop lists those of every trip.
        generation: a key of `LATENCIES`.
    """
    parsed = {bundle: _instructions(bundle) for bundle in set(bundles)}
    program = [parsed[bundle] for bundle in bundles]
    groups, pops = collections.Counter(), collections.Counter()
    for instruction in (instruction for bundle in program for instruction in bundle):
        if instruction.name.startswith("vmatmul"):
            groups[instruction.unit] += instruction.row_groups
        elif instruction.name == "vpop":
            pops[instruction.unit] += 1
    # A group of rows gives as many results as the unit has outputs of 128 lanes.
    core = _Core(LATENCIES[generation], {unit: pops[unit] / groups[unit] for unit in groups if pops[unit]})
    for bundle in program:
        core.now += 1
        for instruction in bundle:
            core.issue(instruction)
    return core.idle_at
