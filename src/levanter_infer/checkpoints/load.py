"""Load an HF checkpoint: check all tensors against the headers, then read one at a time into stacked arrays."""

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from levanter_infer.axes import EXPERT
from levanter_infer.checkpoints.adapter import EXPERT_PARAMETERS, ExpertPlace, Place, adapted
from levanter_infer.checkpoints.levanter import is_levanter, levanter_tensors
from levanter_infer.checkpoints.quantized.config import KEYS, without_quantization
from levanter_infer.checkpoints.source import ADAPTER_CONFIG, CONFIG, MODELOPT_CONFIG, Source, resolve_source
from levanter_infer.checkpoints.weights import DTYPES, StoredTensor, enumerate_names, read_tensors, stored_tensors
from levanter_infer.kernels.cpu import huge_pages
from levanter_infer.kernels.xla.backend import XLA
from levanter_infer.layers.layout import Layout
from levanter_infer.models.config import DecoderConfig
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.family import Family
from levanter_infer.models.hf_config import ties_differ
from levanter_infer.models.registry import family_for
from levanter_infer.models.tensors import (
    Parameter,
    get_parameter,
    parameters,
    quantize_parameter,
    set_parameter,
)
from levanter_infer.models.tensors import Source as TensorSource
from levanter_infer.runtime.compile_cache import enable_compile_cache
from levanter_infer.runtime.memory import check_host_memory
from levanter_infer.runtime.progress import stage

if TYPE_CHECKING:
    from levanter_infer.checkpoints.tokenizer import Tokenizer

_Bounds = tuple[tuple[int, int], ...]
"""First index and one past the last, along each axis."""


def load_model(
    path_or_id: str | Path,
    *,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    config: Mapping[str, Any] | None = None,
    adapter: str | Path | None = None,
) -> tuple[DecoderModel, "Tokenizer | None"]:
    """Load the model and the tokenizer of a checkpoint.

    Args:
        path_or_id: a directory in HF's layout, a URL of one that fsspec reads (gs://, s3://), or a hub id; or one step
            of a run of Levanter's trainer (docs/loading.md).
        dtype: bfloat16 or float32, by name or as JAX has it; None keeps the stored one.
        revision: branch, tag or commit of the hub repository.
        config: contents of a config.json, instead of the checkpoint's own; Levanter's trainer writes none.
        adapter: a LoRA adapter as PEFT saves it, in a directory, at a URL or on the hub, that is merged into the
            weights.
    Returns: the model, and the tokenizer or None if there is no tokenizer.json.
    Raises: ValueError saying which file, key or tensor is wrong and what to do, before weights are allocated.
    """
    enable_compile_cache()
    source = resolve_source(path_or_id, revision, adapter=adapter)
    model = load_weights(source, dtype=_float_dtype(dtype), config=config)
    return model, load_tokenizer(source)


def load_tokenizer(source: Source) -> "Tokenizer | None":
    if not source.has("tokenizer.json"):
        return None
    from levanter_infer.checkpoints.tokenizer import Tokenizer

    return Tokenizer.from_source(source)


class ReadWeights(Protocol):
    """Reads the weights of a model. Beside it, the memory of the host holds one stacked parameter at a time; with
    several hosts, the part of it for its own devices."""

    def __call__(self, layout: Layout | None = None, quantizes: bool = False) -> DecoderModel:
        """
        Args:
            layout: shards the weights over a mesh.
            quantizes: quantize the weights of layers and of the head, each when it has been read.
        """
        ...


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """A checked model whose weights are not read yet, so that programs can be compiled meanwhile."""

    types: DecoderModel
    """The model with a `jax.ShapeDtypeStruct` for every array."""
    read: ReadWeights


def load_weights(
    source: Source, *, dtype: DTypeLike | None = None, config: Mapping[str, Any] | None = None, quantizes: bool = False
) -> DecoderModel:
    """The model of a checkpoint. Args: quantizes: as in `StoredModel.read`. Raises: ValueError as `load_model`."""
    stored = open_model(source, dtype=dtype, config=config)
    _check_memory(jax.eval_shape(lambda model: model.prepare(XLA, quantizes=quantizes), stored.types), source)
    with stage("reading weights"):
        return stored.read(quantizes=quantizes)


def _check_memory(types: DecoderModel, source: Source) -> None:
    """Refuse weights that this machine cannot hold, where they stay in its memory. Raises: ValueError"""
    if jax.default_backend() == "cpu":
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(types))
        narrower = 'give dtype="bfloat16", or ' if types.dtype == jnp.float32 else ""
        check_host_memory(
            f"{source.name}: the model", {"weights": needed}, f"{narrower}take a machine with more memory"
        )


def open_model(
    source: Source, *, dtype: DTypeLike | None = None, config: Mapping[str, Any] | None = None
) -> StoredModel:
    """Check a checkpoint against its headers.

    Args: as in `load_model`; `dtype` may be that of a model, whatever it is.
    Raises: ValueError as `load_model`.
    """
    wanted = dtype if isinstance(dtype, np.dtype) else _float_dtype(dtype)
    return _open(source, wanted, config or _config_json(source))


def _config_json(source: Source) -> dict[str, Any]:
    if is_levanter(source) and not source.has(CONFIG):
        raise ValueError(
            f"{source.name} is a checkpoint of Levanter's trainer, which has no {CONFIG}: put that of the model beside "
            "it (Levanter's config.to_hf_config(vocab_size).save_pretrained(directory) writes one), or give its "
            "contents as config="
        )
    if source.has(ADAPTER_CONFIG) and not source.has(CONFIG):
        base = source.read_json(ADAPTER_CONFIG).get("base_model_name_or_path")
        raise ValueError(
            f"{source.name} is an adapter and no model; give its base as the model ({ADAPTER_CONFIG} names "
            f"{reprlib.repr(base)}), and this as adapter="
        )
    found = source.read_json(CONFIG)
    if source.has(MODELOPT_CONFIG) and not any(found.get(key) for key in KEYS):  # ModelOpt's older files
        said = source.read_json(MODELOPT_CONFIG).get("quantization")
        if isinstance(said, dict):
            found[KEYS[0]] = {"quant_method": "modelopt", **said}
    return found


def _open(source: Source, wanted: np.dtype | None, hf_config: Mapping[str, Any]) -> StoredModel:
    family = family_for(hf_config)
    hf_config, quantization = without_quantization(hf_config)
    config = family.config_from_hf(hf_config)
    if is_levanter(source):
        params = parameters(DecoderModel.types(config), family.tensors)
        tensors = levanter_tensors(source, family, params)
    else:
        stored_names = stored_tensors(source)
        if quantization is not None:
            own = set(family.own_names(stored_names, hf_config).values())
            stored_names = quantization.dequantized({name: stored_names[name] for name in stored_names if name in own})
        tensors = {name: stored_names[stored] for name, stored in family.own_names(stored_names, hf_config).items()}
        if ties_differ(hf_config) and family.tensor_of("lm_head.weight") not in tensors:
            config = dataclasses.replace(config, tie_word_embeddings=True)
        _check_size(config, tensors, source)
        params = _oriented(parameters(DecoderModel.types(config), family.table_for(tensors)), tensors)
        if quantization is not None:
            tensors = quantization.without_zero_biases(tensors, {name for param in params for name in param.names})
    head = family.tensor_of("lm_head.weight") if config.tie_word_embeddings else None
    embeddings, base = family.tensor_of("embeddings.weight"), tensors
    if source.adapter is not None:
        transposed = {name for param in params for name in param.names if param.slice.transposed}
        tied = (head, embeddings) if head is not None and embeddings is not None else None
        experts = _expert_places(family, config, params)
        place = Place(lambda names: family.own_names(names, hf_config), transposed, tied, experts)
        tensors = adapted(tensors, source.adapter, place)
    _check_names(params, tensors, head, source)
    _check_headers(params, tensors)
    if head is not None and head in base and embeddings is not None:  # those of an adapter are checked there
        _check_tied(base[head], base[embeddings])  # here, so that `swap_weights` still has its old weights
    types = DecoderModel.types(config, _one_dtype(config, params, tensors, wanted))

    def read(layout: Layout | None = None, quantizes: bool = False) -> DecoderModel:
        model = types
        for param in params:
            dtype = np.dtype(get_parameter(types, param.path).dtype)
            model = set_parameter(model, param.path, _read(param, tensors, dtype, layout))
            model = quantize_parameter(model, param.path) if quantizes else model
        return model if layout is None else model.shard_as(layout)

    return StoredModel(types, read)


def _oriented(params: list[Parameter], tensors: Mapping[str, StoredTensor]) -> list[Parameter]:
    """The parameters, with the matrices of stacked experts the other way round if only so the tensors can hold them:
    releases of transformers differ in what they write."""
    stacked = [param for param in params if param.num_experts is not None and param.names[0] in tensors]
    turned = {param.path: param.turned() for param in stacked}
    if all(param.is_stored_as(tensors[param.names[0]].shape) for param in stacked):
        return params
    if not all(param.is_stored_as(tensors[param.names[0]].shape) for param in turned.values()):
        return params  # `_check_headers` says which tensor does not fit
    return [turned.get(param.path, param) for param in params]


def _expert_places(
    family: Family, config: DecoderConfig, params: Sequence[Parameter]
) -> dict[tuple[int, str], tuple[ExpertPlace, ...]]:
    """Where a checkpoint has what transformers has as `EXPERT_PARAMETERS`: rows of gates, and those of `up` behind."""
    found: dict[tuple[int, str], dict[tuple[str, int | None], ExpertPlace]] = {}
    for param in params:
        kind = param.line.removeprefix("layers.mlp.").removesuffix("_proj.weight")
        if kind not in ("gate", "up", "down") or param.axes[1].name != EXPERT:
            continue
        layers, count = config.stacks[int(param.path.split(".")[1])].layers, param.axes[1].size
        width = param.slice.rows[param.slice.part]
        own = {"gate": (0, width), "up": (width, 2 * width)}.get(kind) if len(param.slice.rows) == 1 else None
        if own is not None and family.experts_in_out:
            continue  # columns of A, and not rows of B
        is_transposed = param.slice.transposed != family.experts_in_out
        name = EXPERT_PARAMETERS[kind == "down"]
        for index, source in enumerate(param.sources):
            expert = None if source.expert is not None else index % count
            each = ExpertPlace(source.name, count, is_transposed, expert, own)
            found.setdefault((layers[index // count], name), {})[source.name, expert] = each
    return {key: tuple(each.values()) for key, each in found.items()}


def _float_dtype(dtype: Any) -> np.dtype | None:
    """The dtype that a caller asks for. Raises: ValueError unless it is bfloat16 or float32."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"dtype={reprlib.repr(dtype)}, expected bfloat16, float32, or none for the stored one")
    return found


def _check_size(config: DecoderConfig, tensors: dict[str, StoredTensor], source: Source) -> None:
    """Refuse a config.json of a larger model than the files can hold, before anything of its size is allocated."""
    # Of a dtype that is not supported, which `_check_headers` names, a number may take a byte
    is_known = all(tensor.dtype in DTYPES for tensor in tensors.values())
    smallest = min(dtype.itemsize for dtype in DTYPES.values()) if is_known else 1
    held = sum(tensor.num_bytes for tensor in tensors.values()) // smallest
    if config.num_parameters > held or config.num_layers > len(tensors):
        raise ValueError(
            f"{source.name}: config.json describes {config.num_layers} layers and {config.num_parameters} parameters, "
            f"but the files hold {len(tensors)} tensors with at most {held} parameters; config and weights do not "
            "belong together, or a shard is missing"
        )


def _check_names(params: list[Parameter], tensors: dict[str, StoredTensor], tied: str | None, source: Source) -> None:
    """Args: tied: the tensor of a head that is the embeddings, and may be there too; None: there is none."""
    expected = {name for param in params for name in param.names}
    missing = sorted(expected - set(tensors))
    unexpected = sorted(set(tensors) - expected - {tied})
    problems = []
    if missing:
        problems.append(f"missing tensors: {enumerate_names(missing)}")
    if unexpected:
        problems.append(f"tensors that config.json has no use for: {enumerate_names(unexpected)}")
    if problems:
        raise ValueError(
            f"{source.name}: {'; '.join(problems)}; config.json and the weights do not belong together (keys to look "
            "at: num_hidden_layers, tie_word_embeddings, attention_bias, mlp_bias, model_type)"
        )


def _check_headers(params: list[Parameter], tensors: dict[str, StoredTensor]) -> None:
    for param in params:
        for name in param.names:
            tensor = tensors[name]
            if not param.is_stored_as(tensor.shape):
                raise ValueError(
                    f"{tensor.path}: tensor {name!r} has shape {list(tensor.shape)}, config.json expects "
                    f"{list(param.tensor_shape)}; they do not belong together"
                )
            if tensor.dtype not in DTYPES:
                raise ValueError(
                    f"{tensor.path}: tensor {name!r} is stored as {tensor.dtype}, expected one of {', '.join(DTYPES)}; "
                    "quantized weights need the quantization_config of config.json, which says what they mean"
                )


def _one_dtype(
    config: DecoderConfig, params: list[Parameter], tensors: dict[str, StoredTensor], wanted: np.dtype | None
) -> np.dtype:
    """The dtype of all parameters but those that are float32 in every model."""
    half = DecoderModel.types(config, jnp.bfloat16)
    params = [param for param in params if get_parameter(half, param.path).dtype != jnp.float32]
    names = sorted({tensors[name].dtype for param in params for name in param.names})
    if wanted is None and len(names) > 1:
        raise ValueError(f"tensors are stored as {' and '.join(names)}; give dtype=bfloat16 or dtype=float32")
    return DTYPES[names[0]] if wanted is None else wanted


def _read(param: Parameter, tensors: dict[str, StoredTensor], dtype: np.dtype, layout: Layout | None) -> hax.NamedArray:
    if layout is not None and layout.mesh.size > 1:
        return _read_sharded(param, tensors, dtype, layout)
    # An engine lays out arrays of its own, and on a CPU these may share their memory with NumPy. Without a layout the
    # model may be donated to a training step, which cannot reuse shared memory: `device_put` copies other arrays.
    empty = np.empty if layout is None else huge_pages.empty
    stacked = empty((len(param.sources), *param.slice.shape), dtype)
    _read_entries(param, tensors, list(zip(param.sources, stacked, strict=True)))
    return hax.NamedArray(jax.device_put(stacked.reshape([axis.size for axis in param.axes])), param.axes)


def _read_entries(
    param: Parameter,
    tensors: dict[str, StoredTensor],
    entries: Sequence[tuple[TensorSource, np.ndarray]],
    rows: tuple[int, int] | None = None,
) -> None:
    """Read the parameter of some layers or experts into arrays of its shape.

    Args: rows: those of each array that are needed; None: all. No others are read, where a tensor has them together.
    """
    pieces = []
    start, stop = (0, param.slice.shape[0]) if rows is None else rows
    for source, out in entries:
        tensor = tensors[source.name]
        tensor = tensor if source.expert is None else tensor.entry(source.expert)
        if tensor.shape != param.slice.tensor_shape:  # without its axes of size one
            tensor = dataclasses.replace(tensor, shape=param.slice.tensor_shape)
        if param.slice.row_range is not None:
            first, _ = param.slice.row_range
            pieces.append((tensor.rows(first + start, first + stop), out[start:stop]))
        else:
            full = np.empty(tensor.shape, out.dtype)
            tensor.read_into(full)
            out[...] = param.slice.read(full)
    read_tensors(pieces)


def _read_sharded(
    param: Parameter, tensors: dict[str, StoredTensor], dtype: np.dtype, layout: Layout
) -> hax.NamedArray:
    """A sharded parameter, read one tensor at a time. Host memory holds one whole tensor and the slices of this
    process's devices; tensors and rows that these devices do not need are not read."""
    lead, own = param.axes[: param.num_stacked], param.axes[param.num_stacked :]
    types = hax.NamedArray(jax.ShapeDtypeStruct([axis.size for axis in own], dtype), own)  # type: ignore[arg-type]
    axes = (*lead, *jax.eval_shape(layout.fitted, types).axes)
    buffers = _HostBuffers(layout.sharding(axes), tuple(axis.size for axis in axes), dtype)
    values = np.zeros(param.slice.shape, dtype)
    for index, source in zip(np.ndindex(*(axis.size for axis in lead)), param.sources, strict=True):
        if buffers.needs(index):
            _read_entries(param, tensors, [(source, values)], _own_rows(param, layout, buffers.extent(index)))
            padded = layout.fitted(hax.NamedArray(values.reshape([axis.size for axis in own]), own))  # type: ignore[arg-type]
            buffers.write(index, np.asarray(padded.array))
    return hax.NamedArray(buffers.to_devices(), axes)


def _own_rows(param: Parameter, layout: Layout, extent: tuple[int, int]) -> tuple[int, int]:
    """The rows of a parameter from which the entries `extent` of its first axis on the mesh are made."""
    axis = param.axes[param.num_stacked]
    start, stop = layout.stored_range(axis, *extent)
    size = param.slice.shape[0] // axis.size
    return start * size, stop * size


class _HostBuffers:
    """Host copies of the slices of a sharded array that the devices of this process hold.

    Devices with equal slices share one buffer, so each tensor is read once.

    Args:
        sharding, shape, dtype: of the array, which no host needs to hold whole.
    """

    def __init__(self, sharding: NamedSharding, shape: tuple[int, ...], dtype: np.dtype):
        self._sharding, self._shape = sharding, shape
        slices = sharding.addressable_devices_indices_map(shape).values()
        distinct = {_bounds(index, shape) for index in slices}
        self._buffers = {bounds: np.empty([stop - start for start, stop in bounds], dtype) for bounds in distinct}

    def needs(self, index: tuple[int, ...]) -> bool:
        """Whether a device holds a part of the array at `index`, along the leading axes."""
        return any(_contains(bounds, index) for bounds in self._buffers)

    def extent(self, index: tuple[int, ...]) -> tuple[int, int]:
        """First entry and one past the last of the axis behind the leading ones that a device needs at `index`."""
        own = [bounds[len(index)] for bounds in self._buffers if _contains(bounds, index)]
        return min(start for start, _ in own), max(stop for _, stop in own)

    def write(self, index: tuple[int, ...], values: np.ndarray) -> None:
        """Write all values of the array at `index`."""
        for bounds, buffer in self._buffers.items():
            if _contains(bounds, index):
                own = tuple(i - start for i, (start, _) in zip(index, bounds, strict=False))
                buffer[own] = values[tuple(slice(*each) for each in bounds[len(index) :])]

    def to_devices(self) -> jax.Array:
        """The array on its devices. Requires: every needed index has been written."""
        buffers, shape = self._buffers, self._shape
        return jax.make_array_from_callback(shape, self._sharding, lambda index: buffers[_bounds(index, shape)])


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Bounds:
    """Bounds of an index of JAX; None is the whole array."""
    index = (slice(None),) * len(shape) if index is None else index
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _contains(bounds: _Bounds, index: tuple[int, ...]) -> bool:
    return all(start <= i < stop for i, (start, stop) in zip(index, bounds, strict=False))


def _check_tied(head: StoredTensor, embeddings: StoredTensor) -> None:
    same = head.shape == embeddings.shape and head.dtype == embeddings.dtype
    if same:
        copies = [np.empty(tensor.shape, DTYPES[tensor.dtype]) for tensor in (head, embeddings)]
        head.read_into(copies[0])
        embeddings.read_into(copies[1])
        same = bool((copies[0].view(np.uint8) == copies[1].view(np.uint8)).all())
    if not same:
        raise ValueError(
            f"{head.path}: {head.name!r} differs from {embeddings.name!r} although config.json says "
            "tie_word_embeddings=true; set it to false to use both"
        )
