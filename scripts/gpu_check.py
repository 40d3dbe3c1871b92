"""The kernels for attention and sampling on the GPU of this machine: are they right, and how fast?

Needs jax with CUDA and NumPy, and for sampling also haliax and equinox. One JSON line per case; ends with 1 if a result
is wrong.

python scripts/gpu_check.py                              parity, then speed
python scripts/gpu_check.py --invariant                  requests alone and together, bit by bit
python scripts/gpu_check.py --sampling                   sampling's kernels beside XLA's code and a sort
python scripts/gpu_check.py --speed --tile keys=32,warps=8   with other tiles than the kernel chooses
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]
from tests.kernels.ragged import Sizes, attend, make_ragged  # noqa: E402

from levanter_infer.kernels.call import AttentionCall  # noqa: E402
from levanter_infer.kernels.gpu import attention as rpa_gpu  # noqa: E402
from levanter_infer.kernels.registry import make_backend  # noqa: E402
from levanter_infer.kernels.rules import ScoreRules  # noqa: E402

PEAK_GB_S = {"H200": 4800, "H100": 3350, "A100": 2039, "B200": 8000}
"""Memory bandwidth by a part of the device's name."""


MIXED = [(1, 2900), (200, 900), (1, 17), (64, 64), (1, 300)]
MANY = [(4 if row == 7 else 1, 16 * (row + 1)) for row in range(56)]
"""Enough rows for the tile of many programs, in a step that has one lane and in one that has two, with splits and
without."""


def parity() -> int:
    """Every head size, page size and dtype, mixed batches and many rows, all rules; the `reference` on the same device
    is right."""
    wrong = 0
    for head_dim, page_size in ((64, 8), (96, 32), (128, 16), (256, 256)):
        for dtype in ("float32", "bfloat16", "float16"):
            mixed = [(heads, kv_heads, 8, 400, 3000, MIXED) for heads, kv_heads in ((8, 8), (9, 3), (32, 8), (71, 1))]
            many = [(32, 8, 56, tokens, longest, MANY) for tokens in (60, 80) for longest in (1024, 2048)]
            for heads, kv_heads, rows, tokens, longest, requests in mixed + (many if head_dim <= 128 else []):
                sizes = Sizes(heads, kv_heads, head_dim, page_size, rows=rows, tokens=tokens, dtype=dtype)
                sizes = dataclasses.replace(sizes, max_pages=-(-longest // page_size))
                batch = make_ragged(sizes, requests)
                arrays = dict(batch.arrays, q=batch.arrays["q"].astype(dtype), sliding_window=jnp.int32(1500))
                arrays.update(sinks=jnp.ones(heads), alibi_slopes=jnp.full(heads, 0.01))
                arrays["q"] = jnp.where(jnp.isnan(arrays["q"]), 0, arrays["q"])

                def run(arrays, impl, dtype=dtype, head_dim=head_dim):
                    static = dict(scale=head_dim**-0.5, soft_cap=30.0, kv_dtype=dtype, impl=impl)
                    return attend(**arrays, **static)

                out, right = (
                    np.asarray(jax.jit(functools.partial(run, impl=impl))(arrays), np.float32)
                    for impl in ("gpu", "reference")
                )
                error, allowed = float(np.abs(out - right).max()), 1e-5 if dtype == "float32" else 2e-2
                good = error <= allowed  # NaN is not
                wrong += not good
                case = dict(head_dim=head_dim, page_size=page_size, dtype=dtype, heads=heads, kv_heads=kv_heads)
                case |= dict(rows=rows, tokens=tokens, longest=longest)
                print(json.dumps({"check": "parity", "good": good, "error": error, "allowed": allowed, **case}))
    return wrong


def speed(tile: dict[str, int], impls: list[str], layers: int = 16, repeats: int = 5) -> None:
    """Decode and chunks of a model of 32 heads, 8 kv heads of 128, bf16; every call reads another layer."""
    if tile:
        chosen = rpa_gpu.lanes

        def other(**sizes):
            return tuple(dataclasses.replace(lane, **tile) for lane in chosen(**sizes))

        rpa_gpu.lanes = other
    device = jax.devices()[0].device_kind
    peak = next((value for name, value in PEAK_GB_S.items() if name in device), None)
    cases = [(1, 1, 1024), (1, 1, 32768), (32, 1, 1024), (32, 1, 8192), (256, 1, 1024), (1, 2048, 2048), (4, 256, 4096)]
    for impl in impls:
        for rows, q_len, context in cases:
            seconds, read = _seconds(impl, rows, q_len, context, layers, repeats)
            flops = 4 * rows * q_len * (context - q_len / 2) * 32 * 128
            report = {"us": round(seconds * 1e6, 1), "gb_s": round(read / seconds / 1e9), "of_peak": None}
            if peak:
                report["of_peak"] = round(read / seconds / 1e9 / peak, 3)
            report["tflop_s"] = round(flops / seconds / 1e12, 1)
            case = dict(impl=impl, rows=rows, q_len=q_len, context=context, tile=tile, device=device)
            print(json.dumps({"check": "speed", **report, **case}), flush=True)


def _seconds(impl: str, rows: int, q_len: int, context: int, layers: int, repeats: int) -> tuple[float, int]:
    """Seconds of one call, best of `repeats`, and the bytes of keys and values that it has to read."""
    heads, kv_heads, dim, page_size = 32, 8, 128, 16
    each = context // page_size
    pool = jnp.zeros((layers, rows * each, page_size, 2 * kv_heads, dim), jnp.bfloat16) + jnp.bfloat16(0.1)
    pages = jnp.asarray(np.random.default_rng(0).permutation(rows * each).reshape(rows, each), jnp.int32)
    bounds = jnp.arange(rows + 1, dtype=jnp.int32) * q_len
    lens = jnp.full(rows, context, jnp.int32)

    def run(q, pool):
        def call(index, q):
            call = AttentionCall(
                q=q,
                kv_pages=pool,
                layer=index % layers,
                page_indices=pages,
                seq_lens=lens,
                cu_q_lens=bounds,
                num_seqs=jnp.int32(rows),
                rules=ScoreRules(scale=dim**-0.5),
                kv_dtype=pool.dtype,
                kv_heads=kv_heads,
                page_size=page_size,
            )
            return make_backend(impl).attend(call)

        return jax.lax.fori_loop(0, 4 * layers, call, q)

    jitted, q = jax.jit(run), jnp.ones((rows * q_len, heads, dim), jnp.bfloat16)
    jax.block_until_ready(jitted(q, pool))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(jitted(q, pool))
        times.append((time.perf_counter() - start) / (4 * layers))
    return min(times), rows * context * 2 * kv_heads * dim * 2


def sampling(sizes: list[tuple[int, int]], repeats: int = 5) -> int:
    """Thresholds beside a sort, tokens beside XLA's code, and the time of both, for (rows, vocabulary).

    A token would differ only where two arrivals are equal to within the rounding of an exponential or a division, which
    are Triton's in the kernels: one in a million.
    """
    from levanter_infer.decode.sampling_draw import draw, draw_rows, num_words, random_words
    from levanter_infer.decode.sampling_filters import filter_thresholds
    from levanter_infer.kernels.backend import DrawKey, DrawRules
    from levanter_infer.kernels.gpu.sampling import GpuSampling

    own, wrong = GpuSampling(jax.default_backend() != "gpu"), 0
    for rows, vocab in sizes:
        rng = np.random.default_rng(rows)
        scales = np.resize([0.05, 1.0, 3.0, 6.0], rows)[:, None]  # flat rows, which are searched, and peaked ones
        logits = (rng.standard_normal((rows, vocab)) * scales).astype(np.float32)
        logits[::5] = np.round(logits[::5] * 4) / 4  # ties
        top_k = np.resize([0, 40, 0, 5000, 1, 0], rows).astype(np.int32)
        top_p = np.resize([0.9, 1.0, 0.3, 0.8, 1.0, 1.0, 0.999], rows).astype(np.float32)
        peak, ones = jnp.asarray(logits.max(axis=1)), jnp.ones(rows, jnp.float32)
        rules = DrawRules(peak, ones, -80 * ones, jnp.asarray(top_k), jnp.asarray(top_p), jnp.ones(rows, jnp.int32))
        key = DrawKey(jnp.ones((rows, 2), jnp.uint32), jnp.arange(rows, dtype=jnp.int32), jnp.zeros(rows, jnp.int32))

        @jax.jit
        def by_kernels(z, rules, key):
            threshold = own.thresholds(z, rules)
            return threshold, *draw_rows(own, z, rules, threshold, key)

        @jax.jit
        def by_xla(z, rules, key):
            def weigh(z, least: Array | float = -jnp.inf):
                return jnp.where(z >= least, jnp.exp(z - rules.peak[:, None]), 0)

            counts = jnp.where(rules.top_k == 0, z.shape[1], rules.top_k)
            threshold = filter_thresholds(z, weigh, counts, rules.top_p)
            least = threshold[:, None]
            words = random_words(key.seed, key.sample_index, key.position, num_words(z.shape[1]))
            token, _ = draw(weigh(z, least), lambda ids: weigh(jnp.take_along_axis(z, ids, 1, "fill"), least), words)
            return threshold, token

        arguments = jnp.asarray(logits), rules, key
        (threshold, token, logprob), (_, wanted) = by_kernels(*arguments), by_xla(*arguments)
        kept = [_keeps(*row) for row in zip(logits, np.asarray(threshold), top_k, top_p, strict=True)]
        differ = int(np.sum(np.asarray(token) != np.asarray(wanted)))
        good = all(kept) and differ == 0 and bool(np.all(np.isfinite(np.asarray(logprob))))
        wrong += not good
        times = {name: micros(call, arguments, repeats) for name, call in (("us", by_kernels), ("xla_us", by_xla))}
        case = dict(rows=rows, vocab=vocab, differ=differ, thresholds=sum(kept))
        print(json.dumps({"check": "sampling", "good": good, **case, **times}), flush=True)
    return wrong


def invariant(shape: str, requests: int) -> int:
    """Tokens and the bits of log probabilities of requests alone, and in two batches of different order, with
    `numerics: batch_invariant`."""
    from levanter_infer import EngineConfig, InferenceEngine, Request, SamplingParams
    from levanter_infer.bench import workload

    sizes, rng = workload.SHAPES[shape], np.random.default_rng(0)
    config = EngineConfig(max_seqs=32, max_seq_len=1024, prefix_cache=False, numerics="batch_invariant")
    engine = InferenceEngine(workload.random_model(sizes, "bfloat16"), config=config)
    asked = []
    for index in range(requests):
        prompt = rng.integers(2, sizes["vocab"], int(rng.integers(1, 900))).tolist()
        sampling = SamplingParams(max_tokens=int(rng.integers(1, 80)), temperature=0.8, seed=index, logprobs=0)
        asked.append(Request(prompt_token_ids=prompt, sampling=sampling))

    def found(requests) -> list:
        done = [output.completions[0] for output in engine.generate(requests)]
        return [(each.token_ids, np.asarray(each.logprobs, np.float32).tobytes()) for each in done]

    alone = [found([request])[0] for request in asked]
    differing = 0
    for _ in range(2):
        order = rng.permutation(len(asked))
        together = found([asked[place] for place in order])
        differing += sum(together[index] != alone[place] for index, place in enumerate(order))
    tokens = sum(len(tokens) for tokens, _ in alone)
    case = dict(shape=shape, requests=requests, tokens=tokens, comparisons=2 * requests, differing=differing)
    print(json.dumps({"check": "invariant", "good": differing == 0, **case}), flush=True)
    return differing


def _keeps(logits: np.ndarray, threshold, top_k, top_p) -> bool:
    """Whether a threshold is that of a sort, where the masses of top_p may be off by rounding."""
    ordered = np.sort(logits)[::-1]
    kth = ordered[top_k - 1] if top_k else -np.inf
    if top_p >= 1:
        return bool(threshold == kth)
    mass = np.exp(ordered.astype(np.float64) - ordered[0]) * (ordered >= kth)
    share = np.cumsum(mass) / mass.sum()
    above, kept = (int(np.sum(op(ordered, threshold))) for op in (np.greater, np.greater_equal))
    before = share[above - 1] if above else 0.0
    return bool(threshold >= kth and before < top_p + 1e-5 and share[kept - 1] >= top_p - 1e-5)


def micros(call, arguments: tuple, repeats: int) -> float:
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - start)
    return round(min(times) * 1e6, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parity", action="store_true", help="only this")
    parser.add_argument("--speed", action="store_true", help="only this")
    parser.add_argument("--sampling", action="store_true", help="only this")
    parser.add_argument("--invariant", action="store_true", help="only this")
    parser.add_argument("--shape", default="S", help="of --invariant: a shape of the benchmarks")
    parser.add_argument("--requests", default=100, type=int, help="of --invariant")
    parser.add_argument("--impl", default="gpu,xla", help="whose speed; default gpu,xla")
    parser.add_argument("--tile", default="", help="fields of rpa_gpu.Tile for both lanes, name=value,…")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit(f"JAX runs on {jax.default_backend()} here; this needs an NVIDIA GPU and jax with CUDA")
    if args.invariant:
        return 1 if invariant(args.shape, args.requests) else 0
    if args.sampling:
        sizes = [(rows, vocab) for rows in (1, 8, 64, 256) for vocab in (32_000, 128_256, 151_936, 262_144)]
        return 1 if sampling(sizes) else 0
    both = args.parity == args.speed
    wrong = parity() if both or args.parity else 0
    if both or args.speed:
        tile = dict(part.split("=") for part in args.tile.split(",") if part)
        speed({name: int(value) for name, value in tile.items()}, args.impl.split(","))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
