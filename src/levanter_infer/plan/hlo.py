"""Large copies and collectives of an optimised HLO program, read from its text."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_MOVES = {
    "copy", "copy-start", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "reverse", "gather",
}  # fmt: skip
_FREE = {"parameter", "bitcast", "constant", "reshape", "tuple", "get-tuple-element", "broadcast", "iota"}
_INDEXING = {"add", "compare", "select", "convert", "clamp", "minimum", "maximum", "multiply", "subtract", "and", "or"}
_WRITES = {"dynamic-update-slice", "scatter"}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-<>]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_DEFINITION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) [a-z][\w\-]*\(")
_REFERENCE = re.compile(r"%[\w.\-]+")
_APPLIED = re.compile(r"(calls|to_apply)=%?([\w.\-]+)")
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]+)\]")
_BITS = re.compile(r"\d+")
_STORED = re.compile(_ARRAY.pattern + r"\{([0-9,]*)(?::T\(([0-9,]+)\))?[^}]*\}")
"""An array with its layout: the axes, the last one stored first, and the tile, of which the last axis comes last."""
_VMEM = "S(1)"
"""Memory space of VMEM in the layout of an array."""
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")


def large_moves(hlo: str, least_bytes: int = 2**20) -> list[tuple[int, str, str, int]]:
    """(bytes, operation, type, number of instructions) of moves that write at least `least_bytes`.

    A move is an instruction that only copies, slices or changes the layout, or a fusion of such instructions. In-place
    writes (`dynamic-update-slice`, `scatter`) do not copy their target and are no moves. The operation of a transfer
    between a TPU's HBM and its VMEM ends in "to or from VMEM".
    """
    bodies = computations(hlo)
    found: collections.Counter = collections.Counter()
    fused = {
        called for lines in bodies.values() for line in lines if " fusion(" in line for called in _CALLED.findall(line)
    }
    for name, lines in bodies.items():
        if name in fused:
            continue
        for line in lines:
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            operation, kind = match[2], match[1]
            if operation == "fusion":
                moves = _fused_moves(bodies.get((_CALLED.findall(line) or [""])[0], []))
                operation = f"fusion of {', '.join(moves)}" if moves else "fusion"
            if operation not in _MOVES and " of " not in operation:
                continue
            if (size := largest_array(kind)) >= least_bytes:
                array = _ARRAY.search(kind)
                operation += ", to or from VMEM" if _VMEM in kind else ""
                found[size, operation, array[0] if array else kind] += 1
    return sorted(((*key, count) for key, count in found.items()), reverse=True)


def _fused_moves(lines: list[str]) -> list[str]:
    """The moves of a fused computation that only moves arrays; none if it computes."""
    operations = [operation for line in lines if (operation := operation_of(line))]
    arrays = [match for line in lines if (match := _INSTRUCTION.match(line)) and _is_array(match[1])]
    if any(match[2] in _WRITES for match in arrays):
        return []
    if any(match[2] not in _MOVES | _FREE for match in arrays):
        return []
    if any(op not in _MOVES | _FREE | _INDEXING for op in operations):
        return []
    return sorted(set(operations) & _MOVES)


def _is_array(kind: str) -> bool:
    return any(math.prod(map(int, dims.split(","))) > 1 for _, dims in _ARRAY.findall(kind))


def largest_array(kind: str) -> int:
    """Bytes of the largest array of an HLO type."""
    return max((_num_bytes(dtype, map(int, dims.split(","))) for dtype, dims in _ARRAY.findall(kind)), default=0)


def _num_bytes(dtype: str, sizes: Iterable[int]) -> int:
    bits = _BITS.search(dtype)
    return math.prod(sizes) * (int(bits[0]) if bits else 8) // 8


def hbm_copy_bytes(line: str) -> int:
    """Bytes, with the padding of their layout, that a copy or a slice moves between HBM and VMEM, or within HBM; 0 for
    other instructions. A synchronous `copy` to VMEM does not say where it comes from, and counts as one within VMEM."""
    match = _INSTRUCTION.match(line)
    if match is None or match[2] not in ("copy", "copy-start", "slice-start"):
        return 0
    arrays = list(_STORED.finditer(match[1]))
    if len(arrays) < (1 if match[2] == "copy" else 2) or all(_VMEM in array[0] for array in arrays[:2]):
        return 0
    copied = arrays[1] if match[2] == "slice-start" else arrays[0]
    dtype, *numbers = copied.groups(default="")
    sizes, axes, tile = ([int(number) for number in each.split(",") if number] for each in numbers)
    for axis, length in zip(axes, reversed(tile), strict=False):
        sizes[axis] = -(-sizes[axis] // length) * length
    return _num_bytes(dtype, sizes)


def computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation of a program, by its name."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = found.setdefault(match[1], [])
        elif line.startswith("}"):
            current = []
        else:
            current.append(line)
    return found


def operation_of(line: str) -> str | None:
    """The operation of an instruction; None for other lines."""
    match = _INSTRUCTION.match(line)
    return match[2] if match else None


def scopes_of(line: str) -> list[str]:
    """The scopes of an instruction, from the outermost, and then the operation that it was traced as; none if the
    compiler has lost them."""
    match = _OP_NAME.search(line)
    return match[1].split("/") if match else []


def loops_of(bodies: Mapping[str, Sequence[str]], scope: str) -> Iterator[tuple[str, str]]:
    """Loops that were traced in `scope`: the computation that each is in, and its instruction.

    Args:
        bodies: `computations` of a program.
    """
    for name, lines in bodies.items():
        for line in lines:
            if operation_of(line) == "while" and scopes_of(line)[-2:] == [scope, "while"]:
                yield name, line


def codes(bodies: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """A text of what each instruction computes, by its name; instructions share it which differ in names and origins
    alone. Args: bodies: `computations` of a program."""
    kinds = {match[1]: match[2] for lines in bodies.values() for line in lines if (match := _DEFINITION.match(line))}

    @functools.cache
    def body(name: str) -> str:
        numbers: dict[str, str] = {}
        texts = (line.partition(", metadata=")[0].partition(", backend_config=")[0] for line in bodies.get(name, ()))
        number = lambda match: numbers.setdefault(match[0], f"%{len(numbers)}")  # noqa: E731
        return "\n".join(_REFERENCE.sub(number, called(text)) for text in texts)

    def called(text: str) -> str:
        return _APPLIED.sub(lambda match: f"{match[1]}={{{body(match[2])}}}", text)

    found = {}
    for line in (line for lines in bodies.values() for line in lines):
        if match := _DEFINITION.match(line):
            text = line[match.start(2) :].partition(", metadata=")[0].partition(", backend_config=")[0]
            operands, brace, rest = text.partition("), ")
            typed = _REFERENCE.sub(lambda each: kinds.get(each[0].lstrip("%"), each[0]), operands)
            found[match[1]] = typed + brace + called(rest)
    return found


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective instruction of a program, or several equal ones."""

    operation: str
    kind: str
    """Types of its results."""
    num_bytes: int
    """Bytes of its results on each device."""
    parts: int
    """Devices in each group."""
    depth: int
    """Number of loops around it."""
    count: int = 1
    """Number of equal instructions."""


def collectives_of(hlo: str) -> list[Collective]:
    """The collectives of a program, by loop depth and then in the order of its text; loops run them several times."""
    found: collections.Counter = collections.Counter()
    for line in hlo.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or (operation := match[2].removesuffix("-start")) not in COLLECTIVES:
            continue
        arrays = [dtype + "[" + dims + "]" for dtype, dims in _ARRAY.findall(match[1])]
        if operation != match[2]:  # its type lists operands too
            arrays = [max(arrays, key=largest_array)]
        depth = scopes_of(line).count("while")
        size = sum(map(largest_array, arrays))
        found[Collective(operation, " ".join(arrays), size, _parts(line), depth)] += 1
    counted = [dataclasses.replace(each, count=count) for each, count in found.items()]
    return sorted(counted, key=lambda each: each.depth)


def _parts(line: str) -> int:
    match = _GROUPS.search(line)
    if match is None:
        return 2  # pairs of a permutation
    return len(match[1].split(",")) if match[1] is not None else int(match[2])


def collectives(hlo: str) -> dict[str, int]:
    """Number of instructions of each collective; loops run them several times."""
    found = collectives_of(hlo)
    counts = {name: sum(each.count for each in found if each.operation == name) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}
