"""Bundles that the instructions of a compiled program issue, from the schedules that libtpu writes.

A core of a TPU issues one bundle (a VLIW word) a cycle at best. A schedule lists the bundles of an instruction once.
Its scalar instructions decide which of them run and how often, and are executed here: every trip of a loop over tiles
counts, and what a trip skips does not. Waits for memory, for other chips and for results of the matrix, transpose and
transcendental units are not in a schedule.
"""

import collections
import dataclasses
import operator
import re
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from levanter_infer.plan.cycles import estimated_cycles

_FILE = re.compile(r"\d+-(?P<name>.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"\s*(?:0x)?(?P<address>[0-9a-f]+)\s+(?:[A-Z]{2}:)?\s*:?[\s>]*\{")
_REGION = re.compile(r"(Start|End|Start/End empty) region (\d+)")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_SCALAR = re.compile(
    r"%\w+_(?P<result>[sp]\d+) = (?P<name>[a-z_]+)(?P<form>[.\w]*) "
    r"(?:\((?P<negated>!?)%\w+_(?P<predicate>p\d+)(?:, (?P<otherwise>[^)]+))?\),? ?)?(?P<operands>.*)"
)
_BRANCH = re.compile(r"sbr\.\w+ (?:\((?P<negated>!?)%\w+_(?P<predicate>p\d+)\) )?target = \$region(?P<region>\d+)")
_XLA = re.compile(r"exit bundle: %\S+ = fusion\(")
"""The last bundle of an instruction that is no Pallas kernel."""
_REGISTER = re.compile(r"%\w+_([sp]\d+)$")
_POINTER = re.compile(r"\[#allocation\d+\]")
_ALLOCATION = re.compile(r"#allocation\d+(?:_spill)?\b")
_LOAD = re.compile(r"sld \[smem:\[(#\w+)\]\]")
_STORE = re.compile(
    r"sst \[smem:\[(?P<variable>#\w+)\]\] (?:\((?P<negated>!?)%\w+_(?P<predicate>p\d+)\), )?(?P<operand>[%\w]+)$"
)
_LOADED = re.compile(r"\[smem:\[(#\w+)\]\]$")
_DELAY_SLOTS = 4
"""Bundles after a branch that issue in any case."""
_MOST_BUNDLES = 4_000_000

Operand = str | int | None
"""A register or a variable in scalar memory, a number, or what is not known here."""
_Operation = Callable[..., int | bool | None]


def _wrapped(operation: Callable[..., int]) -> _Operation:
    """An operation of integers of 32 bits."""
    return lambda *values: (operation(*values) + 2**31) % 2**32 - 2**31


def _unsigned(operation: Callable[[int, int], bool]) -> _Operation:
    """A comparison of integers of 32 bits without a sign."""
    return lambda a, b: operation(a % 2**32, b % 2**32)


_COMPARISONS = "lt", "le", "gt", "ge", "eq", "ne"
_OPERATIONS: dict[str, _Operation] = {
    "sadd": _wrapped(operator.add),
    "ssub": _wrapped(operator.sub),
    "smul": _wrapped(operator.mul),
    "sand": _wrapped(operator.and_),
    "sor": _wrapped(operator.or_),
    "sxor": _wrapped(operator.xor),
    "sshll": _wrapped(lambda value, by: value << (by & 31)),
    "sshrl": _wrapped(lambda value, by: value % 2**32 >> (by & 31)),
    "sshra": _wrapped(lambda value, by: value >> (by & 31)),
    "smin": _wrapped(lambda a, b: min(a % 2**32, b % 2**32)),
    **dict.fromkeys(("smov", "sld", "int_to_ptr", "inlined_call_operand"), lambda value: value),
    "scalar_lea": _wrapped(operator.add),
    "pmov": bool,
    **{f"scmp.{name}.s32": getattr(operator, name) for name in _COMPARISONS},
    **{f"scmp.{name}.u32": _unsigned(getattr(operator, name)) for name in _COMPARISONS},
}
"""Results of scalar instructions whose operands are all known; others give what is not known."""


@dataclasses.dataclass(frozen=True)
class _Scalar:
    result: str
    name: str
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    otherwise: Operand
    """The result where the predicate does not hold."""


@dataclasses.dataclass(frozen=True)
class _Branch:
    region: str
    predicate: str | None
    negated: bool


class Schedules:
    """The schedules of one program."""

    def __init__(self, directory: str, generation: str):
        """
        Args:
            directory: what libtpu wrote with `runtime.libtpu.schedule_flags`, for one program.
            generation: of the TPUs, a key of `cycles.LATENCIES`.
        """
        found = ((_FILE.fullmatch(path.name), path) for path in Path(directory).iterdir())
        self._paths = {match["name"]: path for match, path in found if match}
        self._generation = generation
        self._cycles: dict[str, int | None] = {}

    @property
    def names(self) -> list[str]:
        """Instructions that have a schedule."""
        return sorted(self._paths)

    def cycles(self, instruction: str) -> int | None:
        """Cycles of an instruction, by its name, waits for the units included; None if it has no schedule, or if it is
        a Pallas kernel and data decide how often a loop of it runs. Such a loop of XLA's counts once."""
        if instruction not in self._cycles:
            path = self._paths.get(instruction)
            bundles = [] if path is None else split_bundles(path.read_text())
            ran = executed(bundles, once=bool(bundles) and _XLA.search(bundles[-1]) is not None)
            self._cycles[instruction] = estimated_cycles([bundles[i] for i in ran], self._generation) if ran else None
        return self._cycles[instruction]


def split_bundles(schedule: str) -> list[str]:
    """The text of every bundle, by its address; comments may go on over several lines."""
    bundles: list[str] = []
    for line in schedule.splitlines():
        match = _BUNDLE.match(line)
        if match is not None and int(match["address"], 16) == len(bundles):
            bundles.append(line)
        elif bundles:
            bundles[-1] += "\n" + line
    return bundles


def executed(bundles: Sequence[str], *, once: bool = False) -> list[int] | None:
    """Addresses of the bundles that run until the end of a schedule, in their order; None where data decide how often a
    loop runs, or where it runs too often.

    Stretches that data decide about count as run. Pointers are counted from 0, whatever they point to: loops compare
    those of one array.

    Args:
        once: let a loop of whose trips data decide run once, as those of XLA's gathers and scatters over the parts of
            one row.
    """
    variables = _variables(bundles)
    program = [_parse(text, variables) for text in bundles]
    areas = regions(bundles)
    registers: dict[str, int | bool | None] = {}
    ran: list[int] = []
    address = 0
    while address < len(program):
        if len(ran) > _MOST_BUNDLES:
            return None
        scalars, branches = program[address]
        _execute(scalars, registers)
        ran.append(address)
        target = address + 1
        for branch in branches:
            area = areas.get(branch.region)
            taken, begin = _holds(branch, registers), len(program) if area is None else area.start
            if taken is None and begin <= address and not once:
                return None
            if taken:
                target = begin
                for slot in range(address + 1, min(address + 1 + _DELAY_SLOTS, len(program))):
                    _execute(program[slot][0], registers)
                    ran.append(slot)
        address = target
    return ran


def regions(bundles: Sequence[str]) -> dict[str, range]:
    """Addresses of the bundles of each region, by its number; a region that is empty has the address at which it
    starts and none after it."""
    found: dict[str, range] = {}
    for address, text in enumerate(bundles):
        for kind, region in _REGION.findall(text):
            if kind != "End":
                found.setdefault(region, range(address, address))
            elif region in found:
                found[region] = range(found[region].start, address + 1)
    return found


def branch_targets(bundle: str) -> list[str]:
    """The regions that branches of a bundle go to, by their numbers."""
    return [branch.region for branch in _parse(bundle)[1]]


def _variables(bundles: Sequence[str]) -> Set[str]:
    """The allocations of scalar memory that hold one number, as where the compiler spills a counter: those that are
    loaded and stored as they are, and nothing else."""
    every, alone = collections.Counter(), collections.Counter()
    for text in (_COMMENT.sub("", bundle) for bundle in bundles):
        every.update(_ALLOCATION.findall(text))
        alone.update(_LOAD.findall(text))
        alone.update(match["variable"] for each in text.split(";;") if (match := _STORE.search(each.rstrip("} \n"))))
    return {name for name, count in alone.items() if every[name] == count}


def _parse(bundle: str, variables: Set[str] = frozenset()) -> tuple[list[_Scalar], list[_Branch]]:
    """The scalar instructions and the branches of a bundle. Args: variables: as `_variables` gives them."""
    scalars, branches = [], []
    for text in _COMMENT.sub("", bundle.partition("{")[2]).split(";;"):
        text = text.strip().rstrip("} ")
        if match := _BRANCH.search(text):
            branches.append(_Branch(match["region"], match["predicate"], bool(match["negated"])))
        elif (match := _STORE.search(text)) and match["variable"] in variables:
            stored = (_operand(match["operand"], variables),)
            scalars.append(_Scalar(match["variable"], "smov", stored, match["predicate"], bool(match["negated"]), None))
        elif match := _SCALAR.match(text):
            operands = tuple(_operand(each, variables) for each in match["operands"].split(","))
            if match["name"] == "inlined_call_operand":
                operands = (0,)
            otherwise = None if match["otherwise"] is None else _operand(match["otherwise"], variables)
            name = match["name"] + (match["form"].removesuffix(".totalorder") if match["name"] == "scmp" else "")
            scalars.append(
                _Scalar(match["result"], name, operands, match["predicate"], bool(match["negated"]), otherwise)
            )
    return scalars, branches


def _operand(text: str, variables: Set[str]) -> Operand:
    text = text.strip().removeprefix("[resolvable:$true] ")
    if match := _REGISTER.match(text):
        return match[1]
    if match := _LOADED.match(text):
        return match[1] if match[1] in variables else None
    if _POINTER.match(text):
        return 0
    try:
        number = int(text, 0)
    except ValueError:
        return None
    return (number + 2**31) % 2**32 - 2**31


def _execute(scalars: Sequence[_Scalar], registers: dict[str, int | bool | None]) -> None:
    """Run the scalar instructions of a bundle: all read their operands before any writes its result."""
    results = {each.result: _result(each, registers) for each in scalars if each.name not in ("sphi", "pphi")}
    registers.update(results)


def _result(scalar: _Scalar, registers: dict[str, int | bool | None]) -> int | bool | None:
    taken = _holds(scalar, registers)
    values = [registers.get(each) if isinstance(each, str) else each for each in scalar.operands]
    otherwise = registers.get(scalar.otherwise) if isinstance(scalar.otherwise, str) else scalar.otherwise
    if taken is False:
        return otherwise if scalar.otherwise is not None else registers.get(scalar.result)
    value = computed(scalar.name, values)
    return value if taken or value == otherwise else None


def computed(name: str, values: Sequence[int | bool | None]) -> int | bool | None:
    """The result of a scalar instruction, such as `sadd` or `scmp.lt.s32`, whose predicate holds; None: not known.

    Args:
        values: its operands; None for those that are not known.
    """
    if name == "pnand":
        return True if False in values else None if None in values else False
    if name == "por":
        return True if True in values else None if None in values else False
    if name == "pneg":
        return None if values[0] is None else not values[0]
    if name == "scalar_select":
        return None if values[0] is None else values[1] if values[0] else values[2]
    operation = _OPERATIONS.get(name)
    return None if operation is None or None in values else operation(*values)


def _holds(step: _Scalar | _Branch, registers: dict[str, int | bool | None]) -> bool | None:
    """Whether an instruction runs; None: data decide."""
    if step.predicate is None:
        return True
    value = registers.get(step.predicate)
    return None if value is None else bool(value) != step.negated
