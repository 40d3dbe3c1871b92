"""Hooks of schemathesis for scripts/fuzz_server.py: most valid bodies get few parameters, so that many are served."""

import random

import schemathesis
from schemathesis.generation import GenerationMode

_REQUIRED = ("prompt", "messages")
_MOST = 4
"""Parameters of a body that is thinned out, at most: of thirty at random some two always exclude each other."""
_ROLES = ("user", "assistant", "system")


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.meta is None or case.meta.generation.mode != GenerationMode.POSITIVE or not isinstance(case.body, dict):
        return
    draw = random.Random(repr(case.body))
    if draw.random() < 0.2:
        return
    optional = [key for key in case.body if key not in _REQUIRED and key != "model"]
    kept = set(draw.sample(optional, min(len(optional), draw.randint(0, _MOST))))
    case.body = {key: value for key, value in case.body.items() if key in kept or key in _REQUIRED}
    for message in case.body.get("messages", ()):
        message["role"] = draw.choice(_ROLES)
