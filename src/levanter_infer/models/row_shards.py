"""Sequence parallelism: norms and residual additions on each device's own rows of the residual stream.

With tensor parallelism every device would compute them of all rows. Where the rows are sharded, the sums after the
mixer and the feed-forward block leave each device its own rows (reduce-scatter in the stead of all-reduce), and rows
are brought together after the norm before the next matmuls (all-gather): as many bytes as an all-reduce sends.

Source: arXiv:2205.05198, section 4.2.2. docs/decisions/0044-collectives.md says where it pays.
"""

import dataclasses
from typing import TypeVar

import equinox as eqx
import jax
from haliax import NamedArray

from levanter_infer.kernels.backend import Backend
from levanter_infer.layers.attention import AttentionBlock
from levanter_infer.layers.latent_attention import LatentAttentionBlock
from levanter_infer.layers.linear import Linear
from levanter_infer.layers.mlp import DenseBlock
from levanter_infer.layers.moe import ExpertsBlock, Moe
from levanter_infer.layers.norm import ByRows, RMSNorm
from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis
from levanter_infer.models.blocks import Block
from levanter_infer.models.config import DecoderConfig

LayerT = TypeVar("LayerT", bound=eqx.Module)
_TILE = 16
"""Rows of a tile of bfloat16 on TPUs."""


def row_shards(config: DecoderConfig, backend: Backend, shard_axis: ShardAxis, num_rows: int) -> ShardAxis:
    """The axis over which a step shards the rows of its residual stream; `REPLICATED`: every device has all.

    Args:
        backend: of the matmuls.
        shard_axis: the tensor-parallel axis.
        num_rows: capacity of the step in tokens.
    """
    parts = shard_axis.parts
    if parts == 1 or backend.row_shard is None or num_rows % (parts * min(_TILE, backend.row_shard)):
        return REPLICATED
    fits = num_rows >= parts * backend.row_shard and all(map(_is_row_wise, config.blocks))
    return shard_axis if fits else REPLICATED


def _is_row_wise(block: Block) -> bool:
    """Whether what the layer computes between the sums of its two parts takes one row at a time, and each part norms
    its input once."""
    mixer, feed_forward = block.mixer, block.feed_forward
    if block.convs is not None or block.layer_input is not None:
        return False
    if isinstance(feed_forward, ExpertsBlock):
        own = feed_forward.norms, feed_forward.router.norm, feed_forward.latent_dim, feed_forward.latent_norm
        return isinstance(mixer, _Attention) and own == (None,) * 4 and not feed_forward.shared_gate
    return isinstance(mixer, _Attention) and isinstance(feed_forward, DenseBlock)


_Attention = AttentionBlock | LatentAttentionBlock


def with_scattered_sums(layer: LayerT, shards: ShardAxis) -> LayerT:
    """The layer whose sums over devices leave each its own rows. Args: shards: as of `row_shards`."""
    if shards.parts == 1:
        return layer

    def scattered(part):
        if isinstance(part, Moe):
            inner = jax.tree.map(scattered, (part.shared, part.shared_experts), is_leaf=_is_linear)
            return dataclasses.replace(part, sums=part.sums.scattering, shared=inner[0], shared_experts=inner[1])
        return dataclasses.replace(part, shard_axis=part.shard_axis.scattering) if _is_linear(part) else part

    return jax.tree.map(scattered, layer, is_leaf=lambda part: _is_linear(part) or isinstance(part, Moe))


def _is_linear(part) -> bool:
    return isinstance(part, Linear)


def all_rows(x: NamedArray, norm: RMSNorm | None, rows: ByRows, shards: ShardAxis) -> tuple[NamedArray, RMSNorm | None]:
    """The input of a mixer or a feed-forward block with all rows, and the norm that is left to compute of it.

    Args:
        x: [row, embed], this device's rows.
        rows: `linear.by_rows` for those.
    """
    if shards.parts == 1:
        return x, norm
    normed = x if norm is None else norm.by_rows(x, rows)
    return with_rows(shards.all_gather(normed.array, 0), x), None


def with_rows(array: jax.Array, like: NamedArray) -> NamedArray:
    """An array with the axes of another, except for the number of its rows."""
    return NamedArray(array, (like.axes[0].resize(array.shape[0]), *like.axes[1:]))
