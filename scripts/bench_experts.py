"""Milliseconds of one layer of experts on a CPU, from the norm to the residual, for steps of several numbers of tokens.

    python scripts/bench_experts.py [--rows 1,8,32,256] [--isa avx512_bf16] [--turns 5] [--shape 128,8,2048,768]

Weights are random bfloat16, one layer; every trip has other tokens, which the router sends to other experts. Prints one
JSON line per number of rows: milliseconds of each turn, and the bytes of the experts that a step of so many tokens uses
on average over the median: what the memory would have to deliver.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from haliax import Axis, NamedArray  # noqa: E402

from levanter_infer.axes import EMBED, EXPERT, LAYERS, MLP, TOKEN  # noqa: E402
from levanter_infer.kernels.cpu.backend import CpuBackend  # noqa: E402
from levanter_infer.layers.linear import Fusion, Linear  # noqa: E402
from levanter_infer.layers.moe import ExpertsBlock, Moe  # noqa: E402
from levanter_infer.layers.norm import NormConfig, RMSNorm  # noqa: E402
from levanter_infer.layers.router import Router  # noqa: E402

LAYER = Axis(LAYERS, 1)
_CHUNK = 1 << 20
_SECONDS = 0.25
"""Seconds of one turn."""


def linear(outs: Axis, ins: Axis, lead: tuple[Axis, ...], backend: CpuBackend) -> Linear:
    """A random map, made in pieces so that no float32 copy of it is in memory."""
    axes = (*lead, outs, ins)
    noise = np.random.default_rng(outs.size).standard_normal(_CHUNK).astype(np.float32) * ins.size**-0.5
    weight = np.empty(int(np.prod([axis.size for axis in axes])), ml_dtypes.bfloat16)
    for i, begin in enumerate(range(0, weight.size, _CHUNK)):
        part = weight[begin : begin + _CHUNK]
        part[:] = np.roll(noise, 7919 * i)[: part.size].astype(ml_dtypes.bfloat16)
    array = jnp.asarray(weight.reshape([axis.size for axis in axes]))
    return Linear(NamedArray(array, axes), None, 1).prepare(backend, donate=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,256")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--shape", default="128,8,2048,768", help="experts, experts of a token, hidden size, width")
    options = parser.parse_args()
    experts, chosen, hidden, width = map(int, options.shape.split(","))
    backend = CpuBackend(isa=options.isa)
    expert, mlp, embed = Axis(EXPERT, experts), Axis(MLP, width), Axis(EMBED, hidden)
    moe = Moe(
        router=linear(expert, embed, (LAYER,), backend),
        gate_proj=linear(mlp, embed, (LAYER, expert), backend),
        up_proj=linear(mlp, embed, (LAYER, expert), backend),
        down_proj=linear(embed, mlp, (LAYER, expert), backend),
    )
    norm = RMSNorm.init((LAYER,), embed, config=NormConfig(1e-6), dtype=jnp.bfloat16)
    block = ExpertsBlock(experts, chosen, width, Router(normalize=True))

    def program(trips, tokens, moe: Moe, norm: RMSNorm, rows):
        def body(trip, seen):
            x = jax.lax.dynamic_index_in_dim(tokens, trip % tokens.shape[0], keepdims=False) + seen * 0
            layer, named = jnp.minimum(rows, 0), NamedArray(x, (Axis(TOKEN, tokens.shape[1]), embed))
            y = moe.at(layer, rows)(named, Fusion(norm=norm.at(layer), residual=named), block)
            return jax.lax.optimization_barrier(y.array)[0, 0]

        return jax.lax.fori_loop(0, trips, body, jnp.float32(0))

    for rows in map(int, options.rows.split(",")):
        steps = max(2, min(16, 256 // rows))
        tokens = jnp.asarray(np.random.default_rng(rows).standard_normal((steps, rows, hidden)).astype(np.float32))
        arguments = tokens, moe, norm, jnp.int32(rows)
        run = jax.jit(program).lower(jnp.int32(1), *arguments).compile(compiler_options=dict(backend.compiler_options))

        def seconds(trips: int, run=run, arguments=arguments) -> float:
            begin = time.perf_counter()
            jax.block_until_ready(run(jnp.int32(trips), *arguments))
            return (time.perf_counter() - begin) / trips

        seconds(1)
        trips = max(1, int(_SECONDS / seconds(2)))
        turns = [seconds(trips) * 1e3 for _ in range(options.turns)]
        used = experts * (1 - (1 - chosen / experts) ** rows)
        gigabytes = used * 3 * hidden * width * 2 / 1e9
        ms = statistics.median(turns)
        line = {"rows": rows, "isa": options.isa, "ms": round(ms, 3), "turns": [round(t, 3) for t in turns]}
        print(json.dumps(line | {"gb_per_s": round(gigabytes / ms * 1e3, 1)}), flush=True)


if __name__ == "__main__":
    main()
