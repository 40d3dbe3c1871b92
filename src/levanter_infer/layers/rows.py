"""`RaggedRows`: the rows of a step's packed batch, for layers that pass a state along the tokens of a row."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.cache.page_table import ragged_index


class RaggedRows(eqx.Module):
    """Rows of a packed batch: the row of each token, and the start of each row. Padding tokens have row `num_rows`."""

    slots: Array
    """i32[row], slot of each row; none is the number of slots."""
    is_new: Array
    """bool[row], whether the row's first token is the first of its sequence, so that it starts from the zero state."""
    starts: Array
    """i32[row], index of the row's first packed token; the number of tokens for a row of none."""
    lens: Array
    """i32[row], tokens of the row."""
    row: Array
    """i32[token]"""
    item: Array
    """i32[token], index of the token within its row."""

    @staticmethod
    def of(batch: PageBatchInfo) -> "RaggedRows":
        bounds, positions = batch.cu_q_lens.array, batch.positions.array
        lens = bounds[1:] - bounds[:-1]
        row, item, _ = ragged_index(lens, jnp.int32(0), positions.shape[0])
        starts = jnp.where(lens > 0, bounds[:-1], positions.shape[0])
        is_new = positions.at[starts].get(mode="fill", fill_value=0) == 0
        return RaggedRows(batch.slot_ids.array, is_new, starts, lens, row, item)

    @property
    def num_rows(self) -> int:
        return self.lens.shape[0]
