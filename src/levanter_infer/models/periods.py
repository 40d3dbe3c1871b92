"""The repeating pattern of a list of layers: which layers run in one loop, and the bodies that the loop unrolls."""

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
class Group(Generic[Item]):
    """Consecutive layers that one loop computes: `repeats` trips over the layers of `period`."""

    first: int
    """Number of the group's first layer."""
    period: tuple[Item, ...]
    """One item per layer, in their order."""
    repeats: int
    runs: tuple[int, ...] | None = None
    """Equal layers one after the other that each body of the period computes, in a loop of its own; None: every layer
    has a body."""

    @property
    def bodies(self) -> tuple[tuple[int, int], ...]:
        """For each body, the offset of its first layer within the period, and the number of its layers."""
        runs = self.runs or (1,) * len(self.period)
        return tuple(zip(itertools.accumulate(runs, initial=0), runs, strict=False))

    @property
    def num_layers(self) -> int:
        return len(self.period) * self.repeats


def find_periods(
    layers: Sequence[Item], describe: Callable[[Sequence[Item]], Iterable[str]] = lambda layers: map(str, layers)
) -> tuple[Group[Item], ...]:
    """The groups that cover `layers` in order with the fewest bodies and loops: the sum of both is minimal.

    48 equal layers are one group with a period of 1. 62 layers of the pattern LLLLLG are ten repeats of a period of 6
    and two repeats of L. A first layer of another kind is a group of its own. Where the bodies are too many, equal
    neighbours share one: four times MMMMMMMMMA is a period of the two bodies 9 M and A.

    Args:
        layers: one hashable item per layer; equal items have equal bodies.
        describe: the layers in words, for the error.
    Raises: ValueError if there is no layer, or if the bodies of all groups are more than `MAX_BODIES`.
    """
    if not layers:
        raise ValueError("a stack of no layers, expected at least one")
    groups = _groups(layers)
    if _num_bodies(groups) > MAX_BODIES:
        groups = _groups_of_runs(layers)
    bodies = _num_bodies(groups)
    if bodies > MAX_BODIES:
        codes = set(layers)
        raise ValueError(
            f"{len(layers)} layers of {len(codes)} kinds need {bodies} layer bodies, expected at most {MAX_BODIES}: "
            f"their pattern repeats too little. The layers are {run_lengths(describe(layers))}"
        )
    return tuple(groups)


def _num_bodies(groups: Sequence[Group]) -> int:
    return sum(len(group.bodies) for group in groups)


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
