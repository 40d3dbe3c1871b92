"""`TokenAutomaton`: which tokens may follow, as a finite automaton over token ids.

A constraint on the text of a sample (a regex, a schema, a list of choices) is a finite automaton over bytes; tokens are
strings of bytes, so it is one over tokens too (Willard and Louf, "Efficient Guided Generation for Large Language
Models", arXiv:2307.09702). Constraints on tokens (`allowed_token_ids`, `bad_words`) are automata of the same kind, and
the intersection of two is both at once.

Tokens with the same transitions in all states form a class, so that the table has states x classes entries.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

MAX_STATES = 2**15 - 1
"""States of one automaton, at most: they are numbered in 16 bits."""
MAX_CLASSES = 2**16
"""Classes of tokens of one automaton, at most."""
MASK_LANES = 128
"""A mask has a multiple of so many words: TPUs store as many side by side."""
_WORD = 32
_CHUNK_ENTRIES, _MAX_ENTRIES = 2**22, 2**28
"""Entries of the table of states and spellings that are computed together, and that there are at most."""
_MAX_PRODUCT = 2**23
"""Entries of the table of an intersection, which takes a fifth of a microsecond for each."""


class ConstraintError(ValueError):
    """A constraint that cannot be applied; the message says what was got and what to do."""


class TooManyStates(ConstraintError):
    """The automaton of a constraint has more states than there are numbers for."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """The tokens that may follow in each state, and the state that each leads to. Samples begin in state 0."""

    next: np.ndarray
    """i16[state, class]: the next state; -1 where the tokens of the class may not follow."""
    class_of: np.ndarray
    """u16[vocab]: the class of each token."""
    end: int | None = None
    """The state after a sample has ended; None: it may go on for ever."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, with those of `masks`."""
        return self.next.nbytes + self.class_of.nbytes + 4 * self.num_masks * mask_words(len(self.class_of))

    @property
    def num_states(self) -> int:
        """States."""
        return self.next.shape[0]

    @property
    def num_classes(self) -> int:
        """Classes of tokens."""
        return self.next.shape[1]

    def step(self, state: int, token: int) -> int:
        """The state after `token`; -1 if it may not follow."""
        return int(self.next[state, self.class_of[token]])

    def allowed(self, state: int) -> np.ndarray:
        """bool[vocab], the tokens that may follow."""
        return self.next[state, self.class_of] >= 0

    @functools.cached_property
    def _patterns(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct rows of `next >= 0`, bool[mask, class], and which one each state has, i32[state]."""
        may_follow = self.next >= 0
        bits = np.packbits(may_follow, axis=1)
        _, first, mask_of = np.unique(bits.view(f"V{bits.shape[1]}"), return_index=True, return_inverse=True)
        return may_follow[first], mask_of.reshape(-1).astype(np.int32)

    @property
    def num_masks(self) -> int:
        """Distinct sets of tokens that may follow."""
        return len(self._patterns[0])

    @property
    def mask_of(self) -> np.ndarray:
        """i32[state]: the row of `masks` of each state."""
        return self._patterns[1]

    @functools.cached_property
    def masks(self) -> np.ndarray:
        """u32[mask, word] of `packed`: the distinct sets of tokens that may follow."""
        size = max(1, _CHUNK_ENTRIES // len(self.class_of))
        patterns = [self._patterns[0][i : i + size] for i in range(0, self.num_masks, size)]
        return np.concatenate([packed(np.take(some, self.class_of, axis=1)) for some in patterns])


def forced_tokens(masks: np.ndarray, vocab_size: int) -> np.ndarray:
    """i32[mask], the one token that each of the masks u32[mask, word] of `packed` allows; `vocab_size` where it allows
    another number of tokens."""
    word = masks.argmax(axis=1)
    bits = masks[np.arange(len(masks)), word]
    single = (np.count_nonzero(masks, axis=1) == 1) & (bits & (bits - np.uint32(1)) == 0)
    bit = np.log2(np.where(single, bits, 1)).astype(np.int64)
    return np.where(single, bit * masks.shape[1] + word, vocab_size).astype(np.int32)


def mask_words(vocab_size: int) -> int:
    """Words of a mask over so many tokens."""
    return -(-vocab_size // (_WORD * MASK_LANES)) * MASK_LANES


def packed(allowed: np.ndarray) -> np.ndarray:
    """bool[mask, vocab] as bits, u32[mask, word]. Bit b of word w is token b * words + w, so that all tokens of one bit
    stand side by side: unpacking moves no data."""
    words = mask_words(allowed.shape[1])
    found = np.zeros((len(allowed), words), np.uint32)
    for bit in range(-(-allowed.shape[1] // words)):
        own = allowed[:, bit * words : (bit + 1) * words]
        found[:, : own.shape[1]] |= own.astype(np.uint32) << np.uint32(bit)
    return found


def from_table(table: np.ndarray, class_of: np.ndarray, end: int | None = None) -> TokenAutomaton:
    """The automaton of a table [state, class], which begins in state 0: without states that are never reached or lead
    nowhere, and with tokens of equal columns in one class.

    Args:
        class_of: the column of each token.
        end: the state after a sample has ended. Every state leads there; None: samples go on for ever.
    Raises: ConstraintError if no text is left; TooManyStates.
    """
    columns, merged = _distinct_columns(table)
    class_of = merged[class_of]
    alive = _leading_to(columns, end) if end is not None else _going_on(columns)
    if not alive[0]:
        raise ConstraintError("no text of this vocabulary satisfies it")
    table = np.where((columns >= 0) & alive[columns], columns, -1)
    reached = np.zeros(len(table), bool)
    frontier = np.array([0])
    while len(frontier):
        reached[frontier] = True
        found = np.unique(table[frontier])
        found = found[found >= 0]
        frontier = found[~reached[found]]
    if reached.sum() > MAX_STATES:
        raise TooManyStates(f"it has {int(reached.sum())} states over this vocabulary; at most {MAX_STATES} fit")
    number = np.append(np.where(reached, np.cumsum(reached) - 1, -1), -1).astype(np.int16)  # the last one is for -1
    columns, merged = _distinct_columns(number[table[reached]])
    if columns.shape[1] > MAX_CLASSES:
        raise TooManyStates(f"it tells {columns.shape[1]} classes of tokens apart; at most {MAX_CLASSES} fit")
    return TokenAutomaton(
        next=np.ascontiguousarray(columns),
        class_of=merged[class_of].astype(np.uint16),
        end=None if end is None else int(number[end]),
    )


def from_bytes(
    transitions: np.ndarray, accepting: np.ndarray, tokens: Sequence[bytes], end_ids: Iterable[int]
) -> TokenAutomaton:
    """The automaton over tokens of one over bytes. In accepting states the end-of-sequence tokens may follow.

    Args:
        transitions: i32[state, 256], the state after each byte; -1: none. Begins in state 0.
        accepting: bool[state].
        tokens: the bytes of each token; empty for those that stand for no text, which never follow.
        end_ids: the end-of-sequence tokens.
    Raises: ConstraintError if no text of these tokens is accepted; TooManyStates.
    """
    end = len(transitions)
    too_many = TooManyStates(f"it has {end} states over bytes, too many for a vocabulary of {len(tokens)} tokens")
    if end >= MAX_STATES:
        raise too_many
    columns, byte_class = _distinct_columns(transitions)
    spelled, class_of = _spellings(tokens, byte_class)
    if end * len(spelled) > _MAX_ENTRIES:
        raise too_many
    columns = np.pad(columns.astype(np.int16), ((0, 1), (0, 1)), constant_values=-1)  # one more row: of state -1
    table = np.full((end + 1, len(spelled) + 1), -1, np.int16)
    spellings = _Spellings(spelled, columns.shape[1] - 1)
    for states in _alike(columns[:-1], len(spelled)):
        spellings.walk(columns, states, table)
    table[:end, -1] = np.where(accepting, end, -1)
    class_of[[token for token in end_ids if token < len(class_of)]] = len(spelled)
    return from_table(table, class_of, end)


def _alike(columns: np.ndarray, num_spellings: int) -> Iterable[np.ndarray]:
    """All states, a few at a time, in groups in which the same bytes may follow: there the same spellings go on."""
    patterns, group_of = np.unique(np.packbits(columns >= 0, axis=1), axis=0, return_inverse=True)
    order = np.argsort(group_of.reshape(-1), kind="stable")
    sizes = np.bincount(group_of.reshape(-1), minlength=len(patterns))
    most = max(1, _CHUNK_ENTRIES // max(num_spellings, 1))
    for group in np.split(order, np.cumsum(sizes)[:-1]):
        yield from (group[begin : begin + most] for begin in range(0, len(group), most))


def _spellings(tokens: Sequence[bytes], byte_class: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct spellings of tokens in classes of bytes, u16[spelling, byte], filled up with the number of classes,
    which leads nowhere; and the spelling of each token, i64[vocab]. Spelling 0 is of tokens without bytes."""
    none, translated = int(byte_class.max()) + 1, byte_class.astype(np.uint8).tobytes()
    known: dict[bytes, int] = {b"": 0}
    of_tokens = np.array([known.setdefault(t.translate(translated), len(known)) for t in tokens], np.int64)
    width = max(1, max(map(len, known)))
    spelled = np.full((len(known), width), none + 1, np.int32)
    for i, spelling in enumerate(known):
        spelled[i, : len(spelling)] = np.frombuffer(spelling, np.uint8)
    spelled[0, 0] = none  # leads to -1
    return spelled, of_tokens


class _Spellings:
    """The distinct spellings as a trie, so that a prefix of many is followed once.

    Args: spelled: u16[spelling, byte] of `_spellings`; none: the class that leads nowhere, after which a spelling ends.
    """

    def __init__(self, spelled: np.ndarray, none: int):
        order = np.lexsort(spelled.T[::-1])
        ordered = spelled[order]
        self._levels: list[tuple[np.ndarray, np.ndarray]] = []
        """For nodes of each depth: their parents among those of the depth before, and the classes of their bytes."""
        self._ends: list[tuple[np.ndarray, np.ndarray]] = []
        """For each depth: spellings that end there, and their nodes."""
        node = np.zeros(len(ordered), np.int64)
        alive = np.arange(len(ordered))
        for place in range(ordered.shape[1]):
            alive = alive[ordered[alive, place] <= none]
            if not len(alive):
                break
            parent, step = node[alive], ordered[alive, place]
            first = np.ones(len(alive), bool)
            first[1:] = (parent[1:] != parent[:-1]) | (step[1:] != step[:-1])
            self._levels.append((parent[first], step[first].astype(np.int64)))
            node[alive] = np.cumsum(first) - 1
            ends = alive if place + 1 == ordered.shape[1] else alive[ordered[alive, place + 1] > none]
            self._ends.append((order[ends], node[ends]))

    def walk(self, columns: np.ndarray, states: np.ndarray, into: np.ndarray) -> None:
        """Write the states that follow each of `states` after each spelling into the table i16[state, spelling], which
        has -1 everywhere. Nodes that none of `states` reaches are left out.

        Args: columns: i16[state + 1, class + 1]; the last row and the last column lead nowhere.
        """
        flat, width = columns.reshape(-1), columns.shape[1]
        reached = states.astype(np.int16)[:, None]
        place = np.zeros(1, np.int64)  # of each node of a level, its column in `reached`; -1: none
        for (parents, steps), (ending, nodes) in zip(self._levels, self._ends, strict=True):
            from_place = place[parents]
            followed = np.flatnonzero(from_place >= 0)
            source = reached[:, from_place[followed]].astype(np.int64)
            source *= width
            source += steps[followed]
            reached = flat[source]
            alive = np.flatnonzero((reached >= 0).any(axis=0))
            if not len(alive):
                return
            reached = reached[:, alive]
            place = np.full(len(parents), -1, np.int64)
            place[followed[alive]] = np.arange(len(alive))
            ends = place[nodes] >= 0
            into[states[:, None], ending[ends]] = reached[:, place[nodes[ends]]]


def _distinct_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct columns of a table, and which one each column is. Columns differ if a random sum of their entries
    does, and are compared with the first of their sum."""
    weights = np.random.default_rng(0).integers(1, 2**63, len(table), np.uint64)
    sums = np.zeros(table.shape[1], np.uint64)
    for row, weight in zip(table, weights, strict=True):
        sums += row.astype(np.uint64) * weight
    _, first, which = np.unique(sums, return_index=True, return_inverse=True)
    columns, which = table[:, first], which.reshape(-1)
    size = max(1, _CHUNK_ENTRIES // max(table.shape[1], 1))
    for begin in range(0, len(table), size):
        if not np.array_equal(np.take(columns[begin : begin + size], which, axis=1), table[begin : begin + size]):
            columns, which = np.unique(table, axis=1, return_inverse=True)  # two sums were equal by chance
            return columns, which.reshape(-1)
    return columns, which


def _leading_to(table: np.ndarray, end: int) -> np.ndarray:
    """bool[state], whether a path leads to `end`."""
    num_states = len(table)
    pairs = np.unique(np.where(table >= 0, np.arange(num_states, dtype=np.int64)[:, None] * num_states + table, -1))
    source, target = np.divmod(pairs[pairs >= 0], num_states)
    order = np.argsort(target, kind="stable")
    source, bounds = source[order], np.searchsorted(target[order], np.arange(num_states + 1))
    alive, frontier = np.zeros(num_states, bool), [end]
    while len(frontier):
        alive[frontier] = True
        found = np.unique(np.concatenate([source[bounds[s] : bounds[s + 1]] for s in frontier]))
        frontier = found[~alive[found]]
    return alive


def _going_on(table: np.ndarray) -> np.ndarray:
    """bool[state], whether a path of any length begins there."""
    alive = np.ones(len(table), bool)
    while True:
        left = alive & np.any((table >= 0) & alive[table], axis=1)
        if np.array_equal(left, alive):
            return alive
        alive = left


def of_choices(choices: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Transitions i32[state, 256] and accepting states of the automaton over bytes that accepts these texts.

    Raises: TooManyStates.
    """
    rows: list[dict[int, int]] = [{}]
    ends: set[int] = set()
    for choice in choices:
        ends.add(_entered(rows, choice))
        if len(rows) > MAX_STATES:
            raise TooManyStates(f"they have more than {MAX_STATES} prefixes, one for each character; give fewer")
    transitions = np.full((len(rows), 256), -1, np.int32)
    for state, row in enumerate(rows):
        transitions[state, list(row)] = list(row.values())
    accepting = np.zeros(len(rows), bool)
    accepting[list(ends)] = True
    return transitions, accepting


def of_allowed(token_ids: Iterable[int], vocab_size: int) -> TokenAutomaton:
    """Only these tokens, at any place."""
    class_of = np.zeros(vocab_size, np.int64)
    class_of[list(token_ids)] = 1
    return from_table(np.array([[-1, 0]]), class_of)


def without(words: Iterable[Sequence[int]], vocab_size: int) -> TokenAutomaton:
    """Any tokens, but for the last token of a word (a sequence of token ids) whose others precede it.

    Source: Aho and Corasick, "Efficient string matching", 1975; a state is the longest end of the text that begins a
    word. Raises: TooManyStates.
    """
    words = {tuple(word) for word in words}
    named = sorted({token for word in words for token in word})
    class_of = np.zeros(vocab_size, np.int64)
    class_of[named] = np.arange(1, len(named) + 1)
    children: list[dict[int, int]] = [{}]
    ends = {_entered(children, class_of[list(word)].tolist()) for word in words}
    count, width = len(children), len(named) + 1
    if count * width > _MAX_ENTRIES // 4:
        raise TooManyStates(f"they have {count} prefixes and {width - 1} distinct tokens, which is too many together")
    table, shorter = np.zeros((count, width), np.int32), np.zeros(count, np.int64)
    forbidden = np.isin(np.arange(count), list(ends))
    waiting = collections.deque([0])
    while waiting:  # the shorter ones first
        state = waiting.popleft()
        table[state] = table[shorter[state]]  # where it leads without its first token
        for column, child in children[state].items():
            shorter[child] = table[state, column]
            forbidden[child] |= forbidden[shorter[child]]
            table[state, column] = child
            waiting.append(child)
    return from_table(np.where(forbidden[table], -1, table), class_of)


def _entered(children: list[dict[int, int]], word: Sequence[int]) -> int:
    """The node of a word in a trie, which is given by the children of each node, and has it afterwards."""
    node = 0
    for each in word:
        if each not in children[node]:
            children.append({})
            children[node][each] = len(children) - 1
        node = children[node][each]
    return node


def intersection(first: TokenAutomaton, second: TokenAutomaton) -> TokenAutomaton:
    """An automaton of the texts that both allow.

    Raises: ConstraintError if there are none; TooManyStates.
    """
    pairs = first.class_of.astype(np.int64) * second.num_classes + second.class_of
    classes, class_of = np.unique(pairs, return_inverse=True)
    of_first, of_second = np.divmod(classes, second.num_classes)
    most = min(MAX_STATES, _MAX_PRODUCT // len(classes))
    has_end = first.end is not None or second.end is not None
    number = {(0, 0): 1}  # 0 is kept for the end
    rows = {0: np.full(len(classes), -1, np.int32)}
    waiting = collections.deque([(0, 0)])
    while waiting:
        a, b = pair = waiting.popleft()
        left, right = first.next[a, of_first], second.next[b, of_second]
        both = np.where((left >= 0) & (right >= 0), left.astype(np.int64) << 16 | right, -1)
        values, which = np.unique(both, return_inverse=True)
        targets = np.full(len(values), -1, np.int32)
        for i, value in enumerate(values.tolist()):
            target = (value >> 16, value & 0xFFFF)
            if value < 0:
                continue
            if has_end and (target[0] == first.end or target[1] == second.end):
                targets[i] = 0
                continue
            if target not in number:
                if len(number) > most:
                    raise TooManyStates(
                        f"together they have more than {most} states, with {len(classes)} classes of tokens in each; "
                        "simplify them, or give fewer tokens and words"
                    )
                number[target] = len(number) + 1
                waiting.append(target)
            targets[i] = number[target]
        rows[number[pair]] = targets[which.reshape(-1)]
    table = np.stack([rows[i] for i in range(len(rows))])
    order = np.concatenate([np.arange(1, len(table)), [0]])  # the first pair first, the end last
    place = np.append(np.argsort(order), -1).astype(np.int32)
    return from_table(place[table[order]], class_of.reshape(-1), len(table) - 1 if has_end else None)
