"""One decode step beside the limits of memory and arithmetic, and where its time goes; of the C++ kernels for CPUs.

The step is the difference between the calls of two lengths, as in `throughput`, with prompts in the prefix cache:
what they take varies by less than a step, also with 128k tokens. The bound is the time to read all weights, and the
keys and values of all sequences, or to multiply with the weights, at rates that are measured in turn with the calls
(`bench/limits.py`). The parts are of one more pair of calls under JAX's profiler, by XLA's own events:
each kernel by name, what XLA computes itself by scope, and `between`, what a step takes beyond them: the start of each
operation, waits, and the host's work between rounds.
"""

import argparse
import collections
import dataclasses
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData, ProfileOptions

from levanter_infer.bench.instruction_sets import multiplying_isa
from levanter_infer.bench.limits import Probe, share_of_bound
from levanter_infer.bench.matmul import parameters_of
from levanter_infer.bench.report import digest, emit, provenance, summarize
from levanter_infer.bench.throughput import timed_call
from levanter_infer.bench.workload import (
    SAMPLING,
    add_model_arguments,
    add_weight_dtype,
    count,
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

PAGE_SIZE = 16
BETWEEN = "between"
_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_TARGET = re.compile(r'custom_call_target="levanter_infer_(\w+)"')
_AROUND = {"while", "conditional", "call"}
"""Operations that only run others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=numbers, default=(1, 32), help="sequences; default 1,32")
    parser.add_argument("--prompt", type=numbers, default=(128,), help="prompt tokens; default 128")
    parser.add_argument("--output", type=count, default=32, help="generated tokens; default 32")
    parser.add_argument("--mode", choices=SAMPLING, default="greedy", help="sampling; default greedy")
    parser.add_argument("--cpu-isa", default="auto", help="engine.cpu_isa; default auto")
    parser.add_argument("--repeats", type=count, default=5)
    add_weight_dtype(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print one line per batch and number of prompt tokens."""
    jax.config.update("jax_platforms", "cpu")  # with libtpu and no TPU, JAX's profiler ends with a segmentation fault
    about, probe = provenance(), Probe()
    longest_of = {prompt: round_up(prompt + args.output + 1, PAGE_SIZE) for prompt in args.prompt}
    model = random_model(model_sizes(args), args.dtype, max_positions=max(longest_of.values()))
    for batch, prompt in itertools.product(args.batch, args.prompt):
        longest = longest_of[prompt]
        options = EngineConfig(
            max_seqs=batch,
            max_seq_len=longest,
            page_size=PAGE_SIZE,
            max_pages=2 * batch * longest // PAGE_SIZE,  # so that prompts stay in the prefix cache
            prefix_cache=True,
            attention="cpu",
            matmul="cpu",
            cpu_isa=args.cpu_isa,
            weight_dtype=args.weight_dtype,
        )
        engine = InferenceEngine(model, config=options)
        line = measure(engine, args, batch, prompt, probe)
        config = {"model": model_sizes(args), "dtype": args.dtype, "weight_dtype": args.weight_dtype}
        config |= {"sampling": SAMPLING[args.mode], "cpu_isa": engine.backend.isa}
        emit({"bench": "step", **line, "config": config, **about})
    emit({"bench": "step", "limits": probe.measured(), **about})


def measure(
    engine: InferenceEngine, args: argparse.Namespace, batch: int, prompt: int, probe: Probe
) -> dict[str, object]:
    """The fields of one line."""
    sizes = model_sizes(args)
    prompts = random_prompts(sizes["vocab"], [prompt] * batch, seed=batch)

    def call(output: int) -> float:
        return timed_call(engine, prompts, args.mode, output)[0]

    call(1 + args.output)  # compiles, and stores the prompts
    work = Work.of(engine.model, sizes, args.dtype, batch, prompt + args.output // 2)
    assert engine.backend.isa is not None, "the C++ kernels compute"
    isa = multiplying_isa(engine.backend.isa, args.dtype)
    times, bounds, computed = [], [], engine.stats()["prefix_misses"]
    for _ in range(args.repeats):
        short = call(1)
        long, bound = probe.around(lambda: call(1 + args.output), work.weights_bytes + work.kv_bytes, work.flops, isa)
        times.append(1e3 * (long - short) / args.output)
        bounds.append(bound)
    computed = engine.stats()["prefix_misses"] - computed
    if computed > 2 * args.repeats * batch:  # the page that holds a prompt's last token is computed in each call
        raise RuntimeError(
            f"{2 * args.repeats} calls computed {computed} pages of prompts; expected at most one page for each of "
            f"{batch} prompts in each call, and the others in the prefix cache; the calls do not time decode steps"
        )
    known = min(times) > 0
    parts = profiled(engine, call, args.output)
    return {
        "batch": batch,
        "context": prompt + args.output // 2,
        **dataclasses.asdict(work),
        "step_ms": summarize(times, 4) if known else None,
        **(share_of_bound(times, bounds) if known else {}),
        "parts_ms": {name: round(ms, 4) for name, ms in sorted(parts.items(), key=lambda item: -item[1])},
        "workload_hash": digest([prompts, args.mode, args.output]),
    }


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes that a decode step has to read, and its floating-point operations."""

    weights_bytes: int
    kv_bytes: int
    flops: int
    """Floating-point operations of the matmuls with weights."""

    @classmethod
    def of(cls, model, sizes: dict[str, int], dtype: str, batch: int, context: int) -> "Work":
        itemsize, layers = jnp.dtype(dtype).itemsize, sizes["layers"]
        count = sum(each * (1 if name == "head" else layers) for name, each in parameters_of(model).items())
        head_dim = sizes["hidden"] // sizes["heads"]
        kv = batch * context * layers * 2 * sizes["kv_heads"] * head_dim * itemsize
        return cls(count * model.head.weight.dtype.itemsize, kv, 2 * batch * count)


def profiled(engine: InferenceEngine, call: Callable[[int], float], steps: int) -> dict[str, float]:
    """Milliseconds of the parts of a decode step: of a call with so many more steps, less one without them.

    Args:
        call: takes the number of generated tokens and returns its seconds.
    """
    named = dict(parts_of(engine.programs.compiled_round.as_text() or ""))
    (short_s, short), (long_s, long) = (_traced(lambda output=output: call(output)) for output in (1, 1 + steps))
    parts_ms: dict[str, float] = collections.defaultdict(float)
    for name in long.keys() & named.keys():
        if len(long[name]) != len(short[name]):  # what both calls run as often, as prompts, would add its noise
            parts_ms[named[name]] += (sum(long[name]) - sum(short[name])) / steps
    return {**parts_ms, BETWEEN: 1e3 * (long_s - short_s) / steps - sum(parts_ms.values())}


def _traced(call: Callable[[], float]) -> tuple[float, dict[str, list[float]]]:
    """The result of a call under the profiler, and the milliseconds of the events in it, by their names. A program runs
    on the threads of XLA's pool, on JAX's own, or on that of the caller."""
    options = ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            seconds = call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        found: dict[str, list[float]] = collections.defaultdict(list)
        for plane in ProfileData.from_file(str(file)).planes:
            for event in (event for line in plane.lines for event in line.events):
                found[event.name].append(event.duration_ns / 1e6)
        return seconds, found


def parts_of(hlo: str) -> Iterator[tuple[str, str]]:
    """Operations of a round's program that compute, and the part that each belongs to."""
    for line in hlo.splitlines():
        operation, path, name = operation_of(line), scopes_of(line), _NAME.match(line)
        if operation is not None and name is not None and operation not in _AROUND:
            in_model = any(scopes.bucket_of(scope) is not None for scope in path)
            yield name[1], _part(line, path, in_model)


def _part(line: str, path: Sequence[str], in_model: bool) -> str:
    target = _TARGET.search(line)
    if target is None:
        known = [each for each in path if each in _SCOPES]
        return f"xla: {known[0] if known else 'model' if in_model else 'round'}"
    if target[1] != "linear":
        return target[1]
    if scopes.SAMPLING in path:
        return "linear: head"
    if "is_gated_pair = true" in line:
        return "linear: mlp"
    return "linear: out" if "has_residual = true" in line else "linear: qkv"


_SCOPES = {
    scopes.SCHEDULE, scopes.COPIES, scopes.SCORING, scopes.SAMPLING, scopes.APPEND, scopes.KV_WRITE, scopes.ATTENTION,
}  # fmt: skip
