"""Admissions that admit nothing, in numpy: they stand in for the arrays that a round does not need to upload."""

import jax
import numpy as np
from haliax import Axis, NamedArray

from levanter_infer.axes import ADMITTED, DATA, SEQ, UPLOAD
from levanter_infer.decode.admission import Admission
from levanter_infer.decode.codes import DEFAULT_ROOT
from levanter_infer.decode.kv_offload import HostTerms
from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.beams import beam_params
from levanter_infer.engine.encode_sampling import SamplingColumns


def empty_admission(shapes: Shapes) -> Admission:
    """An admission that admits nothing; its arrays stand in for those that a round does not need to upload."""

    def array(axis: str, size: int, value=0, dtype: type = np.int32) -> NamedArray:
        return NamedArray(np.full(size, value, dtype), (Axis(axis, size),))  # type: ignore[arg-type]

    admitted, none = (ADMITTED, shapes.num_slots), shapes.num_slots
    return Admission(
        tokens=array(UPLOAD, shapes.upload_tokens),
        lens=array(*admitted),
        starts=array(*admitted),
        slot_ids=array(*admitted, none),
        complete=array(*admitted, False, np.bool_),
        prompt_lens=array(*admitted),
        max_lens=array(*admitted),
        arrival=array(*admitted),
        priority=array(*admitted),
        roots=array(*admitted, DEFAULT_ROOT),
        fork_source=array(*admitted, none),
        sampling=SamplingColumns(shapes.num_slots, shapes.limits).table(),
        beams=beam_params([], shapes) if shapes.max_beams else None,
        cancel=array(SEQ, shapes.num_slots, False, np.bool_),
        max_steps=_scalar(np.asarray(0, np.int32)),
        min_free_slots=_scalar(np.asarray(shapes.num_slots + 1, np.int32)),
        has_pieces=_scalar(np.asarray(False)),
        has_cancellations=_scalar(np.asarray(False)),
        host=host_terms() if shapes.offload else None,
    )


def _scalar(value: np.ndarray) -> NamedArray:
    return NamedArray(value, ())  # type: ignore[arg-type]


def host_terms(*, yields: bool = True, return_pages: int = 0) -> HostTerms:
    def scalar(value, dtype) -> NamedArray:
        return NamedArray(np.asarray(value, dtype), ())  # type: ignore[arg-type]

    return HostTerms(yields=scalar(yields, bool), return_pages=scalar(return_pages, np.int32))


def stacked(*parts: NamedArray) -> NamedArray:
    array = np.stack([np.asarray(part.array) for part in parts])
    return NamedArray(array, (Axis(DATA, len(parts)), *parts[0].axes))  # type: ignore[arg-type]


def stacked_admission(shapes: Shapes, num_shards: int) -> Admission:
    """`empty_admission` of several shards."""
    empty = empty_admission(shapes)
    return jax.tree.map(stacked, *[empty] * num_shards, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def make_nothing(shapes: Shapes, num_shards: int) -> Admission:
    """The admission that admits nothing."""
    return empty_admission(shapes) if num_shards == 1 else stacked_admission(shapes, num_shards)
