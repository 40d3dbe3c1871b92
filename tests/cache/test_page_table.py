import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.cache.page_table import PageTable, ragged_index


def ids(*values):
    return jnp.asarray(values, jnp.int32)


def free_pages(table):
    head, count = int(table.ring_head), int(table.num_free)
    ring = np.asarray(table.free_ring)
    return [int(ring[(head + i) % len(ring)]) for i in range(count)]


def test_allocate_takes_the_least_recently_released_first():
    table = PageTable.init(6, 4)
    table, pages = table.allocate(jnp.int32(4), 5)
    assert pages.tolist() == [0, 1, 2, 3, 6]
    table = table.release(ids(2)).release(ids(0))
    assert free_pages(table) == [4, 5, 2, 0]
    table, pages = table.allocate(jnp.int32(3), 5)
    assert pages.tolist() == [4, 5, 2, 6, 6]


def test_release_frees_a_page_only_when_its_last_holder_lets_go():
    table, pages = PageTable.init(4, 4).allocate(jnp.int32(1), 1)
    table = table.share(pages)
    table = table.release(pages)
    assert free_pages(table) == [1, 2, 3] and table.ref_counts.tolist() == [1, 0, 0, 0]
    assert free_pages(table.release(pages)) == [1, 2, 3, 0]


def test_release_by_all_holders_at_once_frees_a_page_once():
    table, pages = PageTable.init(4, 4).allocate(jnp.int32(2), 2)
    table = table.share(pages[:1]).release(ids(0, 1, 4, 0))
    assert sorted(free_pages(table)) == [0, 1, 2, 3]
    assert int(table.num_free) == 4


def test_too_many_releases_are_visible_and_not_clamped():
    table, pages = PageTable.init(4, 4).allocate(jnp.int32(1), 1)
    assert int(table.release(ids(0, 0)).ref_counts[0]) == -1


def test_none_is_one_past_the_end_and_touches_nothing():
    table, _ = PageTable.init(4, 4).allocate(jnp.int32(4), 4)
    after = table.share(ids(4, 4)).release(ids(4))
    assert after.ref_counts.tolist() == [1, 1, 1, 1] and int(after.num_free) == 0


def test_no_page_id_is_magic_in_a_pool_of_more_than_two_million_tokens():
    # The ancestor's sentinel 2 000 000 was itself a valid destination; here every position of the pool is reachable.
    pages = 20_000
    table, taken = PageTable.init(pages, 128).allocate(jnp.int32(pages), pages)
    assert np.array_equal(taken, np.arange(pages)) and int(jnp.min(table.ref_counts)) == 1


def test_the_ring_wraps_around():
    table = PageTable.init(3, 4)
    for _ in range(5):
        table, pages = table.allocate(jnp.int32(2), 2)
        table = table.release(pages)
    assert sorted(free_pages(table)) == [0, 1, 2]


@pytest.mark.parametrize("capacity", [150, 200, 330])
def test_more_pages_than_one_part_are_taken_in_the_order_of_the_ring(capacity):
    """From every place of a ring of 200, in parts that are filled up, beside a queue."""
    queue, rng = list(range(200)), np.random.default_rng(capacity)
    table, held = PageTable.init(200, 4), []
    allocate = jax.jit(lambda table, count: table.allocate(count, capacity))
    release = jax.jit(PageTable.release)
    for count in [0, 1, 64, 65, 128, *rng.integers(0, 150, 20)]:
        count = min(int(count), len(queue))
        table, pages = allocate(table, np.int32(count))
        assert pages.tolist() == [*queue[:count], *[200] * (capacity - count)]
        held, queue = held + queue[:count], queue[count:]
        back, held = held[: len(held) // 2], held[len(held) // 2 :]
        table, queue = release(table, np.array([*back, *[200] * (200 - len(back))], np.int32)), queue + back
        assert free_pages(table) == queue
        assert np.flatnonzero(table.ref_counts).tolist() == sorted(held) and int(table.ref_counts.sum()) == len(held)


@pytest.mark.parametrize("size", [0, 3, 12])
def test_page_size_must_be_a_power_of_two(size):
    with pytest.raises(ValueError, match="power of two"):
        PageTable.init(4, size)


def test_ragged_index_enumerates_groups_of_any_size():
    group, item, valid = ragged_index(ids(2, 0, 3), jnp.int32(1), 6)
    assert group.tolist()[:4] == [0, 2, 2, 2] and item.tolist()[:4] == [1, 0, 1, 2]
    assert valid.tolist() == [True] * 4 + [False] * 2 and set(group.tolist()[4:]) == {3}
