"""levanter_infer: batch sampling for JAX training stacks.

The public names load when they are first used, so that a command can refuse a wrong option before JAX is imported.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from levanter_infer.checkpoints.load import load_model as load_model
    from levanter_infer.decode.generate import GenerateOutput as GenerateOutput
    from levanter_infer.engine.async_engine import AsyncEngine as AsyncEngine
    from levanter_infer.engine.async_engine import QueueFull as QueueFull
    from levanter_infer.engine.config import EngineConfig as EngineConfig
    from levanter_infer.engine.continuation import continuation as continuation
    from levanter_infer.engine.continuation import joined as joined
    from levanter_infer.engine.engine import InferenceEngine as InferenceEngine
    from levanter_infer.engine.mesh import MeshConfig as MeshConfig
    from levanter_infer.engine.params import SamplingParams as SamplingParams
    from levanter_infer.engine.pure import generate as generate
    from levanter_infer.engine.reader import Update as Update
    from levanter_infer.engine.request import Completion as Completion
    from levanter_infer.engine.request import Request as Request
    from levanter_infer.engine.request import RequestOutput as RequestOutput
    from levanter_infer.models.live import from_levanter as from_levanter

    __version__: str

_WHERE = {
    "from_levanter": "models.live",
    "load_model": "checkpoints.load",
    "AsyncEngine": "engine.async_engine",
    "QueueFull": "engine.async_engine",
    "Update": "engine.reader",
    "EngineConfig": "engine.config",
    "continuation": "engine.continuation",
    "joined": "engine.continuation",
    "InferenceEngine": "engine.engine",
    "MeshConfig": "engine.mesh",
    "SamplingParams": "engine.params",
    "GenerateOutput": "decode.generate",
    "generate": "engine.pure",
    "Completion": "engine.request",
    "Request": "engine.request",
    "RequestOutput": "engine.request",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name == "__version__":
        return importlib.import_module(f"{__name__}.fingerprint").package_version()
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
