"""Compiles the attention for GPUs that are not there, at every head size, and prints what fails, as one JSON line.

`python -m tests.gpu_attention`; needs what tests/gpu_compile.py needs. Here too little shared memory is found.
"""

import functools
import json

from tests.gpu_compile import SMALL_TARGET, TARGET, set_up_compiler

HEAD_SIZES = (64, 96, 128, 160, 192, 256, 512)


def main() -> None:
    set_up_compiler()
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from tests.kernels.ragged import attend, lowering_for_gpu

    def failure(target: str, head_dim: int, dtype: str, **rules) -> str | None:
        topology = topologies.get_topology_desc("cuda", platform="cuda", topology="1x1x1", target_config=target)
        on_device = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(topology.devices[0]))
        i32 = jnp.int32
        arrays = dict(
            q=on_device((64, 8, head_dim), jnp.dtype(dtype)),
            kv_pages=on_device((2, 1024, 16, 4, head_dim), jnp.dtype(dtype)),
            layer=on_device((), i32),
            page_indices=on_device((8, 256), i32),
            seq_lens=on_device((8,), i32),
            cu_q_lens=on_device((9,), i32),
            num_seqs=on_device((), i32),
            sinks=on_device((8,), jnp.float32),
        )
        try:
            with lowering_for_gpu():
                traced = jax.jit(functools.partial(attend, scale=0.1, impl="gpu", **rules)).trace(**arrays)
                lowered = traced.lower(lowering_platforms=("cuda",))
            lowered.compile()
        except Exception as error:  # what the compiler says is the result
            return " ".join(str(error).split())[:300]
        return None

    jax.devices()  # makes the plugin known
    targets = {"h200": TARGET, "8.6": SMALL_TARGET}
    failures, count = {}, 0
    for (name, target), head_dim in ((pair, size) for pair in targets.items() for size in HEAD_SIZES):
        for dtype, is_apart in (("bfloat16", False), ("float32", False), ("bfloat16", True)):
            count += 1
            if error := failure(target, head_dim, dtype, attention_chunk=8192, rows_apart=is_apart):
                failures[f"{name} {head_dim} {dtype}{' apart' * is_apart}"] = error
    print(json.dumps({"compiled": count - len(failures), "failures": failures}))


if __name__ == "__main__":
    main()
