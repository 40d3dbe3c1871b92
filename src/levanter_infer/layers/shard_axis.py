"""An axis in equal parts over the devices of a mesh axis, as the code of one device sees it.

What runs on one device is the same code with one part, for which all of this does nothing.
"""

import functools
import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from levanter_infer.axes import VOCAB_GROUPS

_LANES = 128
"""Numbers that a TPU stores side by side; of shorter stretches each would be filled up to so many."""


@dataclass(frozen=True)
class ShardAxis:
    """A mesh axis that an array is sharded over. The methods are collectives: all devices of the axis call them."""

    mesh_axis: str | tuple[str, ...] | None = None
    """Its name, or the names of several, over which only sums are taken; None: not sharded."""
    parts: int = 1
    """Devices along it."""
    in_order: bool = False
    """Whether sums are taken one part after the other, in one order for all numbers. An all-reduce has another order
    for each stretch of an array, so that the bits of a number would depend on its place."""

    def sum(self, values: Array) -> Array:
        if self.mesh_axis is None:
            return values
        return self._sum_in_order(values) if self.in_order else jax.lax.psum(values, self.mesh_axis)

    def sum_in(self, dtype, values: Array) -> Array:
        """`sum`, with what each part has sent as `dtype`."""
        if self.mesh_axis is None:
            return values
        return self.sum(values.astype(dtype)).astype(values.dtype)

    def _sum_in_order(self, values: Array) -> Array:
        """The sum in float32, rounded once. Of wide arrays each device adds up a stretch of the last axis, and all send
        their stretches to all: as many bytes as an all-reduce."""
        wide = jnp.float32 if jnp.issubdtype(values.dtype, jnp.floating) else values.dtype

        def added(parts: Array) -> Array:
            return functools.reduce(operator.add, [parts[i].astype(wide) for i in range(self.parts)])

        if values.ndim < 2 or values.shape[-1] % (self.parts * _LANES):
            return added(jax.lax.all_gather(values, self.mesh_axis)).astype(values.dtype)
        # The parts come one behind the other: with an axis of parts beside the columns XLA moves all numbers first.
        own = jax.lax.all_to_all(values, self.mesh_axis, values.ndim - 1, 0, tiled=True)
        own = own.reshape(self.parts, *values.shape[:-1], -1)
        return jax.lax.all_gather(added(own).astype(values.dtype), self.mesh_axis, axis=values.ndim - 1, tiled=True)

    def own_sum(self, values: Array, axis: int) -> Array:
        """This device's part of an axis of the sum: half of the bytes of `sum`, where libtpu has a reduce-scatter."""
        if self.mesh_axis is None:
            return values
        return jax.lax.psum_scatter(values, self.mesh_axis, scatter_dimension=axis, tiled=True)

    def max(self, values: Array) -> Array:
        return values if self.mesh_axis is None else jax.lax.pmax(values, self.mesh_axis)

    def min(self, values: Array) -> Array:
        return values if self.mesh_axis is None else jax.lax.pmin(values, self.mesh_axis)

    def all_gather(self, values: Array, axis: int) -> Array:
        """The values of all parts, one behind the other."""
        if self.mesh_axis is None:
            return values
        return jax.lax.all_gather(values, self.mesh_axis, axis=axis, tiled=True)

    def exchanged(self, values: Array) -> Array:
        """[row, part] as [row / parts, all parts]: this device's stretch of the rows, with the values of all parts one
        behind the other. Requires: `parts` divides the rows."""
        if self.mesh_axis is None:
            return values
        return jax.lax.all_to_all(values, self.mesh_axis, split_axis=0, concat_axis=1, tiled=True)

    def own(self, values: Array, axis: int) -> Array:
        """This device's part of an axis of values that all devices have."""
        if self.mesh_axis is None:
            return values
        size = values.shape[axis] // self.parts
        return jax.lax.dynamic_slice_in_dim(values, self.index * size, size, axis)

    def shifted(self, values: Array, by: int) -> Array:
        """The values of the device that is `by` places before this one in the ring of all.

        XLA's CPU backend lets a permute wait for every device of the mesh, also those of other rings, which may have
        fewer steps to compute; a gather waits for those of its own ring alone.
        """
        if self.mesh_axis is None:
            return values
        pairs = [(i, (i + by) % self.parts) for i in range(self.parts)]

        def of_gathered(values: Array) -> Array:
            every = jax.lax.all_gather(values, self.mesh_axis)
            return jax.lax.dynamic_index_in_dim(every, (self.index - by) % self.parts, keepdims=False)

        def permuted(values: Array) -> Array:
            return jax.lax.ppermute(values, self.mesh_axis, pairs)

        return jax.lax.platform_dependent(values, cpu=of_gathered, default=permuted)

    @property
    def index(self) -> Array:
        """Index of the part that this device has, i32[]."""
        return jnp.int32(0) if self.mesh_axis is None else jax.lax.axis_index(self.mesh_axis).astype(jnp.int32)


REPLICATED = ShardAxis()
"""The axis is not sharded: each device has all of it."""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids, and the stretch of them whose embeddings and logits this device has.

    Ids are those of the whole vocabulary everywhere; `local` says where they are here. Where the last stretch is longer
    than what is left of the vocabulary, its logits are -inf.
    """

    size: int
    shard_axis: ShardAxis = REPLICATED

    @property
    def part_size(self) -> int:
        """Tokens of one part."""
        if self.shard_axis.parts == 1:
            return self.size
        return -(-self.size // VOCAB_GROUPS) * VOCAB_GROUPS // self.shard_axis.parts

    @property
    def padded_size(self) -> int:
        return self.part_size * self.shard_axis.parts

    def local(self, ids: Array) -> Array:
        """Indices of tokens in this part; `part_size`, which is out of range, for tokens of other parts."""
        if self.shard_axis.parts == 1:
            return ids
        place = ids - self.shard_axis.index * self.part_size
        return jnp.where((place >= 0) & (place < self.part_size), place, self.part_size)

    def ids(self, shape: tuple[int, ...]) -> Array:
        """The ids of this part's tokens along the last axis, i32[shape]."""
        places = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        return places + self.shard_axis.index * self.part_size

    def without_padding(self, logits: Array) -> Array:
        """f32[..., part]: what stands behind the vocabulary becomes impossible."""
        if self.padded_size == self.size:
            return logits
        return jnp.where(self.ids(logits.shape) < self.size, logits, -jnp.inf)

    def at(self, values: Array, ids: Array, fill: float, stride: int | None = None) -> Array:
        """f32[row, k], the values f32[row, part] of the tokens i32[row, k]; `fill` where an id is none.

        Args: stride: the distance from each id of a row to the next, where it is the same: then a part reads those ids
            only that it may have.
        """
        if self.shard_axis.parts == 1:
            return jnp.take_along_axis(values, ids, axis=1, mode="fill", fill_value=fill)
        own = self._own_at(values, ids) if stride is None else self._own_at_stride(values, ids, stride)
        return jnp.where(ids < self.size, self.shard_axis.sum(own), fill)

    def _own_at(self, values: Array, ids: Array) -> Array:
        """As `at`, of the tokens of this part, and 0 for others."""
        return jnp.take_along_axis(values, self.local(ids), axis=1, mode="fill", fill_value=0.0)

    def _own_at_stride(self, values: Array, ids: Array, stride: int) -> Array:
        count = ids.shape[1]
        most = min(-(-self.part_size // stride), count)
        # The column of the first id that is not in an earlier part.
        first = -((ids[:, 0] - self.shard_axis.index * self.part_size) // stride)
        column = jnp.clip(first, 0, count - most)[:, None] + jnp.arange(most, dtype=jnp.int32)[None, :]
        found = self._own_at(values, ids[:, :1] + stride * column)
        is_own = column[:, :, None] == jnp.arange(count, dtype=jnp.int32)[None, None, :]
        return jnp.sum(jnp.where(is_own, found[:, :, None], 0), axis=1)

    def first(self, hits: Array) -> Array:
        """The first token of each row of the mask bool[row, part], i32[row]; the last of all where there is none."""
        ids = self.ids(hits.shape)
        first = self.shard_axis.min(jnp.min(jnp.where(hits, ids, self.size), axis=1))
        return jnp.minimum(first, self.size - 1)

    def first_of_parts(self, places: Array, hits: Array) -> Array:
        """The first token of all parts, i32[row], from its place in each part, i32[row], where the mask bool[row] says
        that there is one; the last of all where there is none."""
        ids = jnp.where(hits, places + self.shard_axis.index * self.part_size, self.size)
        return jnp.minimum(self.shard_axis.min(ids), self.size - 1)

    def largest(self, values: Array, count: int) -> tuple[Array, Array]:
        """The `count` largest values of each row of f32[row, part], largest first, and their tokens; of equal ones the
        first. Only that many of each part are sent."""
        # Behind barriers, so that XLA does not merge slices into it and sort the whole vocabulary; behind two, because
        # jaxlib 0.10 aborts over one for both in a program for several devices.
        best, places = (jax.lax.optimization_barrier(a) for a in jax.lax.top_k(values, min(count, self.part_size)))
        if self.shard_axis.parts == 1:
            return best, places
        best = self.shard_axis.all_gather(best, 1)
        ids = self.shard_axis.all_gather(places + self.shard_axis.index * self.part_size, 1)
        best, order = jax.lax.top_k(best, count)
        return best, jnp.take_along_axis(ids, order, axis=1)
