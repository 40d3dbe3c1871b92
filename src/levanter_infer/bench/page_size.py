"""Speed and waste over page sizes and batches.

Tokens/s are those of whole calls, with rounds of many steps. Step times need rounds of one step, which cost a launch
and a download each: `one_step_rounds_cost` is what the same call takes then, over what it takes otherwise, if
both gave the same tokens. Speeds of page sizes are not compared here: that needs equal `output_hash`.
"""

import argparse
import itertools
import time

import numpy as np

from levanter_infer.bench.report import add_plot_argument, digest, draw, emit, measured, provenance, summarize
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

PAGE_SIZES = (8, 16, 32, 64, 128, 256)
BATCHES = (8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page-size", type=numbers, default=PAGE_SIZES, help="comma-separated; default 8 … 256")
    parser.add_argument("--batch", type=numbers, default=BATCHES, help="comma-separated; default 8,16,32,64")
    parser.add_argument("--prompt", type=count, default=128, help="mean of the prompts' lengths; default 128")
    parser.add_argument("--output", type=count, default=32, help="generated tokens; default 32")
    parser.add_argument("--repeats", type=count, default=3)
    add_plot_argument(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print one line per page size and batch; the figure shows tokens/s."""
    about = provenance()
    model = random_model(model_sizes(args), args.dtype)
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for batch, page_size in itertools.product(args.batch, args.page_size):
        case = measure(model, args, batch, page_size)
        emit({"bench": "page-size", **case, **about})
        xs, ys = curves.setdefault(f"batch {batch}", ([], []))
        xs.append(page_size)
        ys.append(case["generated_tokens_per_s"]["median"])
    draw(args.plot, curves, title="Generation over page size", x="tokens per page", y="generated tokens/s", log=True)


def measure(model, args: argparse.Namespace, batch: int, page_size: int) -> dict:
    # Lengths are uniform over a page of any size, and the same for every page size.
    lens = np.random.default_rng(batch).integers(args.prompt // 2, args.prompt * 3 // 2 + 1, batch).tolist()
    prompts = random_prompts(model.config.vocab_size, lens, seed=batch)
    sampling = SamplingParams(max_tokens=args.output, temperature=0.0, ignore_eos=True)
    requests = [Request(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts]
    longest = round_up(args.prompt * 3 // 2 + args.output, max(PAGE_SIZES))
    config = EngineConfig(max_seqs=batch, max_seq_len=longest, page_size=page_size, prefix_cache=False)
    engine = InferenceEngine(model, config=config)
    outputs = engine.generate(requests)  # compiles
    whole = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        engine.generate(requests)
        whole.append(time.perf_counter() - start)
    steps = step_by_step(engine, requests)
    return {
        "page_size": page_size,
        "batch": batch,
        "prompt": args.prompt,
        "output": args.output,
        "generated_tokens_per_s": summarize([batch * args.output / seconds for seconds in whole], 1),
        **step_times(steps),
        "one_step_rounds_cost": round(sum(steps["seconds"]) / float(np.median(whole)), 3)
        if steps["token_ids"] == token_ids(outputs)
        else None,
        "wasted_percent": round(100 * (1 - sum(steps["stored"]) / sum(steps["capacity"])), 2),
        "config": {"model": model_sizes(args), "dtype": args.dtype, "engine": engine.describe()},
        "workload_hash": digest([prompts, args.output]),
        "output_hash": digest(token_ids(outputs)),
    }


def step_times(steps: dict[str, list]) -> dict[str, object]:
    """Milliseconds of steps with and without a prompt chunk, from the result of `step_by_step`."""
    of = {False: [], True: []}
    for seconds, prompt_steps in zip(steps["seconds"], steps["prompts"], strict=True):
        of[bool(prompt_steps)].append(seconds * 1e3)
    return {
        **measured(
            decode_tick_ms_p50=round(float(np.percentile(of[False], 50)), 3),
            decode_tick_ms_p95=round(float(np.percentile(of[False], 95)), 3),
            prefill_chunk_ms=round(float(np.median(of[True])), 3),
        ),
        "decode_ticks": len(of[False]),
    }


def step_by_step(engine: InferenceEngine, requests: list[Request]) -> dict[str, list]:
    """Run the requests one step a round.

    Returns: of every step its `seconds`, `prompts` (1 if it computed a prompt chunk, else 0), the `stored` tokens after
        it and the `capacity` of the pages in use; and the `token_ids` of every request.
    """
    found: dict[str, list] = {"seconds": [], "prompts": [], "stored": [], "capacity": []}
    states = [engine.submit(request) for request in requests]
    before = engine.stats()
    while not all(state.is_done for state in states):
        engine.step_round(max_steps=1)
        stats = engine.stats()
        if stats["steps"] > before["steps"]:
            found["seconds"].append(stats["round_s"]["sum"] - before["round_s"]["sum"])
            found["prompts"].append(stats["prompt_steps"] - before["prompt_steps"])
            found["stored"].append(stats["stored_tokens"])
            found["capacity"].append(stats["pages_in_use"] * engine.shapes.page_size)
        before = stats
    engine.drain()
    found["token_ids"] = [sequence.token_ids for state in states for sequence in state.sequences]
    return found
