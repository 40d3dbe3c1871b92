"""Automata over bytes of regular expressions.

A regex is read by Python's own parser, becomes a nondeterministic automaton over the bytes of UTF-8 (Thompson, "Regular
expression search algorithm", 1968), and by the construction of subsets a deterministic one (Rabin and Scott, 1959).
All of it is bounded: a stranger's regex costs a second or two at most, and is refused then.
"""

import bisect
import collections
import functools
import re
import sys
from collections.abc import Iterable
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from levanter_infer.structured.automaton import MAX_STATES, ConstraintError, TooManyStates
from levanter_infer.structured.work import Work

_MAX_CHARS = 2**18
"""Characters of a regex: Python's parser takes some 5 s for a million."""
_MAX_NODES = 200_000
"""States of the nondeterministic automaton."""
_MAX_STEPS, _MAX_WORK = 1_000_000, 4_000_000
"""Steps of the construction of the nodes, which take about a microsecond, and of subsets."""
_LAST = sys.maxunicode
_LAST_CASED = 0x1FFFF
"""No character behind it has a case."""
_SURROGATES = (0xD800, 0xDFFF)
_LENGTHS = ((0, 0, 0x7F, 0), (6, 0x80, 0x7FF, 0xC0), (12, 0x800, 0xFFFF, 0xE0), (18, 2**16, _LAST, 0xF0))
"""For characters of 1 to 4 bytes: bits behind the first byte, least and last character, first byte of zeros."""
Ranges = tuple[tuple[int, int], ...]


def transitions_of(regex: str) -> tuple[np.ndarray, np.ndarray]:
    """Transitions i32[state, 256] (-1: none; begins in state 0) and accepting states bool[state].

    The whole text matches; the syntax is that of Python's `re`, without what is not regular (lookaround, references,
    atomic groups) and without boundaries.
    Raises: ConstraintError for another regex, TooManyStates for one that is too large.
    """
    if len(regex) > _MAX_CHARS:
        raise TooManyStates(f"it has {len(regex)} characters; at most {_MAX_CHARS} are taken")
    try:
        tree = parser.parse(regex)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConstraintError(f"it is no regular expression: {str(error)[:200]}") from None
    nodes = _Nodes()
    try:
        begin = nodes.sequence(_without_anchors(list(tree)), nodes.accept, tree.state.flags)
    except RecursionError:
        raise TooManyStates("it nests too deeply") from None
    return _determined(nodes, begin)


def _without_anchors(items: list) -> list:
    """The items without `^` at their begin and `$` at their end, which say what holds anyway."""
    begins, ends = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING), (codes.AT_END, codes.AT_END_STRING)
    if items and items[0][0] is codes.AT and items[0][1] in begins:
        items = items[1:]
    if items and items[-1][0] is codes.AT and items[-1][1] in ends:
        items = items[:-1]
    if len(items) == 1 and items[0][0] is codes.BRANCH:
        _, branches = items[0][1]
        return [(codes.BRANCH, (None, [_without_anchors(list(branch)) for branch in branches]))]
    return items


def _work(steps: int) -> Work:
    return Work(steps, TooManyStates("its automaton takes too long to make; simplify it"))


class _Nodes:
    """The nondeterministic automaton. It is built from its end: each part knows the node that follows it."""

    def __init__(self):
        self.steps: list[list[tuple[int, int, int]]] = [[]]
        """For each node: (first byte, last byte, next node)."""
        self.empty: list[list[int]] = [[]]
        """For each node: nodes that it reaches without a byte."""
        self.accept = 0
        self._work = _work(_MAX_STEPS)
        self._known: dict[tuple, Ranges] = {}
        """The characters of each set."""

    def new(self, steps: list[tuple[int, int, int]] | None = None, empty: list[int] | None = None) -> int:
        """A node with these transitions."""
        if len(self.steps) >= _MAX_NODES:
            raise TooManyStates(f"it spells out to more than {_MAX_NODES} positions; repeat fewer times")
        self._work.take(len(steps or ()) + len(empty or ()))
        self.steps.append(steps or [])
        self.empty.append(empty or [])
        return len(self.steps) - 1

    def sequence(self, items: Iterable, after: int, flags: int) -> int:
        """The first node of the items, one after the other."""
        for kind, value in reversed(list(items)):
            after = self.item(kind, value, after, flags)
        return after

    def item(self, kind: Any, value: Any, after: int, flags: int) -> int:
        """The first node of one item of Python's parser."""
        self._work.take(1)
        if kind in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            entries = tuple(value) if kind is codes.IN else ((codes.LITERAL, value),)
            self._work.take(len(entries))
            key = kind, entries, flags
            if key not in self._known:
                self._known[key] = _characters(kind, entries, flags, self._work)
            return self.characters(self._known[key], after)
        if kind is codes.BRANCH:
            return self.new(empty=[self.sequence(branch, after, flags) for branch in value[1]])
        if kind is codes.SUBPATTERN:
            _, added, removed, items = value
            return self.sequence(items, after, (flags | added) & ~removed)
        if kind in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, items = value
            return self.repeated(least, most, items, after, flags)
        named = str(kind).lower()
        raise ConstraintError(
            f"it has {named}, which no automaton over text without context has; leave it out (lookaround, references, "
            "boundaries, and anchors other than around the whole are not supported)"
        )

    def repeated(self, least: int, most: Any, items: Iterable, after: int, flags: int) -> int:
        """The first node of `items`, `least` to `most` times."""
        items = list(items)
        if most is codes.MAXREPEAT:
            again = self.new()
            self.empty[again] += [self.sequence(items, again, flags), after]
            first = again
        else:
            first = after
            for _ in range(most - least):
                first = self.new(empty=[self.sequence(items, first, flags), after])
        for _ in range(least):
            before, first = first, self.sequence(items, first, flags)
            if first == before:  # they hold no character, however often
                break
        return first

    def characters(self, ranges: Ranges, after: int) -> int:
        """A node from which one character of the ranges leads to `after`."""
        known: dict[tuple, int] = {(): after}

        def node(tree: tuple) -> int:
            if tree not in known:
                known[tree] = self.new([(first, last, node(child)) for first, last, child in tree])
            return known[tree]

        return node(_utf8(ranges)) if ranges else self.new()  # no character: it leads nowhere


@functools.lru_cache(256)
def _utf8(ranges: Ranges) -> tuple:
    """The bytes of the characters of some ranges, as a tree: (first byte, last byte, tree of the bytes after it). Equal
    trees stand for equal ends of characters."""
    trees: list[tuple[int, int, tuple]] = []
    for bits, least, most, lead in _LENGTHS:
        own = [(max(first, least), min(last, most)) for first, last in ranges if first <= most and last >= least]
        trees += _tree(own, bits, lead)
    return _merged(trees)


def _tree(ranges: list[tuple[int, int]], bits: int, lead: int) -> list[tuple[int, int, tuple]]:
    """Transitions on the byte that has the bits from `bits` on of the characters in these ranges."""
    if bits == 0:
        return [(lead + first, lead + last, ()) for first, last in ranges]
    full = (1 << bits) - 1
    parts: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    whole: list[tuple[int, int]] = []
    for first, last in ranges:
        low, high = first >> bits, last >> bits
        if first & full:
            parts[low].append((first & full, last & full if low == high else full))
            low += 1
        elif low == high and last & full != full:
            parts[low].append((0, last & full))
            low += 1
        if low <= high and low << bits <= last:
            if last & full != full:
                parts[high].append((0, last & full))
                high -= 1
            if low <= high:
                whole.append((low, high))
    found = [(lead + low, lead + low, _merged(_tree(own, bits - 6, 0x80))) for low, own in parts.items()]
    everything = _merged(_tree([(0, full)], bits - 6, 0x80))
    return found + [(lead + low, lead + high, everything) for low, high in whole]


def _merged(trees: list[tuple[int, int, tuple]]) -> tuple:
    """Sorted, and neighbours with the same tree as one."""
    result: list[tuple[int, int, tuple]] = []
    for first, last, child in sorted(trees, key=lambda each: each[0]):
        if result and result[-1][1] == first - 1 and result[-1][2] == child:
            first = result.pop()[0]
        result.append((first, last, child))
    return tuple(result)


# Characters


def _characters(kind: Any, entries: tuple[tuple[Any, Any], ...], flags: int, work: Work) -> Ranges:
    """The characters that an item stands for; none are surrogates. Args: entries: of a set in brackets."""
    if kind is codes.ANY:
        return _complement(() if flags & re.DOTALL else ((10, 10),))
    negated = kind is codes.NOT_LITERAL
    ranges: list[tuple[int, int]] = []
    for name, entry in entries:
        if name is codes.NEGATE:
            negated = True
        elif name is codes.LITERAL:
            ranges.append((entry, entry))
        elif name is codes.RANGE:
            ranges.append(entry)
        else:
            ranges += _category(str(entry), bool(flags & re.ASCII))
    if flags & re.IGNORECASE:
        cased, others = _cases()
        for first, last in _sorted(ranges):
            begin, end = bisect.bisect_left(cased, first), bisect.bisect_right(cased, last)
            ranges += [(other, other) for other in others[begin:end]]
    work.take(len(ranges))
    return _complement(_sorted(ranges)) if negated else _complement(_complement(_sorted(ranges)))


def _sorted(ranges: Iterable[tuple[int, int]]) -> Ranges:
    result: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(result[-1][1], last))
        else:
            result.append((first, last))
    return tuple(result)


def _complement(ranges: Ranges) -> Ranges:
    """All other characters, without surrogates, which UTF-8 does not have."""
    result, begin = [], 0
    for first, last in _sorted([*ranges, _SURROGATES]):
        if first > begin:
            result.append((begin, first - 1))
        begin = last + 1
    return tuple(result) if begin > _LAST else (*result, (begin, _LAST))


@functools.cache
def _category(name: str, ascii_only: bool) -> Ranges:
    """The characters of \\\\d, \\\\s, \\\\w and of what they leave out, as Python's `re` has them."""
    letter = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}[name.rpartition("_")[2]]
    text = "".join(map(chr, range(_LAST + 1)))
    found = re.finditer(f"\\{letter}+", text, re.ASCII if ascii_only else 0)
    ranges = tuple((match.start(), match.end() - 1) for match in found)
    return _complement(ranges) if "_NOT_" in name else ranges


@functools.cache
def _cases() -> tuple[list[int], list[int]]:
    """The characters that have a case, sorted and as often as others differ from them in case only, and those."""
    found = {(i, ord(c)) for i in range(_LAST_CASED + 1) for c in (chr(i).lower(), chr(i).upper()) if len(c) == 1}
    pairs = sorted((a, b) for a, b in found | {(b, a) for a, b in found} if a != b)
    return [a for a, _ in pairs], [b for _, b in pairs]


# Subsets


def _determined(nodes: _Nodes, begin: int) -> tuple[np.ndarray, np.ndarray]:
    """The deterministic automaton of the nodes."""
    bounds = sorted({0, 256, *(b for steps in nodes.steps for first, last, _ in steps for b in (first, last + 1))})
    place = {bound: i for i, bound in enumerate(bounds)}
    closures: dict[int, frozenset[int]] = {}
    work = _work(_MAX_WORK)

    def closure(node: int) -> frozenset[int]:
        """The nodes with transitions, and the accepting one, that a node reaches without a byte."""
        if node not in closures:
            seen, waiting = {node}, [node]
            while waiting:
                others = nodes.empty[waiting.pop()]
                work.take(len(others))
                for other in others:
                    if other not in seen:
                        seen.add(other)
                        waiting.append(other)
            closures[node] = frozenset(each for each in seen if nodes.steps[each] or each == nodes.accept)
        return closures[node]

    first = closure(begin)
    number = {first: 0}
    rows: list[dict[int, int]] = []
    waiting = collections.deque([first])
    while waiting:
        state = waiting.popleft()
        targets: dict[int, set[int]] = {}
        for node in state:
            for low, high, target in nodes.steps[node]:
                reached, columns = closure(target), range(place[low], place[high + 1])
                work.take(max(1, len(reached)) * len(columns))
                for i in columns:
                    targets.setdefault(i, set()).update(reached)
        row = {}
        for i, reached in targets.items():
            key = frozenset(reached)
            if key not in number:
                number[key] = len(number)
                waiting.append(key)
            row[i] = number[key]
        rows.append(row)
        if len(number) > MAX_STATES:
            raise TooManyStates(f"its automaton has more than {MAX_STATES} states over bytes; simplify it")
    table = np.full((len(rows), len(bounds) - 1), -1, np.int32)
    for i, row in enumerate(rows):
        table[i, list(row)] = list(row.values())
    accepting = np.array([nodes.accept in state for state in number])
    return np.repeat(table, np.diff(bounds), axis=1), accepting
