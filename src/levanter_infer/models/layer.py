"""`DecoderLayer`: the parameters of the layers of one stack, and what a layer computes with them."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import SCALAR
from levanter_infer.layers.attention import Attention, AttentionBlock
from levanter_infer.layers.branch_conv import FEED_FORWARD, MIXER, BranchConvs, Convolve
from levanter_infer.layers.delta_net import DeltaNet, DeltaNetBlock
from levanter_infer.layers.gated_norm import init_norm
from levanter_infer.layers.kimi_delta import KimiDelta, KimiDeltaBlock
from levanter_infer.layers.latent_attention import LatentAttention, LatentAttentionBlock
from levanter_infer.layers.layer_input import LayerInput
from levanter_infer.layers.linear import Fusion, Linear, fold_key, split_key
from levanter_infer.layers.mamba2 import Mamba2, Mamba2Block
from levanter_infer.layers.mlp import Mlp
from levanter_infer.layers.moe import ExpertsBlock, Moe
from levanter_infer.layers.norm import RMSNorm
from levanter_infer.layers.short_conv import ShortConv, ShortConvBlock
from levanter_infer.layers.stack import pick_layer
from levanter_infer.models.blocks import Block, Mixer, Placement

Recurrent = ShortConv | DeltaNet | KimiDelta | Mamba2
"""The parameters of mixers that remember a state of fixed size per sequence."""


class DecoderLayer(eqx.Module):
    """The parameters of the layers of one stack. `Block` says what is computed with them."""

    input_norm: RMSNorm | None
    """Norm of the input of the mixer."""
    attention: Attention | LatentAttention | None
    """None: the mixer is `recurrent`, or there is none."""
    mlp_norm: RMSNorm | None
    """Norm of the input of the feed-forward block."""
    mlp: Mlp | Moe | None
    """None: there is no feed-forward block."""
    mixer_out_norm: RMSNorm | None
    mlp_out_norm: RMSNorm | None
    """Norms of the outputs of the mixer and the feed-forward block."""
    recurrent: Recurrent | None = None
    """The mixer that remembers a state of fixed size."""
    layer_input: LayerInput | None = None
    """The part that adds the layer's own input to its result."""
    layer_scalar: NamedArray | None = None
    """[layers, scalar], a factor of the residual stream after the layer."""
    convs: BranchConvs | None = None
    """Short convolutions of keys and of what is added to the residual stream."""

    @staticmethod
    def init(batch: tuple[Axis, ...], embed: Axis, block: Block, *, key: Array | None, dtype) -> "DecoderLayer":
        """`batch`: axes of independent layers."""
        mixer_key, mlp_key = split_key(key, 2)
        feed_forward = block.feed_forward
        mlp = None
        if isinstance(feed_forward, ExpertsBlock):
            mlp = Moe.init(batch, embed, feed_forward, key=mlp_key, dtype=dtype)
        elif feed_forward is not None:
            mlp = Mlp.init(batch, embed, feed_forward, key=mlp_key, dtype=dtype)

        def norm(name: str) -> RMSNorm | None:  # each an array of its own, so that a training step can donate them
            names = block.norms
            if name not in names:
                return None
            return init_norm(batch, embed, block.norm, key=key, dtype=dtype, number=names.index(name))

        return DecoderLayer(
            input_norm=norm("input_norm"),
            attention=_attention(batch, embed, block.attention, key=mixer_key, dtype=dtype),
            mlp_norm=norm("mlp_norm"),
            mlp=mlp,
            mixer_out_norm=norm("mixer_out_norm"),
            mlp_out_norm=norm("mlp_out_norm"),
            recurrent=_recurrent(batch, embed, block.recurrent, key=mixer_key, dtype=dtype),
            layer_input=block.layer_input
            and LayerInput.init(batch, embed, block.layer_input, block.norm, key=mlp_key, dtype=dtype),
            layer_scalar=hax.ones((*batch, Axis(SCALAR, 1)), dtype=dtype) if block.layer_scalar else None,
            convs=block.convs and BranchConvs.init(batch, block.convs, key=fold_key(mixer_key, 2), dtype=dtype),
        )

    @property
    def some_map(self) -> Linear:
        """A map of the layer, whose backend computes what stands between its parts."""
        if self.mlp is not None:
            return self.mlp.down_proj
        if self.attention is not None:
            return self.attention.o_proj
        assert self.recurrent is not None
        return self.recurrent.out_proj

    def at(self, index: Array, num_rows: Array) -> "DecoderLayer":
        """One layer of a stack, for inputs whose first `num_rows` rows count."""

        def at(part):
            return pick_layer(part, index) if isinstance(part, NamedArray) else part.at(index, num_rows)

        return jax.tree.map(at, self, is_leaf=lambda part: isinstance(part, Linear | RMSNorm | Moe | NamedArray))

    def __call__(
        self,
        x: NamedArray,
        block: Block,
        mix: Callable[[NamedArray, Fusion], tuple[NamedArray, tuple[Any, ...]]],
        on_choice: Callable[[Array], None] | None = None,
        own_input: NamedArray | None = None,
        convolve: Convolve | None = None,
    ):
        """The layer.

        Args:
            x: [..., embed]; of a layer on a ring (`with_ring`), this device's columns.
            block: what it computes.
            mix: the mixer, of the residual stream and what happens around its matmuls; gives its result and its states.
            on_choice: called with the experts of each row, if the layer has some (`Moe`).
            own_input: [..., layer_input], the layer's own input, if it has one.
            convolve: its short convolutions, if it has some.
        Returns: [..., embed] and the mixer's states.
        """
        multiplier = block.residual_multiplier
        rows, norms = self.some_map.by_rows, (self.mixer_out_norm, self.mlp_out_norm)
        mixer_after, mlp_after = (
            None if norm is None else functools.partial(norm.by_rows, rows=rows) for norm in norms
        )
        if convolve is not None:
            assert not any(norms), "no family has norms and convolutions of its results"
            mixer_after, mlp_after = (functools.partial(convolve, site) for site in (MIXER, FEED_FORWARD))

        def around(norm: RMSNorm | None, after: Callable | None, onto: NamedArray) -> Fusion:
            return Fusion(norm=norm, residual=onto if after is None and multiplier == 1 else None)

        def added(result: NamedArray, after: Callable | None, onto: NamedArray) -> NamedArray:
            if after is None and multiplier == 1:
                return result  # with the residual in it
            result = result if after is None else after(result)
            if multiplier == 1:
                return onto + result
            return rows(lambda onto, result: onto + result * jnp.asarray(multiplier, result.dtype), onto, result)

        mixed = x
        states: tuple[Any, ...] = ()
        if block.mixer is not None:
            mixed, states = mix(x, around(self.input_norm, mixer_after, x))
            mixed = added(mixed, mixer_after, x)
        result = mixed
        if self.mlp is not None:
            parallel = block.placement.is_parallel
            norm = self.input_norm if block.placement is Placement.PARALLEL else self.mlp_norm
            observed = on_choice is not None and isinstance(self.mlp, Moe)
            feed = functools.partial(self.mlp, on_choice=on_choice) if observed else self.mlp
            result = feed(x if parallel else mixed, around(norm, mlp_after, mixed), block.feed_forward)  # type: ignore[arg-type]
            result = added(result, mlp_after, mixed)
        if self.layer_input is not None:
            assert own_input is not None and block.layer_input is not None
            result = self.layer_input(result, own_input, block.layer_input)
        if self.layer_scalar is not None:
            scalar = self.layer_scalar.array.reshape(()).astype(result.dtype)
            result = rows(lambda result: result * scalar, result)
        return result, states


def _attention(
    batch: tuple[Axis, ...], embed: Axis, block: Mixer | None, *, key: Array | None, dtype
) -> Attention | LatentAttention | None:
    """Random parameters of the mixer, if that is attention."""
    match block:
        case LatentAttentionBlock():
            return LatentAttention.init(batch, embed, block, key=key, dtype=dtype)
        case AttentionBlock():
            return Attention.init(batch, embed, block, key=key, dtype=dtype)
    return None


def _recurrent(
    batch: tuple[Axis, ...], embed: Axis, block: Mixer | None, *, key: Array | None, dtype
) -> Recurrent | None:
    """Random parameters of the mixer, if that is recurrent."""
    match block:
        case ShortConvBlock():
            return ShortConv.init(batch, embed, block, key=key, dtype=dtype)
        case DeltaNetBlock():
            return DeltaNet.init(batch, embed, block, key=key, dtype=dtype)
        case KimiDeltaBlock():
            return KimiDelta.init(batch, embed, block, key=key, dtype=dtype)
        case Mamba2Block():
            return Mamba2.init(batch, embed, block, key=key, dtype=dtype)
    return None
