"""Compiles kernels for GPUs that are not there, and prints what fails, as one JSON line: attention at every head size,
and to chosen keys; matmuls in every tile.

`python -m tests.gpu_kernels`; needs what tests/gpu_compile.py needs. Here too little shared memory is found.
"""

import dataclasses
import functools
import itertools
import json

from tests.gpu_compile import SMALL_TARGET, TARGET, set_up_compiler

NUM_TOKENS = 128
"""More than `attention.ONE_LANE_TOKENS`, so that both lanes are compiled."""
HEAD_SIZES = (64, 96, 128, 160, 192, 256, 512)
FEW_ROWS, MANY_ROWS = 8, 128
"""With two kv heads, `MANY_ROWS` makes enough programs for the tiles that heads of up to 128 have then."""
ROWS, MATRICES = (1, 32, 64, 256, 2048), ((4096, 4096), (4096, 6144), (4096, 28672), (2880, 5760))
"""Every tile, and inputs that turns of 128 do not divide."""


def main() -> None:
    set_up_compiler()
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from levanter_infer.kernels.call import LinearCall
    from levanter_infer.kernels.gpu import linear
    from tests.kernels.ragged import attend, lowering_for_gpu

    i32 = jnp.int32

    def failure(target: str, function, **types) -> str | None:
        """What the compiler says of a function of arrays of these shapes and dtypes."""
        topology = topologies.get_topology_desc("cuda", platform="cuda", topology="1x1x1", target_config=target)
        on_device = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(topology.devices[0]))
        arrays = {name: on_device(shape, dtype) for name, (shape, dtype) in types.items()}
        try:
            with lowering_for_gpu():
                traced = jax.jit(function).trace(**arrays)
                lowered = traced.lower(lowering_platforms=("cuda",))
            lowered.compile()
        except Exception as error:  # what the compiler says is the result
            return " ".join(str(error).split())[:300]
        return None

    def attention(head_dim: int, dtype, rows: int = FEW_ROWS, tokens: int = NUM_TOKENS) -> dict:
        return dict(
            q=((tokens, 8, head_dim), dtype),
            kv_pages=((2, 1024, 16, 4, head_dim), dtype),
            layer=((), i32),
            page_indices=((rows, 256), i32),
            seq_lens=((rows,), i32),
            cu_q_lens=((rows + 1,), i32),
            num_seqs=((), i32),
            sinks=((8,), jnp.float32),
        )

    def of_chosen_keys(heads: int, dtype, tokens: int) -> dict:
        """DeepSeek-V3.2's latents."""
        latents = dict(q=((tokens, heads, 576), dtype), kv_pages=((2, 1024, 16, 1, 704), dtype))
        own = {**attention(576, dtype), **latents, "chosen": ((tokens, 2048), i32)}
        return {name: type_ for name, type_ in own.items() if name != "sinks"}

    def matmul(x, gate, up, layer, *, shared_memory: int):
        outs = [gate.shape[1], up.shape[1]]
        pair = LinearCall(x=x, weights=[gate, up], num_outs=outs, layer=layer, dtype=x.dtype, is_gated_pair=True)
        both = dataclasses.replace(pair, is_gated_pair=False)
        return [linear.stacked_matmul(call, shared_memory=shared_memory) for call in (pair, both)]

    jax.devices()  # makes the plugin known
    targets = {"h200": (TARGET, 9.0), "8.6": (SMALL_TARGET, 8.6)}
    failures, count = {}, 0
    for name, (target, capability) in targets.items():
        for head_dim in HEAD_SIZES:
            for dtype, is_apart in ((jnp.bfloat16, False), (jnp.float32, False), (jnp.bfloat16, True)):
                count += 1
                options = dict(scale=0.1, impl="gpu", attention_chunk=8192, rows_apart=is_apart)
                function = functools.partial(attend, **options)
                if error := failure(target, function, **attention(head_dim, dtype)):
                    failures[f"{name} {head_dim} {jnp.dtype(dtype)}{' apart' * is_apart}"] = error
        for head_dim, dtype, tokens in itertools.product((64, 128), (jnp.bfloat16, jnp.float32), (64, NUM_TOKENS)):
            count += 1
            function = functools.partial(attend, scale=0.1, impl="gpu")
            if error := failure(target, function, **attention(head_dim, dtype, MANY_ROWS, tokens)):
                failures[f"{name} {head_dim} {jnp.dtype(dtype)} {MANY_ROWS} rows {tokens} tokens"] = error
        kinds = (16, jnp.bfloat16), (16, jnp.float32), (128, jnp.bfloat16)
        for (heads, dtype), tokens in itertools.product(kinds, (8, NUM_TOKENS)):
            count += 1
            function = functools.partial(attend, scale=0.1, impl="gpu", value_dim=512, index_dim=128)
            if error := failure(target, function, **of_chosen_keys(heads, dtype, tokens)):
                failures[f"{name} chosen keys {heads} heads {jnp.dtype(dtype)} {tokens} tokens"] = error
        for rows in ROWS:
            for ins, outs in MATRICES:
                count += 1
                function = functools.partial(matmul, shared_memory=linear.shared_memory(capability))
                weights = (2, outs // 2, ins), jnp.bfloat16
                types = dict(x=((rows, ins), jnp.bfloat16), gate=weights, up=weights, layer=((), i32))
                if error := failure(target, function, **types):
                    failures[f"{name} matmul {rows} {ins} {outs}"] = error
    print(json.dumps({"compiled": count - len(failures), "failures": failures}))


if __name__ == "__main__":
    main()
