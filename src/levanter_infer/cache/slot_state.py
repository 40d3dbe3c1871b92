"""`SlotState`: the pool of layers that remember a state of fixed size per sequence."""

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import LAYERS, SEQ, STATE
from levanter_infer.cache.pool import Pool


class SlotState(Pool):
    """Arrays of float32 for every layer and slot, by name: the last inputs of a convolution, the matrices of a
    recurrence.

    A slot's state is that after the tokens which are computed, `num_computed` of them. It is never cleared: a sequence
    whose first token is computed starts from zeros whatever is stored, so that release, preemption and reuse of a slot
    write nothing.
    """

    is_paged: ClassVar[bool] = False
    arrays: dict[str, NamedArray]
    """[layers, slot, state…]"""

    @staticmethod
    def init(num_layers: int, num_slots: int, sizes: Mapping[str, tuple[int, ...]]) -> "SlotState":
        """Zeros. Args: sizes: shape of each array in one layer and slot."""

        def zeros(shape: tuple[int, ...]) -> NamedArray:
            own = (Axis(f"{STATE}{i}", size) for i, size in enumerate(shape))
            axes = (Axis(LAYERS, num_layers), Axis(SEQ, num_slots), *own)
            return NamedArray(jnp.zeros([axis.size for axis in axes], jnp.float32), axes)

        return SlotState({name: zeros(shape) for name, shape in sizes.items()})

    @property
    def num_layers(self) -> int:
        return self._first.axis_size(LAYERS)

    @property
    def num_entries(self) -> int:
        return self._first.axis_size(SEQ)

    @property
    def _first(self) -> NamedArray:
        return next(iter(self.arrays.values()))

    def read(self, layer: Array, slots: Array, is_new: Array) -> dict[str, Array]:
        """The state of each of `slots` in a layer, f32[row, …]; zeros where `is_new`, bool[row], or a slot is none.

        Args:
            layer: i32[], may be traced.
            slots: i32[row]
        """
        slots = jnp.where(is_new, self.num_entries, slots)
        return {
            name: named.array.at[layer, slots].get(mode="fill", fill_value=0) for name, named in self.arrays.items()
        }

    def write(self, layer: Array, slots: Array, values: Mapping[str, Array]) -> "SlotState":
        """Store the state of each of `slots` in a layer; entries of none are dropped."""
        return self._changed(lambda name, array: array.at[layer, slots].set(values[name], mode="drop"))

    def copy(self, source: Array, target: Array) -> "SlotState":
        def copy_layer(layer, array: Array) -> Array:
            return array.at[layer, target].set(array.at[layer, source].get(mode="clip"), mode="drop")

        # All layers at once would need memory for everything that is copied.
        return self._changed(lambda _, array: jax.lax.fori_loop(0, self.num_layers, copy_layer, array))

    def take(self, entries: Array) -> dict[str, Array]:
        """As `Pool.take`: f32[layers, n, …] by name."""
        return {name: named.array.at[:, entries].get(mode="clip") for name, named in self.arrays.items()}

    def put(self, entries: Array, contents: Mapping[str, Array]) -> "SlotState":
        return self._changed(lambda name, array: array.at[:, entries].set(contents[name], mode="drop"))

    def _changed(self, change) -> "SlotState":
        """`change(name, array)` in place of each array."""
        return SlotState({k: NamedArray(change(k, named.array), named.axes) for k, named in self.arrays.items()})
