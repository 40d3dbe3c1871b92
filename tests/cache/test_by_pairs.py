"""Comparisons of all pairs give the bits of XLA's gathers and scatters, which every other platform takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_infer.cache import by_pairs
from levanter_infer.cache.arrays import cumsum, scatter, scatter_add

ENTRIES, INDICES = 70, 40


@pytest.fixture(autouse=True)
def where_a_tpu_may_run():
    with by_pairs.traced(True):
        yield


COLUMNS = {
    "int32": np.arange(ENTRIES, dtype=np.int32) * 30_000_000 - 2**30,
    "uint32": np.arange(ENTRIES, dtype=np.uint32) * 60_000_000 + 2**31,
    "float32": np.array([-0.0, np.nan, np.inf, -np.inf, 1e-45, -1e38, 2.5] * 10, np.float32),
    "bool": np.arange(ENTRIES) % 3 == 1,
}


def indices(seed: int, size: int = ENTRIES) -> np.ndarray:
    """Different ones, from the end too, and absent ones."""
    found = np.random.default_rng(seed).permutation(size)[:INDICES].astype(np.int32)
    found[::5] -= size
    found[::7] = size
    found[3] = 2**31 - 1
    return found


@pytest.mark.parametrize("name", COLUMNS)
def test_a_vector_is_read_and_written_at_indices(name):
    array, at = jnp.asarray(COLUMNS[name]), jnp.asarray(indices(1))
    assert by_pairs.compares(array, at)
    fill = COLUMNS[name][6].item()
    bits = lambda array: np.asarray(array).tobytes()  # noqa: E731
    assert bits(by_pairs.gather(array, at, fill)) == bits(array.at[at].get(mode="fill", fill_value=fill))
    exists = (np.asarray(at) < ENTRIES) & (np.asarray(at) >= -ENTRIES)
    assert bits(by_pairs.gather(array, at, None)[exists]) == bits(array[at[exists]])
    values = array[::-1][:INDICES]
    assert bits(by_pairs.scatter(array, at, values)) == bits(array.at[at].set(values, mode="drop"))


def test_numbers_are_added_at_repeated_indices():
    array, at = jnp.asarray(COLUMNS["int32"]), jnp.asarray(np.repeat(indices(2), 3))
    values = jnp.arange(at.size, dtype=jnp.int32)
    np.testing.assert_array_equal(by_pairs.scatter_add(array, at, values), array.at[at].add(values, mode="drop"))


@pytest.mark.parametrize("size", [1, 64, 70, 512, 513])
def test_cumulative_sums(size):
    values = np.random.default_rng(size).integers(-(2**31), 2**31, size).astype(np.int32)
    assert by_pairs.sums(jnp.asarray(values)) == (size <= 512)
    for each in (values, values % 3 == 1):
        expected = np.cumsum(each, dtype=np.int32)
        np.testing.assert_array_equal(by_pairs.cumsum(jnp.asarray(each)), expected)
        np.testing.assert_array_equal(jax.jit(cumsum)(each), expected)


def test_of_a_repeated_index_one_value_is_kept():
    found = by_pairs.scatter(
        jnp.zeros(4, jnp.int32), jnp.array([2, 0, 2], jnp.int32), jnp.array([-5, 7, -9], jnp.int32)
    )
    assert found.tolist() in ([7, 0, -5, 0], [7, 0, -9, 0])


@pytest.mark.parametrize("name", COLUMNS)
def test_a_table_is_read_at_rows_and_columns(name):
    table = jnp.asarray(np.stack([np.roll(COLUMNS[name], shift) for shift in range(9)]))
    row, column = jnp.asarray(indices(3, 9 * ENTRIES) % 11 - 1), jnp.asarray(indices(4))
    assert by_pairs.compares(table, row, column)
    fill = COLUMNS[name][6].item()
    found, expected = (
        by_pairs.gather_at(table, row, column, fill),
        table.at[row, column].get(mode="fill", fill_value=fill),
    )
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("name", COLUMNS)
def test_each_row_of_a_table_is_read_at_a_column_of_its_own(name):
    column = jnp.asarray(indices(5))
    table = jnp.asarray(np.stack([np.roll(COLUMNS[name], shift) for shift in range(column.shape[0])]))
    fill, row = COLUMNS[name][6].item(), jnp.arange(column.shape[0])
    found, expected = (
        by_pairs.gather_along(table, column, fill),
        table.at[row, column].get(mode="fill", fill_value=fill),
    )
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("name", ["int32", "uint32", "float32"])
def test_long_vectors_and_wide_tables_are_read_in_stretches(name):
    size = 5 * 1024
    array, at = jnp.asarray(np.resize(COLUMNS[name], size)), jnp.asarray(indices(6, size))
    fill = COLUMNS[name][6].item()
    assert by_pairs.reads(array, at) and not by_pairs.compares(array, at)
    expected = array.at[at].get(mode="fill", fill_value=fill)
    assert np.asarray(by_pairs.gather(array, at, fill)).tobytes() == np.asarray(expected).tobytes()
    table = jnp.asarray(np.resize(COLUMNS[name], (24, 2 * 1024)))
    row, column = jnp.asarray(indices(7, 100) % 26 - 1), jnp.asarray(indices(8, 2 * 1024))
    assert by_pairs.reads(table, row, column) and not by_pairs.compares(table, row, column)
    expected = table.at[row, column].get(mode="fill", fill_value=fill)
    assert np.asarray(by_pairs.gather_at(table, row, column, fill)).tobytes() == np.asarray(expected).tobytes()


def test_what_is_too_long_or_of_other_bits_is_left_to_xla():
    at = jnp.zeros(8, jnp.int32)
    assert not by_pairs.reads(jnp.zeros(5000, jnp.int32), at)
    assert not by_pairs.reads(jnp.zeros(8192, jnp.bool_), at)
    assert not by_pairs.reads(jnp.zeros((8, 2000), jnp.int32), at, at)
    assert not by_pairs.reads(jnp.zeros((9, 2048), jnp.int32), at, at)
    assert not by_pairs.reads(jnp.zeros(2**16, jnp.int32), jnp.zeros(5000, jnp.int32))
    assert not by_pairs.compares(jnp.zeros((8, 8), jnp.int32), at)
    assert not by_pairs.compares(jnp.zeros(8, jnp.bfloat16), at) and not by_pairs.compares(
        jnp.zeros(8, jnp.int32), at[:, None]
    )


def test_nothing_is_written_at_no_index_and_values_of_other_types_are_refused():
    none, at = jnp.zeros(0, jnp.int32), jnp.arange(2, dtype=jnp.int32)
    assert jax.jit(scatter)(jnp.arange(4, dtype=jnp.int32), none, none).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="promotion"):
        scatter(jnp.zeros(4, jnp.int32), at, jnp.array([1.5, 2.5], jnp.float32))
    with pytest.raises(ValueError, match="promotion"):
        scatter_add(jnp.zeros(4, jnp.int32), at, jnp.ones(2, jnp.bool_))


def test_only_what_a_tpu_may_run_is_traced_with_comparisons():
    at = jnp.zeros(8, jnp.int32)
    with by_pairs.traced(False):
        assert not by_pairs.compares(at, at)
    assert by_pairs.compares(at, at)
