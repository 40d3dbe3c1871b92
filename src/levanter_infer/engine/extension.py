"""Tables that an engine makes when the first request needs them."""

from collections.abc import Sequence
from typing import Any

from levanter_infer.decode.shapes import Shapes
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.constraints import constraint_shapes
from levanter_infer.engine.request_state import RequestState
from levanter_infer.engine.routes import routing_shapes
from levanter_infer.engine.scoring import score_shapes
from levanter_infer.engine.sizes import beams_for


def needed_changes(requests: Sequence[RequestState], shapes: Shapes, config: EngineConfig, model) -> dict[str, Any]:
    """The fields of `shapes` that these requests need to be others, with their values."""
    changes: dict[str, Any] = {}
    if shapes.scoring is None and any(request.wants_scores for request in requests):
        changes["scoring"] = score_shapes(config, model)
    if shapes.routing is None and any(request.params.return_routed_experts for request in requests):
        changes["routing"] = routing_shapes(model.config)
    if shapes.constraints is None and any(request.params.is_constrained for request in requests):
        changes["constraints"] = constraint_shapes(config, shapes.limits.vocab_size)
    max_beams = beams_for(max((request.params.num_beams for request in requests), default=1), shapes)
    if max_beams != shapes.max_beams:
        changes["max_beams"] = max_beams
    return changes
