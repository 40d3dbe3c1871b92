"""How near the engine comes to what the GPU of this machine can do, measured in one run.

    python scripts/gpu_roofline.py [--shape 8B] [--batch 1,8,32,64] [--engines 3] [--forms default,loops]
                                   [--vllm PYTHON] [--trace DIR]

JSON lines: the rates of the device (a copy's bandwidth, bfloat16 matmuls), a decode step for each batch as a share of
the time that the copy needs for its weights, keys and values, a prompt as a share of the matmuls' rate, and with
`--trace` the kernels of a step from a profile. Engines of one process differ in speed: `--engines` measures several.
`--forms` measures engines of several forms in turn, repeat by repeat: `default`; `loops`, optional work as loops
(decision 0058); `decode:KEYS:WARPS:STAGES[:SPLIT]`, with this tile of attention for decode tokens, and with so many
keys in the shortest split.
`--vllm` names the Python of an environment with vLLM, which runs the same prompts in turn, with random weights
(scripts/peers/vllm_gpu.py), in the memory that XLA_PYTHON_CLIENT_MEM_FRACTION leaves: 0.5 for an 8B and 80 GB. On a CPU
it runs too, with `--shape tiny`, as a rehearsal.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402

from levanter_infer.bench import workload  # noqa: E402
from levanter_infer.bench.report import provenance  # noqa: E402
from levanter_infer.bench.throughput import timed_call  # noqa: E402
from levanter_infer.engine.config import EngineConfig  # noqa: E402
from levanter_infer.engine.engine import InferenceEngine  # noqa: E402
from levanter_infer.kernels import registry  # noqa: E402
from levanter_infer.kernels.gpu import attention  # noqa: E402

SHAPES = {"8B": dict(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocab=128256), **workload.SHAPES}
Counts = collections.Counter[str]

MIN_DECODE, MIN_PREFILL = 0.85, 0.6
"""Targets, as shares of the copy's bandwidth and of the matmuls' rate."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Shares of what the device can do.")
    parser.add_argument("--shape", default="8B", choices=SHAPES)
    parser.add_argument("--batch", default="1,8,32,64", type=workload.numbers)
    parser.add_argument("--prompt", default=512, type=int, help="tokens of a prompt of the decode steps")
    parser.add_argument(
        "--prefill", default=2048, type=int, help="tokens of each prompt whose prefill is measured; 0: none"
    )
    parser.add_argument("--output", default=128, type=int)
    parser.add_argument("--repeats", default=5, type=int)
    parser.add_argument("--engines", default=1, type=int, help="engines that are measured for each batch, one by one")
    parser.add_argument(
        "--forms", default=["default"], type=lambda text: text.split(","), help="forms to measure in turn"
    )
    parser.add_argument("--backend", default="auto", help="engine.attention and engine.matmul")
    parser.add_argument("--numerics", default="default", help="engine.numerics")
    parser.add_argument("--megabytes", default=2048, type=int, help="size of the copied array")
    parser.add_argument("--matmul", default=8192, type=int, help="side of the matrices of the matmul that is measured")
    parser.add_argument("--vllm", help="Python of an environment with vLLM")
    parser.add_argument("--trace", help="folder for a profile")
    parser.add_argument("--kernels", default=24, type=int, help="how many kernels of a profile are named")
    args = parser.parse_args()
    try:
        for form in args.forms:
            in_form(form)
        if len(set(args.forms)) < len(args.forms):
            raise ValueError(f"--forms: got {','.join(args.forms)}, expected each form once; --engines repeats them")
    except ValueError as error:
        parser.error(str(error))
    sizes, about = SHAPES[args.shape], provenance()

    def emit(**fields) -> None:
        print(json.dumps({"bench": "gpu_roofline", **fields, **about}), flush=True)

    copy, peak = copy_rate(args.megabytes << 20), matmul_rate(args.matmul)
    emit(check="device", numerics=args.numerics, copy_gb_s=round(copy / 1e9, 1), bf16_tflop_s=round(peak / 1e12, 1))
    model = workload.random_model(sizes, "bfloat16")
    for batch in args.batch:
        prompts = workload.random_prompts(sizes["vocab"], [args.prompt] * batch, seed=batch)
        needed = step_bytes(sizes, batch, args.prompt + args.output * 5 / 8)
        engines, others = {}, {}
        with contextlib.ExitStack() as stack:
            if args.vllm:
                others["vllm"] = functools.partial(stack.enter_context(vllm_side(args, sizes, batch)), prompts)
            for _ in range(args.engines):
                engines.clear()  # before the next ones take their memory
                for form in args.forms:
                    engines[form] = engine_for(model, args, batch, args.prompt, form)
                ours = {form: functools.partial(timed_call, each, prompts, "greedy") for form, each in engines.items()}
                for side, steps in decode_steps({**ours, **others}, args).items():
                    share = needed / statistics.median(steps) / copy
                    names = {"check": "vllm decode"} if side in others else {"check": "decode", "form": side}
                    emit(**names, batch=batch, **spread(steps), of_copy=round(share, 3), good=share >= MIN_DECODE)
                del ours
        for form in engines if args.trace is not None else ():
            folder = Path(args.trace) / str(batch) / form.replace(":", "-")
            emit(check="launches", form=form, batch=batch, **launches(engines[form], prompts, args, folder))
        del engines
    if args.prefill:
        prompts = workload.random_prompts(sizes["vocab"], [args.prefill] * 4, seed=0)
        engine = engine_for(model, args, len(prompts), args.prefill, "default")
        timed_call(engine, prompts, "greedy", 1)
        seconds = min(timed_call(engine, prompts, "greedy", 1)[0] for _ in range(args.repeats))
        share = prefill_flops(sizes, len(prompts), args.prefill) / seconds / peak
        about_it = dict(prompts=len(prompts), tokens=args.prefill, ms=round(seconds * 1e3, 2))
        emit(check="prefill", **about_it, of_matmul=round(share, 3), good=share >= MIN_PREFILL)
        if args.trace is not None:
            counted = profiled(engine, prompts, 1, Path(args.trace) / "prefill")
            emit(check="prefill launches", **summary(*counted, 1, args.kernels))
        del engine
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


TIMES = 10
"""Copies or matmuls in one timed call, beside which its launch is nothing."""


def copy_rate(num_bytes: int) -> float:
    """Bytes per second, read and written, of a copy of an array."""
    array = jnp.zeros(num_bytes // 4, jnp.uint32)
    copies = jax.jit(lambda array: jax.lax.fori_loop(0, TIMES, lambda _, array: array + 1, array))
    return 2 * TIMES * array.nbytes / best(copies, array)


def matmul_rate(side: int) -> float:
    """Operations per second of a bfloat16 matmul."""
    key = jax.random.key(0)
    a, b = (jax.random.normal(part, (side, side), jnp.bfloat16) for part in jax.random.split(key))
    matmuls = jax.jit(lambda a, b: jax.lax.fori_loop(0, TIMES, lambda _, a: a @ b * 0.01, a))
    return 2 * TIMES * side**3 / best(matmuls, a, b)


def in_form(form: str) -> contextlib.AbstractContextManager:
    """A context in which engines are compiled in this form. Raises: ValueError for one that is not known."""
    match form.split(":"):
        case ["default"]:
            return contextlib.nullcontext()
        case ["loops"]:
            platforms = {name: dataclasses.replace(each, branches=False) for name, each in registry.PLATFORMS.items()}
            return mock.patch.dict(registry.PLATFORMS, platforms)
        case ["decode", *numbers] if len(numbers) in (3, 4) and all(n.isdigit() and int(n) for n in numbers):
            keys, warps, stages, *least = map(int, numbers)
            if least and (least[0] < keys or least[0] % keys):
                raise ValueError(f"--forms: got {form!r}, expected a multiple of {keys} keys as the shortest split")
            lanes = attention.lanes

            def changed(**sizes) -> tuple[attention.Tile, attention.Tile]:
                decode, prefill = lanes(**sizes)
                shortest = least[0] if least else decode.min_turns * decode.keys  # splits of the same length
                tile = dict(keys=keys, warps=warps, stages=stages, min_turns=max(1, shortest // keys))
                if least:
                    splits = -(-sizes["max_tokens"] // shortest)
                    tile["splits"] = min(attention.MAX_SPLITS, pl.next_power_of_2(splits))
                return dataclasses.replace(decode, **tile), prefill

            return mock.patch.object(attention, "lanes", changed)
    raise ValueError(f"--forms: got {form!r}, expected default, loops or decode:KEYS:WARPS:STAGES[:SPLIT]")


def engine_for(model, args, batch: int, prompt: int, form: str) -> InferenceEngine:
    longest = workload.round_up(prompt + args.output + 2, 16)
    kernels = dict(attention=args.backend, matmul=args.backend, numerics=args.numerics)
    pages = batch * longest // 16  # the same whatever memory other engines leave
    config = EngineConfig(max_seqs=batch, max_seq_len=longest, max_pages=pages, prefix_cache=False, **kernels)
    jax.clear_caches()  # of functions that were traced in another form
    with in_form(form):
        engine = InferenceEngine(model, config=config)
        engine.warmup()
    return engine


def decode_steps(sides: dict[str, Callable], args) -> dict[str, list[float]]:
    """Seconds of one decode step of each side, for each repeat, the sides in turn: what more tokens take, divided by
    their number. The shorter call has decoded a quarter of the tokens, so that both have computed all prompts beside
    the same decode tokens."""
    few = args.output // 4
    for timed in sides.values():
        timed(1 + args.output)  # compiles
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, timed in sides.items():
            more = timed(1 + args.output)[0] - timed(1 + few)[0]
            found[name].append(more / (args.output - few))
    return found


def spread(steps: list[float]) -> dict[str, float]:
    """Milliseconds: the median, the least and the most."""
    found = dict(step_ms=statistics.median(steps), least_ms=min(steps), most_ms=max(steps))
    return {name: round(seconds * 1e3, 3) for name, seconds in found.items()}


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
    """Kernels of a decode step and their microseconds, from a profile of calls of two lengths.

    XLA runs no graphs while it is profiled, so that each of their kernels is seen.
    """
    few = args.output // 4
    counted = [profiled(engine, prompts, count, folder / str(count)) for count in (1 + few, 1 + args.output)]
    numbers, micros = (more - less for less, more in zip(*counted, strict=True))
    return summary(numbers, micros, args.output - few, args.kernels)


def profiled(engine: InferenceEngine, prompts: list[list[int]], count: int, folder: Path) -> tuple[Counts, Counts]:
    """`device_events` of a call."""
    with jax.profiler.trace(str(folder)):
        timed_call(engine, prompts, "greedy", count)
    return device_events(folder)


def summary(numbers: Counts, micros: Counts, steps: int, most: int) -> dict[str, object]:
    """Launches and microseconds of a step, and those of the kernels that take most time."""
    named = {name: [round(numbers[name] / steps, 2), round(time / steps, 2)] for name, time in micros.most_common(most)}
    return {"per_step": round(numbers.total() / steps, 1), "us": round(micros.total() / steps, 1), "most": named}


def device_events(folder: Path) -> tuple[Counts, Counts]:
    """Number and microseconds of events on the streams of devices, by name, in a profile; all events where there is no
    device."""
    path = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    devices = {pid for pid, name in processes.items() if "/device:" in name} or set(processes)
    is_stream = {key for key, name in threads.items() if "Stream" in name} or set(threads)
    numbers, micros = collections.Counter(), collections.Counter()
    for e in events:
        if e.get("ph") == "X" and e["pid"] in devices and (e["pid"], e["tid"]) in is_stream:
            numbers[e["name"]] += 1
            micros[e["name"]] += e["dur"]
    return numbers, micros


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
