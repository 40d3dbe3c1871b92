"""Tensors of a checkpoint and the parameters of a model that they hold: a table of lines, read and written alike.

HF's tensors are matrices [out, in] or vectors; the stored axes of a parameter merge to these. A line says where in a
tensor its parameters stand, so that one description reads them and, inverted, writes them back.
"""

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import numpy as np
from haliax import Axis, NamedArray

from levanter_infer.axes import EXPERT, LAYERS
from levanter_infer.layers.attention import AttentionBlock
from levanter_infer.layers.causal_conv import CausalConv
from levanter_infer.layers.delta_net import DeltaNetBlock
from levanter_infer.layers.latent_attention import LatentAttentionBlock
from levanter_infer.layers.linear import Linear
from levanter_infer.layers.norm import RMSNorm
from levanter_infer.models.blocks import Stack
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.decoder import DecoderModel

_STACK = "layers."


class Order(enum.Enum):
    """The order of the rows of several parameters in one tensor."""

    ONE_BY_ONE = "all rows of the first, then those of the next"
    """Phi-3's `qkv_proj`."""
    ALTERNATING = "the first row of each, then the second of each"
    """The columns of gpt-oss' `gate_up_proj`."""
    BY_KV_HEAD = "for each head of keys and values, its rows of each"
    """GPT-NeoX's `query_key_value`."""
    BY_HEAD = "for each query head, its rows of each"
    """Qwen3-Next's `q_proj`, DeepSeek's `kv_b_proj`."""
    BY_KEY_HEAD = "for each head of keys of gated DeltaNet, its rows of each"
    """Qwen3-Next's `in_proj_qkvz`."""


@dataclass(frozen=True)
class Tensor:
    """A line of a family's table: a tensor and the parameters that it holds."""

    name: str
    """HF's name, with `{layer}` for one per layer and `{expert}` for one per expert. `{mixer}` and `{feed_forward}`
    stand for a layer by the number of that part of it (`DecoderConfig.part_numbers`)."""
    parameters: tuple[str, ...]
    """Attribute paths in `DecoderModel`, where `layers.` stands for the stack of a layer."""
    order: Order = Order.ONE_BY_ONE
    transposed: bool = False
    """Whether the tensor is stored [in, out]."""
    stacked_experts: bool = False
    """Whether the experts of a layer are in one tensor, along its first axis."""
    unit_axes: tuple[int, int] = (0, 0)
    """Axes of size one that the tensor has before and after those of its parameters."""
    scalar: bool = False
    """Whether the tensor is a number without axes; it is also read with one axis of size one, as Levanter writes it."""

    @property
    def of_experts(self) -> bool:
        """Whether the parameters are of experts; dense layers have lines of their own for the same paths."""
        return self.stacked_experts or "{expert}" in self.name

    def is_for(self, name: str) -> bool:
        """Whether the tensor `name` of a checkpoint is one of this line."""
        pattern = re.sub(r"\\{(layer|mixer|feed_forward|expert)\\}", r"\\d+", re.escape(self.name))
        return re.fullmatch(pattern, name) is not None


@dataclass(frozen=True)
class Slice:
    """The part of the tensor of one layer or expert, seen as [out, ...], that a parameter is."""

    rows: tuple[int, ...]
    """Rows of all parameters of the tensor."""
    part: int
    """Index of this parameter among them."""
    groups: int
    """Rows alternate between the parameters this often."""
    columns: tuple[int, ...]
    """The inputs of a matrix; empty for a vector; of a convolution its taps, as a rule behind an axis of size one."""
    transposed: bool

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        shape = (sum(self.rows), *self.columns)
        return shape[::-1] if self.transposed else shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter, in one layer or expert."""
        return (self.rows[self.part], *self.columns)

    @property
    def row_range(self) -> tuple[int, int] | None:
        """First row of the tensor and one past the last, where the parameter is these rows as they are stored."""
        if self.transposed and self.columns or self.groups > 1 and len(self.rows) > 1:
            return None
        start = sum(self.rows[: self.part])
        return start, start + self.rows[self.part]

    def read(self, tensor: np.ndarray) -> np.ndarray:
        """The parameter of a tensor: a view, or a copy where rows alternate."""
        grouped = self._grouped(tensor)
        start = sum(self.rows[: self.part]) // self.groups
        return grouped[:, start : start + self.rows[self.part] // self.groups].reshape(self.shape)

    def write(self, tensor: np.ndarray, values: np.ndarray) -> None:
        """Write the parameter into a contiguous tensor."""
        start, count = sum(self.rows[: self.part]) // self.groups, self.rows[self.part] // self.groups
        target = tensor.T if self.transposed else tensor
        for group, part in enumerate(values.reshape(self.groups, count, *self.columns)):
            first = group * (sum(self.rows) // self.groups) + start
            target[first : first + count] = part

    def _grouped(self, tensor: np.ndarray) -> np.ndarray:
        """[groups, rows of a group, ...]"""
        rows = tensor.T if self.transposed else tensor
        return rows.reshape(self.groups, -1, *self.columns)


@dataclass(frozen=True)
class Source:
    """The tensor of one layer or expert."""

    name: str
    expert: int | None = None
    """Index along the tensor's first axis, where that is experts; None: all of the tensor is meant."""


@dataclass(frozen=True)
class Parameter:
    """One array of a model, and where a checkpoint has it."""

    path: str
    """Attributes from the model, joined by dots."""
    line: str
    """The path that the family's table has for it."""
    axes: tuple[Axis, ...]
    """Axes in the model, `layers` first where it is stacked."""
    num_stacked: int
    """Leading axes over which it is stacked."""
    sources: tuple[Source, ...]
    """One per entry of the leading axes."""
    slice: Slice
    """The part of each source that it is."""
    num_experts: int | None = None
    """First size of the tensors, where they hold all experts of a layer."""
    unit_axes: tuple[int, int] = (0, 0)
    """`Tensor.unit_axes`."""
    scalar: bool = False
    """Whether the tensors are numbers without axes, seen as [1]."""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the tensors."""
        before, after = self.unit_axes
        lead = (1,) * before if self.num_experts is None else (self.num_experts,)
        return () if self.scalar else (*lead, *self.slice.tensor_shape, *(1,) * after)

    def is_stored_as(self, shape: tuple[int, ...]) -> bool:
        """Whether tensors of this shape can be read."""
        return shape == self.tensor_shape or (self.scalar and shape == (1,))

    def turned(self) -> "Parameter":
        """The parameter of tensors that have its matrices the other way round."""
        return replace(self, slice=replace(self.slice, transposed=not self.slice.transposed))

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors, each once."""
        return tuple(dict.fromkeys(source.name for source in self.sources))


def tensor_table(names: Mapping[str, str], *others: Tensor) -> tuple[Tensor, ...]:
    """The lines of `names` (attribute path -> HF's name of a tensor of its own), and of others in their stead."""
    return replaced([Tensor(name, (path,)) for path, name in names.items()], *others)


def replaced(table: Sequence[Tensor], *others: Tensor) -> tuple[Tensor, ...]:
    """`table` with others instead of its lines that hold any of their parameters, of experts or of dense layers."""
    taken = {(path, tensor.of_experts) for tensor in others for path in tensor.parameters}
    kept = (line for line in table if not any((path, line.of_experts) in taken for path in line.parameters))
    return (*kept, *others)


def parameters(model: DecoderModel, table: Sequence[Tensor]) -> list[Parameter]:
    """Every parameter that `model` (or its shapes) has, in the order of the table."""
    return [parameter for parts in fused_parameters(model, table) for parameter in parts]


def fused_parameters(model: DecoderModel, table: Sequence[Tensor]) -> list[tuple[Parameter, ...]]:
    """As `parameters`, those of the same tensors together."""
    config = model.config
    lines = []
    for tensor in table:
        if not tensor.parameters[0].startswith(_STACK):
            lines.append(_parts(model, tensor, tensor.parameters, None))
            continue
        for number, stack in enumerate(config.stacks):
            paths = tuple(f"stacks.{number}.{path.removeprefix(_STACK)}" for path in tensor.parameters)
            lines.append(_parts(model, tensor, paths, stack))
    return [parts for parts in lines if parts]


def _parts(model: DecoderModel, tensor: Tensor, paths: Sequence[str], stack: Stack | None) -> tuple[Parameter, ...]:
    """The parameters of a line in one stack; none where the stack does not have them."""
    found = [_resolve(model, path) for path in paths]
    arrays = [array for _, array in found if array is not None]
    if not arrays:
        return ()
    assert len(arrays) == len(paths), f"the model has a part of {paths}"
    lead, columns = _split(*found[0])
    experts = next((axis.size for axis in lead if axis.name == EXPERT), None)
    if (experts is not None) != tensor.of_experts:
        return ()  # a line for dense feed-forward blocks, and one of experts, or the other way round
    rows = tuple(math.prod(axis.size for axis in array.axes[len(lead) :]) // math.prod(columns) for array in arrays)
    groups = _groups(tensor.order, rows, stack)
    assert not any(count % groups for count in rows), f"rows {rows} in {groups} groups"
    sources = tuple(_sources(tensor, model.config, stack and stack.layers, experts))
    return tuple(
        Parameter(
            path=path,
            line=line,
            axes=array.axes,
            num_stacked=len(lead),
            sources=sources,
            slice=Slice(rows, part, groups, columns, tensor.transposed),
            num_experts=experts if tensor.stacked_experts else None,
            unit_axes=tensor.unit_axes,
            scalar=tensor.scalar,
        )
        for part, (path, line, array) in enumerate(zip(paths, tensor.parameters, arrays, strict=True))
    )


def _groups(order: Order, rows: tuple[int, ...], stack: Stack | None) -> int:
    """The number of times that rows alternate between the parameters of a tensor."""
    mixer = stack and stack.block.mixer
    match order:
        case Order.ALTERNATING:
            return rows[0]
        case Order.BY_KV_HEAD if isinstance(mixer, AttentionBlock | LatentAttentionBlock):
            return mixer.num_kv_heads
        case Order.BY_HEAD if isinstance(mixer, AttentionBlock | LatentAttentionBlock):
            return mixer.num_heads
        case Order.BY_KEY_HEAD if isinstance(mixer, DeltaNetBlock):
            return mixer.num_key_heads
    assert order is Order.ONE_BY_ONE, f"{mixer} has no rows {order.value!r}"
    return 1


def _split(owner: Any, array: NamedArray) -> tuple[tuple[Axis, ...], tuple[int, ...]]:
    """Axes of layers and experts; and the inputs of a matrix, nothing for a vector."""
    if isinstance(owner, RMSNorm) and owner.over is not None:
        lead = tuple(axis for axis in array.axes[:1] if axis.name == LAYERS)
        return lead, tuple(axis.size for axis in owner.normed(array.axes))
    if isinstance(owner, CausalConv) and array is owner.weight:
        return array.axes[:1], (owner.num_taps,) if owner.latest_first else (1, owner.num_taps)
    if not isinstance(owner, Linear):
        return tuple(axis for axis in array.axes[:1] if axis.name == LAYERS), ()
    if array is owner.bias:
        return array.axes[: -owner.num_out], ()
    ins = math.prod(axis.size for axis in owner.ins)
    return array.axes[: -owner.num_in - owner.num_out], (ins,)


def _sources(tensor: Tensor, config: DecoderConfig, layers: Sequence[int] | None, experts: int | None):
    for layer in [None] if layers is None else layers:
        mixer, feed_forward = (None, None) if layer is None else config.part_numbers[layer]
        for expert in [None] if experts is None else range(experts):
            name = tensor.name.format(layer=layer, mixer=mixer, feed_forward=feed_forward, expert=expert)
            yield Source(name, expert if tensor.stacked_experts else None)


def set_parameter(model: DecoderModel, path: str, array: NamedArray) -> DecoderModel:
    """`model` with the parameter at the dotted `path` replaced."""
    return eqx.tree_at(lambda tree: get_parameter(tree, path), model, array)


def quantize_parameter(model: DecoderModel, path: str) -> DecoderModel:
    """`model` with the map of layers, or the head, quantized whose weight is at `path`, if it is one; its own weight is
    freed."""
    part, _ = _resolve(model, path)
    is_weight = path.endswith(".weight") and isinstance(part, Linear)
    if not is_weight or not (path.startswith(("layers.", "stacks.")) or part is model.head):
        return model
    return eqx.tree_at(lambda tree: _resolve(tree, path)[0], model, part.quantized(donate=True))


def get_parameter(model: DecoderModel, path: str) -> NamedArray:
    return _resolve(model, path)[1]


def _resolve(model: DecoderModel, path: str) -> tuple[Any, Any]:
    """Owner and array at a path; (None, None) below a module that the model does not have."""
    owner: Any = None
    array: Any = model
    for name in path.split("."):
        if array is None:
            return None, None
        if name.isdigit():
            owner, array = array, array[int(name)] if int(name) < len(array) else None
        else:
            owner, array = array, getattr(array, name, None)
    return owner, array
