"""Parameters of all layers in one array."""

import jax
from haliax import NamedArray
from jax import Array


def pick_layer(stack: NamedArray, layer: Array) -> NamedArray:
    """One entry along the first axis."""
    return NamedArray(jax.lax.dynamic_index_in_dim(stack.array, layer, keepdims=False), stack.axes[1:])
