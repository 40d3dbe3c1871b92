"""`Uploads`: admissions on their way to the device."""

import dataclasses
from typing import Any

import numpy as np

from levanter_infer.decode.admission import Admission
from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.backend import Backend
from levanter_infer.engine.sharded import make_nothing


class Uploads:
    """Makes admissions of what the host's slots say, each array on the device.

    What admits and cancels nothing is the same in many rounds, and uploaded once.
    """

    def __init__(self, backend: Backend, shapes: Shapes):
        self._backend = backend
        self.nothing: Admission = backend.put(make_nothing(shapes, backend.num_shards))
        """The admission that admits nothing."""
        self._uploaded: dict[tuple[bytes, bytes], Admission] = {}

    def admission(self, fields: dict[str, Any]) -> Admission:
        """The fields on the device; those that are not given are not looked at."""
        idle = is_idle(fields)
        key = (fields["max_steps"].tobytes(), fields["min_free_slots"].tobytes())
        if idle and key in self._uploaded:
            return self._uploaded[key]
        admission = dataclasses.replace(self.nothing, **self._backend.put(fields))
        if idle:
            self._uploaded[key] = admission
        return admission


def is_idle(fields: dict[str, Any]) -> bool:
    """Whether a round with these fields admits and cancels nothing."""
    return not (np.any([fields["has_pieces"], fields["has_cancellations"]]) or "host" in fields)
