"""Compiles the round program for an H200 that is not there, and prints what became of it, as one JSON line.

`python -m tests.gpu_compile`. Needs jax-cuda12-plugin and jax-cuda12-pjrt of jax's version, nvidia-cuda-nvcc-cu12, and
no driver. Kernels that Triton cannot compile, or that take more shared memory than there is, are found here, and
unwanted copies; how fast it all is is not.
"""

import json
import os
from pathlib import Path

from levanter_infer.runtime import gpu_compiler

TARGET = gpu_compiler.describe("NVIDIA H200", "9.0", 141_000_000_000, 4800)
SMALL_TARGET = TARGET.replace("major: 9 minor: 0", "major: 8 minor: 6").replace("optin: 232448", "optin: 101376")
"""A GPU of capability 8.6, which has the least shared memory of those that the kernels are written for: 99 KB."""


def set_up_compiler() -> None:
    """For a process that compiles for a GPU; before it imports jax."""
    missing = gpu_compiler.why_missing()
    if missing is not None:
        raise SystemExit(missing)
    os.environ.update(gpu_compiler.compiler_environment())


def main() -> None:
    set_up_compiler()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies

    from levanter_infer.decode.programs import ProgramOptions, Programs
    from levanter_infer.engine.backend_choice import BackendChoice
    from levanter_infer.engine.config import EngineConfig
    from levanter_infer.engine.runner import empty_admission
    from levanter_infer.engine.sizes import resolve_shapes
    from levanter_infer.layers.attention import AttentionSpec
    from levanter_infer.layers.layout import Layout
    from tests.hlo import pool_copies
    from tests.tiny_models import tiny_model

    jax.devices()  # makes the plugin known
    topology = topologies.get_topology_desc("cuda", platform="cuda", topology="1x1x1", target_config=TARGET)

    config = EngineConfig(max_seqs=8, max_seq_len=512, max_pages=32768, max_step_tokens=512)
    model = tiny_model(dtype="bfloat16", hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    layout = Layout.of(None, model.config, topology.devices[0])
    backend = BackendChoice.of("gpu", layout, matmul="gpu", attention="gpu")
    shapes = backend.adapt(resolve_shapes(config, model, 1))
    model = backend.prepared_types(model)
    options = ProgramOptions(AttentionSpec(), jnp.bfloat16, backend.attention_backend, layout)
    programs = Programs(model, shapes, options)
    state = programs.state_types
    lowered = programs.trace_round(model, state, layout.types(empty_admission(shapes)))
    compiled = lowered.lower(lowering_platforms=("cuda",)).compile()
    pool, text = state.cache.pools[0].pages.array, compiled.as_text()
    print(
        json.dumps(
            {
                "copies": pool_copies(text, pool.shape, pool.dtype),
                "pool_bytes": int(np.prod(pool.shape)) * pool.dtype.itemsize,
                "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
                "kernels": text.count('custom_call_target="__gpu$xla.gpu.triton"'),
                "loops": text.count(" while("),
            }
        )
    )
    if out := os.environ.get("GPU_COMPILE_TEXT"):
        Path(out).write_text(text)


if __name__ == "__main__":
    main()
