"""Checkpoints that Levanter's trainer writes, seen as the HF tensors that they hold.

Levanter stores one array per parameter, of all layers, under the path of its field: in an OCDBT database of zarr
arrays, and in older releases in a directory of zarr arrays. It stores no configuration. The library `tensorstore`
reads both; it is imported here alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import numpy as np

from levanter_infer.axes import HEADS, KV_HEADS, Q_HEADS_PER_GROUP, VOCAB
from levanter_infer.checkpoints.remote import IN_FLIGHT
from levanter_infer.checkpoints.source import INDEX, SINGLE, RemoteSource, Source
from levanter_infer.checkpoints.weights import DTYPES, StoredTensor, enumerate_names
from levanter_infer.models.family import Family
from levanter_infer.models.live import LIVE, names_of
from levanter_infer.models.tensors import Parameter

if TYPE_CHECKING:
    import tensorstore

METADATA, _OCDBT = "metadata.json", "manifest.ocdbt"
_MODEL = "model/"
"""Paths of the model's arrays begin with it, beside the optimizer's."""
_CACHE_BYTES = 2**30
"""Bytes of decoded chunks that are kept: a chunk holds several layers, and layers are read one by one."""
_DRIVERS = {"gs": "gcs", "s3": "s3"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_levanter(source: Source) -> bool:
    """Whether this is a checkpoint of Levanter's trainer."""
    return source.has(METADATA) and not source.has(SINGLE) and not source.has(INDEX)


def identifying_files(source: Source) -> list[str]:
    """Small files that differ between any two checkpoints."""
    return [name for name in (METADATA, _OCDBT) if source.has(name)]


@dataclass(frozen=True)
class LevanterTensor(StoredTensor):
    """A part of an array, seen as a HF tensor. Nothing is read before `read_into`."""

    view: "tensorstore.TensorStore"
    """[rows..., columns...], which merge to the tensor's shape."""

    def rows(self, start: int, stop: int) -> "LevanterTensor":
        """As `StoredTensor.rows`. Requires: whole entries of the view's first axis."""
        if (start, stop) == (0, self.shape[0]):
            return self
        size = self.shape[0] // self.view.shape[0]
        assert start % size == 0 and stop % size == 0, f"rows {start} to {stop} are no whole entries of {size}"
        shape = (stop - start, *self.shape[1:])
        num_bytes = self.num_bytes // self.shape[0] * (stop - start)
        return replace(self, shape=shape, num_bytes=num_bytes, view=self.view[start // size : stop // size])

    @staticmethod
    def read_all(pieces: Sequence[tuple["LevanterTensor", np.ndarray]]) -> None:
        """As `read_tensors`, a few at once: each has a temporary copy."""
        for start in range(0, len(pieces), IN_FLIGHT):
            some = pieces[start : start + IN_FLIGHT]
            futures = [tensor.view.read() for tensor, _ in some]
            for (tensor, out), future in zip(some, futures, strict=True):
                try:
                    out[...] = np.asarray(future.result()).reshape(out.shape).astype(out.dtype, copy=False)
                except ValueError as error:
                    raise ValueError(f"{tensor.path}: cannot read {tensor.name!r}: {error}; copy it again") from error


def levanter_tensors(source: Source, family: Family, params: Sequence[Parameter]) -> dict[str, StoredTensor]:
    """The model's tensors by HF's names.

    Args: params: those of the model that the checkpoint should hold.
    Raises: ValueError naming the array that is missing, unknown or of another shape; for a family that Levanter's
        checkpoints are not read of; if tensorstore is not installed.
    """
    if family.model_type not in LIVE:
        raise ValueError(
            f"config.json: model_type={family.model_type!r}, expected one of {', '.join(LIVE)} for a checkpoint of "
            "Levanter's trainer; export it to HF's layout with levanter.main.export_lm_to_hf"
        )
    store = _Store(source)
    fields = names_of(family.model_type)
    paths = {_MODEL + fields[param.line].replace(".", "/"): param for param in params}
    present = store.arrays()
    missing = sorted(set(paths) - present)
    # Numbers without axes are flags of modules, such as Dropout's `inference`.
    unknown = [path for path in sorted(present - set(paths)) if store.open(path).shape]
    if missing or unknown:
        problems = [f"lacks {enumerate_names(missing)}"] * bool(missing)
        problems += [f"has {enumerate_names(unknown)}, which config.json has no use for"] * bool(unknown)
        raise ValueError(
            f"{source.name}: the checkpoint {' and '.join(problems)}; config.json and the arrays do not belong together"
        )
    found: dict[str, StoredTensor] = {}
    for path, param in paths.items():
        array = store.open(path)
        view = _as_stored(array, param, path, source)
        dtype = np.dtype(array.dtype.numpy_dtype)
        if dtype not in _NAMES:
            raise ValueError(f"{source.name}: {path} is {dtype}, expected one of {', '.join(map(str, _NAMES))}")
        lead = tuple(axis.size for axis in param.axes[: param.num_stacked])
        for index, part in zip(np.ndindex(*lead), param.sources, strict=True):
            of_one = view[index] if index else view
            size = math.prod(param.tensor_shape) * dtype.itemsize
            found[part.name] = LevanterTensor(
                source.where(path), part.name, _NAMES[dtype], param.tensor_shape, 0, size, of_one
            )
    return found


def _as_stored(array: Any, param: Parameter, path: str, source: Source) -> Any:
    """The array with the axes of the parameter, but that the heads of an output projection stay one axis."""
    sizes = {axis.name: axis.size for axis in param.axes}
    names = list(sizes)
    if ".o_proj." in param.path:
        sizes[HEADS] = sizes.pop(KV_HEADS) * sizes.pop(Q_HEADS_PER_GROUP)
        names = [HEADS if name == KV_HEADS else name for name in names if name != Q_HEADS_PER_GROUP]
    is_expert = "/experts/" in path  # Levanter's MoELinear stores inputs first
    expected = [sizes[name] for name in names]
    if is_expert:
        expected[-2:] = expected[:-3:-1]
    if VOCAB in names and array.shape[0] > expected[0] and array.shape[1:] == tuple(expected[1:]):
        array = array[: expected[0]]  # rows that pad the vocabulary to a multiple of the devices
    if array.shape != tuple(expected):
        raise ValueError(
            f"{source.name}: {path} has shape {list(array.shape)}, config.json expects {expected}; they do not belong "
            "together"
        )
    order = list(range(len(names)))
    return array.transpose([*order[:-2], order[-1], order[-2]]) if is_expert else array


class _Store:
    """The arrays of a checkpoint."""

    def __init__(self, source: Source):
        try:
            import tensorstore
        except ImportError as error:
            raise ValueError(
                f"{source.name} is a checkpoint of Levanter's trainer, which needs the library tensorstore: "
                "in a checkout pip install '.[tensorstore]'"
            ) from error
        self._ts = tensorstore
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._base = kvstore_spec(source.remote.url if isinstance(source, RemoteSource) else source.directory)
        self._is_ocdbt = source.has(_OCDBT)
        self._source = source

    def arrays(self) -> set[str]:
        """Paths of the model's arrays."""
        spec = {"driver": "ocdbt", "base": self._base} if self._is_ocdbt else self._base
        prefix = self._ts.KvStore.KeyRange(_MODEL, _MODEL[:-1] + chr(ord("/") + 1))
        try:
            keys = self._ts.KvStore.open(spec, context=self._context).result().list(prefix).result()
        except ValueError as error:
            raise ValueError(f"{self._source.name}: cannot list its arrays: {error}; copy it again") from error
        split = (key.decode().rpartition("/") for key in keys)
        found = {folder for folder, _, file in split if file in ("zarr.json", ".zarray")}
        if not found:
            raise ValueError(
                f"{self._source.name} has {METADATA} but no arrays below {_MODEL}; give the directory of one step of a "
                "Levanter run, such as checkpoints/RUN/step-1000"
            )
        return found

    def open(self, path: str) -> Any:
        if self._is_ocdbt:
            spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": self._base, "path": path + "/"}}
        else:
            spec = {"driver": "zarr", "kvstore": {**self._base, "path": f"{self._base['path']}{path}/"}}
        try:
            return self._ts.open(spec, open=True, read=True, context=self._context).result()
        except ValueError as error:
            raise ValueError(f"{self._source.name}: cannot open {path}: {error}; copy the checkpoint again") from error


def kvstore_spec(where: str | Path) -> dict[str, Any]:
    """tensorstore's name for a directory or for a URL of one. Raises: ValueError for other kinds of URLs."""
    url = urlparse(where) if isinstance(where, str) else None
    if url is None or url.scheme == "file":
        return {"driver": "file", "path": f"{Path(url.path if url else where).absolute()}/"}
    if url.scheme not in _DRIVERS:
        raise ValueError(f"{where}: expected a directory, or a URL of gs:// or s3:// for a checkpoint of Levanter's")
    return {"driver": _DRIVERS[url.scheme], "bucket": url.netloc, "path": f"{url.path.strip('/')}/"}
