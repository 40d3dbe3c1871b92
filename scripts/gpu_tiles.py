"""Searches tiles of the kernels for the GPU of this machine, by time.

    python scripts/gpu_tiles.py matmul [--rows 1,64,2048] [--limit 120]
    python scripts/gpu_tiles.py decode|prefill [--limit 120]

Of an 8B, in bfloat16. One JSON line per tile, and for each case the fastest and the one that the kernel chooses. Tiles
are traced one after the other, compiled by all cores, and timed alone. What wins goes into `linear.tile_of` or
`attention.lanes`.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from scripts.gpu_check import micros  # noqa: E402

from levanter_infer.kernels.call import AttentionCall, LinearCall  # noqa: E402
from levanter_infer.kernels.gpu import attention, linear  # noqa: E402
from levanter_infer.kernels.rules import ScoreRules  # noqa: E402

HIDDEN, MLP, HEADS, KV_HEADS, SIZE = 4096, 14336, 32, 8, 128
MATMULS = {
    "qkv": (HIDDEN, (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)),
    "output": (HEADS * SIZE, (HIDDEN,)),
    "gate, up": (HIDDEN, (MLP, MLP)),
    "down": (MLP, (HIDDEN,)),
}
"""Inputs, and outputs of each matrix."""
LEAST_BYTES = 400 << 20
"""Bytes of the weights that are read in turn, so that none comes from a cache."""


@functools.cache
def shared_memory() -> int:
    """Bytes of it that a program can have on this GPU."""
    return linear.shared_memory(float(jax.devices()[0].compute_capability))


class Case(NamedTuple):
    name: dict[str, Any]
    build: Callable[[Any], Callable]
    """The function to time, of a tile; None for the kernel's own."""
    arguments: tuple
    candidates: list
    calls: int
    """Calls of the kernel per call of the function."""
    amount: dict[str, float]
    """Bytes that one call reads and its arithmetic: `gb` and `tflop`."""


def matmul_cases(rows: list[int]) -> Iterator[Case]:
    for name, (ins, outs) in MATMULS.items():
        size = ins * sum(outs) * 2
        layers = max(2, -(-LEAST_BYTES // size))
        keys = jax.random.split(jax.random.key(0), len(outs) + 1)
        weights = [
            jax.random.normal(key, (layers, out, ins), jnp.bfloat16) for key, out in zip(keys, outs, strict=False)
        ]
        for count in rows:
            x = jax.random.normal(keys[-1], (count, ins), jnp.bfloat16)
            residual = jnp.ones((count, outs[0]), jnp.bfloat16) if len(outs) == 1 else None
            calls = max(2 * layers, 16) if count > 256 else max(4 * layers, 64)
            yield Case(
                dict(kernel="matmul", matrix=name, rows=count),
                functools.partial(timed_matmul, calls=calls, is_pair=name == "gate, up"),
                (x, weights, residual),
                list(matmul_tiles(count)),
                calls,
                dict(gb=size / 1e9, tflop=2 * count * ins * sum(outs) / 1e12),
            )


def timed_matmul(tile: linear.Tile | None, *, calls: int, is_pair: bool) -> Callable:
    """Matmuls of one layer after the other."""

    def run(x, weights, residual):
        outs = [weight.shape[1] for weight in weights]

        def call(index, _):
            call = LinearCall(
                x=x,
                weights=weights,
                num_outs=outs,
                dtype=x.dtype,
                layer=index % weights[0].shape[0],
                residual=residual,
                is_gated_pair=is_pair,
            )
            return list(linear.stacked_matmul(call, shared_memory=shared_memory()))

        zeros = [jnp.zeros((x.shape[0], size), x.dtype) for size in outs[: 1 if is_pair else None]]
        with mock.patch.object(linear, "tile_of", (lambda *_: tile) if tile else linear.tile_of):
            return jax.lax.fori_loop(0, calls, call, zeros)

    return run


def matmul_tiles(count: int) -> Iterator[linear.Tile]:
    side = max(16, 1 << (count - 1).bit_length())
    if count <= 64:
        options = itertools.product([side], [16, 32, 64, 128], [64, 128, 256, 512], [2, 4, 8], [2, 3, 4, 6])
    else:
        sides = [(64, 128), (64, 256), (128, 128), (128, 256), (256, 128)]
        options = ((*side, *rest) for side, *rest in itertools.product(sides, [32, 64], [4, 8], [3, 4]))
    for rows, outs, ins, warps, stages in options:
        loaded = stages * (rows + outs) * ins * 2
        if loaded > shared_memory() or rows * outs // warps > 64 * 128:
            continue
        if count <= 64 and not 32 << 10 <= loaded <= 200 << 10:
            continue
        yield linear.Tile(rows, outs, ins, warps, stages)


DECODE = [(8, 1, 640), (32, 1, 640), (64, 1, 640), (1, 1, 640), (256, 1, 1024), (1, 1, 8192), (32, 1, 8192)]
PREFILL = [(1, 2048, 2048), (4, 512, 512), (4, 256, 4096), (1, 2048, 16384)]


def attention_cases(decodes: bool) -> Iterator[Case]:
    for rows, q_len, context in DECODE if decodes else PREFILL:
        page_size, layers = 16, max(2, -(-LEAST_BYTES // (rows * context * 2 * KV_HEADS * SIZE * 2)))
        layers, each = min(layers, 64), context // page_size
        pool = jax.random.normal(jax.random.key(1), (layers, rows * each, page_size, 2 * KV_HEADS, SIZE), jnp.bfloat16)
        pages = jnp.asarray(np.random.default_rng(0).permutation(rows * each).reshape(rows, each), jnp.int32)
        q = jax.random.normal(jax.random.key(2), (max(rows * q_len, 16), HEADS, SIZE), jnp.bfloat16)
        lens, bounds = jnp.full(rows, context, jnp.int32), jnp.arange(rows + 1, dtype=jnp.int32) * q_len
        calls = 64 if decodes else 8
        flops = 4 * rows * q_len * (context - q_len / 2) * HEADS * SIZE
        read = rows * context * 2 * KV_HEADS * SIZE * 2
        yield Case(
            dict(kernel="decode" if decodes else "prefill", rows=rows, queries=q_len, context=context),
            functools.partial(timed_attention, calls=calls, decodes=decodes),
            (q, pool, pages, lens, bounds),
            list(attention_tiles(decodes, context)),
            calls,
            dict(gb=read / 1e9, tflop=flops / 1e12),
        )


def timed_attention(tile: dict[str, int] | None, *, calls: int, decodes: bool) -> Callable:
    """Attention of one layer after the other. Args: tile: changed fields of the lane's."""
    chosen = attention.lanes

    def lanes(**sizes):
        return tuple(
            dataclasses.replace(lane, **(tile or {})) if lane.decodes == decodes else lane for lane in chosen(**sizes)
        )

    def run(q, pool, pages, lens, bounds):
        def call(index, _):
            call = AttentionCall(
                q=q,
                kv_pages=pool,
                layer=index % pool.shape[0],
                page_indices=pages,
                seq_lens=lens,
                cu_q_lens=bounds,
                num_seqs=jnp.int32(lens.shape[0]),
                rules=ScoreRules(scale=1.0).with_scale_in_queries()[1],
                kv_dtype=pool.dtype,
                kv_heads=KV_HEADS,
                page_size=pool.shape[2],
            )
            return attention.gpu_attention(call)

        with mock.patch.object(attention, "lanes", lanes):
            return jax.lax.fori_loop(0, calls, call, jnp.zeros_like(q))

    return run


def attention_tiles(decodes: bool, context: int) -> Iterator[dict[str, int]]:
    if decodes:
        for keys, warps, stages, splits, least in itertools.product(
            [32, 64], [1, 2, 4], [2, 3, 4], [1, 2, 4, 8, 16, 32], [64, 128, 256, 512]
        ):
            if warps == 1 and keys > 32:  # too many registers
                continue
            if least < keys or keys * stages * SIZE * 4 > shared_memory() or (splits == 1 and least > 64):
                continue
            if splits > 1 and not 1 <= context / least <= 2 * splits:
                continue
            yield dict(keys=keys, warps=warps, stages=stages, splits=splits, min_turns=least // keys)
        return
    for rows, keys, warps, stages in itertools.product([64, 128], [32, 64, 128], [4, 8], [2, 3, 4]):
        if keys * stages * SIZE * 4 + rows * SIZE * 2 <= shared_memory():
            yield dict(rows=rows, keys=keys, warps=warps, stages=stages)


def search(case: Case, limit: float, pool: concurrent.futures.Executor, show: int) -> None:
    """Times the kernel's own tile and as many candidates as `limit` seconds allow, in a random order."""
    tiles = [None, *random.Random(0).sample(case.candidates, len(case.candidates))]
    end, found, errors = time.monotonic() + limit, {}, 0
    ahead: dict[int, concurrent.futures.Future] = {}
    started, workers = 0, 2 * (os.cpu_count() or 1)
    for place, tile in enumerate(tiles):
        while started < min(len(tiles), place + workers) and (started == 0 or time.monotonic() < end):
            lowered = jax.jit(case.build(tiles[started])).lower(*case.arguments)
            ahead[started] = pool.submit(lowered.compile)
            started += 1
        if place not in ahead:
            break
        try:
            compiled = ahead.pop(place).result()
            found[place] = micros(compiled, case.arguments, repeats=4) / case.calls
        except Exception as error:  # too much shared memory, or too many registers: no candidate
            errors += 1
            if tile is None:
                print(json.dumps({**case.name, "tile": "own", "error": str(error)[:300]}), flush=True)

    def line(place: int, **more) -> None:
        tile = tiles[place]
        shown = "own" if tile is None else tile if isinstance(tile, dict) else dataclasses.asdict(tile)
        seconds = found[place] / 1e6
        rates = dict(
            us=round(found[place], 1),
            gb_s=round(case.amount["gb"] / seconds),
            tflop_s=round(case.amount["tflop"] / seconds, 1),
        )
        print(json.dumps({**case.name, **rates, "tile": shown, **more}), flush=True)

    if 0 in found:
        line(0, timed=len(found), failed=errors, of=len(tiles))
    for place in sorted(found, key=lambda place: found[place])[:show]:
        line(place)


def main() -> int:
    parser = argparse.ArgumentParser(description="Searches tiles of the kernels for the GPU of this machine.")
    parser.add_argument("kernel", choices=["matmul", "decode", "prefill"])
    parser.add_argument("--rows", default="1,64,256,2048", help="of matmuls")
    parser.add_argument("--cases", type=int, help="only the first of the cases of attention")
    parser.add_argument("--limit", default=120, type=float, help="seconds for all cases")
    parser.add_argument("--show", default=4, type=int, help="the fastest of each case that are printed")
    args = parser.parse_args()
    if args.kernel == "matmul":
        rows = [int(count) for count in args.rows.split(",")]
        make = functools.partial(matmul_cases, rows)
        number = len(rows) * len(MATMULS)
    else:
        make = functools.partial(attention_cases, args.kernel == "decode")
        number = args.cases or len(DECODE if args.kernel == "decode" else PREFILL)
    end = time.monotonic() + args.limit
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for index, case in enumerate(itertools.islice(make(), number)):
            search(case, (end - time.monotonic()) / (number - index), pool, args.show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
