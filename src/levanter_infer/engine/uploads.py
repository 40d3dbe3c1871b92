"""Admissions as the device's programs take them, made of what the scheduler admits."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from levanter_infer.decode.admission import Admission
from levanter_infer.decode.beam_table import BeamParams
from levanter_infer.decode.kv_offload import HostTerms
from levanter_infer.decode.sampling_table import SamplingTable
from levanter_infer.decode.shapes import SamplingLimits, Shapes
from levanter_infer.engine.admission import SamplingColumns, nothing_to_admit


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


def sampling_table(columns: SamplingColumns) -> SamplingTable:
    """Sampling parameters as a table of NumPy arrays."""
    return SamplingTable(**columns.columns, limits=columns.limits)  # type: ignore[arg-type]


def admission_fields(fields: Mapping[str, Any], limits: SamplingLimits, num_ranks: int) -> dict[str, Any]:
    """Fields of an `Admission` from those of a `HostAdmission`."""
    found = {name: value if name == "host" else without_ranks(value, num_ranks) for name, value in fields.items()}
    if "sampling" in found:
        found["sampling"] = SamplingTable(**found["sampling"], limits=limits)
    if "beams" in found:
        found["beams"] = BeamParams(**found["beams"])
    return found


def host_terms(*, yields: bool = True, return_pages: int = 0) -> HostTerms:
    """KV offload's terms for the device's scheduler, in NumPy."""
    return HostTerms(np.asarray(yields), np.asarray(return_pages, np.int32))  # type: ignore[arg-type]
