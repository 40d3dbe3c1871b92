"""Results of a family's engine on meshes of two forced CPU devices, as JSON. `python -m tests.family_runs CASE MESH…`

A process of its own, because the number of devices is decided before JAX starts.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import jax

from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from tests.family_cases import load, requests_for, samples, sizes_for
from tests.golden_cases import load_case
from tests.mesh_runs import mesh_of


def main(name: str, *meshes: str) -> None:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)
    case = load_case(name)
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        model = load(case, Path(directory))
        for mesh in meshes:
            engine = InferenceEngine(model, config=EngineConfig(**sizes_for(model.config)), mesh=mesh_of(mesh))
            outputs = engine.generate(requests_for(case, model.config.vocab_size))
            found[mesh] = [[(s.tokens, s.logprobs.tolist()) for s in samples(output)] for output in outputs]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
