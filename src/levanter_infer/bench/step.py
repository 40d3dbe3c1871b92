"""One decode step beside the limits of memory and arithmetic, and where its time goes; of the C++ kernels for CPUs.

The step is the difference between the calls of two lengths, as in `throughput`. The bound is the time to read all
weights, and the keys and values of all sequences, or to multiply with the weights, at rates that are measured in turn
with the calls (`bench/limits.py`). The parts are of one more call under JAX's profiler, by XLA's own events: each
kernel by name, what XLA computes itself by scope, and `between`, what the step takes beyond them: the start of each
operation, and waits. `host_ms` is a call's time outside of its programs, of which a round has one.
"""

import argparse
import collections
import dataclasses
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData, ProfileOptions

from levanter_infer.bench.instruction_sets import multiplying_isa
from levanter_infer.bench.limits import Bound, Probe, share_of_bound
from levanter_infer.bench.matmul import parameters_of
from levanter_infer.bench.report import digest, emit, provenance, summarize
from levanter_infer.bench.throughput import timed_call
from levanter_infer.bench.workload import (
    SAMPLING,
    add_model_arguments,
    model_sizes,
    numbers,
    random_model,
    random_prompts,
    round_up,
)
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.kernels import scopes
from levanter_infer.plan.hlo import operation_of, scopes_of

BETWEEN = "between"
_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_TARGET = re.compile(r'custom_call_target="levanter_infer_(\w+)"')
_AROUND = {"while", "conditional", "call"}
"""Operations that only run others."""
_LINE = "XLAEigen"
"""Part of the name of the profile's lines for the threads that run a program."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=numbers, default=(1, 32), help="sequences; default 1,32")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens; default 128")
    parser.add_argument("--output", type=int, default=32, help="generated tokens; default 32")
    parser.add_argument("--mode", choices=SAMPLING, default="greedy", help="sampling; default greedy")
    parser.add_argument("--cpu-isa", default="auto", help="engine.cpu_isa; default auto")
    parser.add_argument("--repeats", type=int, default=5)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print one line per batch."""
    about, probe = provenance(), Probe()
    model = random_model(model_sizes(args), args.dtype)
    for batch in args.batch:
        longest = round_up(args.prompt + args.output + 1, 16)
        options = dict(attention="cpu", matmul="cpu", cpu_isa=args.cpu_isa, prefix_cache=False)
        engine = InferenceEngine(model, config=EngineConfig(max_seqs=batch, max_seq_len=longest, **options))
        line = measure(engine, args, batch, probe)
        config = {"model": model_sizes(args), "dtype": args.dtype, "sampling": SAMPLING[args.mode]}
        emit({"bench": "step", **line, "config": {**config, "cpu_isa": engine.backend.isa}, **about})
    emit({"bench": "step", "limits": probe.measured(), **about})


def measure(engine: InferenceEngine, args: argparse.Namespace, batch: int, probe: Probe) -> dict[str, object]:
    """The fields of one line."""
    sizes = model_sizes(args)
    prompts = random_prompts(sizes["vocab"], [args.prompt] * batch, seed=batch)

    def call(output: int) -> float:
        return timed_call(engine, prompts, args.mode, output)[0]

    call(1 + args.output)  # compiles
    work = Work.of(engine.model, sizes, args.dtype, batch, args.prompt + args.output // 2)
    isa = multiplying_isa(engine.backend.isa, args.dtype)
    times, bounds = [], []
    for _ in range(args.repeats):
        gbps, gflops = probe.gbps(), probe.gflops(isa)
        short = call(1)
        times.append(1e3 * (call(1 + args.output) - short) / args.output)
        bounds.append(Bound.of(work.weights_bytes + work.kv_bytes, work.flops, gbps, gflops))
    known = min(times) > 0
    parts, host_ms = profiled(engine, lambda: call(1 + args.output), args.output, batch)
    if known:
        parts[BETWEEN] = statistics.median(times) - sum(parts.values())
    return {
        "batch": batch,
        "context": args.prompt + args.output // 2,
        **dataclasses.asdict(work),
        "step_ms": summarize(times, 4) if known else None,
        **(share_of_bound(times, bounds) if known else {}),
        "parts_ms": {name: round(ms, 4) for name, ms in sorted(parts.items(), key=lambda item: -item[1])},
        "host_ms": round(host_ms, 3),
        "workload_hash": digest([prompts, args.mode, args.output]),
    }


@dataclasses.dataclass(frozen=True)
class Work:
    """What a decode step has to read and compute."""

    weights_bytes: int
    kv_bytes: int
    flops: int
    """Of the matmuls with weights."""

    @classmethod
    def of(cls, model, sizes: dict[str, int], dtype: str, batch: int, context: int) -> "Work":
        itemsize, layers = jnp.dtype(dtype).itemsize, sizes["layers"]
        count = sum(each * (1 if name == "head" else layers) for name, each in parameters_of(model).items())
        head_dim = sizes["hidden"] // sizes["heads"]
        kv = batch * context * layers * 2 * sizes["kv_heads"] * head_dim * itemsize
        return cls(count * itemsize, kv, 2 * batch * count)


def profiled(
    engine: InferenceEngine, call: Callable[[], float], steps: int, batch: int
) -> tuple[dict[str, float], float]:
    """Milliseconds of the parts of a decode step, in a call under the profiler, and those of the call outside of its
    programs.

    Args:
        call: returns its seconds; of a prompt's step, and `steps` decode steps.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            seconds = call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = ProfileData.from_file(str(file))
    threads = [
        [(event.name, event.start_ns, event.end_ns) for event in line.events]
        for plane in data.planes
        for line in plane.lines
        if _LINE in (line.name or "")
    ]
    parts: collections.Counter[str] = collections.Counter()
    named = dict(parts_of(engine.programs.compiled_round.as_text() or "", batch))
    for thread in threads:
        for name, start, end in thread:
            if name in named:
                parts[named[name]] += (end - start) / 1e6 / steps
    spans = [(start, end) for thread in threads for _, start, end in thread]
    return dict(parts), 1e3 * seconds - union(spans) / 1e6


def parts_of(hlo: str, batch: int) -> Iterator[tuple[str, str]]:
    """Operations of a round's program that compute, and the part that each belongs to; those for steps of more tokens
    than `batch` left out."""
    lines = hlo.splitlines()
    buckets = {size for line in lines for scope in scopes_of(line) if (size := scopes.bucket_of(scope)) is not None}
    bucket = min((size for size in buckets if size >= batch), default=max(buckets, default=0))
    for line in lines:
        operation, path, name = operation_of(line), scopes_of(line), _NAME.match(line)
        if operation is None or name is None or operation in _AROUND:
            continue
        sizes = [size for scope in path if (size := scopes.bucket_of(scope)) is not None]
        if any(size != bucket for size in sizes):
            continue
        yield name[1], _part(line, path, bool(sizes))


def _part(line: str, path: Sequence[str], in_model: bool) -> str:
    target = _TARGET.search(line)
    if target is None:
        known = [each for each in path if each in _SCOPES]
        return f"xla: {known[0] if known else 'model' if in_model else 'round'}"
    if target[1] != "linear":
        return target[1]
    if scopes.SAMPLING in path:
        return "linear: head"
    if "has_gate = true" in line:
        return "linear: down"
    if "has_residual = true" in line:
        return "linear: out"
    return "linear: qkv" if line.split(" custom-call(")[0].count("f32[") == 3 else "linear: gate_up"


_SCOPES = {
    scopes.SCHEDULE, scopes.COPIES, scopes.SCORING, scopes.SAMPLING, scopes.APPEND, scopes.KV_WRITE, scopes.ATTENTION,
}  # fmt: skip


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what at least one of the spans covers."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
