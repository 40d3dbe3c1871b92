"""How near the engine comes to what the GPU of this machine can do, measured in one run.

    python scripts/gpu_roofline.py [--shape 8B] [--batch 1,8,32,64] [--vllm PYTHON] [--trace DIR]

JSON lines: the rates of the device (a copy's bandwidth, bfloat16 matmuls), a decode step for each batch as a share of
the time that the copy needs for its weights, keys and values, a prompt as a share of the matmuls' rate, and with
`--trace` the kernels of a step from a profile. `--vllm` names the Python of an environment with vLLM, which runs the
same prompts with random weights (scripts/peers/vllm_gpu.py). On a CPU it runs too, with `--shape tiny`, as a rehearsal.
"""

import argparse
import collections
import contextlib
import functools
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from levanter_infer.bench import workload  # noqa: E402
from levanter_infer.bench.report import provenance  # noqa: E402
from levanter_infer.bench.throughput import timed_call  # noqa: E402
from levanter_infer.engine.config import EngineConfig  # noqa: E402
from levanter_infer.engine.engine import InferenceEngine  # noqa: E402

SHAPES = {"8B": dict(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocab=128256), **workload.SHAPES}
MIN_DECODE, MIN_PREFILL = 0.85, 0.6
"""Targets, as shares of the copy's bandwidth and of the matmuls' rate."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Shares of what the device can do.")
    parser.add_argument("--shape", default="8B", choices=SHAPES)
    parser.add_argument("--batch", default="1,8,32,64", type=workload.numbers)
    parser.add_argument("--prompt", default=512, type=int, help="tokens of a prompt of the decode steps")
    parser.add_argument("--prefill", default=2048, type=int, help="tokens of each prompt whose prefill is measured")
    parser.add_argument("--output", default=128, type=int)
    parser.add_argument("--repeats", default=3, type=int)
    parser.add_argument("--backend", default="auto", help="engine.attention and engine.matmul")
    parser.add_argument("--megabytes", default=2048, type=int, help="size of the copied array")
    parser.add_argument("--matmul", default=8192, type=int, help="side of the matrices of the matmul that is measured")
    parser.add_argument("--vllm", help="Python of an environment with vLLM")
    parser.add_argument("--trace", help="folder for a profile")
    args = parser.parse_args()
    sizes, about = SHAPES[args.shape], provenance()

    def emit(**fields) -> None:
        print(json.dumps({"bench": "gpu_roofline", **fields, **about}), flush=True)

    copy, peak = copy_rate(args.megabytes << 20), matmul_rate(args.matmul)
    emit(check="device", copy_gb_s=round(copy / 1e9, 1), bf16_tflop_s=round(peak / 1e12, 1))
    model = workload.random_model(sizes, "bfloat16")
    for batch in args.batch:
        engine = engine_for(model, args, batch, args.prompt)
        prompts = workload.random_prompts(sizes["vocab"], [args.prompt] * batch, seed=batch)
        step = decode_step(functools.partial(timed_call, engine, prompts, "greedy"), args)
        needed = step_bytes(sizes, batch, args.prompt + args.output / 2)
        share = needed / step / copy
        emit(
            check="decode", batch=batch, step_ms=round(step * 1e3, 3), of_copy=round(share, 3), good=share >= MIN_DECODE
        )
        if args.trace is not None:
            emit(check="launches", batch=batch, **launches(engine, prompts, args, Path(args.trace) / str(batch)))
        del engine
    prompts = workload.random_prompts(sizes["vocab"], [args.prefill] * 4, seed=0)
    timed = functools.partial(timed_call, engine_for(model, args, len(prompts), args.prefill), prompts, "greedy")
    timed(1)
    seconds = min(timed(1)[0] for _ in range(args.repeats))
    share = prefill_flops(sizes, len(prompts), args.prefill) / seconds / peak
    emit(
        check="prefill", prompts=len(prompts), tokens=args.prefill, of_matmul=round(share, 3), good=share >= MIN_PREFILL
    )
    del model, timed
    for batch in args.batch if args.vllm else ():
        with vllm_side(args, sizes, batch) as timed:
            prompts = workload.random_prompts(sizes["vocab"], [args.prompt] * batch, seed=batch)
            step = decode_step(lambda count, timed=timed, prompts=prompts: timed(prompts, count), args)
        emit(check="vllm decode", batch=batch, step_ms=round(step * 1e3, 3))
    return 0


def best(function: Callable, *arguments, repeats: int = 5) -> float:
    """Seconds of a call, the least of several."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - begin)
    return min(times)


def copy_rate(num_bytes: int) -> float:
    """Bytes per second, read and written, of a copy of an array."""
    array = jnp.zeros(num_bytes // 4, jnp.uint32)
    return 2 * array.nbytes / best(jax.jit(lambda array: array + 1), array)


def matmul_rate(side: int) -> float:
    """Operations per second of a bfloat16 matmul."""
    key = jax.random.key(0)
    a, b = (jax.random.normal(part, (side, side), jnp.bfloat16) for part in jax.random.split(key))
    return 2 * side**3 / best(jax.jit(lambda a, b: a @ b), a, b)


def engine_for(model, args, batch: int, prompt: int) -> InferenceEngine:
    longest = workload.round_up(prompt + args.output + 2, 16)
    config = EngineConfig(
        max_seqs=batch, max_seq_len=longest, prefix_cache=False, attention=args.backend, matmul=args.backend
    )
    return InferenceEngine(model, config=config)


def decode_step(timed: Callable, args) -> float:
    """Seconds of one decode step: what more tokens take, divided by their number."""
    timed(1 + args.output)  # compiles
    more = [timed(1 + args.output)[0] - timed(1)[0] for _ in range(args.repeats)]
    return min(more) / args.output


def parameters(sizes: dict[str, int]) -> int:
    """Parameters that a step reads: the layers and the head, which is tied to the embeddings."""
    attention = sizes["hidden"] * _head_size(sizes) * 2 * (sizes["heads"] + sizes["kv_heads"])
    layer = attention + 3 * sizes["hidden"] * sizes["mlp"]
    return sizes["layers"] * layer + sizes["hidden"] * sizes["vocab"]


def step_bytes(sizes: dict[str, int], batch: int, context: float) -> float:
    """Bytes that a decode step has to read: weights, and the keys and values of every sequence."""
    return 2 * (parameters(sizes) + batch * context * 2 * sizes["layers"] * sizes["kv_heads"] * _head_size(sizes))


def prefill_flops(sizes: dict[str, int], prompts: int, tokens: int) -> float:
    """Operations of prompts: the layers' matmuls, and attention to the tokens before each; the head for one token."""
    layers = parameters(sizes) - sizes["hidden"] * sizes["vocab"]
    attention = 2 * tokens**2 * sizes["layers"] * sizes["heads"] * _head_size(sizes)
    return prompts * (2 * tokens * layers + attention + 2 * sizes["hidden"] * sizes["vocab"])


def _head_size(sizes: dict[str, int]) -> int:
    return sizes["hidden"] // sizes["heads"]


def launches(engine: InferenceEngine, prompts: list[list[int]], args, folder: Path) -> dict[str, object]:
    """Kernels of a decode step, from a profile of calls of two lengths.

    XLA runs no graphs while it is profiled, so that each of their kernels is seen.
    """
    counted = []
    for count in (1, 1 + args.output):
        own = folder / str(count)
        with jax.profiler.trace(str(own)):
            timed_call(engine, prompts, "greedy", count)
        counted.append(device_events(own))
    more = counted[1] - counted[0]
    per_step = {name: round(number / args.output, 2) for name, number in more.most_common(12)}
    return {"per_step": round(more.total() / args.output, 1), "most": per_step}


def device_events(folder: Path) -> collections.Counter[str]:
    """Number of events on the streams of devices, by name, in a profile; all events where there is no device."""
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    devices = {pid for pid, name in processes.items() if "/device:" in name} or set(processes)
    is_stream = {key for key, name in threads.items() if "Stream" in name} or set(threads)
    return collections.Counter(
        e["name"] for e in events if e.get("ph") == "X" and e["pid"] in devices and (e["pid"], e["tid"]) in is_stream
    )


@contextlib.contextmanager
def vllm_side(args, sizes: dict[str, int], batch: int):
    """vLLM in a process of its own; yields `(prompts, count) -> (seconds, tokens)`."""
    config = {**workload.hf_config(sizes), "torch_dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        command = [args.vllm, str(ROOT / "scripts" / "peers" / "vllm_gpu.py")]
        side = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        asks, answers = side.stdin, side.stdout
        assert asks is not None and answers is not None

        def ask(message: dict) -> dict:
            print(json.dumps(message), file=asks, flush=True)
            line = answers.readline()
            if not line:
                raise SystemExit(f"vLLM ended with status {side.wait()}; its messages are above")
            return json.loads(line)

        def timed(prompts: list[list[int]], count: int) -> tuple[float, list]:
            answer = ask({"prompts": prompts, "count": count})
            return answer["seconds"], answer["tokens"]

        try:
            setup = dict(checkpoint=folder, dtype="bfloat16", batch=batch, prompt=args.prompt, output=args.output + 1)
            ask({**setup, "threads": 1})
            yield timed
        finally:
            asks.close()
            side.wait()


if __name__ == "__main__":
    sys.exit(main())
