"""`RouteTable`: the experts that the tokens of each sequence went through (`return_routed_experts`)."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from levanter_infer.axes import TOKEN
from levanter_infer.cache.arrays import full, gather, scatter
from levanter_infer.cache.batch_info import PageBatchInfo
from levanter_infer.decode.shapes import RoutingShapes


class RouteTable(eqx.Module):
    """The experts of the tokens that each slot has computed, until another sequence computes the same positions there.

    Positions that a slot shares with others are not there: prompts of forks, which the first sample has computed. No
    request that asks for its experts shares more than that (`Intake.root`).
    """

    experts: Array
    """u8 or u16 [seq, seq_page, page_offset, layer, chosen]: pages are cut out of positions, to be read in parts."""

    @staticmethod
    def init(shapes: RoutingShapes, *, num_slots: int, max_seq_len: int, page_size: int) -> "RouteTable":
        """A table of zeros."""
        dtype = jnp.uint8 if shapes.num_experts <= 256 else jnp.uint16
        pages = -(-max_seq_len // page_size)
        return RouteTable(full((num_slots, pages, page_size, shapes.num_layers, shapes.num_chosen), 0, dtype))

    def write(self, batch: PageBatchInfo, chosen: Array) -> "RouteTable":
        """Enter the step's tokens. Args: chosen: i32[layer, token, chosen], anything for padding."""
        bounds, size = batch.cu_q_lens.array, self.experts.shape[2]
        token = jnp.arange(batch.tokens.axis_size(TOKEN), dtype=jnp.int32)
        row = jnp.searchsorted(bounds[1:], token, side="right").astype(jnp.int32)
        none = self.experts.shape[0]
        slot = jnp.where(token < bounds[-1], gather(batch.slot_ids.array, row, none), none)
        position = batch.positions.array
        new = chosen.swapaxes(0, 1).astype(self.experts.dtype)
        return RouteTable(scatter(self.experts, (slot, position // size, position % size), new))


def read_routes(routes: RouteTable, slots: Array, columns: Array) -> Array:
    """Pages `columns`, i32[n], of the positions of `slots`, i32[n]: [n, page_offset, layer, chosen]."""
    return gather(routes.experts, (slots, columns), 0)
