"""Admissions as the device's programs take them, made of what the scheduler admits."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from haliax import Axis, NamedArray

from levanter_infer.axes import ADMITTED, BIAS, DATA, SEED_WORD, SEQ, STOP, STOP_TOKEN, UPLOAD
from levanter_infer.decode.admission import Admission
from levanter_infer.decode.beam_table import BeamParams
from levanter_infer.decode.kv_offload import HostTerms
from levanter_infer.decode.sampling_table import SamplingTable
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.engine.admission import SamplingColumns, nothing_to_admit

_SCALARS = ("max_steps", "min_free_slots", "has_pieces", "has_cancellations")
_AXES = {**dict.fromkeys(_SCALARS, ()), "tokens": (UPLOAD,), "cancel": (SEQ,)}
"""Axes of fields of `Admission` behind that of the ranks; of others `ADMITTED`."""
_TRAILING = {
    "seed": (SEED_WORD,),
    **dict.fromkeys(("bias_ids", "bias_values"), (BIAS,)),
    "stop_ids": (STOP, STOP_TOKEN),
    "stop_lens": (STOP,),
}
"""Axes of columns of `SamplingTable` behind that of the sequences."""


def is_idle(fields: Mapping[str, Any]) -> bool:
    """Whether a round with these fields admits and cancels nothing."""
    return not (np.any([fields["has_pieces"], fields["has_cancellations"]]) or "host" in fields)


def empty_admission(shapes: Shapes, num_ranks: int = 1) -> Admission:
    """An admission that admits nothing, in NumPy; its arrays stand in for those that a round does not upload."""
    fields = admission_fields(nothing_to_admit(shapes, num_ranks), shapes.limits, num_ranks)
    return Admission(**{"beams": None, "host": host_terms() if shapes.offload else None, **fields})


def without_ranks(arrays: Any, num_ranks: int) -> Any:
    """Arrays as the device's programs take them: those of one rank have no leading axis of ranks."""
    return jax.tree.map(lambda array: array[0, ...], arrays) if num_ranks == 1 else arrays


def sampling_table(columns: SamplingColumns, axis: str = ADMITTED) -> SamplingTable:
    """Sampling parameters as a table of NumPy arrays over one axis."""
    return _sampling_table(columns.columns, columns.limits, (axis,))


def admission_fields(fields: Mapping[str, Any], limits: SamplingLimits, num_ranks: int) -> dict[str, Any]:
    """Fields of an `Admission` from those of a `HostAdmission`."""
    lead = (DATA,) if num_ranks > 1 else ()
    named: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "host":
            named[name] = value
        elif name == "sampling":
            named[name] = _sampling_table(without_ranks(value, num_ranks), limits, (*lead, ADMITTED))
        elif name == "beams":
            columns = without_ranks(value, num_ranks)
            named[name] = BeamParams(**{key: _array(column, *lead, ADMITTED) for key, column in columns.items()})
        else:
            named[name] = _array(without_ranks(value, num_ranks), *lead, *_AXES.get(name, (ADMITTED,)))
    return named


def _sampling_table(columns: dict[str, np.ndarray], limits: SamplingLimits, lead: tuple[str, ...]) -> SamplingTable:
    named = {name: _array(column, *lead, *_TRAILING.get(name, ())) for name, column in columns.items()}
    return SamplingTable(**named, limits=limits)


def _array(value: np.ndarray, *names: str) -> NamedArray:
    axes = tuple(Axis(name, size) for name, size in zip(names, np.shape(value), strict=True))
    return NamedArray(value, axes)  # type: ignore[arg-type]


def host_terms(*, yields: bool = True, return_pages: int = 0) -> HostTerms:
    """What KV offload says to the device's scheduler, in NumPy."""
    return HostTerms(yields=_array(np.asarray(yields)), return_pages=_array(np.asarray(return_pages, np.int32)))
