"""The mixer of a layer from its parts: attention, a recurrence, or both side by side, and convolutions before it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from haliax import NamedArray

from levanter_infer.layers.attention import AttentionInputs
from levanter_infer.layers.branch_conv import KEYS, Convolve
from levanter_infer.layers.linear import Fusion, Linear
from levanter_infer.models.blocks import Block, ParallelMixer


def with_convolution(inputs: AttentionInputs, convolve: Convolve | None) -> AttentionInputs:
    """Inputs of attention whose keys pass a convolution, if the layer has one."""
    return inputs if convolve is None else dataclasses.replace(inputs, convolve_keys=functools.partial(convolve, KEYS))


def mixer_of(block: Block, mixers: Sequence[Callable[[NamedArray, Fusion], tuple[NamedArray, Any]]], part: Linear):
    """The mixer of a layer: its attention, its recurrence, or both side by side. It gives a result and their states.

    Args: part: a map of the layer, whose backend computes.
    """

    def mix(x: NamedArray, around: Fusion) -> tuple[NamedArray, tuple[Any, ...]]:
        both = block.mixer if isinstance(block.mixer, ParallelMixer) else None
        inner = around if both is None else Fusion(norm=around.norm)
        results, states = zip(*(mixer(x, inner) for mixer in mixers), strict=True)
        if both is None:
            return results[0], states

        def added(first: NamedArray, second: NamedArray) -> NamedArray:
            factors = both.attention_multiplier, both.recurrent_multiplier
            pairs = zip((first, second), factors, strict=True)
            first, second = (each * jnp.asarray(factor, each.dtype) for each, factor in pairs)
            return first + second

        return around.after(part.by_rows(added, *results)), states

    return mix
