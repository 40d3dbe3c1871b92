"""`AutomatonTable`: what is in the device's table, and where."""

import random

import numpy as np

from levanter_infer.decode.shapes import ConstraintShapes
from levanter_infer.engine.constraints import AutomatonTable, loads_of, nothing_to_load, num_entries
from levanter_infer.structured.automaton import TokenAutomaton

VOCAB, SLOTS = 40, 3
SHAPES = ConstraintShapes(num_automata=4, num_entries=300, num_masks=20, mask_words=128, load_entries=16, load_masks=2)


def automaton(seed: int) -> TokenAutomaton:
    rng = np.random.default_rng(seed)
    states, classes = rng.integers(1, 12), rng.integers(1, 6)
    table = rng.integers(-1, states, (states, classes)).astype(np.int16)
    return TokenAutomaton(table, rng.integers(0, classes, VOCAB).astype(np.uint16))


def test_automata_never_overlap_and_their_uploads_are_what_they_are():
    table, rng, held = AutomatonTable(SHAPES, SLOTS), random.Random(0), []
    known = [automaton(seed) for seed in range(12)]
    entries, masks = np.full(SHAPES.num_entries + 1, -9), np.zeros((SLOTS + SHAPES.num_masks + 1, 128), np.uint32)
    classes, waited, evicted = {}, 0, 0
    nothing = nothing_to_load(SHAPES, VOCAB, SLOTS)
    for _ in range(600):
        if held and rng.random() < 0.5:
            table.release(held.pop(rng.randrange(len(held))))
            continue
        wanted = rng.choice(known)
        resident = table.enter(wanted)
        if resident is None:
            waited += 1
            continue
        table.hold(wanted)
        held.append(wanted)
        for load in table.pop_loads():
            evicted += load.place in classes
            for fields in loads_of(load, nothing):
                entries[fields["entry_places"]] = fields["entries"]
                masks[fields["mask_places"]] = fields["masks"]
                classes[int(fields["automaton"])] = fields["class_of"], int(fields["width"])
        for each in {id(each): each for each in held}.values():
            place = table.enter(each)
            assert place is not None and table.number(each) == place.place
            own = entries[place.first_entry : place.first_entry + num_entries(each)].reshape(each.num_states, -1)
            np.testing.assert_array_equal(own[:, 1:], each.next)
            np.testing.assert_array_equal(masks[place.first_mask + own[:, 0]], each.masks[each.mask_of])
            np.testing.assert_array_equal(classes[place.place][0], each.class_of)
            assert classes[place.place][1] == each.num_classes + 1
    assert waited > 10 and evicted > 10
