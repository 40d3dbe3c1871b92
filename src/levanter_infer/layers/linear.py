"""Linear maps whose weights are stored outputs first, `[layers, out..., in...]`, or as their backend reads them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from levanter_infer.axes import EXPERT, INDEX_WEIGHT, NORM_GATE, PANEL, PANEL_SIZE, SHARED_GATE
from levanter_infer.kernels.backend import Backend, Fuse
from levanter_infer.kernels.call import GroupedCall, LinearCall
from levanter_infer.kernels.xla.backend import XLA, XlaBackend
from levanter_infer.layers import collective_matmul
from levanter_infer.layers.activation import Activation, ClampedSwiglu
from levanter_infer.layers.norm import ByRows, RMSNorm
from levanter_infer.layers.quantize import quantized
from levanter_infer.layers.shard_axis import REPLICATED, ShardAxis
from levanter_infer.layers.stack import pick_layer

_FLOATS = (EXPERT, SHARED_GATE, NORM_GATE, INDEX_WEIGHT)
"""Axes of maps that are never quantized: they are small, and decide about much."""
Rows = TypeVar("Rows", bound=NamedArray | tuple[NamedArray, ...])


class Linear(eqx.Module):
    """`y[..., out] = x[..., in] · weight[out, in] + bias[out]`, accumulated in float32, in the dtype of `x`.

    Outputs first is the order in which both CPU and TPU read weights without another copy. `prepare` stores the
    weight as a backend reads it; the mathematics stays the same.
    """

    weight: NamedArray
    """[layers, out..., in...] as it was loaded; after `prepare` its bits, or packed: [layers, panel, panel_size]."""
    bias: NamedArray | None
    """[layers, out...], or [out...] where the layer has been chosen."""
    num_in: int = eqx.field(static=True)
    """Number of the last axes of the weight that are inputs."""
    num_out: int = eqx.field(static=True, default=1)
    """Number of the axes before them that are outputs."""
    shard_axis: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """How the inputs are sharded; `apply` adds up results over all shards, in the dtype of `x`."""
    ring: ShardAxis = eqx.field(static=True, default=REPLICATED)
    """The devices that have the columns of the residual stream in equal parts: `apply` reads and gives this device's,
    and sends the others' around a ring beside the matmul. `REPLICATED`: each has all."""
    backend: Backend = eqx.field(static=True, default=XLA)
    """Backend that computes the matmul."""
    packed_axes: tuple[Axis, ...] | None = eqx.field(static=True, default=None)
    """The axes out..., in... of a packed weight; None: it is not packed."""
    loaded_dtype: jnp.dtype | None = eqx.field(static=True, default=None)
    """Dtype of the weight before it was quantized, or stored as its bits or packed; None: it is as it was loaded."""
    unpadded_in: int | None = eqx.field(static=True, default=None)
    """Inputs of one device without the zeros that are stored behind them; None: there are none."""
    merged_ins: tuple[Axis, ...] = eqx.field(static=True, default=())
    """Input axes that are stored merged with the one before them."""
    scale: NamedArray | None = None
    """f32[layers, out], the factors of the sums of a weight of int8. The output axes are stored as one, which has the
    name of the first and is sharded as that. None: the weight is floats."""
    layer: Array | None = None
    """i32[], which entry of the stack is meant; None: the weight is not one of a stack, or a scan has picked it."""
    num_rows: Array | None = None
    """i32[], how many rows of x count; the others may give anything. None: all."""

    @staticmethod
    def init(
        batch: Sequence[Axis], out: Sequence[Axis], ins: Sequence[Axis], *, key: Array | None, dtype, bias: bool = False
    ) -> "Linear":
        """Normal weights of variance 1 / inputs, zero bias. `batch`: axes of independent maps, `layers` as a rule.

        Args: key: None for zeros, for which shapes are found without tracing a random generator.
        """
        scale = math.prod(axis.size for axis in ins) ** -0.5
        return Linear(
            weight=random_weight(key, (*batch, *out, *ins), scale, dtype),
            bias=hax.zeros((*batch, *out), dtype=dtype) if bias else None,
            num_in=len(ins),
            num_out=len(out),
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weight, in whatever form it is stored."""
        return self.weight.dtype if self.loaded_dtype is None else self.loaded_dtype

    @property
    def outs(self) -> tuple[Axis, ...]:
        """Axes of the outputs."""
        axes = self.weight.axes if self.packed_axes is None else self.packed_axes
        end = len(axes) - self.num_in + len(self.merged_ins)
        return axes[end - self.num_out : end]

    @property
    def ins(self) -> tuple[Axis, ...]:
        """Axes of the inputs."""
        axes = self.weight.axes if self.packed_axes is None else self.packed_axes
        if self.merged_ins:
            size = axes[-1].size // math.prod(axis.size for axis in self.merged_ins)
            return (axes[-1].resize(size), *self.merged_ins)
        ins = axes[len(axes) - self.num_in :]
        return ins if self.unpadded_in is None else (ins[0].resize(self.unpadded_in),)

    def at(self, layer: Array | None, num_rows: Array | None) -> "Linear":
        """The map of one layer of a stack, for x whose first `num_rows` rows count. The weight is not sliced here."""
        bias = self.bias if self.bias is None or layer is None else pick_layer(self.bias, layer)
        return dataclasses.replace(self, bias=bias, layer=layer, num_rows=num_rows)

    def quantized(self, *, donate: bool = False) -> "Linear":
        """The map with a weight of int8 and a scale for each output. Routers, gates of shared experts and of norms stay
        as they are, as does a map that is quantized. `donate`: the memory of this weight may be freed."""
        if self.scale is not None or any(axis.name in _FLOATS for axis in (*self.outs, *self.ins)):
            return self
        axes, outs = self.weight.axes, self.outs
        lead = axes[: len(axes) - self.num_in - self.num_out]
        codes, scales = quantized(self.weight.array, self.num_in, dtype=self.dtype, is_stack=bool(lead))
        _free([self.weight.array], [codes], donate)
        merged = outs[0].resize(math.prod(axis.size for axis in outs))
        scales = _reshaped(scales, tuple(axis.size for axis in (*lead, merged)))
        scale = NamedArray(scales, (*lead, merged))
        return dataclasses.replace(self, weight=NamedArray(codes, axes), scale=scale, loaded_dtype=self.dtype)

    def prepare(self, backend: Backend, *, donate: bool = False, quantizes: bool = False) -> "Linear":
        """The same map, stored as `backend` reads it.

        Args:
            donate: the memory of this weight may be freed.
            quantizes: store what `quantized` gives.
        Raises: ValueError if the backend cannot read weights of this dtype.
        """
        if quantizes and (narrow := self.quantized(donate=donate)) is not self:
            return narrow.prepare(backend, donate=True)
        given = self
        if any(axis.name == EXPERT for axis in self.weight.axes[: -self.num_in - self.num_out]):
            given = self.with_filled_ins(backend.grouped_ins)
        elif self.num_in > 1 and backend.merges_ins:
            given = self.with_merged_ins()
        num_outs = math.prod(axis.size for axis in given.outs)
        of_one = given.weight.axes[len(self.weight.axes) - self.num_in - self.num_out :]
        sizes = num_outs, math.prod(axis.size for axis in of_one) // num_outs
        stored = given.stored_as(backend.store(given.weight.array, *sizes), backend)
        between = [] if given is self else [given.weight.array]
        _free([self.weight.array, *between], [stored.weight.array], donate)
        return stored

    def with_filled_ins(self, multiple: int) -> "Linear":
        """The same map with zeros behind the inputs of each device, up to a multiple of so many."""
        *lead, last = self.weight.axes
        parts = self.shard_axis.parts
        size = last.size // parts
        filled = -(-size // multiple) * multiple
        if filled == size:
            return self
        assert self.num_in == 1 and self.packed_axes is None and self.unpadded_in is None
        array = _fill_parts(self.weight.array, parts, filled)
        weight = NamedArray(array, (*lead, last.resize(filled * parts)))
        return dataclasses.replace(self, weight=weight, unpadded_in=size)

    def with_merged_ins(self) -> "Linear":
        """The same map with its input axes stored as one, which has the name of the first and is sharded as that."""
        axes, array = self.weight.axes, self.weight.array
        *lead, first = axes[: len(axes) - self.num_in + 1]
        rest = axes[len(axes) - self.num_in + 1 :]
        merged = first.resize(first.size * math.prod(axis.size for axis in rest))
        shape = tuple(axis.size for axis in (*lead, merged))
        weight = NamedArray(_reshaped(array, shape), (*lead, merged))
        return dataclasses.replace(self, weight=weight, merged_ins=rest)

    def stored_as(self, array: Array, backend: Backend) -> "Linear":
        """The same map with the weight that `backend` has stored."""
        loaded = None if array.dtype == self.dtype else self.dtype
        if array.shape == self.weight.array.shape:
            weight = NamedArray(array, self.weight.axes)
            return dataclasses.replace(self, weight=weight, loaded_dtype=loaded, backend=backend)
        lead = self.weight.axes[: -self.num_in - self.num_out]
        axes = (*lead, Axis(PANEL, array.shape[-2]), Axis(PANEL_SIZE, array.shape[-1]))
        array = array.reshape([axis.size for axis in axes])  # a backend cannot tell a lead axis of one from others
        packed = (*self.outs, *self.ins)
        return dataclasses.replace(
            self, weight=NamedArray(array, axes), loaded_dtype=loaded, backend=backend, packed_axes=packed
        )

    def take_rows(self, indices: Array, dtype) -> Array:
        """Rows of the matrix, [..., in] of `dtype`; zeros for an index out of range. Requires: not one of a stack."""
        num_ins = math.prod(axis.size for axis in self.ins)
        if self.scale is None:
            return self.backend.take_rows(self.weight.array, indices, num_ins, dtype)
        codes = self.backend.take_rows(self.weight.array, indices, num_ins, jnp.float32)
        scales = self.scale.array.at[indices].get(mode="fill", fill_value=0)
        return (codes * scales[..., None]).astype(dtype)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Args: x: [..., in...], the input axes last and in the order of the weight's."""
        return apply(x, self)[0]

    def by_rows(self, compute: Callable[..., Rows], *rows: NamedArray) -> Rows:
        """`compute(*rows)`, as `by_rows` of this map's backend, for the rows that count here."""
        return by_rows(self.backend, self.num_rows, compute, *rows)


def by_rows(backend: Backend, num_rows: Array | None, compute: Callable[..., Rows], *rows: NamedArray) -> Rows:
    """`compute(*rows)`, a named array or a tuple of them, by `Backend.by_rows`: everything that XLA computes of the
    tokens of a step, except for matmuls, goes through here.

    Args:
        rows: [row, ...] each, the row first; of the plain forward (`num_rows` None) any axes.
        compute: of one row as of all; its results have the axis of the first of `rows`.
    """
    first = rows[0].axes[0].name
    found: list[tuple[Axis, ...]] = []
    is_alone = True

    def on_arrays(*arrays: Array) -> list[Array]:
        nonlocal is_alone
        parts = zip(rows, arrays, strict=True)
        named = [NamedArray(a, (old.axes[0].resize(a.shape[0]), *old.axes[1:])) for old, a in parts]
        made = compute(*named)
        is_alone = isinstance(made, NamedArray)
        results = [made] if isinstance(made, NamedArray) else list(made)
        results = [each if each.axes[0].name == first else each.rearrange((first, ...)) for each in results]
        found[:] = [each.axes for each in results]
        return [each.array for each in results]

    arrays = backend.by_rows(on_arrays, num_rows, *(each.array for each in rows))
    named = [
        NamedArray(array, (axes[0].resize(array.shape[0]), *axes[1:]))
        for array, axes in zip(arrays, found, strict=True)
    ]
    return named[0] if is_alone else tuple(named)  # type: ignore[return-value]


def split_key(key: Array | None, num: int) -> Sequence[Array | None]:
    """`num` keys for the parts of a module; None stays None."""
    return [None] * num if key is None else list(jax.random.split(key, num))


def fold_key(key: Array | None, data: int) -> Array | None:
    """A key for another part of a module; None stays None."""
    return None if key is None else jax.random.fold_in(key, data)


def random_weight(key: Array | None, axes: Sequence[Axis], scale: float, dtype) -> NamedArray:
    """Normal numbers of a standard deviation; zeros without a key."""
    if key is None:
        return hax.zeros(axes, dtype=dtype)
    numbers = hax.random.normal(key, axes, dtype=jnp.float32)  # type: ignore[arg-type]  # haliax infers type[float]
    return (numbers * jnp.float32(scale)).astype(dtype)


def prepare_tables(
    embeddings: Linear, head: Linear | None, backend: Backend, *, donate: bool = False, quantizes: bool = False
) -> tuple[Linear, Linear | None]:
    """Embeddings and head, [vocab, embed] each, as `backend` reads them.

    Args:
        head: None: the embeddings are it.
        quantizes: store what `Linear.quantized` gives of the head; rows of quantized embeddings are those of its codes.
    """
    arrays = [table.weight.array for table in (embeddings, head) if table is not None]  # may be one
    if quantizes:
        embeddings, head = (embeddings.quantized(), None) if head is None else (embeddings, head.quantized())
    rows, logits = backend.store_tables(embeddings.weight.array, None if head is None else head.weight.array)
    _free(arrays, [rows] if logits is None else [rows, logits], donate)
    return embeddings.stored_as(rows, backend), None if logits is None else (head or embeddings).stored_as(
        logits, backend
    )


def prepare_rows(table: Linear, backend: Backend, *, donate: bool = False) -> Linear:
    """A table of which rows are taken and nothing else, as XLA takes them on the platform of `backend`."""
    xla = XlaBackend(backend.platform)
    array = xla.store(table.weight.array, *(math.prod(axis.size for axis in axes) for axes in (table.outs, table.ins)))
    _free([table.weight.array], [array], donate)
    return table.stored_as(array, xla)


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The prologue of a matmul, a norm or a gate of its input, and its epilogue, a residual. A kernel may compute them
    in the same call."""

    norm: RMSNorm | None = None
    """The input is norm(x)."""
    gate: NamedArray | None = None
    """The input is activation(gate) · x, as in SwiGLU."""
    residual: NamedArray | None = None
    """Added to the result."""
    activation: Activation | ClampedSwiglu = Activation.SILU
    """Activation of the gate."""

    def split(self, fused: Collection[Fuse]) -> tuple["Fusion", "Fusion"]:
        """The parts that a kernel that fuses these computes, and those that are left for XLA."""
        inside = {
            "norm": self.norm if Fuse.NORM in fused and self.norm is not None and self.norm.fusable else None,
            "gate": self.gate if Fuse.GATE in fused and self.activation.unfused is None else None,
            "residual": self.residual if Fuse.RESIDUAL in fused else None,
        }
        outside = {name: getattr(self, name) if part is None else None for name, part in inside.items()}
        return Fusion(**inside), Fusion(**outside, activation=self.activation)

    def before(self, x: NamedArray, rows: ByRows) -> NamedArray:
        """The input of the matmul, in the dtype of `x`. Args: rows: `by_rows` for those of `x`."""

        def gated(gate: NamedArray, x: NamedArray) -> NamedArray:
            wide = self.activation.gated(gate.array.astype(jnp.float32), x.array.astype(jnp.float32))
            return NamedArray(wide.astype(x.dtype), x.axes)

        if self.norm is not None:
            x = self.norm.by_rows(x, rows)
        if self.gate is not None:
            assert self.gate.axes == x.axes, f"gate has axes {self.gate.axes}, and its partner {x.axes}"
            x = rows(gated, self.gate, x)
        return x

    def after(self, y: NamedArray) -> NamedArray:
        """The result."""
        return y if self.residual is None else self.residual + y


def fuses_gated_pair(gate: Linear, up: Linear, activation: Activation | ClampedSwiglu) -> bool:
    """Whether `apply` of the two maps, with `is_gated_pair`, gates the results in the call."""
    plain = gate.bias is None and up.bias is None and gate.ring.parts == 1 and activation.unfused is None
    return plain and Fuse.GATED_PAIR in gate.backend.fuses


def fuses_swiglu(gate: Linear, up: Linear, down: Linear, activation: Activation | ClampedSwiglu) -> bool:
    """Whether `apply` of the three maps, with `is_gated_pair`, computes the whole block in the call."""
    alike = down.bias is None and down.backend == gate.backend and (down.scale is None) == (gate.scale is None)
    return fuses_gated_pair(gate, up, activation) and alike and Fuse.SWIGLU in gate.backend.fuses


def apply(x: NamedArray, *maps: Linear, dtype=None, is_gated_pair: bool = False, **fusion) -> list[NamedArray]:
    """Several maps, of one backend and of the same layer, of the same input, in one call of the backend.

    Args:
        dtype: of the results; None: that of `x`.
        is_gated_pair: whether the one result is that of the second map, gated by that of the first
            (`fuses_gated_pair`); of three maps that of the third one of this (`fuses_swiglu`).
        fusion: the fields of `Fusion`.
    """
    first, dtype = maps[0], x.dtype if dtype is None else dtype
    if first.ring.parts > 1:
        return _apply_on_ring(x, maps, dtype, Fusion(**fusion))
    inside, outside = Fusion(**fusion).split(first.backend.fuses)
    x = outside.before(x, first.by_rows)
    ins, rows = first.ins, x.axes[: -first.num_in]
    call = LinearCall(
        x=_matrix(x, rows, ins),
        weights=[part.weight.array for part in maps],
        num_outs=[math.prod(axis.size for axis in part.outs) for part in maps],
        scales=_scales(maps),
        layer=first.layer,
        num_rows=first.num_rows,
        norm=None if inside.norm is None else inside.norm.fusable,
        gate=None if inside.gate is None else _matrix(inside.gate, rows, ins),
        residual=None if inside.residual is None else _matrix(inside.residual, rows, maps[-1].outs),
        dtype=jnp.dtype(dtype if all(part.bias is None for part in maps) else jnp.float32),
        is_gated_pair=is_gated_pair,
    )
    results = []
    for part, y in zip(maps[-1:] if is_gated_pair else maps, first.backend.linear(call), strict=True):
        axes = (*rows, *part.outs)
        y = part.shard_axis.sum_in(x.dtype, y.reshape([axis.size for axis in axes]))
        results.append(outside.after(_biased(NamedArray(y, axes), part).astype(dtype)))
    return results


def _apply_on_ring(x: NamedArray, maps: Sequence[Linear], dtype, around: Fusion) -> list[NamedArray]:
    """`apply` of maps with a `ring`: into the inner axes of a layer, or back to the residual stream."""
    first = maps[0]
    rows, ring = x.axes[: -first.num_in], first.ring
    weights = [_of_layer(part) for part in maps]
    scales = [each if first.layer is None else each[first.layer] for each in _scales(maps)]
    if first.shard_axis.parts == 1:
        assert around.gate is None and around.residual is None, "only a map to the residual stream has these"
        num_outs = [math.prod(axis.size for axis in part.outs) for part in maps]
        norm = around.norm
        arrays = collective_matmul.gathered(
            x.array, weights, num_outs, _factors(norm), ring, first.backend, squares=norm and norm.squares
        )
        if scales:
            arrays = [array * scale[None] for array, scale in zip(arrays, scales, strict=True)]
        outs, bias = [part.outs for part in maps], [part.bias for part in maps]
    else:
        assert len(maps) == 1 and first.num_out == 1 and around.norm is None, "one map to the residual stream"
        matrix = _matrix(around.before(x, first.by_rows), rows, first.ins)
        arrays = [collective_matmul.scattered(matrix, weights[0], ring, first.backend, *scales)]
        own = first.outs[0].resize(first.outs[0].size // ring.parts)
        outs = [(own,)]
        bias = [None if first.bias is None else NamedArray(ring.own(first.bias.array, 0), (own,))]
    results = []
    for array, axes, added in zip(arrays, outs, bias, strict=True):
        y = NamedArray(array.reshape([axis.size for axis in (*rows, *axes)]), (*rows, *axes))
        y = y if added is None else y + added.astype(jnp.float32)
        results.append(around.after(y.astype(dtype)))
    return results


def _of_layer(part: Linear) -> Array:
    """The weight of its layer as a matrix, [out, in].

    The stack is one of matrices before the layer is picked: with a change of shape between the layer's slice and that
    of its inputs, XLA copies the layer before the matmul that reads it, instead of reading it in the matmul.
    """
    array, num_outs = part.weight.array, math.prod(axis.size for axis in part.outs)
    if part.layer is None:
        return array.reshape(num_outs, -1)
    matrices = array.reshape(array.shape[0], num_outs, -1)
    return jax.lax.dynamic_index_in_dim(matrices, part.layer, keepdims=False)


def _factors(norm: RMSNorm | None) -> tuple[Array, float] | None:
    """The factors f32[in] of a norm without a mean and a bias, and its epsilon."""
    if norm is None:
        return None
    weight = norm.picked().weight
    assert weight is not None and not norm.config.center and norm.bias is None, f"{norm.config} on a ring"
    factors = weight.array.astype(jnp.float32)
    return factors + jnp.float32(1) if norm.config.plus_one else factors, norm.config.eps


def apply_grouped(
    x: NamedArray, *maps: Linear, axis: Axis, counts: Array, rows: Array | None = None, dtype=None, **fusion
) -> list[NamedArray]:
    """As `apply`, for maps whose weights have an axis of groups before the outputs, and rows of x of one group each.

    Args:
        x: [n, in...]
        axis: of the results.
        counts: i32[group], results of each group: the first `counts[0]` are of group 0. Results beyond all are zeros.
        rows: i32[result], the row of x of each result; None: all rows in their order.
    Returns: [axis, out...] each; where the inputs are sharded, the share of this device.
    """
    first, dtype = maps[0], x.dtype if dtype is None else dtype
    inside, outside = Fusion(**fusion).split(first.backend.fuses)
    assert inside.residual is None and outside.residual is None, "results of several groups belong to one row"
    num_rows = jnp.sum(counts) if rows is None and first.num_rows is not None else first.num_rows
    x = outside.before(x, functools.partial(by_rows, first.backend, num_rows))
    ins, before = first.ins, x.axes[: -first.num_in]
    unfilled = 0 if first.unpadded_in is None else first.weight.axes[-1].size - first.unpadded_in
    call = GroupedCall(
        x=jnp.pad(_matrix(x, before, ins), ((0, 0), (0, unfilled))),
        counts=counts,
        weights=[part.weight.array for part in maps],
        num_outs=[math.prod(each.size for each in part.outs) for part in maps],
        scales=_scales(maps),
        rows=rows,
        layer=first.layer,
        norm=None if inside.norm is None else inside.norm.fusable,
        gate=None if inside.gate is None else _matrix(inside.gate, before, ins),
    )
    results = []
    for part, y in zip(maps, first.backend.grouped_linear(call), strict=True):
        axes = (axis, *part.outs)
        y = y.reshape([each.size for each in axes])
        if part.bias is not None:
            y = y + part.bias.array.at[call.groups_of_results()].get(mode="fill", fill_value=0).astype(jnp.float32)
        results.append(NamedArray(y, axes).astype(dtype))
    return results


def _matrix(x: NamedArray, rows: tuple[Axis, ...], last: tuple[Axis, ...]) -> Array:
    """[rows, last]. The axes have to be those, in this order."""
    assert x.axes == (*rows, *last), f"axes {x.axes} are not {(*rows, *last)}, as the weight's say"
    return x.array.reshape(-1, math.prod(axis.size for axis in last))


def _scales(maps: Sequence[Linear]) -> list[Array]:
    """The scales of all maps, [..., out] each, or none."""
    scales = [part.scale.array for part in maps if part.scale is not None]
    assert len(scales) in (0, len(maps)), "maps of one call are quantized together"
    return scales


def _biased(y: NamedArray, part: Linear) -> NamedArray:
    return y if part.bias is None else y + part.bias.astype(jnp.float32)


def _fill_parts(array: Array, parts: int, size: int) -> Array:
    """Fill each of the equal parts of the last axis with zeros up to `size`. A sharded array stays sharded so."""

    def fill(array) -> Any:
        xp = np if isinstance(array, np.ndarray) else jnp
        split = array.reshape(*array.shape[:-1], parts, -1)
        behind = [(0, 0)] * array.ndim + [(0, size - split.shape[-1])]
        return xp.pad(split, behind).reshape(*array.shape[:-1], parts * size)

    is_placed = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return jax.device_put(fill(array), array.sharding) if is_placed else fill(array)


def _reshaped(array: Array, shape: tuple[int, ...]) -> Array:
    """The array with its last axes merged; a sharded one stays sharded over the first of them."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return array.reshape(shape)
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: len(shape)]))
    return jax.device_put(array.reshape(shape), sharding)


def _free(old: Sequence[Array], new: Sequence[Array], donate: bool) -> None:
    """Free the memory of `old` arrays from which `new` ones were made, but not of those that are among them."""
    gone = [array for array in old if donate and not isinstance(array, Tracer) and all(array is not n for n in new)]
    if gone:
        jax.block_until_ready(list(new))
    for array in gone:
        array.delete()
