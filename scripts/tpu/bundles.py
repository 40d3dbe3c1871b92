"""Reads the final schedule that libtpu writes: one VLIW bundle a line, its use of each slot, and what it allocates.

libtpu names a kernel's files `<number>-<kernel>-<pass>-<what>.txt`. Of these are read:
`final_bundles` (the schedule), `final_hlo-static-per-bundle-utilization` (instructions per slot, one row a bundle) and
`post-delay-converter` (the same program before it was packed, with its allocations).
"""

import collections
import dataclasses
import glob
import os
import re

from levanter_infer.plan.bundles import branch_targets, regions, split_bundles
from levanter_infer.plan.cycles import estimated_cycles

_FILE = re.compile(r"(?P<kernel>\d+-(?P<name>.+))-\d+-final_bundles\.txt")
_NOT_KERNELS = ("TLP", "<late")  # the program around the kernels, and what it does before and after
_ALLOCATION = re.compile(r"space=(vmem|smem), size = 0x([0-9a-f]+)[^\n]*?scoped, tag = '([^']*)")
FILL, SPILL = "VLOAD:FILL", "VSTORE:SPILL"


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop of the schedule; counts are of one iteration, the bodies of nested loops taken once."""

    first: int
    """Address of its first bundle."""
    last: int
    """Address of its last one, delay slots of the branch included."""
    depth: int
    """1: in no other loop."""
    bundles: int
    """One issues a cycle at best, so that this is the least number of cycles."""
    own_bundles: int
    """Bundles outside of nested loops."""
    cycles: int
    """`estimated_cycles`: with waits for results of the matrix, transpose and transcendental units."""
    skippable: int
    """Bundles that a forward branch may jump over: an iteration takes this many fewer at the best."""
    slots: dict[str, int]
    """Instructions by slot of the VLIW word."""
    dmas: int
    """DMAs that are started."""

    @property
    def spills(self) -> int:
        return self.slots.get(SPILL, 0)

    @property
    def fills(self) -> int:
        return self.slots.get(FILL, 0)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel or fusion of a compiled program."""

    name: str
    bundles: int
    spills: int
    fills: int
    memory: dict[str, dict[str, int]]
    """vmem and smem -> bytes by purpose; `total` is the sum, spill slots included."""
    loops: tuple[Loop, ...]
    """Loops in program order."""

    def main_loop(self) -> Loop | None:
        """The loop with most matmuls of its own; without any, the longest that holds no other."""

        def weight(loop: Loop) -> tuple[int, int, int]:
            inner = [
                o for o in self.loops if o.depth == loop.depth + 1 and loop.first <= o.first and o.last <= loop.last
            ]
            matmul = loop.slots.get("MATMUL", 0) - sum(o.slots.get("MATMUL", 0) for o in inner)
            return matmul, not inner, loop.bundles

        return max(self.loops, key=weight, default=None)


def read_kernels(directory: str, generation: str) -> list[Kernel]:
    """Every kernel and fusion whose schedule is in `directory`, the longest first."""
    found = []
    for path in glob.glob(os.path.join(glob.escape(directory), "*-final_bundles.txt")):
        match = _FILE.fullmatch(os.path.basename(path))
        if match is None or "schedule-analysis" in path or match["name"].startswith(_NOT_KERNELS):
            continue

        def other(kind: str, kernel: str = match["kernel"]) -> str:
            paths = glob.glob(os.path.join(glob.escape(directory), f"{glob.escape(kernel)}-[0-9]*-{kind}.txt"))
            return "".join(_read(path) for path in paths)

        usage = other("final_hlo-static-per-bundle-utilization")
        found.append(parse_kernel(match["name"], _read(path), usage, other("post-delay-converter"), generation))
    return sorted(found, key=lambda kernel: -kernel.bundles)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def parse_kernel(name: str, schedule: str, usage: str, allocations: str, generation: str) -> Kernel:
    """A kernel from the texts of its three files."""
    bundles = split_bundles(schedule)
    slots, table = _slot_usage(usage, len(bundles))
    ranges, skips = _control_flow(bundles)
    loops = []
    for first, last in ranges:
        body = range(first, last + 1)
        nested = [r for r in ranges if r != (first, last) and first <= r[0] and r[1] <= last]
        around = [r for r in ranges if r != (first, last) and r[0] <= first and last <= r[1]]
        loops.append(
            Loop(
                first=first,
                last=last,
                depth=1 + len(around),
                bundles=len(body),
                own_bundles=len(body) - _covered(nested),
                cycles=estimated_cycles(bundles[first : last + 1], generation),
                skippable=_covered([r for r in skips if first <= r[0] and r[1] <= last]),
                slots={slot: sum(table[i][k] for i in body) for k, slot in enumerate(slots)},
                dmas=sum(len(re.findall(r"= dma\.(?!done)", bundles[i])) for i in body),
            )
        )
    total = {slot: sum(row[k] for row in table) for k, slot in enumerate(slots)}
    return Kernel(name, len(bundles), total.get(SPILL, 0), total.get(FILL, 0), _memory(allocations), tuple(loops))


def _control_flow(bundles: list[str]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """First and last bundle of each loop, and of each stretch that a forward branch passes over."""
    areas, loops, skips = regions(bundles), {}, []
    for address, text in enumerate(bundles):
        for region in branch_targets(text):
            target = areas.get(region)
            if target is not None and target.start <= address:
                loops[target.start] = max(loops.get(target.start, 0), target.stop - 1, address)
                continue
            passed = areas.get(str(int(region) - 1))  # regions are numbered in program order: the one before the target
            if passed:
                skips.append((passed[0], passed[-1]))
    return sorted(loops.items()), skips


def _covered(ranges: list[tuple[int, int]]) -> int:
    return len({address for first, last in ranges for address in range(first, last + 1)})


def _slot_usage(text: str, num_bundles: int) -> tuple[list[str], list[list[int]]]:
    """Names of the slots, and how many instructions each bundle has in each."""
    lines = text.splitlines()
    names = next(i for i, line in enumerate(lines) if line.startswith("MATMUL"))
    first = next(i for i, line in enumerate(lines) if "UTILIZATION" in line) + 1
    rows = [[int(word) for word in line.split()] for line in lines[first : first + num_bundles]]
    if len(rows) != num_bundles:
        raise ValueError(f"{num_bundles} bundles but {len(rows)} rows of utilization: libtpu writes another format")
    return [name.strip() for name in lines[names].split(",")], rows


def _memory(text: str) -> dict[str, dict[str, int]]:
    found: dict[str, collections.Counter] = {"vmem": collections.Counter(), "smem": collections.Counter()}
    for space, size, tag in _ALLOCATION.findall(text):
        purpose = "spill slots" if tag.startswith("spilled") else re.split(r"\.| for | on ", tag)[0].strip()
        found[space].update({purpose: int(size, 16), "total": int(size, 16)})
    return {space: dict(sizes) for space, sizes in found.items()}
