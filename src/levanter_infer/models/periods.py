"""The repeating pattern of a list of layers: which layers run in one loop, and the bodies that the loop unrolls."""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

MAX_BODIES = 8
"""Most layer bodies in one program: each of them is compiled."""
MAX_RUNS = 40
"""Most runs of equal layers that an error lists."""

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class Body(Generic[Item]):
    """Equal layers with one compiled body: in every trip of a loop, some consecutive ones of them."""

    item: Item
    starts: tuple[int, ...]
    """For each trip the number of its first layer; for a trip without layers, that of another trip."""
    counts: tuple[int, ...]
    """For each trip the number of its layers."""


@dataclass(frozen=True)
class Group(Generic[Item]):
    """Consecutive layers that one loop computes: `repeats` times those of `period`."""

    first: int
    """Number of the group's first layer."""
    period: tuple[Item, ...]
    """One item per layer, in their order."""
    repeats: int
    runs: tuple[int, ...] | None = None
    """Equal layers one after the other that each body of the period computes, in a loop of its own; None: every layer
    has a body."""
    cycle: tuple[Item, ...] | None = None
    """The kinds of layers, each with one body, of a period that is run once; in every trip of the loop each body
    computes as many layers as follow, or none. None: the bodies are those of `runs`."""

    @functools.cached_property
    def bodies(self) -> tuple[Body[Item], ...]:
        """The bodies in the order in which a trip runs them."""
        if self.cycle is not None:
            return _bodies_of_cycle(self.first, self.period, self.cycle)
        runs = self.runs or (1,) * len(self.period)
        stop = self.first + self.num_layers
        return tuple(
            Body(self.period[offset], tuple(range(self.first + offset, stop, len(self.period))), (run,) * self.repeats)
            for offset, run in zip(itertools.accumulate(runs, initial=0), runs, strict=False)
        )

    @property
    def trips(self) -> int:
        """Trips of the loop."""
        return len(self.bodies[0].counts)

    @property
    def num_layers(self) -> int:
        return len(self.period) * self.repeats


def find_periods(
    layers: Sequence[Item], describe: Callable[[Sequence[Item]], Iterable[str]] = lambda layers: map(str, layers)
) -> tuple[Group[Item], ...]:
    """The groups that cover `layers` in order with the fewest bodies and loops: the sum of both is minimal.

    48 equal layers are one group with a period of 1. 62 layers of the pattern LLLLLG are ten repeats of a period of 6
    and two repeats of L. A first layer of another kind is a group of its own. Where the bodies are too many, equal
    neighbours share one: four times MMMMMMMMMA is a period of the two bodies 9 M and A. Where these are too many, the
    pattern repeats too little: every kind has one body, and each trip runs as many layers of each kind as follow.

    Args:
        layers: one hashable item per layer; equal items have equal bodies.
        describe: the layers in words, for the error.
    Raises: ValueError if there is no layer, or if there are more than `MAX_BODIES` kinds.
    """
    if not layers:
        raise ValueError("a stack of no layers, expected at least one")
    groups = _groups(layers)
    if _num_bodies(groups) > MAX_BODIES:
        groups = _groups_of_runs(layers)
    if _num_bodies(groups) > MAX_BODIES:
        kinds = tuple(dict.fromkeys(layers))
        if len(kinds) > MAX_BODIES:
            raise ValueError(
                f"{len(layers)} layers of {len(kinds)} kinds need {len(kinds)} layer bodies, expected at most "
                f"{MAX_BODIES}. The layers are {run_lengths(describe(layers))}"
            )
        groups = [Group(0, tuple(layers), 1, cycle=kinds)]
    return tuple(groups)


def _num_bodies(groups: Sequence[Group]) -> int:
    return sum(len(group.bodies) for group in groups)


def _bodies_of_cycle(first: int, layers: Sequence[Item], cycle: Sequence[Item]) -> tuple[Body[Item], ...]:
    """For each kind of `cycle`, the body of its layers: in every trip those that follow."""
    trips: dict[Item, list[tuple[int, int]]] = {item: [] for item in cycle}
    runs = [(item, len(list(equal))) for item, equal in itertools.groupby(layers)]
    while runs:
        for item, found in trips.items():
            count = runs.pop(0)[1] if runs and runs[0][0] == item else 0
            found.append((first, count))
            first += count
    bodies = []
    for item, found in trips.items():
        some = next(start for start, count in found if count)
        bodies.append(Body(item, tuple(start if n else some for start, n in found), tuple(n for _, n in found)))
    return tuple(bodies)


def _groups(layers: Sequence[Item]) -> list[Group[Item]]:
    """The cheapest groups in which every layer of a period has a body."""
    codes: dict[Item, int] = {}
    kinds = [codes.setdefault(layer, len(codes)) for layer in layers]
    groups: list[Group[Item]] = []
    for first, size in _cheapest(kinds):
        period = tuple(layers[first : first + size])
        if groups and groups[-1].period == period:
            groups[-1] = replace(groups[-1], repeats=groups[-1].repeats + 1)
        else:
            groups.append(Group(first, period, 1))
    return groups


def _groups_of_runs(layers: Sequence[Item]) -> list[Group[Item]]:
    """The cheapest groups in which equal neighbours have one body."""
    runs = [(layer, len(list(equal))) for layer, equal in itertools.groupby(layers)]
    starts = list(itertools.accumulate((count for _, count in runs), initial=0))
    groups: list[Group[Item]] = []
    for group in _groups(runs):
        first, counts = starts[group.first], tuple(count for _, count in group.period)
        if len(counts) == 1 and group.repeats == 1:
            groups.append(Group(first, (group.period[0][0],), counts[0]))
        else:
            period = tuple(layer for layer, count in group.period for _ in range(count))
            groups.append(Group(first, period, group.repeats, counts))
    return groups


def run_lengths(names: Iterable[str]) -> str:
    """Names in order, with equal neighbours written once: `3 x dense, 58 x experts`; of many, the first."""
    runs = [(name, len(list(equal))) for name, equal in itertools.groupby(names)]
    shown = [name if count == 1 else f"{count} x {name}" for name, count in runs[:MAX_RUNS]]
    return ", ".join(shown) + (f" and {len(runs) - MAX_RUNS} more" if len(runs) > MAX_RUNS else "")


def _cheapest(kinds: list[int]) -> list[tuple[int, int]]:
    """First layer and size of every repeat of every period.

    A shortest path over prefixes: `costs[end, size]` is the lowest cost of the first `end` layers where the last period
    has that size. Another repeat of the same period is free; a new group costs its bodies, and one for its loop.
    """
    costs: dict[tuple[int, int], int] = {}
    before: dict[tuple[int, int], tuple[int, int]] = {}
    best = [(0, (0, 0))]  # of every prefix: the lowest cost, and its key
    for end in range(1, len(kinds) + 1):
        sizes = range(1, min(end, MAX_BODIES) + 1)
        for size in sizes:
            start = end - size
            cost, previous = best[start][0] + size + 1, best[start][1]
            repeated = (start, size)
            if costs.get(repeated, cost) < cost and kinds[start - size : start] == kinds[start:end]:
                cost, previous = costs[repeated], repeated
            costs[end, size], before[end, size] = cost, previous
        best.append(min((costs[end, size], (end, size)) for size in sizes))
    path, key = [], best[-1][1]
    while key != (0, 0):
        path.append((key[0] - key[1], key[1]))
        key = before[key]
    return path[::-1]
