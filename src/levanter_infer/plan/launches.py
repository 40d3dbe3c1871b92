"""Kernels that a step launches on a GPU and conditions that its host decides, from what XLA writes of a round.

XLA runs a program as a tree of "thunks" on the host: kernels and copies, loops and branches whose condition the host
reads from the device, and graphs (CUDA graphs, "command buffers"), whose kernels, loops and branches the device runs
by itself.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from levanter_infer.kernels import scopes
from levanter_infer.plan.hlo import scopes_of
from levanter_infer.plan.step_budget import SAMPLED
from levanter_infer.runtime.gpu_compiler import Written

_THUNK = re.compile(r"^( *)(\d+): k(\w+)\s*(?:\[[^\]]*\])?\s*(\S*)")
_LABEL = re.compile(r"( *)(condition|body|\w*branch\w*):\s*$")
_NAME = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BRANCH = re.compile(r"branch_(\d+)_fun")
_GRAPH, _LOOP, _CONDITIONAL = "CommandBuffer", "While", "Conditional"
_GROUPS = ("Sequential", "DynamicSlice", "DynamicSliceFusion")
"""Thunks that launch nothing themselves."""
_MATMULS = ("Gemm", "CublasLtMatmul")
_MATMUL_KERNELS = ("stacked_matmul", "grouped_matmul", "gemm_fusion")

MATMULS, ATTENTION, KV_WRITE = "matmuls", "attention", "KV write"
LAYERS, SAMPLING, CONTROL = "the rest of layers", "sampling", "control"
CASES: Mapping[str, frozenset[str]] = {
    **SAMPLED,
    "penalties": SAMPLED["top_p"] | {scopes.CHANGED, scopes.PENALISED},
}
"""Those of `SAMPLED`, and all of them with penalties on a history that fits one turn of their loop."""
PARTS = (MATMULS, ATTENTION, KV_WRITE, LAYERS, SAMPLING, CONTROL)


@dataclasses.dataclass(frozen=True)
class StepLaunches:
    """Launches of one step. Loops that run only when there is something to do, such as evictions and forks, are
    counted without a trip: only their condition is."""

    bucket: int
    """Capacity of the step in tokens."""
    has_chunks: bool
    """Whether some rows have several tokens."""
    sampled: str
    """A key of `CASES`."""
    kernels: Mapping[str, int]
    """Kernels and copies that the device runs, by the names of `PARTS`."""
    layer_kernels: int
    """Those of one layer, which are among them; the first loop over layers counts."""
    host_launches: int
    """Kernels, copies and graphs that the host launches."""
    host_conditions: int
    """Conditions of loops and branches that the host waits for."""
    graph_conditions: int
    """Conditions that the device decides within graphs."""

    @property
    def total(self) -> int:
        """Kernels of all parts."""
        return sum(self.kernels.values())


def step_launches(written: Written, max_seqs: int, buckets: Sequence[int]) -> list[StepLaunches]:
    """Launches of a step of decoding, and of the largest one with prompts, for each kind of sampling.

    Args:
        max_seqs: `engine.max_seqs`.
        buckets: those of the engine, ascending.
    Raises: ValueError if the texts are of no round of these buckets.
    """
    tree = _Tree(written)
    decode = min((size for size in buckets if size >= max_seqs), default=buckets[-1])
    cases = [(decode, False), (buckets[-1], True)]
    return [_counted(tree, *case, max_seqs, sampled) for case in cases for sampled in CASES]


@dataclasses.dataclass
class _Thunk:
    kind: str
    """Without the k."""
    kernel: str
    """Name of the kernel; empty for others."""
    path: list[str]
    """Scopes of its instruction (`hlo.scopes_of`), or of what is around it."""
    trips: int | None
    """Trips of a loop that the compiler knows."""
    parts: dict[str, list["_Thunk"]]
    """The thunks inside, by what they are: condition and body of a loop, the branches, or just these (empty name)."""


class _Tree:
    """The thunks of a program."""

    def __init__(self, written: Written):
        lines = {match[1]: line for line in written.hlo.splitlines() if (match := _INSTRUCTION.match(line))}
        names = {int(number): name for name, number in _NAME.findall(written.names)}
        self.roots: list[_Thunk] = []
        above: list[tuple[_Thunk, str]] = []
        for line in written.launches.splitlines():
            if (label := _LABEL.search(line)) and above:
                # The condition follows its loop without an indentation; the others have two spaces more than theirs.
                depth = len(above) - 1 if label[2] == "condition" else (len(label[1]) - 2) // 4
                above = [*above[:depth], (above[depth][0], label[2])]
                above[depth][0].parts.setdefault(label[2], [])
            elif match := _THUNK.match(line):
                depth, kind = len(match[1]) // 4, match[3]
                of = "" if kind == _GRAPH else lines.get(names.get(int(match[2]), ""), "")
                trips = _TRIPS.search(of)
                path = scopes_of(of)
                if not path and kind not in (_LOOP, _CONDITIONAL) and 0 < depth <= len(above):
                    path = above[depth - 1][0].path  # XLA has lost where it comes from
                thunk = _Thunk(kind, match[4], path, int(trips[1]) if trips else None, {})
                if depth > len(above):
                    raise ValueError(f"a line of the compiler is not understood: {line[:200]!r}")
                above = above[:depth]
                siblings = above[-1][0].parts.setdefault(above[-1][1], []) if above else self.roots
                siblings.append(thunk)
                above.append((thunk, ""))

    def step(self, bucket: int) -> list[_Thunk]:
        """The loop over steps: that whose body has the loop or the branch of a bucket."""
        for thunk in _all(self.roots):
            if any(_chooses(inner, scopes.forward(bucket)) for inner in _unwrapped(thunk.parts.get("body", []))):
                return [thunk]
        raise ValueError(f"the program has no {scopes.forward(bucket)}: it is no round, or has no such bucket")

    def head_rows(self) -> set[int]:
        """Sizes of the head that the program has."""
        found = (scopes.rows_of(each) for thunk in _all(self.roots) for each in thunk.path)
        return {rows for rows in found if rows is not None}


def _chooses(thunk: _Thunk, scope: str) -> bool:
    """Whether a thunk is the loop of a case of `loops.run_bucket`, or the branch between all of them."""
    if thunk.kind == _LOOP:
        return thunk.path[-2:] == [scope, "while"]
    return thunk.kind == _CONDITIONAL and any(_is_case(branch, thunk, scope) for branch in thunk.parts.values())


def _is_case(branch: list[_Thunk], conditional: _Thunk, scope: str) -> bool:
    """Whether a branch of a conditional is the case of a scope."""
    place = len(conditional.path) + 1
    return any(thunk.path[place : place + 1] == [scope] for thunk in _all(branch))


def _all(thunks: Iterable[_Thunk]) -> Iterator[_Thunk]:
    for thunk in thunks:
        yield thunk
        for inner in thunk.parts.values():
            yield from _all(inner)


def _unwrapped(thunks: Iterable[_Thunk]) -> Iterator[_Thunk]:
    """The thunks with those of graphs in place of the graphs."""
    for thunk in thunks:
        if thunk.kind == _GRAPH:
            yield from _unwrapped(thunk.parts.get("", []))
        else:
            yield thunk


def _counted(tree: _Tree, bucket: int, has_chunks: bool, max_seqs: int, sampled: str) -> StepLaunches:
    head = tree.head_rows()
    rows = min((size for size in head if size >= max_seqs), default=max(head, default=0))
    counter = _Counter(bucket, rows, CASES[sampled])
    (loop,) = tree.step(bucket)
    in_graph = any(loop in _all(thunk.parts.get("", [])) for thunk in _all(tree.roots) if thunk.kind == _GRAPH)
    for part in ("condition", "body"):
        counter.add(loop.parts.get(part, []), 1, in_graph)
    counter.decide(1, in_graph)
    return StepLaunches(
        bucket,
        has_chunks,
        sampled,
        {part: counter.kernels[part] for part in PARTS},
        counter.layer_kernels,
        counter.host_launches,
        counter.host_conditions,
        counter.graph_conditions,
    )


class _Counter:
    """Adds up what a step launches."""

    def __init__(self, bucket: int, rows: int, taken: frozenset[str]):
        self._bucket, self._rows, self._taken = bucket, rows, taken
        self.kernels: collections.Counter[str] = collections.Counter()
        self.layer_kernels = self.host_launches = self.host_conditions = self.graph_conditions = 0

    def add(self, thunks: Iterable[_Thunk], times: int, in_graph: bool) -> None:
        """Args: times: how often a step runs them."""
        for thunk in thunks:
            if thunk.kind == _GRAPH:
                self.host_launches += 0 if in_graph else times
                self.add(thunk.parts.get("", []), times, True)
            elif thunk.kind in _GROUPS:
                self.add(thunk.parts.get("", []), times, in_graph)
            elif thunk.kind == _LOOP:
                self._add_loop(thunk, times, in_graph)
            elif thunk.kind == _CONDITIONAL:
                self.decide(times, in_graph)
                self.add(self._branch(thunk), times, in_graph)
            else:
                self.kernels[_part(thunk)] += times
                self.host_launches += 0 if in_graph else times

    def decide(self, times: int, in_graph: bool) -> None:
        """Count conditions."""
        if in_graph:
            self.graph_conditions += times
        else:
            self.host_conditions += times

    def _add_loop(self, loop: _Thunk, times: int, in_graph: bool) -> None:
        body, condition = loop.parts.get("body", []), loop.parts.get("condition", [])
        before = self.kernels.total()
        if loop.trips is None:
            trips = self._trips(loop.path)
        else:
            trips = loop.trips
        if loop.trips is None or in_graph:  # the host counts by itself
            self.decide(times * (trips + 1), in_graph)
            self.add(condition, times * (trips + 1), in_graph)
        self.add(body, times * trips, in_graph)
        if loop.trips and times and self._bucket in map(scopes.bucket_of, loop.path) and not self.layer_kernels:
            self.layer_kernels = (self.kernels.total() - before) // (times * trips)

    def _trips(self, path: list[str]) -> int:
        """Trips of a loop that ends when the device says so: one for the bucket and the rows of the step."""
        if scopes.PENALISED in path:
            return int(scopes.PENALISED in self._taken)
        if path[-2:-1] and (rows := scopes.rows_of(path[-2])) is not None:
            return int(rows == self._rows)
        return int(path[-2:] == [scopes.forward(self._bucket), "while"])

    def _branch(self, thunk: _Thunk) -> list[_Thunk]:
        """The branch of a `lax.cond` that is taken: the first, false, where no scope of `taken` has the condition. XLA
        may have exchanged the branches; the scopes of what is inside say which is which. Of the cases of
        `loops.run_bucket` it is that of the bucket, or of the rows."""
        cases = scopes.forward(self._bucket), scopes.head(self._rows)
        for branch in thunk.parts.values():
            if any(_is_case(branch, thunk, scope) for scope in cases):
                return branch
        wanted = int(bool(self._taken.intersection(thunk.path[-2:-1])))
        branches = list(thunk.parts.values())
        numbers = [_number(inner, len(thunk.path)) for inner in branches]
        if wanted in numbers:
            return branches[numbers.index(wanted)]
        unknown = [i for i, number in enumerate(numbers) if number is None]
        known = len(unknown) < len(branches)
        return branches[unknown[0] if known and unknown else wanted]


def _number(branch: list[_Thunk], depth: int) -> int | None:
    """The number of a branch of a conditional whose path has `depth` scopes; None where nothing says it."""
    for thunk in _all(branch):
        match = _BRANCH.fullmatch(thunk.path[depth]) if len(thunk.path) > depth else None
        if match:
            return int(match[1])
    return None


def _part(thunk: _Thunk) -> str:
    path = thunk.path
    if thunk.kind in _MATMULS or thunk.kernel.startswith(_MATMUL_KERNELS):
        return MATMULS
    if scopes.SAMPLING in path:
        return SAMPLING
    if any(scopes.bucket_of(each) is not None for each in path):
        found = ((scopes.ATTENTION, ATTENTION), (scopes.KV_WRITE, KV_WRITE))
        return next((part for scope, part in found if scope in path), LAYERS)
    return CONTROL
