"""Compiles the round program for a TPU that is not there, and prints what became of the pool, as one JSON line.

Run in a process of its own: the compiler may abort it. `python -m tests.tpu_compile v5e`
"""

import json
import os
import sys

_TOPOLOGIES = {"v5e": ("v5e:2x2", "v5litepod-4"), "v6e": ("v6e:2x2", "v6e-4")}


def main(generation: str) -> None:
    topology, accelerator = _TOPOLOGIES[generation]
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        JAX_PLATFORMS="cpu",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from levanter_infer.decode.programs import Programs
    from levanter_infer.engine.config import EngineConfig, resolve_shapes
    from levanter_infer.engine.slots import empty_admission
    from levanter_infer.layers.attention import AttentionSpec
    from tests.hlo import pool_copies
    from tests.tiny_models import tiny_model

    devices = topologies.get_topology_desc(topology, "tpu").devices
    mesh = Mesh(np.asarray(devices[:1]), ("x",))
    replicated = NamedSharding(mesh, PartitionSpec())

    def abstract(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), tree)

    config = EngineConfig(max_seqs=8, max_seq_len=256, max_pages=32768, max_step_tokens=64)
    model = tiny_model(dtype="bfloat16", hidden_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=128)
    shapes = resolve_shapes(config, model, 1)
    programs = Programs(model, shapes, AttentionSpec(impl="xla"), kv_dtype=jnp.bfloat16, as_bits=False)
    state = programs.state_types
    with jax.set_mesh(mesh):
        lowered = programs.trace_round(abstract(model), abstract(state), abstract(empty_admission(shapes)))
        compiled = lowered.lower(lowering_platforms=("tpu",)).compile()
    pool = state.kv.pages.array
    print(
        json.dumps(
            {
                "copies": pool_copies(compiled.as_text(), pool.shape, pool.dtype),
                "pool_bytes": int(np.prod(pool.shape)) * pool.dtype.itemsize,
                "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
