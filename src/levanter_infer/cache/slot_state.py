"""`SlotState`: state of a fixed size per sequence, in the layers that remember no keys and values."""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import LAYERS, SEQ, STATE
from levanter_infer.cache.arrays import replace


class SlotState(eqx.Module):
    """Arrays of float32 for every layer and slot, by name: the last inputs of a convolution, the matrices of a
    recurrence.

    A slot's state is that after the tokens which are computed, `num_computed` of them. It is never cleared: a sequence
    whose first token is computed starts from zeros whatever is stored, so that release, preemption and reuse of a slot
    write nothing.
    """

    arrays: dict[str, NamedArray]
    """[layers, slot, state…]"""

    @staticmethod
    def init(num_layers: int, num_slots: int, sizes: Mapping[str, tuple[int, ...]]) -> "SlotState":
        """Zeros. Args: sizes: shape of each array in one layer and slot."""

        def zeros(shape: tuple[int, ...]) -> NamedArray:
            names = [f"{STATE}{i}" for i in range(len(shape))]
            axes = (Axis(LAYERS, num_layers), Axis(SEQ, num_slots), *map(Axis, names, shape))
            return NamedArray(jnp.zeros([axis.size for axis in axes], jnp.float32), axes)

        return SlotState({name: zeros(shape) for name, shape in sizes.items()})

    @property
    def num_bytes(self) -> int:
        return sum(each.array.size * each.array.dtype.itemsize for each in self.arrays.values())

    def read(self, layer: Array, slots: Array, is_new: Array) -> dict[str, Array]:
        """The state of each of `slots` in a layer, f32[row, …]; zeros where `is_new`, bool[row], or a slot is none.

        Args:
            layer: i32[], may be traced.
            slots: i32[row]
        """

        def read(stored: Array) -> Array:
            slot = jnp.where(is_new, stored.shape[1], slots)
            return stored.at[layer, slot].get(mode="fill", fill_value=0)

        return {name: read(named.array) for name, named in self.arrays.items()}

    def write(self, layer: Array, slots: Array, values: Mapping[str, Array]) -> "SlotState":
        """Store the state of each of `slots` in a layer; entries of none are dropped."""
        arrays = {
            name: NamedArray(named.array.at[layer, slots].set(values[name], mode="drop"), named.axes)
            for name, named in self.arrays.items()
        }
        return replace(self, arrays=arrays)

    def copy_slots(self, source: Array) -> "SlotState":
        """Each slot takes over the state of `source`, i32[slot]: the slot itself where nothing changes."""

        def copy_layer(layer, stored: Array) -> Array:
            return stored.at[layer].set(stored[layer, source])

        # All layers at once would need memory for everything.
        arrays = {
            name: NamedArray(jax.lax.fori_loop(0, named.array.shape[0], copy_layer, named.array), named.axes)
            for name, named in self.arrays.items()
        }
        return replace(self, arrays=arrays)

    def zero(self) -> "SlotState":
        """The same arrays with every byte cleared."""
        return jax.tree.map(jnp.zeros_like, self)
