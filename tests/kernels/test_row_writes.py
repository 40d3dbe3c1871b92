"""The kernel that writes a number into each of many rows, against XLA's scatter."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from levanter_infer.kernels.tpu.row_writes import put, supports


@pytest.mark.parametrize("dropped", ["some", "all", "none"])
def test_numbers_are_written_into_rows_as_scatter_writes_them(dropped):
    """Neighbours in one register, first and last lanes, rows in any order, in the interpreter that detects races."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.integers(-(2**31), 2**31, (24, 384)), jnp.int32)
    row, column = rng.permutation(24)[:19].astype(np.int32), rng.integers(0, 384, 19, dtype=np.int32)
    column[:4] = 0, 127, 128, 383
    row = np.where({"some": np.arange(19) % 3 == 1, "all": True, "none": False}[dropped], 24, row).astype(np.int32)
    expected = row.copy()
    if dropped == "some":
        column[6], row[8], column[11] = 384, -1, -1
        expected[[8, 11]] = 24
    values = jnp.asarray(rng.integers(-(2**31), 2**31, 19), jnp.int32)
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    found = put(table, jnp.asarray(row), jnp.asarray(column), values, interpret=interpret)
    np.testing.assert_array_equal(found, table.at[expected, column].set(values, mode="drop"))


def test_tables_of_parts_of_registers_are_refused():
    assert supports(jnp.zeros((16, 256), jnp.int32))
    for shape in ((12, 256), (16, 250)):
        assert not supports(jnp.zeros(shape, jnp.int32))
    assert not supports(jnp.zeros((16, 256), jnp.float32))
