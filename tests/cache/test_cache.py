"""`Cache`: several pools whose pages have one numbering."""

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.cache.cache import Cache, PoolSpec
from levanter_infer.cache.memory import FullKv, PoolSizes, WindowKv

SPECS = (PoolSpec(FullKv(2, 4), (0, 3)), PoolSpec(WindowKv(1, 8, window=16), (1, 2, 4)))
SIZES = PoolSizes(num_pages=5, page_size=2, num_slots=3, dtype=jnp.dtype("float32"))


def filled() -> Cache:
    """A cache in which every number is another one."""
    cache = Cache.init(SPECS, SIZES)
    leaves, structure = jax.tree.flatten(cache)
    return jax.tree.unflatten(
        structure, [jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape) + 1 for leaf in leaves]
    )


def contents(cache: Cache) -> list[np.ndarray]:
    return [np.asarray(pool.pages.array) for pool in cache.pools]


def test_a_copied_page_is_copied_in_every_pool_and_none_is_ignored():
    cache = filled()
    after = contents(cache.copy_pages([(jnp.asarray([3, 5], jnp.int32), jnp.asarray([1, 5], jnp.int32))]))
    for old, new in zip(contents(cache), after, strict=True):
        np.testing.assert_array_equal(new[:, 1], old[:, 3])
        np.testing.assert_array_equal(np.delete(new, 1, axis=1), np.delete(old, 1, axis=1))


def test_pages_that_were_taken_are_put_back_in_every_pool():
    cache, pages = filled(), jnp.asarray([4, 0, 5], jnp.int32)
    found = cache.zero().put_pages(pages, cache.take_pages(pages))
    for old, new in zip(contents(cache), contents(found), strict=True):
        np.testing.assert_array_equal(new[:, [0, 4]], old[:, [0, 4]])
        assert not new[:, 1:4].any()


def test_bytes_of_a_page_are_known_before_there_is_a_pool():
    one_by_one = [spec.memory.entry_bytes(len(spec.layers), SIZES) for spec in SPECS]
    assert one_by_one == [pool.nbytes // SIZES.num_pages for pool in Cache.init(SPECS, SIZES).pools]
    assert one_by_one == [2 * 2 * 4 * 4 * 4, 3 * 2 * 2 * 8 * 4]
