"""Compiles the round program for a TPU that is not there, and prints what became of the pool, as one JSON line.

Run in a process of its own: the compiler may abort it. `python -m tests.tpu_compile v5e tpu [glm_moe_dsa]`; without
the last a Llama.
"""

import json
import os
import sys

from levanter_infer.runtime.libtpu import TARGETS, compiler_environment, topology_devices


def main(generation: str, impl: str, golden_case: str | None = None) -> None:
    os.environ.update(compiler_environment(generation))
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from levanter_infer.decode.programs import ProgramOptions, Programs
    from levanter_infer.engine.config import EngineConfig
    from levanter_infer.engine.runner import empty_admission
    from levanter_infer.engine.sizes import resolve_shapes
    from levanter_infer.kernels.registry import make_backend
    from levanter_infer.layers.attention import AttentionSpec
    from levanter_infer.layers.layout import Layout, one_device_mesh
    from levanter_infer.models.decoder import DecoderModel
    from tests.family_cases import load_config
    from tests.hlo import pool_copies
    from tests.tiny_models import tiny_model

    mesh = one_device_mesh(topology_devices(TARGETS[generation][0])[0])
    replicated = NamedSharding(mesh, PartitionSpec())

    def abstract(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), tree)

    config = EngineConfig(max_seqs=8, max_seq_len=256, max_pages=32768, max_step_tokens=64)
    if golden_case is None:
        sizes = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=128)
        model = tiny_model(dtype="bfloat16", **sizes)
    else:
        model = DecoderModel.types(load_config(golden_case), jnp.bfloat16)
    shapes = resolve_shapes(config, model, 1)
    backend = make_backend(impl, "tpu")
    options = ProgramOptions(AttentionSpec(), jnp.bfloat16, backend, Layout.of(mesh, model.config))
    programs = Programs(model, shapes, options)
    state = programs.state_types
    with jax.set_mesh(mesh):
        lowered = programs.trace_round(abstract(model), abstract(state), abstract(empty_admission(shapes)))
        compiled = lowered.lower(lowering_platforms=("tpu",)).compile()
        tier = kv_offload_programs(programs, abstract(state.cache), shapes, replicated)
    pool = state.cache.pools[0].pages.array

    def report(compiled) -> dict[str, object]:
        memory = compiled.memory_analysis()
        return {
            "copies": pool_copies(compiled.as_text(), pool.shape, pool.dtype),
            "temp_bytes": memory.temp_size_in_bytes,
            "host_bytes": memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes,
        }

    pool_bytes = int(np.prod(pool.shape)) * pool.dtype.itemsize
    tier_reports = {name: report(program) for name, program in tier.items()}
    print(json.dumps({**report(compiled), "pool_bytes": pool_bytes, "kv_offload": tier_reports}))


def kv_offload_programs(programs, cache, shapes, replicated):
    """The programs that move pages, compiled, with contents in pinned memory of the host."""
    import jax
    import jax.numpy as jnp

    def array(shape, dtype, sharding=replicated):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    pages, on_host = array((shapes.transfer_pages,), jnp.int32), replicated.with_memory_kind("pinned_host")
    pools = [pool.pages.array for pool in cache.paged(0)]
    contents = tuple(
        array((pool.shape[0], shapes.transfer_pages, *pool.shape[2:]), pool.dtype, on_host) for pool in pools
    )
    arguments = {
        "read_pages": (cache, pages),
        "write_pages": (cache, contents, array((shapes.num_pages,), jnp.int32), pages),
    }
    return {
        name: getattr(programs.tier, name).jitted.trace(*types).lower(lowering_platforms=("tpu",)).compile()
        for name, types in arguments.items()
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
