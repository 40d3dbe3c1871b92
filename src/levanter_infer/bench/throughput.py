"""Prefill and decode rates of a random model of given shape, greedy and sampled.

Prefill is timed as the whole call that samples one token per prompt, decode as the difference to the call that
samples `output` more: null where that difference is lost in the noise, as it is for few output tokens. Both calls of
every mode run in turn, so that a slow moment of the machine hits all.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from levanter_infer.bench.instruction_sets import add_isa_argument, chosen_isa, compared, isas_in_turn
from levanter_infer.bench.report import digest, emit, provenance, summarize
from levanter_infer.bench.workload import (
    SAMPLING,
    add_model_arguments,
    add_weight_dtype,
    count,
    model_sizes,
    names,
    numbers,
    random_model,
    random_prompts,
    round_up,
    token_ids,
)
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=numbers, default=(1, 8, 32), help="comma-separated; default 1,8,32")
    parser.add_argument("--prompt", type=numbers, default=(128,), help="prompt tokens, comma-separated; default 128")
    parser.add_argument("--output", type=numbers, default=(64,), help="generated tokens, comma-separated; default 64")
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--modes", type=names(SAMPLING), default="greedy,sampled", help=f"of {', '.join(SAMPLING)}")
    parser.add_argument("--attention", default="auto", help="engine.attention; default auto")
    parser.add_argument("--matmul", default="auto", help="engine.matmul; default auto")
    add_isa_argument(parser)
    add_weight_dtype(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print one line per batch, prompt, output and mode."""
    about = provenance()
    model = random_model(model_sizes(args), args.dtype)
    isas = isas_in_turn(args.cpu_isa, args.dtype)
    chosen = "" if isas is None else chosen_isa(model, isas)
    for batch, prompt, output in itertools.product(args.batch, args.prompt, args.output):
        longest = round_up(prompt + output + 1, 16)

        def engine(cpu_isa: str, batch=batch, longest=longest) -> InferenceEngine:
            kernels = dict(attention=args.attention, matmul=args.matmul, cpu_isa=cpu_isa)
            sizes = dict(max_seqs=batch, max_seq_len=longest)
            config = EngineConfig(prefix_cache=False, weight_dtype=args.weight_dtype, **sizes, **kernels)
            return InferenceEngine(model, config=config)

        if isas is None:
            lines = measure(engine(args.cpu_isa), args, batch, prompt, output)
        else:
            lines = compare({isa: engine(isa) for isa in isas}, args, batch, prompt, output, chosen)
        for line in lines:
            emit({"bench": "throughput", **line, **about})


Timed = Callable[[str, int], tuple[float, list[list[int]]]]
"""Seconds of a call, and its tokens, by mode and `max_tokens`."""


def timed_call(engine: InferenceEngine, prompts: Sequence[list[int]], mode: str, max_tokens: int):
    """`Timed` of an engine and prompts."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0, **SAMPLING[mode])
    requests = [Request(prompt_token_ids=ids, sampling=sampling) for ids in prompts]
    start = time.perf_counter()
    outputs = engine.generate(requests)
    return time.perf_counter() - start, token_ids(outputs)


def compare(
    engines: Mapping[str, InferenceEngine], args, batch: int, prompt: int, output: int, chosen: str
) -> list[dict[str, object]]:
    """A line for each mode: engines with different instruction sets, measured in turn."""
    sizes = model_sizes(args)
    prompts = random_prompts(sizes["vocab"], [prompt] * batch, seed=batch)
    timed: dict[str, Timed] = {isa: functools.partial(timed_call, engine, prompts) for isa, engine in engines.items()}
    lines: list[dict[str, object]] = []
    for mode in args.modes:
        for call in timed.values():
            call(mode, 1 + output)  # compiles
        short: dict[str, list[float]] = {isa: [] for isa in engines}
        steps: dict[str, list[float]] = {isa: [] for isa in engines}
        for _ in range(args.repeats):
            for isa, call in timed.items():
                short[isa].append(call(mode, 1)[0])
                steps[isa].append(1e3 * (call(mode, 1 + output)[0] - short[isa][-1]) / output)
        known = min(min(each) for each in steps.values()) > 0
        lines.append(
            {
                "mode": mode,
                "batch": batch,
                "prompt": prompt,
                "output": output,
                "prefill_s": compared(short, chosen),
                "decode_step_ms": compared(steps, chosen) if known else None,
                "config": {
                    "model": sizes,
                    "dtype": args.dtype,
                    "weight_dtype": args.weight_dtype,
                    "sampling": SAMPLING[mode],
                },
                "workload_hash": digest([prompts, mode, output]),
            }
        )
    return lines


def measure(engine: InferenceEngine, args, batch: int, prompt: int, output: int) -> list[dict[str, object]]:
    """A line for each mode."""
    sizes, modes = model_sizes(args), args.modes
    prompts = random_prompts(sizes["vocab"], [prompt] * batch, seed=batch)
    timed = functools.partial(timed_call, engine, prompts)

    seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    sampled = {mode: timed(mode, 1 + output)[1] for mode in modes}  # compiles
    for _ in range(args.repeats):
        for mode in modes:
            seconds[mode].append((timed(mode, 1)[0], timed(mode, 1 + output)[0]))
    return [
        {
            "mode": mode,
            "batch": batch,
            "prompt": prompt,
            "output": output,
            "prefill_tokens_per_s": summarize([batch * prompt / short for short, _ in seconds[mode]], 1),
            **decoding(seconds[mode], batch, output),
            "generated_tokens_per_s": summarize([batch * (1 + output) / long for _, long in seconds[mode]], 1),
            "config": {
                "model": sizes,
                "dtype": args.dtype,
                "sampling": SAMPLING[mode],
                "engine": {k: v for k, v in engine.describe().items() if k != "device"},
            },
            "workload_hash": digest([prompts, mode, output]),
            "output_hash": digest(sampled[mode]),
            "compilations": engine.stats()["compilations"],
        }
        for mode in modes
    ]


def decoding(seconds: list[tuple[float, float]], batch: int, output: int) -> dict[str, object]:
    """Rates of the difference between the longer and the shorter calls."""
    more = [long - short for short, long in seconds]
    known = min(more) > 0
    return {
        "decode_tokens_per_s": summarize([batch * output / s for s in more], 1) if known else None,
        "decode_step_ms": summarize([1e3 * s / output for s in more], 3) if known else None,
    }
