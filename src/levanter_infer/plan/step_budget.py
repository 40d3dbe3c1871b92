"""Cycles of the parts of a step, from the schedules of the TPU compiler.

An instruction takes the cycles of its schedule (`bundles.Schedules`), in which a loop whose trips data decide counts
once. Without a schedule it takes those that the compiler expected of it while it compiled (`estimated_cycles` in the
text of the program); these are up to ten times as many as the schedule has for other instructions. Collectives, and
Pallas kernels whose work depends on data, as that of attention, have neither, and are counted without cycles. Waits for
HBM are not known; what copies outside of layers move there is counted in bytes.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from levanter_infer.kernels import scopes
from levanter_infer.plan.hlo import (
    COLLECTIVES,
    codes,
    computations,
    hbm_copy_bytes,
    loops_of,
    operation_of,
    scopes_of,
)

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRUE_FALSE = re.compile(r"true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_CONSTANT = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_LIMIT = re.compile(r"^\s*ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")
_MATMULS = {"convolution", "dot"}
_MOVES = {
    "copy", "transpose", "slice", "reshape", "pad", "bitcast", "concatenate", "dynamic-slice", "reverse", "broadcast",
    "parameter", "constant", "tuple", "get-tuple-element", "fusion",
}  # fmt: skip

MATMULS, ATTENTION, KV_WRITE = "matmuls", "attention around its kernels", "KV write around its kernel"
LAYERS, MOVES, SAMPLING, CONTROL = "norms, ropes, activations, residuals", "copies in layers", "sampling", "control"
PARTS = (MATMULS, ATTENTION, KV_WRITE, LAYERS, MOVES, SAMPLING, CONTROL)

SAMPLED: Mapping[str, frozenset[str]] = {
    "greedy": frozenset(),
    "temperature": frozenset({scopes.PROCESSED, scopes.DRAWN}),
    "top_k": frozenset({scopes.PROCESSED, scopes.DRAWN, scopes.FILTERED, scopes.FOUND}),
    "top_p": frozenset({scopes.PROCESSED, scopes.DRAWN, scopes.FILTERED, scopes.FOUND, scopes.NUCLEUS}),
}
"""For each kind of sampling, asked for by all rows of a step, the scopes whose `lax.cond` is taken."""


@dataclasses.dataclass(frozen=True)
class StepBudget:
    """Cycles of one step of one core."""

    bucket: int
    """Capacity in tokens of the step, which may be computed in blocks (`Shapes.block_tokens`)."""
    has_chunks: bool
    """Whether some rows have several tokens."""
    sampled: str
    """A key of `SAMPLED`."""
    cycles: Mapping[str, int]
    """Cycles of each of `PARTS`."""
    expected: Mapping[str, int]
    """Cycles among these that the compiler expected, by part, of instructions whose schedule does not tell them."""
    when_needed: Mapping[str, int]
    """Cycles of one trip through each loop that runs only when there is something to do, such as prefixes that are
    inserted, pages that are evicted and forks, by scope, loops within them included. They are not in `cycles`."""
    once: Mapping[str, int]
    """Cycles of loops of layers whose trips depend on the prompts, by scope, one trip of each, which are in `cycles`:
    the blocks of a recurrence."""
    kernels: Mapping[str, int]
    """Calls of Pallas kernels whose cycles depend on data, by scope."""
    collectives: Mapping[str, int]
    """Collectives, by operation."""
    copied_bytes: int
    """Bytes that copies outside of layers move between HBM and VMEM, or within HBM: time that no schedule shows."""

    @property
    def total(self) -> int:
        """Cycles of all parts."""
        return sum(self.cycles.values())


def step_budgets(
    hlo: str,
    max_seqs: int,
    buckets: Sequence[int],
    scheduled: Callable[[str], int | None],
    block_tokens: int | None = None,
) -> list[StepBudget]:
    """Budgets of a step of decoding, and of the largest one with prompts, for each kind of sampling.

    Args:
        hlo: the compiled round, with its estimates.
        max_seqs: `engine.max_seqs`.
        buckets: `Shapes.buckets` of the engine.
        scheduled: `Schedules.cycles` of the round.
        block_tokens: `Shapes.block_tokens` of the engine: a step has as many blocks as its tokens need.
    Raises: ValueError if the text has no estimates or is no round of these buckets.
    """
    if _CYCLES.search(hlo) is None:
        raise ValueError("the program has no estimates of cycles, which the compiler of TPUs writes")
    program = _Program(computations(hlo), scheduled)
    decoding = _fitting(buckets, max_seqs) if block_tokens is None else -(-max_seqs // block_tokens) * block_tokens
    cases = [(decoding, False), (buckets[-1], True)]
    return [_budget(program, *case, block_tokens, max_seqs, sampled) for case in cases for sampled in SAMPLED]


def _budget(
    program: "_Program", bucket: int, has_chunks: bool, block_tokens: int | None, max_seqs: int, sampled: str
) -> StepBudget:
    size = block_tokens or bucket
    counter = _Counter(program, size, bucket // size, has_chunks, max_seqs, SAMPLED[sampled])
    counter.add(program.step_body(scopes.forward(size)), 1, [])
    cycles = {part: counter.cycles[part] for part in PARTS}
    names = ("expected", "when_needed", "once", "kernels", "collectives")
    counts = {name: dict(getattr(counter, name)) for name in names}
    return StepBudget(bucket, has_chunks, sampled, cycles, copied_bytes=counter.copied_bytes, **counts)


class _Program:
    """The computations of an HLO text, and the cycles of its instructions."""

    def __init__(self, lines: dict[str, list[str]], scheduled: Callable[[str], int | None]):
        self.lines = lines
        self._scheduled = scheduled
        self._traits: dict[str, tuple[bool, bool]] = {}

    def step_body(self, scope: str) -> str:
        """The computation with the loop of `scope`: the body of the loop over steps."""
        for name, _ in loops_of(self.lines, scope):
            return name
        raise ValueError(f"the program has no loop of {scope}: it is no round, or has no such bucket")

    @functools.cached_property
    def head_rows(self) -> set[int]:
        """Sizes of the head that the program has."""
        lines = ((scopes_of(line), line) for lines in self.lines.values() for line in lines)
        paths = (path for path, line in lines if " while(" in line or scopes.HEAD in path)
        return {rows for path in paths for each in path if (rows := scopes.rows_of(each)) is not None}

    def trips(self, condition: str) -> int | None:
        """Trips of a loop that counts to a constant; None for others."""
        lines = self.lines[condition]
        limits = [match[1] for line in lines if (match := _LIMIT.match(line))]
        constants = {match[1]: int(match[2]) for line in lines if (match := _CONSTANT.match(line))}
        return constants.get(limits[0]) if limits else None

    def cycles(self, line: str) -> tuple[int, bool] | None:
        """Cycles of an instruction, and whether the compiler expected them; None if neither it nor the schedule tells
        them."""
        name, expected = _NAME.match(line), _CYCLES.search(line)
        # Instructions that compute the same have one schedule, which bears the name of one of them.
        for each in self._twins[self._codes[name[1]]] if name else ():
            if (scheduled := self._scheduled(each)) is not None:
                return scheduled, False
        return (int(expected[1]), True) if expected else None

    @functools.cached_property
    def _codes(self) -> dict[str, str]:
        return codes(self.lines)

    @functools.cached_property
    def _twins(self) -> Mapping[str, list[str]]:
        found = collections.defaultdict(list)
        for name, code in self._codes.items():
            found[code].append(name)
        return found

    def traits(self, name: str) -> tuple[bool, bool]:
        """Whether a fused computation multiplies matrices, and whether it only moves numbers."""
        if name not in self._traits:
            lines = self.lines.get(name, [])
            operations = {operation for line in lines if (operation := operation_of(line))}
            nested = [self.traits(called) for line in lines for called in _CALLED.findall(line)]
            multiplies = bool(operations & _MATMULS) or any(inner for inner, _ in nested)
            self._traits[name] = multiplies, operations <= _MOVES and all(inner for _, inner in nested)
        return self._traits[name]


class _Counter:
    """Adds up what a step executes."""

    def __init__(
        self, program: _Program, size: int, num_blocks: int, has_chunks: bool, rows: int, taken: frozenset[str]
    ):
        """Args: size: of the forward that the step takes, `num_blocks` times."""
        self._program, self._size, self._num_blocks = program, size, num_blocks
        self._has_chunks, self._rows, self._taken = has_chunks, rows, taken
        self.cycles: collections.Counter[str] = collections.Counter()
        self.expected: collections.Counter[str] = collections.Counter()
        self.when_needed: collections.Counter[str] = collections.Counter()
        self.once: collections.Counter[str] = collections.Counter()
        self.kernels: collections.Counter[str] = collections.Counter()
        self.collectives: collections.Counter[str] = collections.Counter()
        self.copied_bytes = 0

    def add(self, computation: str, times: int, around: list[str]) -> None:
        """
        Args:
            times: how often a step executes the computation.
            around: scopes of the loop whose body it is, for instructions that have lost theirs.
        """
        for line in self._program.lines[computation]:
            operation, path = operation_of(line), scopes_of(line)
            if operation is None:
                continue
            if not _known(path):
                path = around
            if not any(scopes.bucket_of(each) is not None for each in path):
                self.copied_bytes += times * hbm_copy_bytes(line)
            if operation == "while":
                self._add_loop(line, times, path)
            elif operation == "conditional":
                self.add(self._branch(line), times, path)
            elif operation == "call":
                self.add(_CALLED.findall(line)[0], times, path)
            elif (name := operation.removesuffix("-start")) in COLLECTIVES:
                self.collectives[name] += times
            elif found := self._program.cycles(line):
                cycles, is_expected = found
                part = self._part(line, operation, path)
                self.cycles[part] += times * cycles
                if is_expected:
                    self.expected[part] += times * cycles
            elif 'custom_call_target="tpu_custom_call"' in line:
                self.kernels[_name_of(path)] += times

    def _add_loop(self, line: str, times: int, path: list[str]) -> None:
        condition, body = _LOOP.findall(line)[0]
        trips = self._program.trips(condition)
        bucket = next((found for each in path if (found := scopes.bucket_of(each)) is not None), None)
        rows = next((found for each in path if (found := scopes.rows_of(each)) is not None), None)
        if trips is not None:
            self.add(body, times * trips, path)
        elif rows is not None:
            if rows == _fitting(self._program.head_rows, self._rows):
                blocks = -(-self._rows // rows) if path[-2:-1] == [scopes.head(rows)] else 1
                self.add(body, times * blocks, path)
        elif bucket is None:
            sizes = self._size, self._num_blocks, self._has_chunks, self._rows
            apart = _Counter(self._program, *sizes, self._taken)
            apart.add(body, 1, path)
            self.when_needed[_name_of(path)] += apart.cycles.total() + apart.when_needed.total()
        elif bucket == self._size and (self._has_chunks or scopes.CHUNKS not in path):
            before, is_forward = self.cycles.total(), path[-2:-1] == [scopes.forward(bucket)]
            self.add(body, times * self._num_blocks if is_forward else times, path)
            if not is_forward and scopes.CHUNKS not in path:
                self.once[_name_of(path)] += self.cycles.total() - before

    def _branch(self, line: str) -> str:
        """The branch that is taken: of the head that for the rows of the step, and of a `lax.cond` the first, false,
        where no scope of `taken` has the condition."""
        if match := _TRUE_FALSE.search(line):
            branches = [match[2], match[1]]
        else:
            branches = [name.strip().lstrip("%") for name in _BRANCHES.findall(line)[0].split(",")]
        scope = scopes_of(line)[-2:-1]
        if scope == [scopes.HEAD]:
            head_rows = self._program.head_rows
            if len(branches) != 1 + len(head_rows):
                raise ValueError(f"the head has {len(branches)} branches, for {sorted(head_rows)} rows and for none")
            return branches[1 + sorted(head_rows).index(_fitting(head_rows, self._rows))]
        return branches[-1] if self._taken.intersection(scope) else branches[0]

    def _part(self, line: str, operation: str, path: list[str]) -> str:
        called = _CALLED.findall(line)
        multiplies, moves = operation in _MATMULS, operation in _MOVES
        if operation == "fusion":
            multiplies, moves = self._program.traits(called[0])
        if multiplies or scopes.GROUPED_MATMUL in path:
            return MATMULS
        for scope, part in ((scopes.ATTENTION, ATTENTION), (scopes.KV_WRITE, KV_WRITE), (scopes.SAMPLING, SAMPLING)):
            if scope in path:
                return part
        if any(scopes.bucket_of(each) is not None for each in path):
            return MOVES if moves else LAYERS
        return CONTROL


def _fitting(sizes: Collection[int], needed: int) -> int:
    """The smallest of some sizes that holds what is needed; the largest if none does."""
    return min((size for size in sizes if size >= needed), default=max(sizes))


_NAMES = {value for name, value in vars(scopes).items() if name.isupper() and isinstance(value, str)}


def _known(path: list[str]) -> list[str]:
    """The scopes of `kernels.scopes` in a path."""
    return [each for each in path if each in _NAMES or scopes.bucket_of(each) is not None]


def _name_of(path: list[str]) -> str:
    return "/".join(dict.fromkeys(_known(path))) or "round"
