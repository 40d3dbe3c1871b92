"""Pools that are too small: what turns cost, where pages are computed again or move to the host and back."""

import argparse
import time

from levanter_infer.bench.report import digest, emit, measured, provenance, spread
from levanter_infer.bench.workload import (
    add_model_arguments,
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

_PAGE = 16
_COUNTED = (
    *("preemptions", "recomputed_tokens", "generated_tokens", "spilled_pages", "prefetched_pages"),
    *("spill_s", "prefetch_s", "rounds", "steps"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens of each; default 512")
    parser.add_argument("--output", type=int, default=256, help="generated tokens of each; default 256")
    parser.add_argument("--times", type=numbers, default=(1, 4), help="how many times too small; default 1,4")
    parser.add_argument("--policies", default="recompute,spill")
    parser.add_argument("--repeats", type=int, default=3)
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
        for policy in args.policies.split(","):
            config = EngineConfig(
                max_seqs=args.requests,
                max_seq_len=longest,
                page_size=_PAGE,
                max_pages=max(args.requests * longest // times, longest) // _PAGE,
                preempt=policy,
            )
            line = measure(InferenceEngine(model, config=config), requests, args.repeats)
            emit({"bench": "preemption", "preempt": policy, "times": times, **line, "model": sizes, **about})


def measure(engine: InferenceEngine, requests: list[Request], repeats: int) -> dict[str, object]:
    _compile(engine, requests[0])
    seconds, outputs, before = [], [], engine.stats()
    for _ in range(repeats):
        start = time.perf_counter()
        outputs = token_ids(engine.generate(requests))
        seconds.append(time.perf_counter() - start)
    after = engine.stats()
    total = sum(len(ids) for ids in outputs)
    per_run = {name: round((after[name] - before[name]) / repeats, 4) for name in _COUNTED}
    return {
        "generated_tokens_per_s": spread([total / s for s in seconds], 1),
        "seconds": spread(seconds, 3),
        "per_run": measured(**per_run),
        "output_hash": digest(outputs),
        "config": {k: v for k, v in engine.describe().items() if k != "device"},
    }


def _compile(engine: InferenceEngine, request: Request) -> None:
    """Every program that a run may need."""
    group = engine.submit(request)
    while not engine.spill_to_host(group.sequences[0]):
        engine.step_round(max_steps=1)
    engine.prefetch(group.sequences[0])
    engine.cancel(group)
    engine.drain()
