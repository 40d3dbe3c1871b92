"""Prefill and decode rates of a random model of given shape, greedy and sampled.

Prefill is timed as the whole call that samples one token per prompt, decode as the difference to the call that
samples `output` more; the two are run in turn, so that a slow moment of the machine hits both.
"""

import argparse
import itertools
import time

from levanter_infer.bench.report import digest, emit, provenance, spread
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
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=numbers, default=(1, 8, 32), help="comma-separated; default 1,8,32")
    parser.add_argument("--prompt", type=numbers, default=(128,), help="prompt tokens, comma-separated; default 128")
    parser.add_argument("--output", type=numbers, default=(64,), help="generated tokens, comma-separated; default 64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--modes", default="greedy,sampled", help=f"of {', '.join(SAMPLING)}")
    parser.add_argument("--attention", default="auto", help="engine.attention; default auto")
    parser.add_argument("--products", default="auto", help="engine.products; default auto")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print one line per batch, prompt, output and mode."""
    about = provenance()
    model = random_model(model_sizes(args), args.dtype)
    for batch, prompt, output in itertools.product(args.batch, args.prompt, args.output):
        longest = round_up(prompt + output + 1, 16)
        kernels = dict(attention=args.attention, products=args.products)
        engine = InferenceEngine(model, config=EngineConfig(max_seqs=batch, max_seq_len=longest, **kernels))
        for mode in args.modes.split(","):
            emit({"bench": "throughput", **measure(engine, args, batch, prompt, output, mode), **about})


def measure(engine: InferenceEngine, args, batch: int, prompt: int, output: int, mode: str) -> dict[str, object]:
    sizes = model_sizes(args)
    prompts = random_prompts(sizes["vocab"], [prompt] * batch, seed=batch)

    def requests(max_tokens: int) -> list[Request]:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0, **SAMPLING[mode])
        return [Request(prompt_token_ids=ids, sampling=sampling) for ids in prompts]

    def timed(max_tokens: int):
        start = time.perf_counter()
        outputs = engine.generate(requests(max_tokens))
        return time.perf_counter() - start, outputs

    timed(1 + output)  # compiles
    prefill, decode, whole, outputs = [], [], [], []
    for _ in range(args.repeats):
        short, _ = timed(1)
        long, outputs = timed(1 + output)
        prefill.append(batch * prompt / short)
        decode.append(batch * output / max(long - short, 1e-9))
        whole.append(batch * (1 + output) / long)
    return {
        "mode": mode,
        "batch": batch,
        "prompt": prompt,
        "output": output,
        "prefill_tokens_per_s": spread(prefill, 1),
        "decode_tokens_per_s": spread(decode, 1),
        "generated_tokens_per_s": spread(whole, 1),
        "config": {
            "model": sizes,
            "dtype": args.dtype,
            "sampling": SAMPLING[mode],
            "engine": {k: v for k, v in engine.describe().items() if k != "device"},
        },
        "workload_hash": digest([prompts, mode, output]),
        "output_hash": digest([c.token_ids for o in outputs for c in o.completions]),
        "compilations": engine.stats()["compilations"],
    }
