"""`resample` on sequences in mid-flight; `test_state_machine.py` compares random calls with the model."""

import jax
import numpy as np
import pytest

from levanter_infer.decode.resampling import moved_rows
from tests.decode.driver import SHAPES, Driver

NONE = SHAPES.num_pages


@pytest.fixture
def three():
    """Three samples of one prompt: all have a full page of it in common and a begun page of their own."""
    driver = Driver()
    driver.admit([0, 1, 2], 9, 3, None)
    for seed in range(4):
        driver.step(seed, failure_rate=0.0)
    assert len(shared(driver)) == 1
    return driver


def shared(driver) -> list[int]:
    return [page for page, refs in enumerate(driver.model.refs) if refs == 3]


def arrays(driver) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in driver.leaves]


def test_naming_oneself_changes_nothing(three):
    before = arrays(three)
    three.resample({0: 0, 1: 1, 2: 2})
    assert all(np.array_equal(a, b) for a, b in zip(before, arrays(three), strict=True))


def test_a_permutation_takes_and_frees_no_page(three):
    free, pages = list(three.model.free), [list(slot.pages) for slot in three.model.slots[:3]]
    three.resample({0: 1, 1: 2, 2: 0})
    three.check()
    assert three.model.free == free
    assert [slot.pages for slot in three.model.slots[:3]] == [pages[1], pages[2], pages[0]]


def test_all_to_one_shares_every_page_until_somebody_writes(three):
    three.resample({0: 1, 2: 1})
    three.check()
    pages = three.model.slots[1].pages
    assert three.model.slots[0].pages == three.model.slots[2].pages == pages
    assert sorted(pages) == shared(three) and len(three.model.free) == NONE - len(pages)
    three.step(9, failure_rate=0.0)
    three.check()
    full = (len(three.model.slots[1].tokens) - 2) // SHAPES.page_size
    assert [slot.pages[:full] for slot in three.model.slots[:3]] == [pages[:full]] * 3
    assert len({slot.pages[-1] for slot in three.model.slots[:3]}) == 3


def test_descendants_of_the_finished_are_finished_and_give_their_pages_back(three):
    three.cancel([1])
    three.resample({0: 1, 2: 1})
    three.check()
    assert len(three.model.free) == NONE and not three.live_slots()


def test_a_finished_slot_comes_to_life_beside_its_ancestor(three):
    three.cancel([1])
    three.resample({1: 2})
    three.check()
    assert three.model.slots[1].pages == three.model.slots[2].pages
    three.finish()


@pytest.mark.parametrize("longest", [0, 5, 1024, 1025, 2300, 2600])
def test_long_texts_move_as_a_whole(longest):
    rng = np.random.default_rng(0)
    rows, others = rng.integers(0, 100, (2, 4, 2600)).astype(np.int32)
    ancestors = np.asarray([2, 2, 3, 0], np.int32)
    moved = np.asarray(jax.jit(moved_rows)(rows, ancestors, np.int32(longest)))
    assert np.array_equal(moved[:, :longest], rows[ancestors][:, :longest])
    ancestors = np.asarray([6, 1, 4, 0], np.int32)  # those from 4 on name rows of `others`
    moved = np.asarray(jax.jit(moved_rows)(rows, ancestors, np.int32(longest), others))
    assert np.array_equal(moved[:, :longest], np.concatenate([rows, others])[ancestors][:, :longest])


def test_it_is_one_operation_in_a_callers_program(three):
    from levanter_infer.decode.resampling import resample
    from tests.decode.driver import whole

    def chained(leaves, ancestors):
        def again(state, ancestors):
            return resample(state, np.arange(SHAPES.num_slots) < 3, ancestors), None

        return jax.tree.leaves(jax.lax.scan(again, whole(leaves), ancestors)[0])

    maps = np.asarray([[1, 2, 0, 3, 4, 5], [2, 2, 0, 3, 4, 5]], np.int32)
    three.leaves = jax.jit(chained)(three.leaves, maps)
    for ancestors in maps:
        three.model.resample(dict(enumerate(ancestors[:3].tolist())), [slot.arrival for slot in three.model.slots])
    three.check()
