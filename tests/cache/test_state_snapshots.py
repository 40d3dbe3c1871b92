"""Which snapshot is replaced, and whose page it belongs to: random operations against lists and a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.cache.arrays import replace
from levanter_infer.cache.prefix_table import PrefixTable
from levanter_infer.cache.slot_state import _PAIRS, SlotState
from levanter_infer.cache.state_snapshots import PASSED, PROMPT, SHARED, StateSnapshots
from tests.tiers import nightly_but

PAGES, SIZE = 12, 6
WIDTH = 3
"""Pages and snapshots of one operation, at most."""


class Model:
    """Pages of snapshots, in the order in which these were used."""

    def __init__(self):
        self.pages: dict[int, int] = {}  # of each snapshot that has one
        self.kinds = dict.fromkeys(range(SIZE), PASSED)
        self.order = list(range(SIZE))

    def of(self, page: int) -> int:
        return next((snapshot for snapshot, own in self.pages.items() if own == page), SIZE)

    def touch(self, snapshots: list[int]) -> None:
        self.order = [s for s in self.order if s not in snapshots] + [s for s in self.order if s in snapshots]

    def allocate(self, findable: set[int], count: int) -> list[int]:
        used = [s for s in self.order if self.pages.get(s) in findable]
        shared = [s for s in used if self.kinds[s] == SHARED][-((SIZE + 1) // 2) :]
        free = [s for s in self.order if s not in used]
        return [*free, *(s for s in used if s not in shared), *shared][:count]

    def attach(self, snapshots: list[int], pages: list[int], kinds: list[int]) -> None:
        self.pages = {s: p for s, p in self.pages.items() if p not in pages and s not in snapshots}
        self.pages.update(zip(snapshots, pages, strict=True))
        self.kinds.update(zip(snapshots, kinds, strict=True))
        self.touch(snapshots)

    def detach(self, pages: list[int]) -> None:
        self.pages = {s: p for s, p in self.pages.items() if p not in pages}

    def restore(self, snapshots: list[int]) -> None:
        self.kinds.update({s: SHARED for s in snapshots if self.kinds[s] == PROMPT})
        self.touch(snapshots)

    def pass_by(self, snapshots: list[int]) -> None:
        first = [s for s in self.order if s in snapshots and self.kinds[s] == PASSED]
        self.order = first + [s for s in self.order if s not in first]


def prefix_of(findable: set[int], serials: np.ndarray) -> PrefixTable:
    known = np.isin(np.arange(PAGES), list(findable))
    table = PrefixTable.init(PAGES, 4)
    return replace(
        table, serials=jnp.asarray(serials, jnp.int32), parents=jnp.asarray(np.where(known, -1, 0), jnp.int32)
    )


def padded(values: list[int], none: int):
    return jnp.asarray([*values, *[none] * (WIDTH - len(values))], jnp.int32)


@functools.cache
def compiled(name: str):
    return jax.jit(lambda table, *args: getattr(table, name)(*args))


def check(table: StateSnapshots, model: Model) -> None:
    assert np.asarray(table.order).tolist() == model.order
    assert np.asarray(table.attached).tolist() == [model.of(page) for page in range(PAGES)]
    assert np.asarray(table.owner).tolist() == [model.pages.get(s, PAGES) for s in range(SIZE)]
    assert np.asarray(table.kind).tolist() == [model.kinds[s] for s in range(SIZE)]


@pytest.mark.parametrize("seed", nightly_but([0], range(3)))
def test_random_operations_are_those_of_lists(seed):
    rng = np.random.default_rng(seed)
    table, model = StateSnapshots.init(SIZE, PAGES), Model()
    for _ in range(150):
        kind = rng.choice(["attach", "attach", "attach", "detach", "restore", "pass_by"])
        some = rng.permutation(SIZE)[: rng.integers(0, WIDTH + 1)].tolist()
        pages = rng.permutation(PAGES)[: rng.integers(0, WIDTH + 1)].tolist()
        if kind == "attach":
            findable = set(rng.permutation(PAGES)[: rng.integers(0, PAGES)].tolist())
            prefix = prefix_of(findable, np.arange(1, PAGES + 1))
            taken = table.allocate(prefix, jnp.int32(len(pages)), WIDTH).tolist()
            assert taken == [*model.allocate(findable, len(pages)), *[SIZE] * (WIDTH - len(pages))]
            kinds = rng.choice([PASSED, PROMPT, SHARED], len(pages)).tolist()
            model.attach(taken[: len(pages)], pages, kinds)
            table = compiled("attach")(
                table, jnp.asarray(taken, jnp.int32), padded(pages, PAGES), padded(kinds, PASSED)
            )
        elif kind == "detach":
            model.detach(pages)
            table = compiled("detach")(table, padded(pages, PAGES))
        else:
            getattr(model, kind)(some)
            table = compiled(kind)(table, padded(some, SIZE))
        check(table, model)


def test_a_snapshot_follows_its_contents_to_the_page_that_is_found():
    table = StateSnapshots.init(SIZE, PAGES)
    table = table.attach(padded([2, 4], SIZE), padded([5, 6], PAGES), padded([SHARED, SHARED], PASSED))
    serials = np.zeros(PAGES)
    serials[[5, 6, 7, 8]] = 11, 12, 11, 12  # pages 7 and 8 are copies; 6 is still found
    table = table.follow(prefix_of({6, 7}, serials), padded([7, 8], PAGES))
    assert table.of(jnp.arange(5, 9)).tolist() == [SIZE, 4, 2, SIZE]
    assert table.owner[2] == 7 and table.owner[4] == 6


def test_a_page_that_has_no_serial_takes_no_snapshot():
    table = StateSnapshots.init(SIZE, PAGES).attach(padded([0], SIZE), padded([5], PAGES), padded([PROMPT], PASSED))
    after = table.follow(prefix_of({7}, np.zeros(PAGES)), padded([7], PAGES))
    assert after.of(jnp.asarray([5, 7])).tolist() == [0, SIZE]


@pytest.mark.parametrize("count", [0, 1, _PAIRS, _PAIRS + 3])
def test_states_are_copied_between_pools_of_other_sizes(count):
    rng = np.random.default_rng(count)

    def pool(entries: int) -> SlotState:
        zeros = SlotState.init(2, entries, {"conv": (3,), "memory": (2, 2)})
        return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), zeros)

    left, right = pool(20), pool(15)
    source, target = np.full(20, 20), np.full(20, 15)
    used = rng.permutation(20)[:count]
    source[used], target[used] = rng.integers(0, 20, count), rng.permutation(15)[:count]
    copied = jax.jit(SlotState.copy_from)(right, left, jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32))
    for name, named in copied.arrays.items():
        expected = np.array(right.arrays[name].array)
        expected[:, target[used]] = np.asarray(left.arrays[name].array)[:, source[used]]
        assert (np.asarray(named.array) == expected).all()
