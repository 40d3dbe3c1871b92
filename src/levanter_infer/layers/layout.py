"""`Layout`: the sharding of the axes of weights and state over a mesh of devices, in one place.

Weights, the pool and everything computed from a head, a part of the feed-forward block or a token of the vocabulary are
sharded over the mesh axis `model` (tensor parallel), experts over `expert` (expert parallel); all else is replicated.
The code of a layer does not know: it sees arrays of a shard's size, and a linear map whose inputs are sharded sums its
results over the axis.

Source: tensor parallelism, arXiv:1909.08053, section 3.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from levanter_infer.axes import (
    DATA,
    EXPERT,
    HEAD_SIZE,
    KV_HEADS,
    KV_PAIR,
    MLP,
    MODEL,
    Q_HEADS_PER_GROUP,
    VOCAB,
    check_model_axis,
)
from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis, Vocabulary

MESH_AXES = {KV_HEADS: MODEL, KV_PAIR: MODEL, MLP: MODEL, VOCAB: MODEL, EXPERT: EXPERT, DATA: DATA}
"""Axis of an array -> axis of the mesh over which it is sharded."""


def _is_named(leaf) -> bool:
    return isinstance(leaf, NamedArray)


def _map_named(function: Callable[[NamedArray], Any], other: Callable[[Any], Any], tree):
    return jax.tree.map(lambda leaf: function(leaf) if _is_named(leaf) else other(leaf), tree, is_leaf=_is_named)


def _refit(tree):
    """The same tree, its axes as long as its arrays are."""

    def refit(named: NamedArray) -> NamedArray:
        axes = tuple(axis.resize(size) for axis, size in zip(named.axes, named.array.shape, strict=True))
        return NamedArray(named.array, axes)

    return _map_named(refit, lambda leaf: leaf, tree)


def one_device_mesh(device=None) -> Mesh:
    """The mesh of one device, None for the default one: what runs on it is what runs on any other mesh."""
    if device is None:
        wanted = jax.config.values["jax_default_device"]
        device = wanted if isinstance(wanted, jax.Device) else jax.local_devices(backend=wanted)[0]
    return Mesh(np.asarray([[device]]), (DATA, MODEL))


def _is_there(array, sharding: NamedSharding) -> bool:
    return isinstance(array, jax.Array) and array.sharding.is_equivalent_to(sharding, array.ndim)


def _put_own_parts(array, sharding: NamedSharding, donate: bool):
    """An array that all processes of a mesh bring, on the devices of this one."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, sharding, donate=donate)
    full = np.asarray(array)
    indices = sharding.addressable_devices_indices_map(full.shape)
    parts = [jax.device_put(full[index], device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(full.shape, sharding, parts)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of a model with `num_kv_heads` heads of keys and values and `vocab_size` tokens over a mesh.

    Key and value heads that are fewer than the devices of `model`, or no multiple of them, are there several times, and
    each copy serves a part of the query heads of its group. Layers may have different heads: those of a weight are the
    sizes of its axes.
    """

    mesh: Mesh
    """With some of the axes `data`, `model` and `expert`; arrays are whole along any others."""
    num_kv_heads: int
    q_heads_per_group: int
    """Sizes of the first layer with attention."""
    vocab_size: int
    num_experts: int | None = None
    equal_heads: bool = True
    """Whether all layers with attention have as many heads as the first."""
    sums_in_order: bool = False
    """`ShardAxis.in_order` of all axes."""

    def __post_init__(self):
        parts = self.experts.parts
        if parts > 1 and self.num_experts is None:
            raise ValueError(f"mesh.expert={parts}: the model has no experts; leave it out, and use mesh.model")
        if self.num_experts is not None and self.num_experts % parts:
            raise ValueError(f"mesh.expert={parts} does not divide the model's {self.num_experts} experts")
        check_model_axis(self.model.parts)

    @staticmethod
    def of(mesh: Mesh | None, config, device=None) -> "Layout":
        """The layout of the model that `config` (a `DecoderConfig`) describes.

        Args:
            mesh: None for a mesh of one device.
            device: that device; None for the default one.
        """
        mesh = one_device_mesh(device) if mesh is None else mesh
        group = config.num_heads // config.num_kv_heads
        equal = len(config.head_counts) == 1
        layout = Layout(mesh, config.num_kv_heads, group, config.vocab_size, config.num_experts, equal)
        across = any(mixer.qk_norm_whole for mixer in config.kv_attention)
        if layout.model.parts > 1 and not equal and across:
            raise ValueError(
                f"mesh.model={layout.model.parts}: layers differ in (heads, key and value heads): "
                f"{', '.join(map(str, config.head_counts))}, and tensor parallelism of such a model with norms over "
                "all heads is not implemented; use mesh.data"
            )
        if layout.model.parts > 1 and config.unsharded_heads is not None:
            raise ValueError(
                f"mesh.model={layout.model.parts}: {config.unsharded_heads}, and tensor parallelism of such a model is "
                "not implemented; use mesh.data or mesh.expert"
            )
        return layout

    @property
    def model(self) -> ShardAxis:
        """The tensor-parallel axis."""
        parts = self.mesh.shape.get(MODEL, 1)
        return REPLICATED if parts == 1 else ShardAxis(MODEL, parts, self.sums_in_order)

    @property
    def experts(self) -> ShardAxis:
        """The expert-parallel axis."""
        parts = self.mesh.shape.get(EXPERT, 1)
        return REPLICATED if parts == 1 else ShardAxis(EXPERT, parts, self.sums_in_order)

    @property
    def expert_sums(self) -> ShardAxis:
        """The axes over which the outputs of experts are summed."""
        sharded = [each for each in (self.model, self.experts) if each.parts > 1]
        if len(sharded) < 2:
            return sharded[0] if sharded else REPLICATED
        return ShardAxis((MODEL, EXPERT), self.model.parts * self.experts.parts, self.sums_in_order)

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the full model."""
        return self.model.parts == self.experts.parts == 1

    @property
    def num_ranks(self) -> int:
        """Devices along `data`: engines with tables of their own."""
        return self.mesh.shape.get(DATA, 1)

    @functools.cached_property
    def spans_hosts(self) -> bool:
        """Whether its devices belong to several processes, each of which sees the arrays of its own only."""
        if isinstance(self.mesh, AbstractMesh):  # of devices that are not here, for a plan
            return False
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    @property
    def vocab(self) -> Vocabulary:
        return Vocabulary(self.vocab_size, self.model)

    @property
    def kv_copies(self) -> int:
        """Copies of each key and value head of the first layer with attention, over all devices."""
        return self.copies_of(self.num_kv_heads)

    def copies_of(self, num_kv_heads: int) -> int:
        """Copies of each key and value head, over all devices, in layers that have `num_kv_heads`."""
        return self.model.parts // math.gcd(num_kv_heads, self.model.parts)

    @property
    def kv_heads(self) -> int:
        """Key and value heads of one device, in the first layer with attention."""
        return self.local_kv_heads(self.num_kv_heads)

    def local_kv_heads(self, num_kv_heads: int) -> int:
        """Key and value heads of one device, of layers that have `num_kv_heads`."""
        return num_kv_heads * self.copies_of(num_kv_heads) // self.model.parts

    def head_index(self, head):
        """Index in the model of query head `head` of this device, i32; used where a head's number has a meaning.
        Heads that fill up a group count as the last of it.

        Raises: ValueError if layers differ in their heads.
        """
        if self.model.parts == 1:
            return head
        if not self.equal_heads:
            raise ValueError(
                f"mesh.model={self.model.parts}: layers differ in their heads, and score_mod and mask_mod with tensor "
                "parallelism of such a model are not implemented; leave them out, or use mesh.data"
            )
        per_copy = -(-self.q_heads_per_group // self.kv_copies)
        kv_head, place = self.model.index * self.kv_heads + head // per_copy, head % per_copy
        place = jnp.minimum((kv_head % self.kv_copies) * per_copy + place, self.q_heads_per_group - 1)
        return (kv_head // self.kv_copies) * self.q_heads_per_group + place

    # Arrays

    def fitted(self, named: NamedArray) -> NamedArray:
        """A weight with its axes filled up, and its heads there as often as they have to be; arrays of JAX or numpy."""
        array, axes = named.array, list(named.axes)
        xp = np if isinstance(array, np.ndarray) else jnp
        names = [axis.name for axis in axes]

        def fill(place: int, size: int) -> None:
            nonlocal array
            if axes[place].size != size:
                array = xp.pad(array, [(0, size - axes[place].size if i == place else 0) for i in range(array.ndim)])
                axes[place] = axes[place].resize(size)

        num_kv_heads = axes[names.index(KV_HEADS)].size if KV_HEADS in names else self.num_kv_heads
        if KV_HEADS in names and (copies := self.copies_of(num_kv_heads)) > 1:
            heads = names.index(KV_HEADS)
            if Q_HEADS_PER_GROUP in names:
                assert names.index(Q_HEADS_PER_GROUP) == heads + 1
                per_copy = -(-axes[heads + 1].size // copies)
                fill(heads + 1, per_copy * copies)
                sizes = num_kv_heads * copies, per_copy
                array = array.reshape(*array.shape[:heads], *sizes, *array.shape[heads + 2 :])
                axes[heads + 1] = axes[heads + 1].resize(sizes[1])
            else:
                array = xp.repeat(array, copies, axis=heads)
            axes[heads] = axes[heads].resize(num_kv_heads * copies)
        if VOCAB in names:
            fill(names.index(VOCAB), self.vocab.padded_size)
        if MLP in names:
            place = names.index(MLP)
            fill(place, -(-axes[place].size // self.model.parts) * self.model.parts)
        return NamedArray(array, tuple(axes))  # type: ignore[arg-type]

    def stored_range(self, axis: Axis, start: int, stop: int) -> tuple[int, int]:
        """The entries of a weight's `axis` that `fitted` puts at `start` to `stop` of it."""
        copies = self.copies_of(axis.size) if axis.name == KV_HEADS else 1
        return min(start // copies, axis.size), min(-(-stop // copies), axis.size)

    def spec(self, axes: tuple[Axis, ...]) -> PartitionSpec:
        """The mesh axis of each axis."""
        names = (MESH_AXES.get(axis.name) for axis in axes)
        return PartitionSpec(*(name if name in self.mesh.axis_names else None for name in names))

    def normed_width(self, axes: tuple[Axis, ...]) -> int | None:
        """Numbers over which a norm with a weight of these axes averages, copies of heads included and the zeros that
        fill up a group left out. None: the norm is not over sharded axes."""
        sizes = {axis.name: axis.size for axis in axes}
        if self.model.parts == 1 or KV_HEADS not in sizes:
            return None
        heads = self.q_heads_per_group if Q_HEADS_PER_GROUP in sizes else self.kv_copies
        return self.num_kv_heads * heads * sizes[HEAD_SIZE]

    def is_sharded(self, axes: tuple[Axis, ...]) -> bool:
        """Whether any of these axes is."""
        return any(axis.name in MESH_AXES for axis in axes)

    def sharding(self, axes: tuple[Axis, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes))

    def place(self, tree, *, donate: bool = False, stacked: bool = False):
        """A tree of arrays of the mesh's size, each device with its part. `donate`: arrays elsewhere are given up.
        `stacked`: arrays without named axes have a leading axis of data-parallel ranks, where there are several.

        Where the mesh has devices of several processes, each process brings the same arrays, and places its parts.
        """

        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_named)
        arrays = [leaf.array if _is_named(leaf) else leaf for leaf in leaves]
        shardings = [self.sharding(leaf.axes) if _is_named(leaf) else self._plain_sharding(stacked) for leaf in leaves]
        if self.spans_hosts:
            placed = [_put_own_parts(*pair, donate) for pair in zip(arrays, shardings, strict=True)]
        else:  # arrays that are there stay as they are: a model shares its arrays with the program that trains it
            away = [i for i, pair in enumerate(zip(arrays, shardings, strict=True)) if not _is_there(*pair)]
            moved = jax.device_put([arrays[i] for i in away], [shardings[i] for i in away], donate=donate)
            placed = list(arrays)
            for i, array in zip(away, moved, strict=True):
                placed[i] = array
        pairs = zip(leaves, placed, strict=True)
        found = [NamedArray(array, leaf.axes) if _is_named(leaf) else array for leaf, array in pairs]
        return jax.tree.unflatten(structure, found)

    def types(self, tree, *, stacked: bool = False):
        """The types of such a tree, with their shardings; `stacked` as for `place`."""

        def typed(leaf, sharding: NamedSharding):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return _map_named(
            lambda named: NamedArray(typed(named.array, self.sharding(named.axes)), named.axes),  # type: ignore[arg-type]
            lambda leaf: typed(leaf, self._plain_sharding(stacked)),
            tree,
        )

    def _plain_sharding(self, stacked: bool) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*(self._lead if stacked else ())))

    def fit_model(self, model, *, donate: bool = False):
        """A model as it came from a checkpoint, sharded over the mesh; its types where it is types."""

        def fit(named: NamedArray) -> NamedArray:
            if isinstance(named.array, jax.ShapeDtypeStruct):
                fitted = jax.eval_shape(self.fitted, named)
                return self.types(fitted)
            return self.place(self.fitted(named), donate=donate)

        return _map_named(fit, lambda leaf: leaf, model).shard_as(self)

    def stacked_types(self, tree):
        """The types of the arrays of all data-parallel ranks, from those of one."""
        ranks = self.num_ranks
        if ranks == 1:
            return tree

        def stacked(leaf):
            return jax.ShapeDtypeStruct((ranks, *leaf.shape), leaf.dtype)

        return _map_named(
            lambda named: NamedArray(stacked(named.array), (Axis(DATA, ranks), *named.axes)),  # type: ignore[arg-type]
            stacked,
            tree,
        )

    # Programs

    @property
    def _lead(self) -> tuple[str, ...]:
        """The axis of ranks that the programs' arguments and results have: none for one rank, which is the one
        difference between one and several (docs/decisions/0032-always-a-mesh.md)."""
        return (DATA,) if self.num_ranks > 1 else ()

    def spmd(self, function: Callable, results) -> Callable:
        """`function`, run by every device on its parts.

        Args:
            function: of one data-parallel rank. Where there are several, all arguments but `model`, and all results,
                have a leading axis `data`.
            results: what one shard gets: types, or None for arrays that are the same on all devices of a shard. These
                are for the host: where there are several, they are brought to all devices, so that each host has them.
        """
        names = tuple(inspect.signature(function).parameters)
        lead = self._lead
        gathers = self.spans_hosts and bool(lead)

        def is_result(leaf) -> bool:
            return leaf is None or _is_named(leaf)

        def out_spec(leaf) -> PartitionSpec:
            if _is_named(leaf):
                return PartitionSpec(*lead, *self.spec(leaf.axes))
            return PartitionSpec() if gathers and leaf is None else PartitionSpec(*lead)

        def to_all(kind, result):
            if kind is not None:
                return result
            return jax.tree.map(lambda array: jax.lax.all_gather(array, DATA, tiled=True), result)

        def of_one(*arguments):
            own = [a if n == "model" else _without_lead(a, lead) for n, a in zip(names, _refit(arguments), strict=True)]
            found = _with_lead(function(*own), lead)
            return jax.tree.map(to_all, results, found, is_leaf=is_result) if gathers else found

        out_specs = jax.tree.map(out_spec, results, is_leaf=is_result)

        @functools.wraps(function)
        def run(*arguments):
            in_specs = [self._specs(a, () if n == "model" else lead) for n, a in zip(names, arguments, strict=True)]
            mapped = jax.shard_map(
                of_one, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
            )
            return _refit(mapped(*arguments))

        return run

    def _specs(self, tree, lead: tuple[str, ...]):
        return _map_named(lambda named: self.spec(named.axes), lambda leaf: PartitionSpec(*lead), tree)


def _without_lead(tree, lead: tuple[str, ...]):
    """One shard's part of arrays with an axis of shards."""
    if not lead:
        return tree
    return _map_named(lambda named: NamedArray(named.array[0], named.axes[1:]), lambda leaf: leaf[0], tree)


def _with_lead(tree, lead: tuple[str, ...]):
    if not lead:
        return tree
    axis = Axis(DATA, 1)
    return _map_named(lambda named: NamedArray(named.array[None], (axis, *named.axes)), lambda leaf: leaf[None], tree)
