"""Preemption in pools that are too small: the cost of recomputation against KV offload."""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from levanter_infer.bench.report import digest, emit, measured, provenance, summarize
from levanter_infer.bench.workload import (
    add_model_arguments,
    count,
    model_sizes,
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
from levanter_infer.io.terminal import say

_PAGE = 16
_COUNTED = (
    *("preemptions", "recomputed_tokens", "generated_tokens", "offloaded_pages", "prefetched_pages"),
    *("offload_s", "prefetch_s", "rounds", "steps"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=count, default=8)
    parser.add_argument("--prompt", type=count, default=256, help="prompt tokens of each; default 256")
    parser.add_argument("--output", type=count, default=256, help="generated tokens of each; default 256")
    parser.add_argument("--times", type=numbers, default=(1, 4), help="how many times too small; default 1,4")
    parser.add_argument("--policies", default="recompute,offload")
    parser.add_argument("--prefix-cache", action="store_true", help="with the prefix cache")
    parser.add_argument("--repeats", type=count, default=3)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print one line per policy and size of the pool."""
    about, sizes = provenance(), model_sizes(args)
    model = random_model(sizes, args.dtype)
    prompts = random_prompts(sizes["vocab"], [args.prompt] * args.requests, seed=0)
    sampling = SamplingParams(max_tokens=args.output, temperature=0.0, ignore_eos=True)
    requests = [Request(prompt_token_ids=ids, sampling=sampling) for ids in prompts]
    longest = round_up(args.prompt + args.output + 1, _PAGE)
    for times in args.times:
        sized = EngineConfig(
            max_seqs=args.requests,
            max_seq_len=longest,
            page_size=_PAGE,
            max_pages=max(args.requests * longest // times, longest) // _PAGE,
            prefix_cache=args.prefix_cache,
        )
        configs = [dataclasses.replace(sized, preempt=policy) for policy in args.policies.split(",")]
        engines = [InferenceEngine(model, config=config) for config in configs]
        for line in measure(engines, requests, args.repeats):
            emit({"bench": "preemption", "times": times, **line, "model": sizes, **about})
            if times > 1 and not any(line["per_run"][name] for name in ("preemptions", "offloaded_pages")):
                what = f"times {times}, {line['preempt']}: nothing was preempted, so this line compares nothing"
                say(f"note      {what}; take another --prompt or --output")


def measure(engines: list[InferenceEngine], requests: list[Request], repeats: int) -> Iterator[dict[str, Any]]:
    """A line for each engine; they run in turn, so that a slow moment of the machine hits all."""
    for engine in engines:
        _compile(engine, requests[0])
    before = [engine.stats() for engine in engines]
    runs = [[_timed(engine, requests) for engine in engines] for _ in range(repeats)]
    for i, engine in enumerate(engines):
        after, outputs = engine.stats(), runs[-1][i][1]
        total = sum(len(ids) for ids in outputs)
        per_run = {name: round((after[name] - before[i][name]) / repeats, 4) for name in _COUNTED}
        yield {
            "preempt": engine.config.preempt,
            "generated_tokens_per_s": summarize([total / run[i][0] for run in runs], 1),
            "seconds": summarize([run[i][0] for run in runs], 3),
            "per_run": measured(**per_run),
            "output_hash": digest(outputs),
            "config": {k: v for k, v in engine.describe().items() if k != "device"},
        }


def _timed(engine: InferenceEngine, requests: list[Request]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outputs = token_ids(engine.generate(requests))
    return time.perf_counter() - start, outputs


def _compile(engine: InferenceEngine, request: Request) -> None:
    """Compile every program that a run may need."""
    state = engine.submit(request)
    while not engine.spill_to_host(state.sequences[0]):
        engine.step_round(max_steps=1)
    engine.prefetch(state.sequences[0])
    engine.cancel(state)
    engine.drain()
