"""The host's side of constraints: which automata the device's table holds, and where. Imports no JAX."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from levanter_infer.decode.shapes import ConstraintShapes
from levanter_infer.engine.params import SamplingParams
from levanter_infer.structured.automaton import TokenAutomaton, forced_tokens, mask_words
from levanter_infer.structured.compiler import Constraint, Wanted

if TYPE_CHECKING:
    from levanter_infer.engine.config import EngineConfig

_MOST_ENTRIES, _MOST_MASKS = 2**22, 2**12


def constraint_shapes(config: "EngineConfig", vocab_size: int) -> ConstraintShapes:
    """The sizes of the tables that `engine.max_constraints` and `engine.constraint_bytes` give: a row of the
    vocabulary for each automaton; of what is left three quarters for masks, and the rest for transitions.

    Raises: ValueError if nothing is left.
    """
    words = mask_words(vocab_size)
    left = config.constraint_bytes - config.max_constraints * vocab_size * 2
    num_masks = min(_MOST_MASKS, left * 3 // 4 // (4 * words))
    num_entries = min(_MOST_ENTRIES, (left - num_masks * 4 * words) // 2)
    if num_masks < 1 or num_entries < 1:
        raise ValueError(
            f"engine.constraint_bytes={config.constraint_bytes} does not hold engine.max_constraints="
            f"{config.max_constraints} constraints over {vocab_size} tokens; raise the former or lower the latter"
        )
    return ConstraintShapes(config.max_constraints, num_entries, num_masks, words)


def wanted(params: SamplingParams) -> Wanted:
    """The constraint of a request, as the compiler takes it."""
    return Wanted(**{name: getattr(params, name) for name in Wanted._fields})


def check_fits(constraint: Constraint, shapes: ConstraintShapes, names: str) -> None:
    """Raises: ValueError unless the table holds this automaton alone. Args: names: of its parameters."""
    found = constraint.automaton
    if found is None:
        return
    entries = num_entries(found)
    if entries > shapes.num_entries or found.num_masks > shapes.num_masks:
        raise ValueError(
            f"{names}: its automaton has {found.num_states} states, {found.num_classes} classes of tokens and "
            f"{found.num_masks} sets of tokens, which engine.constraint_bytes does not hold; raise it, or simplify it"
        )


def num_entries(automaton: TokenAutomaton) -> int:
    """Entries of the table that an automaton takes."""
    return automaton.num_states * (automaton.num_classes + 1)


@dataclasses.dataclass(eq=False)
class Resident:
    """An automaton in the table."""

    automaton: TokenAutomaton
    place: int
    first_entry: int
    first_mask: int
    holders: int = 0
    """Samples with a slot that it constrains."""


class AutomatonTable:
    """The automata of the device's table, which all data-parallel ranks have alike.

    An automaton stays while a sample with a slot holds it, and after that until its place is needed; the one that was
    wanted longest ago goes first.

    Args: num_slots: of each rank, whose rows come before the masks of automata.
    """

    def __init__(self, shapes: ConstraintShapes | None, num_slots: int):
        self.shapes = shapes
        """May be set once, when the first request is constrained."""
        self._num_slots = num_slots
        self._residents: dict[TokenAutomaton, Resident] = {}  # the one that was wanted last at the end
        self._loads: list[Resident] = []

    def enter(self, automaton: TokenAutomaton) -> Resident | None:
        """The automaton in the table, if it is there or fits now. Requires: `shapes` is set."""
        found = self._residents.pop(automaton, None)
        if found is None:
            found = self._placed(automaton)
            if found is None:
                return None
            self._loads.append(found)
        self._residents[automaton] = found
        return found

    def _placed(self, automaton: TokenAutomaton) -> Resident | None:
        shapes = self.shapes
        assert shapes is not None
        while True:
            used = self._residents.values()
            places = set(range(shapes.num_automata)) - {each.place for each in used}
            spans = [(each.first_entry, num_entries(each.automaton)) for each in used]
            entry = _first_gap(spans, num_entries(automaton), 0, shapes.num_entries)
            begin, end = self._num_slots, self._num_slots + shapes.num_masks
            spans = [(each.first_mask, each.automaton.num_masks) for each in used]
            mask = _first_gap(spans, automaton.num_masks, begin, end)
            if places and entry is not None and mask is not None:
                return Resident(automaton, min(places), entry, mask)
            free = next((each for each in used if each.holders == 0), None)
            if free is None:
                return None
            del self._residents[free.automaton]
            self._loads = [each for each in self._loads if each is not free]

    def hold(self, automaton: TokenAutomaton) -> None:
        """A sample that it constrains has got a slot. Requires: it was entered."""
        self._residents[automaton].holders += 1

    def release(self, automaton: TokenAutomaton) -> None:
        """Such a slot is free again."""
        self._residents[automaton].holders -= 1

    def number(self, automaton: TokenAutomaton) -> int:
        """Its number in the table. Requires: it was entered."""
        return self._residents[automaton].place

    def pop_loads(self) -> list[Resident]:
        """Automata entered since the last call, which the device's table does not have yet."""
        loads, self._loads = self._loads, []
        return loads


def _first_gap(spans: list[tuple[int, int]], size: int, begin: int, end: int) -> int | None:
    """The first of `size` free entries between `begin` and `end`; None if there are none.

    Args: spans: (first, number) of used ones.
    """
    for first, number in sorted(spans):
        if first - begin >= size:
            return begin
        begin = max(begin, first + number)
    return begin if end - begin >= size else None


# Uploads, as fields of `decode.constraints.ConstraintLoad`


def nothing_to_load(shapes: ConstraintShapes, vocab_size: int, num_slots: int) -> dict[str, Any]:
    """An upload that changes nothing."""
    return {
        "automaton": np.int32(shapes.num_automata),
        **{name: np.int32(0) for name in ("first_entry", "first_mask", "width")},
        "class_of": np.zeros(vocab_size, np.uint16),
        "entries": np.zeros(shapes.load_entries, np.int16),
        "entry_places": np.full(shapes.load_entries, shapes.num_entries, np.int32),
        "masks": np.zeros((shapes.load_masks, shapes.mask_words), np.uint32),
        "mask_places": np.full(shapes.load_masks, num_slots + shapes.num_masks, np.int32),
        "forced": np.full(shapes.load_masks, vocab_size, np.int32),
    }


def loads_of(resident: Resident, nothing: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The uploads that bring an automaton into the table. Args: nothing: of `nothing_to_load`."""
    found = resident.automaton
    entries = np.concatenate([found.mask_of[:, None].astype(np.int16), found.next], axis=1).reshape(-1)
    head = {
        "automaton": np.int32(resident.place),
        "first_entry": np.int32(resident.first_entry),
        "first_mask": np.int32(resident.first_mask),
        "width": np.int32(found.num_classes + 1),
        "class_of": found.class_of,
    }
    size, masks_size = len(nothing["entries"]), len(nothing["masks"])
    for i in range(max(-(-len(entries) // size), -(-found.num_masks // masks_size))):
        own, masks = entries[i * size : (i + 1) * size], found.masks[i * masks_size : (i + 1) * masks_size]
        yield {
            **nothing,
            **head,
            **_chunk(nothing, "entries", "entry_places", own, resident.first_entry + i * size),
            **mask_load(nothing, masks, resident.first_mask + i * masks_size),
        }


def mask_load(nothing: dict[str, Any], masks: np.ndarray, places: int | np.ndarray) -> dict[str, Any]:
    """The fields that bring masks, as many as `nothing` holds at most, to `places`: one for each, or the first."""
    forced = nothing["forced"].copy()
    forced[: len(masks)] = forced_tokens(masks, len(nothing["class_of"]))
    return {**_chunk(nothing, "masks", "mask_places", masks, places), "forced": forced}


def _chunk(nothing: dict[str, Any], name: str, name_places: str, values: np.ndarray, places) -> dict[str, Any]:
    filled, found = nothing[name].copy(), nothing[name_places].copy()
    filled[: len(values)] = values
    found[: len(values)] = places if isinstance(places, np.ndarray) else places + np.arange(len(values))
    return {name: filled, name_places: found}
