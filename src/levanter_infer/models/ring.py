"""Sharding of the residual stream's columns: the steps that have it (`layers.collective_matmul`), and their norms."""

import dataclasses
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter_infer.kernels.backend import Backend
from levanter_infer.layers import collective_matmul
from levanter_infer.layers.attention import AttentionBlock
from levanter_infer.layers.linear import Linear
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis
from levanter_infer.models.blocks import Block, Placement
from levanter_infer.models.config import DecoderConfig

LayerT = TypeVar("LayerT", bound=eqx.Module)
_LANES = 128
"""Columns of a tile on TPUs."""


def ring_of(config: DecoderConfig, backend: Backend, shard_axis: ShardAxis, rows: int, dtype: jnp.dtype) -> ShardAxis:
    """The axis over whose devices a step has the columns of its residual stream; `REPLICATED`: every device has all.

    Args:
        backend: of the matmuls.
        shard_axis: the tensor-parallel axis.
        rows, dtype: of the residual stream.
    """
    if shard_axis.parts == 1 or backend.ring_bytes is None or not all(map(_is_plain, config.blocks)):
        return REPLICATED
    if backend.rows_apart:  # sums have the order that this mode gives them
        return REPLICATED
    if dtype == jnp.float16:  # a norm follows the matmul, whose inputs may be too large for it
        return REPLICATED
    size, rest = divmod(config.hidden_size, shard_axis.parts)
    least = min(backend.ring_bytes, 2 * _LANES)  # transfers of half a device's columns are whole tiles
    if rest or size % 2 or size % least or rows * size * dtype.itemsize < backend.ring_bytes:
        return REPLICATED
    return shard_axis


def _is_plain(block: Block) -> bool:
    """Whether the residual stream of a layer is read by two RMSNorms and their matmuls alone."""
    norm, others = block.norm, (block.convs, block.layer_input, block.norm.gate_rank)
    return (
        isinstance(block.mixer, AttentionBlock)
        and isinstance(block.feed_forward, DenseBlock)
        and block.placement is Placement.BEFORE
        and others == (None,) * 3
        and (norm.weight, norm.bias, norm.center) == (True, False, False)
    )


def squares_of(x: NamedArray, ring: ShardAxis) -> jax.Array | None:
    """Sums of squares f32[row] of a layer's input, for its first norm; None where there is no ring."""
    return None if ring.parts == 1 else collective_matmul.sums_of_squares(x.array)


def with_ring(layer: LayerT, ring: ShardAxis, squares: jax.Array | None) -> LayerT:
    """The layer, of the columns of this device.

    Args:
        ring: as in `ring_of`.
        squares: `squares_of` the layer's input.
    """
    if ring.parts == 1:
        return layer
    layer = eqx.tree_at(lambda layer: layer.input_norm.squares, layer, squares, is_leaf=lambda part: part is None)

    def on_ring(part):
        return dataclasses.replace(part, ring=ring) if isinstance(part, Linear) else part

    return jax.tree.map(on_ring, layer, is_leaf=lambda part: isinstance(part, Linear))


def columns_of(axes: tuple[Axis, ...], array: jax.Array) -> NamedArray:
    """An array with these axes except for the size of the last."""
    return NamedArray(array, (*axes[:-1], axes[-1].resize(array.shape[-1])))
