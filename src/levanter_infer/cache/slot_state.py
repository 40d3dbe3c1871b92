"""`SlotState`: the pool of layers that remember a state of fixed size per sequence."""

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array

from levanter_infer.axes import LAYERS, SEQ, STATE
from levanter_infer.cache.arrays import cumsum, full, gather, scatter
from levanter_infer.cache.pool import Pool

_PAIRS = 4
"""States that are copied together between pools: mostly there are few."""


class SlotState(Pool):
    """Arrays of float32 for every layer and slot, by name: the last inputs of a convolution, the matrices of a
    recurrence.

    A slot's state is that after the tokens which are computed, `num_computed` of them. It is never cleared: a sequence
    whose first token is computed starts from zeros whatever is stored, so that release, preemption and reuse of a slot
    write nothing.

    The states that prefix caching keeps (`StateSnapshots`) are another such pool, whose entries are snapshots.
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

    def copy_from(self, other: "SlotState", source: Array, target: Array) -> "SlotState":
        """Copy entries of another pool of the same layers: `source[i]` to `target[i]`, i32[n], a few pairs after
        another; pairs with an absent target are ignored."""
        used = target < self.num_entries
        place = jnp.where(used, cumsum(used) - 1, target.shape[0] + _PAIRS)
        count = jnp.sum(used, dtype=jnp.int32)
        # Behind the last pair there are absent ones enough to fill a block
        source = scatter(full(target.shape[0] + _PAIRS, 0), place, source)
        target = scatter(full(target.shape[0] + _PAIRS, self.num_entries), place, target)

        def copy_block(carry):
            start, pool = carry
            item = start + jnp.arange(_PAIRS, dtype=jnp.int32)
            left, right = gather(source, item, 0), gather(target, item, self.num_entries)

            def copy_layer(layer, pool: "SlotState") -> "SlotState":
                none = jnp.zeros(_PAIRS, jnp.bool_)
                return pool.write(layer, right, other.read(layer, left, none))

            return start + _PAIRS, jax.lax.fori_loop(0, self.num_layers, copy_layer, pool)

        return jax.lax.while_loop(lambda carry: carry[0] < count, copy_block, (jnp.int32(0), self))[1]

    def take(self, entries: Array) -> dict[str, Array]:
        """As `Pool.take`: f32[layers, n, …] by name."""
        return {name: named.array.at[:, entries].get(mode="clip") for name, named in self.arrays.items()}

    def put(self, entries: Array, contents: Mapping[str, Array]) -> "SlotState":
        return self._changed(lambda name, array: array.at[:, entries].set(contents[name], mode="drop"))

    def _changed(self, change) -> "SlotState":
        """`change(name, array)` in place of each array."""
        return SlotState({k: NamedArray(change(k, named.array), named.axes) for k, named in self.arrays.items()})
